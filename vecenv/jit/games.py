"""Games with several agents as compiled envs: agents in groups, and their kernels as one env's.

The author's kernels describe one game. `game_kernels` turns them into the kernels of an ordinary
compiled env. Its observation is one array with a row per agent, its action one array with an entry
per agent. The results of each agent are kept in fields of the state record (`COLUMNS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector.utils import batch_space
from numba import njit
from numba.extending import is_jitted

from vecenv.core.masks import can_be_masked, mask_width
from vecenv.jit.driver import array_row, no_mask, scalar_row

# Fields that are added to the state record, one entry per agent in the order of the groups.
COLUMNS = {
    "rewards": np.dtype(np.float64),  # of the latest step
    "terminations": np.dtype(np.int8),
    "truncations": np.dtype(np.int8),
    "valid": np.dtype(np.int8),  # whether the agent acted in the latest step
    "alive": np.dtype(np.int8),  # whether it acts in the next one
    "observes": np.dtype(np.int8),  # whether it has an observation now: alive, or just ended
}
_SPACES = (Box, Discrete, MultiBinary, MultiDiscrete)


class AgentsOf(NamedTuple):
    """A group of agents with equal spaces.

    Attributes:
        agents: Their names, or their number: 2 in a group "cat" are named "cat_0" and "cat_1".
        observation_space: Space of one agent: Box, Discrete, MultiDiscrete or MultiBinary.
        action_space: Space of one agent, likewise.
    """

    agents: Sequence[str] | int
    observation_space: Space
    action_space: Space


class GroupLayout(NamedTuple):
    """A group, and its place in the arrays of a game; spaces, shapes and width are of one agent."""

    agents: tuple[str, ...]  # names
    observation_space: Space
    action_space: Space
    agent_ids: slice  # numbers of its agents among all agents of the game
    obs: slice  # of a flat observation; likewise:
    actions: slice
    masks: slice
    obs_shape: tuple[int, ...]
    action_shape: tuple[int, ...]
    mask_width: int  # 0 if its actions can't be masked


class GameLayout(NamedTuple):
    """The layout of a game in arrays."""

    groups: dict[str, GroupLayout]
    num_agents: int  # in all groups
    observation_space: Space  # of one game: (A, *shape) for a single group, else flat (sum,)
    action_space: Space  # likewise

    @property
    def is_flat(self) -> bool:
        """Whether the arrays of a game are flat, because there are several groups."""
        return len(self.groups) > 1

    @classmethod
    def of(cls, groups: Mapping[str, AgentsOf]) -> GameLayout:
        """Lay out these groups.

        Raises:
            TypeError, ValueError: A group can't be laid out; the message names it.
        """
        if not isinstance(groups, Mapping) or not groups:
            raise TypeError(
                f"groups must be a dict of AgentsOf by the group's name, got {groups!r}"
            )
        found: dict[str, GroupLayout] = {}
        group_of: dict[str, str] = {}
        starts = np.zeros(4, np.int64)  # of agents, observations, actions and masks
        for name, given in groups.items():
            agents = _agent_names(name, given)
            for agent in agents:
                if agent in group_of:
                    raise ValueError(f"agent {agent!r} is in {group_of[agent]!r} and in {name!r}")
                group_of[agent] = name
            obs_space, action_space = given.observation_space, given.action_space
            check_space(f"group {name!r}: observation_space", obs_space)
            check_space(f"group {name!r}: action_space", action_space)
            obs_shape, action_shape = obs_space.shape or (), action_space.shape or ()
            is_masked = can_be_masked(action_space) and not isinstance(action_space, MultiBinary)
            width = mask_width(action_space) if is_masked else 0
            sizes = 1, int(np.prod(obs_shape)), int(np.prod(action_shape)), width
            ends = starts + len(agents) * np.array(sizes)
            ids, obs, actions, masks = map(slice, starts.tolist(), ends.tolist())
            found[name] = GroupLayout(
                agents, obs_space, action_space, ids, obs, actions, masks, obs_shape, action_shape,
                width,
            )  # fmt: skip
            starts = ends
        obs_space = _joined("observe", [(g.observation_space, g.agents) for g in found.values()])
        action_space = _joined("act in", [(g.action_space, g.agents) for g in found.values()])
        return cls(found, len(group_of), obs_space, action_space)


def _agent_names(group: str, given: Any) -> tuple[str, ...]:
    if not isinstance(group, str) or not group or group == "state":
        raise ValueError(f"{group!r} is no name of a group; take a str other than 'state'")
    if not isinstance(given, AgentsOf):
        raise TypeError(
            f"group {group!r} must be AgentsOf(agents, observation_space, action_space), "
            f"got {given!r}"
        )
    agents = given.agents
    if isinstance(agents, int) and not isinstance(agents, bool):
        agents = [f"{group}_{k}" for k in range(agents)]
    elif isinstance(agents, str) or not isinstance(agents, Sequence):
        raise TypeError(f"group {group!r}: agents must be their names or a number, got {agents!r}")
    if not agents:
        raise ValueError(f"group {group!r} has no agents")
    return tuple(agents)


def check_space(name: str, space: Any) -> None:
    """Raise TypeError or ValueError unless a space is one that kernels can use."""
    if not isinstance(space, _SPACES):
        raise TypeError(
            f"{name} must be a Box, Discrete, MultiDiscrete or MultiBinary space, got {space!r}"
        )
    if space.shape is None or 0 in space.shape:
        raise ValueError(f"{name} {space} has no elements")
    dtype = np.dtype(space.dtype)
    if dtype == np.float16 or dtype.itemsize > 8 or not dtype.isnative:
        given = dtype.name if dtype.isnative else dtype.str
        other = "float32" if dtype.kind == "f" else dtype.name
        raise TypeError(
            f"{name} {space} is of {given}, which Numba can't compute with; use {other}"
        )


def _joined(verb: str, parts: list[tuple[Space, tuple[str, ...]]]) -> Space:
    """Return the space of all agents' observations, or of all their actions."""
    spaces: list[Any] = [batch_space(space, len(agents)) for space, agents in parts]
    for k, (space, agents) in enumerate(parts):
        if isinstance(space, MultiDiscrete):  # of which Gymnasium makes a Box, without masks
            nvec, start = (np.stack([one] * len(agents)) for one in (space.nvec, space.start))
            spaces[k] = MultiDiscrete(nvec, start=start)
    if len(spaces) == 1:
        return spaces[0]
    if all(isinstance(space, MultiDiscrete) for space in spaces):
        return MultiDiscrete(
            np.concatenate([space.nvec.reshape(-1) for space in spaces]),
            start=np.concatenate([space.start.reshape(-1) for space in spaces]),
        )
    dtypes = {str(space.dtype) for space in spaces}
    if len(dtypes) > 1 or not all(isinstance(space, Box) for space in spaces):
        raise ValueError(
            f"the groups {verb} {', '.join(str(space) for space, _ in parts)}; what all agents of "
            "a compiled game observe is one array, and so is what they do: give all groups Box "
            "spaces of one dtype, or all of them Discrete and MultiDiscrete spaces"
        )
    return Box(
        np.concatenate([space.low.reshape(-1) for space in spaces]),
        np.concatenate([space.high.reshape(-1) for space in spaces]),
        dtype=spaces[0].dtype,
    )


def with_columns(dtype: np.dtype, num_agents: int) -> np.dtype:
    """Return a state record with the fields of `COLUMNS`; unchanged if it has them already."""
    columns = {name: np.dtype((base, (num_agents,))) for name, base in COLUMNS.items()}
    fields = {name: dtype[name] for name in dtype.names or ()}
    taken = [name for name in columns if name in fields]
    if not taken:
        return np.dtype(list((fields | columns).items()), align=True)
    if all(fields.get(name) == column for name, column in columns.items()):
        return dtype
    raise ValueError(
        f"state_dtype has fields {taken}, which a game with groups has already: one entry per "
        f"agent, {', '.join(COLUMNS)}; call yours something else"
    )


def as_njit(function: Any) -> Any:
    """Compile a plain function; division by zero gives inf or NaN, as kernels must not raise."""
    return function if is_jitted(function) else njit(function, error_model="numpy")


def game_kernels(layout: GameLayout, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kernels `reset`, `step`, `observe` and `action_mask` of one env that plays a game.

    `own` has the author's kernels by these names, for `observe` and `action_mask` also by group.
    """
    groups = layout.groups

    def written(kernels: Any, part: str, field: str, empty: int) -> Any:
        """Return a kernel that calls the author's kernels for the agents of all groups."""
        write: Any = no_mask
        for name, group in groups.items():
            kernel = as_njit(kernels[name] if isinstance(kernels, Mapping) else kernels)
            shape = (group.mask_width,) if part == "masks" else group.obs_shape or (1,)
            row_of: Any = array_row if group.obs_shape else scalar_row
            if part == "masks" or layout.is_flat:
                row_of = _flat_rows(getattr(group, part).start, shape)
            ids = group.agent_ids
            write = _writer(write, kernel, len(group.agents), ids.start, row_of, field, empty)
        return write

    masks = own["action_mask"]
    return {
        "reset": _reset(as_njit(own["reset"]), layout.num_agents),
        "step": _step(
            as_njit(own["step"]),
            _splitter(list(groups.values())) if layout.is_flat else _as_it_is,
            layout.num_agents,
        ),
        "observe": written(own["observe"], "obs", "observes", 0),
        # The actions of agents that are not alive do not matter.
        "action_mask": None if masks is None else written(masks, "masks", "alive", 1),
    }


def _reset(own_reset: Any, num_agents: int) -> Callable[..., None]:
    def reset(state, rng, *params):
        # Keep the columns of the step: in SAME_STEP mode, the step that ends a game also resets it.
        for k in range(num_agents):
            state.alive[k] = 1
        own_reset(state, rng, *params)
        for k in range(num_agents):
            state.observes[k] = state.alive[k]

    return reset


def _step(own_step: Any, split: Any, num_agents: int) -> Callable[..., tuple[float, bool, bool]]:
    def step(state, actions, rng, *params):
        for k in range(num_agents):
            state.valid[k] = state.alive[k]
            state.rewards[k] = 0.0
            state.terminations[k] = 0
            state.truncations[k] = 0
        reward, terminated, truncated = own_step(state, split(actions), rng, *params)
        total, any_left, any_cut = 0.0, False, False
        for k in range(num_agents):
            if state.valid[k] == 0:  # dead, or just joined
                state.rewards[k] = 0.0
                state.terminations[k] = 0
                state.truncations[k] = 0
                if terminated or truncated:
                    state.alive[k] = 0
                state.observes[k] = state.alive[k]
            else:
                state.rewards[k] += reward
                total += state.rewards[k]
                if terminated:
                    state.terminations[k] = 1
                if truncated:
                    state.truncations[k] = 1
                if state.terminations[k] == 0 and state.truncations[k] == 0 and state.alive[k] == 0:
                    state.truncations[k] = 1  # gone without a flag: a truncation
                if state.terminations[k] != 0 or state.truncations[k] != 0:
                    state.alive[k] = 0
                    any_cut |= state.terminations[k] == 0
                state.observes[k] = 1
            any_left |= state.alive[k] != 0
        return total, not any_left and not any_cut, not any_left and any_cut

    return step


def _flat_rows(start: int, shape: tuple[int, ...]) -> Any:
    """Return a function from a flat array and k to row k, of this shape, after `start`."""
    size = int(np.prod(shape))

    def flat_row(out, k):
        return out[start + k * size : start + (k + 1) * size]

    def shaped_row(out, k):
        return out[start + k * size : start + (k + 1) * size].reshape(shape)

    return njit(flat_row if len(shape) == 1 else shaped_row, inline="always")


def _writer(
    before: Any, kernel: Any, count: int, first: int, row_of: Any, field: str, empty: int
) -> Any:
    """Return a kernel that calls `before`, and another one for `count` agents from `first` on.

    Rows of agents that are not in the column `field` are filled with `empty`.
    """

    def write_group(state, out, *params):
        before(state, out, *params)
        for k in range(count):
            row = row_of(out, k)
            if state[field][first + k] != 0:
                kernel(state, first + k, row, *params)
            else:
                row[:] = empty

    return as_njit(write_group)


def _splitter(groups: list[GroupLayout]) -> Any:
    """Return a function from the flat actions of a game to a tuple of them by group."""
    group, rest = groups[0], groups[1:]
    start, stop = group.actions.start, group.actions.stop
    shape = (len(group.agents), *group.action_shape)

    def own_part(actions):
        return (actions[start:stop].reshape(shape),)

    own = as_njit(own_part)
    if not rest:
        return own
    others = _splitter(rest)

    def split(actions):
        return own(actions) + others(actions)

    return as_njit(split)


@njit
def _as_it_is(actions):
    return actions
