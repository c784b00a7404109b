"""Processes, services and decoys of a host: ids, levels, ports. For compiled code (SPEC 3, 5)."""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules.bits import count, drop_host, put_host
from vecenv.cage.challenge4.rules.codes import (
    APACHE,
    CON,
    DATABASE,
    DECOY_SHIFT,
    DECOY_TYPE,
    EXTRAS,
    FULL,
    HARAKA,
    LEVEL_BITS,
    MAIL,
    MAX_OLD_VSFTPD,
    MAX_SUSPICIOUS,
    NUM_DECOYS,
    OT,
    OT_RUNNING,
    PID_FULL,
    PORT_22,
    PORT_25,
    PORT_80,
    PORT_443,
    PORT_3390,
    PORT_OT,
    RED_OF_SUBNET,
    SUSPICIOUS_FULL,
    TOMCAT,
    VSFTPD,
    VSFTPD_FULL,
    WEB,
)
from vecenv.cage.challenge4.rules.draws import draw_decoy, draw_pid_step

_MAX_PID = 65535


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
    if host >> 4 == CON:  # nobody looks there
        return
    index = np.int64(state.num_suspicious)
    if index >= MAX_SUSPICIOUS:
        state.overflow = np.int64(state.overflow) | SUSPICIOUS_FULL
        return
    state.suspicious_host[index] = host
    state.suspicious_pid[index] = pid
    state.num_suspicious = index + 1


@njit
def new_pid(state, host, chance, actor):
    """Draw the id int64 of a new process on a host."""
    pid = np.int64(state.max_pid[host]) + draw_pid_step(chance, actor)
    if pid > _MAX_PID:
        state.overflow = np.int64(state.overflow) | PID_FULL
        pid = np.int64(_MAX_PID)
    state.max_pid[host] = pid
    return pid


@njit
def find_max_pid(state, host):
    """Find the largest id of a host anew, after a process has gone."""
    largest = np.int64(0)
    agent = RED_OF_SUBNET[host >> 4]
    for index in range(np.int64(state.num_sessions[agent])):
        if state.session_host[agent, index] == host:
            largest = max(largest, np.int64(state.session_pid[agent, index]))
    for decoy in range(NUM_DECOYS):
        largest = max(largest, np.int64(state.decoy_pid[host, decoy]))
    if state.num_vsftpd[host] > 1:
        for index in range(np.int64(state.num_old_vsftpd)):
            if state.old_vsftpd_host[index] == host:
                largest = max(largest, np.int64(state.old_vsftpd_pid[index]))
    state.max_pid[host] = largest


@njit
def decoy_level(state, host, decoy):
    """Level int64 of a decoy service, 0..5."""
    return (np.int64(state.svc[host]) >> (DECOY_SHIFT + 3 * decoy)) & LEVEL_BITS


@njit
def set_decoy_level(state, host, decoy, level):
    """Set the level of a decoy service."""
    shift = DECOY_SHIFT + 3 * decoy
    word = np.int64(state.svc[host]) & ~(LEVEL_BITS << shift)
    state.svc[host] = word | (level << shift)


@njit
def num_genuine(state, host):
    """Number int64 of genuine services that run on a host."""
    services = np.int64(state.services[host])
    ot_running = (np.int64(state.svc[host]) & OT_RUNNING) >> 3
    return 1 + ot_running + count(services & EXTRAS)


@njit
def open_ports(state, host):
    """Set int64 of ports that a scan of a host finds (SPEC_RED 2)."""
    services, decoys = np.int64(state.services[host]), np.int64(state.decoys[host])
    ports = np.int64(PORT_22)
    if services & WEB or decoys & ((1 << APACHE) | (1 << VSFTPD)):
        ports |= PORT_80
    if decoys & (1 << TOMCAT):
        ports |= PORT_443
    if services & DATABASE:
        ports |= PORT_3390
    if services & MAIL or decoys & (1 << HARAKA):
        ports |= PORT_25
    if np.int64(state.svc[host]) & OT_RUNNING:
        ports |= PORT_OT
    return ports


@njit
def possible_decoys(state, host):
    """Set int64 of decoys that can be placed on a host (SPEC 1.5)."""
    ports = open_ports(state, host)
    possible = np.int64(1 << VSFTPD)
    if not ports & PORT_80:
        possible |= 1 << APACHE
    if not ports & PORT_443:
        possible |= 1 << TOMCAT
    if not ports & PORT_25:
        possible |= 1 << HARAKA
    return possible


@njit
def find_degraded(state, host):
    """Note whether any service of a host is below 100 %."""
    word = np.int64(state.svc[host])
    is_degraded = word & LEVEL_BITS != FULL
    for decoy in range(NUM_DECOYS):
        if np.int64(state.decoys[host]) >> decoy & 1 and decoy_level(state, host, decoy) != FULL:
            is_degraded = True
    subnet, bit = host >> 4, 1 << (host & 15)
    others = np.int64(state.degraded[subnet]) & ~bit
    state.degraded[subnet] = others | bit if is_degraded else others


@njit
def place_decoy(state, host, chance, actor):
    """Do DeployDecoy on a host (SPEC 5.3); return the decoy int64."""
    possible = possible_decoys(state, host)
    decoy = draw_decoy(chance, DECOY_TYPE, actor, possible, count(possible))
    pid = new_pid(state, host, chance, actor)
    decoys = np.int64(state.decoys[host])
    if decoys >> decoy & 1 == 0:
        order = np.int64(state.decoy_order[host])
        state.decoy_order[host] = order | (decoy << (2 * count(decoys)))
        state.decoys[host] = decoys | (1 << decoy)
    elif decoy == VSFTPD:  # replaces the service of the one before, whose process stays
        index = np.int64(state.num_old_vsftpd)
        if index >= MAX_OLD_VSFTPD:
            state.overflow = np.int64(state.overflow) | VSFTPD_FULL
        else:
            state.old_vsftpd_host[index] = host
            state.old_vsftpd_pid[index] = state.decoy_pid[host, VSFTPD]
            state.num_old_vsftpd = index + 1
    if decoy == VSFTPD:
        state.num_vsftpd[host] = np.int64(state.num_vsftpd[host]) + 1
    state.decoy_pid[host, decoy] = pid
    set_decoy_level(state, host, decoy, FULL)
    find_degraded(state, host)
    return decoy


@njit
def degrade(state, host):
    """Lower the level of all services of a host by one step (SPEC_RED 2)."""
    word = np.int64(state.svc[host])
    if word & LEVEL_BITS:
        word -= 1
    for decoy in range(NUM_DECOYS):
        shift = DECOY_SHIFT + 3 * decoy
        if (word >> shift) & LEVEL_BITS:
            word -= 1 << shift
    state.svc[host] = word
    find_degraded(state, host)


@njit
def forget_old_vsftpd(state, index):
    """Take an old vsftpd process out of the list."""
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
    for decoy in range(NUM_DECOYS):
        state.decoy_pid[host, decoy] = 0
    has_ot = np.int64(state.services[host]) & OT != 0
    state.svc[host] = FULL | (OT_RUNNING if has_ot else 0)
    drop_host(state.degraded, host)
    state.max_pid[host] = 0
