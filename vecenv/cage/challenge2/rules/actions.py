"""The effects of blue's and red's actions, and blue's observation. For compiled code.

A host's sessions are kept as three counts and, where it matters, their order of creation; see
`STATE_DTYPE`. Counts saturate at MAX_COUNT. Only the sixteen oldest have an order; if there are
more, the stuck ones among the rest count as older than the removable ones.

Every red action returns `(success, num_events, num_ports, is_shell_seen, error)`: its success flag;
the events on its target and the number of distinct local ports among them, uint64; whether one of
them shows a reverse shell; and an error flag if an outcome it needed was missing or impossible.

The observation has four bits per host: two of activity, which last one step, and two of blue's
belief, which persist.

First come sets as the bits of a word. All masks and indices are uint64: Numba then needs no
wraparound checks, and never converts mixed signed and unsigned operands to floating point.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge2.rules import codes
from vecenv.jit import write_bits

ZERO, ONE, TWO, _FOUR, _EIGHT = map(np.uint64, (0, 1, 2, 4, 8))
_SEVEN, _BYTE, _TOP_BYTE = map(np.uint64, (7, 255, 56))
_THREE, _SIX, _TWELVE, _TWENTY_FOUR = map(np.uint64, (3, 6, 12, 24))
_EVERY_OTHER, _EVERY_PAIR = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333)
_EVERY_NIBBLE, _EVERY_BYTE = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0101010101010101)
_EVERY_FOURTH, _TWO_PER_BYTE = np.uint64(0x1111111111111111), np.uint64(0x0303030303030303)
_FOUR_PER_PAIR, _EIGHT_PER_HALF = np.uint64(0x000F000F000F000F), np.uint64(0x000000FF000000FF)
_SIXTEEN = np.uint64(0xFFFF)
_MEMBERS = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]
_NTH_MEMBER = np.array([[*members, *[0] * 8][:8] for members in _MEMBERS], np.uint8)
_FULL = np.uint64(codes.MAX_COUNT)
_NUM_ORDERED = np.uint64(16)
_DECOY = np.uint64(codes.DECOY)
_FAILED = np.uint64(codes.FAILED)
_SUBNET_BITS = np.uint64(codes.MAX_SUBNETS - 1)
_MAX_HOSTS = np.uint64(codes.MAX_HOSTS)
_MAX_EXPLOITS = np.uint64(codes.MAX_EXPLOITS)
_DECOY_EVENTS = np.uint64(2)  # events of an attack on a decoy
_GUESSING_EVENTS = np.uint64(10)  # events of guessing a password, before it succeeds
_NO_ERROR = 0


@njit
def only(index):
    """Return the set uint64 with the single member `index` uint64."""
    return ONE << index


@njit
def lowest(members):
    """Return the set uint64 of the lowest member; empty if there is none."""
    return members & ~(members - (ONE if members != ZERO else ZERO))


@njit
def count(members):
    """Return the number uint64 of set bits; compilers turn this pattern into one instruction."""
    members = members - ((members >> ONE) & _EVERY_OTHER)
    members = (members & _EVERY_PAIR) + ((members >> TWO) & _EVERY_PAIR)
    members = (members + (members >> _FOUR)) & _EVERY_NIBBLE
    return np.multiply(members, _EVERY_BYTE) >> _TOP_BYTE


@njit
def every_fourth(bits):
    """Return the bits 0, 4, 8 ... of a uint64 as a set uint64 of at most 16 members."""
    bits &= _EVERY_FOURTH
    bits = (bits | (bits >> _THREE)) & _TWO_PER_BYTE
    bits = (bits | (bits >> _SIX)) & _FOUR_PER_PAIR
    bits = (bits | (bits >> _TWELVE)) & _EIGHT_PER_HALF
    return (bits | (bits >> _TWENTY_FOUR)) & _SIXTEEN


@njit
def nth(members, n):
    """Return member n (from 0) of a set of at most 16, uint64; 0..15 for any arguments."""
    low = members & _BYTE
    num_low = count(low)
    if n < num_low:
        return np.uint64(_NTH_MEMBER[low, n & _SEVEN])
    return np.uint64(_NTH_MEMBER[(members >> _EIGHT) & _BYTE, (n - num_low) & _SEVEN]) + _EIGHT


@njit
def with_sessions(state):
    """Return the set uint64 of hosts on which red has any session."""
    return np.uint64(state.has_removable) | np.uint64(state.has_stuck) | np.uint64(state.has_priv)


@njit
def num_user_sessions(state, host):
    """Return the number uint64 of red's sessions on host uint64 that are not privileged."""
    return np.uint64(state.n_removable[host]) + np.uint64(state.n_stuck[host])


@njit
def add_session(state, host, kind):
    """Append a session of `kind` REMOVABLE, STUCK or PRIVILEGED on host uint64."""
    here = only(host)
    num_before = num_user_sessions(state, host)
    word = np.uint64(state.order_or_n_priv[host])
    is_ordered = (np.uint64(state.has_priv) & here) == ZERO
    if kind == codes.PRIVILEGED:
        if is_ordered:
            _begin_privileged(state, host, num_before)
        elif word < _FULL:
            state.order_or_n_priv[host] = word + ONE
    elif kind == codes.REMOVABLE:
        if is_ordered and num_before < _NUM_ORDERED:
            state.order_or_n_priv[host] = word | only(num_before)
        state.has_removable = np.uint64(state.has_removable) | here
        if state.n_removable[host] < _FULL:
            state.n_removable[host] = np.uint64(state.n_removable[host]) + ONE
    else:
        state.has_stuck = np.uint64(state.has_stuck) | here
        if state.n_stuck[host] < _FULL:
            state.n_stuck[host] = np.uint64(state.n_stuck[host]) + ONE


@njit
def _begin_privileged(state, host, num_older):
    """Replace order by counts: `num_older` uint64 sessions precede the first privileged one."""
    here = only(host)
    num_older = min(num_older, _NUM_ORDERED)
    older = np.uint64(state.order_or_n_priv[host]) & (only(num_older) - ONE)
    if older != ZERO:
        state.removable_first = np.uint64(state.removable_first) | here
    if count(older) < num_older:
        state.stuck_first = np.uint64(state.stuck_first) | here
    state.has_priv = np.uint64(state.has_priv) | here
    state.order_or_n_priv[host] = ONE


@njit
def escalate_session(state, host, index):
    """Make the existing session `index` uint64 of host uint64 privileged; none may be so yet."""
    here = only(host)
    order = np.uint64(state.order_or_n_priv[host])
    num_removable = np.uint64(state.n_removable[host])
    if index < _NUM_ORDERED:
        is_removable = ((order >> index) & ONE) == ONE
        is_last = (order >> index) <= ONE  # no removable one after it
    else:
        is_removable = index + num_removable >= num_user_sessions(state, host) + count(order)
        is_last = index + ONE == num_user_sessions(state, host)
    if is_removable and is_last:
        state.last_shell = np.uint64(state.last_shell) & ~here
    _begin_privileged(state, host, index)
    if is_removable:
        state.n_removable[host] = num_removable - ONE
        if num_removable == ONE:
            state.has_removable = np.uint64(state.has_removable) & ~here
    else:
        num_stuck = np.uint64(state.n_stuck[host])
        state.n_stuck[host] = num_stuck - ONE
        if num_stuck == ONE:
            state.has_stuck = np.uint64(state.has_stuck) & ~here


@njit
def end_removable(state, host):
    """End the removable sessions on host uint64; the stuck ones need no new order."""
    away = ~only(host)
    state.has_removable = np.uint64(state.has_removable) & away
    state.removable_first = np.uint64(state.removable_first) & away
    state.last_shell = np.uint64(state.last_shell) & away
    state.n_removable[host] = ZERO
    if (np.uint64(state.has_priv) & ~away) == ZERO:
        state.order_or_n_priv[host] = ZERO


@njit
def end_all(state, host, footholds):
    """End all sessions on host uint64, except the primary one of a host in `footholds` uint64."""
    away = ~only(host)
    end_removable(state, host)
    state.has_stuck = np.uint64(state.has_stuck) & away
    state.stuck_first = np.uint64(state.stuck_first) & away
    state.n_stuck[host] = ZERO
    state.has_priv = (np.uint64(state.has_priv) & away) | footholds
    state.order_or_n_priv[host] = (footholds >> host) & ONE


@njit
def ports_in_use(state, host, tables):
    """Set uint64 of tracked ports that listen on host uint64: genuine ones and decoys."""
    decoys = np.uint64(state.decoys[host])
    return np.uint64(tables.genuine_ports[host]) | np.uint64(tables.decoy_ports[decoys])


@njit
def placeable_decoys(state, host, tables):
    """Set uint64 of decoys that can be placed on host uint64 now."""
    ports = ports_in_use(state, host, tables)
    return np.uint64(tables.allowed_decoys[host]) & ~np.uint64(tables.refused_decoys[ports])


@njit
def place_decoy(state, host, decoy, tables):
    """Place a decoy on host uint64 if possible; return the set uint64 of decoys placed.

    `decoy` is a set uint64 of at most one. There is no branch: success is unpredictable, and a
    branch misprediction would cost more than this whole function.
    """
    placed = decoy & placeable_decoys(state, host, tables)
    state.decoys[host] = np.uint64(state.decoys[host]) | placed
    is_stacked = (placed & np.uint64(tables.stackable_decoys)) != ZERO
    num_stacked = np.uint64(state.n_stacked[host])
    state.n_stacked[host] = num_stacked + np.uint64(is_stacked and num_stacked < _FULL)
    return placed


@njit
def remove(state, host, tables):
    """Carry out Remove on host uint64; return whether it reports success."""
    reports_success = True
    if tables.remove_reports_last_shell != ZERO:
        reports_success = (np.uint64(state.last_shell) & only(host)) != ZERO
    end_removable(state, host)
    bits, shift = np.uint64(state.obs_bits), host * _BITS_PER_HOST
    if (bits & (_BELIEF_BITS << shift)) != ZERO:  # blue's belief: unknown, unless it was clean
        state.obs_bits = (bits & ~(_BELIEF_BITS << shift)) | (_BELIEF_UNKNOWN << shift)
    return reports_success


@njit
def restore(state, host, tables):
    """Restore host uint64."""
    here = only(host)
    end_all(state, host, here & np.uint64(tables.footholds))
    state.decoys[host] = ZERO
    state.n_stacked[host] = ZERO
    state.malware = np.uint64(state.malware) & ~here
    if host == tables.service_host:
        state.ot_running = ONE
        state.ot_stoppable = ZERO
    state.obs_bits = np.uint64(state.obs_bits) & ~(_BELIEF_BITS << (host * _BITS_PER_HOST))


@njit
def blue_turn(state, action, tables):
    """Carry out blue's action, an integer; an invalid one counts as Sleep.

    Returns:
        Two sets uint64 of hosts with at most one member: where a decoy was placed, and where
        Analyse found a dropped tool.
    """
    index = np.uint64(action)
    if index >= np.uint64(tables.num_actions):
        index = ZERO
    kind = np.uint64(tables.action_kind[index])
    host = np.uint64(tables.action_host[index]) & codes.HOST_BITS
    here = only(host)
    success = np.uint64(tables.action_success[index])
    decoy = only(kind - _DECOY) if kind >= _DECOY else ZERO
    is_placed = place_decoy(state, host, decoy, tables) != ZERO
    if decoy != ZERO and not is_placed:
        success = _FAILED
    if kind == codes.REMOVE:
        if not remove(state, host, tables):
            success = _FAILED
    elif kind == codes.RESTORE:
        restore(state, host, tables)
    state.blue_action = index
    state.blue_success = success
    found = np.uint64(state.malware) & here if kind == codes.ANALYSE else ZERO
    return here if is_placed else ZERO, found


@njit
def nothing(success, error):
    """Return the result of a red action without events."""
    return success, ZERO, ZERO, False, error


@njit
def can_reach(state, subnet, tables):
    """Return whether red's traffic now reaches subnet uint64."""
    return (with_sessions(state) & np.uint64(tables.gate[subnet & _SUBNET_BITS])) != ZERO


@njit
def listeners(state, host, tables):
    """Return the numbers of listening connections and of their ports on host uint64: uint64."""
    decoys = np.uint64(state.decoys[host]) & ~np.uint64(tables.stackable_decoys)
    num_decoys = count(decoys) + np.uint64(state.n_stacked[host])
    num_connections = np.uint64(tables.genuine_listeners[host]) + num_decoys
    num_ports = count(ports_in_use(state, host, tables)) + np.uint64(tables.other_ports[host])
    return num_connections, num_ports


@njit
def sweep(state, subnet, tables):
    """DiscoverRemoteSystems: learn the addresses in subnet uint64."""
    subnet = subnet & _SUBNET_BITS
    if not can_reach(state, subnet, tables):
        return nothing(codes.FAILED, _NO_ERROR)
    state.known_subnet = np.uint64(state.known_subnet) | only(subnet)
    state.known_ip = np.uint64(state.known_ip) | np.uint64(tables.subnet_hosts[subnet])
    return nothing(codes.SUCCEEDED, _NO_ERROR)


@njit
def scan(state, host, tables):
    """DiscoverNetworkServices: learn the open ports of host uint64, if it can be reached."""
    num_events, num_ports = listeners(state, host, tables)
    if not can_reach(state, np.uint64(tables.subnet_of[host]), tables):
        num_events = num_ports = ZERO
    else:
        state.red_ports[host] = ports_in_use(state, host, tables)
        state.scanned = np.uint64(state.scanned) | only(host)
    state.scan_was_empty = num_events == ZERO
    return codes.SUCCEEDED, num_events, num_ports, False, _NO_ERROR


@njit
def exploit_candidates(state, host, tables):
    """Return the set uint64 of exploits that red may try on host uint64, by its known ports."""
    candidates = np.uint64(tables.candidates[state.red_ports[host]])
    return candidates if (np.uint64(state.scanned) & only(host)) != ZERO else ZERO


@njit
def exploit(state, host, number, detected, tables):
    """ExploitRemoteService on host uint64 with exploit int64, or NONE if there is no candidate."""
    candidates = exploit_candidates(state, host, tables)
    index = np.uint64(number)
    is_candidate = index < _MAX_EXPLOITS and (candidates >> index) & ONE == ONE
    if not is_candidate:
        is_none = candidates == ZERO and number == codes.NONE
        return nothing(codes.FAILED, _NO_ERROR if is_none else codes.BAD_EXPLOIT)
    state.red_exploit = number
    if not can_reach(state, np.uint64(tables.subnet_of[host]), tables):
        return nothing(codes.FAILED, _NO_ERROR)
    is_guessing = (np.uint64(tables.brute_force) >> index) & ONE == ONE
    result = tables.exploit_result[host, index]
    if result == codes.NO_SERVICE:
        decoys = np.uint64(state.decoys[host]) & np.uint64(tables.catching_decoys[index])
        if decoys == ZERO:
            return nothing(codes.FAILED, _NO_ERROR)
        num_events = _GUESSING_EVENTS if is_guessing else _DECOY_EVENTS
        return codes.FAILED, num_events, ONE, False, _NO_ERROR
    if is_guessing:
        if result != codes.SSH_SESSION:
            return codes.FAILED, _GUESSING_EVENTS, ONE, False, _NO_ERROR
        add_session(state, host, codes.STUCK)
        state.known_host = np.uint64(state.known_host) | only(host)
        return codes.SUCCEEDED, _GUESSING_EVENTS + ONE, ONE, False, _NO_ERROR
    return open_shell(state, host, result == codes.PRIVILEGED_SHELL, detected)


@njit
def open_shell(state, host, is_privileged, detected):
    """An exploit works on host uint64: a reverse shell, noticed if `detected` int64 is 1."""
    if detected != 0 and detected != 1:
        return nothing(codes.FAILED, codes.BAD_DETECTION)
    here = only(host)
    state.red_detected = detected
    is_seen = detected == 1
    if is_seen:
        state.last_shell = np.uint64(state.last_shell) | here
        if is_privileged:
            state.last_shell = np.uint64(state.last_shell) & ~here
    kind = codes.STUCK
    if is_privileged:
        kind = codes.PRIVILEGED
    elif is_seen:
        kind = codes.REMOVABLE
    add_session(state, host, kind)
    state.malware = np.uint64(state.malware) | here
    state.known_host = np.uint64(state.known_host) | here
    num_events = TWO if is_seen else ONE  # each on a port of its own
    return codes.SUCCEEDED, num_events, num_events, is_seen, _NO_ERROR


@njit
def escalate(state, host, pe_index, tables):
    """PrivilegeEscalate on host uint64: session `pe_index` int64, unless one is privileged."""
    here = only(host)
    if (with_sessions(state) & here) == ZERO:
        return nothing(codes.FAILED, _NO_ERROR)
    if (np.uint64(state.has_priv) & here) == ZERO:
        if np.uint64(pe_index) >= num_user_sessions(state, host):
            return nothing(codes.FAILED, codes.BAD_SESSION)
        state.red_pe_index = pe_index
        escalate_session(state, host, np.uint64(pe_index))
        state.malware = np.uint64(state.malware) | here
    state.known_ip = np.uint64(state.known_ip) | np.uint64(tables.reveals_ip[host])
    subnet = only(np.uint64(tables.subnet_of[host]))
    state.known_subnet = np.uint64(state.known_subnet) | subnet
    if host == tables.service_host:
        state.ot_known = ONE
    return nothing(codes.SUCCEEDED, _NO_ERROR)


@njit
def impact(state, host, tables):
    """Impact on host uint64: stop the operational service."""
    is_entered = (with_sessions(state) & only(host)) != ZERO
    if not (is_entered and host == tables.service_host and state.ot_known == ONE):
        return nothing(codes.FAILED, _NO_ERROR)
    if state.ot_stoppable == ONE:
        state.ot_running = ZERO
    return nothing(codes.SUCCEEDED, _NO_ERROR)


@njit
def knows_target(state, red_type, target):
    """Whether red knows the subnet, address or host uint64 that its action names."""
    known = np.uint64(state.known_ip)
    if red_type == codes.SWEEP:
        known = np.uint64(state.known_subnet)
    elif red_type >= codes.ESCALATE:
        known = np.uint64(state.known_host)
    return target < _MAX_HOSTS and (known >> target) & ONE == ONE


@njit
def red_action(state, red_type, target, outcomes, tables):
    """Carry out a red action.

    Args:
        red_type, target: Kind of action and subnet or host, uint64. Anything is allowed: an action
            on what red does not know fails, a kind that does not exist is an error.
        outcomes: Four int64, see `apply`.
    """
    exploit_number, detected, pe_index, _ = outcomes
    if red_type == codes.RED_SLEEP:
        return nothing(codes.UNKNOWN, _NO_ERROR)
    if red_type > codes.IMPACT:
        return nothing(codes.FAILED, codes.BAD_RED_ACTION)
    if not knows_target(state, red_type, target):
        return nothing(codes.FAILED, _NO_ERROR)
    host = target & codes.HOST_BITS
    if red_type == codes.SWEEP:
        return sweep(state, host, tables)
    if red_type == codes.SCAN:
        return scan(state, host, tables)
    if red_type == codes.EXPLOIT:
        return exploit(state, host, exploit_number, detected, tables)
    if red_type == codes.ESCALATE:
        return escalate(state, host, pe_index, tables)
    return impact(state, host, tables)


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
ALL_BELIEFS = np.uint64(codes.BELIEF_BITS * 0x1111111111111111)


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
