"""CAGE Challenge 4 as kinds of compiled envs: one agent for all of blue, or a game of five."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from numba import njit

from vecenv.cage.challenge4.network.state import STATE_DTYPE
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
from vecenv.cage.challenge4.rules.masks import mask_agent, mask_all
from vecenv.cage.challenge4.rules.observation import observe, observe_agent
from vecenv.jit.games import AgentsOf
from vecenv.jit.kernels import EnvKernels

__all__ = ["PADDED", "game_kernels", "team_kernels", "vector_space"]

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
def _column(a, i):
    return (
        np.int64(a[0, i]),
        np.int64(a[1, i]),
        np.int64(a[2, i]),
        np.int64(a[3, i]),
        np.int64(a[4, i]),
    )


@njit
def _padded_and_messages(a):
    return _column(a, 0) + _column(a, 1)


@njit
def _two_groups(actions):
    z, h = actions
    none = np.int64(0)
    five = (np.int64(z[0]), np.int64(z[1]), np.int64(z[2]), np.int64(z[3]), np.int64(h[0]))
    return (*five, none, none, none, none, none)


@njit
def _of_groups(z, h, i):
    return (
        np.int64(z[0, i]),
        np.int64(z[1, i]),
        np.int64(z[2, i]),
        np.int64(z[3, i]),
        np.int64(h[0, i]),
    )


@njit
def _two_groups_and_messages(actions):
    z, h = actions
    return _of_groups(z, h, 0) + _of_groups(z, h, 1)


@njit
def _observe_agent(state, agent, out, rules):
    end = observe_agent(state, agent, out, 0)
    for place in range(end, out.shape[0]):
        out[place] = 0


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
def team_kernels(messages: bool = False, own_red: Callable[..., Any] | None = None) -> EnvKernels:
    """Return the kernels of an env in which one agent plays all of blue.

    It sees uint8 (578,), the vectors of all agents one after the other, and acts with an index for
    each agent, then, if there are messages, a number of 8 bits for each.
    """
    nvec = [*NUM_ACTIONS, *([NUM_MESSAGES] * NUM_BLUE if messages else [])]
    return EnvKernels(
        STATE_DTYPE,
        vector_space(OBS_STARTS, OBS_LENGTH),
        MultiDiscrete(nvec),
        dynamics.reset,
        dynamics.step_kernel(_team_and_messages if messages else _team, own_red),
        observe,
        _mask_all,
        name="CAGE Challenge 4",
    )


@functools.cache
def game_kernels(
    pad: bool = False, messages: bool = False, own_red: Callable[..., Any] | None = None
) -> EnvKernels:
    """Return the kernels of a game of five blue agents.

    Args:
        pad: One group "blue_agent" of vectors and actions padded to those of agent 4, instead of
            "blue_agent", agents 0 to 3, and "blue_agent_4", agent 4.
        messages: Whether an action is an index and a message of 8 bits, or an index alone.
        own_red: See `dynamics.step_kernel`.
    """
    if pad:
        space = vector_space((0,), PADDED)
        groups = {ZONES: AgentsOf(AGENT_NAMES, space, _actions(MAX_ACTIONS, messages))}
        read = _padded_and_messages if messages else _team
        masks: Any = _mask
    else:
        groups = {}
        masks = {ZONES: _mask_of_zone, HEADQUARTERS: _mask}
        for name, agents in ((ZONES, AGENT_NAMES[:4]), (HEADQUARTERS, AGENT_NAMES[4:])):
            agent = AGENT_NAMES.index(agents[0])
            space = vector_space((0,), OBS_LENGTHS[agent])
            groups[name] = AgentsOf(agents, space, _actions(NUM_ACTIONS[agent], messages))
        read = _two_groups_and_messages if messages else _two_groups
    return EnvKernels(
        STATE_DTYPE,
        reset=dynamics.reset,
        step=dynamics.step_kernel(read, own_red),
        observe=_observe_agent,
        action_mask=masks,
        groups=groups,
        name="CAGE Challenge 4",
    )
