"""Graph observations of CAGE Challenge 4: hosts and zones as nodes, traffic as edges.

A row is one array with these parts: node features, node mask, edge index, edge features, edge
mask, context. The first nodes are hosts, in the order of the agent's actions (SPEC 10.1); the nine
zones follow in sorted order. The first edges go from each host to its zone. The others go from each
other zone into each of the agent's own zones, in the order of AllowTraffic.

A row has room for one own zone; rows of agent 4 and padded rows have room for three. A row can be
derived from the agent's vectors, its mask and its submitted actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box
from numba import njit

from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.bits import has
from vecenv.cage.challenge4.rules.blue import acts_on_host
from vecenv.cage.challenge4.rules.observation import BLUE_SUBNET_ORDER

__all__ = [
    "EVENTS", "FLAT", "GRAPH", "Cage4Graph", "check_observation", "graph_length", "graph_space",
    "row_length", "rows_space", "split_rows",
]  # fmt: skip

# --- features of a node ---
IS_USER, IS_SERVER, IS_ZONE, IS_OWN, FIRST_ZONE = range(5)
PROCESS_EVENT = FIRST_ZONE + codes.NUM_ZONES
CONNECTION_EVENT, HAS_DECOY, FIRST_BUSY = range(PROCESS_EVENT + 1, PROCESS_EVENT + 4)
_BUSY_PLACE = np.zeros(8, np.int64)
_BUSY_PLACE[[codes.ANALYSE, codes.REMOVE, codes.RESTORE, codes.DECOY]] = FIRST_BUSY + np.arange(4)
NODE_FEATURES = (
    "is_user", "is_server", "is_zone", "is_own",
    *(f"in_{codes.SUBNET_NAMES[zone]}" for zone in codes.SORTED_SUBNETS),
    "process_event", "connection_event", "has_decoy",
    "is_analysed", "is_removed", "is_restored", "gets_decoy",
)  # fmt: skip
NUM_NODE_FEATURES = len(NODE_FEATURES)

# --- features of an edge ---
HOST_IN_ZONE, IS_ROUTE, IS_LINKED, IS_BLOCKED = range(4)
EDGE_FEATURES = ("host_in_zone", "is_route", "is_linked", "is_blocked")
NUM_EDGE_FEATURES = len(EDGE_FEATURES)

# --- context ---
NUM_PHASES = 3
TICKS_LEFT = NUM_PHASES
MAX_TICKS_LEFT = int(codes.BLUE_TICKS.max()) - 1
FIRST_MESSAGE = TICKS_LEFT + 1
NUM_CONTEXT = FIRST_MESSAGE + codes.MESSAGE_BITS * (codes.NUM_BLUE - 1)

UNITS = (1, 1, 1, 1, 3)  # own zones of each agent
MAX_UNITS = 3
_OTHERS = codes.NUM_ZONES - 1

# Zones with linked routers (SPEC 1.3): one set of zones per zone.
_ROUTES = np.zeros(codes.NUM_ZONES, np.int64)
for _a, _b in (*((codes.INT, zone) for zone in (0, 2, 4, 5)), (0, 1), (2, 3), (5, 6), (5, 7)):
    _ROUTES[_a] |= 1 << _b
    _ROUTES[_b] |= 1 << _a


@njit
def _write_hosts(state, subnet, unit, out, width, places):
    """Write nodes and edges of the existing hosts of an own zone."""
    _, node_masks, edge_index, edges, edge_masks, num_nodes, num_edges = places
    zone = num_nodes - codes.NUM_ZONES + codes.SORTED_PLACE[subnet]
    exists = np.int64(state.exists[subnet])
    processes = np.int64(state.process_events[subnet])
    connections = np.int64(state.connection_events[subnet])
    for i in range(codes.HOSTS_PER_SUBNET):
        node = unit * codes.HOSTS_PER_SUBNET + i
        out[edge_index + node] = node
        out[edge_index + num_edges + node] = zone
        k = i + codes.FIRST_SERVER if i < codes.MAX_SERVERS else i - codes.MAX_SERVERS
        if not has(exists, k):
            continue
        out[node_masks + node] = 1
        out[edge_masks + node] = 1
        out[edges + node * NUM_EDGE_FEATURES + HOST_IN_ZONE] = 1
        start = node * width
        out[start + (IS_SERVER if i < codes.MAX_SERVERS else IS_USER)] = 1
        out[start + IS_OWN] = 1
        out[start + FIRST_ZONE + codes.SORTED_PLACE[subnet]] = 1
        out[start + PROCESS_EVENT] = has(processes, k)
        out[start + CONNECTION_EVENT] = has(connections, k)
        out[start + HAS_DECOY] = state.decoys[subnet * codes.HOSTS_PER_SUBNET + k] != 0


@njit
def _write_traffic(state, subnet, unit, units, out, width, places):
    """Mark the zone as the agent's own and write the edges of traffic into it."""
    _, _, edge_index, edges, edge_masks, num_nodes, num_edges = places
    zones = num_nodes - codes.NUM_ZONES
    own = codes.SORTED_PLACE[subnet]
    out[(zones + own) * width + IS_OWN] = 1
    blocked = np.int64(state.blocks[subnet])
    edge = units * codes.HOSTS_PER_SUBNET + unit * _OTHERS
    for place in range(codes.NUM_ZONES):
        if place == own:
            continue
        out[edge_index + edge] = zones + place
        out[edge_index + num_edges + edge] = zones + own
        out[edge_masks + edge] = 1
        start = edges + edge * NUM_EDGE_FEATURES
        out[start + IS_ROUTE] = has(_ROUTES[subnet], codes.SORTED[place])
        out[start + IS_LINKED] = not has(codes.NOT_LINKED[state.phase, subnet], place)
        out[start + IS_BLOCKED] = has(blocked, codes.SORTED[place])
        edge += 1


@njit
def _place(host):
    """Return a host's position (int64) among the nodes of its zone: servers before users."""
    k = host & 15
    return k - codes.FIRST_SERVER if k >= codes.FIRST_SERVER else k + codes.MAX_SERVERS


@njit
def _write_context(state, agent, out, start):
    out[start + np.int64(state.phase)] = 1
    out[start + TICKS_LEFT] = state.blue_left[agent]
    start += FIRST_MESSAGE
    for sender in range(codes.NUM_BLUE):
        if sender != agent:
            message = np.int64(state.messages[sender])
            for bit in range(codes.MESSAGE_BITS):
                out[start + bit] = (message >> bit) & 1
            start += codes.MESSAGE_BITS


@njit
def write_graph(state, agent, out, units):
    """Write the graph observation of a blue agent.

    Args:
        state: STATE_DTYPE record.
        agent: 0 to 4.
        out: uint8 (length,); all of it is written.
        units: int64, number of own zones that a row has room for.
    """
    for place in range(out.shape[0]):
        out[place] = 0
    width = NUM_NODE_FEATURES
    num_nodes = units * codes.HOSTS_PER_SUBNET + codes.NUM_ZONES
    num_edges = units * (codes.HOSTS_PER_SUBNET + _OTHERS)
    node_masks = num_nodes * width
    edge_index = node_masks + num_nodes
    edges = edge_index + 2 * num_edges
    edge_masks = edges + num_edges * NUM_EDGE_FEATURES
    context = edge_masks + num_edges
    places = (np.int64(0), node_masks, edge_index, edges, edge_masks, num_nodes, num_edges)
    zones = num_nodes - codes.NUM_ZONES
    for place in range(codes.NUM_ZONES):
        out[node_masks + zones + place] = 1
        out[(zones + place) * width + IS_ZONE] = 1
        out[(zones + place) * width + FIRST_ZONE + place] = 1
    num_own = MAX_UNITS if agent == codes.NUM_BLUE - 1 else 1
    for unit in range(num_own):
        subnet = BLUE_SUBNET_ORDER[agent + unit]
        _write_hosts(state, subnet, unit, out, width, places)
        _write_traffic(state, subnet, unit, units, out, width, places)
        family, target = np.int64(state.blue_family[agent]), np.int64(state.blue_target[agent])
        is_busy = state.blue_left[agent] > 0 and acts_on_host(family)
        if is_busy and target >> 4 == subnet:
            node = unit * codes.HOSTS_PER_SUBNET + _place(target)
            out[node * width + _BUSY_PLACE[family]] = 1
    _write_context(state, agent, out, context)


FLAT, GRAPH, EVENTS = _OBSERVATIONS = "flat", "graph", "events"


def check_observation(observation: Any) -> None:
    """Raise an error unless `observation` is a kind of observation."""
    if not isinstance(observation, str) or observation not in _OBSERVATIONS:
        raise ValueError(
            f"observation must be one of {', '.join(_OBSERVATIONS)}, got {observation!r}"
        )


Shapes = tuple[tuple[int, ...], ...]


def row_length(shapes: Shapes) -> int:
    """Return the length of a row with parts of these shapes."""
    return sum(map(math.prod, shapes))


def split_rows(obs: Any, shapes_of: Callable[[int], Shapes], name: str) -> list[Any]:
    """Return the parts of observations, views where the memory layout allows it.

    Args:
        obs: (..., length), rows of agents of one size, as a NumPy array or a torch tensor.
        shapes_of: Function that returns the shapes of the parts of a row with room for that many
            own zones.
        name: Kind of the observations, for errors.

    Raises:
        ValueError: The last axis of `obs` does not have the length of a row.
    """
    shape, (small, large) = tuple(obs.shape), map(shapes_of, (1, MAX_UNITS))
    kinds = {row_length(small): small, row_length(large): large}
    if not shape or shape[-1] not in kinds:
        raise ValueError(
            f"obs has shape {shape}, expected (..., length) with one of the lengths "
            f"{', '.join(map(str, kinds))}: pass the rows of one group of agents, of envs with "
            f"observation={name!r}"
        )
    parts, start = [], 0
    for part in kinds[shape[-1]]:
        stop = start + math.prod(part)
        parts.append(obs[..., start:stop].reshape((*shape[:-1], *part)))
        start = stop
    return parts


def rows_space(lengths: Sequence[int], fill: Callable[[np.ndarray], None]) -> Box:
    """Return the space of concatenated rows, uint8; `fill` changes a row's highs, which are 1."""
    rows = [np.ones(length, np.uint8) for length in lengths]
    for row in rows:
        fill(row)
    high = np.concatenate(rows)
    return Box(np.zeros_like(high), high, dtype=np.uint8)


class Cage4Graph(NamedTuple):
    """Graph observations of blue agents, split into parts; `...` are the leading axes.

    All parts are uint8. Agents 0 to 3 have N = 25 nodes and E = 24 edges; agent 4 and padded rows
    have N = 57 and E = 72. Unused nodes and edges are zeros, except the edge index of absent hosts.
    Rows of agents that are not alive are all zeros.

    Attributes:
        nodes: (..., N, 20), by `NODE_FEATURES`. Hosts come first, in the order of the agent's
            actions, then the nine zones in alphabetical order.
        node_mask: (..., N), 1 for nodes that exist.
        edge_index: (..., 2, E), source and target of each edge. Edge k < N - 9 goes from host k
            to its zone. The others go from another zone into one of the agent's, in the order of
            its AllowTraffic actions.
        edges: (..., E, 4), by `EDGE_FEATURES`.
        edge_mask: (..., E), 1 for edges that exist.
        context: (..., 36): the phase one-hot, steps until the agent's action takes effect (0..4),
            32 bits of the other agents' messages.
        NODE_FEATURES, EDGE_FEATURES: Names of the features.

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

    NODE_FEATURES = NODE_FEATURES
    EDGE_FEATURES = EDGE_FEATURES

    nodes: Any
    node_mask: Any
    edge_index: Any
    edges: Any
    edge_mask: Any
    context: Any

    @classmethod
    def of(cls, obs: Any) -> Cage4Graph:
        """Split observations into parts, without a copy where the memory layout allows it.

        Args:
            obs: (..., length), rows of agents of one size, as a NumPy array or a torch tensor.

        Raises:
            ValueError: The last axis of `obs` does not have the length of a graph.
        """
        return cls(*split_rows(obs, _shapes, GRAPH))


def _shapes(units: int) -> Shapes:
    """Return the shapes of the parts of a row."""
    num_nodes = units * codes.HOSTS_PER_SUBNET + codes.NUM_ZONES
    num_edges = units * (codes.HOSTS_PER_SUBNET + _OTHERS)
    nodes, edges = (num_nodes, NUM_NODE_FEATURES), (num_edges, NUM_EDGE_FEATURES)
    return nodes, (num_nodes,), (2, num_edges), edges, (num_edges,), (NUM_CONTEXT,)


def graph_length(units: int) -> int:
    """Return the length of a row with room for `units` own zones."""
    return row_length(_shapes(units))


def graph_space(units: tuple[int, ...]) -> Box:
    """Return the space of these agents' concatenated graphs, uint8."""

    def fill(row: np.ndarray) -> None:
        graph = Cage4Graph.of(row)
        graph.edge_index[:] = len(graph.nodes) - 1
        graph.context[TICKS_LEFT] = MAX_TICKS_LEFT

    return rows_space([graph_length(own) for own in units], fill)
