"""What blue sees (SPEC 10.2-10.4): 92 values of agents 0-3, 210 of agent 4, one after the other."""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules.codes import (
    ADM,
    FIRST_SERVER,
    HOSTS_PER_SUBNET,
    MAX_SERVERS,
    MESSAGE_BITS,
    NOT_LINKED,
    NUM_BLUE,
    NUM_ZONES,
    OFF,
    PUB,
    SORTED,
    SORTED_PLACE,
    USER_BITS,
)

BLUE_SUBNET_ORDER = np.array([0, 1, 2, 3, ADM, OFF, PUB], np.int64)
_LAST_AGENT_BLOCKS = 3


@njit
def vector_order(members):
    """Reorder a set int64 of hosts: bit i is the i-th in vectors, servers before users (10.1)."""
    return (members >> FIRST_SERVER) | ((members & USER_BITS) << MAX_SERVERS)


@njit
def _write_16(out, start, bits):
    # Unsigned places, because signed ones could count from the end; then this is vector code.
    for i in range(16):
        out[np.uint64(start) + np.uint64(i)] = (bits >> i) & 1


@njit
def _write_9(out, start, bits):
    for i in range(NUM_ZONES):
        out[np.uint64(start) + np.uint64(i)] = (bits >> i) & 1


@njit
def _write_8(out, start, bits):
    for i in range(MESSAGE_BITS):
        out[np.uint64(start) + np.uint64(i)] = (bits >> i) & 1


@njit
def _write_subnet(state, subnet, out, start):
    """Write the 59 values of a subnet; return where the next begins."""
    blocked, sorted_blocks = np.int64(state.blocks[subnet]), np.int64(0)
    if blocked:
        for i in range(NUM_ZONES):
            sorted_blocks |= ((blocked >> SORTED[i]) & 1) << i
    _write_9(out, start, np.int64(1) << SORTED_PLACE[subnet])
    _write_9(out, start + NUM_ZONES, sorted_blocks)
    _write_9(out, start + 2 * NUM_ZONES, NOT_LINKED[state.phase, subnet])
    start += 3 * NUM_ZONES
    _write_16(out, start, vector_order(np.int64(state.process_events[subnet])))
    start += HOSTS_PER_SUBNET
    _write_16(out, start, vector_order(np.int64(state.connection_events[subnet])))
    return start + HOSTS_PER_SUBNET


@njit
def observe_agent(state, agent, out, start):
    """Write what one blue agent sees from out[start]; return where the next agent's begins."""
    first, num = agent, 1
    if agent == NUM_BLUE - 1:
        num = _LAST_AGENT_BLOCKS
    out[start] = state.phase
    start += 1
    for index in range(first, first + num):
        start = _write_subnet(state, BLUE_SUBNET_ORDER[index], out, start)
    for sender in range(NUM_BLUE):
        if sender != agent:
            _write_8(out, start, np.int64(state.messages[sender]))
            start += MESSAGE_BITS
    return start


@njit
def observe(state, out, rules):
    """Write what all five agents see, 578 values."""
    start = 0
    for agent in range(NUM_BLUE):
        start = observe_agent(state, agent, out, start)
