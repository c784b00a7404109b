"""Sessions of red agents: ids, port memories, hand-over, the primary one (SPEC_RED 1, 4-6)."""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules.bits import count, drop_host, has, put_host
from vecenv.cage.challenge4.rules.codes import (
    ABSTRACT,
    FIRST_RED_ACTOR,
    IDENT_FULL,
    KIND_A,
    MAX_HANDED,
    MAX_IDENT,
    MAX_MEMORY,
    MAX_OFFERED,
    MAX_SESSIONS,
    MEMORY_FULL,
    NEW_PRIMARY,
    NUM_RED,
    NUM_SUBNETS,
    OFFERED_FULL,
    PHISH_AGENT,
    PRIMARY,
    PRIVILEGED,
    RED_OF_SUBNET,
    RED_SUBNETS,
    SESSIONS_FULL,
)
from vecenv.cage.challenge4.rules.draws import draw_index
from vecenv.cage.challenge4.rules.processes import find_max_pid, new_pid


@njit
def find_session(state, agent, ident):
    """Place int64 of a session in the agent's list, -1 if there is none of this id."""
    for index in range(np.int64(state.num_sessions[agent])):
        if state.session_ident[agent, index] == ident:
            return np.int64(index)
    return np.int64(-1)


@njit
def _next_ident(state, agent):
    """Id int64 of the agent's next session: one above its largest."""
    ident = np.int64(0)
    for index in range(np.int64(state.num_sessions[agent])):
        ident = max(ident, np.int64(state.session_ident[agent, index]) + 1)
    if ident > MAX_IDENT:
        state.overflow = np.int64(state.overflow) | IDENT_FULL
        ident = np.int64(MAX_IDENT)
    return ident


@njit
def add_session(state, agent, host, flags, pid):
    """Append a session to the agent's list; return its id int64."""
    index = np.int64(state.num_sessions[agent])
    ident = _next_ident(state, agent)
    subnet = host >> 4
    state.gained[agent] = 1
    if index >= MAX_SESSIONS:
        state.overflow = np.int64(state.overflow) | SESSIONS_FULL
        return ident
    put_host(state.red_hosts, host)
    state.session_ident[agent, index] = ident
    state.session_host[agent, index] = host
    state.session_flags[agent, index] = flags
    state.session_pid[agent, index] = pid
    state.num_sessions[agent] = index + 1
    if not has(RED_SUBNETS[agent], subnet):
        state.num_foreign = np.int64(state.num_foreign) + 1
    return ident


@njit
def _drop_from_list(state, agent, index):
    """Close the gap that the session at `index` leaves in the list."""
    last = np.int64(state.num_sessions[agent]) - 1
    for place in range(index, last):
        state.session_ident[agent, place] = state.session_ident[agent, place + 1]
        state.session_host[agent, place] = state.session_host[agent, place + 1]
        state.session_flags[agent, place] = state.session_flags[agent, place + 1]
        state.session_pid[agent, place] = state.session_pid[agent, place + 1]
    state.num_sessions[agent] = last


@njit
def _forget_memory(state, agent, ident):
    """Drop what the session of this id remembers."""
    num_kept = np.int64(0)
    for index in range(np.int64(state.num_memory[agent])):
        if state.memory_ident[agent, index] != ident:
            state.memory_ident[agent, num_kept] = state.memory_ident[agent, index]
            state.memory_host[agent, num_kept] = state.memory_host[agent, index]
            state.memory_ports[agent, num_kept] = state.memory_ports[agent, index]
            num_kept += 1
    state.num_memory[agent] = num_kept


@njit
def take_session(state, agent, index):
    """Take a session out of the agent's list, with its memory."""
    if np.int64(state.session_flags[agent, index]) & KIND_A:
        _forget_memory(state, agent, state.session_ident[agent, index])
    _drop_from_list(state, agent, index)
    state.lost[agent] = 1


@njit
def end_session(state, agent, index):
    """End a session and its process. Not between a foreign session's start and its hand-over."""
    host = np.int64(state.session_host[agent, index])
    take_session(state, agent, index)
    find_max_pid(state, host)
    if not is_on_host(state, agent, host):
        drop_host(state.red_hosts, host)


@njit
def is_on_host(state, agent, host):
    """Whether the agent has a session on a host."""
    for index in range(np.int64(state.num_sessions[agent])):
        if state.session_host[agent, index] == host:
            return True
    return False


@njit
def is_privileged_on(state, agent, host):
    """Whether the agent has a privileged session on a host."""
    for index in range(np.int64(state.num_sessions[agent])):
        is_there = state.session_host[agent, index] == host
        if is_there and np.int64(state.session_flags[agent, index]) & PRIVILEGED:
            return True
    return False


@njit
def end_sessions_on(state, host):
    """End all sessions on a host (SPEC 5.2)."""
    subnet, bit = host >> 4, 1 << (host & 15)
    if np.int64(state.red_hosts[subnet]) & bit == 0:
        return
    agent = RED_OF_SUBNET[subnet]
    index = np.int64(state.num_sessions[agent]) - 1
    while index >= 0:
        if state.session_host[agent, index] == host:
            take_session(state, agent, index)
        index -= 1
    state.red_hosts[subnet] = np.int64(state.red_hosts[subnet]) & ~bit


@njit
def remember_ports(state, agent, ident, host, ports):
    """Replace what a session remembers of a host."""
    num = np.int64(state.num_memory[agent])
    for index in range(num):
        is_it = state.memory_ident[agent, index] == ident
        if is_it and state.memory_host[agent, index] == host:
            state.memory_ports[agent, index] = ports
            return
    if num >= MAX_MEMORY:
        state.overflow = np.int64(state.overflow) | MEMORY_FULL
        return
    state.memory_ident[agent, num] = ident
    state.memory_host[agent, num] = host
    state.memory_ports[agent, num] = ports
    state.num_memory[agent] = num + 1


@njit
def remembered_ports(state, agent, ident, host):
    """Set int64 of ports that a session remembers of a host; 0 if it has not scanned it."""
    for index in range(np.int64(state.num_memory[agent])):
        is_it = state.memory_ident[agent, index] == ident
        if is_it and state.memory_host[agent, index] == host:
            return np.int64(state.memory_ports[agent, index])
    return np.int64(0)


@njit
def offer(state, agent, ident):
    """Put a session id on offer, unless it is (SPEC_RED 4.1)."""
    num = np.int64(state.num_offered[agent])
    for index in range(num):
        if state.offered[agent, index] == ident:
            return
    if num >= MAX_OFFERED:
        state.overflow = np.int64(state.overflow) | OFFERED_FULL
        return
    state.offered[agent, num] = ident
    state.num_offered[agent] = num + 1


@njit
def offer_sessions(state, agent):
    """Put the ids of the agent's A sessions on offer: by host, in the order of the list."""
    num = np.int64(state.num_sessions[agent])
    for first in range(num):
        host = state.session_host[agent, first]
        is_first = True
        for before in range(first):
            if state.session_host[agent, before] == host:
                is_first = False
                break
        if not is_first:
            continue
        for index in range(first, num):
            is_there = state.session_host[agent, index] == host
            if is_there and np.int64(state.session_flags[agent, index]) & KIND_A:
                offer(state, agent, np.int64(state.session_ident[agent, index]))


# --- phishing (SPEC_RED 4) ---


@njit
def _owner_of_sessions_on(state, host):
    """The lowest-numbered agent int64 with a session on a host that has one."""
    if state.num_foreign == 0:
        return RED_OF_SUBNET[host >> 4]
    for agent in range(NUM_RED):
        if is_on_host(state, agent, host):
            return np.int64(agent)
    return RED_OF_SUBNET[host >> 4]


@njit
def _num_agents_on(state, host):
    """Number int64 of agents with sessions on a host that has one."""
    if state.num_foreign == 0:
        return np.int64(1)
    num = np.int64(0)
    for agent in range(NUM_RED):
        if is_on_host(state, agent, host):
            num += 1
    return num


@njit
def _nth_agent_on(state, host, n):
    """The n-th agent int64 with sessions on a host."""
    if state.num_foreign == 0:
        return RED_OF_SUBNET[host >> 4]
    for agent in range(NUM_RED):
        if is_on_host(state, agent, host):
            if n == 0:
                return np.int64(agent)
            n -= 1
    return RED_OF_SUBNET[host >> 4]


@njit
def _draw_phisher(state, chance, actor):
    """Draw the agent int64 among all pairs of agent and host with its sessions; -1: no session."""
    num_pairs = np.int64(0)
    for subnet in range(NUM_SUBNETS):
        hosts = np.int64(state.red_hosts[subnet])
        if state.num_foreign == 0:
            num_pairs += count(hosts)
            continue
        for k in range(16):
            if has(hosts, k):
                num_pairs += _num_agents_on(state, subnet * 16 + k)
    if num_pairs == 0:
        return np.int64(-1)
    left = draw_index(chance, PHISH_AGENT, actor, num_pairs)
    for subnet in range(NUM_SUBNETS):
        hosts = np.int64(state.red_hosts[subnet])
        if state.num_foreign == 0:
            if left < count(hosts):
                return RED_OF_SUBNET[subnet]
            left -= count(hosts)
            continue
        for k in range(16):
            if has(hosts, k):
                num = _num_agents_on(state, subnet * 16 + k)
                if left < num:
                    return _nth_agent_on(state, subnet * 16 + k, left)
                left -= num
    return np.int64(-1)


@njit
def phish(state, host, chance, actor):
    """A green user of a host opens a phishing mail (SPEC_RED 4)."""
    subnet = host >> 4
    hosts = np.int64(state.red_hosts[subnet])
    if has(hosts, host & 15):
        return
    if hosts:
        last = np.int64(15)
        while not has(hosts, last):
            last -= 1
        agent = _owner_of_sessions_on(state, subnet * 16 + last)
    else:
        agent = _draw_phisher(state, chance, actor)
        if agent < 0:
            return
    pid = new_pid(state, host, chance, actor)
    add_session(state, agent, host, KIND_A | ABSTRACT, pid)


# --- end of turn ---


@njit
def reassign(state):
    """Hand sessions outside of an agent's subnets over to the owner (SPEC_RED 5)."""
    for agent in range(NUM_RED):
        state.num_handed[agent] = 0
    if state.num_foreign == 0:
        return
    for agent in range(NUM_RED):
        index = np.int64(0)
        while index < np.int64(state.num_sessions[agent]):
            host = np.int64(state.session_host[agent, index])
            if has(RED_SUBNETS[agent], host >> 4):
                index += 1
                continue
            flags = np.int64(state.session_flags[agent, index])
            pid = np.int64(state.session_pid[agent, index])
            take_session(state, agent, index)
            owner = RED_OF_SUBNET[host >> 4]
            ident = add_session(state, owner, host, (flags & PRIVILEGED) | KIND_A | ABSTRACT, pid)
            if not flags & ABSTRACT:
                offer(state, owner, ident)
                num = np.int64(state.num_handed[owner])
                if num < MAX_HANDED:  # at most one exploit of each other agent in a step
                    state.handed[owner, num] = host
                    state.num_handed[owner] = num + 1
    state.num_foreign = 0


@njit
def check_sessions(state, agent, chance):
    """Look at the agent's sessions, draw a new primary one if it is gone (SPEC_RED 6, 4.1)."""
    # It can only be gone after sessions have; `lost` is cleared when the agent digests.
    if state.lost[agent] and find_session(state, agent, PRIMARY) < 0:
        num = np.int64(state.num_sessions[agent])
        index = draw_index(chance, NEW_PRIMARY, FIRST_RED_ACTOR + agent, num)
        ident = state.session_ident[agent, index]
        for entry in range(np.int64(state.num_memory[agent])):
            if state.memory_ident[agent, entry] == ident:
                state.memory_ident[agent, entry] = PRIMARY
        host, flags = state.session_host[agent, index], state.session_flags[agent, index]
        pid = state.session_pid[agent, index]
        _drop_from_list(state, agent, index)
        state.session_ident[agent, num - 1] = PRIMARY
        state.session_host[agent, num - 1] = host
        state.session_flags[agent, num - 1] = flags
        state.session_pid[agent, num - 1] = pid
        state.num_sessions[agent] = num
        state.gained[agent] = 1
    if state.gained[agent]:
        known = np.int64(state.known_subnets[agent])
        for index in range(np.int64(state.num_sessions[agent])):
            known |= 1 << (np.int64(state.session_host[agent, index]) >> 4)
        state.known_subnets[agent] = known
        offer_sessions(state, agent)
