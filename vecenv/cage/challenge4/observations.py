"""What a blue agent observes: vectors, graphs and events; and its action masks (SPEC 10.2-10.4).

Vectors have 92 values for each of agents 0-3, then 210 for agent 4.

A row of a graph has node features, node mask, edge index, edge features, edge mask, context. The
first nodes are hosts, in the order of the agent's actions (SPEC 10.1); the nine zones follow in
sorted order. The first edges go from each host to its zone. The others go from each other zone into
each of the agent's own zones, in the order of AllowTraffic. A row can be derived from the agent's
vectors, its mask and its submitted actions.

A row of events has the agent's vector, context, then feature by feature the values of all nodes:
the agent's hosts in the order of its actions, then the routers of its zones.

Rows of graphs and events have room for one own zone; those of agent 4 and padded ones for three.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box
from numba import njit

from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules import events as log
from vecenv.cage.challenge4.rules.actions import acts_on_host
from vecenv.cage.challenge4.rules.state import has

FLAT, GRAPH, EVENTS = "flat", "graph", "events"
UNITS = tuple(map(len, codes.BLUE_SUBNETS))  # own zones of each agent
MAX_UNITS = max(UNITS)
MAX_TICKS_LEFT = int(codes.BLUE_TICKS.max()) - 1


# --- vectors and masks ---


@njit
def vector_order(members):
    """Reorder a set int64 of hosts: bit i is the i-th in vectors, servers before users (10.1)."""
    return (members >> codes.FIRST_SERVER) | ((members & codes.USER_BITS) << codes.MAX_SERVERS)


@njit
def _write(out, start, bits, num):
    # Unsigned indices: signed ones could count from the end, which prevents vector code.
    for i in range(num):
        out[np.uint64(start) + np.uint64(i)] = (bits >> i) & 1


@njit
def _write_subnet(state, subnet, out, start):
    """Write the 59 values of a subnet; return the start of the next."""
    blocked, sorted_blocks = np.int64(state.blocks[subnet]), np.int64(0)
    if blocked:
        for i in range(codes.NUM_ZONES):
            sorted_blocks |= ((blocked >> codes.SORTED[i]) & 1) << i
    num, size = codes.NUM_ZONES, codes.HOSTS_PER_SUBNET
    _write(out, start, np.int64(1) << codes.SORTED_PLACE[subnet], num)
    _write(out, start + num, sorted_blocks, num)
    _write(out, start + 2 * num, codes.NOT_LINKED[state.phase, subnet], num)
    start += 3 * num
    _write(out, start, vector_order(np.int64(state.process_events[subnet])), size)
    _write(out, start + size, vector_order(np.int64(state.connection_events[subnet])), size)
    return start + 2 * size


@njit
def observe_agent(state, agent, out, start):
    """Write one blue agent's observation from out[start]; return the start of the next agent's."""
    num = MAX_UNITS if agent == codes.NUM_BLUE - 1 else 1
    out[start] = state.phase
    start += 1
    for index in range(agent, agent + num):
        start = _write_subnet(state, codes.WATCHED_ZONES[index], out, start)
    for sender in range(codes.NUM_BLUE):
        if sender != agent:
            _write(out, start, np.int64(state.messages[sender]), codes.MESSAGE_BITS)
            start += codes.MESSAGE_BITS
    return start


_SIZES = np.array(codes.NUM_ACTIONS, np.int64)


@njit
def mask_agent(state, agent, out, width):
    """Write the mask of an agent's actions: true where an action does something.

    Args:
        state: STATE_DTYPE record.
        agent: 0 to 4.
        out: bool (width,), or longer: the rest is set to true, as any message may be sent.
        width: int64, 82 or 242; entries beyond the agent's actions are padding, false.
    """
    num = MAX_UNITS if agent == codes.NUM_BLUE - 1 else 1
    size = codes.HOSTS_PER_SUBNET * num
    traffic = 2 * (codes.NUM_ZONES - 1) * num
    for place in range(out.shape[0]):
        out[place] = place < _SIZES[agent] or place >= width
    for unit in range(num):
        exists = vector_order(np.int64(state.exists[codes.WATCHED_ZONES[agent + unit]]))
        start = codes.HOSTS_PER_SUBNET * unit
        _write(out, start, exists, codes.HOSTS_PER_SUBNET)
        _write(out, size + 1 + start, exists, codes.HOSTS_PER_SUBNET)
        _write(out, 2 * size + 1 + start, exists, codes.HOSTS_PER_SUBNET)
        _write(out, 3 * size + 2 + traffic + start, exists, codes.HOSTS_PER_SUBNET)


@njit
def mask_all(state, out, rules):
    """Write the masks of all agents, 570 values in sequence; the rest of `out` is true."""
    start = np.int64(0)
    for agent in range(codes.NUM_BLUE):
        width = _SIZES[agent]
        mask_agent(state, agent, out[start : start + width], width)
        start += width
    for place in range(start, out.shape[0]):
        out[place] = True  # messages


Shapes = tuple[tuple[int, ...], ...]


def _vector_shapes(units: int) -> Shapes:
    return ((codes.OBS_LENGTHS[0 if units == 1 else -1],),)


@njit
def _write_vector(state, agent, out, units):
    out[observe_agent(state, agent, out, 0) :] = 0


def _fill_vector(row: np.ndarray) -> None:
    row[0] = 2  # the phase


# --- graphs ---

# --- features of a node ---
IS_USER, IS_SERVER, IS_ZONE, IS_OWN, FIRST_ZONE = range(5)
PROCESS_EVENT = FIRST_ZONE + codes.NUM_ZONES
CONNECTION_EVENT, HAS_DECOY, FIRST_BUSY = range(PROCESS_EVENT + 1, PROCESS_EVENT + 4)
_BUSY_PLACE = np.zeros(8, np.int64)
_BUSY_PLACE[[codes.ANALYSE, codes.REMOVE, codes.RESTORE, codes.DECOY]] = FIRST_BUSY + np.arange(4)
GRAPH_NODE_FEATURES = (
    "is_user", "is_server", "is_zone", "is_own",
    *(f"in_{codes.SUBNET_NAMES[zone]}" for zone in codes.SORTED_SUBNETS),
    "process_event", "connection_event", "has_decoy",
    "is_analysed", "is_removed", "is_restored", "gets_decoy",
)  # fmt: skip
NUM_GRAPH_NODE_FEATURES = len(GRAPH_NODE_FEATURES)

# --- features of an edge ---
HOST_IN_ZONE, IS_ROUTE, IS_LINKED, IS_BLOCKED = range(4)
EDGE_FEATURES = ("host_in_zone", "is_route", "is_linked", "is_blocked")
NUM_EDGE_FEATURES = len(EDGE_FEATURES)

# --- context ---
TICKS_LEFT, FIRST_MESSAGE = 3, 4  # after the phase, one-hot
NUM_GRAPH_CONTEXT = FIRST_MESSAGE + codes.MESSAGE_BITS * (codes.NUM_BLUE - 1)

_OTHERS = codes.NUM_ZONES - 1

# Zones with linked routers (SPEC 1.3): one set of zones per zone.
_ROUTES = np.zeros(codes.NUM_ZONES, np.int64)
for _zone, _next, *_ in codes.TO_INTERNET.values():
    _ROUTES[_zone] |= 1 << _next
    _ROUTES[_next] |= 1 << _zone


@njit
def _write_nodes(state, subnet, unit, out, width, places):
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
def _write_context(state, agent, out, start):
    out[start + np.int64(state.phase)] = 1
    out[start + TICKS_LEFT] = state.blue_left[agent]
    start += FIRST_MESSAGE
    for sender in range(codes.NUM_BLUE):
        if sender != agent:
            _write(out, start, np.int64(state.messages[sender]), codes.MESSAGE_BITS)
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
    width = NUM_GRAPH_NODE_FEATURES
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
        subnet = codes.WATCHED_ZONES[agent + unit]
        _write_nodes(state, subnet, unit, out, width, places)
        _write_traffic(state, subnet, unit, units, out, width, places)
    family, target = np.int64(state.blue_family[agent]), np.int64(state.blue_target[agent])
    if state.blue_left[agent] > 0 and acts_on_host(family):
        node = log.PLACE[target] - agent * codes.HOSTS_PER_SUBNET
        out[node * width + _BUSY_PLACE[family]] = 1
    _write_context(state, agent, out, context)


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

    NODE_FEATURES = GRAPH_NODE_FEATURES
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
        return cls(*split_rows(obs, GRAPH))


def _graph_shapes(units: int) -> Shapes:
    """Return the shapes of the parts of a row."""
    num_nodes = units * codes.HOSTS_PER_SUBNET + codes.NUM_ZONES
    num_edges = units * (codes.HOSTS_PER_SUBNET + _OTHERS)
    nodes, edges = (num_nodes, NUM_GRAPH_NODE_FEATURES), (num_edges, NUM_EDGE_FEATURES)
    return nodes, (num_nodes,), (2, num_edges), edges, (num_edges,), (NUM_GRAPH_CONTEXT,)


def _fill_graph(row: np.ndarray) -> None:
    graph = Cage4Graph.of(row)
    graph.edge_index[:] = len(graph.nodes) - 1
    graph.context[TICKS_LEFT] = MAX_TICKS_LEFT


# --- events ---

LOCAL_PORTS = ("none", "ssh", "ot", "http", "https", "sql", "mail", "drawn")
_CLASS_OF_PORT = np.zeros(4096, np.int64)
_CLASS_OF_PORT[[22, 1, 80, 443, 3390, 25]] = range(1, 7)
_DRAWN = len(LOCAL_PORTS) - 1
REMOTE_PORTS = ("ssh", "blocked", "drawn")
EVENT_FEATURES = (  # see `Cage4Events`
    "exists", "alarm", "session",
    *(f"local_{name}" for name in LOCAL_PORTS),
    *(f"remote_{name}" for name in REMOTE_PORTS),
    *(f"from_{name}" for name in codes.SUBNET_NAMES[: codes.NUM_SUBNETS]),
    "source", "is_source",
    "is_analysed", "has_cmd", "has_escalate", "is_removed", "is_restored", "gets_decoy",
    *(f"has_{name}" for name in codes.DECOY_NAMES),
    "since_analyse", "since_restore", "since_decoy",
)  # fmt: skip
NUM_EVENT_FEATURES = len(EVENT_FEATURES)
_FIRST = "alarm session local_none remote_ssh from_RZA source is_source"
_ALARM, _SESSION, _LOCAL, _REMOTE, _FROM, _SOURCE, _IS_SOURCE = map(
    EVENT_FEATURES.index, _FIRST.split()
)
_OWN = "is_analysed is_removed is_restored gets_decoy has_apache since_analyse"
_ANALYSED, _REMOVED, _RESTORED, _GETS, _HAS_DECOY, _SINCE = map(EVENT_FEATURES.index, _OWN.split())
# Features copied from `shown`, by its parts.
_SHOWN = np.array(
    [0, *range(_HAS_DECOY, _HAS_DECOY + codes.NUM_DECOYS), *range(_SINCE, _SINCE + 3)]
)
_NUM_OWN = np.array(UNITS)
NUM_EVENT_CONTEXT = 5  # ticks left; failed, succeeded, unknown, in progress
_NODES = codes.HOSTS_PER_SUBNET + 1  # of an own zone


@njit
def _node_of(code, agent, units):
    """Return the node index (int64) of one of the agent's hosts or routers."""
    if code >= log.FIRST_ROUTER:
        return units * codes.HOSTS_PER_SUBNET + log.UNIT[code - log.FIRST_ROUTER]
    return log.PLACE[code] - agent * codes.HOSTS_PER_SUBNET


@njit
def _count(out, place):
    out[place] = min(np.int64(out[place]) + 1, 255)


@njit
def _write_event(event, agent, units, out, start):
    """Add an event to its node, which must be one of the agent's."""
    node, kind = np.int64(event.node), np.int64(event.kind)
    num, place = units * _NODES, start + _node_of(node, agent, units)
    if kind == log.ALARM:
        _count(out, place + num * _ALARM)
    elif kind == log.SESSION:
        _count(out, place + num * _SESSION)
    elif kind == log.CONNECTION:
        port = np.int64(event.local_port)
        drawn = port >= codes.FIRST_PORT
        _count(out, place + num * (_LOCAL + (_DRAWN if drawn else _CLASS_OF_PORT[port])))
        port = np.int64(event.remote_port)
        kind = 2 if port >= codes.FIRST_PORT else np.int64(port == codes.BLOCKED_PORT)
        _count(out, place + num * (_REMOTE + kind))
        remote = np.int64(event.remote)
        out[place + num * (_FROM + (remote >> 4))] = 1
        if port == codes.BLOCKED_PORT:
            return
        latest = place + num * _SOURCE
        out[latest] = max(np.int64(out[latest]), 1 + remote)
        if remote != node and log.WATCHER[remote >> 4] == agent:
            _count(out, start + _node_of(remote, agent, units) + num * _IS_SOURCE)


@njit
def _write_shown(state, agent, units, out, start):
    """Write the other features of nodes: own decoys, steps since own actions."""
    num = units * _NODES
    # The minimum hides the length from the compiler, which would unroll a loop of fixed length.
    own = min(_NUM_OWN[agent], (out.shape[0] - start) // num)
    shown, size = state.shown, codes.HOSTS_PER_SUBNET
    for part in range(codes.NUM_SHOWN):
        # Unsigned indices, as in `_write`, let the compiler emit vector code.
        source = np.uint64(part * codes.NUM_WATCHED + agent * size)
        target = np.uint64(start + num * _SHOWN[part])
        for i in range(own * size):
            out[target + np.uint64(i)] = shown[source + np.uint64(i)]
    router = start + units * size
    for unit in range(own):
        out[router + unit] = 1
        for action in range(3):
            out[router + unit + num * (_SINCE + action)] = log.NEVER


@njit
def _write_outcome(state, agent, units, out, start):
    """Write the outcome of the agent's action, if one on a host took effect in this step."""
    if state.t == 0 or state.blue_left[agent] > 0:
        return
    family, num = np.int64(state.blue_family[agent]), units * _NODES
    place = start + _node_of(np.int64(state.blue_target[agent]), agent, units)
    if family == codes.ANALYSE:
        files = np.int64(state.analysed[agent])
        out[place + num * _ANALYSED] = 1
        out[place + num * (_ANALYSED + 1)] = files & codes.CMD_FILE != 0
        out[place + num * (_ANALYSED + 2)] = files & codes.ESCALATE_FILE != 0
    elif family == codes.REMOVE:
        out[place + num * _REMOVED] = 1
    elif family == codes.RESTORE:
        out[place + num * _RESTORED] = 1
    elif family == codes.DECOY:
        out[place + num * _GETS] = 1


@njit
def write_events(state, agent, out, units):
    """Write the event observation of a blue agent.

    Args:
        state: STATE_DTYPE record.
        agent: 0 to 4.
        out: uint8 (length,); all of it is written.
        units: int64, number of own zones that a row has room for.
    """
    length = codes.OBS_LENGTHS[0] if units == 1 else codes.OBS_LENGTHS[4]
    for place in range(observe_agent(state, agent, out, 0), out.shape[0]):
        out[np.uint64(place)] = 0
    out[length] = state.blue_left[agent]
    out[length + 1 + np.int64(state.blue_success[agent])] = 1
    start = length + NUM_EVENT_CONTEXT
    _write_shown(state, agent, units, out, start)
    index = np.int64(state.last_event[agent]) - 1
    while index >= 0:
        event = state.events[index]
        _write_event(event, agent, units, out, start)
        index = np.int64(event.before) - 1
    _write_outcome(state, agent, units, out, start)


_HIGHS = np.full(NUM_EVENT_FEATURES, 255, np.uint8)
_HIGHS[[0, *range(_FROM, _SOURCE), *range(_ANALYSED, _SINCE)]] = 1
_HIGHS[_SOURCE] = codes.NUM_HOSTS


class Cage4Events(NamedTuple):
    """Event observations of blue agents, split into parts; `...` are the leading axes.

    All parts are uint8. Agents 0 to 3 have N = 17 nodes; agent 4 and padded rows have N = 51. Nodes
    are hosts in the order of the agent's actions, then the routers of its zones. Absent nodes are
    zeros.

    Attributes:
        vector: (..., 92) or (..., 210): the same vector as with observation="flat".
        context: (..., 5): steps until the agent's action takes effect (0..4), and its outcome,
            one-hot: failed, succeeded, unknown, in progress.
        nodes: (..., N, 37), by `NODE_FEATURES`. Of this step: process events without ("alarm") and
            with a process id ("session"); connections by class of local and remote port; flags of
            their source zones; the last remote host by number (1 + 16 zone + k; k of users is 0 to
            9, of servers from 10) and how many connections seen elsewhere have this host as remote,
            both without blocked connections; results of an own action. Then own decoys, and steps
            since the latest Analyse, Restore and decoy took effect; 255 if never or longer ago.
        NODE_FEATURES: Names of the features.

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

    NODE_FEATURES = EVENT_FEATURES

    vector: Any
    context: Any
    nodes: Any

    @classmethod
    def of(cls, obs: Any) -> Cage4Events:
        """Split observations, rows of events, into parts as `Cage4Graph.of` does."""
        vector, context, features = split_rows(obs, EVENTS)
        return cls(vector, context, features.swapaxes(-1, -2))


def _events_shapes(units: int) -> Shapes:
    """Return the shapes of the parts of a row; one feature after the other in memory."""
    return _vector_shapes(units)[0], (NUM_EVENT_CONTEXT,), (NUM_EVENT_FEATURES, units * _NODES)


def _fill_events(row: np.ndarray) -> None:
    events = Cage4Events.of(row)
    _fill_vector(events.vector)
    events.context[0] = MAX_TICKS_LEFT
    events.nodes[:] = _HIGHS


# --- all kinds ---


class _Kind(NamedTuple):
    """A kind of observation; `units` is the number of own zones that a row has room for.

    Attributes:
        shapes: Function of `units` that returns the shapes of a row's parts.
        fill: Function that writes a row's largest values, other than 1, into a row of ones.
        write: Kernel (state, agent, out, units) that writes a whole row.
    """

    shapes: Callable[[int], Shapes]
    fill: Callable[[np.ndarray], None]
    write: Any


KINDS = {
    FLAT: _Kind(_vector_shapes, _fill_vector, _write_vector),
    GRAPH: _Kind(_graph_shapes, _fill_graph, write_graph),
    EVENTS: _Kind(_events_shapes, _fill_events, write_events),
}


def row_length(units: int, observation: str) -> int:
    """Return the length of an agent's row with room for `units` own zones."""
    return sum(map(math.prod, KINDS[observation].shapes(units)))


def rows_space(units: tuple[int, ...], observation: str) -> Box:
    """Return the space of these agents' concatenated rows, uint8."""
    rows = [np.ones(row_length(own, observation), np.uint8) for own in units]
    for row in rows:
        KINDS[observation].fill(row)
    high = np.concatenate(rows)
    return Box(np.zeros_like(high), high, dtype=np.uint8)


def split_rows(obs: Any, observation: str) -> list[Any]:
    """Return the parts of observations, views where the memory layout allows it.

    Args:
        obs: (..., length), rows of agents of one size, as a NumPy array or a torch tensor.
        observation: Kind of the observations.

    Raises:
        ValueError: The last axis of `obs` does not have the length of a row.
    """
    shape = tuple(obs.shape)
    units = {row_length(own, observation): own for own in (1, MAX_UNITS)}
    if not shape or shape[-1] not in units:
        raise ValueError(
            f"obs has shape {shape}, expected (..., length) with one of the lengths "
            f"{', '.join(map(str, units))}: pass the rows of one group of agents, of envs with "
            f"observation={observation!r}"
        )
    parts, start = [], 0
    for part in KINDS[observation].shapes(units[shape[-1]]):
        stop = start + math.prod(part)
        parts.append(obs[..., start:stop].reshape((*shape[:-1], *part)))
        start = stop
    return parts
