"""Compiled games as a vector env whose observations become agents' rows, or one game as an env."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vecenv.agents import grouping as at
from vecenv.agents.grouping import Members, columns_space
from vecenv.agents.infos import GIVEN, shelve
from vecenv.core.atomics import array_at
from vecenv.core.base import StepBatch, StepResult, StepSlot, VecEnv
from vecenv.core.compiling import cached_njit, is_jit_off
from vecenv.core.errors import ActionError, ObservationError
from vecenv.core.masks import MASK_KEY
from vecenv.core.seeding import Seed
from vecenv.core.spaces import BatchedSpaces, batch_thinly
from vecenv.jit.branches import read_sources
from vecenv.jit.env import JitVectorEnv
from vecenv.jit.games import GameLayout, GroupLayout
from vecenv.jit.kernels import EnvKernels

__all__ = ["CompiledGame", "CompiledGames", "valid_action"]

# Fields of the state record; all but the first are consecutive there.
_NOTED = (at.REWARDS, at.TERMINATIONS, at.TRUNCATIONS, at.VALID, at.ALIVE)
_OF_THE_STEP = (at.REWARDS, at.TERMINATIONS, at.TRUNCATIONS, at.VALID)


class CompiledGames(VecEnv):
    """Many compiled games of one kind; see `GameEnv` for the form of results.

    Args:
        envs: A vector env of games, whose kernels have `groups`.
        central_state: Whether the central state is a column "state" of the observation.
        resets_ended: Whether games are reset in the step that ends them, though `envs` is in
            autoreset mode DISABLED: this is SAME_STEP that keeps the state in which they ended.

    Attributes:
        envs: The vector env; it has statistics, `states` and `final_obs` of the games. Step it only
            through this one.
        members: The groups.
    """

    def __init__(
        self, envs: JitVectorEnv, *, central_state: bool = False, resets_ended: bool = False
    ) -> None:
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
        self._state_writer = None
        if central_state:
            require_central_state(kernels)
            self._state_writer = envs.state_writer()
        obs_space = columns_space(self.members, kernels.state_space if central_state else None)
        action_space = Dict(
            {
                name: batch_space(group.action_space, len(group.agents))
                for name, group in self._groups
            }
        )
        spaces = BatchedSpaces(
            obs_space,
            batch_thinly(obs_space, num_games),
            action_space,
            batch_thinly(action_space, num_games),
        )
        mode = AutoresetMode.SAME_STEP if resets_ended else envs.autoreset_mode
        self._set_up(num_games, spaces, mode, envs.metadata, envs.render_mode)
        self.timing = envs.timing
        self._is_same_step, self._resets_ended = mode is AutoresetMode.SAME_STEP, resets_ended
        # Actions of several groups are joined in this array.
        self._flat = np.zeros((num_games if self._layout.is_flat else 0, 0))
        if self._layout.is_flat:
            shape = (num_games, *(kernels.action_space.shape or ()))
            self._flat = np.zeros(shape, kernels.action_space.dtype)
        states = np.asarray(envs.states)
        self._fields = {name: states[name] for name in _NOTED}  # live views, (num_games, A)
        self._noted = {
            name: {column: field[:, group.agent_ids] for column, field in self._fields.items()}
            for name, group in self._groups
        }
        # Where `_collect` finds these fields: address, bytes of a record, offsets, count of agents.
        fields = states.dtype.fields or {}
        rewards_at, flags_at = (fields[name][1] for name in _NOTED[:2])
        self._places = (
            states.ctypes.data,
            states.dtype.itemsize,
            rewards_at,
            flags_at,
            self._layout.num_agents,
        )
        self._over = envs.episode_over
        self._all_alive = False  # whether all agents of all games are known to be alive

    def __repr__(self) -> str:
        return f"CompiledGames({self.envs.kernels.name}, {self.num_envs} games)"

    @property
    def states(self) -> np.ndarray:
        """The state records of the games (num_games,), as a live view."""
        return self.envs.states

    def mask_source(self, name: str) -> Callable[[np.ndarray], np.ndarray] | None:
        """Return a function from rows of a group, int64 (B,), to their action masks (B, width).

        None if the game has no kernel `action_mask`, or the group's actions can't be masked.
        """
        group = dict(self._groups)[name]
        if not self.envs.has_action_masks or not group.mask_width:
            return None

        def masks_of(rows: np.ndarray) -> np.ndarray:
            games, agents = np.divmod(rows, len(group.agents))
            chosen, places = np.unique(games, return_inverse=True)
            own = self.envs.action_masks(chosen)[:, group.masks]
            return own.reshape(len(chosen), len(group.agents), -1)[places, agents]

        return masks_of

    def render(self) -> tuple[Any, ...] | None:
        """Return the drawing of each game by `kernels.render`."""
        return self.envs.render()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the whole state as arrays, see `JitVectorEnv.state_dict`."""
        return self.envs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._all_alive = False
        self.envs.load_state_dict(state)
        self._calls.mark_reset()

    def copy_games(self, source: Any, target: Any, luck: str) -> tuple[np.ndarray, np.ndarray]:
        """Copy games to others, see `JitVectorEnv.copy_rows`; return the sources and targets."""
        self._all_alive = False
        self.envs.copy_rows(source, target, luck=luck)
        return read_sources(source, target, self.num_envs, self.num_envs, luck)

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
        states = self._fields
        chosen = slice(None) if reset_mask is None else reset_mask
        for name in _OF_THE_STEP:
            states[name][chosen] = 0
        is_empty = ~states[at.ALIVE].any(axis=1)
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
            obs = out.obs[name][at.OBS]
            slot = StepSlot(obs, out.rewards, out.terminations, out.truncations)
        flat = self._flat_actions(actions, None)
        try:
            obs, rewards, terminations, truncations, infos = envs.step(flat, out=slot)
        except ActionError as error:
            self._refuse(error, actions, None)
        infos = self._settle(was_over, terminations | truncations, obs, infos, None)
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
        over = self._over.copy()
        batch = self.envs.recv(count, timeout, max_envs=count)
        ids = batch.env_ids
        ended = batch.terminations | batch.truncations
        infos = self._settle(over[ids], ended, batch.obs, batch.infos, ids)
        return batch._replace(obs=self._columns(batch.obs, ids, None), infos=infos)

    def _games_over(self, env_ids: np.ndarray | None) -> np.ndarray | None:
        """Return which games the next step resets instead of stepping them; None if none."""
        if self._is_same_step:
            return None
        return self._over.copy() if self._over.any() else None

    def _flat_actions(self, actions: Any, env_ids: np.ndarray | None) -> np.ndarray:
        """Return the actions of all agents of a game as one array.

        Actions of agents that are not alive become a valid one, as kernels expect allowed actions.
        """
        alive = self._fields[at.ALIVE]
        if env_ids is not None:
            alive = alive[env_ids]
        all_alive = self._all_alive or alive.all()
        parts = {}
        for name, group in self._groups:
            part = np.asarray(actions[name])
            if not all_alive:
                acts = alive[:, group.agent_ids].astype(np.bool_)
                acts = acts.reshape(*acts.shape, *[1] * len(group.action_shape))
                part = np.where(acts, part, valid_action(group.action_space))
            parts[name] = part
        if not self._layout.is_flat:
            (only,) = parts.values()
            return only
        flat = self._flat[: len(alive)]
        for name, group in self._groups:
            part = parts[name]
            np.copyto(flat[:, group.actions], part.reshape(len(part), -1), casting="unsafe")
        return flat

    def _refuse(self, error: ActionError, actions: Any, env_ids: np.ndarray | None) -> NoReturn:
        """Raise an ActionError that names the agent."""
        alive = self._fields[at.ALIVE]
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
        obs: np.ndarray,
        infos: dict[str, Any],
        env_ids: np.ndarray | None,
    ) -> dict[str, Any]:
        """Bring the columns up to date for games that ended, or began again, in a step.

        Args:
            was_over: bool (B,), games that the step has reset instead; None for none.
            ended: bool (B,), games that ended.
            obs: (B, ...), where observations of games that are reset here are replaced.
            infos: Infos of the step.
            env_ids: int64 (B,), the games; None for all.

        Returns:
            The infos, with final observations by group.
        """
        states = self._fields
        if was_over is not None and was_over.any():
            games = np.flatnonzero(was_over) if env_ids is None else env_ids[was_over]
            for name in _OF_THE_STEP:
                states[name][games] = 0
        if not ended.any():
            return infos
        games = np.flatnonzero(ended) if env_ids is None else env_ids[ended]
        # The vector env's limit truncates the agents that acted and have no end of their own.
        flags = states[at.TERMINATIONS][games] | states[at.TRUNCATIONS][games]
        states[at.TRUNCATIONS][games] |= states[at.VALID][games] & ~flags & 1
        if not self._is_same_step:
            states[at.ALIVE][games] = 0
            return infos
        rest = {key: infos[key] for key in infos if key.lstrip("_") not in _FINAL}
        if self._resets_ended:
            final = obs[ended]
            rest |= self._final_states(ended, games)
            try:
                obs[ended] = self.envs.begin_episodes(games)
            except BaseException as error:  # Ctrl-C
                self._calls.give_up(error)
                raise
        else:
            final = self.envs.final_obs[games]
        flags = (states[at.TERMINATIONS][games] | states[at.TRUNCATIONS][games]).astype(np.bool_)
        for name, group in self._groups:
            shape = (len(ended), len(group.agents))
            objects, is_final = np.full(shape, None, object), np.zeros(shape, np.bool_)
            is_final[ended] = has_ended = flags[:, group.agent_ids]
            rows = self._obs_of(final, group)[has_ended]
            objects[is_final] = np.fromiter(rows, object, count=len(rows))
            rest[name] = {"final_obs": objects, f"{GIVEN}final_obs": is_final}
        return rest

    def _final_states(self, ended: np.ndarray, games: np.ndarray) -> dict[str, np.ndarray]:
        """Return infos with the central states of games that have ended, as objects (B,)."""
        found = np.full(len(ended), None, object)
        found[ended] = np.fromiter(self._central_states(games), object, count=len(games))
        return {at.FINAL_STATE: found, f"_{at.FINAL_STATE}": ended}

    def _central_states(self, env_ids: np.ndarray) -> np.ndarray:
        """Return the central states of some games, (B, *state_shape)."""
        space = self.envs.kernels.state_space
        assert space is not None and self._state_writer is not None
        states = self.envs.states[env_ids]
        found = np.zeros((len(states), *(space.shape or ())), space.dtype)
        self._state_writer(states, found, env_ids)
        return found

    def _obs_of(self, obs: np.ndarray, group: GroupLayout) -> np.ndarray:
        """Return a group's part of observations (B, ...), (B, A, *obs_shape): a view if it can."""
        if not self._layout.is_flat:
            return obs
        return obs[:, group.obs].reshape(len(obs), len(group.agents), *group.obs_shape)

    def _columns(
        self, obs: np.ndarray, env_ids: np.ndarray | None, out: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the columns of these games, or write them into `out`."""
        found: dict[str, Any] = {}
        for name, group in self._groups:
            own = self._obs_of(obs, group)
            noted = self._noted[name]
            if env_ids is not None:
                found[name] = {column: array[env_ids] for column, array in noted.items()}
                found[name][at.OBS] = own
                continue
            if out is None:
                columns = {column: np.empty(a.shape, a.dtype) for column, a in noted.items()}
                found[name] = {at.OBS: own, **columns}
            else:
                columns = out[name]
                if self._layout.is_flat:
                    columns[at.OBS][...] = own
            if is_jit_off():
                for column, array in noted.items():
                    columns[column][...] = array
            else:
                noted = tuple(columns[column] for column in _NOTED)
                _collect(self._places, group.first, noted)
        if out is not None:
            found = out
        self._all_alive = env_ids is None and all(
            found[name][at.ALIVE].all() for name, _ in self._groups
        )
        if self._state_writer is not None:
            if at.STATE in found:
                self._state_writer(self.envs.states, found[at.STATE])
            else:
                every = np.arange(self.num_envs) if env_ids is None else env_ids
                found[at.STATE] = self._central_states(every)
        return found


class CompiledGame(gym.Env):
    """One compiled game as an env of columns, for backends that step envs one by one.

    See `GameEnv` for the form of results. If the game has action masks, they are in the infos. A
    pickle contains the state of the game, not the compiled code.

    Args:
        make: Makes the game: a `CompiledGames` of one, in autoreset mode DISABLED. Pickles of this
            env contain this function.
        index: Number of this game among others.

    Attributes:
        members: The groups.
    """

    def __init__(self, make: Callable[[], CompiledGames], index: int = 0) -> None:
        self._make, self.index = make, index
        self._games = make()
        self.members = self._games.members
        self.observation_space = self._games.single_observation_space
        self.action_space = self._games.single_action_space
        self.metadata = self._games.metadata
        self.render_mode = self._games.render_mode
        self._masks = {name: self._games.mask_source(name) for name in self.members}

    def __getstate__(self) -> dict[str, Any]:
        """Return the function that makes the game, and the game's state."""
        return {"make": self._make, "index": self.index, "game": self._games.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CompiledGame.__init__(self, state["make"], state["index"])
        self._games.load_state_dict(state["game"])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset the game."""
        obs, infos = self._games.reset(seed=seed, options=options)
        return _first_game(obs), self._infos(infos)

    def step(
        self, action: dict[str, Any]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Step the game with the actions of the agents that are alive."""
        actions = {name: np.asarray(part)[None] for name, part in action.items()}
        obs, rewards, terminations, truncations, infos = self._games.step(actions)
        flags = bool(terminations[0]), bool(truncations[0])
        return _first_game(obs), float(rewards[0]), *flags, self._infos(infos)

    def _infos(self, infos: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {
            key: _first_game(value) for key, value in infos.items() if f"_{key}" in infos
        }
        for name, source in self._masks.items():
            if source is not None:
                masks = source(np.arange(len(self.members[name].agents))).astype(np.int8)
                is_there = np.ones(len(masks), np.bool_)
                found[name] = shelve({MASK_KEY: masks, f"_{MASK_KEY}": is_there})
        return found

    def render(self) -> Any:
        """Return the game's drawing."""
        frames = self._games.render()
        return None if frames is None else frames[0]

    def render_if(self, index: int) -> Any:
        """Return the game's drawing if `index` is its number; else None."""
        return self.render() if index == self.index else None

    def close(self) -> None:
        """Close the game; may be called twice."""
        self._games.close()


def _first_game(batch: Any) -> Any:
    """Return the part of the first game of batched columns or infos."""
    if isinstance(batch, dict):
        return {key: _first_game(part) for key, part in batch.items()}
    return batch[0]


def require_central_state(kernels: EnvKernels) -> None:
    """Raise ValueError if games have no central state."""
    if kernels.central_state is None:
        raise ValueError(
            f"{kernels.name} has no central state: give its EnvKernels central_state=..., a "
            "function (state, out), and its state_space"
        )


_FINAL = ("final_obs", "final_info")


@cached_njit
def _collect(places, first, columns):
    """Copy what records hold of a group's agents into columns.

    Args:
        places: Address of the records, bytes of one record, offsets of the rewards of all agents
            and of their flags (in the order of the columns), and number of all agents.
        first: Number of the group's first agent.
        columns: Written: rewards float64 (G, A), terminations int8 (G, A), truncations, valid and
            alive likewise.
    """
    address, record_bytes, rewards_at, flags_at, num_agents = places
    rewards, terminations, truncations, valid, alive = columns
    for game in range(rewards.shape[0]):
        record = address + game * record_bytes
        earned = array_at(record + rewards_at, (num_agents,), np.float64)
        flags = array_at(record + flags_at, (4, num_agents), np.int8)
        for k in range(rewards.shape[1]):
            rewards[game, k] = earned[first + k]
            terminations[game, k] = flags[0, first + k]
            truncations[game, k] = flags[1, first + k]
            valid[game, k] = flags[2, first + k]
            alive[game, k] = flags[3, first + k]


def valid_action(space: Any) -> Any:
    """Return an action of a space, for agents whose action does not matter."""
    if hasattr(space, "start"):
        return space.start
    return np.clip(0, space.low, space.high) if hasattr(space, "low") else 0


def _is_valid(space: Space, action: Any) -> bool:
    return space.contains(np.asarray(action, space.dtype))
