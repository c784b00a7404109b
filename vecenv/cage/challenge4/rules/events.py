"""The log of a step that raw observations and events are made of, kept only where it is asked for.

`log` is the game's own state, with `EVENT_FIELDS` of `network.state`; or None, and then Numba drops
what stands here. Of a host or router that blue watches, the log has what its monitor shows: which
host did it, both ends of the connection, process ids. Events of CON and the internet are seen by
nobody. What outlasts a step (decoys, steps since blue's actions) is kept as the bytes that rows
show, so that writing a row is copying. Draws that change nothing else (ports, alarms on routers)
are slots of the step's numbers, so that games with and without a log draw the same ones.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules.bits import count, has
from vecenv.cage.challenge4.rules.codes import (
    BLUE_SUBNETS,
    CMD_FILE,
    CMD_IS_LAST,
    DECOY_PORTS,
    ESCALATE_FILE,
    EVENTS_FULL,
    EXTRA_ORDERS,
    EXTRAS,
    FIRST_RED_ACTOR,
    FIRST_SERVER,
    HOSTS_PER_SUBNET,
    MAX_EVENTS,
    MAX_EXTRAS,
    MAX_SERVERS,
    NONE,
    NUM_BLUE,
    NUM_DECOYS,
    NUM_HOSTS,
    NUM_SHOWN,
    NUM_WATCHED,
    NUM_ZONES,
    OT_RUNNING,
    SERVICE_PORTS,
    VSFTPD,
    WAS_ANALYSED,
)
from vecenv.cage.challenge4.rules.draws import draw_port
from vecenv.jit.random import integers_at

# Codes of nodes and actors: hosts come first.
FIRST_ROUTER = NUM_HOSTS  # and a zone
FIRST_RED = NUM_HOSTS  # and a red agent; a green user is its host
CONNECTION, ALARM, SESSION = range(3)  # kinds: a connection; a process by its port, or by its id
NO_PORT = 0
_FIRST_EXTRA_BIT = 2
_NO_PID = 1 << 20
NEVER = 255  # of steps since: never, or longer ago
# Parts of `shown`, NUM_WATCHED bytes each, after that which says what hosts there are.
FIRST_DECOY, SINCE_ANALYSE, SINCE_RESTORE, SINCE_DECOY = (
    part * NUM_WATCHED for part in (1, NUM_SHOWN - 3, NUM_SHOWN - 2, NUM_SHOWN - 1)
)
# The agent that watches a zone, -1 for none, and which of that agent's it is.
WATCHER, UNIT = np.full(NUM_ZONES, -1), np.zeros(NUM_ZONES, np.int64)
# Hosts that blue watches, in the order of the agents' actions; and the place of a host among them.
WATCHED, PLACE = np.zeros(NUM_WATCHED, np.int64), np.zeros(NUM_HOSTS, np.int64)
_num = 0
for _agent, _zones in enumerate(BLUE_SUBNETS):
    for _unit, _zone in enumerate(_zones):
        WATCHER[_zone], UNIT[_zone] = _agent, _unit
        for _i in range(HOSTS_PER_SUBNET):
            _k = _i + FIRST_SERVER if _i < MAX_SERVERS else _i - MAX_SERVERS
            WATCHED[_num], PLACE[_zone * HOSTS_PER_SUBNET + _k] = (
                _zone * HOSTS_PER_SUBNET + _k,
                _num,
            )
            _num += 1


@njit
def begin_log(log, rng):
    """Clear the log at the beginning of an episode, and draw the order of hosts' extra services."""
    if log is not None:
        begin_step(log)
        for host in range(NUM_HOSTS):
            log.files[host] = 0
            order = integers_at(rng, np.int64(host), np.int64(EXTRA_ORDERS.shape[0]))
            log.extra_order[host] = EXTRA_ORDERS[order]
        for place in range(NUM_WATCHED):
            host = WATCHED[place]
            there = has(np.int64(log.exists[host >> 4]), host & 15)
            log.shown[place] = there
            for decoy in range(NUM_DECOYS):
                log.shown[FIRST_DECOY + decoy * NUM_WATCHED + place] = 0
            for part in (SINCE_ANALYSE, SINCE_RESTORE, SINCE_DECOY):
                log.shown[part + place] = there * NEVER


@njit
def begin_step(log):
    """Forget the events of the last step, and count steps since blue's actions."""
    if log is not None:
        log.num_events = log.num_slots = 0
        for agent in range(NUM_BLUE):
            log.analysed[agent] = log.last_event[agent] = 0
            log.new_decoy[agent] = NONE
        for part in (SINCE_ANALYSE, SINCE_RESTORE, SINCE_DECOY):
            for i in range(NUM_WATCHED):  # unsigned places, as in `observation`: vector code
                place = np.uint64(part) + np.uint64(i)
                steps = log.shown[place]
                log.shown[place] = steps + (log.shown[np.uint64(i)] & np.uint8(steps != NEVER))


@njit
def _log_event(log, node, actor, event):
    """Append an event on a host or router: kind, local, local port, remote, remote port, id."""
    if log is not None:
        zone = node - FIRST_ROUTER if node >= FIRST_ROUTER else node >> 4
        watcher = WATCHER[zone]
        if watcher < 0:
            return
        index = np.int64(log.num_events)
        if index >= MAX_EVENTS:
            log.overflow = np.int64(log.overflow) | EVENTS_FULL
            return
        log.num_events = index + 1
        found = log.events[index]
        found.node, found.actor, found.kind = node, actor, event[0]
        found.local, found.local_port = event[1], event[2]
        found.remote, found.remote_port = event[3], event[4]
        found.pid = event[5]
        found.before = log.last_event[watcher]
        log.last_event[watcher] = index + 1


@njit
def log_connection(log, node, actor, local, local_port, remote, remote_port):
    """Log that a node saw a connection between two hosts; NO_PORT where a port is not told."""
    _log_event(log, node, actor, (CONNECTION, local, local_port, remote, remote_port, 0))


@njit
def log_alarm(log, host, port):
    """Log the process event of a green user's work, which tells a port."""
    _log_event(log, host, host, (ALARM, host, port, host, NO_PORT, 0))


@njit
def log_session(log, host, actor, pid):
    """Log the process event of an exploit, which tells the id of the session's process."""
    _log_event(log, host, actor, (SESSION, host, NO_PORT, host, NO_PORT, pid))


@njit
def _next_decoy(state, host, after):
    """The decoy process with the smallest id above `after`: its id, or -1, and port, int64."""
    best, port = np.int64(_NO_PID), np.int64(0)
    for decoy in range(NUM_DECOYS):
        pid = np.int64(state.decoy_pid[host, decoy])
        if after < pid < best:
            best, port = pid, DECOY_PORTS[decoy]
    if state.num_vsftpd[host] > 1:
        for index in range(np.int64(state.num_old_vsftpd)):
            pid = np.int64(state.old_vsftpd_pid[index])
            if state.old_vsftpd_host[index] == host and after < pid < best:
                best, port = pid, DECOY_PORTS[VSFTPD]
    if best == _NO_PID:
        best = np.int64(-1)
    return best, port


@njit
def log_scan(state, log, chance, agent, source, host, is_detected):
    """Log a scan: a connection to each process that listens, of decoys even if it stays hidden."""
    if log is not None:
        actor, red = FIRST_RED_ACTOR + agent, FIRST_RED + agent
        services, order = np.int64(state.services[host]), np.int64(log.extra_order[host])
        if is_detected:
            port = draw_port(chance, actor)
            log_connection(log, host, red, host, SERVICE_PORTS[0], source, port)
            if np.int64(state.svc[host]) & OT_RUNNING:
                port = draw_port(chance, actor)
                log_connection(log, host, red, host, SERVICE_PORTS[1], source, port)
            for place in range(MAX_EXTRAS if count(services & EXTRAS) else 0):
                bit = _FIRST_EXTRA_BIT + (order >> (2 * place) & 3)
                if has(services, bit):
                    port = draw_port(chance, actor)
                    log_connection(log, host, red, host, SERVICE_PORTS[bit], source, port)
        pid, listens = _next_decoy(state, host, np.int64(0))
        while pid >= 0:
            port = draw_port(chance, actor)
            log_connection(log, host, red, host, listens, source, port)
            pid, listens = _next_decoy(state, host, pid)


@njit
def drop_cmd(log, host):
    """Leave the file that an exploit drops."""
    if log is not None:
        log.files[host] = np.int64(log.files[host]) | CMD_FILE | CMD_IS_LAST


@njit
def drop_escalate(log, host):
    """Leave the file that an escalation drops."""
    if log is not None:
        log.files[host] = (np.int64(log.files[host]) | ESCALATE_FILE) & ~np.int64(CMD_IS_LAST)


@njit
def log_analyse(log, agent, host):
    """Log that blue's Analyse found the host's files as they are now."""
    if log is not None:
        log.analysed[agent] = np.int64(log.files[host]) | WAS_ANALYSED
        log.shown[SINCE_ANALYSE + PLACE[host]] = 0


@njit
def log_restore(log, host):
    """Log that a host was restored, which deletes its files."""
    if log is not None:
        log.files[host] = 0
        place = PLACE[host]
        log.shown[SINCE_RESTORE + place] = 0
        for decoy in range(NUM_DECOYS):
            log.shown[FIRST_DECOY + decoy * NUM_WATCHED + place] = 0


@njit
def log_decoy(log, agent, host, decoy):
    """Log which decoy was placed."""
    if log is not None:
        log.new_decoy[agent] = decoy
        log.shown[SINCE_DECOY + PLACE[host]] = 0
        log.shown[FIRST_DECOY + decoy * NUM_WATCHED + PLACE[host]] = 1
