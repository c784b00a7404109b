"""What blue sees, and what of it a watchful blue remembers. For compiled code.

The observation is kept as bits, four per host: two of activity, which last one step, and two of
what blue believes, which stay. The extended observation adds what can be remembered; that rests on
the activity in the observation and on blue's own actions only.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge2.rules.bits import ONE, TWO, ZERO, count, every_fourth
from vecenv.cage.challenge2.rules.codes import (
    ACTIVITY_EXPLOIT,
    B_LINE,
    BELIEF_BITS,
    BELIEF_PRIVILEGED,
    BELIEF_UNKNOWN,
    BELIEF_USER,
    BITS_PER_HOST,
    DECOY_PLACED,
    MANY,
    MANY_EVENTS,
    MAX_HOSTS,
    MEANDER,
    NO_RED,
    SHELL_SEEN,
)
from vecenv.jit.copying import write_bits

_MANY = np.uint64(MANY)
_MANY_EVENTS = np.uint64(MANY_EVENTS)
_SHELL_SEEN = np.uint64(SHELL_SEEN)
_DECOY_PLACED = np.uint64(DECOY_PLACED)
_BELIEF_BITS = np.uint64(BELIEF_BITS)
_BELIEF_UNKNOWN = np.uint64(BELIEF_UNKNOWN)
_BELIEF_USER = np.uint64(BELIEF_USER)
_BELIEF_PRIVILEGED = np.uint64(BELIEF_PRIVILEGED)
_BITS_PER_HOST = np.uint64(BITS_PER_HOST)
_NUM_BITS = np.uint64(64)
_ALL_BELIEFS = np.uint64(BELIEF_BITS * 0x1111111111111111)
_NOT_SLEEP = ~np.uint64(1 << NO_RED)
_NOT_B_LINE = ~np.uint64(1 << B_LINE)
_NOT_MEANDER = ~np.uint64(1 << MEANDER)
_AGENTS = (np.uint64(B_LINE), np.uint64(MEANDER), np.uint64(NO_RED))
_NUM_AGENTS = 3


@njit
def believe_cleaned(state, host):
    """Blue restored host uint64: it believes it clean."""
    shift = host * _BITS_PER_HOST
    state.obs_bits = np.uint64(state.obs_bits) & ~(_BELIEF_BITS << shift)


@njit
def believe_removed(state, host):
    """Blue used Remove on host uint64: it no longer knows, unless it believed it clean."""
    shift = host * _BITS_PER_HOST
    bits = np.uint64(state.obs_bits)
    if (bits & (_BELIEF_BITS << shift)) != ZERO:
        state.obs_bits = (bits & ~(_BELIEF_BITS << shift)) | (_BELIEF_UNKNOWN << shift)


@njit
def clear_activity(state):
    """Forget the last step's activity; beliefs stay."""
    state.obs_bits = np.uint64(state.obs_bits) & _ALL_BELIEFS


@njit
def show_activity(state, host, num_events, num_ports, is_shell_seen, placed, tables):
    """Turn the events on host uint64 into activity, and an exploit into a belief.

    Args:
        num_events, num_ports: uint64; network events on the host, and distinct local ports of them.
        is_shell_seen: Whether one of them shows a reverse shell.
        placed: Set uint64 of hosts on which a decoy was placed in this step.
    """
    is_placed = (placed >> host) & ONE
    index = min(num_ports, _MANY) | (is_placed * _DECOY_PLACED)
    if num_events + is_placed >= _MANY:
        index |= _MANY_EVENTS
    if is_shell_seen:
        index |= _SHELL_SEEN
    activity = np.uint64(tables.activity[index])
    shift = host * _BITS_PER_HOST
    bits = np.uint64(state.obs_bits) | (activity << shift)
    if activity == ACTIVITY_EXPLOIT:
        bits = (bits & ~(_BELIEF_BITS << shift)) | (_BELIEF_USER << shift)
    state.obs_bits = bits


@njit
def show_found(state, found):
    """Blue's Analyse found a dropped tool on the host in `found` uint64, a set of at most one."""
    if found != ZERO:
        shift = count(found - ONE) * _BITS_PER_HOST
        state.obs_bits = np.uint64(state.obs_bits) | (_BELIEF_PRIVILEGED << shift)


@njit
def observe(state, out, tables):
    """Write the observation: `out` (4 * hosts,) of any number type, values 0 and 1."""
    num_bits = min(np.uint64(out.shape[0]), _NUM_BITS)
    write_bits(np.uint64(state.obs_bits), num_bits, out)


@njit
def remember_scans(state, placed, tables):
    """Update blue's memory after a step; `placed` uint64 is the set of hosts it put a decoy on."""
    bits = np.uint64(state.obs_bits)
    active = every_fourth(bits)  # of a scan the first bit is set, of an exploit the second too
    scanned = active & ~every_fourth(bits >> ONE)
    if scanned != ZERO:
        state.seen_last = scanned
    if tables.green_hosts == ZERO:  # else all that is seen may be green's
        state.fits = still_fit(state, active, scanned, placed, tables)
    state.seen_scanned = np.uint64(state.seen_scanned) | scanned
    state.seen_active = np.uint64(state.seen_active) | active


@njit
def still_fit(state, active, scanned, placed, tables):
    """Set uint64 of agents that can have done what blue has seen in this step and before.

    Args:
        active, scanned: Sets uint64 of hosts with any activity, and with Scan.
        placed: Set uint64 of hosts on which blue placed a decoy, which can hide a scan.
    """
    fits = np.uint64(state.fits)
    step = np.uint64(state.step)
    seen = np.uint64(state.seen_active)
    if active != ZERO:
        fits &= _NOT_SLEEP
    first_hosts = np.uint64(tables.plan_first_hosts)
    is_off_plan = (active & ~np.uint64(tables.plan_hosts)) != ZERO
    if is_off_plan or count((seen | active) & first_hosts) > ONE:
        fits &= _NOT_B_LINE
    if step == ZERO and active != ZERO:
        fits &= _NOT_B_LINE & _NOT_MEANDER
    if step > ZERO and step == np.uint64(tables.plan_scan_step):
        is_hidden = active == ZERO and (placed & first_hosts) != ZERO
        if (scanned & first_hosts) == ZERO and not is_hidden:
            fits &= _NOT_B_LINE
    if step > ZERO and step <= np.uint64(tables.meander_scans):
        near = np.uint64(tables.subnet_hosts[first_subnet(tables)])
        is_hidden = active == ZERO and (placed & near) != ZERO
        if (scanned & near & ~seen) == ZERO and not is_hidden:
            fits &= _NOT_MEANDER
    return fits


@njit
def first_subnet(tables):
    """Index uint64 of the subnet that red starts in."""
    return count(np.uint64(tables.foothold_subnets) - ONE)


@njit
def observe_extended(state, out, tables):
    """Write the extended observation, for H hosts 6 * H + 3 numbers.

    They are: the plain observation (4 * H); for each host 2 if it was among the last seen scanned,
    1 if it was before, else 0 (H); the number of different decoys on each host (H); whether
    B_line, Meander and no red at all fit what was seen (3).
    """
    num_hosts = min(np.uint64(tables.num_hosts), np.uint64(MAX_HOSTS))
    start = num_hosts * np.uint64(BITS_PER_HOST)
    if np.uint64(out.shape[0]) < start + num_hosts + num_hosts + np.uint64(_NUM_AGENTS):
        return
    write_bits(np.uint64(state.obs_bits), start, out)
    scanned, last = np.uint64(state.seen_scanned), np.uint64(state.seen_last)
    for index in range(num_hosts):
        host = np.uint64(index)
        was_last = (last >> host) & ONE
        out[start + host] = was_last * TWO + ((scanned >> host) & ~was_last & ONE)
        out[start + num_hosts + host] = count(np.uint64(state.decoys[host]))
    start += num_hosts + num_hosts
    for index in range(_NUM_AGENTS):
        agent = _AGENTS[index]
        out[start + np.uint64(index)] = (np.uint64(state.fits) >> agent) & ONE
