"""What kernels may call or read besides `njit` functions and numbers, and whether code is shared.

Two kernels that differ in such a thing only ran each other's code, in one process and from disk.
"""

import ctypes
import enum
import sys
from collections import namedtuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from numba import cfunc, float64, int8, njit, vectorize
from numba.experimental import jitclass
from numba.extending import overload

import vecenv
from vecenv.core.compiling import (
    _Walk,
    cached_njit,
    fingerprint,
    is_jit_off,
    is_lasting,
)
from vecenv.jit import EnvKernels, JitVectorEnv, binding, driver
from vecenv.jit.games import as_njit

if is_jit_off():
    pytest.skip("nothing is compiled", allow_module_level=True)

NAMES = sorted(
    name for name, spec in gym.registry.items() if str(spec.vector_entry_point).startswith("vecenv")
)


def ufunc(number):
    @vectorize
    def moved(x):
        return x + number

    return moved


def callback(number):
    @cfunc(float64(float64))
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


def with_class(number):
    @jitclass([("x", float64)])
    class Place:
        def __init__(self, x):
            self.x = x

        def moved(self):
            return self.x + number

    @njit
    def moved(x):
        return Place(x).moved()

    return moved


def with_local_type(number):
    @njit(locals={"y": int8} if number == 2.0 else {})
    def moved(x):
        y = int(x + 257 + number - 2.0)
        return float(y)

    return moved


def with_address(number):
    table = ctypes.CDLL(None)
    function = table.sqrt if number == 2.0 else table.fabs
    function.argtypes, function.restype = [ctypes.c_double], ctypes.c_double
    return function


MAKERS = {
    ufunc: (3.0, 4.0),
    callback: (3.0, 4.0),
    overloaded: (3.0, 4.0),
    with_class: (3.0, 4.0),
    with_local_type: (258.0, 3.0),
    with_address: (2.0, 2.0**0.5),
}


def kernels_with(moved):
    def reset(state, rng):
        state.x = 2.0

    def step(state, action, rng):
        return moved(state.x), False, False

    def observe(state, out):
        out[0] = state.x

    space = Box(-9, 9, (1,), np.float64)
    return EnvKernels([("x", np.float64)], space, Discrete(2), reset, step, observe)


@pytest.mark.parametrize(
    "make",
    [make if make is ufunc else pytest.param(make, marks=pytest.mark.slow) for make in MAKERS],
    ids=lambda make: make.__name__,
)
@pytest.mark.filterwarnings("ignore:Cannot cache compiled function")
@pytest.mark.filterwarnings("ignore:.*First-class function type")
@pytest.mark.filterwarnings("ignore:.*allocates memory")
def test_kernels_that_differ_in_what_they_call_only_run_their_own_code(make):
    rewards = []
    for number in (1.0, 2.0):
        envs = JitVectorEnv(kernels_with(make(number)), dry_run=False)
        envs.reset(seed=0)
        rewards.append(envs.step([0])[1][0])
    assert rewards == pytest.approx(MAKERS[make])


class Move(enum.IntEnum):
    UP = 1


Pair = namedtuple("Pair", "one other")


class TooFarError(ValueError):
    pass


def closing_over(value):
    def inner(x):
        return value

    return inner


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 2, 2.5, 1j, "text", b"bytes", (1, (2.0, "x")), frozenset({"a", "b"})),
        *(np.float32(2), np.arange(3), np.dtype([("x", "f4")]), np.float32, float64, float64[:]),
        *(Move, Move.UP, Pair, Pair(1, 2.0), TooFarError, ValueError, len, np.sin, np.sum),
        *(np.random.rand, np.linalg.norm, np, range(3), slice(1), ...),
    ],
)
def test_constants_that_compiled_code_may_have_are_known(value):
    assert is_lasting(fingerprint([closing_over(value)]))


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


@pytest.mark.parametrize("name", NAMES)
def test_all_code_of_bundled_envs_is_kept(name, monkeypatch):
    walks = []

    def note(kernels, functions, constants):
        compiled = {name: as_njit(function) for name, function in functions.items()}
        scope = binding.bound_scope(compiled, constants, njit(inline="always"))
        walks.append(_Walk([binding.rebound(driver.attend, scope)]))
        walks.append(_Walk([*functions.values(), *constants.values()]))
        raise _NotCompiledError

    monkeypatch.setattr(binding, "_compiled", note)
    monkeypatch.setattr(binding, "_loops", {})
    with pytest.raises(_NotCompiledError):
        vecenv.make_vec(name, 2, backend="jit")
    assert [walk.unknown for walk in walks] == [[], []]


def test_all_code_of_the_package_is_kept():
    found = {
        f"{module.__name__}.{name}": value
        for module in list(sys.modules.values())
        if module.__name__.startswith("vecenv.")
        for name, value in vars(module).items()
        if hasattr(getattr(value, "_cache", None), "original")
    }
    assert len(found) > 3
    for name, value in found.items():
        assert not _Walk([value._cache.original]).unknown, name
