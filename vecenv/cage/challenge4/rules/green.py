"""Green users (SPEC 6): drawn one by one, or by exception.

Most users have no visible effect: their work succeeds, their access succeeds, or they sleep. If
nothing could fail, a user would have an effect only by a false alarm or by opening a phishing mail,
independently in each step with the same small probability p. So the number of users until the next
such user is geometric; `quiet_greens` counts it down, across steps too. That user's action may
still fail. Each of the other users fails at an access with the probability

    P(access) * P(no alarm) * P(destination blocked) / (1 - p)

and at its work with the corresponding probability; both are 0 for most users. The distribution is
that of drawing users one by one, at about one random word for each user who can fail.
"""

import math

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.draws import draw_index, draw_port, draw_unit
from vecenv.cage.challenge4.rules.events import NO_PORT, log_alarm, log_connection
from vecenv.cage.challenge4.rules.sessions import note_connection, note_process, num_genuine, phish
from vecenv.cage.challenge4.rules.state import count, has, nth, put_host
from vecenv.jit.random import integers, next_word, uniform

_HALF = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_WORD = 2.0**32
_NEVER = 2**31 - 1


@njit
def num_servers_in(state, subnets):
    """Number of server hosts, int64, in a set int64 of subnets."""
    num = np.int64(0)
    while subnets:
        num += np.int64(state.num_servers[nth(subnets, 0)])
        subnets &= subnets - 1
    return num


@njit
def nth_server_in(state, subnets, n):
    """The n-th server host int64 in a set int64 of subnets, in host order."""
    while subnets:
        subnet = nth(subnets, 0)
        num = np.int64(state.num_servers[subnet])
        if n < num:
            return subnet * 16 + codes.FIRST_SERVER + n
        n -= num
        subnets &= subnets - 1
    return np.int64(0)


@njit
def service_level(state, host, index):
    """Level int64 of the service that a user's work draws (SPEC 6.2)."""
    word, genuine = np.int64(state.svc[host]), num_genuine(state, host)
    if index < genuine:
        return word & codes.LEVEL_BITS
    decoy = (np.int64(state.decoy_order[host]) >> (2 * (index - genuine))) & 3
    return (word >> (codes.DECOY_SHIFT + 3 * decoy)) & codes.LEVEL_BITS


@njit
def _fail_access(state, host, destination):
    put_host(state.access_failed, host)
    note_connection(state, destination)
    log_connection(state, destination, host, destination, NO_PORT, host, codes.BLOCKED_PORT)


@njit
def choose_greens(state, chance):
    """Draw the action of every green user (SPEC 6.1) into `green`."""
    actor = np.int64(codes.FIRST_GREEN_ACTOR)
    for subnet in range(codes.NUM_SUBNETS):
        for k in range(np.int64(state.num_users[subnet])):
            state.green[subnet * 16 + k] = draw_index(chance, codes.GREEN_ACTION, actor, 3)
            actor += 1


@njit
def greens_one_by_one(state, chance, rules):
    """Execute the actions drawn by `choose_greens` (SPEC 6.2, 6.3); write results to `green`."""
    actor = np.int64(codes.FIRST_GREEN_ACTOR)
    for subnet in range(codes.NUM_SUBNETS):
        for k in range(np.int64(state.num_users[subnet])):
            host = np.int64(subnet * 16 + k)
            choice = np.int64(state.green[host])
            if choice == codes.LOCAL_WORK:
                state.green[host] = _work(state, host, chance, actor, rules)
            elif choice == codes.ACCESS_SERVICE:
                state.green[host] = _access(state, host, chance, actor, rules)
            else:
                state.green[host] = codes.GREEN_SLEPT
            actor += 1


@njit
def _work(state, host, chance, actor, rules):
    """LocalWork of the user of a host; return the result int64."""
    num = num_genuine(state, host) + count(np.int64(state.decoys[host]))
    index = draw_index(chance, codes.WORK_SERVICE, actor, num)
    reliability = codes.LEVEL * service_level(state, host, index)
    if draw_index(chance, codes.WORK_RELIABILITY, actor, 100) >= reliability:
        put_host(state.work_failed, host)
        return np.int64(codes.WORK_FAILED)
    if draw_unit(chance, codes.WORK_ALARM, actor) < rules.alarm_rate:
        note_process(state, host)
        log_alarm(state, host, draw_port(state, chance, actor))
    if draw_unit(chance, codes.WORK_PHISH, actor) < rules.phishing_rate:
        phish(state, host, chance, actor)
    return np.int64(codes.WORK_DONE)


@njit
def _access(state, host, chance, actor, rules):
    """AccessService of the user of a host; return the result int64."""
    subnet = host >> 4
    num = np.int64(state.num_destinations[state.phase, subnet])
    index = draw_index(chance, codes.ACCESS_DEST, actor, num)
    destination = nth_server_in(state, codes.GREEN_ALLOWED[state.phase, subnet], index)
    port = draw_port(state, chance, actor)
    if has(np.int64(state.barred[subnet]), destination >> 4):
        _fail_access(state, host, destination)
        return np.int64(codes.ACCESS_FAILED)
    if draw_unit(chance, codes.ACCESS_ALARM, actor) < rules.alarm_rate:
        note_connection(state, destination)
        log_connection(state, destination, host, host, NO_PORT, destination, port)
    return np.int64(codes.ACCESS_DONE)


# --- by exception ---


@njit
def draw_quiet(rng, rules):
    """Draw the number of quiet users before the next one with an effect, int64."""
    if rules.quiet_scale == 0.0:
        return np.int64(_NEVER)
    gap = math.log(1.0 - uniform(rng)) * rules.quiet_scale
    return np.int64(min(gap, float(_NEVER)))


@njit
def _work_failure(state, host):
    """Probability float64 that a user's work fails at the service it draws (SPEC 6.2)."""
    word, decoys = np.int64(state.svc[host]), np.int64(state.decoys[host])
    genuine = num_genuine(state, host)
    num, levels = genuine + count(decoys), genuine * (word & codes.LEVEL_BITS)
    for decoy in range(codes.NUM_DECOYS):
        if has(decoys, decoy):
            levels += (word >> (codes.DECOY_SHIFT + 3 * decoy)) & codes.LEVEL_BITS
    return 1.0 - levels / (codes.FULL * num)


@njit
def _not_quiet(state, host, blocked, chance, rules):
    """Draw the action of a user that has an effect, or would have one if nothing failed.

    `blocked` is the set int64 of subnets to which its access fails.
    """
    rng = chance[0]
    share = uniform(rng)
    subnet, bit = host >> 4, 1 << (host & 15)
    if share < rules.share_access:
        index = integers(rng, np.int64(state.num_destinations[state.phase, subnet]))
        destination = nth_server_in(state, codes.GREEN_ALLOWED[state.phase, subnet], index)
        if has(blocked, destination >> 4):
            _fail_access(state, host, destination)
        else:
            note_connection(state, destination)
            port = draw_port(state, chance, 0)
            log_connection(state, destination, host, host, NO_PORT, destination, port)
        return
    if np.int64(state.degraded[subnet]) & bit and uniform(rng) < _work_failure(state, host):
        put_host(state.work_failed, host)
        return
    if share < rules.share_alarm:  # with or without phishing
        note_process(state, host)
        log_alarm(state, host, draw_port(state, chance, 0))
    if share >= rules.share_phish:  # with or without an alarm
        state.phished[subnet] = np.int64(state.phished[subnet]) | bit


@njit
def _draw_failures(state, subnet, users, blocked, chance, rules):
    """Draw which of a subnet's quiet users fail.

    Args:
        users: Set int64.
        blocked: Set int64 of subnets to which their access fails.
    """
    rng = chance[0]
    num_blocked = num_servers_in(state, blocked)
    num = np.int64(state.num_destinations[state.phase, subnet])
    access = rules.access_failure * num_blocked / num
    degraded = np.int64(state.degraded[subnet])
    access_bound = np.int64(access * _WORD)
    left = users if blocked else users & degraded
    while left:
        k = nth(left, 0)
        left &= left - 1
        word = next_word(rng)
        number = np.int64(word >> _HALF)
        if number < access_bound:
            index = (np.int64(word & _LOW_HALF) * num_blocked) >> 32
            destination = nth_server_in(state, blocked, index)
            _fail_access(state, np.int64(subnet * 16 + k), destination)
        elif has(degraded, k):
            host = np.int64(subnet * 16 + k)
            share = access + rules.work_failure * _work_failure(state, host)
            if number < np.int64(share * _WORD):
                put_host(state.work_failed, host)


@njit
def greens_by_exception(state, chance, rules):
    """Draw and execute all green users' actions, distributed as in `greens_one_by_one`."""
    rng = chance[0]
    quiet = np.int64(state.quiet_greens)
    any_phished = np.int64(0)
    for subnet in range(codes.NUM_SUBNETS):
        size = np.int64(state.num_users[subnet])
        users = (np.int64(1) << size) - 1
        state.phished[subnet] = 0
        blocked = np.int64(state.barred[subnet])
        if blocked:
            blocked &= codes.GREEN_ALLOWED[state.phase, subnet]
        quiet_users = users
        while quiet < size:
            quiet_users &= ~(1 << quiet)
            _not_quiet(state, np.int64(subnet * 16) + quiet, blocked, chance, rules)
            quiet += 1 + draw_quiet(rng, rules)
        quiet -= size
        if blocked or np.int64(state.degraded[subnet]) & users:
            _draw_failures(state, subnet, quiet_users, blocked, chance, rules)
        any_phished |= np.int64(state.phished[subnet])
    state.quiet_greens = min(quiet, _NEVER)
    if any_phished:
        for subnet in range(codes.NUM_SUBNETS):
            for k in range(np.int64(state.num_users[subnet])):
                if has(np.int64(state.phished[subnet]), k):
                    phish(state, np.int64(subnet * 16 + k), chance, 0)
