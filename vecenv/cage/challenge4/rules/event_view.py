"""What a blue agent sees as events: its vector, and for each host what this step told of it.

A row is one array: the agent's vector; context; one feature of all nodes after the other. Nodes are
the agent's hosts in the order of its actions (SPEC 10.1), then the routers of its zones. A row has
room for one own zone or, of agent 4 and where rows are padded, for three.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules.bits import has
from vecenv.cage.challenge4.rules.codes import (
    ANALYSE,
    BLOCKED_PORT,
    BLUE_SUBNETS,
    BLUE_TICKS,
    CMD_FILE,
    DECOY,
    DECOY_NAMES,
    ESCALATE_FILE,
    FIRST_PORT,
    FIRST_SERVER,
    HOSTS_PER_SUBNET,
    MAX_SERVERS,
    NUM_BLUE,
    NUM_DECOYS,
    NUM_HOSTS,
    NUM_SUBNETS,
    OBS_LENGTHS,
    REMOVE,
    RESTORE,
    SUBNET_NAMES,
)
from vecenv.cage.challenge4.rules.events import (
    ALARM,
    CONNECTION,
    FIRST_ROUTER,
    SESSION,
)
from vecenv.cage.challenge4.rules.graph import MAX_UNITS
from vecenv.cage.challenge4.rules.observation import BLUE_SUBNET_ORDER, observe_agent

LOCAL_PORTS = ("none", "ssh", "ot", "http", "https", "sql", "mail", "drawn")
_CLASS_OF_PORT = np.zeros(4096, np.int64)
for _place, _port in enumerate((22, 1, 80, 443, 3390, 25)):
    _CLASS_OF_PORT[_port] = 1 + _place
_DRAWN = len(LOCAL_PORTS) - 1
REMOTE_PORTS = ("ssh", "blocked", "drawn")
NODE_FEATURES = (
    "exists",
    "alarm",  # process events without an id, as work raises them
    "session",  # with one, as exploits do
    *(f"local_{name}" for name in LOCAL_PORTS),
    *(f"remote_{name}" for name in REMOTE_PORTS),
    *(f"from_{name}" for name in SUBNET_NAMES[:NUM_SUBNETS]),
    "source",  # 1 + the last host that a connection, but a blocked one, names as remote; 0 none
    "is_source",  # how many connections seen elsewhere, but blocked ones, name it as remote
    "is_analysed",
    "has_cmd",  # as found by this step's Analyse
    "has_escalate",
    "is_removed",
    "is_restored",
    "gets_decoy",
    *(f"has_{name}" for name in DECOY_NAMES),
    "since_analyse",
    "since_restore",
    "since_decoy",
)
NUM_NODE_FEATURES = len(NODE_FEATURES)
_at = {name: place for place, name in enumerate(NODE_FEATURES)}
_ALARM, _SESSION, _LOCAL = _at["alarm"], _at["session"], _at["local_none"]
_REMOTE, _FROM, _SOURCE, _IS_SOURCE = (
    _at["remote_ssh"],
    _at["from_RZA"],
    _at["source"],
    _at["is_source"],
)
_ANALYSED, _REMOVED, _RESTORED, _GETS = (
    _at["is_analysed"],
    _at["is_removed"],
    _at["is_restored"],
    _at["gets_decoy"],
)
_HAS_DECOY, _SINCE = _at["has_apache"], _at["since_analyse"]
# By zone: the agent that watches it, or none, and which of that agent's it is.
_WATCHER, _UNIT = np.full(NUM_SUBNETS + 1, -1), np.zeros(NUM_SUBNETS + 1, np.int64)
for _agent, _zones in enumerate(BLUE_SUBNETS):
    for _place, _zone in enumerate(_zones):
        _WATCHER[_zone], _UNIT[_zone] = _agent, _place
NEVER = 255  # of steps since: never, or longer ago
TICKS_LEFT, FIRST_SUCCESS = 0, 1
NUM_CONTEXT = 5  # ticks left; failed, succeeded, unknown, in progress
MAX_TICKS_LEFT = int(BLUE_TICKS.max()) - 1


def vector_length(units):
    """Length of the vector in a row with room for `units` own zones."""
    return OBS_LENGTHS[0] if units == 1 else OBS_LENGTHS[NUM_BLUE - 1]


@njit
def num_nodes(units):
    """Number of nodes of a row."""
    return units * (HOSTS_PER_SUBNET + 1)


@njit
def _node_of(code, agent, units):
    """Place int64 of a host or router among an agent's nodes, -1 if it is not its own."""
    if code >= FIRST_ROUTER:
        zone = code - FIRST_ROUTER
        place = units * HOSTS_PER_SUBNET + _UNIT[zone]
    else:
        zone, k = code >> 4, code & 15
        place = k - FIRST_SERVER if k >= FIRST_SERVER else k + MAX_SERVERS
        place += _UNIT[zone] * HOSTS_PER_SUBNET
    return place if _WATCHER[zone] == agent else np.int64(-1)


@njit
def _count(out, place):
    out[place] = min(np.int64(out[place]) + 1, 255)


@njit
def _write_event(state, index, agent, units, out, start):
    """Add an event to its node, if that is the agent's."""
    node = _node_of(np.int64(state.event_node[index]), agent, units)
    if node < 0:
        return
    num, place = num_nodes(units), start + node
    kind = np.int64(state.event_kind[index])
    if kind == ALARM:
        _count(out, place + num * _ALARM)
    elif kind == SESSION:
        _count(out, place + num * _SESSION)
    elif kind == CONNECTION:
        port = np.int64(state.event_local_port[index])
        drawn = port >= FIRST_PORT
        _count(out, place + num * (_LOCAL + (_DRAWN if drawn else _CLASS_OF_PORT[port])))
        port = np.int64(state.event_remote_port[index])
        of_remote = np.int64(2) if port >= FIRST_PORT else np.int64(port == BLOCKED_PORT)
        _count(out, place + num * (_REMOTE + of_remote))
        remote = np.int64(state.event_remote[index])
        out[place + num * (_FROM + (remote >> 4))] = 1
        if port == BLOCKED_PORT:
            return
        latest = place + num * _SOURCE
        out[latest] = max(np.int64(out[latest]), 1 + remote)
        source = _node_of(remote, agent, units)
        if source >= 0 and source != node:
            _count(out, start + source + num * _IS_SOURCE)


@njit
def _since(step, t):
    return np.int64(NEVER) if step == 0 else min(np.int64(t) - np.int64(step), NEVER)


@njit
def _write_zone(state, subnet, unit, units, out, start):
    """Write what is known of a zone besides events: own decoys, steps since own actions."""
    num = np.uint64(num_nodes(units))  # unsigned, as in `observation`
    exists, t = np.int64(state.exists[subnet]), np.int64(state.t)
    first = subnet * HOSTS_PER_SUBNET
    since = num * np.uint64(_SINCE)
    for i in range(HOSTS_PER_SUBNET):
        k = i + FIRST_SERVER if i < MAX_SERVERS else i - MAX_SERVERS
        place, host, there = (
            np.uint64(start + unit * HOSTS_PER_SUBNET + i),
            first + k,
            exists >> k & 1,
        )
        out[place] = there
        out[place + since] = there * _since(state.last_analyse[host], t)
        out[place + since + num] = there * _since(state.last_restore[host], t)
        out[place + since + num + num] = there * _since(state.last_decoy[host], t)
        decoys = np.int64(state.decoys[host])
        if decoys:
            for decoy in range(NUM_DECOYS):
                out[place + num * np.uint64(_HAS_DECOY + decoy)] = has(decoys, decoy)
    router = np.uint64(start + units * HOSTS_PER_SUBNET + unit)
    out[router] = 1
    for action in range(3):
        out[router + since + num * np.uint64(action)] = NEVER


@njit
def _write_outcome(state, agent, units, out, start):
    """Write what the agent's action did, if one on a host took effect in this step."""
    family = np.int64(state.blue_family[agent])
    node = _node_of(np.int64(state.blue_target[agent]), agent, units)
    if state.t == 0 or state.blue_left[agent] > 0 or node < 0:
        return
    num, place = num_nodes(units), start + node
    if family == ANALYSE:
        files = np.int64(state.analysed[agent])
        out[place + num * _ANALYSED] = 1
        out[place + num * (_ANALYSED + 1)] = files & CMD_FILE != 0
        out[place + num * (_ANALYSED + 2)] = files & ESCALATE_FILE != 0
    elif family == REMOVE:
        out[place + num * _REMOVED] = 1
    elif family == RESTORE:
        out[place + num * _RESTORED] = 1
    elif family == DECOY:
        out[place + num * _GETS] = 1


@njit
def write_events(state, agent, out, units, length):
    """Write what a blue agent sees as events.

    Args:
        state: LOGGED_STATE_DTYPE record.
        agent: 0 to 4.
        out: uint8 (`length` + 5 + features * 17 * `units`,); all of it is written.
        units: int64, for how many own zones there is room.
        length: int64, of the vector.
    """
    out[observe_agent(state, agent, out, 0) :] = 0
    out[length + TICKS_LEFT] = state.blue_left[agent]
    out[length + FIRST_SUCCESS + np.int64(state.blue_success[agent])] = 1
    start = length + NUM_CONTEXT
    for unit in range(MAX_UNITS if agent == NUM_BLUE - 1 else 1):
        _write_zone(state, BLUE_SUBNET_ORDER[agent + unit], unit, units, out, start)
    for index in range(np.int64(state.num_events)):
        _write_event(state, index, agent, units, out, start)
    _write_outcome(state, agent, units, out, start)


HIGHS = np.full(NUM_NODE_FEATURES, 255, np.uint8)
for _name, _high in {"exists": 1, "source": NUM_HOSTS}.items():
    HIGHS[_at[_name]] = _high
for _first, _num in ((_FROM, NUM_SUBNETS), (_ANALYSED, 6), (_HAS_DECOY, NUM_DECOYS)):
    HIGHS[_first : _first + _num] = 1
