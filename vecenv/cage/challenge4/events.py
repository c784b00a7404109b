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
from vecenv.cage.challenge4.rules.events import (
    ALARM,
    CONNECTION,
    FIRST_ROUTER,
    NEVER,
    PLACE,
    SESSION,
    UNIT,
    WATCHER,
)
from vecenv.cage.challenge4.rules.observation import observe_agent

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
# Features that are copied from `shown`, by its parts.
_SHOWN = np.array(
    [0, *range(_HAS_DECOY, _HAS_DECOY + codes.NUM_DECOYS), *range(_SINCE, _SINCE + 3)]
)
_NUM_OWN = np.array([len(zones) for zones in codes.BLUE_SUBNETS])
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
    """Place int64 of a host or router of the agent's among its nodes."""
    if code >= FIRST_ROUTER:
        return units * codes.HOSTS_PER_SUBNET + UNIT[code - FIRST_ROUTER]
    return PLACE[code] - agent * codes.HOSTS_PER_SUBNET


@njit
def _count(out, place):
    out[place] = min(np.int64(out[place]) + 1, 255)


@njit
def _write_event(event, agent, units, out, start):
    """Add an event to its node, which is the agent's."""
    node, kind = np.int64(event.node), np.int64(event.kind)
    num, place = num_nodes(units), start + _node_of(node, agent, units)
    if kind == ALARM:
        _count(out, place + num * _ALARM)
    elif kind == SESSION:
        _count(out, place + num * _SESSION)
    elif kind == CONNECTION:
        port = np.int64(event.local_port)
        drawn = port >= codes.FIRST_PORT
        _count(out, place + num * (_LOCAL + (_DRAWN if drawn else _CLASS_OF_PORT[port])))
        port = np.int64(event.remote_port)
        of_remote = (
            np.int64(2) if port >= codes.FIRST_PORT else np.int64(port == codes.BLOCKED_PORT)
        )
        _count(out, place + num * (_REMOTE + of_remote))
        remote = np.int64(event.remote)
        out[place + num * (_FROM + (remote >> 4))] = 1
        if port == codes.BLOCKED_PORT:
            return
        latest = place + num * _SOURCE
        out[latest] = max(np.int64(out[latest]), 1 + remote)
        if remote != node and WATCHER[remote >> 4] == agent:
            _count(out, start + _node_of(remote, agent, units) + num * _IS_SOURCE)


@njit
def _write_shown(state, agent, units, out, start):
    """Write what is known of nodes besides events: own decoys, steps since own actions."""
    num = num_nodes(units)
    # The minimum keeps the length from the compiler, which would unroll a loop of a fixed one.
    own = min(_NUM_OWN[agent], (out.shape[0] - start) // num)
    shown, size = state.shown, codes.HOSTS_PER_SUBNET
    for part in range(codes.NUM_SHOWN):
        # Unsigned places, as in `observation`, for vector code.
        source = np.uint64(part * codes.NUM_WATCHED + agent * size)
        target = np.uint64(start + num * _SHOWN[part])
        for i in range(own * size):
            out[target + np.uint64(i)] = shown[source + np.uint64(i)]
    router = start + units * size
    for unit in range(own):
        out[router + unit] = 1
        for action in range(3):
            out[router + unit + num * (_SINCE + action)] = NEVER


@njit
def _write_outcome(state, agent, units, out, start):
    """Write what the agent's action did, if one on a host took effect in this step."""
    if state.t == 0 or state.blue_left[agent] > 0:
        return
    family, num = np.int64(state.blue_family[agent]), num_nodes(units)
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
    """Write what a blue agent sees as events.

    Args:
        state: STATE_DTYPE record.
        agent: 0 to 4.
        out: uint8 (length,); all of it is written.
        units: int64, for how many own zones there is room.
    """
    length = codes.OBS_LENGTHS[0] if units == 1 else codes.OBS_LENGTHS[4]
    for place in range(observe_agent(state, agent, out, 0), out.shape[0]):
        out[np.uint64(place)] = 0
    out[length + TICKS_LEFT] = state.blue_left[agent]
    out[length + FIRST_SUCCESS + np.int64(state.blue_success[agent])] = 1
    start = length + NUM_CONTEXT
    _write_shown(state, agent, units, out, start)
    index = np.int64(state.last_event[agent]) - 1
    while index >= 0:
        event = state.events[index]
        _write_event(event, agent, units, out, start)
        index = np.int64(event.before) - 1
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
