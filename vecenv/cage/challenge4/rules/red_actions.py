"""What red's actions do when they take effect (SPEC_RED 2)."""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules.bits import count, has, nth
from vecenv.cage.challenge4.rules.codes import (
    AGGRESSIVE,
    AGGRESSIVE_DETECTION,
    APACHE,
    CON,
    DATABASE,
    DECEPTION,
    DECEPTION_FALSE,
    DECEPTION_FALSE_SITE,
    DECEPTION_HIT,
    DECEPTION_HIT_SITE,
    DECOY_PORTS,
    DEGRADE,
    DISCOVER,
    ESCALATE,
    ESCALATE_SESSION,
    EXPLOIT,
    EXPLOIT_CHOICE,
    EXPLOIT_DETECT,
    EXPLOIT_SUCCESS,
    EXPLOIT_TOP,
    FIRST_RED_ACTOR,
    FIRST_SERVER,
    HARAKA,
    HTTP,
    HTTPS,
    IMPACT,
    KIND_A,
    MAIL,
    MAIL_EXPLOIT,
    NODES_BETWEEN,
    NUM_DECOYS,
    NUM_RED,
    OT_RUNNING,
    PORT_25,
    PORT_80,
    PORT_443,
    PORT_3390,
    PRIVILEGED,
    RED_OF_SUBNET,
    REVEALS,
    REVERSE_SHELL,
    ROUTES,
    SCAN_DETECT,
    SQL,
    SQL_MISSED,
    SSH_EXPLOIT,
    SSH_HOP,
    SSH_MISSED,
    SSH_SHELL,
    STEALTH_DETECTION,
    TOMCAT,
    VSFTPD,
    WEB,
)
from vecenv.cage.challenge4.rules.draws import (
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
    drop_cmd,
    drop_escalate,
    log_connection,
    log_scan,
    log_session,
)
from vecenv.cage.challenge4.rules.processes import (
    degrade,
    new_pid,
    note_connection,
    note_suspicious,
    num_genuine,
    open_ports,
)
from vecenv.cage.challenge4.rules.sessions import (
    add_session,
    find_session,
    is_privileged_on,
    remember_ports,
    remembered_ports,
)

_SSH_PORT, _SSH_GUESSES = 22, 10  # connections of a brute-force attack


@njit
def _is_reachable(state, source, host):
    """Whether no block stops red's traffic from one host to another (SPEC 5.4)."""
    return not has(np.int64(state.blocks[host >> 4]), source >> 4)


@njit
def _scan(state, agent, index, host, detection, chance):
    source = np.int64(state.session_host[agent, index])
    is_abstract = np.int64(state.session_flags[agent, index]) & KIND_A
    if not is_abstract or not _is_reachable(state, source, host):
        return False
    ports = open_ports(state, host)
    ident = np.int64(state.session_ident[agent, index])
    remember_ports(state, agent, ident, host, ports)
    state.found_ports[agent] = ports
    value = draw_unit(chance, SCAN_DETECT, FIRST_RED_ACTOR + agent)
    if value <= detection or state.decoys[host]:
        note_connection(state, host)
        log_scan(state, chance[2], chance, agent, source, host, value <= detection)
    return True


@njit
def _num_sessions_on(state, agent, host):
    num = np.int64(0)
    for index in range(np.int64(state.num_sessions[agent])):
        if state.session_host[agent, index] == host:
            num += 1
    return num


@njit
def _probe_one(is_decoy, chance, actor):
    """Probe one process for deception; return whether it was noticed as a decoy."""
    hit = draw_unit(chance, DECEPTION_HIT_SITE, actor)
    if hit <= DECEPTION_HIT and is_decoy:
        return True
    false = draw_unit(chance, DECEPTION_FALSE_SITE, actor)
    return false <= DECEPTION_FALSE and not is_decoy


@njit
def _next_process(state, host, after):
    """The red session or decoy process with the smallest id above `after`.

    Ids grow in the order of creation, which is the order in which processes are probed.

    Returns:
        Its id int64, or -1; and whether it is a decoy.
    """
    best, is_decoy = np.int64(1 << 20), False
    for agent in range(NUM_RED):
        for index in range(np.int64(state.num_sessions[agent])):
            pid = np.int64(state.session_pid[agent, index])
            if state.session_host[agent, index] == host and after < pid < best:
                best, is_decoy = pid, False
    for decoy in range(NUM_DECOYS):
        pid = np.int64(state.decoy_pid[host, decoy])
        if pid > 0 and after < pid < best:
            best, is_decoy = pid, True
    if state.num_vsftpd[host] > 1:
        for index in range(np.int64(state.num_old_vsftpd)):
            pid = np.int64(state.old_vsftpd_pid[index])
            if state.old_vsftpd_host[index] == host and after < pid < best:
                best, is_decoy = pid, True
    if best == 1 << 20:
        best = np.int64(-1)
    return best, is_decoy


@njit
def _probe(state, host, tape, chance, actor):
    """Probe all processes of a host; return whether any was taken for a decoy."""
    others = num_genuine(state, host)
    if host >> 4 != CON:
        others += 1  # blue's
    if host & 15 < FIRST_SERVER:
        others += 1  # green's
    if tape is None:
        num_decoys = count(np.int64(state.decoys[host]))
        if state.num_vsftpd[host] > 1:
            num_decoys += np.int64(state.num_vsftpd[host]) - 1
        subnet = host >> 4
        for agent in range(NUM_RED):
            if state.num_foreign > 0 or agent == RED_OF_SUBNET[subnet]:
                others += _num_sessions_on(state, agent, host)
        missed = 1.0
        for _ in range(num_decoys):
            missed *= 1.0 - DECEPTION_HIT
        for _ in range(others):
            missed *= 1.0 - DECEPTION_FALSE
        return draw_unit(chance, DECEPTION_HIT_SITE, actor) >= missed
    else:
        is_noticed = False
        for _ in range(others):
            is_noticed |= _probe_one(False, chance, actor)
        pid, is_decoy = _next_process(state, host, np.int64(-1 if host >> 4 == CON else 0))
        while pid >= 0:
            is_noticed |= _probe_one(is_decoy, chance, actor)
            pid, is_decoy = _next_process(state, host, pid)
        return is_noticed


@njit
def _open_session(state, agent, host, kind, chance):
    """An exploit works: a C session of the agent; return the id int64 of its process."""
    drop_cmd(chance[2], host)
    pid = new_pid(state, host, chance, FIRST_RED_ACTOR + agent)
    add_session(state, agent, host, kind, pid)
    return pid


@njit
def _ssh(state, agent, source, host, chance):
    actor, red, log = FIRST_RED_ACTOR + agent, FIRST_RED + agent, chance[2]
    a, b = source >> 4, host >> 4
    if source != host:
        if draw_unit(chance, SSH_HOP, actor) > SSH_MISSED:
            note_connection(state, source)
            log_connection(log, source, red, host, NO_PORT, source, _SSH_PORT)
        for place in range(NODES_BETWEEN[a, b]):
            if draw_hop(chance, actor) > SSH_MISSED:
                router = FIRST_ROUTER + ROUTES[a, b, place]
                log_connection(log, router, red, host, NO_PORT, source, _SSH_PORT)
    if draw_hop(chance, actor) > SSH_MISSED:
        log_connection(log, host, red, host, NO_PORT, source, _SSH_PORT)
    port = draw_port(chance, actor)
    pid = _open_session(state, agent, host, SSH_SHELL, chance)
    note_connection(state, host)
    for _ in range(_SSH_GUESSES):
        log_connection(log, host, red, host, _SSH_PORT, source, port)
    note_suspicious(state, host, pid)
    log_session(log, host, red, pid)
    return True


@njit
def _lured(state, agent, source, host, port, is_caught, chance):
    """HTTP, HTTPS or mail: fails, with a connection event if a decoy caught it."""
    if is_caught:
        actor, red = FIRST_RED_ACTOR + agent, FIRST_RED + agent
        remote_port = draw_port(chance, actor)
        log_connection(chance[2], host, red, host, port, source, remote_port)
        draw_unused(chance, EXPLOIT_SUCCESS, actor)
        note_connection(state, host)
        local_port = draw_port(chance, actor)
        remote_port = draw_port(chance, actor)
        log_connection(chance[2], host, red, host, local_port, source, remote_port)
    return False


@njit
def _sql(state, agent, host, chance):
    if not np.int64(state.services[host]) & DATABASE:
        return False
    actor = FIRST_RED_ACTOR + agent
    draw_unused(chance, EXPLOIT_SUCCESS, actor)
    draw_port(chance, actor)
    pid = _open_session(state, agent, host, REVERSE_SHELL, chance)
    if draw_unit(chance, EXPLOIT_DETECT, actor) > SQL_MISSED:
        note_suspicious(state, host, pid)
        log_session(chance[2], host, FIRST_RED + agent, pid)
    return True


@njit
def exploit_options(ports):
    """Set int64 of exploits for a set of remembered ports (SPEC_RED 2, Exploit 2)."""
    options = np.int64(1 << SSH_EXPLOIT)
    if ports & PORT_80:
        options |= 1 << HTTP
    if ports & PORT_443:
        options |= 1 << HTTPS
    if ports & PORT_3390 and ports & (PORT_80 | PORT_443):
        options |= 1 << SQL
    if ports & PORT_25:
        options |= 1 << MAIL_EXPLOIT
    return options


@njit
def strongest(options):
    """The exploit int64 with the largest weight of a set: mail, SQL, HTTPS, HTTP, SSH."""
    if has(options, MAIL_EXPLOIT):
        return MAIL_EXPLOIT
    if has(options, SQL):
        return SQL
    if has(options, HTTPS):
        return HTTPS
    return HTTP if has(options, HTTP) else SSH_EXPLOIT


@njit
def _exploit(state, agent, index, host, chance):
    source = np.int64(state.session_host[agent, index])
    if not np.int64(state.session_flags[agent, index]) & KIND_A:
        return False
    ident = np.int64(state.session_ident[agent, index])
    ports = remembered_ports(state, agent, ident, host)
    if ports == 0 or not _is_reachable(state, source, host):
        return False
    actor = FIRST_RED_ACTOR + agent
    options = exploit_options(ports)
    exploit = np.int64(SSH_EXPLOIT)
    if count(options) > 1:
        others = options & ~(1 << strongest(options))
        exploit = nth(others, draw_index(chance, EXPLOIT_CHOICE, actor, count(others)))
        draw_unused(chance, EXPLOIT_TOP, actor)
    state.red_exploit[agent] = exploit
    services, decoys = np.int64(state.services[host]), np.int64(state.decoys[host])
    if exploit == SSH_EXPLOIT:
        return _ssh(state, agent, source, host, chance)
    if exploit == SQL:
        return _sql(state, agent, host, chance)
    if exploit == HTTP:
        lures, genuine = (1 << APACHE) | (1 << VSFTPD), services & WEB
        port = DECOY_PORTS[APACHE]
    elif exploit == HTTPS:
        lures, genuine, port = 1 << TOMCAT, np.int64(0), DECOY_PORTS[TOMCAT]
    else:
        lures, genuine, port = 1 << HARAKA, services & MAIL, DECOY_PORTS[HARAKA]
    is_caught = decoys & lures != 0 and genuine == 0
    return _lured(state, agent, source, host, port, is_caught, chance)


@njit
def _escalate(state, agent, index, host, chance):
    """Do PrivilegeEscalate with the session at `index`, -1 if it is gone."""
    num = _num_sessions_on(state, agent, host)
    if num == 0:
        return False
    if not is_privileged_on(state, agent, host):
        left = draw_index(chance, ESCALATE_SESSION, FIRST_RED_ACTOR + agent, num)
        if index < 0 or not np.int64(state.session_flags[agent, index]) & KIND_A:
            return False
        for place in range(np.int64(state.num_sessions[agent])):
            if state.session_host[agent, place] == host:
                if left == 0:
                    flags = np.int64(state.session_flags[agent, place])
                    state.session_flags[agent, place] = flags | PRIVILEGED
                    drop_escalate(chance[2], host)
                    break
                left -= 1
    if index >= 0 and host & 15 == FIRST_SERVER:
        state.found_links[agent] = 1
    return True


@njit
def _impact(state, agent, index, host):
    word = np.int64(state.svc[host])
    if index < 0 or not word & OT_RUNNING or not is_privileged_on(state, agent, host):
        return False
    state.svc[host] = word & ~OT_RUNNING
    return True


@njit
def red_action(state, agent, kind, target, ident, chance):
    """Carry out an agent's action with one of its sessions; return whether it succeeds.

    Args:
        kind, target, ident: int64; the target is a host, or a subnet for DISCOVER.
    """
    index = find_session(state, agent, ident)
    tape = chance[1]
    if kind == ESCALATE:
        return _escalate(state, agent, index, target, chance)
    if kind == IMPACT:
        return _impact(state, agent, index, target)
    if kind == DEGRADE:
        if not is_privileged_on(state, agent, target):
            return False
        degrade(state, target)
        return True
    if index < 0:
        return False
    if kind == DISCOVER:
        return True
    if kind == DECEPTION:
        if _probe(state, target, tape, chance, FIRST_RED_ACTOR + agent):
            state.found_name[agent] = 1
        return True
    if kind == EXPLOIT:
        if not _exploit(state, agent, index, target, chance):
            return False
        state.found_name[agent] = 1
        return True
    detection = AGGRESSIVE_DETECTION if kind == AGGRESSIVE else STEALTH_DETECTION
    return _scan(state, agent, index, target, detection, chance)


@njit
def revealed_by(host):
    """Set int64 of subnets whose server 0 is revealed by escalating a host, a server 0."""
    return REVEALS[host >> 4]
