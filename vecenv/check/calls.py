"""Checks of the methods that `VecEnv` adds to Gymnasium's interface."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
    ResetNeeded,
)
from gymnasium.vector import AutoresetMode

from vecenv.check.rules import Findings, Frame
from vecenv.check.runs import MASK_RULE, Runs
from vecenv.core.base import StepBatch, StepSlot, VecEnv
from vecenv.core.errors import ActionError, ActionMaskError
from vecenv.core.masks import MASK_KEY, RandomActions, mask_width, sample_actions
from vecenv.core.rows import ObservationRows
from vecenv.core.spaces import ARRAY_SPACES, is_same, merge_rows, stack_rows, take_row, take_rows

__all__ = ["CallChecks", "check_before_reset", "check_closed"]


class CallChecks:
    """Checks of a `VecEnv`: seeds, partial resets, send and recv, out=, masks, the order of calls.

    Args:
        envs: The vector env.
        runs: Its runs, after the watched one.
        seed: Seed of the resets.
        found: Collects the findings.
    """

    def __init__(self, envs: VecEnv, runs: Runs, seed: int, found: Findings) -> None:
        self._envs = envs
        self._runs = runs
        self._seed = seed
        self._found = found
        self._rng = np.random.default_rng(seed)

    def check_all(self) -> None:
        """Do all checks that need an open vector env after a reset."""
        parts = {"order of calls": self._check_pending, "wrong actions": self._check_wrong_actions}
        if self._runs.is_repeatable:
            parts["seeds"] = self._check_seeds
            parts["partial reset"] = self._check_partial_reset
            rule = "send and recv give what step gives"
            parts[rule] = partial(self._runs.check_replay, rule, self._step_in_parts)
            parts["out="] = self._check_out
        if self._envs.has_action_masks:
            parts["action masks"] = self._check_masks
        for what, part in parts.items():
            self._found.attempt(what, part)

    def _check_seeds(self) -> None:
        seeds = [self._seed + i for i in range(self._envs.num_envs)]
        self._found.where = f"reset(seed={seeds})"
        rule = "reset(seed=s) gives what reset(seed=[s, s + 1, ...]) gives"
        listed = Frame(self._envs.reset(seed=seeds)[0])
        self._runs.require_same(rule, self._runs.frames[0], listed)

    def _check_partial_reset(self) -> None:
        """Require that a reset of env 0 alone does not change the others."""
        envs, space = self._envs, self._envs.single_observation_space
        self._runs.check_partial_reset()
        self._found.require(
            "a partial reset leaves the caller's options alone",
            "reset changes the options passed to it" not in self._found.remarks,
            "options['reset_mask'] was removed or changed; copy the dict",
        )
        others = range(1, envs.num_envs)
        # Env 0 may now begin where the masks forbid its action of the first run.
        own, is_own = self._runs.allowed_now(), np.arange(envs.num_envs) == 0
        actions = merge_rows(envs.single_action_space, self._runs.actions[0], own, is_own)
        first, second = (
            Frame(take_rows(space, result[0], others), *(array[1:] for array in result[1:4]))
            for result in (self._runs.frames[1], envs.step(actions))
        )
        self._found.require(
            "envs go on as before when another is reset",
            is_same(first, second),
            "the next step of the others gives {second}, without the reset of env 0 it was {first}",
            first=first[:-1], second=second[:-1],
        )  # fmt: skip

    def _step_in_parts(self, actions: Any) -> tuple[Any, ...]:
        """Step all envs by several sends in random order; return the rows in env order."""
        envs, rng = self._envs, self._rng
        order = rng.permutation(envs.num_envs)
        for ids in np.split(order, np.sort(rng.integers(0, envs.num_envs + 1, size=2))):
            if len(ids):
                envs.send(take_rows(envs.single_action_space, actions, ids.tolist()), ids)
        rows: dict[int, tuple[StepBatch, int]] = {}
        while len(rows) < envs.num_envs:
            least = int(rng.integers(1, envs.num_envs - len(rows) + 1))
            most = int(rng.integers(least, envs.num_envs + 1))
            batch = envs.recv(min_envs=least, max_envs=most)
            self._found.require(
                "recv returns min_envs to max_envs envs",
                least <= len(batch.env_ids) <= most,
                "recv(min_envs={least}, max_envs={most}) returned {count} envs",
                least=least, most=most, count=len(batch.env_ids),
            )  # fmt: skip
            rows.update({int(i): (batch, row) for row, i in enumerate(batch.env_ids)})
        found = [rows[i] for i in range(envs.num_envs)]
        space = envs.single_observation_space
        obs = stack_rows(space, [take_row(space, b.obs, row) for b, row in found])
        fields = ("rewards", "terminations", "truncations")
        arrays = [np.stack([getattr(b, name)[row] for b, row in found]) for name in fields]
        return (obs, *arrays)

    def _check_out(self) -> None:
        envs = self._envs
        rule = "step(out=) returns the caller's arrays, with what step returns"
        rows = ObservationRows(envs.single_observation_space, envs.num_envs, envs.allocate)
        obs = rows.batch()
        if not rows.is_fixed:
            self._found.skipped[rule] = "observations have no fixed shape"
            return
        terminations, truncations = (envs.allocate((envs.num_envs,), np.bool_) for _ in range(2))
        rewards = envs.allocate((envs.num_envs,), np.float64)
        slot = StepSlot(obs, rewards, terminations, truncations)

        def step(actions: Any) -> tuple[Any, ...]:
            result = envs.step(actions, out=slot)
            is_slot = all(came is own for came, own in zip(result[:4], slot, strict=True))
            self._found.require(rule, is_slot, "other arrays than out's were returned")
            return slot

        self._runs.check_replay(rule, step)

    def _check_masks(self) -> None:
        """Step with random actions that the masks allow, by `step` and by sends."""
        stepped = self._masks_of_run(self._envs.step)
        if not self._runs.is_repeatable:
            return
        sent = self._masks_of_run(self._step_in_parts)
        for k, (first, second) in enumerate(zip(stepped, sent, strict=False)):
            self._found.where = f"step {k - 1}" if k else "reset"
            self._found.require(
                "action masks after send and recv are those after step",
                is_same(first, second),
                "action_masks returned {second}, in the run with step {first}",
                first=first, second=second,
            )  # fmt: skip

    def _masks_of_run(self, step: Callable[[Any], Any]) -> list[np.ndarray]:
        """Return the masks after the reset and every step; stop the run at a wrong mask."""
        envs, found, rng = self._envs, self._found, np.random.default_rng(self._seed)
        shape = (envs.num_envs, mask_width(envs.single_action_space))
        infos = envs.reset(seed=self._seed)[1]
        over = np.zeros(envs.num_envs, np.bool_)
        kept: list[np.ndarray] = []
        for k in range(len(self._runs.actions)):
            found.where = f"step {k - 1}" if k else "reset"
            try:
                masks, told = envs.action_masks(), ""
            except ActionMaskError as error:
                masks, told = np.zeros(0), str(error)
            if not found.require(MASK_RULE, not told, "{told}", told=told):
                return kept
            is_right = masks.shape == shape and masks.dtype == np.int8 and set(masks.flat) <= {0, 1}
            rule = "action_masks returns int8 0 and 1, a row per env"
            message = "it returned {masks} of dtype {dtype} and shape {came}, expected {shape}"
            values = {"dtype": str(masks.dtype), "came": masks.shape, "shape": shape}
            if not found.require(rule, is_right, message, masks=masks, **values):
                return kept
            self._compare_infos(infos, masks, over)
            kept.append(masks)
            result = step(sample_actions(envs.single_action_space, masks, rng))
            over = np.logical_or(result[2], result[3])
            infos = result[4] if len(result) > 4 else {}
            if envs.autoreset_mode is AutoresetMode.DISABLED and over.any():
                envs.reset(options={"reset_mask": over})
                infos = {}
            over &= envs.autoreset_mode is not AutoresetMode.SAME_STEP
        return kept

    def _compare_infos(self, infos: dict[str, Any], masks: np.ndarray, over: np.ndarray) -> None:
        """Require that masks in infos equal those from `action_masks`."""
        given = infos.get(MASK_KEY)
        if not isinstance(given, np.ndarray) or given.shape != masks.shape:
            return  # for example a tuple per env, which `action_masks` has read
        rows = np.asarray(infos[f"_{MASK_KEY}"]) & ~over  # rows that have a mask
        self._found.require(
            "infos['action_mask'] is what action_masks returns",
            np.array_equal(given[rows], masks[rows]),
            "the infos have {given}, action_masks returned {masks}",
            given=given, masks=masks,
        )  # fmt: skip

    def _check_pending(self) -> None:
        envs, require_raises = self._envs, self._found.require_raises
        envs.reset(seed=self._seed)
        actions = self._runs.allowed_now()
        require_raises("recv without send raises NoAsyncCallError", NoAsyncCallError, envs.recv)
        envs.send(take_rows(envs.single_action_space, actions, [0]), [0])
        rule = "calls while envs are in flight raise AlreadyPendingCallError"
        for call in (envs.step, envs.send):
            require_raises(rule, AlreadyPendingCallError, call, actions)
        envs.recv()

    def _check_wrong_actions(self) -> None:
        envs, actions = self._envs, self._runs.actions[0]
        self._runs.check_wrong_counts(ActionError)
        if isinstance(envs.single_action_space, ARRAY_SPACES):
            wrong = np.asarray(actions)[..., None]
            self._found.where = f"step with actions of shape {wrong.shape}"
            rule = "actions of wrong shape are refused"
            self._found.require_raises(rule, ActionError, envs.step, wrong)
        if self._runs.is_repeatable:
            self._found.where = "the step after refused actions"
            first = self._runs.frames[1]._replace(restarted=None)
            frame = Frame(*envs.step(actions)[:4])
            self._runs.require_same("refused actions step nothing", first, frame)


def check_before_reset(envs: VecEnv, found: Findings) -> None:
    """Check a vector env that may not have been reset yet."""
    rule = "step before the first reset raises ResetNeeded"
    try:
        with warnings.catch_warnings():  # Gymnasium logs the errors of envs as warnings
            warnings.simplefilter("ignore")
            envs.step(RandomActions(envs)())
    except ResetNeeded:
        found.require(rule, True, "")
    except Exception as error:
        came = f"{type(error).__name__}: {error}"
        found.require(rule, False, "the error was {came}; refuse the step", came=came)
    else:
        found.skipped[rule] = "the vector env has been reset before"


def check_closed(envs: VecEnv, found: Findings) -> None:
    """Check a vector env that has been closed."""
    actions = envs.action_space.sample()
    rule = "calls after close raise ClosedEnvironmentError"
    for call, args in ((envs.step, (actions,)), (envs.send, (actions,))):
        found.require_raises(rule, ClosedEnvironmentError, call, *args)
    for call in (envs.reset, envs.recv):
        found.require_raises(rule, ClosedEnvironmentError, call)
