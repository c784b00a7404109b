"""CAGE Challenge 4 as kinds of compiled envs: one agent for all of blue, or a game of five."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from numba import njit

from vecenv.cage.challenge4.events import events_length, events_space
from vecenv.cage.challenge4.graph import (
    EVENTS,
    FLAT,
    GRAPH_WITH_RED,
    graph_length,
    graph_space,
)
from vecenv.cage.challenge4.network.state import LOGGED_STATE_DTYPE, STATE_DTYPE
from vecenv.cage.challenge4.own_red import red_problem
from vecenv.cage.challenge4.rules import dynamics
from vecenv.cage.challenge4.rules.codes import (
    AGENT_NAMES,
    MAX_ACTIONS,
    MESSAGE_BITS,
    NUM_ACTIONS,
    NUM_BLUE,
    OBS_LENGTH,
    OBS_LENGTHS,
    OBS_STARTS,
)
from vecenv.cage.challenge4.rules.event_view import vector_length, write_events
from vecenv.cage.challenge4.rules.graph import MAX_UNITS, UNITS, write_graph
from vecenv.cage.challenge4.rules.masks import mask_agent, mask_all
from vecenv.cage.challenge4.rules.observation import observe, observe_agent
from vecenv.jit.games import AgentsOf
from vecenv.jit.interpreted import checked_in_trials
from vecenv.jit.kernels import EnvKernels

__all__ = ["PADDED", "game_kernels", "row_length", "team_kernels", "vector_space"]

NUM_MESSAGES = 1 << MESSAGE_BITS
PADDED = max(OBS_LENGTHS)  # values of a padded vector
# Groups, called as `vecenv.agents.group_agents` does: agents 0 to 3, or all if padded; agent 4.
ZONES, HEADQUARTERS = "blue_agent", "blue_agent_4"


def vector_space(starts: tuple[int, ...], length: int, dtype: Any = np.uint8) -> Box:
    """Return the space of vectors: 0 or 1, but for the phase at `starts`, which goes to 2."""
    high = np.ones(length, dtype)
    high[list(starts)] = 2
    return Box(np.zeros_like(high), high, dtype=dtype)


def _actions(num: int, messages: bool) -> Discrete | MultiDiscrete:
    return MultiDiscrete([num, NUM_MESSAGES]) if messages else Discrete(num)


# --- readers: from an env's action to what five agents do, and their messages ---


@njit
def _team(a):
    none = np.int64(0)
    five = (np.int64(a[0]), np.int64(a[1]), np.int64(a[2]), np.int64(a[3]), np.int64(a[4]))
    return (*five, none, none, none, none, none)


@njit
def _team_and_messages(a):
    five = (np.int64(a[0]), np.int64(a[1]), np.int64(a[2]), np.int64(a[3]), np.int64(a[4]))
    sent = (np.int64(a[5]), np.int64(a[6]), np.int64(a[7]), np.int64(a[8]), np.int64(a[9]))
    return five + sent


@njit
def _of_groups(z, h, last, i):
    return (
        np.int64(z[0, i]),
        np.int64(z[1, i]),
        np.int64(z[2, i]),
        np.int64(z[3, i]),
        np.int64(h[last, i]),
    )


@njit
def _padded_and_messages(a):
    return _of_groups(a, a, 4, 0) + _of_groups(a, a, 4, 1)


@njit
def _two_groups(actions):
    z, h = actions
    none = np.int64(0)
    five = (np.int64(z[0]), np.int64(z[1]), np.int64(z[2]), np.int64(z[3]), np.int64(h[0]))
    return (*five, none, none, none, none, none)


@njit
def _two_groups_and_messages(actions):
    z, h = actions
    return _of_groups(z, h, 0, 0) + _of_groups(z, h, 0, 1)


@njit
def _observe_agent(state, agent, out, rules):
    end = observe_agent(state, agent, out, 0)
    for place in range(end, out.shape[0]):
        out[place] = 0


def row_length(units: int, observation: str) -> int:
    """Return the length of an agent's graph or events, with room for `units` own zones."""
    if observation == EVENTS:
        return events_length(units)
    return graph_length(units, observation == GRAPH_WITH_RED)


def _space(units: tuple[int, ...], observation: str) -> Box:
    """Return the space of the graphs or events of these agents, one after the other."""
    if observation == EVENTS:
        return events_space(units)
    return graph_space(units, observation == GRAPH_WITH_RED)


def _observer(units: int, observation: str) -> Callable[..., None]:
    """Return a kernel that writes an agent's graph or events, with room for `units` own zones."""
    with_red, length = observation == GRAPH_WITH_RED, vector_length(units)

    @njit
    def observe_graph(state, agent, out, rules):
        write_graph(state, agent, out, units, with_red)

    @njit
    def observe_events(state, agent, out, rules):
        write_events(state, agent, out, units, length)

    return observe_events if observation == EVENTS else observe_graph


def _observer_of_all(observation: str) -> Callable[..., None]:
    """Return a kernel that writes the graphs or events of all agents, one after the other."""
    ends = np.cumsum([row_length(units, observation) for units in UNITS])
    starts = np.array([0, *ends[:-1]])
    first, last = _observer(1, observation), _observer(MAX_UNITS, observation)

    @njit
    def observe_all(state, out, rules):
        for agent in range(NUM_BLUE - 1):
            first(state, agent, out[starts[agent] : ends[agent]], rules)
        last(state, NUM_BLUE - 1, out[starts[NUM_BLUE - 1] :], rules)

    return observe_all


def _game_kernels(read: Any, own_red: Any, observation: str) -> tuple[Any, Any, Any]:
    """Return states, reset and step; what a red of one's own returns is checked in Python."""
    red = None if own_red is None else checked_in_trials(own_red, red_problem)
    is_logged = observation == EVENTS
    step = dynamics.step_kernel(read, red, is_logged)
    if is_logged:
        return LOGGED_STATE_DTYPE, dynamics.reset_logged, step
    return STATE_DTYPE, dynamics.reset, step


@njit
def _mask_of_zone(state, agent, out, rules):
    mask_agent(state, agent, out, NUM_ACTIONS[0])


@njit
def _mask(state, agent, out, rules):
    mask_agent(state, agent, out, MAX_ACTIONS)


@njit
def _mask_all(state, out, rules):
    mask_all(state, out)


@functools.cache
def team_kernels(
    messages: bool = False, own_red: Callable[..., Any] | None = None, observation: str = FLAT
) -> EnvKernels:
    """Return the kernels of an env in which one agent plays all of blue.

    It sees what all agents see, one after the other, uint8 (578,) if that is vectors, and acts with
    an index for each agent, then, if there are messages, a number of 8 bits for each.
    """
    nvec = [*NUM_ACTIONS, *([NUM_MESSAGES] * NUM_BLUE if messages else [])]
    space, observer = vector_space(OBS_STARTS, OBS_LENGTH), observe
    if observation != FLAT:
        space, observer = _space(UNITS, observation), _observer_of_all(observation)
    read = _team_and_messages if messages else _team
    states, reset, step = _game_kernels(read, own_red, observation)
    return EnvKernels(
        states,
        space,
        MultiDiscrete(nvec),
        reset,
        step,
        observer,
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
        pad: One group "blue_agent" of vectors and actions padded to those of agent 4, instead of
            "blue_agent", agents 0 to 3, and "blue_agent_4", agent 4.
        messages: Whether an action is an index and a message of 8 bits, or an index alone.
        own_red: See `dynamics.step_kernel`.
        observation: See `Cage4VectorEnv`.
    """

    def space_of(agent: int) -> Box:
        if observation != FLAT:
            return _space((MAX_UNITS if pad else UNITS[agent],), observation)
        return vector_space((0,), PADDED if pad else OBS_LENGTHS[agent])

    observers: Any = _observe_agent
    if pad:
        groups = {ZONES: AgentsOf(AGENT_NAMES, space_of(0), _actions(MAX_ACTIONS, messages))}
        read = _padded_and_messages if messages else _team
        masks: Any = _mask
        if observation != FLAT:
            observers = _observer(MAX_UNITS, observation)
    else:
        groups = {}
        masks = {ZONES: _mask_of_zone, HEADQUARTERS: _mask}
        for name, agents in ((ZONES, AGENT_NAMES[:4]), (HEADQUARTERS, AGENT_NAMES[4:])):
            agent = AGENT_NAMES.index(agents[0])
            groups[name] = AgentsOf(agents, space_of(agent), _actions(NUM_ACTIONS[agent], messages))
        read = _two_groups_and_messages if messages else _two_groups
        if observation != FLAT:
            first, last = _observer(1, observation), _observer(MAX_UNITS, observation)
            observers = {ZONES: first, HEADQUARTERS: last}
    states, reset, step = _game_kernels(read, own_red, observation)
    return EnvKernels(
        states,
        reset=reset,
        step=step,
        observe=observers,
        action_mask=masks,
        groups=groups,
        name="CAGE Challenge 4",
    )
