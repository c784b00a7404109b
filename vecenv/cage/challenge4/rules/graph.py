"""What a blue agent sees as a graph: hosts and zones as nodes, where they lie and traffic as edges.

A row is one array, part after part: features of nodes, mask of nodes, edge index, features of
edges, mask of edges, context. Hosts are the nodes 0, 1, ... in the order of the agent's actions
(SPEC 10.1), the nine zones follow in sorted order. First come the edges from each host to its zone,
then those from each other zone into each of the agent's own, in the order of AllowTraffic.

A row has room for one own zone or, of agent 4 and where rows are padded, for three. All of it but
`RED_FEATURES` follows from the agent's vectors, its mask and the actions that it has submitted.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules.bits import has
from vecenv.cage.challenge4.rules.blue import acts_on_host
from vecenv.cage.challenge4.rules.codes import (
    ANALYSE,
    BLUE_TICKS,
    DECOY,
    FIRST_SERVER,
    FULL,
    HOSTS_PER_SUBNET,
    INT,
    LEVEL_BITS,
    MAX_SERVERS,
    MAX_SESSIONS,
    MESSAGE_BITS,
    NOT_LINKED,
    NUM_BLUE,
    NUM_ZONES,
    PRIVILEGED,
    RED_OF_SUBNET,
    REMOVE,
    RESTORE,
    SORTED,
    SORTED_PLACE,
    SORTED_SUBNETS,
    SUBNET_NAMES,
)
from vecenv.cage.challenge4.rules.observation import BLUE_SUBNET_ORDER

# --- features of a node ---
IS_USER, IS_SERVER, IS_ZONE, IS_OWN, FIRST_ZONE = range(5)
PROCESS_EVENT = FIRST_ZONE + NUM_ZONES
CONNECTION_EVENT, HAS_DECOY, FIRST_BUSY = range(PROCESS_EVENT + 1, PROCESS_EVENT + 4)
_BUSY_PLACE = np.zeros(8, np.int64)
_BUSY_PLACE[[ANALYSE, REMOVE, RESTORE, DECOY]] = FIRST_BUSY + np.arange(4)
NODE_FEATURES = (
    "is_user",
    "is_server",
    "is_zone",
    "is_own",
    *(f"in_{SUBNET_NAMES[zone]}" for zone in SORTED_SUBNETS),
    "process_event",
    "connection_event",
    "has_decoy",
    "is_analysed",
    "is_removed",
    "is_restored",
    "gets_decoy",
)
NUM_NODE_FEATURES = len(NODE_FEATURES)
RED_FEATURES = ("user_sessions", "root_sessions", "lost_levels")  # true state
RED_HIGHS = (MAX_SESSIONS, MAX_SESSIONS, FULL)
USER_SESSIONS, ROOT_SESSIONS, LOST_LEVELS = range(NUM_NODE_FEATURES, NUM_NODE_FEATURES + 3)

# --- features of an edge ---
HOST_IN_ZONE, IS_ROUTE, IS_LINKED, IS_BLOCKED = range(4)
EDGE_FEATURES = ("host_in_zone", "is_route", "is_linked", "is_blocked")
NUM_EDGE_FEATURES = len(EDGE_FEATURES)

# --- context ---
NUM_PHASES = 3
TICKS_LEFT = NUM_PHASES
MAX_TICKS_LEFT = int(BLUE_TICKS.max()) - 1
FIRST_MESSAGE = TICKS_LEFT + 1
NUM_CONTEXT = FIRST_MESSAGE + MESSAGE_BITS * (NUM_BLUE - 1)

UNITS = (1, 1, 1, 1, 3)  # own zones of each agent
MAX_UNITS = 3
_OTHERS = NUM_ZONES - 1

# Zones whose routers are linked (SPEC 1.3), as sets by zone.
_ROUTES = np.zeros(NUM_ZONES, np.int64)
for _a, _b in ((INT, 0), (INT, 2), (INT, 4), (INT, 5), (0, 1), (2, 3), (5, 6), (5, 7)):
    _ROUTES[_a] |= 1 << _b
    _ROUTES[_b] |= 1 << _a


@njit
def _write_hosts(state, subnet, unit, out, width, places):
    """Write nodes and edges of the hosts of an own zone that exist."""
    _, node_masks, edge_index, edges, edge_masks, num_nodes, num_edges = places
    zone = num_nodes - NUM_ZONES + SORTED_PLACE[subnet]
    exists = np.int64(state.exists[subnet])
    processes = np.int64(state.process_events[subnet])
    connections = np.int64(state.connection_events[subnet])
    for i in range(HOSTS_PER_SUBNET):
        node = unit * HOSTS_PER_SUBNET + i
        out[edge_index + node] = node
        out[edge_index + num_edges + node] = zone
        k = i + FIRST_SERVER if i < MAX_SERVERS else i - MAX_SERVERS
        if not has(exists, k):
            continue
        out[node_masks + node] = 1
        out[edge_masks + node] = 1
        out[edges + node * NUM_EDGE_FEATURES + HOST_IN_ZONE] = 1
        start = node * width
        out[start + (IS_SERVER if i < MAX_SERVERS else IS_USER)] = 1
        out[start + IS_OWN] = 1
        out[start + FIRST_ZONE + SORTED_PLACE[subnet]] = 1
        out[start + PROCESS_EVENT] = has(processes, k)
        out[start + CONNECTION_EVENT] = has(connections, k)
        out[start + HAS_DECOY] = state.decoys[subnet * HOSTS_PER_SUBNET + k] != 0


@njit
def _write_traffic(state, subnet, unit, units, out, width, places):
    """Write the zone as one of the agent's own, and the edges of traffic into it."""
    _, _, edge_index, edges, edge_masks, num_nodes, num_edges = places
    zones = num_nodes - NUM_ZONES
    own = SORTED_PLACE[subnet]
    out[(zones + own) * width + IS_OWN] = 1
    blocked = np.int64(state.blocks[subnet])
    edge = units * HOSTS_PER_SUBNET + unit * _OTHERS
    for place in range(NUM_ZONES):
        if place == own:
            continue
        out[edge_index + edge] = zones + place
        out[edge_index + num_edges + edge] = zones + own
        out[edge_masks + edge] = 1
        start = edges + edge * NUM_EDGE_FEATURES
        out[start + IS_ROUTE] = has(_ROUTES[subnet], SORTED[place])
        out[start + IS_LINKED] = not has(NOT_LINKED[state.phase, subnet], place)
        out[start + IS_BLOCKED] = has(blocked, SORTED[place])
        edge += 1


@njit
def _write_red(state, subnet, unit, out, width):
    """Write the true state of the hosts of an own zone: sessions, lost levels of services."""
    agent = RED_OF_SUBNET[subnet]
    for index in range(np.int64(state.num_sessions[agent])):
        host = np.int64(state.session_host[agent, index])
        if host >> 4 == subnet:
            is_root = np.int64(state.session_flags[agent, index]) & PRIVILEGED != 0
            start = (unit * HOSTS_PER_SUBNET + _place(host)) * width
            out[start + (ROOT_SESSIONS if is_root else USER_SESSIONS)] += 1
    for i in range(HOSTS_PER_SUBNET):
        k = i + FIRST_SERVER if i < MAX_SERVERS else i - MAX_SERVERS
        if has(np.int64(state.exists[subnet]), k):
            level = np.int64(state.svc[subnet * HOSTS_PER_SUBNET + k]) & LEVEL_BITS
            out[(unit * HOSTS_PER_SUBNET + i) * width + LOST_LEVELS] = FULL - level


@njit
def _place(host):
    """Place int64 of a host among the nodes of its zone: servers before users."""
    k = host & 15
    return k - FIRST_SERVER if k >= FIRST_SERVER else k + MAX_SERVERS


@njit
def _write_context(state, agent, out, start):
    out[start + np.int64(state.phase)] = 1
    out[start + TICKS_LEFT] = state.blue_left[agent]
    start += FIRST_MESSAGE
    for sender in range(NUM_BLUE):
        if sender != agent:
            message = np.int64(state.messages[sender])
            for bit in range(MESSAGE_BITS):
                out[start + bit] = (message >> bit) & 1
            start += MESSAGE_BITS


@njit
def write_graph(state, agent, out, units, with_red):
    """Write the graph that a blue agent sees.

    Args:
        state: STATE_DTYPE record.
        agent: 0 to 4.
        out: uint8 (length,); all of it is written.
        units: int64, for how many own zones there is room.
        with_red: Whether nodes have `RED_FEATURES`, too.
    """
    for place in range(out.shape[0]):
        out[place] = 0
    width = NUM_NODE_FEATURES + (3 if with_red else 0)
    num_nodes = units * HOSTS_PER_SUBNET + NUM_ZONES
    num_edges = units * (HOSTS_PER_SUBNET + _OTHERS)
    node_masks = num_nodes * width
    edge_index = node_masks + num_nodes
    edges = edge_index + 2 * num_edges
    edge_masks = edges + num_edges * NUM_EDGE_FEATURES
    context = edge_masks + num_edges
    places = (np.int64(0), node_masks, edge_index, edges, edge_masks, num_nodes, num_edges)
    zones = num_nodes - NUM_ZONES
    for place in range(NUM_ZONES):
        out[node_masks + zones + place] = 1
        out[(zones + place) * width + IS_ZONE] = 1
        out[(zones + place) * width + FIRST_ZONE + place] = 1
    num_own = MAX_UNITS if agent == NUM_BLUE - 1 else 1
    for unit in range(num_own):
        subnet = BLUE_SUBNET_ORDER[agent + unit]
        _write_hosts(state, subnet, unit, out, width, places)
        _write_traffic(state, subnet, unit, units, out, width, places)
        if with_red:
            _write_red(state, subnet, unit, out, width)
        family, target = np.int64(state.blue_family[agent]), np.int64(state.blue_target[agent])
        is_busy = state.blue_left[agent] > 0 and acts_on_host(family)
        if is_busy and target >> 4 == subnet:
            node = unit * HOSTS_PER_SUBNET + _place(target)
            out[node * width + _BUSY_PLACE[family]] = 1
    _write_context(state, agent, out, context)
