"""What a blue agent sees as events: its vector, and for each host what this step told of it.

A row is one array: the agent's vector; context; one feature of all nodes after the other. Nodes are
the agent's hosts in the order of its actions (SPEC 10.1), then the routers of its zones. A row has
room for one own zone or, of agent 4 and where rows are padded, for three.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box
from numba import njit

from vecenv.cage.challenge4.graph import EVENTS, MAX_UNITS, find_kind
from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.bits import has
from vecenv.cage.challenge4.rules.events import ALARM, CONNECTION, FIRST_ROUTER, SESSION
from vecenv.cage.challenge4.rules.observation import BLUE_SUBNET_ORDER, observe_agent

__all__ = ["Cage4Events", "events_length", "events_space"]

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
    *(f"from_{name}" for name in codes.SUBNET_NAMES[: codes.NUM_SUBNETS]),
    "source",  # 1 + the last host that a connection, but a blocked one, names as remote; 0 none
    "is_source",  # how many connections seen elsewhere, but blocked ones, name it as remote
    "is_analysed",
    "has_cmd",  # as found by this step's Analyse
    "has_escalate",
    "is_removed",
    "is_restored",
    "gets_decoy",
    *(f"has_{name}" for name in codes.DECOY_NAMES),
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
_WATCHER, _UNIT = np.full(codes.NUM_SUBNETS + 1, -1), np.zeros(codes.NUM_SUBNETS + 1, np.int64)
for _agent, _zones in enumerate(codes.BLUE_SUBNETS):
    for _place, _zone in enumerate(_zones):
        _WATCHER[_zone], _UNIT[_zone] = _agent, _place
NEVER = 255  # of steps since: never, or longer ago
TICKS_LEFT, FIRST_SUCCESS = 0, 1
NUM_CONTEXT = 5  # ticks left; failed, succeeded, unknown, in progress
MAX_TICKS_LEFT = int(codes.BLUE_TICKS.max()) - 1


def vector_length(units):
    """Length of the vector in a row with room for `units` own zones."""
    return codes.OBS_LENGTHS[0] if units == 1 else codes.OBS_LENGTHS[codes.NUM_BLUE - 1]


@njit
def num_nodes(units):
    """Number of nodes of a row."""
    return units * (codes.HOSTS_PER_SUBNET + 1)


@njit
def _node_of(code, agent, units):
    """Place int64 of a host or router among an agent's nodes, -1 if it is not its own."""
    if code >= FIRST_ROUTER:
        zone = code - FIRST_ROUTER
        place = units * codes.HOSTS_PER_SUBNET + _UNIT[zone]
    else:
        zone, k = code >> 4, code & 15
        place = k - codes.FIRST_SERVER if k >= codes.FIRST_SERVER else k + codes.MAX_SERVERS
        place += _UNIT[zone] * codes.HOSTS_PER_SUBNET
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
        drawn = port >= codes.FIRST_PORT
        _count(out, place + num * (_LOCAL + (_DRAWN if drawn else _CLASS_OF_PORT[port])))
        port = np.int64(state.event_remote_port[index])
        of_remote = (
            np.int64(2) if port >= codes.FIRST_PORT else np.int64(port == codes.BLOCKED_PORT)
        )
        _count(out, place + num * (_REMOTE + of_remote))
        remote = np.int64(state.event_remote[index])
        out[place + num * (_FROM + (remote >> 4))] = 1
        if port == codes.BLOCKED_PORT:
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
    first = subnet * codes.HOSTS_PER_SUBNET
    since = num * np.uint64(_SINCE)
    for i in range(codes.HOSTS_PER_SUBNET):
        k = i + codes.FIRST_SERVER if i < codes.MAX_SERVERS else i - codes.MAX_SERVERS
        place, host, there = (
            np.uint64(start + unit * codes.HOSTS_PER_SUBNET + i),
            first + k,
            exists >> k & 1,
        )
        out[place] = there
        out[place + since] = there * _since(state.last_analyse[host], t)
        out[place + since + num] = there * _since(state.last_restore[host], t)
        out[place + since + num + num] = there * _since(state.last_decoy[host], t)
        decoys = np.int64(state.decoys[host])
        if decoys:
            for decoy in range(codes.NUM_DECOYS):
                out[place + num * np.uint64(_HAS_DECOY + decoy)] = has(decoys, decoy)
    router = np.uint64(start + units * codes.HOSTS_PER_SUBNET + unit)
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
    """Write what a blue agent sees as events.

    Args:
        state: STATE_DTYPE record.
        agent: 0 to 4.
        out: uint8 (length,); all of it is written.
        units: int64, for how many own zones there is room.
    """
    length = codes.OBS_LENGTHS[0] if units == 1 else codes.OBS_LENGTHS[4]
    out[observe_agent(state, agent, out, 0) :] = 0
    out[length + TICKS_LEFT] = state.blue_left[agent]
    out[length + FIRST_SUCCESS + np.int64(state.blue_success[agent])] = 1
    start = length + NUM_CONTEXT
    for unit in range(MAX_UNITS if agent == codes.NUM_BLUE - 1 else 1):
        _write_zone(state, BLUE_SUBNET_ORDER[agent + unit], unit, units, out, start)
    for index in range(np.int64(state.num_events)):
        _write_event(state, index, agent, units, out, start)
    _write_outcome(state, agent, units, out, start)


HIGHS = np.full(NUM_NODE_FEATURES, 255, np.uint8)
for _name, _high in {"exists": 1, "source": codes.NUM_HOSTS}.items():
    HIGHS[_at[_name]] = _high
for _first, _num in ((_FROM, codes.NUM_SUBNETS), (_ANALYSED, 6), (_HAS_DECOY, codes.NUM_DECOYS)):
    HIGHS[_first : _first + _num] = 1


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

    NODE_FEATURES = NODE_FEATURES

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
    return units * (codes.HOSTS_PER_SUBNET + 1)


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
