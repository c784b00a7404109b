"""Blue's observation. For compiled code.

The observation has four bits per host: two of activity, which last one step, and two of blue's
belief, which persist.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge2.rules import codes
from vecenv.cage.challenge2.rules.bits import ONE, ZERO, count
from vecenv.jit import write_bits

_MANY = np.uint64(codes.MANY)
_MANY_EVENTS = np.uint64(codes.MANY_EVENTS)
_SHELL_SEEN = np.uint64(codes.SHELL_SEEN)
_DECOY_PLACED = np.uint64(codes.DECOY_PLACED)
_BELIEF_BITS = np.uint64(codes.BELIEF_BITS)
_BELIEF_UNKNOWN = np.uint64(codes.BELIEF_UNKNOWN)
_BELIEF_USER = np.uint64(codes.BELIEF_USER)
_BELIEF_PRIVILEGED = np.uint64(codes.BELIEF_PRIVILEGED)
_BITS_PER_HOST = np.uint64(codes.BITS_PER_HOST)
_NUM_BITS = np.uint64(64)
_ALL_BELIEFS = np.uint64(codes.BELIEF_BITS * 0x1111111111111111)


@njit
def believe_cleaned(state, host):
    """Set blue's belief after a Restore of host uint64: the host is clean."""
    shift = host * _BITS_PER_HOST
    state.obs_bits = np.uint64(state.obs_bits) & ~(_BELIEF_BITS << shift)


@njit
def believe_removed(state, host):
    """Set blue's belief after Remove on host uint64: unknown, unless it was clean."""
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
    """Set the activity of host uint64 from its events; an exploit also changes the belief.

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
    if activity == codes.ACTIVITY_EXPLOIT:
        bits = (bits & ~(_BELIEF_BITS << shift)) | (_BELIEF_USER << shift)
    state.obs_bits = bits


@njit
def show_found(state, found):
    """Set the belief privileged for the host in `found` uint64, where Analyse found a tool."""
    if found != ZERO:
        shift = count(found - ONE) * _BITS_PER_HOST
        state.obs_bits = np.uint64(state.obs_bits) | (_BELIEF_PRIVILEGED << shift)


@njit
def observe(state, out, tables):
    """Write the observation: `out` (4 * hosts,) of any number type, values 0 and 1."""
    num_bits = min(np.uint64(out.shape[0]), _NUM_BITS)
    write_bits(np.uint64(state.obs_bits), num_bits, out)
