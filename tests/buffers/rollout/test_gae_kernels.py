"""The kernels of advantage estimation, compiled and plain, and that LLVM makes vectors of them."""

import re

import numpy as np
import pytest
from numba import config, njit
from versions import needs

from buffers.rollout import gae as gae_kernels

NARROW, WIDE = 3, 99
FLAG = np.uint8


def inputs(num_steps, num_envs, seed=0):
    rng = np.random.default_rng(seed)
    shape = num_steps, num_envs
    rewards, final_values = rng.standard_normal((2, *shape)).astype(np.float32)
    values = rng.standard_normal((num_steps + 1, num_envs)).astype(np.float32)
    flags = [(rng.random(shape) < rate).astype(FLAG) for rate in (0.2, 0.2, 0.8)]
    return rewards, values, *flags[:2], final_values, flags[2]


def fill(kernels, rollout, *, gamma=0.9, decay=0.8):
    out = np.full((2, *rollout[0].shape), np.nan, np.float32)
    kernels.fill_advantages(*rollout, np.float32(gamma), np.float32(decay), out[0], out[1])
    return out


@pytest.mark.parametrize(
    ("with_final", "with_valid"), [(False, False), (False, True), (True, True)]
)
def test_envs_do_not_depend_on_their_neighbours(load_kernels, with_final, with_valid):
    """A wide rollout cut into strips gives the same numbers, bit for bit."""
    kernels = load_kernels(gae_kernels)
    rewards, values, terminations, truncations, final_values, valid = inputs(4, WIDE)
    rollout = (
        rewards,
        values,
        terminations,
        truncations,
        final_values if with_final else None,
        valid if with_valid else None,
    )
    wide = fill(kernels, rollout)
    for start in range(0, WIDE, 33):
        columns = slice(start, start + 33)
        strip = [None if a is None else np.ascontiguousarray(a[:, columns]) for a in rollout]
        np.testing.assert_array_equal(fill(kernels, strip), wide[:, :, columns])


@pytest.mark.parametrize("num_envs", [NARROW, WIDE])
def test_nan_after_the_end_of_an_episode_stays_there(load_kernels, num_envs):
    kernels = load_kernels(gae_kernels)
    rewards, values, terminations, truncations, final_values, _ = inputs(3, num_envs)
    terminations[0] = 1
    rewards[1:], values[1:] = np.nan, np.nan
    out = fill(kernels, (rewards, values, terminations, truncations, final_values, None))
    assert np.isfinite(out[:, 0]).all()
    assert np.isnan(out[:, 1:]).all()


@pytest.mark.slow
@pytest.mark.skipif(config.DISABLE_JIT, reason="nothing is compiled with NUMBA_DISABLE_JIT=1")
@needs("numba", "0.61", "has an LLVM that does not")
@pytest.mark.parametrize(("with_final", "with_valid"), [(False, True), (True, True)])
def test_loops_become_vector_instructions(with_final, with_valid):
    """The bodies of the loops must work on vectors of floats, or they are four times as slow."""
    row = njit(gae_kernels._advantage_row.py_func)  # cached code cannot be inspected
    rewards, values, terminations, truncations, final, valid = (a[0] for a in inputs(1, 64))
    options = final if with_final else None, valid if with_valid else None
    first = rewards, values, values.copy(), terminations, truncations, *options
    scalars = np.float32(0.9), np.float32(0.8), np.float32(0)
    out = np.empty((3, 64), np.float32)
    row(*first, out[0], *scalars, out[1], out[2])
    (code,) = row.inspect_llvm().values()
    assert re.search(r"fmul <\d+ x float>", code)
