"""Kernels that allocate, or take long to compile, are warned of."""

import dataclasses
import inspect
import warnings

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from numba import njit
from numpy import quantile

from vecenv.core.compiling import is_jit_off
from vecenv.jit import EnvKernels, JitVectorEnv, KernelCompileError
from vecenv.jit.reading import warn_of_allocations


def reset(state, rng):
    state.hand[:] = 0


def step(state, action, rng):
    return max(state.hand[0], 0), state.hand.sum() > np.abs(-3), False


def observe(state, out):
    out[0] = state.hand[1]


CARDS = EnvKernels(
    name="cards",
    state_dtype=[("hand", np.int8, (3,))],
    observation_space=Box(0, 9, (1,), np.float32),
    action_space=Discrete(2),
    reset=reset,
    step=step,
    observe=observe,
)


def clipping_step(state, action, rng):
    return np.clip(action, 0, 1), False, False  # here


def quantile_step(state, action, rng):
    return quantile(state.hand, 0.5), False, False  # here


def zeros_step(state, action, rng):
    marks = np.zeros(3)  # here
    return marks[0], False, False


def list_step(state, action, rng):
    marks = [action] * 3  # here
    return marks[0], False, False


def comprehending_step(state, action, rng):
    marks = [action + k for k in range(3)]  # here
    return marks[0], False, False


def copying_step(state, action, rng):
    return state.hand.copy()[0], False, False  # here


@njit
def sorted_card(state):
    return np.sort(state.hand)[0]  # here


def step_with_helper(state, action, rng):
    return sorted_card(state), False, False


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (clipping_step, "np.clip in clipping_step allocates .*; use min and max on numbers"),
        (quantile_step, "np.quantile .* keep such memory in a field.* many seconds to compile"),
        (zeros_step, "np.zeros in zeros_step allocates memory each time that kernel step gets"),
        (list_step, "a list in list_step allocates"),
        (comprehending_step, "a list in comprehending_step allocates"),
        (copying_step, "the method copy in copying_step allocates"),
        (step_with_helper, "np.sort in sorted_card allocates memory each time that kernel step"),
    ],
)
def test_calls_that_allocate_are_warned_of_with_file_and_line(step, message):
    with pytest.warns(UserWarning, match="cards: " + message) as caught:
        warn_of_allocations(dataclasses.replace(CARDS, step=step))
    (one,) = caught
    lines, _ = inspect.getsourcelines(inspect.getmodule(step))
    assert one.filename == __file__ and lines[one.lineno - 1].endswith("# here\n")


def test_kernels_that_allocate_nothing_are_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_allocations(CARDS)


@pytest.mark.skipif(is_jit_off(), reason="nothing is compiled")
def test_the_warning_comes_before_anything_is_compiled():
    kernels = dataclasses.replace(CARDS, step=clipping_step)
    with pytest.warns(UserWarning, match=r"np\.clip in clipping_step"):
        try:
            JitVectorEnv(kernels)
        except KernelCompileError as error:  # on numbers, in some versions of Numba
            assert "clip" in str(error)
