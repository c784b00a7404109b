"""One step of the simulator without any chance in it: blue, red, reward, what blue sees.

`apply` is the definition of the rules; the free-running step of `free` differs only in where red's
action and the outcomes come from. For compiled code: functions of one environment's state record.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge2.rules.attack import listeners, red_action
from vecenv.cage.challenge2.rules.blue import blue_turn
from vecenv.cage.challenge2.rules.codes import (
    B_LINE,
    IMPACT,
    MAX_HOSTS,
    MEANDER,
    NO_RED,
    NONE,
    RED_SLEEP,
    RESTORE,
    UNKNOWN,
)
from vecenv.cage.challenge2.rules.memory import remember_scans
from vecenv.cage.challenge2.rules.observation import clear_activity, show_activity, show_found
from vecenv.cage.challenge2.rules.sessions import with_sessions

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_BYTE = np.uint64(255)
_EIGHT = np.uint64(8)
_LOW, _HIGH = np.uint64(0), np.uint64(1)  # halves of a set of hosts
_HOST_BITS = np.uint64(MAX_HOSTS - 1)
_NONE = np.int64(NONE)
_LAST_STEP = np.uint64(65535)
_ALL_AGENTS = (1 << NO_RED) | (1 << B_LINE) | (1 << MEANDER)


@njit
def begin_episode(state, tables):
    """Set the state in which every episode begins; `red_agent` stays as it is."""
    footholds = np.uint64(tables.footholds)
    state.obs_bits = _ZERO
    state.known_ip = state.known_host = footholds
    state.known_subnet = tables.foothold_subnets
    state.scanned = state.malware = _ZERO
    state.has_removable = state.has_stuck = _ZERO
    state.has_priv = footholds
    state.removable_first = state.stuck_first = state.last_shell = _ZERO
    state.scanned_ips = state.exploited_ips = state.escalated_hosts = state.mapped = _ZERO
    state.last_exploited = state.last_escalated = _ZERO
    state.scanned_subnets = state.plan_step = state.has_verified = state.scan_was_empty = _ZERO
    state.first_host = MAX_HOSTS
    state.ot_running = state.ot_stoppable = _ONE
    state.ot_known = _ZERO
    state.step = state.reward10 = _ZERO
    state.blue_action = _ZERO
    state.blue_success = state.red_success = UNKNOWN
    state.red_type = RED_SLEEP
    state.red_target = state.red_exploit = state.red_detected = state.red_pe_index = NONE
    state.green_target = NONE
    state.seen_scanned = state.seen_last = state.seen_active = _ZERO
    state.fits = _ALL_AGENTS
    for index in range(state.custom.shape[0]):
        state.custom[index] = _ZERO
    for host in range(MAX_HOSTS):
        state.red_ports[host] = state.decoys[host] = state.n_stacked[host] = _ZERO
        state.n_removable[host] = state.n_stuck[host] = _ZERO
        state.order_or_n_priv[host] = (footholds >> np.uint64(host)) & _ONE


@njit(forceinline=True)
def reward_of(state, tables):
    """Blue's reward of the state, without the cost of its action, times ten, int64."""
    charged = np.uint64(state.has_priv)
    if tables.charges_user_access != _ZERO:
        charged = with_sessions(state)
    cost = np.int64(tables.host_costs[_LOW, charged & _BYTE])
    cost += np.int64(tables.host_costs[_HIGH, (charged >> _EIGHT) & _BYTE])
    if state.ot_running == _ZERO:
        cost += np.int64(tables.service_cost)
    return -cost


@njit(forceinline=True)
def watch(state, red_host, seen, placed, green_target, tables):
    """Show blue the events of this step.

    Args:
        red_host: uint64, the host red acted on.
        seen: (events on it uint64, distinct ports uint64, whether a reverse shell was seen).
        placed: Set uint64 of hosts on which blue placed a decoy.
        green_target: int64, the host green scanned, or NONE.
    """
    num_events, num_ports, is_shell_seen = seen
    clear_activity(state)
    if green_target != NONE:
        green_host = np.uint64(green_target) & _HOST_BITS
        more_events, scanned_ports = listeners(state, green_host, tables)
        if green_host != red_host:
            show_activity(state, green_host, more_events, scanned_ports, False, placed, tables)
        else:  # red's events are on ports that green has scanned, but for that of the shell
            num_events += more_events
            num_ports = scanned_ports + (_ONE if is_shell_seen else _ZERO)
    show_activity(state, red_host, num_events, num_ports, is_shell_seen, placed, tables)


@njit(forceinline=True)
def finish_step(state, blue_hosts, red_type, target, outcomes, tables):
    """Do what comes after blue's turn, given what red does and how chance falls.

    Args:
        blue_hosts: Two sets uint64 of hosts, as `blue_turn` returns them.
        red_type, target: uint64.
        outcomes: Four int64, see `apply`.

    Returns:
        Blue's reward times ten, int64, and an error flag.
    """
    placed, found = blue_hosts
    state.red_type = red_type if red_type <= IMPACT else np.uint64(RED_SLEEP)
    state.red_target = np.int64(target & _HOST_BITS) if red_type != RED_SLEEP else NONE
    state.red_exploit = state.red_detected = state.red_pe_index = NONE
    success, num_events, num_ports, is_shell_seen, error = red_action(
        state, red_type, target, outcomes, tables
    )
    state.red_success = success
    reward10 = reward_of(state, tables)
    if tables.action_kind[state.blue_action] == RESTORE:
        reward10 -= np.int64(tables.restore_cost)
    state.reward10 = reward10
    green_target = outcomes[3]
    if tables.green_hosts == _ZERO or np.uint64(green_target) >= MAX_HOSTS:
        green_target = _NONE
    state.green_target = green_target
    seen = num_events, num_ports, is_shell_seen
    watch(state, target & _HOST_BITS, seen, placed, green_target, tables)
    show_found(state, found)
    if tables.tracks_scans != _ZERO:
        remember_scans(state, placed, tables)
    if state.step < _LAST_STEP:
        state.step = np.uint64(state.step) + _ONE
    return reward10, error


@njit
def apply(state, blue_action, red_type, red_target, outcomes, tables):
    """Step one environment with everything given: the definition of the rules.

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
