"""Draw the network of an episode (SPEC 2), and play one step in the order of SPEC 4.

For compiled code. `apply` plays a step with draws from any source (see `draws`). `vecenv.jit` runs
the kernels `reset` and `step`, which draw from the game's own random stream.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.actions import (
    blue_effects,
    checked_choice,
    choose,
    digest,
    red_action,
    submit,
)
from vecenv.cage.challenge4.rules.events import begin_log, begin_step
from vecenv.cage.challenge4.rules.green import (
    choose_greens,
    draw_quiet,
    greens_by_exception,
    greens_one_by_one,
    num_servers_in,
)
from vecenv.cage.challenge4.rules.sessions import (
    add_session,
    check_sessions,
    find_session,
    offer,
    reassign,
)
from vecenv.cage.challenge4.rules.state import count, nth
from vecenv.jit.random import integers

MIN_USERS, MIN_SERVERS = 3, 1
_NUM_HQ_SUBNETS = 3


@njit
def _draw_services(subnet, rng):
    """Draw the set int64 of services of a host."""
    services = np.int64(codes.SSH)
    if subnet in (codes.OZA, codes.OZB):
        services |= codes.OT
    extras = np.int64(0)  # of web, database, mail
    for _ in range(integers(rng, codes.MAX_EXTRAS + 1)):
        left = 0b111 & ~extras
        extras |= 1 << nth(left, integers(rng, count(left)))
    return services | (extras * codes.WEB)


@njit
def generate(state, rng):
    """Draw a network and the subnets that red agents know; return red agent 0's host int64."""
    for host in range(codes.NUM_HOSTS):
        state.services[host] = 0
    for subnet in range(codes.NUM_HOSTS // 16):
        num_users = MIN_USERS + integers(rng, codes.MAX_USERS - MIN_USERS + 1)
        num_servers = MIN_SERVERS + integers(rng, codes.MAX_SERVERS - MIN_SERVERS + 1)
        state.num_users[subnet], state.num_servers[subnet] = num_users, num_servers
        users, servers = (1 << num_users) - 1, (1 << num_servers) - 1
        state.exists[subnet] = users | (servers << codes.FIRST_SERVER)
        for k in range(num_users):
            state.services[subnet * 16 + k] = _draw_services(subnet, rng)
        for k in range(codes.FIRST_SERVER, codes.FIRST_SERVER + num_servers):
            state.services[subnet * 16 + k] = _draw_services(subnet, rng)
    for agent in range(codes.NUM_RED - 1):
        state.known_subnets[agent] = codes.RED_SUBNETS[agent]
    state.known_subnets[codes.NUM_RED - 1] = 1 << (codes.PUB + integers(rng, _NUM_HQ_SUBNETS))
    hosts = np.int64(state.exists[codes.CON])
    return np.int64(codes.CON * 16) + nth(hosts, integers(rng, count(hosts)))


@njit
def begin(state, start_host):
    """Set the initial state of an episode, except the network and the known subnets."""
    state.t = state.phase = state.overflow = state.reward = state.quiet_greens = 0
    for part in range(4):
        state.reward_parts[part] = 0
    for zone in range(codes.NUM_ZONES):
        state.blocks[zone] = 0
    for subnet in range(codes.NUM_SUBNETS):
        state.red_hosts[subnet] = state.degraded[subnet] = state.phished[subnet] = 0
        state.process_events[subnet] = state.connection_events[subnet] = 0
        state.work_failed[subnet] = state.access_failed[subnet] = state.barred[subnet] = 0
        for phase in range(3):
            allowed = codes.GREEN_ALLOWED[phase, subnet]
            state.num_destinations[phase, subnet] = num_servers_in(state, allowed)
    for agent in range(codes.NUM_BLUE):
        state.blue_family[agent] = state.blue_target[agent] = state.blue_source[agent] = 0
        state.blue_left[agent] = state.messages[agent] = 0
        state.blue_success[agent] = codes.UNKNOWN
    for agent in range(codes.NUM_RED):
        _begin_red(state, agent)
    for host in range(codes.NUM_HOSTS):
        services = np.int64(state.services[host])
        level = codes.FULL if services else 0
        state.svc[host] = level | (codes.OT_RUNNING if services & codes.OT else 0)
        state.decoys[host] = state.decoy_order[host] = state.green[host] = 0
        state.max_pid[host] = state.num_vsftpd[host] = 0
        for decoy in range(4):
            state.decoy_pid[host, decoy] = 0
    _clear_pools(state)
    add_session(state, 0, start_host, codes.KIND_A | codes.ABSTRACT, 0)
    offer(state, 0, 0)
    state.active[0] = 1


@njit
def _begin_red(state, agent):
    state.choice_type[agent] = codes.INACTIVE
    state.choice_target[agent] = state.choice_session[agent] = codes.NONE
    state.busy_type[agent] = state.busy_target[agent] = state.busy_session[agent] = codes.NONE
    state.done_type[agent] = state.done_target[agent] = state.done_success[agent] = codes.NONE
    state.busy_left[agent] = 0
    state.red_exploit[agent] = codes.NO_EXPLOIT
    state.found_ports[agent] = state.found_name[agent] = state.found_links[agent] = 0
    state.active[agent] = state.has_digested[agent] = state.gained[agent] = state.lost[agent] = 0
    state.num_sessions[agent] = state.num_memory[agent] = state.num_offered[agent] = 0
    state.num_table[agent] = state.num_handed[agent] = 0
    for host in range(codes.NUM_HOSTS):
        state.fsm[agent, host] = 0


@njit
def _clear_pools(state):
    """Clear the data of earlier episodes from the unused parts of lists."""
    state.num_foreign = state.num_suspicious = state.num_old_vsftpd = 0
    for agent in range(codes.NUM_RED):
        for index in range(state.table.shape[1]):
            state.table[agent, index] = 0
        for index in range(state.session_ident.shape[1]):
            state.session_ident[agent, index] = state.session_host[agent, index] = 0
            state.session_flags[agent, index] = state.session_pid[agent, index] = 0
        for index in range(state.memory_ident.shape[1]):
            state.memory_ident[agent, index] = state.memory_host[agent, index] = 0
            state.memory_ports[agent, index] = 0
        for index in range(state.offered.shape[1]):
            state.offered[agent, index] = 0
        for index in range(state.handed.shape[1]):
            state.handed[agent, index] = 0
    for index in range(state.suspicious_pid.shape[0]):
        state.suspicious_pid[index] = state.suspicious_host[index] = 0
    for index in range(state.old_vsftpd_pid.shape[0]):
        state.old_vsftpd_pid[index] = state.old_vsftpd_host[index] = 0


@njit
def _choose_red(state, agent, chance, rules, own_red):
    """Let a red agent process what it has seen and choose an action (SPEC 4.2, SPEC_RED 7.4)."""
    kind, target, ident = np.int64(codes.INACTIVE), np.int64(codes.NONE), np.int64(codes.NONE)
    if state.active[agent]:
        digest(state, agent)
        kind = np.int64(codes.NONE)
        if state.busy_left[agent] == 0:
            if own_red is None:
                kind, target, ident = choose(state, agent, chance, rules)
            else:
                kind, target, ident = checked_choice(state, agent, own_red(state, agent, chance[0]))
    state.choice_type[agent] = kind
    state.choice_target[agent] = target
    state.choice_session[agent] = ident
    if kind < codes.INACTIVE and state.busy_left[agent] == 0:
        state.busy_type[agent] = kind
        state.busy_target[agent] = target
        state.busy_session[agent] = ident
        state.busy_left[agent] = codes.RED_TICKS[kind]


@njit
def _tick_red(state, agent):
    """Count an agent's action down; drop a due action whose session is gone (SPEC 4.3, 4.4)."""
    state.done_type[agent] = state.done_target[agent] = state.done_success[agent] = codes.NONE
    state.red_exploit[agent] = codes.NO_EXPLOIT
    state.found_ports[agent] = state.found_name[agent] = state.found_links[agent] = 0
    left = np.int64(state.busy_left[agent])
    if left == 0:
        return
    state.busy_left[agent] = left - 1
    if left > 1:
        return
    state.done_type[agent] = state.busy_type[agent]
    state.done_target[agent] = state.busy_target[agent]
    is_there = find_session(state, agent, np.int64(state.busy_session[agent])) >= 0
    state.done_success[agent] = codes.FAILED if is_there else codes.DROPPED


@njit
def _act_red(state, agent, chance):
    """Execute an agent's action if it is due and was not dropped."""
    if state.done_type[agent] == codes.NONE or state.done_success[agent] == codes.DROPPED:
        return
    kind, target = np.int64(state.done_type[agent]), np.int64(state.done_target[agent])
    ident = np.int64(state.busy_session[agent])
    if red_action(state, agent, kind, target, ident, chance):
        state.done_success[agent] = codes.SUCCEEDED


@njit
def _count_reward(state, cost):
    """Add up the reward of the step (SPEC 9)."""
    phase = np.int64(state.phase)
    work = access = impacts = np.int64(0)
    for subnet in range(codes.NUM_SUBNETS):
        if state.work_failed[subnet]:
            work += codes.WORK_REWARD[phase, subnet] * count(np.int64(state.work_failed[subnet]))
        if state.access_failed[subnet]:
            access += codes.ACCESS_REWARD[phase, subnet] * count(
                np.int64(state.access_failed[subnet])
            )
    for agent in range(codes.NUM_RED):
        if state.done_type[agent] == codes.IMPACT and state.active[agent]:
            impacts += codes.IMPACT_REWARD[phase, np.int64(state.done_target[agent]) >> 4]
    parts = state.reward_parts
    parts[0], parts[1], parts[2], parts[3] = work, access, impacts, cost
    state.reward = work + access + impacts + cost


@njit
def apply(state, actions, chance, rules, own_red=None):
    """Play one step.

    Args:
        state: STATE_DTYPE record, changed in place.
        actions: Integers (10,): the five blue agents' actions, then their messages (bit i is
            element i).
        chance: Source of draws: (rng, None) or (rng, tape), see `draws`.
        rules: Record of `compile_rules`.
        own_red: Function that chooses for red instead of `actions.choose`; or None.
    """
    begin_step(state, rules)
    t = np.int64(state.t)
    state.phase = np.int64(t >= rules.second_phase) + np.int64(t >= rules.third_phase)  # SPEC 1.6
    for subnet in range(codes.NUM_SUBNETS):
        state.process_events[subnet] = state.connection_events[subnet] = 0
        state.work_failed[subnet] = state.access_failed[subnet] = 0
    cost = np.int64(0)
    for agent in range(codes.NUM_BLUE):
        cost += submit(state, agent, np.int64(actions[agent]))
        state.messages[agent] = np.int64(actions[codes.NUM_BLUE + agent]) & 255
    is_one_by_one = chance[1] is not None or rules.greens_one_by_one
    if is_one_by_one:
        choose_greens(state, chance)
    for agent in range(codes.NUM_RED):
        _choose_red(state, agent, chance, rules, own_red)
        _tick_red(state, agent)
    blue_effects(state, chance)
    if is_one_by_one:
        greens_one_by_one(state, chance, rules)
    else:
        greens_by_exception(state, chance, rules)
    for agent in range(codes.NUM_RED):
        _act_red(state, agent, chance)
    reassign(state)
    for agent in range(codes.NUM_RED):
        is_active = state.num_sessions[agent] > 0
        state.active[agent] = is_active
        if is_active:
            check_sessions(state, agent, chance)
        else:  # an inactive agent's sightings are discarded
            state.gained[agent] = 0
    state.t = t + 1
    _count_reward(state, cost)


@njit
def reset(state, rng, rules):
    """Draw a network and begin an episode on it (SPEC 2)."""
    start_host = generate(state, rng)
    begin(state, start_host)
    state.quiet_greens = draw_quiet(rng, rules)
    begin_log(state, rng, rules)


def step_kernel(read, own_red=None):
    """Return a kernel that plays one step with the game's own draws.

    Args:
        read: Compiled function from the env's action to ten int64, see `apply`.
        own_red: Compiled function `(state, agent, rng)` that chooses for red; None for the
            challenge's red agents.
    """

    @njit
    def step(state, actions, rng, rules):
        """Return the reward, and whether the episode of all agents is over (after S - 1 steps)."""
        apply(state, read(actions), (rng, None), rules, own_red)
        is_over = np.int64(state.t) >= rules.steps - 1
        return float(state.reward), is_over, is_over

    return step
