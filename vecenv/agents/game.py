"""GameEnv: a PettingZoo `ParallelEnv` as one Gymnasium env of columns, for any backend to batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict
from gymnasium.vector.utils import batch_space

from vecenv.agents import grouping as at
from vecenv.agents.grouping import (
    Grouping,
    Members,
    columns_space,
    fit_action,
    fit_mask,
    fit_obs,
    group_agents,
    shelve,
)
from vecenv.core.arguments import read_count
from vecenv.core.errors import ObservationError
from vecenv.core.infos import add_info
from vecenv.core.masks import MASK_KEY
from vecenv.core.rows import ObservationRows
from vecenv.core.spaces import leaves, short

__all__ = ["NAME_KEY", "GameEnv"]

NAME_KEY = "agent"  # in infos: name of an agent that has just taken a seat


class GameEnv(gym.Env):
    """A game with several agents as one env: its observation is a dict of columns per group.

    The observation is, for each group, a dict of arrays over its A agents: `obs` (A, ...) as
    Gymnasium batches the agents' space, `rewards` float64 (A,), and, int8 (A,) with 0 and 1,
    `terminations`, `truncations`, `valid` (the agent acted in this step) and `alive` (it acts in
    next). Rows of agents that neither acted nor act next are zeros. The env's reward is the sum
    of the agents'. It ends when no agent is alive: terminated, unless an agent of the last step was
    truncated. An action is, for each group, an array (A, ...); entries of agents that are not alive
    are ignored.

    The next call overwrites what a call returned.

    Args:
        game: The `ParallelEnv`, or anything with its methods.
        groups: See `group_agents`.
        central_state: Whether the game's `state()` is a column "state" of the observation.
        pad: See `group_agents`.
        agent_indicator: See `group_agents`.
        max_agents: For games without `possible_agents`, whose agents come with names of their own:
            the most agents at a time. Each takes the first free seat and keeps it; when it takes
            it, its info has its name as "agent".
        agent_spaces: For such games, the observation space and the action space of every agent.

    Raises:
        ValueError: The game can't be divided into groups; says what is wrong.
    """

    def __init__(
        self,
        game: Any,
        *,
        groups: Grouping = None,
        central_state: bool = False,
        pad: bool = False,
        agent_indicator: bool = False,
        max_agents: int | None = None,
        agent_spaces: tuple[Space, Space] | None = None,
    ) -> None:
        self.game = game
        agents, observed, acted = _declared(game, max_agents, agent_spaces)
        self._is_open = max_agents is not None  # agents take seats, and have no fixed places
        self.members = group_agents(
            agents, observed, acted, groups, pad=pad, agent_indicator=agent_indicator
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
        self._columns = {
            name: _Columns(members, observed, acted, agent_indicator)
            for name, members in self.members.items()
        }
        seats = {
            agent: _Seat(agent, name, columns, k)
            for name, columns in self._columns.items()
            for k, agent in enumerate(columns.members.agents)
        }
        self._free = [seats[agent] for agent in agents] if self._is_open else []
        self._seats: dict[Any, _Seat] = {} if self._is_open else seats
        self._obs = {name: columns.arrays() for name, columns in self._columns.items()}
        self._state: np.ndarray | None = None
        if state_space is not None:
            self._state = np.zeros(state_space.shape or (), state_space.dtype)
        self._acting: list[_Seat] = []
        self._acting_names: list[Any] = []
        self._left: list[Any] = []  # agents that ended in the latest step and have seats
        self._gone: set[Any] = set()  # agents that have ended and are still in the game's `agents`

    @property
    def padding(self) -> dict[str, np.ndarray]:
        """Which actions the agents of a group have, bool (A * width,); empty without padding.

        `width` is the width of one agent's mask; padding makes it equal for a group's agents.
        """
        found = {name: members.allowed for name, members in self.members.items()}
        return {name: mask.reshape(-1) for name, mask in found.items() if mask is not None}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what can be made from the rest."""
        return {name: value for name, value in vars(self).items() if name != "_obs"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._obs = {name: columns.arrays() for name, columns in self._columns.items()}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset the game."""
        result = self.game.reset(seed=seed, options=options)
        observations, infos = _parts(result, "reset", ("observations", "infos"))
        for columns in self._columns.values():
            columns.clear()
        self._free_seats(list(self._seats))
        self._gone = set()
        self._seat(list(self.game.agents))
        if not self._acting:
            raise ObservationError("has no agents after reset: `agents` is empty")
        for seat in self._acting:
            seat.columns.write(seat, observations)
        self._refuse_strangers("observations", observations)
        return self._observed(), self._batched_infos(infos, self._acting)

    def step(
        self, action: dict[str, Any]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Step the game with the actions of the agents that are alive."""
        acted = self._acting
        result = self.game.step({seat.agent: seat.action(action) for seat in acted})
        observations, rewards, terminations, truncations, infos = _parts(result, "step", _RESULTS)
        for columns in self._columns.values():
            columns.begin_step()
        if self._left:
            self._free_seats(self._left)
        if (left := self.game.agents).__class__ is not list:
            left = list(left)
        total, is_cut = 0.0, False
        ended: list[Any] = []
        for seat in acted:
            agent, _, columns, k = seat
            try:
                reward = rewards[agent]
                terminated, truncated = terminations[agent], truncations[agent]
            except KeyError:
                raise _incomplete(agent, rewards, terminations, truncations) from None
            columns.write_reward(k, agent, reward)
            total += columns.rewards[k]
            columns.valid[k] = 1
            try:
                has_ended = terminated or truncated or agent not in left
            except ValueError:  # an array of several numbers
                raise ObservationError(
                    f"agent {agent!r} got the flags {short(terminated)} (terminated) and "
                    f"{short(truncated)} (truncated), expected one bool each"
                ) from None
            if has_ended:
                ended.append(agent)
                columns.end(k, terminated, truncated)
                is_cut |= not terminated
                columns.finish(seat, observations)
            else:
                columns.write(seat, observations)
        joined: Sequence[_Seat] = ()
        if ended or self._gone or left != self._acting_names:
            joined = self._change_seats(left, ended, observations)
        if len(observations) > len(acted) or len(rewards) > len(acted):
            self._refuse_strangers("observations", observations)
            self._refuse_strangers("rewards", rewards)
        is_over = not self._acting
        infos = self._batched_infos(infos, joined) if infos or joined else {}
        return self._observed(), total, is_over and not is_cut, is_over and is_cut, infos

    def _change_seats(self, left: list[Any], ended: list[Any], observations: Any) -> list[_Seat]:
        """Record who acts next after agents ended or joined; return the new ones, observed.

        Agents that have ended can act again after they have been missing in the game's `agents`.
        """
        before = set(self._acting_names)
        self._gone = {agent for agent in left if agent in ended or agent in self._gone}
        self._seat([agent for agent in left if agent not in self._gone])
        joined = [seat for seat in self._acting if seat.agent not in before]
        for seat in joined:
            seat.columns.write(seat, observations)
        if self._is_open:
            self._left = ended
        return joined

    def _seat(self, agents: list[Any]) -> None:
        """Record who acts next."""
        if len(set(agents)) != len(agents):
            raise ObservationError(f"has agents twice in its `agents` {agents}")
        self._acting_names = agents
        for columns in self._columns.values():
            columns.alive[:] = 0
        self._acting = []
        for agent in agents:
            if (seat := self._seats.get(agent)) is None:
                seat = self._take_seat(agent)
            seat.columns.alive[seat.k] = 1
            self._acting.append(seat)

    def _take_seat(self, agent: Any) -> _Seat:
        if not self._is_open:
            raise ObservationError(
                f"has the agent {agent!r}, which is none of its possible_agents {list(self._seats)}"
            )
        if not self._free:
            raise ObservationError(
                f"has the agent {agent!r} beside {list(self._seats)}, more than "
                f"max_agents={len(self._seats)}; an agent that ends keeps its seat for that step"
            )
        seat = self._free.pop(0)._replace(agent=agent)
        self._seats[agent] = seat
        return seat

    def _free_seats(self, agents: list[Any]) -> None:
        """Free the seats of agents that are gone, if agents take seats."""
        if self._is_open:
            self._free += [self._seats.pop(agent) for agent in agents]
            self._free.sort(key=lambda seat: seat.k)
            self._left = []

    def _refuse_strangers(self, what: str, found: Mapping[Any, Any]) -> None:
        """Raise for results of agents that the game has never declared."""
        for agent in found:
            if agent not in self._seats and agent not in self._gone and agent != at.COMMON:
                raise ObservationError(
                    f"returned {what} of {agent!r}, which is none of its agents {list(self._seats)}"
                )

    def _observed(self) -> dict[str, Any]:
        if self._state is None:
            return self._obs
        state = np.asarray(self.game.state())
        if state.shape != self._state.shape:
            raise ObservationError(
                f"returned a central state of shape {state.shape}, expected {self._state.shape} "
                "as its state_space says"
            )
        self._state[...] = state
        return {**self._obs, at.STATE: self._state}

    def _batched_infos(self, infos: Any, joined: Sequence[_Seat]) -> dict[str, Any]:
        """Return the agents' infos by group, batched over its agents, and the game's infos."""
        if not _is_dict(infos):
            raise ObservationError(f"returned infos {short(infos)}, expected a dict by agent")
        batched: dict[str, Any] = {}
        common: Any = None
        for agent, info in infos.items():
            if info is None or (info.__class__ is dict and not info):
                continue
            if (seat := self._seats.get(agent)) is not None:
                self._add_info(batched, seat, info)
            elif agent == at.COMMON:
                common = info
            elif agent not in self._gone:
                raise ObservationError(
                    f"returned infos of {agent!r}, which is none of its agents {list(self._seats)}"
                )
        if self._is_open:
            for seat in joined:
                self._add_info(batched, seat, {NAME_KEY: str(seat.agent)})
        found = {name: shelve(part) for name, part in batched.items()}
        if common is not None:
            found[at.COMMON] = common
        return found

    @staticmethod
    def _add_info(batched: dict[str, Any], seat: _Seat, info: Any) -> None:
        agent, name, columns, k = seat
        fit = columns.mask_fits[k]
        if not _is_dict(info):
            raise ObservationError(
                f"agent {agent!r} got the infos {short(info)} of type {type(info).__name__}, "
                "expected a dict"
            )
        if fit is not None and MASK_KEY in info:
            info = {**info, MASK_KEY: fit(info[MASK_KEY])}
        try:
            add_info(batched.setdefault(name, {}), info, k, len(columns.members.agents))
        except ValueError as error:
            raise ObservationError(
                f"agent {agent!r} returned infos that don't fit: {error}"
            ) from None

    def render(self) -> Any:
        """Return the game's drawing."""
        return self.game.render()

    def close(self) -> None:
        """Close the game, if it has something to close."""
        if hasattr(self.game, "close"):
            self.game.close()


class _Seat(NamedTuple):
    """The place of an agent's results: row `k` of a group's columns."""

    agent: Any
    group: str
    columns: _Columns
    k: int

    def action(self, actions: dict[str, Any]) -> Any:
        """Return this agent's action, which the game may keep."""
        action = actions[self.group][self.k]
        fit = self.columns.action_fits[self.k]
        if fit is not None:
            return fit(action)
        return action.copy() if action.__class__ is np.ndarray else action


class _Columns:
    """The arrays of one group of one game."""

    def __init__(
        self,
        members: Members,
        observed: Mapping[Any, Space],
        acted: Mapping[Any, Space],
        agent_indicator: bool,
    ) -> None:
        self.members = members
        count = len(members.agents)
        self.rewards = np.zeros(count, np.float64)
        self.terminations = np.zeros(count, np.int8)
        self.truncations = np.zeros(count, np.int8)
        self.valid = np.zeros(count, np.int8)
        self.alive = np.zeros(count, np.int8)
        self.has_ends = False  # whether a flag may be set
        self._spaces = [(observed[agent], acted[agent]) for agent in members.agents]
        self._agent_indicator = agent_indicator
        self._bind(ObservationRows(members.observation_space, count))

    def _bind(self, rows: ObservationRows) -> None:
        """Make the views and functions for observations, actions and masks."""
        members = self.members
        self.rows = rows
        self._leaves = leaves(rows.batch(), members.observation_space)
        ones = np.eye(len(members.agents))
        self.action_fits = [fit_action(acted, members.action_space) for _, acted in self._spaces]
        self.mask_fits = [fit_mask(acted, members.action_space) for _, acted in self._spaces]
        self._obs_fits = [
            fit_obs(observed, members.observation_space, ones[k] if self._agent_indicator else None)
            for k, (observed, _) in enumerate(self._spaces)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Keep the arrays; functions and views are made again."""
        made = ("rows", "_leaves", "action_fits", "mask_fits", "_obs_fits")
        state = {name: value for name, value in vars(self).items() if name not in made}
        return {**state, "_kept": [leaf.copy() for leaf in self._leaves]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = state.pop("_kept")
        vars(self).update(state)
        self._bind(ObservationRows(self.members.observation_space, len(self.rewards)))
        for leaf, values in zip(self._leaves, kept, strict=True):
            leaf[...] = values

    def arrays(self) -> dict[str, Any]:
        """Return the columns by name."""
        return {
            at.OBS: self.rows.batch(),
            at.REWARDS: self.rewards,
            at.TERMINATIONS: self.terminations,
            at.TRUNCATIONS: self.truncations,
            at.VALID: self.valid,
            at.ALIVE: self.alive,
        }

    def clear(self) -> None:
        """Set everything to zero."""
        for leaf in self._leaves:
            leaf[...] = 0
        self.begin_step()
        self.alive[:] = 0

    def begin_step(self) -> None:
        """Set to zero what a step does not write for every agent."""
        if self.has_ends:
            self.has_ends = False
            ended = np.flatnonzero(self.terminations | self.truncations)
            for leaf in self._leaves:
                leaf[ended] = 0
            self.terminations[:] = 0
            self.truncations[:] = 0
        self.rewards[:] = 0
        self.valid[:] = 0

    def write_reward(self, k: int, agent: Any, reward: Any) -> None:
        """Write the reward of an agent: anything that is one number."""
        array = np.asarray(reward)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise ObservationError(
                f"agent {agent!r} got the reward {short(reward)}, expected one number"
            )
        self.rewards[k] = array.item()

    def write(self, seat: _Seat, observations: Any) -> None:
        """Write the observation of an agent."""
        agent, k = seat.agent, seat.k
        try:
            obs = observations[agent]
        except (KeyError, TypeError):
            raise ObservationError(
                f"agent {agent!r} is alive and got no observation; there are those of "
                f"{_names(observations)}"
            ) from None
        try:
            fit = self._obs_fits[k]
            if fit is not None:
                obs = fit(obs)
            self.rows.target[self.rows.keys[k]] = obs
        except (TypeError, ValueError, AttributeError, OverflowError, LookupError) as error:
            try:
                if isinstance(error, ObservationError):
                    raise
                self.rows.write(k, obs)
            except ObservationError as found:
                raise ObservationError(f"agent {agent!r} {found.problem}") from None

    def end(self, k: int, terminated: Any, truncated: Any) -> None:
        """Record the end of an agent; one that is missing without a flag is truncated."""
        self.has_ends = True
        self.terminations[k] = bool(terminated)
        self.truncations[k] = bool(truncated) or not terminated

    def finish(self, seat: _Seat, observations: Any) -> None:
        """Write the last observation of an agent, if there is one."""
        if seat.agent in observations and observations[seat.agent] is not None:
            self.write(seat, observations)
        else:
            for leaf in self._leaves:
                leaf[seat.k] = 0


_RESULTS = ("observations", "rewards", "terminations", "truncations", "infos")


def _declared(
    game: Any, max_agents: int | None, agent_spaces: tuple[Space, Space] | None
) -> tuple[list[Any], dict[Any, Space], dict[Any, Space]]:
    """Return the agents of a game, or its seats, and their spaces."""
    possible = getattr(game, "possible_agents", None)
    if agents := [] if possible is None else list(possible):
        if max_agents is not None or agent_spaces is not None:
            raise ValueError(
                f"{game} has possible_agents and spaces of its own; max_agents and agent_spaces "
                "are for games without"
            )
        return (
            agents,
            {agent: game.observation_space(agent) for agent in agents},
            {agent: game.action_space(agent) for agent in agents},
        )
    if isinstance(game, gym.Env):
        raise TypeError(f"{game} is an env of one agent: make it with make_vec")
    if max_agents is None or agent_spaces is None:
        raise ValueError(
            f"{game} has no `possible_agents`, which say how many rows a game has; pass "
            "max_agents=, the most that there are at a time, and agent_spaces=(observation_space, "
            "action_space)"
        )
    seats = [f"agent_{k}" for k in range(read_count("max_agents", max_agents))]
    return seats, dict.fromkeys(seats, agent_spaces[0]), dict.fromkeys(seats, agent_spaces[1])


def _parts(result: Any, call: str, names: tuple[str, ...]) -> Any:
    """Return the parts of a game's result; raise if it has another form."""
    is_right = isinstance(result, tuple | list) and len(result) == len(names)
    if not is_right or not all(map(_is_dict, result[:-1])):
        raise ObservationError(
            f"returned {short(result)} from {call}, expected the dicts ({', '.join(names)})"
        )
    return result


def _is_dict(part: Any) -> bool:
    return part.__class__ is dict or hasattr(part, "keys")


def _state_space(game: Any) -> gym.Space:
    space = getattr(game, "state_space", None)
    if space is None:
        raise ValueError(f"{game} has no `state_space`, which central_state=True needs")
    return space


def _incomplete(agent: Any, *dicts: Any) -> ObservationError:
    name, found = next(
        pair for pair in zip(_RESULTS[1:4], dicts, strict=True) if agent not in pair[1]
    )
    return ObservationError(
        f"agent {agent!r} acted and is not in the {name}, which has {_names(found)}"
    )


def _names(found: Any) -> str:
    return str(list(found)) if hasattr(found, "keys") else short(found)
