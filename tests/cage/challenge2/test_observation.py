"""The observation in any dtype, and what kernels say of themselves."""

import numpy as np
import pytest
from cage.challenge2.harbour import HARBOUR

from vecenv.cage.challenge2.env import cage_kernels, observation_space
from vecenv.cage.challenge2.rules.actions import observe
from vecenv.cage.challenge2.scenario import cage2_scenario
from vecenv.cage.challenge2.tables import STATE_DTYPE, compile_tables
from vecenv.core.compiling import cached_njit


@cached_njit
def observe_row(states, row, out, tables):
    observe(states[row], out, tables)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_observation_is_written_in_any_dtype_and_nowhere_else(dtype):
    states = np.zeros(1, STATE_DTYPE).view(np.recarray)
    states["obs_bits"] = np.uint64(0xA5C3F00F12345678)
    out = np.full(60, 9, dtype)
    observe_row(states, 0, out[3:55], compile_tables(cage2_scenario()))
    expected = [int(states["obs_bits"][0]) >> bit & 1 for bit in range(52)]
    assert out[3:55].tolist() == expected
    assert (out[:3] == 9).all() and (out[55:] == 9).all()


def test_kernels_describe_themselves():
    scenario = cage2_scenario()
    assert observation_space(scenario).shape == (52,)
    assert observation_space(scenario, "memory").shape == (152,)
    kernels = cage_kernels(HARBOUR)
    assert kernels.action_space.n == 2 + 5 * 7
    assert kernels.state_dtype == STATE_DTYPE
    with pytest.raises(ValueError, match=r"is 'full', expected one of bits, memory"):
        cage_kernels(scenario, observation="full")
    with pytest.raises(TypeError, match="red_policy must be an njit function or None, got 'b'"):
        cage_kernels(scenario, red_policy="b")
