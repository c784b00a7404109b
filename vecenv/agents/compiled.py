"""CompiledGames: compiled games as the vector env of games whose columns become agents' rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vecenv.agents.grouping import (
    ALIVE,
    OBS,
    REWARDS,
    TERMINATIONS,
    TRUNCATIONS,
    VALID,
    Members,
    columns_space,
)
from vecenv.agents.infos import GIVEN
from vecenv.core.base import StepBatch, StepResult, StepSlot, VecEnv
from vecenv.core.errors import ActionError, ObservationError
from vecenv.core.seeding import Seed
from vecenv.core.spaces import BatchedSpaces
from vecenv.jit.env import JitVectorEnv
from vecenv.jit.games import GameLayout, GroupLayout

__all__ = ["CompiledGames"]

_NOTED = (REWARDS, TERMINATIONS, TRUNCATIONS, VALID, ALIVE)  # fields of the state record
_OF_THE_STEP = (REWARDS, TERMINATIONS, TRUNCATIONS, VALID)


class CompiledGames(VecEnv):
    """Many compiled games of one kind; see `GameEnv` for what a game returns.

    Args:
        envs: A vector env of games, whose kernels have `groups`.

    Attributes:
        envs: That; it has statistics, `states` and `final_obs` of the games. Step it through here
            only.
        members: The groups.
    """

    def __init__(self, envs: JitVectorEnv) -> None:
        kernels = envs.kernels
        if kernels.groups is None:
            raise TypeError(
                f"{kernels.name} has no groups of agents: give its EnvKernels groups=..., or make "
                "it with make_vec"
            )
        self.envs, num_games = envs, envs.num_envs
        self._layout = GameLayout.of(kernels.groups)
        self._groups = list(self._layout.groups.items())
        self.members = {
            name: Members(group.agents, group.observation_space, group.action_space)
            for name, group in self._groups
        }
        obs_space = columns_space(self.members)
        action_space = Dict(
            {
                name: batch_space(group.action_space, len(group.agents))
                for name, group in self._groups
            }
        )
        spaces = BatchedSpaces(
            obs_space,
            batch_space(obs_space, num_games),
            action_space,
            batch_space(action_space, num_games),
        )
        self._set_up(num_games, spaces, envs.autoreset_mode, envs.metadata, envs.render_mode)
        self.timing = envs.timing
        self._is_same_step = envs.autoreset_mode is AutoresetMode.SAME_STEP
        self._flat = np.zeros((num_games, *(kernels.action_space.shape or ())))
        if self._layout.is_flat:
            self._flat = self._flat.astype(kernels.action_space.dtype)

    def __repr__(self) -> str:
        return f"CompiledGames({self.envs.kernels.name}, {self.num_envs} games)"

    @property
    def states(self) -> np.ndarray:
        """The state records of the games (num_games,): a live view."""
        return self.envs.states

    def render(self) -> tuple[Any, ...] | None:
        """Return what `kernels.render` draws of each game."""
        return self.envs.render()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the whole state as arrays, see `JitVectorEnv.state_dict`."""
        return self.envs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.envs.load_state_dict(state)
        self._calls.mark_reset()

    def close(self, **kwargs: Any) -> None:
        """Close the games; may be called twice."""
        try:
            self.envs.close()
        finally:
            super().close(**kwargs)

    def _reset(
        self, seed: Seed, options: dict[str, Any] | None, reset_mask: np.ndarray | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if reset_mask is not None:
            options = {**(options or {}), "reset_mask": reset_mask}
        obs, infos = self.envs.reset(seed=seed, options=options)
        states = self.envs.states
        chosen = slice(None) if reset_mask is None else reset_mask
        for name in _OF_THE_STEP:
            states[name][chosen] = 0
        is_empty = ~states[ALIVE].any(axis=1)
        if is_empty.any():
            raise ObservationError(
                f"game {int(np.argmax(is_empty))} of {self.envs.kernels.name} has no agents after "
                "reset: the kernel `reset` has set `state.alive` to 0 for all of them"
            )
        return self._columns(obs, None, None), infos

    def _step(self, actions: Any, out: Any) -> StepResult:
        envs = self.envs
        was_over = self._games_over(None)
        slot = None
        if out is not None and not self._layout.is_flat:
            ((name, _),) = self._groups
            obs = out.obs[name][OBS]
            slot = StepSlot(obs, out.rewards, out.terminations, out.truncations)
        flat = self._flat_actions(actions, None)
        try:
            obs, rewards, terminations, truncations, infos = envs.step(flat, out=slot)
        except ActionError as error:
            self._refuse(error, actions, None)
        infos = self._settle(was_over, terminations | truncations, infos, None)
        if out is None:
            return self._columns(obs, None, None), rewards, terminations, truncations, infos
        if slot is None:
            out.rewards[:], out.terminations[:], out.truncations[:] = (
                rewards,
                terminations,
                truncations,
            )
        self._columns(obs, None, out.obs)
        return out.obs, out.rewards, out.terminations, out.truncations, infos

    def _send(self, actions: Any, env_ids: np.ndarray) -> None:
        flat = self._flat_actions(actions, env_ids)
        try:
            self.envs.send(flat, env_ids)
        except ActionError as error:
            self._refuse(error, actions, env_ids)

    def _recv(self, count: int, most: int, timeout: float | None) -> StepBatch:
        over = self.envs.episode_over.copy()
        batch = self.envs.recv(count, timeout, max_envs=count)
        ids = batch.env_ids
        ended = batch.terminations | batch.truncations
        infos = self._settle(over[ids], ended, batch.infos, ids)
        return batch._replace(obs=self._columns(batch.obs, ids, None), infos=infos)

    def _games_over(self, env_ids: np.ndarray | None) -> np.ndarray | None:
        """Return which games are reset by the next step instead of being stepped, if any is."""
        if self._is_same_step:
            return None
        over = self.envs.episode_over
        return over.copy() if over.any() else None

    def _flat_actions(self, actions: Any, env_ids: np.ndarray | None) -> np.ndarray:
        """Return the actions of all agents of a game as one array.

        Those of agents that are not alive become a valid one: the kernels see what is allowed.
        """
        alive = self.envs.states[ALIVE]
        if env_ids is not None:
            alive = alive[env_ids]
        all_alive = alive.all()
        parts = {}
        for name, group in self._groups:
            part = np.asarray(actions[name])
            if not all_alive:
                acts = alive[:, group.agent_ids].astype(np.bool_)
                acts = acts.reshape(*acts.shape, *[1] * len(group.action_shape))
                part = np.where(acts, part, _valid_action(group.action_space))
            parts[name] = part
        if not self._layout.is_flat:
            return parts[name]
        flat = self._flat[: len(part)]
        for name, group in self._groups:
            part = parts[name]
            np.copyto(flat[:, group.actions], part.reshape(len(part), -1), casting="unsafe")
        return flat

    def _refuse(self, error: ActionError, actions: Any, env_ids: np.ndarray | None) -> NoReturn:
        """Raise ActionError that names the agent."""
        alive = self.envs.states[ALIVE]
        for name, group in self._groups:
            array = np.asarray(actions[name])
            for row in range(len(array)):
                game = row if env_ids is None else int(env_ids[row])
                for k, agent in enumerate(group.agents):
                    action = array[row, k]
                    if alive[game, group.first + k] and not _is_valid(group.action_space, action):
                        raise ActionError(
                            f"the action of agent {agent!r} (group {name!r}) of game {game} is "
                            f"{action}, expected one of {group.action_space}; nothing was stepped"
                        ) from None
        raise error

    def _settle(
        self,
        was_over: np.ndarray | None,
        ended: np.ndarray,
        infos: dict[str, Any],
        env_ids: np.ndarray | None,
    ) -> dict[str, Any]:
        """Bring the columns of games up to date that ended, or began anew, in a step.

        Args:
            was_over: bool (B,), games that the step has reset instead; None for none.
            ended: bool (B,), games that ended.
            infos: Of the step.
            env_ids: int64 (B,), the games; None for all.

        Returns:
            The infos, with final observations by group.
        """
        states = self.envs.states
        if was_over is not None and was_over.any():
            games = np.flatnonzero(was_over) if env_ids is None else env_ids[was_over]
            for name in _OF_THE_STEP:
                states[name][games] = 0
        if not ended.any():
            return infos
        games = np.flatnonzero(ended) if env_ids is None else env_ids[ended]
        # The limit of the vector env truncates those who acted and have no end of their own.
        flags = states[TERMINATIONS][games] | states[TRUNCATIONS][games]
        states[TRUNCATIONS][games] |= states[VALID][games] & ~flags & 1
        if not self._is_same_step:
            states[ALIVE][games] = 0
            return infos
        rest = {key: infos[key] for key in infos if key.lstrip("_") not in _FINAL}
        final = self.envs.final_obs[games]
        flags = (states[TERMINATIONS][games] | states[TRUNCATIONS][games]).astype(np.bool_)
        for name, group in self._groups:
            shape = (len(ended), len(group.agents))
            objects, is_final = np.full(shape, None, object), np.zeros(shape, np.bool_)
            is_final[ended] = has_ended = flags[:, group.agent_ids]
            rows = self._obs_of(final, group)[has_ended]
            objects[is_final] = np.fromiter(rows, object, count=len(rows))
            rest[name] = {"final_obs": objects, f"{GIVEN}final_obs": is_final}
        return rest

    def _obs_of(self, obs: np.ndarray, group: GroupLayout) -> np.ndarray:
        """Return a group's part of observations (B, ...), (B, A, *obs_shape): a view if it can."""
        if not self._layout.is_flat:
            return obs
        return obs[:, group.obs].reshape(len(obs), len(group.agents), *group.obs_shape)

    def _columns(
        self, obs: np.ndarray, env_ids: np.ndarray | None, out: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the columns of these games, or write them into `out`."""
        states = self.envs.states
        found = {}
        for name, group in self._groups:
            own = self._obs_of(obs, group)
            noted = {column: states[column][:, group.agent_ids] for column in _NOTED}
            if out is None:
                rows = slice(None) if env_ids is None else env_ids
                found[name] = {
                    OBS: own,
                    **{column: array[rows].copy() for column, array in noted.items()},
                }
                continue
            if self._layout.is_flat:
                out[name][OBS][...] = own
            for column, array in noted.items():
                out[name][column][...] = array
        return found if out is None else out


_FINAL = ("final_obs", "final_info")


def _valid_action(space: Space) -> Any:
    """Return an action of a space, to stand for one that does not matter."""
    if hasattr(space, "start"):
        return space.start  # type: ignore[attr-defined]
    return np.clip(0, space.low, space.high) if hasattr(space, "low") else 0  # type: ignore[attr-defined]


def _is_valid(space: Space, action: Any) -> bool:
    return space.contains(np.asarray(action, space.dtype))
