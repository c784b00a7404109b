"""What kernels may call or read besides `njit` functions and numbers, and whether code is shared.

Two kernels that differ in such a thing only ran each other's code, in one process and from disk.
"""

import numpy as np
import pytest
from choices import fast_are
from jit.toy_env import observe_x, small_kernels
from jit.toy_rolls import bundled_ids
from numba import njit, vectorize
from numba.extending import overload

import vecenv
from vecenv.core.compiling import _Walk, cached_njit, is_jit_off
from vecenv.jit import JitVectorEnv, binding, driver

if is_jit_off():
    pytest.skip("nothing is compiled", allow_module_level=True)


def ufunc(number):
    @vectorize
    def moved(x):
        return x + number

    return moved


def overloaded(number):
    def moved(x):
        raise NotImplementedError

    @overload(moved)
    def choose(x):
        def compiled(x):
            return x + number

        return compiled

    return moved


def kernels_with(moved):
    def reset(state, rng):
        state.x = 2.0

    def step(state, action, rng):
        return moved(state.x), False, False

    return small_kernels([("x", np.float64)], reset, step, observe_x)


@pytest.mark.parametrize("make", fast_are([ufunc], [ufunc, overloaded]))
@pytest.mark.filterwarnings("ignore:Cannot cache compiled function")
def test_kernels_that_differ_in_what_they_call_only_run_their_own_code(make):
    rewards = []
    for number in (1.0, 2.0):
        envs = JitVectorEnv(kernels_with(make(number)), dry_run=False)
        envs.reset(seed=0)
        rewards.append(envs.step([0])[1][0])
    assert rewards == pytest.approx((3.0, 4.0))


def closing_over(value):
    def inner(x):
        return value

    return inner


def local_error():
    class LocalError(ValueError):
        pass

    return LocalError


@pytest.mark.slow
def test_code_that_is_not_known_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(binding, "_loops", {})
    hidden = local_error()

    def moved(x):
        if x > 5:
            raise hidden
        return x

    function = cached_njit(moved)
    assert function(1.0) == 1.0 and not list(tmp_path.rglob("*.nb?"))
    JitVectorEnv(kernels_with(njit(moved)), dry_run=False)
    assert not binding._loops
    assert not [path for path in tmp_path.rglob("*.nb?") if path.name.startswith("driver.attend")]


class _NotCompiledError(Exception):
    pass


@pytest.mark.parametrize("name", bundled_ids("vecenv"))
def test_all_code_of_bundled_envs_is_kept(name, monkeypatch):
    walks = []

    def note(kernels, params):
        functions, constants = binding.njit_parts(kernels, params)
        scope = binding.bound_scope(functions, constants, njit(inline="always"))
        walks.append(_Walk([binding.rebound(driver.attend, scope)]))
        walks.append(_Walk([*functions.values(), *constants.values()]))
        raise _NotCompiledError

    monkeypatch.setattr(binding, "_compiled", note)
    monkeypatch.setattr(binding, "_loops", {})
    with pytest.raises(_NotCompiledError):
        vecenv.make_vec(name, 2, backend="jit")
    assert [walk.unknown for walk in walks] == [[], []]
