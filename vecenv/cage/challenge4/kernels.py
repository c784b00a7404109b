"""Kernels of the compiled envs of CAGE Challenge 4: one agent for all of blue, or five agents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from numba import njit

from vecenv.cage.challenge4.events import events_length, events_space, vector_length, write_events
from vecenv.cage.challenge4.graph import (
    EVENTS,
    FLAT,
    GRAPH,
    MAX_UNITS,
    UNITS,
    graph_length,
    graph_space,
    write_graph,
)
from vecenv.cage.challenge4.options import red_problem
from vecenv.cage.challenge4.rules import codes, dynamics
from vecenv.cage.challenge4.rules.observation import mask_agent, mask_all, observe_agent
from vecenv.cage.challenge4.rules.state import STATE_DTYPE
from vecenv.jit import AgentsOf, EnvKernels, checked_in_trials

__all__ = ["PADDED", "game_kernels", "row_length", "team_kernels"]

NUM_MESSAGES = 1 << codes.MESSAGE_BITS
_SILENCE = (np.int64(0),) * codes.NUM_BLUE  # no messages
PADDED = vector_length(MAX_UNITS)  # values of a padded vector
# Names of groups, as in `vecenv.agents.group_agents`: agents 0 to 3 (all if padded); agent 4.
ZONES, HEADQUARTERS = "blue_agent", "blue_agent_4"


class _Kind(NamedTuple):
    """A kind of observation; `units` is the number of own zones that a row has room for.

    Attributes:
        length: Function that returns the length of a row.
        space: Function that returns the space of some agents' concatenated rows.
        write: Kernel (state, agent, out, units) that writes a whole row.
    """

    length: Callable[[int], int]
    space: Callable[[tuple[int, ...]], Box]
    write: Any


def _vector_space(units: tuple[int, ...]) -> Box:
    """Return the space of vectors: values are 0 or 1, except each vector's first, its phase."""
    high = np.concatenate([np.ones(vector_length(own), np.uint8) for own in units])
    high[np.cumsum([0, *map(vector_length, units)])[:-1]] = 2
    return Box(np.zeros_like(high), high, dtype=np.uint8)


@njit
def _write_vector(state, agent, out, units):
    out[observe_agent(state, agent, out, 0) :] = 0


_KINDS = {
    FLAT: _Kind(vector_length, _vector_space, _write_vector),
    GRAPH: _Kind(graph_length, graph_space, write_graph),
    EVENTS: _Kind(events_length, events_space, write_events),
}


def row_length(units: int, observation: str) -> int:
    """Return the length of an agent's row with room for `units` own zones."""
    return _KINDS[observation].length(units)


def _actions(num: int, messages: bool) -> Discrete | MultiDiscrete:
    return MultiDiscrete([num, NUM_MESSAGES]) if messages else Discrete(num)


# --- readers: from an env's action to the actions and messages of five agents ---


@njit
def _five(z, h, last):
    """Return the actions or messages of five agents: 0 to 3 from `z`, 4 from h[last]."""
    return (np.int64(z[0]), np.int64(z[1]), np.int64(z[2]), np.int64(z[3]), np.int64(h[last]))


@njit
def _team(a):
    return _five(a, a, 4) + _SILENCE


@njit
def _team_and_messages(a):
    return _five(a, a, 4) + _five(a[5:], a[5:], 4)


@njit
def _padded_and_messages(a):
    return _five(a[:, 0], a[:, 0], 4) + _five(a[:, 1], a[:, 1], 4)


@njit
def _two_groups(actions):
    return _five(actions[0], actions[1], 0) + _SILENCE


@njit
def _two_groups_and_messages(actions):
    z, h = actions
    return _five(z[:, 0], h[:, 0], 0) + _five(z[:, 1], h[:, 1], 0)


@functools.cache
def _observer(observation: str, units: int) -> Callable[..., None]:
    """Return a kernel that writes an agent's row with room for `units` own zones."""
    write = _KINDS[observation].write

    @njit
    def observe(state, agent, out, rules):
        write(state, agent, out, units)

    return observe


def _observer_of_all(observation: str) -> Callable[..., None]:
    """Return a kernel that writes the concatenated rows of all agents."""
    ends = np.cumsum([row_length(units, observation) for units in UNITS])
    starts = np.array([0, *ends[:-1]])
    first, last = _observer(observation, 1), _observer(observation, MAX_UNITS)

    @njit
    def observe_all(state, out, rules):
        for agent in range(codes.NUM_BLUE - 1):
            first(state, agent, out[starts[agent] : ends[agent]], rules)
        last(state, codes.NUM_BLUE - 1, out[starts[codes.NUM_BLUE - 1] :], rules)

    return observe_all


def _game_step(read: Any, own_red: Any) -> Any:
    """Return the step kernel; a trial in Python checks the choices of a custom red agent."""
    red = None if own_red is None else checked_in_trials(own_red, red_problem)
    return dynamics.step_kernel(read, red)


@functools.cache
def _masker(num_actions: int) -> Callable[..., None]:
    @njit
    def mask(state, agent, out, rules):
        mask_agent(state, agent, out, num_actions)

    return mask


@njit
def _mask_all(state, out, rules):
    mask_all(state, out)


@functools.cache
def team_kernels(
    messages: bool = False, own_red: Callable[..., Any] | None = None, observation: str = FLAT
) -> EnvKernels:
    """Return the kernels of an env in which one agent plays all of blue.

    Its observation concatenates those of all agents: uint8 (578,) if these are vectors. Its action
    is an index for each agent, followed by an 8-bit number for each if there are messages.
    """
    nvec = [*codes.NUM_ACTIONS, *([NUM_MESSAGES] * codes.NUM_BLUE if messages else [])]
    read = _team_and_messages if messages else _team
    return EnvKernels(
        STATE_DTYPE,
        _KINDS[observation].space(UNITS),
        MultiDiscrete(nvec),
        dynamics.reset,
        _game_step(read, own_red),
        _observer_of_all(observation),
        _mask_all,
        name="CAGE Challenge 4",
    )


@functools.cache
def game_kernels(
    pad: bool = False,
    messages: bool = False,
    own_red: Callable[..., Any] | None = None,
    observation: str = FLAT,
) -> EnvKernels:
    """Return the kernels of a game of five blue agents.

    Args:
        pad: Whether all agents form one group "blue_agent", padded to the sizes of agent 4. If
            not, agents 0 to 3 form "blue_agent" and agent 4 forms "blue_agent_4".
        messages: Whether an action is an index and an 8-bit message, or an index alone.
        own_red: See `dynamics.step_kernel`.
        observation: See `Cage4VectorEnv`.
    """
    layout = {ZONES: codes.AGENT_NAMES[:4], HEADQUARTERS: codes.AGENT_NAMES[4:]}
    read = _two_groups_and_messages if messages else _two_groups
    if pad:
        layout, read = {ZONES: codes.AGENT_NAMES}, _padded_and_messages if messages else _team
    groups, observers, masks = {}, {}, {}
    for name, agents in layout.items():
        units, num = (
            (1, codes.NUM_ACTIONS[0]) if len(agents) == 4 else (MAX_UNITS, codes.MAX_ACTIONS)
        )
        space = _KINDS[observation].space((units,))
        groups[name] = AgentsOf(agents, space, _actions(num, messages))
        observers[name], masks[name] = _observer(observation, units), _masker(num)
    return EnvKernels(
        STATE_DTYPE,
        reset=dynamics.reset,
        step=_game_step(read, own_red),
        observe=observers,
        action_mask=masks,
        groups=groups,
        name="CAGE Challenge 4",
    )
