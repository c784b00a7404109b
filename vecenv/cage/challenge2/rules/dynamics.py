"""The red agents, and one step: blue's turn, red's turn, reward, observation. For compiled code.

All functions take one environment's state record. `apply` defines the rules: it takes red's action
and all random outcomes. `reset` and `step`, the kernels that `vecenv.jit` runs, draw them.

A red agent decides in three stages, which serve both replays of recorded episodes and free runs.
Its *options* are a kind of action and the set of possible targets (this updates its memory with the
last result). Then a target is drawn, and the agent *commits* to it. All stages use only red's
knowledge: its memory, its discoveries, and whether its last action succeeded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from vecenv.cage.challenge2.rules import codes
from vecenv.cage.challenge2.rules.actions import (
    ALL_BELIEFS,
    ONE,
    ZERO,
    blue_turn,
    count,
    exploit_candidates,
    listeners,
    lowest,
    nth,
    num_user_sessions,
    only,
    placeable_decoys,
    red_action,
    show_activity,
    show_found,
    with_sessions,
)
from vecenv.jit.random import integers_at, word_at

_BYTE = np.uint64(255)
_EIGHT = np.uint64(8)
_LOW, _HIGH = np.uint64(0), np.uint64(1)  # halves of a set of hosts
_NONE = np.int64(codes.NONE)
_LENGTH_BITS = np.uint64(codes.MAX_LENGTHS - 1)
_LAST_STEP = np.uint64(65535)
_TEN = 10.0
_HALF_WORD = np.uint64(32)
_NO_SUCH_TYPE = np.uint64(codes.IMPACT + 1)


@njit
def begin_episode(state, tables):
    """Set the state to the start of an episode; `red_agent` does not change."""
    footholds = np.uint64(tables.footholds)
    state.obs_bits = ZERO
    state.known_ip = state.known_host = footholds
    state.known_subnet = tables.foothold_subnets
    state.scanned = state.malware = ZERO
    state.has_removable = state.has_stuck = ZERO
    state.has_priv = footholds
    state.removable_first = state.stuck_first = state.last_shell = ZERO
    state.scanned_ips = state.exploited_ips = state.escalated_hosts = state.mapped = ZERO
    state.last_exploited = state.last_escalated = ZERO
    state.scanned_subnets = state.plan_step = state.has_verified = state.scan_was_empty = ZERO
    state.first_host = codes.MAX_HOSTS
    state.ot_running = state.ot_stoppable = ONE
    state.ot_known = ZERO
    state.step = state.reward10 = ZERO
    state.blue_action = ZERO
    state.blue_success = state.red_success = codes.UNKNOWN
    state.red_type = codes.RED_SLEEP
    state.red_target = state.red_exploit = state.red_detected = state.red_pe_index = codes.NONE
    state.green_target = codes.NONE
    for index in range(state.custom.shape[0]):
        state.custom[index] = ZERO
    for host in range(codes.MAX_HOSTS):
        state.red_ports[host] = state.decoys[host] = state.n_stacked[host] = ZERO
        state.n_removable[host] = state.n_stuck[host] = ZERO
        state.order_or_n_priv[host] = (footholds >> np.uint64(host)) & ONE


@njit
def reward_of(state, tables):
    """Return ten times blue's reward for the state, without its action's cost, int64."""
    charged = np.uint64(state.has_priv)
    if tables.charges_user_access != ZERO:
        charged = with_sessions(state)
    cost = np.int64(tables.host_costs[_LOW, charged & _BYTE])
    cost += np.int64(tables.host_costs[_HIGH, (charged >> _EIGHT) & _BYTE])
    if state.ot_running == ZERO:
        cost += np.int64(tables.service_cost)
    return -cost


@njit
def watch(state, red_host, seen, placed, green_target, tables):
    """Show blue the events of this step.

    Args:
        red_host: uint64, the host that red acted on.
        seen: (events on it uint64, distinct ports uint64, whether a reverse shell was seen).
        placed: Set uint64 of hosts on which blue placed a decoy.
        green_target: int64, the host green scanned, or NONE.
    """
    num_events, num_ports, is_shell_seen = seen
    state.obs_bits = np.uint64(state.obs_bits) & ALL_BELIEFS  # the last step's activity is over
    if green_target != codes.NONE:
        green_host = np.uint64(green_target) & codes.HOST_BITS
        more_events, scanned_ports = listeners(state, green_host, tables)
        if green_host != red_host:
            show_activity(state, green_host, more_events, scanned_ports, False, placed, tables)
        else:  # red's events are on ports that green has scanned, but for that of the shell
            num_events += more_events
            num_ports = scanned_ports + (ONE if is_shell_seen else ZERO)
    show_activity(state, red_host, num_events, num_ports, is_shell_seen, placed, tables)


@njit
def finish_step(state, blue_hosts, red_type, target, outcomes, tables):
    """Finish a step after blue's turn, with red's action and all random outcomes given.

    Args:
        blue_hosts: Two sets uint64 of hosts, as `blue_turn` returns them.
        red_type, target: uint64.
        outcomes: Four int64, see `apply`.

    Returns:
        Blue's reward times ten, int64, and an error flag.
    """
    placed, found = blue_hosts
    state.red_type = red_type if red_type <= codes.IMPACT else np.uint64(codes.RED_SLEEP)
    state.red_target = (
        np.int64(target & codes.HOST_BITS) if red_type != codes.RED_SLEEP else codes.NONE
    )
    state.red_exploit = state.red_detected = state.red_pe_index = codes.NONE
    success, num_events, num_ports, is_shell_seen, error = red_action(
        state, red_type, target, outcomes, tables
    )
    state.red_success = success
    reward10 = reward_of(state, tables)
    if tables.action_kind[state.blue_action] == codes.RESTORE:
        reward10 -= np.int64(tables.restore_cost)
    state.reward10 = reward10
    green_target = outcomes[3]
    if tables.green_hosts == ZERO or np.uint64(green_target) >= codes.MAX_HOSTS:
        green_target = _NONE
    state.green_target = green_target
    seen = num_events, num_ports, is_shell_seen
    watch(state, target & codes.HOST_BITS, seen, placed, green_target, tables)
    show_found(state, found)
    if state.step < _LAST_STEP:
        state.step = np.uint64(state.step) + ONE
    return reward10, error


@njit
def apply(state, blue_action, red_type, red_target, outcomes, tables):
    """Step one environment with all actions and random outcomes given: defines the rules.

    Args:
        state: STATE_DTYPE record, changed in place.
        blue_action: int64; one that does not exist is Sleep.
        red_type, red_target: int64; the target is a subnet for a sweep, else a host.
        outcomes: Four int64: the exploit used, whether the reverse shell is detected (0, 1), the
            number of the session to escalate, the host that green scans. NONE where not needed.
        tables: TABLES_DTYPE record.

    Returns:
        Blue's reward times ten, int64; and BAD_EXPLOIT, BAD_DETECTION, BAD_SESSION or
        BAD_RED_ACTION if an outcome was needed and missing or impossible (then red's action
        failed without effect), else 0.
    """
    blue_hosts = blue_turn(state, blue_action, tables)
    red_type = np.uint64(red_type)
    return finish_step(state, blue_hosts, red_type, np.uint64(red_target), outcomes, tables)


@njit
def chance(rng, slot, odds):
    """Draw True with probability odds / 2**32, odds uint64."""
    return (word_at(rng, slot) >> _HALF_WORD) < odds


@njit
def draw_exploit(state, host, rng, tables):
    """Draw the exploit int64 that red uses on host uint64; NONE if it has no candidate."""
    candidates = exploit_candidates(state, host, tables)
    num_candidates = count(candidates)
    if num_candidates == ZERO:
        return _NONE
    rank = ZERO
    top_odds = np.uint64(tables.top_exploit_odds)
    if num_candidates > ONE and not chance(rng, codes.TOP_EXPLOIT_SLOT, top_odds):
        rank = ONE + np.uint64(integers_at(rng, codes.OTHER_EXPLOIT_SLOT, num_candidates - ONE))
    return np.int64(nth(candidates, rank))


@njit
def draw_green(rng, tables):
    """Draw the host int64 that green scans, or NONE."""
    hosts = np.uint64(tables.green_hosts)
    if hosts == ZERO or chance(rng, codes.GREEN_SLOT, np.uint64(tables.green_sleep_odds)):
        return _NONE
    return np.int64(nth(hosts, np.uint64(integers_at(rng, codes.GREEN_HOST_SLOT, count(hosts)))))


@njit
def draw_outcomes(state, red_type, target, rng, tables):
    """Draw the random outcomes of a red action, after blue's turn.

    Args:
        red_type, target: Kind of red action and its target, uint64.

    Returns:
        Four int64 as `apply` takes them; NONE for draws that the action does not need.
    """
    exploit_number = detected = pe_index = _NONE
    host = target & codes.HOST_BITS
    if red_type == codes.EXPLOIT:
        exploit_number = draw_exploit(state, host, rng, tables)
        detected = np.int64(chance(rng, codes.DETECTION_SLOT, np.uint64(tables.detection_odds)))
    elif red_type == codes.ESCALATE:
        num_sessions = num_user_sessions(state, host)
        if num_sessions > ZERO:
            pe_index = integers_at(rng, codes.SESSION_SLOT, num_sessions)
    return exploit_number, detected, pe_index, draw_green(rng, tables)


@njit
def reset(state, rng, tables):
    """Begin an episode; draw its length, and its red agent if `tables` has any, from `tables`."""
    begin_episode(state, tables)
    length = integers_at(rng, codes.LENGTH_SLOT, np.int64(tables.num_lengths))
    state.length_index = np.uint64(length)
    agents = np.uint64(tables.red_agents)
    if agents != ZERO:
        state.red_agent = nth(
            agents, np.uint64(integers_at(rng, codes.RED_AGENT_SLOT, count(agents)))
        )


@njit
def finish_free(state, blue_hosts, red_type, target, rng, tables):
    """Finish a step after both sides have chosen; returns the results of `step`."""
    outcomes = draw_outcomes(state, red_type, target, rng, tables)
    reward10, _ = finish_step(state, blue_hosts, red_type, target, outcomes, tables)
    length = tables.lengths[np.uint64(state.length_index) & _LENGTH_BITS]
    return reward10 / _TEN, False, np.uint64(state.step) >= np.uint64(length)


@njit
def step(state, action, rng, tables):
    """Step one environment: blue plays `action`, an integer; red's agent chooses its action.

    Returns:
        Blue's reward float64; False, as no episode ends by itself; and whether it is truncated.
    """
    blue_hosts = blue_turn(state, action, tables)
    red_type, target = red_policy(state, rng, tables)
    return finish_free(state, blue_hosts, red_type, target, rng, tables)


@njit
def is_red_action(red_type, target, tables):
    """Return whether this kind of red action and its target exist; both may be any numbers."""
    if red_type == codes.RED_SLEEP:
        return True
    is_kind = codes.SWEEP <= red_type <= codes.IMPACT and red_type == np.int64(red_type)
    end = tables.num_subnets if red_type == codes.SWEEP else tables.num_hosts
    return is_kind and 0 <= target < end and target == np.int64(target)


def step_with(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Make the step kernel of envs whose red agent may be CUSTOM.

    Args:
        policy: Compiled function `(state, rng, tables) -> (kind of red action, target)` of two
            integers. An action that does not exist is played as a Sleep that fails. The policy may
            draw from `rng` with `next_word` and similar functions, or by slots from CUSTOM_SLOT on.
            Envs with another agent are not affected.
    """

    @njit
    def step_with_policy(state, action, rng, tables):
        blue_hosts = blue_turn(state, action, tables)
        if state.red_agent == codes.CUSTOM:
            custom_type, custom_target = policy(state, rng, tables)
            red_type, target = _NO_SUCH_TYPE, ZERO
            if is_red_action(custom_type, custom_target, tables):
                red_type = np.uint64(custom_type)
                target = np.uint64(np.int64(custom_target))  # Sleep may have any
        else:
            red_type, target = red_policy(state, rng, tables)
        return finish_free(state, blue_hosts, red_type, target, rng, tables)

    return step_with_policy


@njit
def action_mask(state, out, tables):
    """Write which actions can have an effect, bool (num_actions,): not decoys that don't fit."""
    for index in range(min(out.shape[0], tables.num_actions)):
        kind = np.uint64(tables.action_kind[np.uint64(index)])
        out[index] = True
        if kind >= codes.DECOY:
            host = np.uint64(tables.action_host[np.uint64(index)]) & codes.HOST_BITS
            decoys = placeable_decoys(state, host, tables)
            out[index] = (decoys >> (kind - np.uint64(codes.DECOY))) & ONE == ONE


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
