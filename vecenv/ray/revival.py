"""Successors of the envs of a lost actor: they report the lost episodes as truncated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.core.autoreset import StepRows
from vecenv.core.base import StepBatch, VecEnv
from vecenv.core.batches import take_row, take_rows
from vecenv.core.infos import InfosApart, add_info, take_infos
from vecenv.ray.chunks import place_infos, place_rows

__all__ = ["Loss", "Successors"]


class Loss(NamedTuple):
    """State that the envs of a lost actor pass on to their successors.

    Attributes:
        reason: Why the actor is gone.
        last_obs: Batch of the last observations that were returned.
        seeds: Per env, or None.
        restarts: int64 (num_envs,), how often each has been replaced, this time included.
    """

    reason: str
    last_obs: Any
    seeds: Sequence[int | None]
    restarts: np.ndarray


class Successors:
    """Wraps a new vector env so that it reports the lost episodes of its predecessor.

    The next step of each env returns its last observation, reward 0 and truncation, with the info
    fields `restarts` and `restart_reason`; then the first observations of the new episodes follow,
    according to the autoreset mode. After that the wrapper does nothing.

    Attributes:
        is_done: Whether all lost episodes have been reported.
    """

    def __init__(self, envs: VecEnv, loss: Loss) -> None:
        self._envs, self._loss = envs, loss
        space, count = envs.single_observation_space, envs.num_envs
        self._rows = StepRows.make(space, count)
        self._is_apart = envs._keep_infos_apart()
        self._first_obs, self._first_infos = envs.reset(seed=list(loss.seeds))
        self._is_lost = np.ones(count, np.bool_)
        self._awaits_reset = np.zeros(count, np.bool_)  # NEXT_STEP: its next step only resets
        self.is_done = False

    def forget(self, reset_mask: np.ndarray | None) -> None:
        """Drop the reports of all envs, or those of the mask: the caller has reset them."""
        chosen = slice(None) if reset_mask is None else reset_mask
        self._is_lost[chosen] = self._awaits_reset[chosen] = False
        self._note_done()

    def _note_done(self) -> None:
        self.is_done = not (self._is_lost.any() or self._awaits_reset.any())

    def step(self, actions: Any, env_ids: np.ndarray) -> StepBatch:
        """Step these envs, int64 (B,), or report their lost episodes."""
        envs, rows = self._envs, self._rows
        infos: dict[Any, Any] = {}  # batched, of all envs; or by env
        rows.rewards[env_ids] = 0.0
        rows.terminations[env_ids] = rows.truncations[env_ids] = False
        is_live = ~(self._is_lost | self._awaits_reset)[env_ids]
        if is_live.any():
            chosen = np.flatnonzero(is_live).tolist()
            envs.send(take_rows(envs.single_action_space, actions, chosen), env_ids[is_live])
            batch = envs.recv()
            place_rows(rows.obs, envs.single_observation_space, batch.obs, batch.env_ids)
            rows.rewards[batch.env_ids] = batch.rewards
            rows.terminations[batch.env_ids] = batch.terminations
            rows.truncations[batch.env_ids] = batch.truncations
            if self._is_apart:
                infos |= {int(batch.env_ids[row]): found for row, found in batch.infos.items()}
            else:
                place_infos(infos, batch.infos, batch.env_ids, envs.num_envs)
        for env_id in env_ids[~is_live].tolist():
            if self._is_lost[env_id]:
                self._report_loss(env_id, infos)
            else:
                self._begin_episode(env_id, infos)
        self._note_done()
        return StepBatch(
            rows.obs.take(env_ids),
            rows.rewards[env_ids],
            rows.terminations[env_ids],
            rows.truncations[env_ids],
            self._of(env_ids, infos),
            env_ids,
        )

    def _report_loss(self, env_id: int, infos: dict[Any, Any]) -> None:
        loss, space = self._loss, self._envs.single_observation_space
        last_obs = take_row(space, loss.last_obs, env_id)
        info = {"restarts": int(loss.restarts[env_id]), "restart_reason": loss.reason}
        self._rows.truncations[env_id] = True
        self._is_lost[env_id] = False
        if self._envs.autoreset_mode is AutoresetMode.SAME_STEP:
            ended = {"final_obs": last_obs, "final_info": info}
            self._enter(infos, ended, env_id)
            self._begin_episode(env_id, infos)
            return
        self._awaits_reset[env_id] = self._envs.autoreset_mode is AutoresetMode.NEXT_STEP
        self._rows.obs.write(env_id, last_obs)
        self._enter(infos, info, env_id)

    def _enter(self, infos: dict[Any, Any], info: dict[str, Any], env_id: int) -> None:
        if self._is_apart:
            infos.setdefault(env_id, []).append(info)
        else:
            add_info(infos, info, env_id, self._envs.num_envs)

    def _of(self, env_ids: np.ndarray, infos: dict[Any, Any]) -> dict[Any, Any]:
        """Return the infos of these envs, in their order."""
        if not self._is_apart:
            return take_infos(infos, env_ids)
        rows = enumerate(env_ids.tolist())
        return InfosApart({row: infos[env_id] for row, env_id in rows if env_id in infos})

    def _begin_episode(self, env_id: int, infos: dict[Any, Any]) -> None:
        """Return the first observation of the new episode, and its infos."""
        self._awaits_reset[env_id] = False
        row, space = np.array([env_id]), self._envs.single_observation_space
        self._rows.obs.write(env_id, take_row(space, self._first_obs, env_id))
        if self._is_apart:
            first: dict[Any, Any] = self._first_infos
            infos.setdefault(env_id, []).extend(first.get(env_id, ()))
        else:
            place_infos(infos, take_infos(self._first_infos, row), row, self._envs.num_envs)
