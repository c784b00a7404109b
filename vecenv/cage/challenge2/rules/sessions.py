"""Red's sessions on one host: adding, ending, escalating. For compiled code.

A host's sessions are three counts and, as far as it matters, their order of creation; see
`STATE_DTYPE`. Counts saturate at MAX_COUNT. The order is kept of the sixteen oldest; if there are
more, the stuck ones among the rest count as older than the removable ones.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge2.rules.bits import count, only
from vecenv.cage.challenge2.rules.codes import MAX_COUNT, PRIVILEGED, REMOVABLE

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_FULL = np.uint64(MAX_COUNT)
_NUM_ORDERED = np.uint64(16)


@njit(forceinline=True)
def with_sessions(state):
    """Set uint64 of hosts on which red has any session."""
    return np.uint64(state.has_removable) | np.uint64(state.has_stuck) | np.uint64(state.has_priv)


@njit(forceinline=True)
def num_user_sessions(state, host):
    """Number uint64 of red's sessions on host uint64 that are not privileged."""
    return np.uint64(state.n_removable[host]) + np.uint64(state.n_stuck[host])


@njit(forceinline=True)
def add_session(state, host, kind):
    """Append a session of `kind` REMOVABLE, STUCK or PRIVILEGED on host uint64."""
    here = only(host)
    num_before = num_user_sessions(state, host)
    word = np.uint64(state.order_or_n_priv[host])
    is_ordered = (np.uint64(state.has_priv) & here) == _ZERO
    if kind == PRIVILEGED:
        if is_ordered:
            _begin_privileged(state, host, num_before)
        elif word < _FULL:
            state.order_or_n_priv[host] = word + _ONE
    elif kind == REMOVABLE:
        if is_ordered and num_before < _NUM_ORDERED:
            state.order_or_n_priv[host] = word | only(num_before)
        state.has_removable = np.uint64(state.has_removable) | here
        if state.n_removable[host] < _FULL:
            state.n_removable[host] = np.uint64(state.n_removable[host]) + _ONE
    else:
        state.has_stuck = np.uint64(state.has_stuck) | here
        if state.n_stuck[host] < _FULL:
            state.n_stuck[host] = np.uint64(state.n_stuck[host]) + _ONE


@njit(forceinline=True)
def _begin_privileged(state, host, num_older):
    """Go over to counting: the first privileged session has `num_older` uint64 before it."""
    here = only(host)
    num_older = min(num_older, _NUM_ORDERED)
    older = np.uint64(state.order_or_n_priv[host]) & (only(num_older) - _ONE)
    if older != _ZERO:
        state.removable_first = np.uint64(state.removable_first) | here
    if count(older) < num_older:
        state.stuck_first = np.uint64(state.stuck_first) | here
    state.has_priv = np.uint64(state.has_priv) | here
    state.order_or_n_priv[host] = _ONE


@njit(forceinline=True)
def escalate_session(state, host, index):
    """Make session `index` uint64 of host uint64 privileged; it exists, and none is yet."""
    here = only(host)
    order = np.uint64(state.order_or_n_priv[host])
    num_removable = np.uint64(state.n_removable[host])
    if index < _NUM_ORDERED:
        is_removable = ((order >> index) & _ONE) == _ONE
        is_last = (order >> index) <= _ONE  # no removable one after it
    else:
        is_removable = index + num_removable >= num_user_sessions(state, host) + count(order)
        is_last = index + _ONE == num_user_sessions(state, host)
    if is_removable and is_last:
        state.last_shell = np.uint64(state.last_shell) & ~here
    _begin_privileged(state, host, index)
    if is_removable:
        state.n_removable[host] = num_removable - _ONE
        if num_removable == _ONE:
            state.has_removable = np.uint64(state.has_removable) & ~here
    else:
        num_stuck = np.uint64(state.n_stuck[host])
        state.n_stuck[host] = num_stuck - _ONE
        if num_stuck == _ONE:
            state.has_stuck = np.uint64(state.has_stuck) & ~here


@njit(forceinline=True)
def end_removable(state, host):
    """End the removable sessions on host uint64; the stuck ones that remain are in order anyhow."""
    away = ~only(host)
    state.has_removable = np.uint64(state.has_removable) & away
    state.removable_first = np.uint64(state.removable_first) & away
    state.last_shell = np.uint64(state.last_shell) & away
    state.n_removable[host] = _ZERO
    if (np.uint64(state.has_priv) & ~away) == _ZERO:
        state.order_or_n_priv[host] = _ZERO


@njit(forceinline=True)
def end_all(state, host, footholds):
    """End all sessions on host uint64 but the primary one, if the host is in `footholds` uint64."""
    away = ~only(host)
    end_removable(state, host)
    state.has_stuck = np.uint64(state.has_stuck) & away
    state.stuck_first = np.uint64(state.stuck_first) & away
    state.n_stuck[host] = _ZERO
    state.has_priv = (np.uint64(state.has_priv) & away) | footholds
    state.order_or_n_priv[host] = (footholds >> host) & _ONE
