"""The red agents, for compiled code.

An agent decides in three stages, which serve both replays of recorded episodes and free runs. Its
*options* are a kind of action and the set of possible targets (this updates its memory with the
last result). Then a target is drawn, and the agent *commits* to it. All stages use only red's
knowledge: its memory, its discoveries, and whether its last action succeeded.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge2.rules import codes
from vecenv.cage.challenge2.rules.bits import ONE, ZERO, count, lowest, nth, only
from vecenv.jit.random import integers_at

_PLAN_BITS = np.uint64(codes.MAX_PLAN_STEPS - 1)
_NO_HOST = np.uint64(codes.MAX_HOSTS)
_RED_SLEEP, _SWEEP, _SCAN, _EXPLOIT, _ESCALATE, _IMPACT = map(
    np.uint64,
    (codes.RED_SLEEP, codes.SWEEP, codes.SCAN, codes.EXPLOIT, codes.ESCALATE, codes.IMPACT),
)


@njit
def b_line_options(state, tables):
    """Return B_line's options: (kind of red action, set of targets), both uint64."""
    last_step = np.uint64(state.plan_step) & _PLAN_BITS
    if state.red_success == codes.SUCCEEDED:
        step = min(last_step + ONE, np.uint64(tables.plan_last))
    else:
        step = np.uint64(tables.plan_on_failure[last_step])
    if (
        step == tables.plan_verify_step
        and state.has_verified == ZERO
        and state.scan_was_empty != ZERO
    ):
        step = np.uint64(tables.plan_restart_step)
    step &= _PLAN_BITS
    state.plan_step = step
    target = tables.plan_target[np.uint64(state.first_host) & codes.HOST_BITS, step]
    targets = only(np.uint64(target))
    if step == tables.plan_draw_step and state.first_host == _NO_HOST:
        targets = np.uint64(tables.plan_first_hosts)
    return np.uint64(tables.plan_type[step]), targets


@njit
def b_line_commit(state, target, tables):
    """Record the target uint64 of B_line's move in its memory."""
    if state.plan_step == tables.plan_draw_step and state.first_host == _NO_HOST:
        state.first_host = target
    if state.plan_step == tables.plan_verify_step:
        state.has_verified = ONE


@njit
def meander_digest(state, tables):
    """Update Meander's memory with the success or failure of its last action."""
    exploited = np.uint64(state.last_exploited)
    if exploited != ZERO:
        state.last_exploited = ZERO
        if state.red_success == codes.SUCCEEDED:
            state.mapped = np.uint64(state.mapped) | exploited
        else:
            escalated = np.uint64(state.escalated_hosts)
            given_up = escalated & np.uint64(tables.forget_first)
            if given_up == ZERO:
                given_up = escalated & np.uint64(tables.forget_next)
            state.escalated_hosts = escalated & ~given_up
            state.exploited_ips = np.uint64(state.exploited_ips) & ~(given_up | exploited)
    escalated = np.uint64(state.last_escalated)
    if escalated != ZERO:
        state.last_escalated = ZERO
        if state.red_success == codes.FAILED:
            state.escalated_hosts = np.uint64(state.escalated_hosts) & ~escalated
            away = ~(escalated & np.uint64(state.mapped))
            state.exploited_ips = np.uint64(state.exploited_ips) & away


@njit
def meander_options(state, tables):
    """Return Meander's options: (kind of red action, set of targets), both uint64."""
    meander_digest(state, tables)
    escalated = np.uint64(state.escalated_hosts)
    exploited = np.uint64(state.exploited_ips)
    known_ip = np.uint64(state.known_ip)
    targets = escalated & np.uint64(tables.service_hosts)
    if targets != ZERO:
        return _IMPACT, targets
    unswept = np.uint64(state.known_subnet) & ~np.uint64(state.scanned_subnets)
    if unswept != ZERO:
        return _SWEEP, lowest(unswept)
    targets = known_ip & ~np.uint64(state.scanned_ips)
    if targets != ZERO:
        return _SCAN, targets
    entered = ~np.uint64(state.mapped) | exploited
    targets = np.uint64(state.known_host) & ~escalated & entered
    if targets != ZERO:
        return _ESCALATE, targets
    targets = known_ip & ~exploited
    if targets != ZERO:
        return _EXPLOIT, targets
    return _RED_SLEEP, ZERO


@njit
def meander_commit(state, red_type, target, tables):
    """Record Meander's move in its memory: kind of red action and target, both uint64."""
    here = only(target)
    if red_type == _SWEEP:
        state.scanned_subnets = np.uint64(state.scanned_subnets) | here
    elif red_type == _SCAN:
        state.scanned_ips = np.uint64(state.scanned_ips) | here
    elif red_type == _EXPLOIT:
        state.exploited_ips = np.uint64(state.exploited_ips) | here
        state.last_exploited = here
    elif red_type == _ESCALATE:
        state.escalated_hosts = np.uint64(state.escalated_hosts) | here
        state.last_escalated = here
    elif red_type == _IMPACT:
        state.last_escalated = here


@njit
def red_options(state, tables):
    """Return the options of the env's agent: (kind of red action, set of targets), both uint64.

    The set is empty for Sleep.
    """
    if state.red_agent == codes.B_LINE:
        return b_line_options(state, tables)
    if state.red_agent == codes.MEANDER:
        return meander_options(state, tables)
    return _RED_SLEEP, ZERO


@njit
def red_commit(state, red_type, target, tables):
    """Record the move of the env's agent in its memory: kind and target, both uint64."""
    target = target & codes.HOST_BITS
    if state.red_agent == codes.B_LINE:
        b_line_commit(state, target, tables)
    elif state.red_agent == codes.MEANDER:
        meander_commit(state, red_type, target, tables)


@njit
def red_policy(state, rng, tables):
    """Return the action of the env's agent: (kind of red action, target), both uint64."""
    red_type, targets = red_options(state, tables)
    target = nth(targets, np.uint64(integers_at(rng, codes.RED_TARGET_SLOT, count(targets))))
    red_commit(state, red_type, target, tables)
    return red_type, target
