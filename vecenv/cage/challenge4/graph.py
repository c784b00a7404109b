"""Graph observations of CAGE Challenge 4: their space, and rows taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box

from vecenv.cage.challenge4.rules import graph as rules
from vecenv.cage.challenge4.rules.codes import HOSTS_PER_SUBNET, NUM_ZONES
from vecenv.cage.challenge4.rules.graph import (
    MAX_TICKS_LEFT,
    MAX_UNITS,
    NUM_CONTEXT,
    NUM_EDGE_FEATURES,
    NUM_NODE_FEATURES,
    RED_HIGHS,
    TICKS_LEFT,
)

__all__ = [
    "EVENTS",
    "FLAT",
    "GRAPH_WITH_RED",
    "Cage4Graph",
    "check_observation",
    "find_kind",
    "graph_length",
    "graph_space",
]

FLAT, GRAPH, GRAPH_WITH_RED, EVENTS = "flat", "graph", "graph_with_red", "events"
_OBSERVATIONS = FLAT, GRAPH, GRAPH_WITH_RED, EVENTS


def check_observation(observation: Any) -> None:
    """Refuse what is no kind of observation."""
    if not isinstance(observation, str) or observation not in _OBSERVATIONS:
        raise ValueError(
            f"observation must be one of {', '.join(_OBSERVATIONS)}, got {observation!r}"
        )


def find_kind(obs: Any, kinds: Mapping[int, Any], name: str) -> tuple[tuple[int, ...], Any]:
    """Return the shape of observations and the kind that has their length; `name` is theirs.

    Raises:
        ValueError: None has.
    """
    shape = tuple(obs.shape)
    if not shape or shape[-1] not in kinds:
        raise ValueError(
            f"obs has shape {shape}, expected (..., length) with one of the lengths "
            f"{', '.join(map(str, kinds))}: pass the rows of one group of agents, of envs with "
            f"observation={name!r}"
        )
    return shape, kinds[shape[-1]]


class Cage4Graph(NamedTuple):
    """What blue agents see as graphs: parts of observations, whose first axes are the `...` below.

    All are uint8. Agents 0 to 3 have N = 25 nodes and E = 24 edges; agent 4, and padded all of
    them, N = 57 and E = 72. Unused nodes and edges are zeros, but for the edge index of absent
    hosts; rows of agents that are not alive are zeros altogether.

    Attributes:
        nodes: (..., N, 20), by `NODE_FEATURES`; (..., N, 23) with `RED_FEATURES`. Hosts come first,
            in the order of the agent's actions, then the nine zones in alphabetical order.
        node_mask: (..., N), 1 of nodes that are there.
        edge_index: (..., 2, E), the nodes that an edge leaves and enters. Edge k < N - 9 goes from
            host k to its zone, the others from another zone into one of the agent's, in the order
            of its actions AllowTraffic.
        edges: (..., E, 4), by `EDGE_FEATURES`.
        edge_mask: (..., E), 1 of edges that are there.
        context: (..., 36): the phase one-hot, steps until the agent's action takes effect (0..4),
            32 bits of the other agents' messages.
        NODE_FEATURES, RED_FEATURES, EDGE_FEATURES: Their names.

    Example:
        >>> from vecenv.cage import Cage4VectorEnv
        >>> envs = Cage4VectorEnv(2, observation="graph", debug=True)
        >>> obs, _ = envs.reset(seed=0)
        >>> graph = Cage4Graph.of(envs.agent_obs(obs)[0])
        >>> graph.nodes.shape, graph.edge_index.shape
        ((2, 25, 20), (2, 2, 24))
        >>> events = graph.nodes[..., graph.NODE_FEATURES.index("process_event")]
        >>> int(events.sum())
        0
        >>> envs.close()
    """

    NODE_FEATURES = rules.NODE_FEATURES
    RED_FEATURES = rules.RED_FEATURES
    EDGE_FEATURES = rules.EDGE_FEATURES

    nodes: Any
    node_mask: Any
    edge_index: Any
    edges: Any
    edge_mask: Any
    context: Any

    @classmethod
    def of(cls, obs: Any) -> Cage4Graph:
        """Take observations apart, without a copy where their memory allows it.

        Args:
            obs: (..., length) of one kind of agents: an array of NumPy, or a tensor of torch.

        Raises:
            ValueError: `obs` has another length than graphs have.
        """
        shape, kind = find_kind(obs, _KINDS, GRAPH)
        parts, start = [], 0
        for part in _shapes(*kind):
            stop = start + int(np.prod(part))
            parts.append(obs[..., start:stop].reshape((*shape[:-1], *part)))
            start = stop
        return cls(*parts)


def _shapes(units: int, with_red: bool) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the parts of a row."""
    num_nodes = units * HOSTS_PER_SUBNET + NUM_ZONES
    num_edges = units * (HOSTS_PER_SUBNET + NUM_ZONES - 1)
    width = NUM_NODE_FEATURES + (len(RED_HIGHS) if with_red else 0)
    return (
        (num_nodes, width),
        (num_nodes,),
        (2, num_edges),
        (num_edges, NUM_EDGE_FEATURES),
        (num_edges,),
        (NUM_CONTEXT,),
    )


def graph_length(units: int, with_red: bool) -> int:
    """Return the length of a row with room for `units` own zones."""
    return sum(int(np.prod(shape)) for shape in _shapes(units, with_red))


_KINDS = {
    graph_length(units, with_red): (units, with_red)
    for with_red in (False, True)
    for units in (1, MAX_UNITS)
}


def graph_space(units: tuple[int, ...], with_red: bool) -> Box:
    """Return the space of the graphs of these agents, one after the other, uint8."""
    rows = []
    for own in units:
        high = np.ones(graph_length(own, with_red), np.uint8)
        graph = Cage4Graph.of(high)
        if with_red:
            graph.nodes[:, NUM_NODE_FEATURES:] = RED_HIGHS
        graph.edge_index[:] = len(graph.nodes) - 1
        graph.context[TICKS_LEFT] = MAX_TICKS_LEFT
        rows.append(high)
    highs = np.concatenate(rows)
    return Box(np.zeros_like(highs), highs, dtype=np.uint8)
