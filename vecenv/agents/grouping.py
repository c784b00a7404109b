"""Which agents form a group, the name of a group, and the layout of a game in arrays.

A *game* is one env with several agents. A *group* consists of agents with equal spaces. A vector
env of games returns one Dict observation per game: for each group its columns, in which
entry k is the group's k-th agent. Rows of agents are these columns with the first two axes, games
and agents, merged.

Spaces of different agents are made equal by padding: an observation is the agent's own, followed by
zeros; an agent's own actions are the first of the padded ones, and masks forbid the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector.utils import batch_space

from vecenv.core.errors import ObservationError
from vecenv.core.masks import mask_sizes
from vecenv.core.spaces import ARRAY_SPACES, is_arrays, leaf_by_leaf

__all__ = [
    "ALIVE", "COMMON", "FINAL_STATE", "OBS", "REWARDS", "STATE", "TERMINATIONS", "TRUNCATIONS",
    "VALID", "Grouping", "Members", "allowed_actions", "columns_space", "fit_action", "fit_mask",
    "fit_obs", "group_agents", "pad_space", "repeat_infos", "rows_of_infos", "shelve",
]  # fmt: skip


# Columns of a group, and the column of the game.
OBS, REWARDS, TERMINATIONS, TRUNCATIONS = "obs", "rewards", "terminations", "truncations"
VALID, ALIVE = "valid", "alive"
# Not allowed as names of groups: PettingZoo's names of a game's central state and infos.
STATE, COMMON = "state", "common"
FINAL_STATE = "final_state"  # in infos: the central state at the end of a game that was reset

Grouping = Mapping[str, Sequence[Any]] | Callable[[Any], str] | None
_ALL = "agents"  # name of a group whose agents have different names


class Members(NamedTuple):
    """A group of a game.

    Attributes:
        agents: Names in the game, in the order of the rows.
        observation_space: Space of one agent's observation.
        action_space: Space of one agent's action.
        allowed: The padded actions that each agent has, bool (A, width), each row in the form of a
            mask (see `vecenv.VecEnv.action_masks`); None if all agents have all.
    """

    agents: tuple[Any, ...]
    observation_space: Space
    action_space: Space
    allowed: np.ndarray | None = None


def group_agents(
    agents: Sequence[Any],
    observation_spaces: Mapping[Any, Space],
    action_spaces: Mapping[Any, Space],
    groups: Grouping = None,
    *,
    pad: bool = False,
    agent_indicator: bool = False,
) -> dict[str, Members]:
    """Group agents with equal spaces.

    Args:
        agents: Names of all agents that a game may have.
        observation_spaces: Observation space of each agent.
        action_spaces: Action space of each agent.
        groups: The agents of each group, by its name; or a function from an agent to the name of
            its group. None groups agents with equal spaces; such a group has the agents' common
            name without numbers, such as "piston" for "piston_0", ..., or else
            "agents".
        pad: Pad the spaces of a group to be equal; without `groups`, all agents are one group then.
        agent_indicator: Append to observations, which must be vectors, the one-hot index of the
            observing agent in its group.

    Returns:
        Groups, in the order of their first agents in `agents`.

    Raises:
        ValueError: An agent is in no group, in two, or unknown; or spaces of a group differ.
    """
    if not agents:
        raise ValueError("the game has no agents")
    if len(set(agents)) != len(agents):
        raise ValueError(f"the game names agents twice: {list(agents)}")
    if groups is None and pad:
        chosen = {_stem(agents): list(agents)}
    elif groups is None:
        chosen = _equal_spaces(agents, observation_spaces, action_spaces)
    else:
        chosen = _chosen(agents, groups)
    found = {}
    for name, members in chosen.items():
        first = members[0]
        for agent in members:
            _require_arrays(agent, observation_spaces[agent], action_spaces[agent])
        if pad:
            observed = {agent: observation_spaces[agent] for agent in members}
            acted = {agent: action_spaces[agent] for agent in members}
            observation_space = pad_space(observed, is_action=False)
            action_space = pad_space(acted, is_action=True)
            allowed = allowed_actions(list(acted.values()), action_space)
        else:
            _require_equal(name, members, observation_spaces, action_spaces)
            observation_space, action_space = observation_spaces[first], action_spaces[first]
            allowed = None
        if agent_indicator:
            observation_space = _with_indicator(name, observation_space, len(members))
        found[name] = Members(tuple(members), observation_space, action_space, allowed)
    return found


def columns_space(groups: Mapping[str, Members], state_space: Space | None = None) -> Dict:
    """Return the observation space of a game, in the form that the module's docstring describes."""
    parts: dict[str, Space] = {}
    for name, members in groups.items():
        count = len(members.agents)
        flags = {column: MultiBinary(count) for column in (TERMINATIONS, TRUNCATIONS, VALID, ALIVE)}
        parts[name] = Dict(
            {
                OBS: batch_space(members.observation_space, count),
                REWARDS: Box(-np.inf, np.inf, (count,), np.float64),
                **flags,
            }
        )
    if state_space is not None:
        parts[STATE] = state_space
    return Dict(parts)


def _equal_spaces(
    agents: Sequence[Any],
    observation_spaces: Mapping[Any, Space],
    action_spaces: Mapping[Any, Space],
) -> dict[str, list[Any]]:
    alike: list[tuple[tuple[Space, Space], list[Any]]] = []
    for agent in agents:
        spaces = observation_spaces[agent], action_spaces[agent]
        members = next((members for own, members in alike if own == spaces), None)
        if members is None:
            alike.append((spaces, [agent]))
        else:
            members.append(agent)
    named: dict[str, list[Any]] = {}
    for _, members in alike:
        name = _stem(members)
        if name in named:  # agents of another group have the same name
            name = str(members[0])
        base, count = name, 1
        while name in named:
            count += 1
            name = f"{base}_{count}"
        named[name] = members
    return named


def _stem(agents: Sequence[Any]) -> str:
    """Return the agents' common name without numbers, if they have one."""
    stems = {re.sub(r"[_\-\s]*\d*$", "", str(agent)) for agent in agents}
    stem = stems.pop() if len(stems) == 1 else ""
    return stem if stem and stem not in (STATE, COMMON) else _ALL


def _require_equal(
    name: str,
    members: Sequence[Any],
    observation_spaces: Mapping[Any, Space],
    action_spaces: Mapping[Any, Space],
) -> None:
    first = members[0]
    for agent in members:
        same = observation_spaces[agent] == observation_spaces[first]
        if not same or action_spaces[agent] != action_spaces[first]:
            raise ValueError(
                f"group {name!r}: agent {agent!r} has the spaces {observation_spaces[agent]} "
                f"and {action_spaces[agent]}, agent {first!r} {observation_spaces[first]} and "
                f"{action_spaces[first]}; agents of a group have equal spaces (pad=True pads)"
            )


def _with_indicator(name: str, space: Space, count: int) -> Box:
    if not isinstance(space, Box) or len(space.shape) != 1 or space.dtype.kind != "f":
        raise ValueError(
            f"agent_indicator=True appends numbers to observations that are vectors of floats; "
            f"those of group {name!r} are {space}"
        )
    low = np.concatenate([space.low, np.zeros(count, space.dtype)])
    high = np.concatenate([space.high, np.ones(count, space.dtype)])
    return Box(low, high, dtype=space.dtype.type)


def _chosen(agents: Sequence[Any], groups: Any) -> dict[str, list[Any]]:
    named: dict[Any, list[Any]] = {}
    if callable(groups):
        for agent in agents:
            named.setdefault(groups(agent), []).append(agent)
    else:
        named = {name: list(members) for name, members in groups.items()}
    places: dict[Any, str] = {}
    for name, members in named.items():
        if not isinstance(name, str) or name in (STATE, COMMON):
            raise ValueError(
                f"{name!r} is no name of a group; take a str other than {STATE!r} and {COMMON!r}"
            )
        if not members:
            raise ValueError(f"group {name!r} has no agents")
        for agent in members:
            if agent not in agents:
                raise ValueError(f"group {name!r} has agent {agent!r}; the game has {list(agents)}")
            if agent in places:
                raise ValueError(f"agent {agent!r} is in {places[agent]!r} and in {name!r}")
            places[agent] = name
    if missing := [agent for agent in agents if agent not in places]:
        raise ValueError(f"agents {missing} are in no group")
    return named


def _require_arrays(agent: Any, observation_space: Space, action_space: Space) -> None:
    """Raise for spaces without fixed shape: rows of agents are rows of arrays."""
    if not is_arrays(observation_space):
        raise ValueError(
            f"agent {agent!r} observes {observation_space}; expected Box, Discrete, MultiDiscrete, "
            "MultiBinary, or Dict and Tuple of these"
        )
    if not isinstance(action_space, ARRAY_SPACES):
        raise ValueError(
            f"agent {agent!r} acts in {action_space}; expected Box, Discrete, MultiDiscrete or "
            "MultiBinary"
        )


# -- infos ---------------------------------------------------------------------------------------
#
# A game's infos of a group are batched over its agents: an array (A, ...) per key, and a mask of
# who has given it, bool (A,). A vector env batches these again over games and adds masks of its
# own, under the names of the first masks; so the first masks travel under other names.

GIVEN = "given:"


def shelve(infos: dict[str, Any]) -> dict[str, Any]:
    """Return the batched infos of a game's group with masks renamed.

    Example:
        >>> sorted(shelve({"speed": np.ones(2), "_speed": np.array([True, False])}))
        ['given:speed', 'speed']
    """
    found: dict[str, Any] = {}
    for key, value in infos.items():
        name = f"{GIVEN}{key[1:]}" if _is_mask(key, infos) else key
        found[name] = shelve(value) if isinstance(value, dict) else value
    return found


def rows_of_infos(infos: dict[str, Any]) -> dict[str, Any]:
    """Return batched infos of rows from `shelve`d infos that a vector env has batched.

    Args:
        infos: Per key an array (games, A, ...), with masks (games,), which are dropped.

    Returns:
        Per key an array (games * A, ...) and a mask, as Gymnasium batches infos.
    """
    found: dict[str, Any] = {}
    for key, value in infos.items():
        if _is_mask(key, infos):
            continue
        is_given = str(key).startswith(GIVEN)
        name = f"_{key.removeprefix(GIVEN)}" if is_given else key
        if isinstance(value, dict):
            found[name] = rows_of_infos(value)
        else:
            found[name] = _one_axis(value)
    return found


def repeat_infos(infos: dict[str, Any], num_agents: int) -> dict[str, Any]:
    """Return infos of games as infos of rows: each agent gets those of its game."""

    def repeated(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return np.repeat(value, num_agents, axis=0)
        return value.repeat_interleave(num_agents, 0)  # a tensor of games on a device

    return leaf_by_leaf(repeated, infos)


def _one_axis(array: np.ndarray) -> np.ndarray:
    """Merge the first two axes, also where each game's array is an object."""
    if array.dtype != object or array.ndim > 1:
        return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
    given = [value for value in array if isinstance(value, np.ndarray)]
    first = given[0]
    empty = np.full_like(first, None) if first.dtype == object else np.zeros_like(first)
    return np.concatenate([v if isinstance(v, np.ndarray) else empty for v in array])


def _is_mask(key: Any, infos: dict[Any, Any]) -> bool:
    """Whether a key is that of another key's mask."""
    return isinstance(key, str) and key[:1] == "_" and key[1:] in infos


def pad_space(spaces: Mapping[Any, Any], *, is_action: bool) -> Space:
    """Return the space that has room for the observations, or actions, of all these agents.

    Vectors become as long as the longest one, Discrete and MultiDiscrete spaces as large as the
    largest; parts of Dict spaces are padded one by one. Arrays of more dimensions must have equal
    shapes, and vectors of actions equal bounds.

    Raises:
        ValueError: The spaces can't be padded to one; names two agents.
    """
    (agent, first), every = next(iter(spaces.items())), list(spaces.values())
    if all(space == first for space in every):
        return first
    for other, space in spaces.items():
        if not _can_be_padded(space, first, is_action):
            raise ValueError(
                f"agent {other!r} {'acts in' if is_action else 'observes'} {space}, agent "
                f"{agent!r} {first}, which can't be padded to one space: vectors are padded in "
                "length and Discrete spaces in number, the rest has to be equal; choose other "
                "groups, or take away pad=True"
            )
    if isinstance(first, Dict):
        parts = {key: {k: space[key] for k, space in spaces.items()} for key in first.spaces}
        return Dict({key: pad_space(part, is_action=is_action) for key, part in parts.items()})
    if isinstance(first, Discrete):
        return Discrete(max(space.n for space in every), start=first.start)
    if isinstance(first, MultiDiscrete):
        counts = np.max([space.nvec for space in every], axis=0)
        return MultiDiscrete(counts, dtype=first.dtype.type, start=first.start)
    longest = max(every, key=lambda space: space.shape)
    return longest if is_action else _padded_box(every, longest.shape)


def _can_be_padded(space: Any, first: Any, is_action: bool) -> bool:
    """Whether two spaces differ only in what padding makes equal."""
    if type(space) is not type(first) or space.dtype != first.dtype:
        return False
    if isinstance(first, Box):
        is_vector = len(space.shape) == len(first.shape) == 1
        part = tuple(map(slice, np.minimum(space.shape, first.shape))) if is_vector else ...
        bounds = (space.low[part], space.high[part]), (first.low[part], first.high[part])
        has_room = is_vector or space.shape == first.shape
        return has_room and (not is_action or np.array_equal(*bounds))
    if isinstance(first, Dict):
        return space.spaces.keys() == first.spaces.keys()
    if isinstance(first, Discrete | MultiDiscrete):
        return space.shape == first.shape and np.array_equal(space.start, first.start)
    return space == first


def _padded_box(spaces: Sequence[Any], shape: tuple[int, ...]) -> Box:
    """Return a Box with the lowest and highest bounds; those of padded entries include 0."""
    bounds = np.zeros((2, len(spaces), *shape), spaces[0].dtype)
    for k, space in enumerate(spaces):
        bounds[:, k, *map(slice, space.shape)] = space.low, space.high
    return Box(bounds[0].min(axis=0), bounds[1].max(axis=0), dtype=spaces[0].dtype.type)


def allowed_actions(spaces: Sequence[Space], padded: Space) -> np.ndarray | None:
    """Return which of the padded actions each agent has, bool (A, width) in the form of masks.

    None if every agent has all, or if actions are not Discrete or MultiDiscrete.
    """
    if not isinstance(padded, Discrete | MultiDiscrete):
        return None
    sizes = [mask_sizes(space) for space in spaces]
    most = mask_sizes(padded)
    rows = [
        np.concatenate([np.arange(top) < size for size, top in zip(own, most, strict=True)])
        for own in sizes
    ]
    allowed = np.stack(rows)
    return None if allowed.all() else allowed


def fit_obs(
    space: Space, padded: Space, indicator: np.ndarray | None = None
) -> Callable[[Any], Any] | None:
    """Return a function from observations of `space` to those of `padded`; None if equal.

    It raises ObservationError for values outside `space`. An `indicator` is written to the end.
    """
    if space == padded:
        return None
    if isinstance(space, Box) and isinstance(padded, Box) and space.shape != padded.shape:
        (length,), size, dtype = space.shape, padded.shape[0], padded.dtype
        end = np.zeros(0) if indicator is None else indicator

        def fit(obs: Any) -> np.ndarray:
            values = np.asarray(obs)
            if values.shape != (length,) or not np.can_cast(values.dtype, dtype, "same_kind"):
                raise ObservationError(
                    f"returned an observation of shape {values.shape} and dtype {values.dtype}, "
                    f"expected shape {(length,)} and dtype {dtype} ({space}); correct the env or "
                    "its observation_space"
                )
            row = np.zeros(size, dtype)
            row[:length] = values
            row[size - len(end) :] = end
            return row

        return fit
    if isinstance(space, Dict) and isinstance(padded, Dict):
        fits = {key: fit_obs(part, padded[key]) for key, part in space.spaces.items()}

        def fit_parts(obs: Any) -> dict[str, Any]:
            return {k: obs[k] if fit is None else fit(obs[k]) for k, fit in fits.items()}

        return fit_parts
    return None  # equal except for bounds


def fit_action(space: Space, padded: Space) -> Callable[[Any], Any] | None:
    """Return a function from actions of `padded` to those of `space`; None if they are equal."""
    if isinstance(space, Box) and space.shape != padded.shape:
        (length,) = space.shape
        return lambda action: action[:length].copy()
    return None


def fit_mask(space: Space, padded: Space) -> Callable[[Any], Any] | None:
    """Return a function from masks for actions of `space` to ones for `padded`."""
    if space == padded or not isinstance(padded, Discrete | MultiDiscrete):
        return None
    own = allowed_actions([space], padded)
    if own is None:
        return None
    places = np.flatnonzero(own[0])

    def fit(mask: Any) -> Any:
        values = np.asarray(mask)
        if values.shape != places.shape:
            return mask  # it is refused where masks are read
        padded_mask = np.zeros(len(own[0]), np.int8)
        padded_mask[places] = values
        return padded_mask

    return fit
