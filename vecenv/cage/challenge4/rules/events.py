"""The log of a step, from which event observations and raw observations are made.

For each host or router that blue watches, the log has what its monitor shows: the acting host, both
ends of the connection, process ids. No agent sees events of CON and the internet. Draws that change
nothing else (ports, alarms on routers) use slots of the step's numbers, so the game's other draws
stay unchanged. State that outlasts a step (decoys, steps since blue's actions) is stored as the
bytes of the rows, so that writing a row is a copy.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.draws import draw_port
from vecenv.cage.challenge4.rules.state import count, has
from vecenv.jit.random import integers_at

# Codes of nodes and actors: hosts come first.
FIRST_ROUTER = codes.NUM_HOSTS  # and a zone
FIRST_RED = codes.NUM_HOSTS  # and a red agent; a green user is its host
CONNECTION, ALARM, SESSION = range(3)  # kinds: a connection; a process by its port, or by its id
NO_PORT = 0
_FIRST_EXTRA_BIT = 2
_NO_PID = 1 << 20
NEVER = 255  # of steps since: never, or longer ago
# Parts of `shown`, NUM_WATCHED bytes each, after that which says what hosts there are.
_FIRST_DECOY, SINCE_ANALYSE, _SINCE_RESTORE, _SINCE_DECOY = (
    part * codes.NUM_WATCHED for part in (1, *range(codes.NUM_SHOWN - 3, codes.NUM_SHOWN))
)
# The agent that watches a zone, -1 for none, and which of that agent's it is.
WATCHER, UNIT = np.full(codes.NUM_ZONES, -1), np.zeros(codes.NUM_ZONES, np.int64)
# Hosts that blue watches, in the order of the agents' actions; and the place of a host among them.
WATCHED = np.add.outer(codes.WATCHED_ZONES * codes.HOSTS_PER_SUBNET, codes.PLACES).reshape(-1)
PLACE = np.zeros(codes.NUM_HOSTS, np.int64)
PLACE[WATCHED] = np.arange(codes.NUM_WATCHED)
for _agent, _zones in enumerate(codes.BLUE_SUBNETS):
    WATCHER[[*_zones]], UNIT[[*_zones]] = _agent, range(len(_zones))


@njit
def begin_log(state, rng, rules):
    """Clear the log for a new episode, and draw the order of each host's extra services."""
    begin_step(state, rules)
    _next_step(state)
    for index in range(codes.MAX_EVENTS):  # clear all events of an earlier episode
        event = state.events[index]
        event.node = event.actor = event.kind = event.local = event.remote = 0
        event.local_port = event.remote_port = event.pid = event.before = 0
    for host in range(codes.NUM_HOSTS):
        state.files[host] = 0
        order = integers_at(rng, np.int64(host), np.int64(codes.EXTRA_ORDERS.shape[0]))
        state.extra_order[host] = codes.EXTRA_ORDERS[order]
    for place in range(codes.NUM_WATCHED):
        host = WATCHED[place]
        there = has(np.int64(state.exists[host >> 4]), host & 15)
        state.shown[place] = there
        for decoy in range(codes.NUM_DECOYS):
            state.shown[_FIRST_DECOY + decoy * codes.NUM_WATCHED + place] = 0
        for part in (SINCE_ANALYSE, _SINCE_RESTORE, _SINCE_DECOY):
            state.shown[part + place] = there * NEVER


@njit
def begin_step(state, rules):
    """Clear the events of the last step, and count the steps since blue's actions."""
    state.num_events = state.num_slots = 0
    state.keeps_log = rules.keeps_log
    if state.keeps_log != 0:
        _next_step(state)


@njit
def _next_step(state):
    for agent in range(codes.NUM_BLUE):
        state.analysed[agent] = state.last_event[agent] = 0
        state.new_decoy[agent] = codes.NONE
    for part in (SINCE_ANALYSE, _SINCE_RESTORE, _SINCE_DECOY):
        for i in range(codes.NUM_WATCHED):  # unsigned places give vector code
            place = np.uint64(part) + np.uint64(i)
            steps = state.shown[place]
            state.shown[place] = steps + (state.shown[np.uint64(i)] & np.uint8(steps != NEVER))


@njit
def _log_event(state, node, actor, event):
    """Append an event on a host or router: kind, local, local port, remote, remote port, id."""
    if state.keeps_log == 0:
        return
    zone = node - FIRST_ROUTER if node >= FIRST_ROUTER else node >> 4
    watcher = WATCHER[zone]
    if watcher < 0:
        return
    index = np.int64(state.num_events)
    if index >= codes.MAX_EVENTS:
        state.overflow = np.int64(state.overflow) | codes.EVENTS_FULL
        return
    state.num_events = index + 1
    found = state.events[index]
    found.node, found.actor, found.kind = node, actor, event[0]
    found.local, found.local_port = event[1], event[2]
    found.remote, found.remote_port = event[3], event[4]
    found.pid = event[5]
    found.before = state.last_event[watcher]
    state.last_event[watcher] = index + 1


@njit
def log_connection(state, node, actor, local, local_port, remote, remote_port):
    """Log that a node saw a connection between two hosts; NO_PORT for an unknown port."""
    _log_event(state, node, actor, (CONNECTION, local, local_port, remote, remote_port, 0))


@njit
def log_alarm(state, host, port):
    """Log the process event of a green user's work, which shows a port."""
    _log_event(state, host, host, (ALARM, host, port, host, NO_PORT, 0))


@njit
def log_session(state, host, actor, pid):
    """Log the process event of an exploit, which shows the id of the session's process."""
    _log_event(state, host, actor, (SESSION, host, NO_PORT, host, NO_PORT, pid))


@njit
def next_decoy(state, host, after):
    """The decoy process with the smallest id above `after`: its id, or -1, and port, int64."""
    best, port = np.int64(_NO_PID), np.int64(0)
    for decoy in range(codes.NUM_DECOYS):
        pid = np.int64(state.decoy_pid[host, decoy])
        if after < pid < best:
            best, port = pid, codes.DECOY_PORTS[decoy]
    if state.num_vsftpd[host] > 1:
        for index in range(np.int64(state.num_old_vsftpd)):
            pid = np.int64(state.old_vsftpd_pid[index])
            if state.old_vsftpd_host[index] == host and after < pid < best:
                best, port = pid, codes.DECOY_PORTS[codes.VSFTPD]
    if best == _NO_PID:
        best = np.int64(-1)
    return best, port


@njit
def log_scan(state, chance, agent, source, host, is_detected):
    """Log a scan: a connection to each listening process; for decoys, even an undetected scan."""
    if state.keeps_log == 0:
        return
    actor, red = codes.FIRST_RED_ACTOR + agent, FIRST_RED + agent
    services, order = np.int64(state.services[host]), np.int64(state.extra_order[host])
    if is_detected:
        port = draw_port(state, chance, actor)
        log_connection(state, host, red, host, codes.SERVICE_PORTS[0], source, port)
        if np.int64(state.svc[host]) & codes.OT_RUNNING:
            port = draw_port(state, chance, actor)
            log_connection(state, host, red, host, codes.SERVICE_PORTS[1], source, port)
        for place in range(codes.MAX_EXTRAS if count(services & codes.EXTRAS) else 0):
            bit = _FIRST_EXTRA_BIT + (order >> (2 * place) & 3)
            if has(services, bit):
                port = draw_port(state, chance, actor)
                log_connection(state, host, red, host, codes.SERVICE_PORTS[bit], source, port)
    pid, listens = next_decoy(state, host, np.int64(0))
    while pid >= 0:
        port = draw_port(state, chance, actor)
        log_connection(state, host, red, host, listens, source, port)
        pid, listens = next_decoy(state, host, pid)


@njit
def log_analyse(state, agent, host):
    """Log that blue's Analyse found the host's files as they are now."""
    state.analysed[agent] = np.int64(state.files[host]) | codes.WAS_ANALYSED
    state.shown[SINCE_ANALYSE + PLACE[host]] = 0


@njit
def log_restore(state, host):
    """Log that a host was restored, which deletes its files."""
    state.files[host] = 0
    place = PLACE[host]
    state.shown[_SINCE_RESTORE + place] = 0
    for decoy in range(codes.NUM_DECOYS):
        state.shown[_FIRST_DECOY + decoy * codes.NUM_WATCHED + place] = 0


@njit
def log_decoy(state, agent, host, decoy):
    """Log which decoy was placed."""
    state.new_decoy[agent] = decoy
    state.shown[_SINCE_DECOY + PLACE[host]] = 0
    state.shown[_FIRST_DECOY + decoy * codes.NUM_WATCHED + PLACE[host]] = 1
