"""Blue's observations and action masks (SPEC 10.2-10.4).

Vectors have 92 values for each of agents 0-3, then 210 for agent 4.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.codes import HOSTS_PER_SUBNET, NUM_ACTIONS, NUM_BLUE, NUM_ZONES

BLUE_SUBNET_ORDER = np.array([0, 1, 2, 3, codes.ADM, codes.OFF, codes.PUB], np.int64)
_LAST_AGENT_BLOCKS = 3


@njit
def vector_order(members):
    """Reorder a set int64 of hosts: bit i is the i-th in vectors, servers before users (10.1)."""
    return (members >> codes.FIRST_SERVER) | ((members & codes.USER_BITS) << codes.MAX_SERVERS)


@njit
def _write_16(out, start, bits):
    # Unsigned indices: signed ones could count from the end, which prevents vector code.
    for i in range(16):
        out[np.uint64(start) + np.uint64(i)] = (bits >> i) & 1


@njit
def _write_9(out, start, bits):
    for i in range(codes.NUM_ZONES):
        out[np.uint64(start) + np.uint64(i)] = (bits >> i) & 1


@njit
def _write_8(out, start, bits):
    for i in range(codes.MESSAGE_BITS):
        out[np.uint64(start) + np.uint64(i)] = (bits >> i) & 1


@njit
def _write_subnet(state, subnet, out, start):
    """Write the 59 values of a subnet; return the start of the next."""
    blocked, sorted_blocks = np.int64(state.blocks[subnet]), np.int64(0)
    if blocked:
        for i in range(codes.NUM_ZONES):
            sorted_blocks |= ((blocked >> codes.SORTED[i]) & 1) << i
    _write_9(out, start, np.int64(1) << codes.SORTED_PLACE[subnet])
    _write_9(out, start + codes.NUM_ZONES, sorted_blocks)
    _write_9(out, start + 2 * codes.NUM_ZONES, codes.NOT_LINKED[state.phase, subnet])
    start += 3 * codes.NUM_ZONES
    _write_16(out, start, vector_order(np.int64(state.process_events[subnet])))
    start += codes.HOSTS_PER_SUBNET
    _write_16(out, start, vector_order(np.int64(state.connection_events[subnet])))
    return start + codes.HOSTS_PER_SUBNET


@njit
def observe_agent(state, agent, out, start):
    """Write one blue agent's observation from out[start]; return the start of the next agent's."""
    first, num = agent, 1
    if agent == codes.NUM_BLUE - 1:
        num = _LAST_AGENT_BLOCKS
    out[start] = state.phase
    start += 1
    for index in range(first, first + num):
        start = _write_subnet(state, BLUE_SUBNET_ORDER[index], out, start)
    for sender in range(codes.NUM_BLUE):
        if sender != agent:
            _write_8(out, start, np.int64(state.messages[sender]))
            start += codes.MESSAGE_BITS
    return start


@njit
def observe(state, out, rules):
    """Write the observations of all five agents, 578 values."""
    start = 0
    for agent in range(codes.NUM_BLUE):
        start = observe_agent(state, agent, out, start)


_SIZES = np.array(NUM_ACTIONS, np.int64)


@njit
def _write_hosts(out, start, bits):
    for i in range(HOSTS_PER_SUBNET):
        out[start + i] = (bits >> i) & 1 == 1


@njit
def mask_agent(state, agent, out, width):
    """Write the mask of an agent's actions: true where an action does something.

    Args:
        state: STATE_DTYPE record.
        agent: 0 to 4.
        out: bool (width,), or longer: the rest is set to true, as any message may be sent.
        width: int64, 82 or 242; entries beyond the agent's actions are padding, false.
    """
    num = 3 if agent == NUM_BLUE - 1 else 1
    size = HOSTS_PER_SUBNET * num
    traffic = 2 * (NUM_ZONES - 1) * num
    for place in range(out.shape[0]):
        out[place] = place < _SIZES[agent] or place >= width
    for unit in range(num):
        exists = vector_order(np.int64(state.exists[BLUE_SUBNET_ORDER[agent + unit]]))
        start = HOSTS_PER_SUBNET * unit
        _write_hosts(out, start, exists)
        _write_hosts(out, size + 1 + start, exists)
        _write_hosts(out, 2 * size + 1 + start, exists)
        _write_hosts(out, 3 * size + 2 + traffic + start, exists)


@njit
def mask_all(state, out):
    """Write the masks of all agents, 570 values in sequence; the rest of `out` is true."""
    start = np.int64(0)
    for agent in range(NUM_BLUE):
        width = _SIZES[agent]
        mask_agent(state, agent, out[start : start + width], width)
        start += width
    for place in range(start, out.shape[0]):
        out[place] = True  # messages
