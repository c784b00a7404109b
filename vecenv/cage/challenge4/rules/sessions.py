"""What runs on hosts: services, decoys and their processes (SPEC 3, 5), then red's sessions.

Of sessions: ids, port memories, hand-over, the primary session (SPEC_RED 1, 4-6). Compiled code.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.draws import draw_decoy, draw_index, draw_pid_step
from vecenv.cage.challenge4.rules.state import count, drop_host, has, nth, put_host

_MAX_PID = 65535
_NEVER = 1 << 20


@njit
def note_process(state, host):
    """Raise the process event of a host int64."""
    put_host(state.process_events, host)


@njit
def note_connection(state, host):
    """Raise the connection event of a host int64."""
    put_host(state.connection_events, host)


@njit
def note_suspicious(state, host, pid):
    """Raise the process event of a host, with the id of the process (SPEC 3.3)."""
    note_process(state, host)
    if host >> 4 == codes.CON:  # no blue agent watches it
        return
    index = np.int64(state.num_suspicious)
    if index >= codes.MAX_SUSPICIOUS:
        state.overflow = np.int64(state.overflow) | codes.SUSPICIOUS_FULL
        return
    state.suspicious_host[index] = host
    state.suspicious_pid[index] = pid
    state.num_suspicious = index + 1


@njit
def new_pid(state, host, chance, actor):
    """Draw the id int64 of a new process on a host."""
    pid = np.int64(state.max_pid[host]) + draw_pid_step(chance, actor)
    if pid > _MAX_PID:
        state.overflow = np.int64(state.overflow) | codes.PID_FULL
        pid = np.int64(_MAX_PID)
    state.max_pid[host] = pid
    return pid


@njit
def find_max_pid(state, host):
    """Recompute the largest process id of a host after a process has ended."""
    largest = np.int64(0)
    agent = codes.RED_OF_SUBNET[host >> 4]
    for index in range(np.int64(state.num_sessions[agent])):
        if state.session_host[agent, index] == host:
            largest = max(largest, np.int64(state.session_pid[agent, index]))
    for decoy in range(codes.NUM_DECOYS):
        largest = max(largest, np.int64(state.decoy_pid[host, decoy]))
    if state.num_vsftpd[host] > 1:
        for index in range(np.int64(state.num_old_vsftpd)):
            if state.old_vsftpd_host[index] == host:
                largest = max(largest, np.int64(state.old_vsftpd_pid[index]))
    state.max_pid[host] = largest


@njit
def num_genuine(state, host):
    """Number of genuine services, int64, that run on a host."""
    services = np.int64(state.services[host])
    ot_running = (np.int64(state.svc[host]) & codes.OT_RUNNING) >> 3
    return 1 + ot_running + count(services & codes.EXTRAS)


@njit
def open_ports(state, host):
    """Set int64 of ports that a scan of a host finds (SPEC_RED 2)."""
    services, decoys = np.int64(state.services[host]), np.int64(state.decoys[host])
    ports = np.int64(codes.PORT_22)
    if services & codes.WEB or decoys & ((1 << codes.APACHE) | (1 << codes.VSFTPD)):
        ports |= codes.PORT_80
    if decoys & (1 << codes.TOMCAT):
        ports |= codes.PORT_443
    if services & codes.DATABASE:
        ports |= codes.PORT_3390
    if services & codes.MAIL or decoys & (1 << codes.HARAKA):
        ports |= codes.PORT_25
    if np.int64(state.svc[host]) & codes.OT_RUNNING:
        ports |= codes.PORT_OT
    return ports


@njit
def possible_decoys(state, host):
    """Set int64 of decoys that can be placed on a host (SPEC 1.5)."""
    ports = open_ports(state, host)
    possible = np.int64(1 << codes.VSFTPD)
    if not ports & codes.PORT_80:
        possible |= 1 << codes.APACHE
    if not ports & codes.PORT_443:
        possible |= 1 << codes.TOMCAT
    if not ports & codes.PORT_25:
        possible |= 1 << codes.HARAKA
    return possible


@njit
def find_degraded(state, host):
    """Record whether any service of a host is below 100 %."""
    word = np.int64(state.svc[host])
    is_degraded = word & codes.LEVEL_BITS != codes.FULL
    decoys = np.int64(state.decoys[host])
    for decoy in range(codes.NUM_DECOYS):
        level = (word >> (codes.DECOY_SHIFT + 3 * decoy)) & codes.LEVEL_BITS
        is_degraded |= decoys >> decoy & 1 == 1 and level != codes.FULL
    subnet, bit = host >> 4, 1 << (host & 15)
    others = np.int64(state.degraded[subnet]) & ~bit
    state.degraded[subnet] = others | bit if is_degraded else others


@njit
def place_decoy(state, host, chance, actor):
    """Do DeployDecoy on a host (SPEC 5.3); return the decoy int64."""
    possible = possible_decoys(state, host)
    decoy = draw_decoy(chance, codes.DECOY_TYPE, actor, possible, count(possible))
    pid = new_pid(state, host, chance, actor)
    decoys = np.int64(state.decoys[host])
    if decoys >> decoy & 1 == 0:
        order = np.int64(state.decoy_order[host])
        state.decoy_order[host] = order | (decoy << (2 * count(decoys)))
        state.decoys[host] = decoys | (1 << decoy)
    elif decoy == codes.VSFTPD:  # replaces the earlier vsftpd service, whose process stays
        index = np.int64(state.num_old_vsftpd)
        if index >= codes.MAX_OLD_VSFTPD:
            state.overflow = np.int64(state.overflow) | codes.VSFTPD_FULL
        else:
            state.old_vsftpd_host[index] = host
            state.old_vsftpd_pid[index] = state.decoy_pid[host, codes.VSFTPD]
            state.num_old_vsftpd = index + 1
    if decoy == codes.VSFTPD:
        state.num_vsftpd[host] = np.int64(state.num_vsftpd[host]) + 1
    state.decoy_pid[host, decoy] = pid
    shift = codes.DECOY_SHIFT + 3 * decoy
    word = np.int64(state.svc[host]) & ~(codes.LEVEL_BITS << shift)
    state.svc[host] = word | (codes.FULL << shift)
    find_degraded(state, host)
    return decoy


@njit
def degrade(state, host):
    """Lower the level of all services of a host by one step (SPEC_RED 2)."""
    word = np.int64(state.svc[host])
    if word & codes.LEVEL_BITS:
        word -= 1
    for decoy in range(codes.NUM_DECOYS):
        shift = codes.DECOY_SHIFT + 3 * decoy
        if (word >> shift) & codes.LEVEL_BITS:
            word -= 1 << shift
    state.svc[host] = word
    find_degraded(state, host)


@njit
def forget_old_vsftpd(state, index):
    """Remove an old vsftpd process from the list."""
    last = np.int64(state.num_old_vsftpd) - 1
    state.old_vsftpd_host[index] = state.old_vsftpd_host[last]
    state.old_vsftpd_pid[index] = state.old_vsftpd_pid[last]
    state.num_old_vsftpd = last


@njit
def end_decoys(state, host):
    """End all decoys of a host, and repair its services (SPEC 5.2)."""
    if state.num_vsftpd[host] > 1:
        index = np.int64(state.num_old_vsftpd) - 1
        while index >= 0:
            if state.old_vsftpd_host[index] == host:
                forget_old_vsftpd(state, index)
            index -= 1
    state.decoys[host] = 0
    state.decoy_order[host] = 0
    state.num_vsftpd[host] = 0
    for decoy in range(codes.NUM_DECOYS):
        state.decoy_pid[host, decoy] = 0
    has_ot = np.int64(state.services[host]) & codes.OT != 0
    state.svc[host] = codes.FULL | (codes.OT_RUNNING if has_ot else 0)
    drop_host(state.degraded, host)
    state.max_pid[host] = 0


@njit
def find_session(state, agent, ident):
    """Index int64 of a session in the agent's list, -1 if none has this id."""
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
    if ident > codes.MAX_IDENT:
        state.overflow = np.int64(state.overflow) | codes.IDENT_FULL
        ident = np.int64(codes.MAX_IDENT)
    return ident


@njit
def add_session(state, agent, host, flags, pid):
    """Append a session to the agent's list; return its id int64."""
    index = np.int64(state.num_sessions[agent])
    ident = _next_ident(state, agent)
    subnet = host >> 4
    state.gained[agent] = 1
    if index >= codes.MAX_SESSIONS:
        state.overflow = np.int64(state.overflow) | codes.SESSIONS_FULL
        return ident
    put_host(state.red_hosts, host)
    state.session_ident[agent, index] = ident
    state.session_host[agent, index] = host
    state.session_flags[agent, index] = flags
    state.session_pid[agent, index] = pid
    state.num_sessions[agent] = index + 1
    if not has(codes.RED_SUBNETS[agent], subnet):
        state.num_foreign = np.int64(state.num_foreign) + 1
    return ident


@njit
def _drop_from_list(state, agent, index):
    """Remove the session at `index` from the list, and close the gap."""
    last = np.int64(state.num_sessions[agent]) - 1
    for place in range(index, last):
        state.session_ident[agent, place] = state.session_ident[agent, place + 1]
        state.session_host[agent, place] = state.session_host[agent, place + 1]
        state.session_flags[agent, place] = state.session_flags[agent, place + 1]
        state.session_pid[agent, place] = state.session_pid[agent, place + 1]
    state.num_sessions[agent] = last


@njit
def _forget_memory(state, agent, ident):
    """Drop the port memory of the session with this id."""
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
    """Remove a session and its port memory from the agent."""
    if np.int64(state.session_flags[agent, index]) & codes.KIND_A:
        _forget_memory(state, agent, state.session_ident[agent, index])
    _drop_from_list(state, agent, index)
    state.lost[agent] = 1


@njit
def end_session(state, agent, index):
    """End a session and its process. Do not call it while a foreign session awaits hand-over."""
    host = np.int64(state.session_host[agent, index])
    take_session(state, agent, index)
    find_max_pid(state, host)
    if num_sessions_on(state, agent, host) == 0:
        drop_host(state.red_hosts, host)


@njit
def num_sessions_on(state, agent, host):
    """Number of the agent's sessions on a host, int64."""
    num = np.int64(0)
    for index in range(np.int64(state.num_sessions[agent])):
        if state.session_host[agent, index] == host:
            num += 1
    return num


@njit
def is_privileged_on(state, agent, host):
    """Whether the agent has a privileged session on a host."""
    for index in range(np.int64(state.num_sessions[agent])):
        is_there = state.session_host[agent, index] == host
        if is_there and np.int64(state.session_flags[agent, index]) & codes.PRIVILEGED:
            return True
    return False


@njit
def end_sessions_on(state, host):
    """End all sessions on a host (SPEC 5.2)."""
    subnet, bit = host >> 4, 1 << (host & 15)
    if np.int64(state.red_hosts[subnet]) & bit == 0:
        return
    agent = codes.RED_OF_SUBNET[subnet]
    index = np.int64(state.num_sessions[agent]) - 1
    while index >= 0:
        if state.session_host[agent, index] == host:
            take_session(state, agent, index)
        index -= 1
    state.red_hosts[subnet] = np.int64(state.red_hosts[subnet]) & ~bit


@njit
def remember_ports(state, agent, ident, host, ports):
    """Replace the ports that a session remembers of a host."""
    num = np.int64(state.num_memory[agent])
    for index in range(num):
        is_it = state.memory_ident[agent, index] == ident
        if is_it and state.memory_host[agent, index] == host:
            state.memory_ports[agent, index] = ports
            return
    if num >= codes.MAX_MEMORY:
        state.overflow = np.int64(state.overflow) | codes.MEMORY_FULL
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
    """Put a session id on offer, unless it already is (SPEC_RED 4.1)."""
    num = np.int64(state.num_offered[agent])
    for index in range(num):
        if state.offered[agent, index] == ident:
            return
    if num >= codes.MAX_OFFERED:
        state.overflow = np.int64(state.overflow) | codes.OFFERED_FULL
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
            if is_there and np.int64(state.session_flags[agent, index]) & codes.KIND_A:
                offer(state, agent, np.int64(state.session_ident[agent, index]))


# --- phishing (SPEC_RED 4) ---


@njit
def _agents_on(state, host):
    """Set int64 of the agents with sessions on a host that has one."""
    agents = np.int64(0)
    if state.num_foreign == 0:
        return np.int64(1) << codes.RED_OF_SUBNET[host >> 4]
    for agent in range(codes.NUM_RED):
        agents |= np.int64(num_sessions_on(state, agent, host) > 0) << agent
    return agents


@njit
def _nth_pair(state, n):
    """The agent int64 of the n-th pair of host and agent there; -1 - pairs if there are fewer."""
    num = np.int64(0)
    for subnet in range(codes.NUM_SUBNETS):
        hosts = np.int64(state.red_hosts[subnet])
        while hosts:
            agents = _agents_on(state, subnet * 16 + nth(hosts, 0))
            if n < num + count(agents):
                return nth(agents, n - num)
            num += count(agents)
            hosts &= hosts - 1
    return -1 - num


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
        agent = nth(_agents_on(state, subnet * 16 + last), 0)  # the lowest number
    else:
        num_pairs = -1 - _nth_pair(state, np.int64(_NEVER))
        if num_pairs == 0:
            return
        agent = _nth_pair(state, draw_index(chance, codes.PHISH_AGENT, actor, num_pairs))
    pid = new_pid(state, host, chance, actor)
    add_session(state, agent, host, codes.KIND_A | codes.ABSTRACT, pid)


# --- end of turn ---


@njit
def reassign(state):
    """Hand sessions outside an agent's subnets over to the subnet's owner (SPEC_RED 5)."""
    for agent in range(codes.NUM_RED):
        state.num_handed[agent] = 0
    if state.num_foreign == 0:
        return
    for agent in range(codes.NUM_RED):
        index = np.int64(0)
        while index < np.int64(state.num_sessions[agent]):
            host = np.int64(state.session_host[agent, index])
            if has(codes.RED_SUBNETS[agent], host >> 4):
                index += 1
                continue
            flags = np.int64(state.session_flags[agent, index])
            pid = np.int64(state.session_pid[agent, index])
            take_session(state, agent, index)
            owner = codes.RED_OF_SUBNET[host >> 4]
            ident = add_session(
                state, owner, host, (flags & codes.PRIVILEGED) | codes.KIND_A | codes.ABSTRACT, pid
            )
            if not flags & codes.ABSTRACT:
                offer(state, owner, ident)
                num = np.int64(state.num_handed[owner])
                if num < codes.MAX_HANDED:  # at most one exploit of each other agent in a step
                    state.handed[owner, num] = host
                    state.num_handed[owner] = num + 1
    state.num_foreign = 0


@njit
def check_sessions(state, agent, chance):
    """Check the agent's sessions; draw a new primary if it is gone (SPEC_RED 6, 4.1)."""
    # The primary can be gone only if sessions are; `digest` clears `lost`.
    if state.lost[agent] and find_session(state, agent, codes.PRIMARY) < 0:
        num = np.int64(state.num_sessions[agent])
        index = draw_index(chance, codes.NEW_PRIMARY, codes.FIRST_RED_ACTOR + agent, num)
        ident = state.session_ident[agent, index]
        for entry in range(np.int64(state.num_memory[agent])):
            if state.memory_ident[agent, entry] == ident:
                state.memory_ident[agent, entry] = codes.PRIMARY
        host, flags = state.session_host[agent, index], state.session_flags[agent, index]
        pid = state.session_pid[agent, index]
        _drop_from_list(state, agent, index)
        state.session_ident[agent, num - 1] = codes.PRIMARY
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
