"""The effects of blue's actions (SPEC 5), and actions in progress (SPEC 4.3)."""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.bits import has
from vecenv.cage.challenge4.rules.events import log_analyse, log_decoy, log_restore
from vecenv.cage.challenge4.rules.sessions import (
    end_decoys,
    end_session,
    end_sessions_on,
    find_max_pid,
    forget_old_vsftpd,
    new_pid,
    place_decoy,
)


@njit
def acts_on_host(family):
    """Whether actions of this family are aimed at a host."""
    return codes.ANALYSE <= family <= codes.RESTORE or family == codes.DECOY


@njit
def submit(state, agent, action):
    """Submit an agent's action int64; return its cost, int64 <= 0 (SPEC 4.3, 9).

    An action on a missing host, or an index that is not one of the agent's actions, is Sleep.
    """
    family = np.int64(codes.SLEEP)
    target = source = np.int64(0)
    if 0 <= action < codes.MAX_ACTIONS:
        family = codes.ACTION_FAMILY[agent, action]
        target, source = codes.ACTION_TARGET[agent, action], codes.ACTION_SOURCE[agent, action]
        if acts_on_host(family):
            exists = np.int64(state.exists[target >> 4])
            if not has(exists, target & 15):
                family, target = np.int64(codes.SLEEP), np.int64(0)
    left = np.int64(state.blue_left[agent])
    if left == 0:
        state.blue_family[agent] = family
        state.blue_target[agent] = target
        state.blue_source[agent] = source
        left = codes.BLUE_TICKS[family]
    state.blue_left[agent] = left - 1
    state.blue_success[agent] = codes.IN_PROGRESS
    return -codes.RESTORE_COST if family == codes.RESTORE else 0


@njit
def _find_session_by_pid(state, agent, host, pid):
    """Index int64 in the agent's list of its session on `host` with process id `pid`, or -1."""
    for index in range(np.int64(state.num_sessions[agent])):
        is_there = state.session_host[agent, index] == host
        if is_there and state.session_pid[agent, index] == pid:
            return np.int64(index)
    return np.int64(-1)


@njit
def _remove_process(state, host, pid, chance, actor):
    """Do Remove for one suspicious process id (SPEC 5.1)."""
    agent = codes.RED_OF_SUBNET[host >> 4]
    index = _find_session_by_pid(state, agent, host, pid)
    if index >= 0:
        if not np.int64(state.session_flags[agent, index]) & codes.PRIVILEGED:
            end_session(state, agent, index)
        return
    for decoy in range(codes.NUM_DECOYS):
        if state.decoy_pid[host, decoy] == pid:
            state.decoy_pid[host, decoy] = 0
            find_max_pid(state, host)
            state.decoy_pid[host, decoy] = new_pid(state, host, chance, actor)
            return
    if state.num_vsftpd[host] > 1:
        for old in range(np.int64(state.num_old_vsftpd)):
            is_there = state.old_vsftpd_host[old] == host
            if is_there and state.old_vsftpd_pid[old] == pid:
                forget_old_vsftpd(state, old)
                state.num_vsftpd[host] = np.int64(state.num_vsftpd[host]) - 1
                return


@njit
def _remove(state, host, chance, actor):
    """Do Remove on a host."""
    for index in range(np.int64(state.num_suspicious)):
        if state.suspicious_host[index] == host:
            pid = np.int64(state.suspicious_pid[index])
            _remove_process(state, host, pid, chance, actor)


@njit
def bar(state, a, b):
    """Record whether a pair of zones is blocked in either direction (SPEC 6.3)."""
    if a >= codes.NUM_SUBNETS or b >= codes.NUM_SUBNETS:
        return
    is_barred = has(np.int64(state.blocks[a]), b) or has(np.int64(state.blocks[b]), a)
    others_a = np.int64(state.barred[a]) & ~(np.int64(1) << b)
    others_b = np.int64(state.barred[b]) & ~(np.int64(1) << a)
    state.barred[a] = others_a | (np.int64(is_barred) << b)
    state.barred[b] = others_b | (np.int64(is_barred) << a)


@njit
def _set_traffic(state, agent):
    """Carry out AllowTraffic or BlockTraffic."""
    to, bit = np.int64(state.blue_target[agent]), 1 << np.int64(state.blue_source[agent])
    blocked = np.int64(state.blocks[to])
    is_block = state.blue_family[agent] == codes.BLOCK
    changes = (blocked & bit == 0) == is_block
    if changes:
        state.blocks[to] = blocked ^ bit
        bar(state, to, np.int64(state.blue_source[agent]))
    state.blue_success[agent] = codes.SUCCEEDED if changes else codes.FAILED


@njit
def blue_effects(state, chance):
    """Execute the actions that are due: traffic control first, then the others (SPEC 4.5)."""
    for agent in range(codes.NUM_BLUE):
        family = np.int64(state.blue_family[agent])
        if state.blue_left[agent] == 0 and family in (codes.ALLOW, codes.BLOCK):
            _set_traffic(state, agent)
    for agent in range(codes.NUM_BLUE):
        if state.blue_left[agent] != 0:
            continue
        family, host = np.int64(state.blue_family[agent]), np.int64(state.blue_target[agent])
        if family == codes.SLEEP:
            state.blue_success[agent] = codes.UNKNOWN
        elif family == codes.MONITOR:
            state.blue_success[agent] = codes.SUCCEEDED
        elif family == codes.ANALYSE:
            log_analyse(state, agent, host)
            state.blue_success[agent] = codes.SUCCEEDED
        elif family == codes.REMOVE:
            _remove(state, host, chance, agent)
            state.blue_success[agent] = codes.SUCCEEDED
        elif family == codes.RESTORE:
            end_sessions_on(state, host)
            end_decoys(state, host)
            log_restore(state, host)
            state.blue_success[agent] = codes.SUCCEEDED
        elif family == codes.DECOY:
            decoy = place_decoy(state, host, chance, agent)
            log_decoy(state, agent, host, decoy)
            state.blue_success[agent] = codes.SUCCEEDED
