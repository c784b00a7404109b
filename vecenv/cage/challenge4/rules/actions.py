"""The effects of red's and blue's actions (SPEC_RED 2, SPEC 5); the finite-state agent (7)."""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.draws import (
    draw_cell,
    draw_hop,
    draw_index,
    draw_port,
    draw_unit,
    draw_unused,
)
from vecenv.cage.challenge4.rules.events import (
    FIRST_RED,
    FIRST_ROUTER,
    NO_PORT,
    log_analyse,
    log_connection,
    log_decoy,
    log_restore,
    log_scan,
    log_session,
    next_decoy,
)
from vecenv.cage.challenge4.rules.sessions import (
    add_session,
    degrade,
    end_decoys,
    end_session,
    end_sessions_on,
    find_max_pid,
    find_session,
    forget_old_vsftpd,
    is_privileged_on,
    new_pid,
    note_connection,
    note_suspicious,
    num_genuine,
    num_sessions_on,
    open_ports,
    place_decoy,
    remember_ports,
    remembered_ports,
)
from vecenv.cage.challenge4.rules.state import count, has, nth

_SSH_PORT, _SSH_GUESSES = 22, 10  # connections of a brute-force attack
_WAIT = (np.int64(codes.NONE),) * 3  # a choice: kind, target, session id
_CANNOT = (np.int64(codes.NONE), np.int64(codes.NONE), np.int64(codes.IMPOSSIBLE))


@njit
def _is_reachable(state, source, host):
    """Whether no block stops red's traffic from one host to another (SPEC 5.4)."""
    return not has(np.int64(state.blocks[host >> 4]), source >> 4)


@njit
def _scan(state, agent, index, host, detection, chance):
    source = np.int64(state.session_host[agent, index])
    is_abstract = np.int64(state.session_flags[agent, index]) & codes.KIND_A
    if not is_abstract or not _is_reachable(state, source, host):
        return False
    ports = open_ports(state, host)
    ident = np.int64(state.session_ident[agent, index])
    remember_ports(state, agent, ident, host, ports)
    state.found_ports[agent] = ports
    value = draw_unit(chance, codes.SCAN_DETECT, codes.FIRST_RED_ACTOR + agent)
    if value <= detection or state.decoys[host]:
        note_connection(state, host)
        log_scan(state, chance, agent, source, host, value <= detection)
    return True


@njit
def _probe_one(is_decoy, chance, actor):
    """Probe one process for deception; return whether it was noticed as a decoy."""
    hit = draw_unit(chance, codes.DECEPTION_HIT_SITE, actor)
    if hit <= codes.DECEPTION_HIT and is_decoy:
        return True
    false = draw_unit(chance, codes.DECEPTION_FALSE_SITE, actor)
    return false <= codes.DECEPTION_FALSE and not is_decoy


@njit
def _next_process(state, host, after):
    """The red session or decoy process with the smallest id above `after`.

    Ids grow in the order of creation, which is the order in which processes are probed.

    Returns:
        Its id int64, or -1; and whether it is a decoy.
    """
    best, _ = next_decoy(state, host, max(after, np.int64(0)))
    is_decoy = best >= 0
    for agent in range(codes.NUM_RED):
        for index in range(np.int64(state.num_sessions[agent])):
            pid = np.int64(state.session_pid[agent, index])
            if state.session_host[agent, index] == host and pid > after and not 0 <= best < pid:
                best, is_decoy = pid, False
    return best, is_decoy


@njit
def _probe(state, host, chance, actor):
    """Probe all processes of a host; return whether any was taken for a decoy."""
    others = num_genuine(state, host)
    if host >> 4 != codes.CON:
        others += 1  # blue's
    if host & 15 < codes.FIRST_SERVER:
        others += 1  # green's
    if chance[1] is None:
        num_decoys = count(np.int64(state.decoys[host]))
        if state.num_vsftpd[host] > 1:
            num_decoys += np.int64(state.num_vsftpd[host]) - 1
        subnet = host >> 4
        for agent in range(codes.NUM_RED):
            if state.num_foreign > 0 or agent == codes.RED_OF_SUBNET[subnet]:
                others += num_sessions_on(state, agent, host)
        missed = 1.0
        for _ in range(num_decoys):
            missed *= 1.0 - codes.DECEPTION_HIT
        for _ in range(others):
            missed *= 1.0 - codes.DECEPTION_FALSE
        return draw_unit(chance, codes.DECEPTION_HIT_SITE, actor) >= missed
    is_noticed = False
    for _ in range(others):
        is_noticed |= _probe_one(False, chance, actor)
    pid, is_decoy = _next_process(state, host, np.int64(-1 if host >> 4 == codes.CON else 0))
    while pid >= 0:
        is_noticed |= _probe_one(is_decoy, chance, actor)
        pid, is_decoy = _next_process(state, host, pid)
    return is_noticed


@njit
def _open_session(state, agent, host, kind, chance):
    """An exploit works: a C session of the agent; return the id int64 of its process."""
    state.files[host] = np.int64(state.files[host]) | codes.CMD_FILE | codes.CMD_IS_LAST
    pid = new_pid(state, host, chance, codes.FIRST_RED_ACTOR + agent)
    add_session(state, agent, host, kind, pid)
    return pid


@njit
def _ssh(state, agent, source, host, chance):
    actor, red = codes.FIRST_RED_ACTOR + agent, FIRST_RED + agent
    a, b = source >> 4, host >> 4
    if source != host:
        if draw_unit(chance, codes.SSH_HOP, actor) > codes.SSH_MISSED:
            note_connection(state, source)
            log_connection(state, source, red, host, NO_PORT, source, _SSH_PORT)
        for place in range(codes.NODES_BETWEEN[a, b]):
            if draw_hop(state, chance, actor) > codes.SSH_MISSED:
                router = FIRST_ROUTER + codes.ROUTES[a, b, place]
                log_connection(state, router, red, host, NO_PORT, source, _SSH_PORT)
    if draw_hop(state, chance, actor) > codes.SSH_MISSED:
        log_connection(state, host, red, host, NO_PORT, source, _SSH_PORT)
    port = draw_port(state, chance, actor)
    pid = _open_session(state, agent, host, codes.SSH_SHELL, chance)
    note_connection(state, host)
    for _ in range(_SSH_GUESSES):
        log_connection(state, host, red, host, _SSH_PORT, source, port)
    note_suspicious(state, host, pid)
    log_session(state, host, red, pid)
    return True


@njit
def _lured(state, agent, source, host, port, is_caught, chance):
    """HTTP, HTTPS or mail: fails, with a connection event if a decoy caught it."""
    if is_caught:
        actor, red = codes.FIRST_RED_ACTOR + agent, FIRST_RED + agent
        remote_port = draw_port(state, chance, actor)
        log_connection(state, host, red, host, port, source, remote_port)
        draw_unused(chance, codes.EXPLOIT_SUCCESS, actor)
        note_connection(state, host)
        local_port = draw_port(state, chance, actor)
        remote_port = draw_port(state, chance, actor)
        log_connection(state, host, red, host, local_port, source, remote_port)
    return False


@njit
def _sql(state, agent, host, chance):
    if not np.int64(state.services[host]) & codes.DATABASE:
        return False
    actor = codes.FIRST_RED_ACTOR + agent
    draw_unused(chance, codes.EXPLOIT_SUCCESS, actor)
    draw_port(state, chance, actor)
    pid = _open_session(state, agent, host, codes.REVERSE_SHELL, chance)
    if draw_unit(chance, codes.EXPLOIT_DETECT, actor) > codes.SQL_MISSED:
        note_suspicious(state, host, pid)
        log_session(state, host, FIRST_RED + agent, pid)
    return True


@njit
def exploit_options(ports):
    """Set int64 of exploits that a set of remembered ports allows (SPEC_RED 2, Exploit 2)."""
    options = np.int64(1 << codes.SSH_EXPLOIT)
    if ports & codes.PORT_80:
        options |= 1 << codes.HTTP
    if ports & codes.PORT_443:
        options |= 1 << codes.HTTPS
    if ports & codes.PORT_3390 and ports & (codes.PORT_80 | codes.PORT_443):
        options |= 1 << codes.SQL
    if ports & codes.PORT_25:
        options |= 1 << codes.MAIL_EXPLOIT
    return options


@njit
def strongest(options):
    """The exploit int64 of largest weight in a set; in order: mail, SQL, HTTPS, HTTP, SSH."""
    for exploit in (codes.MAIL_EXPLOIT, codes.SQL, codes.HTTPS, codes.HTTP):
        if has(options, exploit):
            return exploit
    return codes.SSH_EXPLOIT


@njit
def _exploit(state, agent, index, host, chance):
    source = np.int64(state.session_host[agent, index])
    if not np.int64(state.session_flags[agent, index]) & codes.KIND_A:
        return False
    ident = np.int64(state.session_ident[agent, index])
    ports = remembered_ports(state, agent, ident, host)
    if ports == 0 or not _is_reachable(state, source, host):
        return False
    actor = codes.FIRST_RED_ACTOR + agent
    options = exploit_options(ports)
    exploit = np.int64(codes.SSH_EXPLOIT)
    if count(options) > 1:
        others = options & ~(1 << strongest(options))
        exploit = nth(others, draw_index(chance, codes.EXPLOIT_CHOICE, actor, count(others)))
        draw_unused(chance, codes.EXPLOIT_TOP, actor)
    state.red_exploit[agent] = exploit
    services, decoys = np.int64(state.services[host]), np.int64(state.decoys[host])
    if exploit == codes.SSH_EXPLOIT:
        return _ssh(state, agent, source, host, chance)
    if exploit == codes.SQL:
        return _sql(state, agent, host, chance)
    if exploit == codes.HTTP:
        lures, genuine = (1 << codes.APACHE) | (1 << codes.VSFTPD), services & codes.WEB
        port = codes.DECOY_PORTS[codes.APACHE]
    elif exploit == codes.HTTPS:
        lures, genuine, port = 1 << codes.TOMCAT, np.int64(0), codes.DECOY_PORTS[codes.TOMCAT]
    else:
        lures, genuine = 1 << codes.HARAKA, services & codes.MAIL
        port = codes.DECOY_PORTS[codes.HARAKA]
    is_caught = decoys & lures != 0 and genuine == 0
    return _lured(state, agent, source, host, port, is_caught, chance)


@njit
def _escalate(state, agent, index, host, chance):
    """Do PrivilegeEscalate with the session at `index`, -1 if it is gone."""
    num = num_sessions_on(state, agent, host)
    if num == 0:
        return False
    if not is_privileged_on(state, agent, host):
        left = draw_index(chance, codes.ESCALATE_SESSION, codes.FIRST_RED_ACTOR + agent, num)
        if index < 0 or not np.int64(state.session_flags[agent, index]) & codes.KIND_A:
            return False
        for place in range(np.int64(state.num_sessions[agent])):
            if state.session_host[agent, place] == host:
                if left == 0:
                    flags = np.int64(state.session_flags[agent, place])
                    state.session_flags[agent, place] = flags | codes.PRIVILEGED
                    files = np.int64(state.files[host]) | codes.ESCALATE_FILE
                    state.files[host] = files & ~np.int64(codes.CMD_IS_LAST)
                    break
                left -= 1
    if index >= 0 and host & 15 == codes.FIRST_SERVER:
        state.found_links[agent] = 1
    return True


@njit
def _impact(state, agent, index, host):
    word = np.int64(state.svc[host])
    if index < 0 or not word & codes.OT_RUNNING or not is_privileged_on(state, agent, host):
        return False
    state.svc[host] = word & ~codes.OT_RUNNING
    return True


@njit
def red_action(state, agent, kind, target, ident, chance):
    """Execute an agent's action with one of its sessions; return whether it succeeds.

    Args:
        kind, target, ident: int64; the target is a host, or a subnet for DISCOVER.
    """
    index = find_session(state, agent, ident)
    if kind == codes.ESCALATE:
        return _escalate(state, agent, index, target, chance)
    if kind == codes.IMPACT:
        return _impact(state, agent, index, target)
    if kind == codes.DEGRADE:
        if not is_privileged_on(state, agent, target):
            return False
        degrade(state, target)
        return True
    if index < 0:
        return False
    if kind == codes.DISCOVER:
        return True
    if kind == codes.DECEPTION:
        if _probe(state, target, chance, codes.FIRST_RED_ACTOR + agent):
            state.found_name[agent] = 1
        return True
    if kind == codes.EXPLOIT:
        if not _exploit(state, agent, index, target, chance):
            return False
        state.found_name[agent] = 1
        return True
    detection = codes.AGGRESSIVE_DETECTION if kind == codes.AGGRESSIVE else codes.STEALTH_DETECTION
    return _scan(state, agent, index, target, detection, chance)


@njit
def _state_of(state, agent, host):
    """State int64 of a host in the agent's table, 0 if the table lacks it."""
    return np.int64(state.fsm[agent, host]) & codes.STATE_BITS


@njit
def _set_state(state, agent, host, new):
    state.fsm[agent, host] = (np.int64(state.fsm[agent, host]) & codes.NAME_KNOWN) | new


@njit
def _see(state, agent, host, has_name):
    """Add a seen host to the agent's table, and record whether its name is known (7.2)."""
    entry = np.int64(state.fsm[agent, host])
    if entry & codes.STATE_BITS == 0:
        num = np.int64(state.num_table[agent])
        # Cannot happen: its own hosts, and those that escalation reveals.
        if num >= codes.MAX_TABLE:
            state.overflow = np.int64(state.overflow) | codes.OFFERED_FULL
            return
        state.table[agent, num] = host
        state.num_table[agent] = num + 1
        entry |= codes.K if state.has_digested[agent] else codes.U
        state.lost[agent] = 1
    if has_name:
        entry |= codes.NAME_KNOWN
    state.fsm[agent, host] = entry


@njit
def _leave_table(state, agent, host):
    """Remove a host in state F from the list of hosts that the agent chooses from."""
    num_kept = np.int64(0)
    for index in range(np.int64(state.num_table[agent])):
        if state.table[agent, index] != host:
            state.table[agent, num_kept] = state.table[agent, index]
            num_kept += 1
    state.num_table[agent] = num_kept


@njit
def _move(state, agent, host, action):
    """Set a host to the state that follows a success of the agent's action (7.1)."""
    before = _state_of(state, agent, host)
    after = np.int64(codes.NEXT_STATE[before, action])
    if after == before:
        return False
    is_foreign = not has(codes.RED_SUBNETS[agent], host >> 4)
    if is_foreign:
        state.lost[agent] = 1
    if after == codes.U and is_foreign:
        _set_state(state, agent, host, codes.F)
        _leave_table(state, agent, host)
        return True
    _set_state(state, agent, host, after)
    return False


@njit
def _learn_from_action(state, agent):
    """Update the table by the result of the agent's own action (7.1; sightings: 3.1)."""
    kind, target = np.int64(state.done_type[agent]), np.int64(state.done_target[agent])
    if kind == codes.DISCOVER:
        index = np.int64(0)
        while index < np.int64(state.num_table[agent]):
            host = np.int64(state.table[agent, index])
            has_left = host >> 4 == target and _move(state, agent, host, kind)
            index += 0 if has_left else 1
        hosts = np.int64(state.exists[target])
        for k in range(16):
            if has(hosts, k):
                _see(state, agent, target * 16 + k, False)
        return
    _move(state, agent, target, kind)
    _see(state, agent, target, state.found_name[agent] == 1)
    if kind == codes.ESCALATE and state.found_links[agent]:
        subnets = codes.REVEALS[target >> 4]
        for subnet in range(codes.NUM_SUBNETS):
            if has(subnets, subnet):
                _see(state, agent, np.int64(subnet * 16 + codes.FIRST_SERVER), True)


@njit
def _find_lost(state, agent):
    """Set hosts that the table says are held, but that have no session any more, to KD (7.3)."""
    for index in range(np.int64(state.num_table[agent])):
        host = np.int64(state.table[agent, index])
        if codes.U <= _state_of(state, agent, host) <= codes.RD:
            is_own = has(codes.RED_SUBNETS[agent], host >> 4)
            if not is_own or not has(np.int64(state.red_hosts[host >> 4]), host & 15):
                _set_state(state, agent, host, codes.KD)


@njit
def digest(state, agent):
    """Update the table by what the agent saw in the last step (SPEC_RED 3, 7.1-7.3)."""
    if state.done_type[agent] != codes.NONE and state.done_success[agent] == codes.SUCCEEDED:
        _learn_from_action(state, agent)
    for index in range(np.int64(state.num_handed[agent])):
        _see(state, agent, np.int64(state.handed[agent, index]), True)
    if state.gained[agent]:
        for index in range(np.int64(state.num_sessions[agent])):
            _see(state, agent, np.int64(state.session_host[agent, index]), True)
        state.gained[agent] = 0
    if state.lost[agent]:
        _find_lost(state, agent)
        state.lost[agent] = 0
    state.has_digested[agent] = 1


@njit
def _draw_host_in_state(state, agent, chance, actor):
    """Draw a host int64 by the rule of the variant "discovery" (7.7)."""
    num = np.int64(state.num_table[agent])
    # States in the order of their first appearance, one nibble each.
    order, num_states, seen, total = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for index in range(num):
        own = _state_of(state, agent, np.int64(state.table[agent, index]))
        if not has(seen, own):
            seen |= 1 << own
            order |= own << (4 * num_states)
            num_states += 1
            total += codes.STATE_WEIGHT[own]
    cell = _draw_state(chance, actor, order, num_states, total)
    chosen = (order >> (4 * cell)) & 15
    num_all, num_servers = np.int64(0), np.int64(0)
    for index in range(num):
        host = np.int64(state.table[agent, index])
        if _state_of(state, agent, host) == chosen:
            num_all += 1
            if _is_known_server(state, agent, host):
                num_servers += 1
    pool = np.int64(0)  # 0 all, 1 known servers, 2 the others
    num_pool = num_all
    if num_all > 1 and num_servers > 0:
        pool, num_pool = np.int64(1), num_servers
        draw = draw_unit(chance, codes.FSM_SERVER, actor)
        if draw > codes.SERVER_FIRST and num_servers < num_all:
            pool, num_pool = np.int64(2), num_all - num_servers
    left = draw_index(chance, codes.FSM_HOST, actor, num_pool)
    for index in range(num):
        host = np.int64(state.table[agent, index])
        if _state_of(state, agent, host) != chosen:
            continue
        is_server = _is_known_server(state, agent, host)
        if pool == 0 or (pool == 1) == is_server:
            if left == 0:
                return host
            left -= 1
    return np.int64(state.table[agent, 0])


@njit
def _is_known_server(state, agent, host):
    has_name = np.int64(state.fsm[agent, host]) & codes.NAME_KNOWN != 0
    return host & 15 >= codes.FIRST_SERVER and has_name


@njit
def _draw_state(chance, actor, order, num_states, total):
    """Draw the place int64 of a state in `order`, by the states' weights of this sum."""
    if total == 0 or chance[1] is not None:
        return draw_index(chance, codes.FSM_STATE, actor, num_states)
    left = draw_index(chance, codes.FSM_STATE, actor, total)
    for cell in range(num_states):
        weight = codes.STATE_WEIGHT[(order >> (4 * cell)) & 15]
        if left < weight:
            return np.int64(cell)
        left -= weight
    return np.int64(0)


@njit
def choose(state, agent, chance, rules):
    """Draw an action of an agent that is not busy (7.5): kind, target, session id, all int64."""
    actor = np.int64(codes.FIRST_RED_ACTOR + agent)
    num = np.int64(state.num_table[agent])
    if rules.red_variant == codes.SLEEPING_RED or num == 0:
        return _WAIT
    variant = np.int64(rules.red_variant)
    if variant == codes.DISCOVERY_RED:
        host = _draw_host_in_state(state, agent, chance, actor)
    else:
        host = np.int64(state.table[agent, draw_index(chance, codes.FSM_HOST, actor, num)])
    own = _state_of(state, agent, host)
    cell = draw_cell(chance, actor, variant, own)
    kind, target = codes.CELL_ACTION[variant, own, cell], host
    if kind == codes.DISCOVER:
        subnets = np.int64(state.known_subnets[agent])
        target = nth(subnets, draw_index(chance, codes.FSM_SUBNET, actor, count(subnets)))
    offered = draw_index(chance, codes.FSM_SESSION, actor, np.int64(state.num_offered[agent]))
    return kind, target, np.int64(state.offered[agent, offered])


@njit
def checked_choice(state, agent, choice):
    """Return the choice of a custom red agent, or NONE three times if it can't be played.

    If the choice does not exist, its session becomes IMPOSSIBLE. Kind NONE means to wait.

    Args:
        choice: Three integers: kind; host, or subnet of DISCOVER; id of a session on offer.
    """
    kind, target, ident = np.int64(choice[0]), np.int64(choice[1]), np.int64(choice[2])
    num_targets = codes.NUM_SUBNETS if kind == codes.DISCOVER else codes.NUM_HOSTS
    if not (0 <= kind < codes.WITHDRAW and 0 <= target < num_targets):
        return _WAIT if kind == codes.NONE else _CANNOT
    is_offered = False
    for index in range(np.int64(state.num_offered[agent])):
        is_offered |= state.offered[agent, index] == ident
    if kind == codes.DISCOVER:
        is_known = has(np.int64(state.known_subnets[agent]), target)
    else:
        is_known = np.int64(state.fsm[agent, target]) & codes.STATE_BITS != codes.UNKNOWN_HOST
    return (kind, target, ident) if is_offered and is_known else _WAIT


@njit
def acts_on_host(family):
    """Whether actions of this family are aimed at a host."""
    return codes.ANALYSE <= family <= codes.RESTORE or family == codes.DECOY


@njit
def submit(state, agent, action):
    """Submit an agent's action int64; return its cost, int64 <= 0 (SPEC 4.3, 9).

    An action on a missing host, or an index that is not one of the agent's actions, is Sleep.
    """
    family = np.int64(codes.SLEEP)
    target = source = np.int64(0)
    if 0 <= action < codes.MAX_ACTIONS:
        family = codes.ACTION_FAMILY[agent, action]
        target, source = codes.ACTION_TARGET[agent, action], codes.ACTION_SOURCE[agent, action]
        if acts_on_host(family):
            exists = np.int64(state.exists[target >> 4])
            if not has(exists, target & 15):
                family, target = np.int64(codes.SLEEP), np.int64(0)
    left = np.int64(state.blue_left[agent])
    if left == 0:
        state.blue_family[agent] = family
        state.blue_target[agent] = target
        state.blue_source[agent] = source
        left = codes.BLUE_TICKS[family]
    state.blue_left[agent] = left - 1
    state.blue_success[agent] = codes.IN_PROGRESS
    return -codes.RESTORE_COST if family == codes.RESTORE else 0


@njit
def _remove_process(state, host, pid, chance, actor):
    """Do Remove for one suspicious process id (SPEC 5.1)."""
    agent = codes.RED_OF_SUBNET[host >> 4]
    for index in range(np.int64(state.num_sessions[agent])):
        is_there = state.session_host[agent, index] == host
        if is_there and state.session_pid[agent, index] == pid:
            if not np.int64(state.session_flags[agent, index]) & codes.PRIVILEGED:
                end_session(state, agent, index)
            return
    for decoy in range(codes.NUM_DECOYS):
        if state.decoy_pid[host, decoy] == pid:
            state.decoy_pid[host, decoy] = 0
            find_max_pid(state, host)
            state.decoy_pid[host, decoy] = new_pid(state, host, chance, actor)
            return
    if state.num_vsftpd[host] > 1:
        for old in range(np.int64(state.num_old_vsftpd)):
            is_there = state.old_vsftpd_host[old] == host
            if is_there and state.old_vsftpd_pid[old] == pid:
                forget_old_vsftpd(state, old)
                state.num_vsftpd[host] = np.int64(state.num_vsftpd[host]) - 1
                return


@njit
def _remove(state, host, chance, actor):
    """Do Remove on a host."""
    for index in range(np.int64(state.num_suspicious)):
        if state.suspicious_host[index] == host:
            pid = np.int64(state.suspicious_pid[index])
            _remove_process(state, host, pid, chance, actor)


@njit
def _bar(state, a, b):
    """Record whether a pair of zones is blocked in either direction (SPEC 6.3)."""
    if a >= codes.NUM_SUBNETS or b >= codes.NUM_SUBNETS:
        return
    is_barred = has(np.int64(state.blocks[a]), b) or has(np.int64(state.blocks[b]), a)
    others_a = np.int64(state.barred[a]) & ~(np.int64(1) << b)
    others_b = np.int64(state.barred[b]) & ~(np.int64(1) << a)
    state.barred[a] = others_a | (np.int64(is_barred) << b)
    state.barred[b] = others_b | (np.int64(is_barred) << a)


@njit
def _set_traffic(state, agent):
    """Carry out AllowTraffic or BlockTraffic."""
    to, bit = np.int64(state.blue_target[agent]), 1 << np.int64(state.blue_source[agent])
    blocked = np.int64(state.blocks[to])
    is_block = state.blue_family[agent] == codes.BLOCK
    changes = (blocked & bit == 0) == is_block
    if changes:
        state.blocks[to] = blocked ^ bit
        _bar(state, to, np.int64(state.blue_source[agent]))
    state.blue_success[agent] = codes.SUCCEEDED if changes else codes.FAILED


@njit
def blue_effects(state, chance):
    """Execute the actions that are due: traffic control first, then the others (SPEC 4.5)."""
    for agent in range(codes.NUM_BLUE):
        family = np.int64(state.blue_family[agent])
        if state.blue_left[agent] == 0 and family in (codes.ALLOW, codes.BLOCK):
            _set_traffic(state, agent)
    for agent in range(codes.NUM_BLUE):
        if state.blue_left[agent] != 0:
            continue
        family, host = np.int64(state.blue_family[agent]), np.int64(state.blue_target[agent])
        if family in (codes.ALLOW, codes.BLOCK):
            continue
        state.blue_success[agent] = codes.UNKNOWN if family == codes.SLEEP else codes.SUCCEEDED
        if family == codes.ANALYSE:
            log_analyse(state, agent, host)
        elif family == codes.REMOVE:
            _remove(state, host, chance, agent)
        elif family == codes.RESTORE:
            end_sessions_on(state, host)
            end_decoys(state, host)
            log_restore(state, host)
        elif family == codes.DECOY:
            log_decoy(state, agent, host, place_decoy(state, host, chance, agent))
