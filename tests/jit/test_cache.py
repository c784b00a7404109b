import importlib
import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from choices import fast_are
from numba import config, njit
from numba.core.bytecode import FunctionIdentity

import vecenv
from vecenv.core.compiling import cached_njit, fingerprint, fresh_njit, is_jit_off, is_lasting

if is_jit_off():
    pytest.skip("nothing is compiled", allow_module_level=True)

KERNELS = """
import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit
from helper import moved
from vecenv.jit import EnvKernels, JitVectorEnv

@njit(cache=True)
def reset(state, rng):
    state.x = 0.0

@njit(cache=True)
def step(state, action, rng):
    state.x = moved(state.x)
    return 0.0, False, False

@njit(cache=True)
def observe(state, out):
    out[0] = state.x

space = Box(-9, 9, (1,), np.float32)
walk = EnvKernels([("x", np.float64)], space, Discrete(2), reset, step, observe)
envs = JitVectorEnv(walk, 2)
envs.reset(seed=0)
print(envs.step([0, 0])[0][0, 0], sum(envs._runner._run.stats.cache_hits.values()))
"""
HELPER = """
from numba import njit
from far import DISTANCE

@njit(cache=True)
def moved(x):
    return x + DISTANCE
"""


def printed(folder, *words, **environment):
    """Run a program in a folder with some arguments; return what it prints."""
    paths = os.pathsep.join([str(folder), str(Path(vecenv.__file__).parents[1])])
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment = {**inherited, "PYTHONPATH": paths, "PYTHONWARNINGS": "error", **environment}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True,
        check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


def run_script(folder, **environment):
    """Run kernels.py of a folder; return the observation after a step, and the cache hits."""
    value, hits = printed(folder, "kernels.py", **environment).split()
    return float(value), int(hits)


def write_package(folder, distance=1.0):
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "helper.py").write_text(HELPER)
    (folder / "far.py").write_text(f"DISTANCE = {distance}\n")


@pytest.mark.slow
def test_code_is_kept_until_something_it_calls_changes(tmp_path):
    write_package(tmp_path)
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert run_script(tmp_path, **cache) == (1.0, 0)
    assert run_script(tmp_path, **cache) == (1.0, 1)
    stamp = (tmp_path / "far.py").stat()
    write_package(tmp_path, distance=2.0)  # of the same size, and made to look as old
    os.utime(tmp_path / "far.py", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)  # Python's own, which has the stamp
    assert run_script(tmp_path, **cache) == (2.0, 0)


def test_damaged_files_are_replaced(tmp_path, monkeypatch):
    def num_hits():
        function = cached_njit(closing_over(5))
        assert function(1) == 6
        return sum(function.stats.cache_hits.values())

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    assert [num_hits(), num_hits()] == [0, 1]
    (saved,) = tmp_path.rglob("*.nbc")
    saved.write_bytes(saved.read_bytes()[:500])
    assert [num_hits(), num_hits()] == [0, 1]


@pytest.mark.slow
def test_code_is_kept_for_an_installation_that_cannot_be_written(tmp_path):
    installed = tmp_path / "site-packages" / "vecenv"
    shutil.copytree(
        Path(vecenv.__file__).parent, installed, ignore=shutil.ignore_patterns("__pycache__")
    )
    (installed / "jit" / "__pycache__").write_text("a file: no folder can be made here")
    write_package(tmp_path)
    (tmp_path / "vecenv").symlink_to(installed)
    user = {"XDG_CACHE_HOME": str(tmp_path / "user"), "PYTHONDONTWRITEBYTECODE": "1"}
    assert run_script(tmp_path, **user) == (1.0, 0)
    assert run_script(tmp_path, **user) == (1.0, 1)
    assert list((tmp_path / "user").rglob("*.nbi"))


VARIANTS = """
import sys
import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit
from vecenv.jit import EnvKernels, JitVectorEnv
from vecenv.jit.random import integers, uniform

def make(size, number):
    @njit
    def churn(state, rng, amount):  # too long to be inlined at three places
        total = 0.0
        for k in range(size):
            if uniform(rng) < 0.5:
                state.board[k] += amount
            elif integers(rng, 3) == 0:
                state.board[k] -= 1
                total += np.sin(state.board[k] * 0.1)
            for j in range(k):
                if state.board[j] > state.board[k]:
                    state.board[j], state.board[k] = state.board[k], state.board[j]
                    total += np.cos(j)
        return total + size

    def reset(state, rng):
        state.board[:] = 0
        churn(state, rng, 2)

    def step(state, action, rng):
        reward = churn(state, rng, 1)
        if action == 1:
            reward += churn(state, rng, 3)
            if reward > 2:
                reward -= churn(state, rng, -5)
        return reward, state.board[0] > 3, False

    def observe(state, out):
        for k in range(size):
            out[k] = state.board[k]

    space = Box(-9, 9, (size,), np.float32)
    return EnvKernels([("board", number, (size,))], space, Discrete(2), reset, step, observe)

for name in sys.argv[1:]:
    size, number = name.split(":")
    envs = JitVectorEnv(make(int(size), np.dtype(number)), 4)
    total = envs.reset(seed=0)[0].sum(dtype=float)
    for action in range(20):
        obs, rewards, *_ = envs.step([action % 2, 1, 0, action % 3 // 2])
        total += obs.sum(dtype=float) + rewards.sum()
    print(name, total)
"""


def run_variants(folder, names, **environment):
    """Run envs of one factory in a child process; return what came of each, by name."""
    (folder / "variants.py").write_text(VARIANTS)
    lines = printed(folder, "variants.py", *names, **environment).splitlines()
    return dict(line.split() for line in lines)


NAMES = ("5:int64", "9:int64", "9:int16")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]], ids="|".join)
def test_variants_of_one_factory_never_run_each_others_code(order, tmp_path):
    expected = run_variants(tmp_path, NAMES, NUMBA_DISABLE_JIT="1")
    for known in range(1, 4):  # the last is compiled, and then the others are loaded
        chosen = order[:known][::-1]
        environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONHASHSEED": str(known)}
        came = run_variants(tmp_path, chosen, **environment)
        for name in chosen:
            assert float(came[name]) == pytest.approx(float(expected[name])), (order, chosen)
    files = list((tmp_path / "cache").rglob("driver.attend-*.nbc"))
    assert len(files) == 3, "code of another process was not found"


def test_code_with_symbols_of_before_is_not_kept_on_disk(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(FunctionIdentity, "_unique_ids", itertools.count(7))
    with caplog.at_level(logging.WARNING, "vecenv"):
        assert cached_njit(closing_over(1))(1) == 2
    assert "compiled before vecenv.jit was imported" in caplog.text
    assert not list(tmp_path.rglob("*.nbi"))


LENGTH = 5


def stretched(x):
    return x * LENGTH


def twice_stretched(x):
    return 2 * stretched(x)


def test_functions_are_compiled_from_what_they_are_when_the_env_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    scope = {"LENGTH": 5, "__name__": __name__}
    scope["stretched"] = njit(types.FunctionType(stretched.__code__, scope))
    twice = types.FunctionType(twice_stretched.__code__, scope)
    assert scope["stretched"](1) == 5  # Numba keeps this length
    assert cached_njit(twice)(1) == 10
    scope["LENGTH"] = 7
    assert cached_njit(twice)(1) == 14
    again = cached_njit(twice)
    assert again(1) == 14 and again.stats.cache_hits


FACTOR = 2
TABLE = np.arange(3)


def double(x):
    return FACTOR * x


@njit
def looked_up(x):
    return TABLE[x]


@njit
def outer(x):
    return looked_up(x) + np.sin(x)


def closing_over(value):
    def inner(x):
        return x + value

    return inner


def with_globals(function, **values):
    """Copy a function so that it reads other globals."""
    return types.FunctionType(function.__code__, {**function.__globals__, **values})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (double, with_globals(double, FACTOR=3)),
        (double, with_globals(double, FACTOR=2.0)),
        (looked_up.py_func, with_globals(looked_up.py_func, TABLE=np.arange(4))),
        (looked_up.py_func, with_globals(looked_up.py_func, TABLE=np.array([0, 1, 3]))),
        (outer.py_func, with_globals(outer.py_func, looked_up=njit(double))),
        (closing_over(1), closing_over(2)),
        (closing_over(double), closing_over(with_globals(double, FACTOR=3))),
        (looked_up, njit(looked_up.py_func, fastmath=True)),
    ],
)
def test_fingerprint_changes_with_whatever_the_code_depends_on(one, other):
    assert fingerprint([one]) != fingerprint([other])


@pytest.mark.parametrize("compiled", [cached_njit, fresh_njit])
@pytest.mark.filterwarnings("ignore:.*First-class function type")
def test_functions_that_compiled_code_calls_can_be_values(compiled):
    """They have no wrapper for calls from Python, but one for calls through an address."""

    @njit("f8(f8)")
    def plus_one(x):
        return x + 1.0

    @njit("f8(f8)")
    def twice(x):
        return 2.0 * x

    def call_one_of(x, k):
        functions = (plus_one, twice)
        return functions[k](x)

    function = compiled(call_one_of)
    assert [function(3.0, 0), function(3.0, 1)] == [4.0, 6.0]


@njit
def _is_even(n):
    return True if n == 0 else _is_odd(n - 1)


@njit
def _is_odd(n):
    return False if n == 0 else _is_even(n - 1)


@njit
def _sum_to(n):
    return 0 if n == 0 else n + _sum_to(n - 1)


def _even(n):
    return _is_even(n)


def _sum(n):
    return _sum_to(n)


@pytest.mark.parametrize(
    ("function", "expected", "num_hits"), [(_even, [True, False], 0), (_sum, [10, 15], 1)]
)
def test_functions_that_call_one_another_in_turn_are_not_kept(
    function, expected, num_hits, monkeypatch, tmp_path
):
    """Numba loads them without one another's address: the process would end at the first call."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    first = cached_njit(function)
    assert [first(4), first(5)] == expected
    assert bool(list(tmp_path.rglob("*.nbc"))) == bool(num_hits)
    again = cached_njit(function)
    assert [again(4), again(5)] == expected
    assert sum(again.stats.cache_hits.values()) == num_hits


def _told(x):
    if x < 0:
        raise ValueError("x is less than", x)
    print("x is", x)  # noqa: T201 - it needs what linking leaves to the outermost function
    return x


def _tell(x):
    return _told(x) + _told(x + 1)


_told.__module__ = "vecenv.told"  # bundled functions are linked into what calls them


@pytest.mark.parametrize("compiled", [cached_njit, fresh_njit])
def test_bundled_functions_that_are_linked_in_print_and_raise(
    compiled, monkeypatch, capfd, tmp_path
):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(globals(), "_told", njit(_told))
    function = compiled(_tell)
    assert function(3) == 7
    assert capfd.readouterr().out == "x is 3\nx is 4\n"
    with pytest.raises(ValueError, match="x is less than"):
        function(-2)
    linked = function.py_func.__globals__["_told"]
    assert [one.library.get_pointer_to_function("any") for one in linked.overloads.values()] == [0]
    (code,) = function.inspect_llvm().values()
    assert "_told" in code
    private = re.findall(r"define internal .*@\S*_told", code)
    assert private and not re.findall(r"define linkonce_odr .*@\S*_told", code)


def _squares(n):
    return np.arange(n) ** 2


def _sum_of_squares(n):
    return _kept_squares(n).sum() + _kept_squares(n + 1).sum()


_kept_squares = cached_njit(_squares)


@pytest.mark.parametrize("compiled", fast_are([fresh_njit], [cached_njit, fresh_njit, njit]))
def test_what_counts_references_keeps_its_name_in_functions_that_others_call(
    compiled, monkeypatch, tmp_path
):
    """By another one, as LLVM gives to a second private function, Numba doesn't find it."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    _kept_squares(2)
    function = compiled(_sum_of_squares)
    assert function(3) == 5 + 14
    (code,) = function.inspect_llvm().values()
    names = re.findall(r"define .*@(NRT_(?:in|de)cref[.\d]*)", code)
    assert names and set(names) <= {"NRT_incref", "NRT_decref"}


def test_code_that_can_not_be_written_is_used_all_the_same(monkeypatch, caplog):
    def no_space(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", no_space)
    kernel = cached_njit(lambda x: x + 1)
    assert kernel(1) == 2
    assert "not kept on disk" in caplog.text and "No space left" in caplog.text


@pytest.mark.parametrize(
    "module", ["buffers.episodic.draws", "buffers.replay.batches", "buffers.replay.draws"]
)
def test_kernels_with_instructions_of_their_own_are_kept_on_disk(module):
    kernels = [x for x in vars(importlib.import_module(module)).values() if hasattr(x, "py_func")]
    assert kernels and all(is_lasting(fingerprint([kernel])) for kernel in kernels)
