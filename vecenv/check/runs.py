"""Runs of a check: one watched with random actions, then replays that must give the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.check.rules import Findings, Frame, GiveUpError, Watch
from vecenv.core.base import VecEnv
from vecenv.core.errors import ActionMaskError
from vecenv.core.masks import RandomActions
from vecenv.core.spaces import is_same, merge_rows, short, take_row, take_rows

__all__ = ["MASK_RULE", "Runs"]

MASK_RULE = "action masks fit the action space, and allow an action while an episode goes on"
_NUM_RESETS = 8  # with different seeds, to see whether starts vary

StepFunction = Callable[[Any], tuple[Any, ...]]


class Runs:
    """Runs of one vector env with one seed and the same random actions.

    Args:
        envs: The vector env.
        mode: Its autoreset mode, None if unknown.
        num_steps: Length of a run.
        seed: Seed of resets and actions.
        found: Collects the findings.

    Attributes:
        actions: Actions of each step; the watched run draws actions that masks allow.
        frames: Results of the watched run: the reset, then each step. Empty if it was cut short.
        is_repeatable: Whether the same seed repeated the watched run.
    """

    def __init__(
        self,
        envs: VectorEnv,
        mode: AutoresetMode | None,
        num_steps: int,
        *,
        seed: int,
        found: Findings,
    ) -> None:
        self._envs = envs
        self._mode = mode
        self._seed = seed
        self._found = found
        self._obs_space = envs.single_observation_space
        action_space = deepcopy(envs.action_space)  # sampling must not change the caller's
        action_space.seed(seed)
        self.actions = [action_space.sample() for _ in range(num_steps)]
        self._others = [action_space.sample() for _ in range(num_steps)]
        self._allowed = RandomActions(envs, seed)
        self._starts: list[Any] = [None] * envs.num_envs
        self.frames: list[Frame] = []
        self.is_repeatable = False

    def check_first_reset(self) -> None:
        """Check the results of a reset; all other checks depend on it."""
        watch = Watch(self._envs, self._mode, self._starts, self._found)
        watch.saw_reset(self._envs.reset(seed=self._seed))

    def check_starts(self) -> None:
        """Find envs that always start alike; require that the others differ from each other."""
        envs, found = self._envs, self._found
        rule = "envs are seeded differently"
        seeds = range(self._seed, self._seed + 1000 * _NUM_RESETS, 1000)
        batches = [deepcopy(envs.reset(seed=seed)[0]) for seed in seeds]
        rows = [[take_row(self._obs_space, b, i) for i in range(envs.num_envs)] for b in batches]
        for i, first in enumerate(rows[0]):
            if all(is_same(row[i], first) for row in rows):
                self._starts[i] = first
        if envs.num_envs == 1:
            found.skipped[rule] = "there is one env"
        elif self._starts[0] is not None:
            found.skipped[rule] = "starts don't depend on the seed"
        else:
            found.require(
                rule,
                any(not is_same(one, row[0]) for row in rows for one in row),
                "all envs start alike after each of {num} resets with different seeds, for example "
                "with {start}; seed env i with seed + i",
                num=_NUM_RESETS, start=rows[0][0],
            )  # fmt: skip

    def check_run(self) -> None:
        """Step with random actions and check every result."""
        watch = Watch(self._envs, self._mode, self._starts, self._found)
        self.frames = self._roll(self._envs.step, watch=watch)
        watch.finish()
        if watch.num_ends == 0:
            why = f"no episode ended in {len(self.actions)} steps; raise num_steps"
            self._found.skipped["rules about the end of an episode"] = why

    def _roll(
        self, step: StepFunction, *, watch: Watch | None = None, vary_dead_actions: bool = False
    ) -> list[Frame]:
        """Reset, do all steps, and return copies of the results."""
        result = self._envs.reset(seed=self._seed)
        self._found.where = "reset"
        if watch:
            watch.saw_reset(result)
            self._see(result)
        frames = [Frame(deepcopy(result[0]))]
        over = np.zeros(self._envs.num_envs, dtype=np.bool_)
        for k, actions in enumerate(self.actions):
            self._found.where = f"step {k}"
            if watch and self._allowed.are_masked:
                actions = self.actions[k] = self.allowed_now()
            if vary_dead_actions:
                space = self._envs.single_action_space
                actions = merge_rows(space, actions, self._others[k], over)
            result = step(actions)
            if watch:
                watch.saw_step(result)
                self._see(result)
            over = np.logical_or(result[2], result[3])
            frame = Frame(*deepcopy(result[:4]))
            if self._mode is AutoresetMode.DISABLED and over.any():
                restarted = self.check_restart(over, frame.observations, watch)
                frame = frame._replace(restarted=restarted)
            frames.append(frame)
        return frames

    def allowed_now(self) -> Any:
        """Return actions that masks allow after the latest call; without masks, those of step 0."""
        if not self._allowed.are_masked:
            return self.actions[0]
        envs: Any = self._envs.unwrapped
        try:  # an arbitrary action might make the env raise
            if isinstance(envs, VecEnv) and envs.has_action_masks:
                envs.action_masks()
        except ActionMaskError as error:
            self._found.require(MASK_RULE, False, "{told}", told=str(error))
            raise GiveUpError from None
        return self._allowed()

    def _see(self, result: tuple[Any, ...]) -> None:
        """Note the masks in the results of a reset or a step."""
        with contextlib.suppress(Exception):  # the check reports wrong results elsewhere
            self._allowed.see(result[0], result[-1])

    def check_restart(self, mask: np.ndarray, before: Any, watch: Watch | None = None) -> Any:
        """Reset the envs of `mask`; the others' observations must stay equal to `before`.

        Returns:
            A copy of the observations returned.
        """
        options: dict[str, Any] = {"reset_mask": mask.copy()}
        result = self._envs.reset(options=options)
        if watch:
            watch.saw_reset(result)
            self._see(result)
        self._found.where += f", partial reset of envs {short(np.flatnonzero(mask))}"
        if not mask.all():
            unmasked = Frame(merge_rows(self._obs_space, result[0], before, mask))
            rule = "a partial reset leaves the other envs alone"
            self.require_same(rule, Frame(before), unmasked, "before")
        for i in np.flatnonzero(mask).tolist():
            start, came = self._starts[i], take_row(self._obs_space, result[0], i)
            if start is not None:
                rule = "a partial reset resets the envs of its mask"
                message = "env {i} is at {came}, after every other reset it was at {start}"
                values = {"i": i, "came": came, "start": start}
                self._found.require(rule, is_same(came, start), message, **values)
        if not is_same(options, {"reset_mask": mask}):
            self._found.remarks["reset changes the options passed to it"] = None
        return deepcopy(result[0])

    def check_partial_reset(self) -> None:
        """Reset env 0 in the middle of its episode."""
        before = deepcopy(self._envs.reset(seed=self._seed)[0])
        self.check_restart(np.arange(self._envs.num_envs) == 0, before)
        if self._envs.num_envs == 1:
            self._found.skipped["a partial reset leaves the other envs alone"] = "there is one env"

    def check_repetition(self) -> None:
        """Require that the watched run can be repeated; otherwise replays prove nothing."""
        rule = "the same seed gives the same run"
        self.check_replay(rule, self._envs.step)
        self.is_repeatable = rule not in self._found.failures

    def check_replay(
        self, rule: str, step: StepFunction, *, vary_dead_actions: bool = False
    ) -> None:
        """Require that `step` repeats the watched run."""
        frames = self._roll(step, vary_dead_actions=vary_dead_actions)
        for k, (first, second) in enumerate(zip(self.frames, frames, strict=True)):
            self._found.where = f"step {k - 1}" if k else "reset"
            if not self.require_same(rule, first, second):
                return

    def check_dead_actions(self) -> None:
        """NEXT_STEP: require that the actions for steps after ends have no effect."""
        has_ends = any((f.terminations | f.truncations).any() for f in self.frames[1:-1])
        if self._mode is AutoresetMode.NEXT_STEP and has_ends:
            rule = "NEXT_STEP: the step after an end ignores its action"
            self.check_replay(rule, self._envs.step, vary_dead_actions=True)

    def require_same(
        self, rule: str, first: Frame, second: Frame, when: str = "in the first run"
    ) -> bool:
        """Require that two frames are equal; otherwise name the field and the env.

        Args:
            rule: The rule that holds if they are equal.
            first: The earlier frame, of the time `when`.
            second: The later frame.
            when: Text for the message.
        """
        for name, a, b in zip(Frame._fields, first, second, strict=True):
            if is_same(a, b):
                continue
            who = "all envs"
            is_nested = name in ("observations", "restarted")
            for i in range(self._envs.num_envs):
                rows = [take_row(self._obs_space, x, i) if is_nested else x[i] for x in (a, b)]
                if not is_same(*rows):
                    who, a, b = f"env {i}", *rows
                    break
            message = "{name} of {who} were {a} {when} and are {b} now"
            return self._found.require(
                rule, False, message, name=name, who=who, a=a, b=b, when=when
            )
        return self._found.require(rule, True, "")

    def check_wrong_counts(self, expected: type[Exception]) -> None:
        """Require errors for too few and too many actions; this may ruin the vector env."""
        envs, space = self._envs, self._envs.single_action_space
        envs.reset(seed=self._seed)
        counts = {0: []}
        # Gymnasium's AsyncVectorEnv sends actions before it counts them, and then can't be closed.
        if expected is not Exception or not hasattr(envs.unwrapped, "step_async"):
            counts[envs.num_envs + 1] = [*range(envs.num_envs), 0]
        for count, indices in counts.items():
            actions = take_rows(space, self.actions[0], indices)
            self._found.where = f"step with {count} actions for {envs.num_envs} envs"
            rule = "actions of wrong number are refused"
            self._found.require_raises(rule, expected, envs.step, actions)
