"""GameEnv: a PettingZoo `ParallelEnv` as one Gymnasium env of columns, for any backend to batch."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Dict
from gymnasium.vector.utils import batch_space

from vecenv.agents.grouping import (
    ALIVE,
    OBS,
    REWARDS,
    STATE,
    TERMINATIONS,
    TRUNCATIONS,
    VALID,
    Grouping,
    Members,
    columns_space,
    group_agents,
)
from vecenv.core.errors import ObservationError
from vecenv.core.infos import add_info
from vecenv.core.rows import ObservationRows

__all__ = ["COMMON", "GameEnv"]

COMMON = "common"  # key of infos that are the game's, PettingZoo's convention


class GameEnv(gym.Env):
    """A game with several agents as one env: its observation is a dict of columns per group.

    The observation is, for each group, a dict of arrays over its A agents: `obs` (A, ...) as
    Gymnasium batches the agents' space, `rewards` float64 (A,), and, int8 (A,) with 0 and 1,
    `terminations`, `truncations`, `valid` (the agent acted in this step) and `alive` (it acts in
    the next). Rows of agents that neither act nor acted are zeros. The reward of the env is the sum
    of the agents'. It ends when no agent is alive: terminated unless an agent of the last step was
    truncated. An action is, for each group, an array (A, ...); entries of agents that are not alive
    are ignored.

    What it returns is overwritten by its next call.

    Args:
        game: The `ParallelEnv`, or anything with its methods.
        groups: See `group_agents`.
        central_state: Whether the game's `state()` is a column "state" of the observation.

    Raises:
        ValueError: The game can't be laid out in groups; says what is wrong.
    """

    def __init__(self, game: Any, *, groups: Grouping = None, central_state: bool = False) -> None:
        names = getattr(game, "possible_agents", None)
        if not names:
            raise ValueError(
                f"{game} has no `possible_agents`, which say how many rows a game has; wrap it in "
                "a class that has"
            )
        agents = list(names)
        self.game = game
        self.members = group_agents(
            agents,
            {agent: game.observation_space(agent) for agent in agents},
            {agent: game.action_space(agent) for agent in agents},
            groups,
        )
        state_space = _state_space(game) if central_state else None
        self.observation_space = columns_space(self.members, state_space)
        self.action_space = Dict(
            {
                name: batch_space(members.action_space, len(members.agents))
                for name, members in self.members.items()
            }
        )
        self.metadata = dict(getattr(game, "metadata", None) or {})
        self.render_mode = getattr(game, "render_mode", None)
        self._columns = {name: _Columns(members) for name, members in self.members.items()}
        self._seats = {
            agent: (name, columns, k)
            for name, columns in self._columns.items()
            for k, agent in enumerate(columns.members.agents)
        }
        self._obs = {name: columns.arrays for name, columns in self._columns.items()}
        self._with_state = central_state
        self._acting: list[tuple[Any, str, _Columns, int]] = []
        self._acting_names: list[Any] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset the game."""
        result = self.game.reset(seed=seed, options=options)
        try:
            observations, infos = result
        except (TypeError, ValueError):
            raise ObservationError(
                f"returned {_short(result)} from reset, expected (observations, infos)"
            ) from None
        for columns in self._columns.values():
            columns.clear()
        self._seat(list(self.game.agents))
        if not self._acting:
            raise ObservationError("has no agents after reset: `agents` is empty")
        for agent, _, columns, k in self._acting:
            columns.write(k, agent, observations)
        return self._observed(), self._batched_infos(infos)

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Step the game with the actions of the agents that are alive."""
        acted = self._acting
        result = self.game.step({agent: actions[name][k] for agent, name, _, k in acted})
        try:
            observations, rewards, terminations, truncations, infos = result
        except (TypeError, ValueError):
            raise ObservationError(
                f"returned {_short(result)} from step, expected the dicts (observations, rewards, "
                "terminations, truncations, infos)"
            ) from None
        for columns in self._columns.values():
            columns.begin_step()
        left = self.game.agents
        total, is_cut, any_ended = 0.0, False, False
        for agent, _, columns, k in acted:
            try:
                reward = rewards[agent]
                terminated, truncated = terminations[agent], truncations[agent]
            except KeyError:
                raise _incomplete(agent, rewards, terminations, truncations) from None
            columns.rewards[k] = reward
            total += columns.rewards[k]
            columns.valid[k] = 1
            if terminated or truncated or agent not in left:
                any_ended = True
                # One that has left without a word has not reached an end of its own.
                columns.terminations[k] = bool(terminated)
                columns.truncations[k] = bool(truncated) or not terminated
                is_cut |= not terminated
                columns.finish(k, agent, observations)
            else:
                columns.write(k, agent, observations)
        if any_ended or left != self._acting_names:
            ended = {
                agent
                for agent, _, columns, k in acted
                if columns.terminations[k] or columns.truncations[k]
            }
            before = set(self._acting_names)
            self._seat([agent for agent in left if agent not in ended])
            for agent, _, columns, k in self._acting:
                if agent not in before:
                    columns.write(k, agent, observations)
        is_over = not self._acting
        infos = self._batched_infos(infos) if infos else {}
        return self._observed(), total, is_over and not is_cut, is_over and is_cut, infos

    def _seat(self, agents: list[Any]) -> None:
        """Note who acts next."""
        self._acting_names = agents
        for columns in self._columns.values():
            columns.alive[:] = 0
        self._acting = []
        for agent in agents:
            if (seat := self._seats.get(agent)) is None:
                raise ObservationError(
                    f"has the agent {agent!r}, which is none of its possible_agents "
                    f"{list(self._seats)}"
                )
            name, columns, k = seat
            columns.alive[k] = 1
            self._acting.append((agent, name, columns, k))

    def _observed(self) -> dict[str, Any]:
        if self._with_state:
            return {**self._obs, STATE: self.game.state()}
        return self._obs

    def _batched_infos(self, infos: Any) -> dict[str, Any]:
        """Return the agents' infos by group, batched over its agents, and the game's."""
        batched: dict[str, Any] = {}
        if not isinstance(infos, dict):
            raise ObservationError(f"returned infos {_short(infos)}, expected a dict by agent")
        for agent, info in infos.items():
            if not info:
                continue
            if (seat := self._seats.get(agent)) is not None:
                name, columns, k = seat
                add_info(batched.setdefault(name, {}), info, k, len(columns.members.agents))
            elif agent == COMMON:
                batched[COMMON] = info
            else:
                raise ObservationError(
                    f"returned infos of {agent!r}, which is none of its possible_agents "
                    f"{list(self._seats)}"
                )
        return batched

    def render(self) -> Any:
        """Return what the game renders."""
        return self.game.render()

    def close(self) -> None:
        """Close the game."""
        self.game.close()


class _Columns:
    """The arrays of one group of one game."""

    def __init__(self, members: Members) -> None:
        self.members = members
        count = len(members.agents)
        self.rows = ObservationRows.make(members.observation_space, count)
        self.rewards = np.zeros(count, np.float64)
        self.terminations = np.zeros(count, np.int8)
        self.truncations = np.zeros(count, np.int8)
        self.valid = np.zeros(count, np.int8)
        self.alive = np.zeros(count, np.int8)
        self._zeros = _leaves(self.rows.batch())
        self.arrays = {
            OBS: self.rows.batch(),
            REWARDS: self.rewards,
            TERMINATIONS: self.terminations,
            TRUNCATIONS: self.truncations,
            VALID: self.valid,
            ALIVE: self.alive,
        }

    def clear(self) -> None:
        """Set everything to zero."""
        for leaf in self._zeros:
            leaf[...] = 0
        self.begin_step()
        self.alive[:] = 0

    def begin_step(self) -> None:
        """Set to zero what a step does not write for each agent."""
        if self.terminations.any() or self.truncations.any():
            ended = np.flatnonzero(self.terminations | self.truncations)
            for leaf in self._zeros:
                leaf[ended] = 0
            self.terminations[:] = 0
            self.truncations[:] = 0
        self.rewards[:] = 0
        self.valid[:] = 0

    def write(self, k: int, agent: Any, observations: Any) -> None:
        """Write the observation of an agent."""
        try:
            obs = observations[agent]
        except KeyError:
            raise ObservationError(
                f"returned no observation of agent {agent!r}, which is alive; got those of "
                f"{list(observations)}"
            ) from None
        try:
            self.rows.target[self.rows.keys[k]] = obs
        except (TypeError, ValueError, AttributeError, OverflowError, LookupError):
            try:
                self.rows.write(k, obs)
            except ObservationError as error:
                raise ObservationError(f"agent {agent!r}: {error}") from None

    def finish(self, k: int, agent: Any, observations: Any) -> None:
        """Write the last observation of an agent, if there is one."""
        if agent in observations and observations[agent] is not None:
            self.write(k, agent, observations)
        else:
            for leaf in self._zeros:
                leaf[k] = 0


def _leaves(batch: Any) -> list[np.ndarray]:
    if isinstance(batch, dict):
        return [leaf for part in batch.values() for leaf in _leaves(part)]
    if isinstance(batch, tuple):
        return [leaf for part in batch for leaf in _leaves(part)]
    return [batch]


def _state_space(game: Any) -> gym.Space:
    space = getattr(game, "state_space", None)
    if space is None:
        raise ValueError(f"{game} has no `state_space`, which central_state=True needs")
    return space


def _incomplete(agent: Any, *dicts: Any) -> ObservationError:
    for name, found in zip(("rewards", "terminations", "truncations"), dicts, strict=True):
        if agent not in found:
            return ObservationError(
                f"returned no {name} of agent {agent!r}, which acted; got those of {list(found)}"
            )
    raise AssertionError(agent)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
