"""An env whose state is one draw of each distribution of `vecenv.jit.random`."""

import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit

from vecenv.jit import EnvKernels, random

RATES = np.array([0.0, 0.4, 9.0, 25.0, 700.0])


@njit
def draw_all(state, rng):
    k = random.integers(rng, len(RATES))
    state.numbers[0] = random.poisson(rng, RATES[k])
    state.numbers[1] = random.binomial(rng, 30 + 200 * k, 0.1 + 0.2 * k)
    state.numbers[2] = random.choice(rng, state.weights)
    random.permutation(rng, state.order)
    random.shuffle(rng, state.weights)
    state.reals[0] = random.exponential(rng)
    state.reals[1] = random.gamma(rng, 0.3 + k)


def reset(state, rng):
    for k in range(3):
        state.weights[k] = k
    draw_all(state, rng)


def step(state, action, rng):
    draw_all(state, rng)
    return state.reals[0], random.poisson(rng, 2.0) == 0, False


def observe(state, out):
    for k in range(3):
        out[k] = state.numbers[k]
    for k in range(5):
        out[3 + k] = state.order[k]
    for k in range(2):
        out[8 + k] = state.reals[k]


FIELDS = [("numbers", np.int64, (3,)), ("order", np.int8, (5,))]
FIELDS += [("weights", np.float32, (3,)), ("reals", np.float64, (2,))]
SPACES = Box(-np.inf, np.inf, (10,), np.float64), Discrete(2)
DRAWN = EnvKernels(FIELDS, *SPACES, reset, step, observe, name="drawn")
