"""Code on disk for one layout of rows beside code that is compiled for another."""

import importlib
import itertools
import os
import signal
import subprocess
import sys

import pytest
from numba.core import config

from buffers.core.compiling import _digest, njit

PROGRAM = """
import sys
import numpy as np
from gymnasium.spaces import Box, Discrete
from buffers import SharedReplayBuffer

LAYOUTS = {
    "image": (Box(0, 255, (2, 2), np.uint8), Box(-1, 1, (2,)), {}),
    "wide": (Box(-9, 9, (5,), np.float64), Discrete(3), {"n_step": 2, "gamma": 0.5}),
}
for name in sys.argv[1:]:
    space, actions, options = LAYOUTS[name]
    rng = np.random.default_rng(7)
    rows = 20 * 2
    columns = {
        "obs": rng.integers(0, 9, (rows, *space.shape)).astype(space.dtype),
        "next_obs": rng.integers(0, 9, (rows, *space.shape)).astype(space.dtype),
        "actions": rng.integers(0, 2, (rows, *actions.shape)).astype(actions.dtype),
        "rewards": np.arange(rows, dtype=np.float32),
        "terminations": np.arange(rows) % 7 == 0,
        "truncations": np.arange(rows) % 11 == 0,
    }
    buffer = SharedReplayBuffer(100, space, actions, num_envs=2, seed=3, **options)
    buffer.add(**columns)
    held = buffer.get(buffer.order())
    for column in ("obs", "actions") + (() if options else tuple(columns)):
        assert (getattr(held, column).numpy() == columns[column]).all(), (name, column)
    if options:
        steps = columns["rewards"] + 0.5 * np.append(columns["rewards"][2:], [0, 0])
        over = columns["terminations"] | columns["truncations"]
        assert (held.rewards.numpy() == np.where(over, columns["rewards"], steps)).all(), name
    print(name, buffer.sample(9).indices.tolist(), buffer.sample(9, replace=False).obs.sum())
"""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_layouts_do_not_disturb_one_another_in_whatever_order_they_are_compiled(tmp_path):
    said = {}
    for order in itertools.permutations(["image", "wide"]):
        folder = tmp_path / order[0]  # one cache filled by two programs
        for names in (order[:1], order):
            ended = subprocess.run(
                [sys.executable, "-c", PROGRAM, *names],
                capture_output=True, text=True, timeout=300, check=False,
                env={**os.environ, "NUMBA_CACHE_DIR": str(folder)},
            )  # fmt: skip
            assert ended.returncode == 0, ended.stdout + ended.stderr
            for line in ended.stdout.splitlines():
                said.setdefault(line.split()[0], set()).add(line)
    assert {name: len(lines) for name, lines in said.items()} == {"image": 1, "wide": 1}


KERNEL = """
import numpy as np
from buffers.core.checkpoint import mix_words

lanes = np.arange(8, dtype=np.uint64)
mix_words(np.arange(9, dtype=np.uint64), lanes)
print(lanes.tolist())
"""
LIMITED = """
import logging, resource, sys
import numba, torch
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # nothing can be written, as on a full disk
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_disk_or_damaged_files_of_the_cache_are_not_in_the_way(tmp_path):
    def run(program):
        env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", program]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, env=env
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout.splitlines()

    warning, *whole = run(LIMITED + KERNEL)
    assert warning.startswith("WARNING") and "is not kept on disk" in warning
    assert not list(tmp_path.rglob("*.nbi"))
    assert run(KERNEL) == whole
    saved = [*tmp_path.rglob("*.nbi"), *tmp_path.rglob("*.nbc")]
    assert saved
    for file in saved:
        file.write_bytes(file.read_bytes()[:60])
    assert run(LIMITED + KERNEL)[-1:] == whole  # damaged, and no room to mend it
    assert run(KERNEL) == whole


@pytest.mark.skipif(config.DISABLE_JIT, reason="nothing is compiled")
def test_ctrl_c_while_numba_loads_or_compiles_waits_until_that_is_done(monkeypatch):
    @njit()
    def plus_one(x):
        return x + 1

    def interrupted(signature, context):
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(plus_one._cache, "load_overload", interrupted)
        with pytest.raises(KeyboardInterrupt):
            plus_one(1)
    assert len(plus_one.signatures) == 1
    plus_one.disable_compile()
    assert plus_one(1) == 2


def write_package(folder, added=1, times=1, unit=1):
    """A package whose function `outer.outer` takes from three other files what it is made of."""
    compiled = "from buffers.core.compiling import _digest, njit\n\n@njit(cache=True)\n"
    imports = "from package import levels\nfrom package.inner import inner\n"
    imports += "from package.units import UNIT\n"
    files = {
        "__init__": "",
        "inner": f"{compiled}def inner(x):\n    return x + {added}\n",
        "levels": f"from package.units import UNIT\n{compiled}def times():\n    return {times}\n",
        "units": f"UNIT = {unit}\nOTHER = {added}\n",
        "outer": f"{imports}{compiled}def outer(x):\n    return inner(x) * levels.times() * UNIT\n",
    }
    (folder / "package").mkdir(exist_ok=True, parents=True)
    for name, text in files.items():
        (folder / "package" / f"{name}.py").write_text(text)


@pytest.mark.skipif(bool(config.DISABLE_JIT), reason="nothing is compiled")
def test_code_is_known_by_all_files_that_are_compiled_into_it(tmp_path, monkeypatch):
    def digest(*numbers):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write_package(folder, *numbers)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            found = _digest(importlib.import_module("package.outer").outer.py_func)
        for name in [name for name in sys.modules if name.partition(".")[0] == "package"]:
            del sys.modules[name]
        return found

    variants = [(1, 1, 1), (4, 1, 1), (4, 3, 1), (4, 3, 2)]
    digests = [digest(*numbers) for numbers in variants]
    assert len(set(digests)) == len(variants)
    assert [digest(*numbers) for numbers in variants] == digests


@pytest.mark.slow
@pytest.mark.skipif(bool(config.DISABLE_JIT), reason="nothing is compiled")
def test_code_on_disk_is_not_used_when_another_file_that_is_compiled_into_it_has_changed(tmp_path):
    program = "from package.outer import outer; print(outer(1), outer.stats.cache_hits.total())"

    def run(*numbers):
        write_package(tmp_path, *numbers)
        ended = subprocess.run(
            [sys.executable, "-B", "-c", program], capture_output=True, text=True, timeout=100,
            check=True, cwd=tmp_path,
        )  # fmt: skip
        return ended.stdout.split()

    assert run(1, 1, 1) == ["2", "0"]
    assert run(1, 1, 1) == ["2", "1"]
    assert run(4, 1, 1) == ["5", "0"]
    assert run(4, 3, 2) == ["30", "0"]
