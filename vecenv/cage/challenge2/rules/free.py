"""The free-running simulator: the random draws, and a step and a reset built on `dynamics`.

These are the kernels that `vecenv.jit` runs: `reset(state, rng, tables)`, `step(state, action,
rng, tables)`. For compiled code.
"""

import numpy as np
from numba import njit

from vecenv.cage.challenge2.rules.attack import exploit_candidates
from vecenv.cage.challenge2.rules.bits import count, nth
from vecenv.cage.challenge2.rules.blue import blue_turn, placeable_decoys
from vecenv.cage.challenge2.rules.codes import DECOY, ESCALATE, EXPLOIT, MAX_HOSTS, NONE
from vecenv.cage.challenge2.rules.red import red_policy
from vecenv.cage.challenge2.rules.sessions import num_user_sessions
from vecenv.cage.challenge2.rules.slots import (
    DETECTION_SLOT,
    GREEN_HOST_SLOT,
    GREEN_SLOT,
    OTHER_EXPLOIT_SLOT,
    RED_AGENT_SLOT,
    SESSION_SLOT,
    TOP_EXPLOIT_SLOT,
)
from vecenv.cage.challenge2.rules.step import begin_episode, finish_step
from vecenv.jit.random import integers_at, word_at

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_TEN = 10.0
_HALF_WORD = np.uint64(32)
_NONE = np.int64(NONE)
_HOST_BITS = np.uint64(MAX_HOSTS - 1)


@njit(forceinline=True)
def chance(rng, slot, odds):
    """Draw True with probability odds / 2**32, odds uint64."""
    return (word_at(rng, slot) >> _HALF_WORD) < odds


@njit(forceinline=True)
def draw_exploit(state, host, rng, tables):
    """Draw the exploit int64 that red uses on host uint64; NONE if it has no candidate."""
    candidates = exploit_candidates(state, host, tables)
    num_candidates = count(candidates)
    if num_candidates == _ZERO:
        return _NONE
    rank = _ZERO
    top_odds = np.uint64(tables.top_exploit_odds)
    if num_candidates > _ONE and not chance(rng, TOP_EXPLOIT_SLOT, top_odds):
        rank = _ONE + np.uint64(integers_at(rng, OTHER_EXPLOIT_SLOT, num_candidates - _ONE))
    return np.int64(nth(candidates, rank))


@njit(forceinline=True)
def draw_green(rng, tables):
    """Draw the host int64 that green scans, or NONE."""
    hosts = np.uint64(tables.green_hosts)
    if hosts == _ZERO or chance(rng, GREEN_SLOT, np.uint64(tables.green_sleep_odds)):
        return _NONE
    return np.int64(nth(hosts, np.uint64(integers_at(rng, GREEN_HOST_SLOT, count(hosts)))))


@njit(forceinline=True)
def draw_outcomes(state, red_type, target, rng, tables):
    """Draw how chance falls for a red action, after blue's turn.

    Args:
        red_type, target: Kind of red action and its target, uint64.

    Returns:
        Four int64 as `apply` takes them; NONE for draws that the action has no need of.
    """
    exploit_number = detected = pe_index = _NONE
    host = target & _HOST_BITS
    if red_type == EXPLOIT:
        exploit_number = draw_exploit(state, host, rng, tables)
        detected = np.int64(chance(rng, DETECTION_SLOT, np.uint64(tables.detection_odds)))
    elif red_type == ESCALATE:
        num_sessions = num_user_sessions(state, host)
        if num_sessions > _ZERO:
            pe_index = integers_at(rng, SESSION_SLOT, num_sessions)
    return exploit_number, detected, pe_index, draw_green(rng, tables)


@njit
def reset(state, rng, tables):
    """Begin an episode, with one of the red agents of `tables` if they name any."""
    begin_episode(state, tables)
    agents = np.uint64(tables.red_agents)
    if agents != _ZERO:
        state.red_agent = nth(agents, np.uint64(integers_at(rng, RED_AGENT_SLOT, count(agents))))


@njit(forceinline=True)
def finish_free(state, blue_hosts, red_type, target, rng, tables):
    """Do what comes after both sides have chosen; see `step` for what is returned."""
    outcomes = draw_outcomes(state, red_type, target, rng, tables)
    reward10, _ = finish_step(state, blue_hosts, red_type, target, outcomes, tables)
    return reward10 / _TEN, False, False


@njit(forceinline=True)
def step(state, action, rng, tables):
    """Step one environment: blue does `action`, an integer, red what its agent decides.

    Returns:
        Blue's reward float64, and two False: no episode ends by itself.
    """
    blue_hosts = blue_turn(state, action, tables)
    red_type, target = red_policy(state, rng, tables)
    return finish_free(state, blue_hosts, red_type, target, rng, tables)


@njit
def action_mask(state, out, tables):
    """Write which actions can have an effect, bool (num_actions,): not decoys that don't fit."""
    for index in range(min(out.shape[0], tables.num_actions)):
        kind = np.uint64(tables.action_kind[np.uint64(index)])
        out[index] = True
        if kind >= DECOY:
            host = np.uint64(tables.action_host[np.uint64(index)]) & _HOST_BITS
            decoys = placeable_decoys(state, host, tables)
            out[index] = (decoys >> (kind - np.uint64(DECOY))) & _ONE == _ONE
