"""Events of CAGE Challenge 4 as arrays: their space, and rows taken apart."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box

from vecenv.cage.challenge4.graph import EVENTS, find_kind
from vecenv.cage.challenge4.rules import event_view as rules
from vecenv.cage.challenge4.rules.codes import HOSTS_PER_SUBNET
from vecenv.cage.challenge4.rules.event_view import (
    HIGHS,
    MAX_TICKS_LEFT,
    NUM_CONTEXT,
    NUM_NODE_FEATURES,
    TICKS_LEFT,
    vector_length,
)
from vecenv.cage.challenge4.rules.graph import MAX_UNITS

__all__ = ["Cage4Events", "events_length", "events_space"]


class Cage4Events(NamedTuple):
    """What blue agents see as events: parts of observations, whose first axes are `...` below.

    All are uint8. Agents 0 to 3 have N = 17 nodes, agent 4, and padded all of them, N = 51: hosts
    in the order of the agent's actions, then the routers of its zones. Those that are not there are
    zeros.

    Attributes:
        vector: (..., 92), or (..., 210): the agent's vector, as without events.
        context: (..., 5): steps until the agent's action takes effect (0..4), and how it went,
            one-hot: failed, succeeded, unknown, in progress.
        nodes: (..., N, 37), by `NODE_FEATURES`. Of this step: numbers of process events without a
            process id ("alarm") and with one ("session"), of connections by class of their local
            and remote port, flags of the zones they come from; the last host (1 + 16 zone + k;
            users are k 0 to 9, servers from 10) that one names as remote, and how many seen
            elsewhere name this host so, blocked ones apart for both; what an own action found or
            did. Then own decoys, and steps since the latest Analyse, Restore and decoy took effect,
            255 if never or longer ago.
        NODE_FEATURES: Their names.

    Example:
        >>> from vecenv.cage import Cage4VectorEnv
        >>> envs = Cage4VectorEnv(2, observation="events", debug=True)
        >>> obs, _ = envs.reset(seed=0)
        >>> events = Cage4Events.of(envs.agent_obs(obs)[0])
        >>> events.vector.shape, events.nodes.shape
        ((2, 92), (2, 17, 37))
        >>> since = events.nodes[..., events.NODE_FEATURES.index("since_analyse")]
        >>> int(since[0, 0])  # server host 0, which is always there
        255
        >>> envs.close()
    """

    NODE_FEATURES = rules.NODE_FEATURES

    vector: Any
    context: Any
    nodes: Any

    @classmethod
    def of(cls, obs: Any) -> Cage4Events:
        """Take observations apart, without a copy where their memory allows it.

        Args:
            obs: (..., length) of one kind of agents: an array of NumPy, or a tensor of torch.

        Raises:
            ValueError: `obs` has another length than events have.
        """
        shape, units = find_kind(obs, _KINDS, EVENTS)
        context = vector_length(units)
        nodes = context + NUM_CONTEXT
        # One feature after the other in memory.
        features = obs[..., nodes:].reshape((*shape[:-1], NUM_NODE_FEATURES, _num_nodes(units)))
        return cls(obs[..., :context], obs[..., context:nodes], features.swapaxes(-1, -2))


def _num_nodes(units: int) -> int:
    return units * (HOSTS_PER_SUBNET + 1)


def events_length(units: int) -> int:
    """Return the length of a row with room for `units` own zones."""
    return vector_length(units) + NUM_CONTEXT + _num_nodes(units) * NUM_NODE_FEATURES


_KINDS = {events_length(units): units for units in (1, MAX_UNITS)}


def events_space(units: tuple[int, ...]) -> Box:
    """Return the space of the events of these agents, one after the other, uint8."""
    rows = []
    for own in units:
        high = np.ones(events_length(own), np.uint8)
        events = Cage4Events.of(high)
        events.vector[0] = 2  # the phase
        events.context[TICKS_LEFT] = MAX_TICKS_LEFT
        events.nodes[:] = HIGHS
        rows.append(high)
    highs = np.concatenate(rows)
    return Box(np.zeros_like(highs), highs, dtype=np.uint8)
