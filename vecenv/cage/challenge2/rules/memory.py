"""What a watchful blue remembers of an episode, for the extended observation. For compiled code.

It rests on the activity in the observation and on blue's own actions only.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge2.rules.bits import count, every_fourth
from vecenv.cage.challenge2.rules.codes import B_LINE, BITS_PER_HOST, MAX_HOSTS, MEANDER, NO_RED
from vecenv.cage.challenge2.rules.observation import write_bits

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_TWO = np.uint64(2)
_NOT_SLEEP = ~np.uint64(1 << NO_RED)
_NOT_B_LINE = ~np.uint64(1 << B_LINE)
_NOT_MEANDER = ~np.uint64(1 << MEANDER)
_AGENTS = (np.uint64(B_LINE), np.uint64(MEANDER), np.uint64(NO_RED))
_NUM_AGENTS = 3


@njit
def remember_scans(state, placed, tables):
    """Update blue's memory after a step; `placed` uint64 is the set of hosts it put a decoy on."""
    bits = np.uint64(state.obs_bits)
    active = every_fourth(bits)  # of a scan the first bit is set, of an exploit the second too
    scanned = active & ~every_fourth(bits >> _ONE)
    if scanned != _ZERO:
        state.seen_last = scanned
    if tables.green_hosts == _ZERO:  # else all that is seen may be green's
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
    if active != _ZERO:
        fits &= _NOT_SLEEP
    first_hosts = np.uint64(tables.plan_first_hosts)
    is_off_plan = (active & ~np.uint64(tables.plan_hosts)) != _ZERO
    if is_off_plan or count((seen | active) & first_hosts) > _ONE:
        fits &= _NOT_B_LINE
    if step == _ZERO and active != _ZERO:
        fits &= _NOT_B_LINE & _NOT_MEANDER
    if step > _ZERO and step == np.uint64(tables.plan_scan_step):
        is_hidden = active == _ZERO and (placed & first_hosts) != _ZERO
        if (scanned & first_hosts) == _ZERO and not is_hidden:
            fits &= _NOT_B_LINE
    if step > _ZERO and step <= np.uint64(tables.meander_scans):
        near = np.uint64(tables.subnet_hosts[first_subnet(tables)])
        is_hidden = active == _ZERO and (placed & near) != _ZERO
        if (scanned & near & ~seen) == _ZERO and not is_hidden:
            fits &= _NOT_MEANDER
    return fits


@njit
def first_subnet(tables):
    """Index uint64 of the subnet that red starts in."""
    return count(np.uint64(tables.foothold_subnets) - _ONE)


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
        was_last = (last >> host) & _ONE
        out[start + host] = was_last * _TWO + ((scanned >> host) & ~was_last & _ONE)
        out[start + num_hosts + host] = count(np.uint64(state.decoys[host]))
    start += num_hosts + num_hosts
    for index in range(_NUM_AGENTS):
        agent = _AGENTS[index]
        out[start + np.uint64(index)] = (np.uint64(state.fits) >> agent) & _ONE
