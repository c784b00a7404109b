"""Green users (SPEC 6): one by one, or by exception.

Most users do nothing that anybody sees: their work succeeds, their access succeeds, or they sleep.
A user whose host has all services at 100 %, and whose subnet has no blocked pair, does something
only with a false alarm or by opening a phishing mail, with the same small probability each step,
independently. So the number of such users until the next one that does something is geometric:
`quiet_greens` counts it down, over steps too. The others take one random word each.
"""

import math

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules.bits import count, has, nth
from vecenv.cage.challenge4.rules.codes import (
    ACCESS_ALARM,
    ACCESS_DEST,
    ACCESS_DONE,
    ACCESS_FAILED,
    ACCESS_SERVICE,
    DECOY_SHIFT,
    FIRST_GREEN_ACTOR,
    FIRST_SERVER,
    GREEN_ACTION,
    GREEN_ALLOWED,
    GREEN_SLEEP,
    GREEN_SLEPT,
    LEVEL,
    LEVEL_BITS,
    LOCAL_WORK,
    NUM_SUBNETS,
    WORK_ALARM,
    WORK_DONE,
    WORK_FAILED,
    WORK_PHISH,
    WORK_RELIABILITY,
    WORK_SERVICE,
)
from vecenv.cage.challenge4.rules.draws import draw_index, draw_unit
from vecenv.cage.challenge4.rules.processes import note_connection, note_process, num_genuine
from vecenv.cage.challenge4.rules.sessions import phish
from vecenv.jit.random import integers, next_word, uniform

_HALF = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_NEVER = 2**31 - 1


@njit
def num_destinations(state, allowed):
    """Number int64 of server hosts in a set int64 of subnets."""
    num = np.int64(0)
    for subnet in range(NUM_SUBNETS):
        if has(allowed, subnet):
            num += np.int64(state.num_servers[subnet])
    return num


@njit
def nth_destination(state, allowed, n):
    """The n-th server host int64 in a set of subnets, in host order."""
    for subnet in range(NUM_SUBNETS):
        if has(allowed, subnet):
            num = np.int64(state.num_servers[subnet])
            if n < num:
                return np.int64(subnet * 16 + FIRST_SERVER + n)
            n -= num
    return np.int64(0)


@njit
def is_blocked(state, a, b):
    """Whether the pair of subnets is blocked in either direction (SPEC 6.3)."""
    return has(np.int64(state.blocks[a]), b) or has(np.int64(state.blocks[b]), a)


@njit
def service_level(state, host, index):
    """Level int64 of the service that a user's work draws (SPEC 6.2)."""
    word, genuine = np.int64(state.svc[host]), num_genuine(state, host)
    if index < genuine:
        return word & LEVEL_BITS
    decoy = (np.int64(state.decoy_order[host]) >> (2 * (index - genuine))) & 3
    return (word >> (DECOY_SHIFT + 3 * decoy)) & LEVEL_BITS


@njit
def num_services(state, host):
    """Number int64 of services that a user's work draws from."""
    return num_genuine(state, host) + count(np.int64(state.decoys[host]))


@njit
def _fail_work(state, host):
    subnet = host >> 4
    state.work_failed[subnet] = np.int64(state.work_failed[subnet]) | (1 << (host & 15))


@njit
def _fail_access(state, host, destination):
    subnet = host >> 4
    state.access_failed[subnet] = np.int64(state.access_failed[subnet]) | (1 << (host & 15))
    note_connection(state, destination)


@njit
def choose_greens(state, chance):
    """Draw what every green user does (SPEC 6.1), into `green`."""
    actor = np.int64(FIRST_GREEN_ACTOR)
    for subnet in range(NUM_SUBNETS):
        for k in range(np.int64(state.num_users[subnet])):
            state.green[subnet * 16 + k] = draw_index(chance, GREEN_ACTION, actor, 3)
            actor += 1


@njit
def greens_one_by_one(state, chance, rules):
    """Carry out what `choose_greens` drew (SPEC 6.2, 6.3); `green` becomes the results."""
    actor = np.int64(FIRST_GREEN_ACTOR)
    for subnet in range(NUM_SUBNETS):
        for k in range(np.int64(state.num_users[subnet])):
            host = np.int64(subnet * 16 + k)
            choice = np.int64(state.green[host])
            if choice == LOCAL_WORK:
                state.green[host] = _work(state, host, chance, actor, rules)
            elif choice == ACCESS_SERVICE:
                state.green[host] = _access(state, host, chance, actor, rules)
            else:
                state.green[host] = GREEN_SLEPT
            actor += 1


@njit
def _work(state, host, chance, actor, rules):
    """LocalWork of the user of a host; return the result int64."""
    index = draw_index(chance, WORK_SERVICE, actor, num_services(state, host))
    reliability = LEVEL * service_level(state, host, index)
    if draw_index(chance, WORK_RELIABILITY, actor, 100) >= reliability:
        _fail_work(state, host)
        return np.int64(WORK_FAILED)
    if draw_unit(chance, WORK_ALARM, actor) < rules.alarm_rate:
        note_process(state, host)
    if draw_unit(chance, WORK_PHISH, actor) < rules.phishing_rate:
        phish(state, host, chance, actor)
    return np.int64(WORK_DONE)


@njit
def _access(state, host, chance, actor, rules):
    """AccessService of the user of a host; return the result int64."""
    subnet = host >> 4
    allowed = GREEN_ALLOWED[state.phase, subnet]
    index = draw_index(chance, ACCESS_DEST, actor, num_destinations(state, allowed))
    destination = nth_destination(state, allowed, index)
    if is_blocked(state, subnet, destination >> 4):
        _fail_access(state, host, destination)
        return np.int64(ACCESS_FAILED)
    if draw_unit(chance, ACCESS_ALARM, actor) < rules.alarm_rate:
        note_connection(state, destination)
    return np.int64(ACCESS_DONE)


# --- by exception ---


@njit
def _blocked_with(state, subnet):
    """Set int64 of subnets b for which the pair (subnet, b) is blocked."""
    blocked = np.int64(state.blocks[subnet])
    for other in range(NUM_SUBNETS):
        blocked |= ((np.int64(state.blocks[other]) >> subnet) & 1) << other
    return blocked


@njit
def draw_quiet(rng, rules):
    """Draw how many quiet users there are until the next one that does something, int64."""
    if rules.quiet_scale == 0.0:
        return np.int64(_NEVER)
    gap = math.log(1.0 - uniform(rng)) * rules.quiet_scale
    return np.int64(min(gap, float(_NEVER)))


@njit
def _not_quiet(state, host, rng, rules):
    """Draw what a user does about whom it is known that it does something."""
    share = uniform(rng)
    if share < rules.share_access:
        allowed = GREEN_ALLOWED[state.phase, host >> 4]
        index = integers(rng, num_destinations(state, allowed))
        note_connection(state, nth_destination(state, allowed, index))
        return
    if share < rules.share_alarm:  # with or without phishing
        note_process(state, host)
    if share >= rules.share_phish:  # with or without an alarm
        subnet = host >> 4
        state.phished[subnet] = np.int64(state.phished[subnet]) | (1 << (host & 15))


@njit
def _draw_user(state, host, allowed, blocked, num, rng, rules):
    """Draw what a user does, from one word; `num` int64 is the number of its destinations."""
    word = next_word(rng)
    low = np.int64(word & _LOW_HALF)
    product = np.int64(word >> _HALF) * 3
    choice, rest = product >> 32, product & 0xFFFFFFFF  # the rest is uniform, too
    subnet = host >> 4
    if choice == GREEN_SLEEP:
        return
    if choice == ACCESS_SERVICE:
        destination = nth_destination(state, allowed, (rest * num) >> 32)
        if has(blocked, destination >> 4):
            _fail_access(state, host, destination)
        elif low < rules.alarm_word:
            note_connection(state, destination)
        return
    if has(np.int64(state.degraded[subnet]), host & 15):
        product = rest * num_services(state, host)
        level = service_level(state, host, product >> 32)
        if ((product & 0xFFFFFFFF) * 100) >> 32 >= LEVEL * level:
            _fail_work(state, host)
            return
    if low < rules.alarm_word:
        note_process(state, host)
    if rules.phish_low <= low < rules.phish_high:
        state.phished[subnet] = np.int64(state.phished[subnet]) | (1 << (host & 15))


@njit
def greens_by_exception(state, rng, rules):
    """Draw and carry out what all green users do; the law is that of one by one."""
    quiet = np.int64(state.quiet_greens)
    any_phished = np.int64(0)
    any_blocks = np.int64(0)
    for subnet in range(NUM_SUBNETS):
        any_blocks |= np.int64(state.blocks[subnet])
    for subnet in range(NUM_SUBNETS):
        state.phished[subnet] = 0
        users = (np.int64(1) << np.int64(state.num_users[subnet])) - 1
        allowed = GREEN_ALLOWED[state.phase, subnet]
        blocked = np.int64(0)
        if any_blocks:
            blocked = _blocked_with(state, subnet) & allowed
        slow = users if blocked else np.int64(state.degraded[subnet]) & users
        if slow:
            num = num_destinations(state, allowed)
            left = slow
            while left:
                k = _lowest(left)
                left &= left - 1
                _draw_user(state, np.int64(subnet * 16 + k), allowed, blocked, num, rng, rules)
        fast = users & ~slow
        if fast:
            size = count(fast)
            while quiet < size:
                _not_quiet(state, np.int64(subnet * 16) + nth(fast, quiet), rng, rules)
                quiet += 1 + draw_quiet(rng, rules)
            quiet -= size
        any_phished |= np.int64(state.phished[subnet])
    state.quiet_greens = min(quiet, _NEVER)
    if any_phished:
        for subnet in range(NUM_SUBNETS):
            for k in range(np.int64(state.num_users[subnet])):
                if has(np.int64(state.phished[subnet]), k):
                    phish(state, np.int64(subnet * 16 + k), (rng, None), 0)


@njit
def _lowest(members):
    """The lowest member int64 of a set int64 of at most 16 that is not empty."""
    return nth(members, 0)
