"""The finite-state red agent (SPEC_RED 7): what it learns, and what it chooses."""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules.bits import count, has, nth
from vecenv.cage.challenge4.rules.codes import (
    CELL_ACTION,
    DISCOVER,
    DISCOVERY_RED,
    ESCALATE,
    FIRST_RED_ACTOR,
    FIRST_SERVER,
    FSM_HOST,
    FSM_SERVER,
    FSM_SESSION,
    FSM_STATE,
    FSM_SUBNET,
    IMPOSSIBLE,
    KD,
    MAX_TABLE,
    NAME_KNOWN,
    NEXT_STATE,
    NONE,
    NUM_HOSTS,
    NUM_SUBNETS,
    OFFERED_FULL,
    RD,
    RED_SUBNETS,
    SERVER_FIRST,
    SLEEPING_RED,
    STATE_BITS,
    STATE_WEIGHT,
    SUCCEEDED,
    UNKNOWN_HOST,
    WITHDRAW,
    F,
    K,
    U,
)
from vecenv.cage.challenge4.rules.draws import draw_cell, draw_index, draw_unit
from vecenv.cage.challenge4.rules.red_actions import revealed_by


@njit
def _state_of(state, agent, host):
    """State int64 of a host in the agent's table, 0 if it is not in it."""
    return np.int64(state.fsm[agent, host]) & STATE_BITS


@njit
def _set_state(state, agent, host, new):
    state.fsm[agent, host] = (np.int64(state.fsm[agent, host]) & NAME_KNOWN) | new


@njit
def _see(state, agent, host, has_name):
    """Enter a host that the agent has seen, and whether it knows its name (7.2)."""
    entry = np.int64(state.fsm[agent, host])
    if entry & STATE_BITS == 0:
        num = np.int64(state.num_table[agent])
        if num >= MAX_TABLE:  # cannot happen: its own hosts, and those that escalation reveals
            state.overflow = np.int64(state.overflow) | OFFERED_FULL
            return
        state.table[agent, num] = host
        state.num_table[agent] = num + 1
        entry |= K if state.has_digested[agent] else U
        state.lost[agent] = 1
    if has_name:
        entry |= NAME_KNOWN
    state.fsm[agent, host] = entry


@njit
def _leave_table(state, agent, host):
    """Take a host in state F off the list that the agent chooses from."""
    num_kept = np.int64(0)
    for index in range(np.int64(state.num_table[agent])):
        if state.table[agent, index] != host:
            state.table[agent, num_kept] = state.table[agent, index]
            num_kept += 1
    state.num_table[agent] = num_kept


@njit
def _move(state, agent, host, action):
    """Bring a host to the state after a success of the agent's action (7.1)."""
    before = _state_of(state, agent, host)
    after = np.int64(NEXT_STATE[before, action])
    if after == before:
        return False
    is_foreign = not has(RED_SUBNETS[agent], host >> 4)
    if is_foreign:
        state.lost[agent] = 1
    if after == U and is_foreign:
        _set_state(state, agent, host, F)
        _leave_table(state, agent, host)
        return True
    _set_state(state, agent, host, after)
    return False


@njit
def _learn_from_action(state, agent):
    """Digest the result of the agent's own action (7.1, and 3.1 of what it has seen)."""
    kind, target = np.int64(state.done_type[agent]), np.int64(state.done_target[agent])
    if kind == DISCOVER:
        index = np.int64(0)
        while index < np.int64(state.num_table[agent]):
            host = np.int64(state.table[agent, index])
            has_left = host >> 4 == target and _move(state, agent, host, kind)
            index += 0 if has_left else 1
        hosts = np.int64(state.exists[target])
        for k in range(16):
            if has(hosts, k):
                _see(state, agent, target * 16 + k, False)
        return
    _move(state, agent, target, kind)
    _see(state, agent, target, state.found_name[agent] == 1)
    if kind == ESCALATE and state.found_links[agent]:
        subnets = revealed_by(target)
        for subnet in range(NUM_SUBNETS):
            if has(subnets, subnet):
                _see(state, agent, np.int64(subnet * 16 + FIRST_SERVER), True)


@njit
def _find_lost(state, agent):
    """Hosts that the agent holds in its table, but has no session on any more, become KD (7.3)."""
    for index in range(np.int64(state.num_table[agent])):
        host = np.int64(state.table[agent, index])
        if U <= _state_of(state, agent, host) <= RD:
            is_own = has(RED_SUBNETS[agent], host >> 4)
            if not is_own or not has(np.int64(state.red_hosts[host >> 4]), host & 15):
                _set_state(state, agent, host, KD)


@njit
def digest(state, agent):
    """Learn from what was seen in the last step (SPEC_RED 3, 7.1-7.3)."""
    if state.done_type[agent] != NONE and state.done_success[agent] == SUCCEEDED:
        _learn_from_action(state, agent)
    for index in range(np.int64(state.num_handed[agent])):
        _see(state, agent, np.int64(state.handed[agent, index]), True)
    if state.gained[agent]:
        for index in range(np.int64(state.num_sessions[agent])):
            _see(state, agent, np.int64(state.session_host[agent, index]), True)
        state.gained[agent] = 0
    if state.lost[agent]:
        _find_lost(state, agent)
        state.lost[agent] = 0
    state.has_digested[agent] = 1


@njit
def _draw_host_in_state(state, agent, chance, actor):
    """Draw a host int64 as the variant "discovery" does (7.7)."""
    num = np.int64(state.num_table[agent])
    # States in the order of their first appearance, one nibble each.
    order, num_states, seen, total = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for index in range(num):
        own = _state_of(state, agent, np.int64(state.table[agent, index]))
        if not has(seen, own):
            seen |= 1 << own
            order |= own << (4 * num_states)
            num_states += 1
            total += STATE_WEIGHT[own]
    cell = _draw_state(state, chance, actor, order, num_states, total)
    chosen = (order >> (4 * cell)) & 15
    num_all, num_servers = np.int64(0), np.int64(0)
    for index in range(num):
        host = np.int64(state.table[agent, index])
        if _state_of(state, agent, host) == chosen:
            num_all += 1
            if _is_known_server(state, agent, host):
                num_servers += 1
    pool = np.int64(0)  # 0 all, 1 known servers, 2 the others
    num_pool = num_all
    if num_all > 1 and num_servers > 0:
        pool, num_pool = np.int64(1), num_servers
        if draw_unit(chance, FSM_SERVER, actor) > SERVER_FIRST and num_servers < num_all:
            pool, num_pool = np.int64(2), num_all - num_servers
    left = draw_index(chance, FSM_HOST, actor, num_pool)
    for index in range(num):
        host = np.int64(state.table[agent, index])
        if _state_of(state, agent, host) != chosen:
            continue
        is_server = _is_known_server(state, agent, host)
        if pool == 0 or (pool == 1) == is_server:
            if left == 0:
                return host
            left -= 1
    return np.int64(state.table[agent, 0])


@njit
def _is_known_server(state, agent, host):
    return host & 15 >= FIRST_SERVER and np.int64(state.fsm[agent, host]) & NAME_KNOWN != 0


@njit
def _draw_weighted(rng, tape, actor, order, num_states, total):
    if tape is None:
        left = draw_index((rng, tape), FSM_STATE, actor, total)
        for cell in range(num_states):
            weight = STATE_WEIGHT[(order >> (4 * cell)) & 15]
            if left < weight:
                return np.int64(cell)
            left -= weight
        return np.int64(0)
    else:
        return draw_index((rng, tape), FSM_STATE, actor, num_states)


@njit
def _draw_state(state, chance, actor, order, num_states, total):
    if total == 0:
        return draw_index(chance, FSM_STATE, actor, num_states)
    return _draw_weighted(chance[0], chance[1], actor, order, num_states, total)


@njit
def choose(state, agent, chance, rules):
    """Draw an action of an agent that is not busy (7.5): kind, target, session id, all int64."""
    actor = np.int64(FIRST_RED_ACTOR + agent)
    num = np.int64(state.num_table[agent])
    if rules.red_variant == SLEEPING_RED or num == 0:
        return np.int64(NONE), np.int64(NONE), np.int64(NONE)
    variant = np.int64(rules.red_variant)
    if variant == DISCOVERY_RED:
        host = _draw_host_in_state(state, agent, chance, actor)
    else:
        host = np.int64(state.table[agent, draw_index(chance, FSM_HOST, actor, num)])
    own = _state_of(state, agent, host)
    cell = draw_cell(chance, actor, variant, own)
    kind, target = CELL_ACTION[variant, own, cell], host
    if kind == DISCOVER:
        subnets = np.int64(state.known_subnets[agent])
        target = nth(subnets, draw_index(chance, FSM_SUBNET, actor, count(subnets)))
    offered = draw_index(chance, FSM_SESSION, actor, np.int64(state.num_offered[agent]))
    return kind, target, np.int64(state.offered[agent, offered])


@njit
def checked_choice(state, agent, choice):
    """Return the choice of a red agent of one's own, or NONE thrice if it can't be played.

    Of what does not exist, the session is IMPOSSIBLE; kind NONE is to wait.

    Args:
        choice: Three integers: kind; host, or subnet of DISCOVER; id of a session on offer.
    """
    kind, target, ident = np.int64(choice[0]), np.int64(choice[1]), np.int64(choice[2])
    num_targets = NUM_SUBNETS if kind == DISCOVER else NUM_HOSTS
    if not (0 <= kind < WITHDRAW and 0 <= target < num_targets):
        return np.int64(NONE), np.int64(NONE), np.int64(NONE if kind == NONE else IMPOSSIBLE)
    is_offered = False
    for index in range(np.int64(state.num_offered[agent])):
        is_offered |= state.offered[agent, index] == ident
    is_known = False
    if kind == DISCOVER:
        is_known = has(np.int64(state.known_subnets[agent]), target)
    else:
        is_known = np.int64(state.fsm[agent, target]) & STATE_BITS != UNKNOWN_HOST
    if not is_offered or not is_known:
        return np.int64(NONE), np.int64(NONE), np.int64(NONE)
    return kind, target, ident
