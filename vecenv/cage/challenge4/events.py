"""Event observations of a blue agent: its vector, and this step's events of each host.

A row is one array: the agent's vector, context, then feature by feature the values of all nodes.
Nodes are the agent's hosts in the order of its actions (SPEC 10.1), then the routers of its zones.
A row has room for one own zone; rows of agent 4 and padded rows have room for three.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box
from numba import njit

from vecenv.cage.challenge4.graph import EVENTS, Shapes, row_length, rows_space, split_rows
from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules import events as log
from vecenv.cage.challenge4.rules.observation import observe_agent

__all__ = ["Cage4Events", "events_length", "events_space"]

LOCAL_PORTS = ("none", "ssh", "ot", "http", "https", "sql", "mail", "drawn")
_CLASS_OF_PORT = np.zeros(4096, np.int64)
_CLASS_OF_PORT[[22, 1, 80, 443, 3390, 25]] = range(1, 7)
_DRAWN = len(LOCAL_PORTS) - 1
REMOTE_PORTS = ("ssh", "blocked", "drawn")
NODE_FEATURES = (  # see `Cage4Events`
    "exists", "alarm", "session",
    *(f"local_{name}" for name in LOCAL_PORTS),
    *(f"remote_{name}" for name in REMOTE_PORTS),
    *(f"from_{name}" for name in codes.SUBNET_NAMES[: codes.NUM_SUBNETS]),
    "source", "is_source",
    "is_analysed", "has_cmd", "has_escalate", "is_removed", "is_restored", "gets_decoy",
    *(f"has_{name}" for name in codes.DECOY_NAMES),
    "since_analyse", "since_restore", "since_decoy",
)  # fmt: skip
NUM_NODE_FEATURES = len(NODE_FEATURES)
_FIRST = "alarm session local_none remote_ssh from_RZA source is_source"
_ALARM, _SESSION, _LOCAL, _REMOTE, _FROM, _SOURCE, _IS_SOURCE = map(
    NODE_FEATURES.index, _FIRST.split()
)
_OWN = "is_analysed is_removed is_restored gets_decoy has_apache since_analyse"
_ANALYSED, _REMOVED, _RESTORED, _GETS, _HAS_DECOY, _SINCE = map(NODE_FEATURES.index, _OWN.split())
# Features copied from `shown`, by its parts.
_SHOWN = np.array(
    [0, *range(_HAS_DECOY, _HAS_DECOY + codes.NUM_DECOYS), *range(_SINCE, _SINCE + 3)]
)
_NUM_OWN = np.array([len(zones) for zones in codes.BLUE_SUBNETS])
TICKS_LEFT, FIRST_SUCCESS = 0, 1
NUM_CONTEXT = 5  # ticks left; failed, succeeded, unknown, in progress
MAX_TICKS_LEFT = int(codes.BLUE_TICKS.max()) - 1
_NODES = codes.HOSTS_PER_SUBNET + 1  # of an own zone


def vector_length(units):
    """Return the length of the vector in a row with room for `units` own zones."""
    return codes.OBS_LENGTHS[0] if units == 1 else codes.OBS_LENGTHS[codes.NUM_BLUE - 1]


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
        # Unsigned indices, as in `observation`, let the compiler emit vector code.
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
HIGHS[[0, *range(_FROM, _SOURCE), *range(_ANALYSED, _SINCE)]] = 1
HIGHS[_SOURCE] = codes.NUM_HOSTS


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

    NODE_FEATURES = NODE_FEATURES

    vector: Any
    context: Any
    nodes: Any

    @classmethod
    def of(cls, obs: Any) -> Cage4Events:
        """Split observations into parts, without a copy where the memory layout allows it.

        Args:
            obs: (..., length), rows of agents of one size, as a NumPy array or a torch tensor.

        Raises:
            ValueError: The last axis of `obs` does not have the length of an event row.
        """
        vector, context, features = split_rows(obs, _shapes, EVENTS)
        return cls(vector, context, features.swapaxes(-1, -2))


def _shapes(units: int) -> Shapes:
    """Return the shapes of the parts of a row; one feature after the other in memory."""
    return (vector_length(units),), (NUM_CONTEXT,), (NUM_NODE_FEATURES, units * _NODES)


def events_length(units: int) -> int:
    """Return the length of a row with room for `units` own zones."""
    return row_length(_shapes(units))


def events_space(units: tuple[int, ...]) -> Box:
    """Return the space of these agents' concatenated events, uint8."""

    def fill(row: np.ndarray) -> None:
        events = Cage4Events.of(row)
        events.vector[0] = 2  # the phase
        events.context[TICKS_LEFT] = MAX_TICKS_LEFT
        events.nodes[:] = HIGHS

    return rows_space([events_length(own) for own in units], fill)
