"""Blue's turn, for compiled code."""

import numpy as np
from numba import njit

from vecenv.cage.challenge2.rules.bits import only
from vecenv.cage.challenge2.rules.codes import (
    ANALYSE,
    DECOY,
    FAILED,
    MAX_COUNT,
    MAX_HOSTS,
    REMOVE,
    RESTORE,
)
from vecenv.cage.challenge2.rules.observation import believe_cleaned, believe_removed
from vecenv.cage.challenge2.rules.sessions import end_all, end_removable

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_HOST_BITS = np.uint64(MAX_HOSTS - 1)
_FULL = np.uint64(MAX_COUNT)
_DECOY = np.uint64(DECOY)
_FAILED = np.uint64(FAILED)


@njit(forceinline=True)
def ports_in_use(state, host, tables):
    """Set uint64 of tracked ports that listen on host uint64: genuine ones and decoys."""
    decoys = np.uint64(state.decoys[host])
    return np.uint64(tables.genuine_ports[host]) | np.uint64(tables.decoy_ports[decoys])


@njit(forceinline=True)
def placeable_decoys(state, host, tables):
    """Set uint64 of decoys that can be placed on host uint64 now."""
    ports = ports_in_use(state, host, tables)
    return np.uint64(tables.allowed_decoys[host]) & ~np.uint64(tables.refused_decoys[ports])


@njit(forceinline=True)
def place_decoy(state, host, decoy, tables):
    """Place a decoy on host uint64 if it can be; return the set uint64 of decoys placed.

    Without a branch: whether blue's action succeeds cannot be predicted, and a wrong guess of the
    processor costs more than all that is done here. `decoy` is a set uint64 of at most one.
    """
    placed = decoy & placeable_decoys(state, host, tables)
    state.decoys[host] = np.uint64(state.decoys[host]) | placed
    is_stacked = (placed & np.uint64(tables.stackable_decoys)) != _ZERO
    num_stacked = np.uint64(state.n_stacked[host])
    state.n_stacked[host] = num_stacked + np.uint64(is_stacked and num_stacked < _FULL)
    return placed


@njit(forceinline=True)
def remove(state, host, tables):
    """Remove on host uint64; return whether it reports success."""
    reports_success = True
    if tables.remove_reports_last_shell != _ZERO:
        reports_success = (np.uint64(state.last_shell) & only(host)) != _ZERO
    end_removable(state, host)
    believe_removed(state, host)
    return reports_success


@njit(forceinline=True)
def restore(state, host, tables):
    """Restore host uint64."""
    here = only(host)
    end_all(state, host, here & np.uint64(tables.footholds))
    state.decoys[host] = _ZERO
    state.n_stacked[host] = _ZERO
    state.malware = np.uint64(state.malware) & ~here
    if host == tables.service_host:
        state.ot_running = _ONE
        state.ot_stoppable = _ZERO
    believe_cleaned(state, host)


@njit(forceinline=True)
def blue_turn(state, action, tables):
    """Carry out blue's action, an integer; one that does not exist is Sleep.

    Returns:
        Two sets uint64 of hosts with at most one member: where a decoy was placed, and where
        Analyse found a dropped tool.
    """
    index = np.uint64(action)
    if index >= np.uint64(tables.num_actions):
        index = _ZERO
    kind = np.uint64(tables.action_kind[index])
    host = np.uint64(tables.action_host[index]) & _HOST_BITS
    here = only(host)
    success = np.uint64(tables.action_success[index])
    decoy = only(kind - _DECOY) if kind >= _DECOY else _ZERO
    is_placed = place_decoy(state, host, decoy, tables) != _ZERO
    if decoy != _ZERO and not is_placed:
        success = _FAILED
    if kind == REMOVE:
        if not remove(state, host, tables):
            success = _FAILED
    elif kind == RESTORE:
        restore(state, host, tables)
    state.blue_action = index
    state.blue_success = success
    found = np.uint64(state.malware) & here if kind == ANALYSE else _ZERO
    return here if is_placed else _ZERO, found
