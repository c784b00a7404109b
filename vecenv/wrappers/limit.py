"""TimeLimit: truncate episodes of any vector env, and reset the envs as their mode demands."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode

from vecenv.adapters import split_infos
from vecenv.core.arguments import read_count
from vecenv.core.base import StepBatch, StepResult, VecEnv
from vecenv.core.infos import add_info
from vecenv.core.protocol import CallProtocol
from vecenv.core.rows import ObservationRows, slot_rows
from vecenv.core.seeding import Seed
from vecenv.core.spaces import join_rows, leaves, take_row, take_rows
from vecenv.wrappers.base import EVERY, VecWrapper

__all__ = ["TimeLimit"]


class _Held(NamedTuple):
    """A row that a reset has made and `recv` has not returned."""

    env_id: int
    obs: Any  # in a batch of all envs
    info: dict[str, Any]


class TimeLimit(VecWrapper):
    """Truncates episodes after a number of steps.

    The envs do not know that their episodes are over. Under NEXT_STEP the wrapper resets them, by
    mask, instead of their next step; under SAME_STEP in the same step, and their last observation
    becomes `infos["final_obs"]`. With autoreset disabled it refuses to step them before they are
    reset. Limits inside the envs cost less: `make_vec(..., max_episode_steps=)`,
    `JitVectorEnv(max_episode_steps=)`.

    Args:
        env: The vector env; not one with rows of agents, whose games end as a whole.
        max_episode_steps: Number of steps of an episode, at least 1.

    Raises:
        TypeError: The rows are agents.
        ValueError: `max_episode_steps` is not an integer of at least 1.
    """

    follows_episodes = True

    def __init__(self, env: VecEnv, max_episode_steps: int) -> None:
        name = type(self).__name__
        self._limit = read_count(f"{name}: max_episode_steps", max_episode_steps)
        super().__init__(env)
        if self._has_agents:
            raise TypeError(
                f"{name} can't end games for their agents; give the games a limit of their own "
                "(make_vec_agents(..., max_episode_steps=))"
            )
        self._elapsed = np.zeros(self.num_envs, np.int64)
        self._is_cut = np.zeros(self.num_envs, np.bool_)  # truncated here and not reset since
        self._held: deque[_Held] = deque()
        self._calls = CallProtocol(self.num_envs)
        self._own = ObservationRows(self.single_observation_space, self.num_envs)

    @property
    def max_episode_steps(self) -> int:
        """Steps of an episode."""
        return self._limit

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those of `options["reset_mask"]`; see `VecEnv.reset`."""
        mask = None if options is None else options.get("reset_mask")
        if isinstance(mask, np.ndarray) and mask.shape == (self.num_envs,):
            held = np.isin(np.arange(self.num_envs), [one.env_id for one in self._held])
            if mask.dtype == np.bool_ and (mask & held).any() and not mask.all():
                self._calls.begin_reset(mask)  # raises, as they are in flight
        result = super().reset(seed=seed, options=options)
        rows = self._reset_rows(options)
        self._elapsed[rows], self._is_cut[rows] = 0, False
        if rows.all():
            self._held.clear()
            self._calls.in_flight[:] = False
            self._calls.num_in_flight = 0
        self._calls.mark_reset()
        return result

    def reopen(self, rows: Any, factories: Any) -> None:
        """Close the envs of some rows and make new ones there, see `VecEnv.reopen`."""
        self._calls.require_idle("reopen")  # `env` alone would allow it for envs held here
        super().reopen(rows, factories)

    def step(self, actions: Any, *, out: Any = None) -> StepResult:
        """Step every env once; see `VecEnv.step`."""
        if self._fault is not None:
            self._refuse_fault("step")
        if not self._is_cut.any():
            try:
                result = self._step_env(actions, out)
            except BaseException:
                self._out = out
                raise
        else:
            self._note_closed()
            self._calls.require_ready("step")
            self._refuse_ended(EVERY)
            checked = self._checked(actions, out)
            try:
                result = self._step_some(checked, out)
            except BaseException as error:
                self._fault = error
                raise
        return self._finish_step(result, out)

    def _changed(
        self, result: StepResult, rows: Any, valid: np.ndarray | None, out: Any
    ) -> StepResult:
        """Return the results of a step of all envs, changed."""
        obs, rewards, terminations, truncations, infos = result
        cut = self._count(EVERY, terminations, truncations)
        if len(cut) and self.autoreset_mode is AutoresetMode.SAME_STEP:
            obs, infos = self._reset_now(cut, cut, obs, infos, self.num_envs)
            if out is not None:
                _put(self.single_observation_space, obs, out.obs)
                obs = out.obs
        return obs, rewards, terminations, truncations, infos

    def _step_env(self, actions: Any, out: Any) -> StepResult:
        if out is None:
            return self.env.step(actions)
        self._check_slot_mode(out)
        return self.env.step(actions, out=out)

    def _refuse_ended(self, rows: Any) -> None:
        if self.autoreset_mode is AutoresetMode.DISABLED and self._is_cut[rows].any():
            stuck = np.arange(self.num_envs)[rows][self._is_cut[rows]].tolist()
            raise ResetNeeded(
                f"The episodes of envs {stuck} have reached their limit of {self._limit} steps and "
                "autoreset is disabled; reset them with reset(options={'reset_mask': mask}) before "
                "the next step. Nothing was stepped."
            )

    def _checked(self, actions: Any, out: Any) -> Any:
        """Return checked actions, before any env is reset or stepped; check `out` too."""
        checked = self._actions.check(actions)
        if out is not None:
            self._check_slot_mode(out)
            slot_rows(out, self._own, self.num_envs)  # raises if it can't be used
        return checked

    def _step_some(self, checked: Any, out: Any) -> StepResult:
        """Step the envs that go on, and reset the truncated ones, as NEXT_STEP demands."""
        space, count = self.single_observation_space, self.num_envs
        is_reset = self._is_cut.copy()
        obs, reset_infos = self._reset_env(is_reset)
        entries = split_infos(reset_infos, count)
        rewards, flags = np.zeros(count), np.zeros((2, count), np.bool_)
        live = np.flatnonzero(~is_reset)
        if len(live):
            self.env.send(take_rows(self.single_action_space, checked, live.tolist()), live)
            batch = self.env.recv()
            ids = batch.env_ids
            rewards[ids], flags[0, ids], flags[1, ids] = batch[1:4]
            found = split_infos(batch.infos, len(ids))
            places = np.full(count, -1)
            places[ids] = np.arange(len(ids))
            picked = [(obs, i) if p < 0 else (batch.obs, p) for i, p in enumerate(places.tolist())]
            obs = join_rows(space, picked)
            for place, env_id in enumerate(ids.tolist()):
                entries[env_id] = found[place]
        infos = _batched(entries)
        if out is None:
            return obs, rewards, flags[0], flags[1], infos
        _put(space, obs, out.obs)
        out.rewards[...], out.terminations[...], out.truncations[...] = rewards, *flags
        return out.obs, out.rewards, out.terminations, out.truncations, infos

    def _count(self, rows: Any, terminations: np.ndarray, truncations: np.ndarray) -> np.ndarray:
        """Count a step and truncate rows at the limit; return the rows that the envs still run.

        Returns:
            int64 (E,), places in the batch.
        """
        acted = self._alive[rows].copy()
        self._elapsed[rows] = np.where(acted, self._elapsed[rows] + 1, 0)
        is_late = acted & (self._elapsed[rows] >= self._limit)
        cut = is_late & ~(terminations | truncations)
        truncations |= is_late
        part = self._follow(rows, terminations, truncations)
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            every = np.arange(self.num_envs)[rows]
            self._elapsed[every[part.begins]] = 0
        else:
            self._is_cut[rows] = cut
        return np.flatnonzero(cut)

    def _reset_env(self, mask: np.ndarray) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(options={"reset_mask": mask})

    def _reset_now(
        self, places: np.ndarray, ids: np.ndarray, obs: Any, infos: dict[str, Any], count: int
    ) -> tuple[Any, dict[str, Any]]:
        """Reset envs in the step that truncated them; return observations and infos."""
        space = self.single_observation_space
        mask = np.zeros(self.num_envs, np.bool_)
        mask[ids] = True
        finals = [take_row(space, take_rows(space, obs, [p]), 0) for p in places.tolist()]
        fresh, reset_infos = self._reset_env(mask)
        entries: list[Any] = split_infos(infos, count)
        begun = split_infos(reset_infos, self.num_envs)
        picked = [(obs, place) for place in range(count)]
        ends: dict[int, dict[str, Any]] = {}
        for place, env_id, final in zip(places.tolist(), ids.tolist(), finals, strict=True):
            ends[place] = {"final_obs": final, "final_info": entries[place]}
            entries[place] = begun[env_id]
            picked[place] = (fresh, env_id)
        return join_rows(space, picked), _batched(entries, ends)

    def send(self, actions: Any, env_ids: Any = None) -> None:
        """Start stepping some envs and return at once; see `VecEnv.send`."""
        self._note_closed()
        if self._fault is not None:
            self._refuse_fault("send")
        ids = self._calls.check_env_ids(env_ids)
        checked = self._actions.check(actions, ids)
        self._refuse_ended(ids)
        is_due = self._is_cut[ids]
        if not is_due.any():
            self.env.send(checked, ids)
        else:
            try:
                self._send_some(checked, ids, is_due)
            except BaseException as error:
                self._fault = error
                raise
        self._calls.mark_sent(ids)

    def _send_some(self, checked: Any, ids: np.ndarray, is_due: np.ndarray) -> None:
        """Send the envs that go on, and reset the truncated ones."""
        live = np.flatnonzero(~is_due)
        if len(live):
            chosen = take_rows(self.single_action_space, checked, live.tolist())
            self.env.send(chosen, ids[live])
        mask = np.zeros(self.num_envs, np.bool_)
        mask[ids[is_due]] = True
        obs, infos = self._reset_env(mask)
        entries = split_infos(infos, self.num_envs)
        self._held += [_Held(i, obs, entries[i]) for i in ids[is_due].tolist()]

    def _receive(
        self, min_envs: int | None, timeout: float | None, max_envs: int | None
    ) -> tuple[StepBatch | None, int]:
        """Return a batch of the env, if one is needed, and the number of resets before it."""
        self._note_closed()
        count, most = self._calls.check_recv(min_envs, max_envs)
        num_held = min(len(self._held), most)
        if count <= num_held:
            return None, num_held
        return self.env.recv(count - num_held, timeout, max_envs=most - num_held), num_held

    def _changed_batch(self, batch: tuple[StepBatch | None, int]) -> StepBatch:
        """Return rows of resets and then those of a batch; record where episodes stand."""
        received, num_held = batch
        held = [self._held.popleft() for _ in range(num_held)]
        if received is None or held:
            received = self._with_held(held, received)
        obs, rewards, terminations, truncations, infos, ids = received
        places = self._count(ids, terminations, truncations)
        self._calls.mark_received(ids)
        if len(places) and self.autoreset_mode is AutoresetMode.SAME_STEP:
            obs, infos = self._reset_now(places, ids[places], obs, infos, len(ids))
        return StepBatch(obs, rewards, terminations, truncations, infos, ids)

    def _note_closed(self) -> None:
        if self.env.closed and not self._calls.is_closed:
            self._calls.is_closed = True

    def _with_held(self, held: list[_Held], batch: StepBatch | None) -> StepBatch:
        """Return rows of resets and then those of a batch."""
        count = 0 if batch is None else len(batch.env_ids)
        picked = [(one.obs, one.env_id) for one in held]
        entries = [one.info for one in held]
        values = [np.zeros(len(held), dtype) for dtype in (np.float64, np.bool_, np.bool_)]
        ids = np.array([one.env_id for one in held], np.int64)
        if batch is not None:
            picked += [(batch.obs, place) for place in range(count)]
            entries += split_infos(batch.infos, count)
            values = [np.concatenate(pair) for pair in zip(values, batch[1:4], strict=True)]
            ids = np.concatenate([ids, batch.env_ids])
        obs = join_rows(self.single_observation_space, picked)
        rewards, terminations, truncations = values
        return StepBatch(obs, rewards, terminations, truncations, _batched(entries), ids)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the env and the wrapper, see `VecEnv.state_dict`."""
        self._calls.require_ready("state_dict")
        return super().state_dict()

    def own_state(self) -> dict[str, Any]:
        """Return the steps taken, and which envs must be reset."""
        return {"elapsed": self._elapsed.copy(), "is_cut": self._is_cut.copy()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `own_state` returned."""
        self._elapsed[...], self._is_cut[...] = state["elapsed"], state["is_cut"]
        self._held.clear()
        self._calls.in_flight[:] = False
        self._calls.num_in_flight = 0
        self._calls.mark_reset()


def _batched(
    entries: list[dict[str, Any]], ends: Mapping[int, Any] | None = None
) -> dict[str, Any]:
    """Return batched infos from one dict per row; `ends` are entered before a row's own."""
    infos: dict[str, Any] = {}
    for row, entry in enumerate(entries):
        for info in (*([ends[row]] if ends and row in ends else []), entry):
            add_info(infos, _plain(info), row, len(entries))
    return infos


def _plain(info: dict[str, Any]) -> dict[str, Any]:
    """Return an info with Python's bools as flags, as envs return them."""
    return {
        key: _plain(value)
        if isinstance(value, dict) and key != "final_obs"
        else bool(value)
        if isinstance(value, np.bool_)
        else value
        for key, value in info.items()
    }


def _put(space: Any, batch: Any, out: Any) -> None:
    for source, target in zip(leaves(batch, space), leaves(out, space), strict=True):
        target[...] = source
