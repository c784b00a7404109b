"""Red's turn: what each of its actions does and which network events it leaves. For compiled code.

Every action gives `(success, num_events, num_ports, is_shell_seen, error)`: its success flag; the
events on its target and the number of distinct local ports among them, uint64; whether one of them
shows a reverse shell; and an error flag if an outcome it needed was missing or impossible.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge2.rules.bits import count, only
from vecenv.cage.challenge2.rules.blue import ports_in_use
from vecenv.cage.challenge2.rules.codes import (
    BAD_DETECTION,
    BAD_EXPLOIT,
    BAD_RED_ACTION,
    BAD_SESSION,
    ESCALATE,
    EXPLOIT,
    FAILED,
    IMPACT,
    MAX_EXPLOITS,
    MAX_HOSTS,
    MAX_SUBNETS,
    NO_SERVICE,
    NONE,
    PRIVILEGED,
    PRIVILEGED_SHELL,
    RED_SLEEP,
    REMOVABLE,
    SCAN,
    SSH_SESSION,
    STUCK,
    SUCCEEDED,
    SWEEP,
    UNKNOWN,
)
from vecenv.cage.challenge2.rules.sessions import (
    add_session,
    escalate_session,
    num_user_sessions,
    with_sessions,
)

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_TWO = np.uint64(2)
_HOST_BITS = np.uint64(MAX_HOSTS - 1)
_SUBNET_BITS = np.uint64(MAX_SUBNETS - 1)
_MAX_HOSTS = np.uint64(MAX_HOSTS)
_MAX_EXPLOITS = np.uint64(MAX_EXPLOITS)

_DECOY_EVENTS = np.uint64(2)  # that an attack on a decoy leaves
_GUESSING_EVENTS = np.uint64(10)  # that guessing a password leaves, before it succeeds
_NO_ERROR = 0


@njit(forceinline=True)
def nothing(success, error):
    """The result of an action without events."""
    return success, _ZERO, _ZERO, False, error


@njit(forceinline=True)
def can_reach(state, subnet, tables):
    """Whether red's traffic gets into subnet uint64 now."""
    return (with_sessions(state) & np.uint64(tables.gate[subnet & _SUBNET_BITS])) != _ZERO


@njit(forceinline=True)
def can_reach_host(state, host, tables):
    """Whether red's traffic gets to host uint64 now."""
    return can_reach(state, np.uint64(tables.subnet_of[host]), tables)


@njit(forceinline=True)
def listeners(state, host, tables):
    """Listening connections on host uint64, and different ports they have: both uint64."""
    decoys = np.uint64(state.decoys[host]) & ~np.uint64(tables.stackable_decoys)
    num_decoys = count(decoys) + np.uint64(state.n_stacked[host])
    num_connections = np.uint64(tables.genuine_listeners[host]) + num_decoys
    num_ports = count(ports_in_use(state, host, tables)) + np.uint64(tables.other_ports[host])
    return num_connections, num_ports


@njit(forceinline=True)
def sweep(state, subnet, tables):
    """DiscoverRemoteSystems: learn the addresses in subnet uint64."""
    subnet = subnet & _SUBNET_BITS
    if not can_reach(state, subnet, tables):
        return nothing(FAILED, _NO_ERROR)
    state.known_subnet = np.uint64(state.known_subnet) | only(subnet)
    state.known_ip = np.uint64(state.known_ip) | np.uint64(tables.subnet_hosts[subnet])
    return nothing(SUCCEEDED, _NO_ERROR)


@njit(forceinline=True)
def scan(state, host, tables):
    """DiscoverNetworkServices: learn the open ports of host uint64, if it can be reached."""
    num_events, num_ports = listeners(state, host, tables)
    if not can_reach_host(state, host, tables):
        num_events = num_ports = _ZERO
    else:
        state.red_ports[host] = ports_in_use(state, host, tables)
        state.scanned = np.uint64(state.scanned) | only(host)
    state.scan_was_empty = num_events == _ZERO
    return SUCCEEDED, num_events, num_ports, False, _NO_ERROR


@njit(forceinline=True)
def exploit_candidates(state, host, tables):
    """Set uint64 of exploits that red would try on host uint64, from the ports it remembers."""
    candidates = np.uint64(tables.candidates[state.red_ports[host]])
    return candidates if (np.uint64(state.scanned) & only(host)) != _ZERO else _ZERO


@njit(forceinline=True)
def exploit(state, host, number, detected, tables):
    """ExploitRemoteService on host uint64 with exploit int64, or NONE if there is no candidate."""
    candidates = exploit_candidates(state, host, tables)
    index = np.uint64(number)
    is_candidate = index < _MAX_EXPLOITS and (candidates >> index) & _ONE == _ONE
    if not is_candidate:
        is_none = candidates == _ZERO and number == NONE
        return nothing(FAILED, _NO_ERROR if is_none else BAD_EXPLOIT)
    state.red_exploit = number
    if not can_reach_host(state, host, tables):
        return nothing(FAILED, _NO_ERROR)
    is_guessing = (np.uint64(tables.brute_force) >> index) & _ONE == _ONE
    result = tables.exploit_result[host, index]
    if result == NO_SERVICE:
        decoys = np.uint64(state.decoys[host]) & np.uint64(tables.catching_decoys[index])
        if decoys == _ZERO:
            return nothing(FAILED, _NO_ERROR)
        return FAILED, _GUESSING_EVENTS if is_guessing else _DECOY_EVENTS, _ONE, False, _NO_ERROR
    if is_guessing:
        if result != SSH_SESSION:
            return FAILED, _GUESSING_EVENTS, _ONE, False, _NO_ERROR
        add_session(state, host, STUCK)
        state.known_host = np.uint64(state.known_host) | only(host)
        return SUCCEEDED, _GUESSING_EVENTS + _ONE, _ONE, False, _NO_ERROR
    return open_shell(state, host, result == PRIVILEGED_SHELL, detected)


@njit(forceinline=True)
def open_shell(state, host, is_privileged, detected):
    """An exploit works on host uint64: a reverse shell, noticed if `detected` int64 is 1."""
    if detected != 0 and detected != 1:
        return nothing(FAILED, BAD_DETECTION)
    here = only(host)
    state.red_detected = detected
    is_seen = detected == 1
    if is_seen:
        state.last_shell = np.uint64(state.last_shell) | here
        if is_privileged:
            state.last_shell = np.uint64(state.last_shell) & ~here
    kind = STUCK
    if is_privileged:
        kind = PRIVILEGED
    elif is_seen:
        kind = REMOVABLE
    add_session(state, host, kind)
    state.malware = np.uint64(state.malware) | here
    state.known_host = np.uint64(state.known_host) | here
    num_events = _TWO if is_seen else _ONE  # each on a port of its own
    return SUCCEEDED, num_events, num_events, is_seen, _NO_ERROR


@njit(forceinline=True)
def escalate(state, host, pe_index, tables):
    """PrivilegeEscalate on host uint64: session `pe_index` int64, unless one is privileged."""
    here = only(host)
    if (with_sessions(state) & here) == _ZERO:
        return nothing(FAILED, _NO_ERROR)
    if (np.uint64(state.has_priv) & here) == _ZERO:
        if np.uint64(pe_index) >= num_user_sessions(state, host):
            return nothing(FAILED, BAD_SESSION)
        state.red_pe_index = pe_index
        escalate_session(state, host, np.uint64(pe_index))
        state.malware = np.uint64(state.malware) | here
    state.known_ip = np.uint64(state.known_ip) | np.uint64(tables.reveals_ip[host])
    subnet = only(np.uint64(tables.subnet_of[host]))
    state.known_subnet = np.uint64(state.known_subnet) | subnet
    if host == tables.service_host:
        state.ot_known = _ONE
    return nothing(SUCCEEDED, _NO_ERROR)


@njit(forceinline=True)
def impact(state, host, tables):
    """Impact on host uint64: stop the operational service."""
    is_entered = (with_sessions(state) & only(host)) != _ZERO
    if not (is_entered and host == tables.service_host and state.ot_known == _ONE):
        return nothing(FAILED, _NO_ERROR)
    if state.ot_stoppable == _ONE:
        state.ot_running = _ZERO
    return nothing(SUCCEEDED, _NO_ERROR)


@njit(forceinline=True)
def knows_target(state, red_type, target):
    """Whether red knows the subnet, address or host uint64 that its action names."""
    known = np.uint64(state.known_ip)
    if red_type == SWEEP:
        known = np.uint64(state.known_subnet)
    elif red_type >= ESCALATE:
        known = np.uint64(state.known_host)
    return target < _MAX_HOSTS and (known >> target) & _ONE == _ONE


@njit(forceinline=True)
def red_action(state, red_type, target, outcomes, tables):
    """Carry out a red action.

    Args:
        red_type, target: Kind of action and subnet or host, uint64. Anything is allowed: an action
            on what red does not know fails, a kind that does not exist is an error.
        outcomes: Four int64, see `apply`.
    """
    exploit_number, detected, pe_index, _ = outcomes
    if red_type == RED_SLEEP:
        return nothing(UNKNOWN, _NO_ERROR)
    if red_type > IMPACT:
        return nothing(FAILED, BAD_RED_ACTION)
    if not knows_target(state, red_type, target):
        return nothing(FAILED, _NO_ERROR)
    host = target & _HOST_BITS
    if red_type == SWEEP:
        return sweep(state, host, tables)
    if red_type == SCAN:
        return scan(state, host, tables)
    if red_type == EXPLOIT:
        return exploit(state, host, exploit_number, detected, tables)
    if red_type == ESCALATE:
        return escalate(state, host, pe_index, tables)
    return impact(state, host, tables)
