"""Loops over environments for the replay hook; `vecenv.jit` has its own for free running."""

import numpy as np
from numba import njit

from vecenv.cage.challenge2.rules.observation import observe
from vecenv.cage.challenge2.rules.red import red_commit, red_options
from vecenv.cage.challenge2.rules.step import apply, begin_episode


@njit
def begin_rows(states, tables):
    """Begin an episode in every state, STATE_DTYPE (N,)."""
    for row in range(states.shape[0]):
        begin_episode(states[row], tables)


@njit
def apply_rows(states, inputs, obs, errors, tables):
    """Apply one step to every state.

    Args:
        states: STATE_DTYPE (N,), changed.
        inputs: int64 (N, 7): blue action, red type, red target, then the four outcomes of `apply`.
        obs: (N, 4 * hosts), written.
        errors: uint8 (N,), written.
    """
    for row in range(states.shape[0]):
        state, given = states[row], inputs[row]
        outcomes = (given[3], given[4], given[5], given[6])
        _, error = apply(state, given[0], given[1], given[2], outcomes, tables)
        errors[row] = error
        observe(state, obs[row], tables)


@njit
def options_rows(states, red_types, targets, tables):
    """Ask every state's red agent for its options: red_types, targets uint64 (N,), written."""
    for row in range(states.shape[0]):
        red_types[row], targets[row] = red_options(states[row], tables)


@njit
def commit_rows(states, red_types, targets, tables):
    """Tell every state's red agent its move: red_types, targets int64 (N,)."""
    for row in range(states.shape[0]):
        red_commit(states[row], np.uint64(red_types[row]), np.uint64(targets[row]), tables)
