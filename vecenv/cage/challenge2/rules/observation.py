"""What blue sees: activity, belief, the values of the observation. For compiled code.

The observation is kept as bits, four per host: two of activity, which last one step, and two of
what blue believes, which stay.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge2.rules.bits import count
from vecenv.cage.challenge2.rules.codes import (
    ACTIVITY_BITS,
    ACTIVITY_EXPLOIT,
    BELIEF_BITS,
    BELIEF_PRIVILEGED,
    BELIEF_UNKNOWN,
    BELIEF_USER,
    BITS_PER_HOST,
    DECOY_PLACED,
    MANY,
    MANY_EVENTS,
    SHELL_SEEN,
)

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_MANY = np.uint64(MANY)
_MANY_EVENTS = np.uint64(MANY_EVENTS)
_SHELL_SEEN = np.uint64(SHELL_SEEN)
_DECOY_PLACED = np.uint64(DECOY_PLACED)
_ACTIVITY_BITS = np.uint64(ACTIVITY_BITS)
_BELIEF_BITS = np.uint64(BELIEF_BITS)
_BELIEF_UNKNOWN = np.uint64(BELIEF_UNKNOWN)
_BELIEF_USER = np.uint64(BELIEF_USER)
_BELIEF_PRIVILEGED = np.uint64(BELIEF_PRIVILEGED)
_BITS_PER_HOST = np.uint64(BITS_PER_HOST)
_BYTE_SHIFT = np.uint64(3)
_EIGHT = np.uint64(8)
_BYTE = np.uint64(255)
_NUM_BITS = np.uint64(64)
_BITS_OF_BYTE = (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.float32)
_ALL_BELIEFS = np.uint64(BELIEF_BITS * 0x1111111111111111)


@njit(forceinline=True)
def believe_cleaned(state, host):
    """Blue restored host uint64: it believes it clean."""
    shift = host * _BITS_PER_HOST
    state.obs_bits = np.uint64(state.obs_bits) & ~(_BELIEF_BITS << shift)


@njit(forceinline=True)
def believe_removed(state, host):
    """Blue used Remove on host uint64: it no longer knows, unless it believed it clean."""
    shift = host * _BITS_PER_HOST
    bits = np.uint64(state.obs_bits)
    if (bits & (_BELIEF_BITS << shift)) != _ZERO:
        state.obs_bits = (bits & ~(_BELIEF_BITS << shift)) | (_BELIEF_UNKNOWN << shift)


@njit(forceinline=True)
def clear_activity(state):
    """Forget the last step's activity; beliefs stay."""
    state.obs_bits = np.uint64(state.obs_bits) & _ALL_BELIEFS


@njit(forceinline=True)
def show_activity(state, host, num_events, num_ports, is_shell_seen, placed, tables):
    """Turn the events on host uint64 into activity, and an exploit into a belief.

    Args:
        num_events, num_ports: uint64; network events on the host, and distinct local ports of them.
        is_shell_seen: Whether one of them shows a reverse shell.
        placed: Set uint64 of hosts on which a decoy was placed in this step.
    """
    is_placed = (placed >> host) & _ONE
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


@njit(forceinline=True)
def show_found(state, found):
    """Blue's Analyse found a dropped tool on the host in `found` uint64, a set of at most one."""
    if found != _ZERO:
        shift = count(found - _ONE) * _BITS_PER_HOST
        state.obs_bits = np.uint64(state.obs_bits) | (_BELIEF_PRIVILEGED << shift)


@njit(forceinline=True)
def write_bits(bits, num_bits, out):
    """Write the lowest num_bits uint64 bits of a uint64 to the front of `out`, as numbers 0 and 1.

    `out` has room for them. Bytes are looked up in a table: that is one wide load and store each.
    """
    num_bytes = num_bits >> _BYTE_SHIFT
    for byte in range(num_bytes):
        start = np.uint64(byte) << _BYTE_SHIFT
        for bit in range(8):
            out[start + np.uint64(bit)] = _BITS_OF_BYTE[bits & _BYTE, np.uint64(bit)]
        bits >>= _EIGHT
    start = num_bytes << _BYTE_SHIFT
    for bit in range(num_bits - start):
        out[start + np.uint64(bit)] = _BITS_OF_BYTE[bits & _BYTE, np.uint64(bit)]


@njit(forceinline=True)
def observe(state, out, tables):
    """Write the observation: `out` (4 * hosts,) of any number type, values 0 and 1."""
    num_bits = min(np.uint64(out.shape[0]), _NUM_BITS)
    write_bits(np.uint64(state.obs_bits), num_bits, out)
