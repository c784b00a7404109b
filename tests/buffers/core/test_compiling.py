"""Code on disk for one layout of rows beside code that is compiled for another."""

import itertools
import os
import signal
import subprocess
import sys

import pytest
from numba import config

from buffers.core import compiling
from buffers.core.compiling import njit
from vecenv.core import announcing
from vecenv.core.compiling import is_jit_off

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
from buffers.core.kernels import random_word

print(random_word(np.uint64(7), np.uint64(3)))
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


@pytest.mark.skipif(is_jit_off(), reason="nothing is compiled")
def test_a_line_says_once_that_kernels_are_compiled(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))  # nothing is there yet
    monkeypatch.setattr(announcing, "_SILENT_SECONDS", 0.002)
    monkeypatch.setattr(compiling, "_announced", [])
    for factor in (2, 3):
        assert compiling.njit()(lambda x, factor=factor: x * factor)(5) == 5 * factor
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("vecenv compiles the kernels of buffers, which takes about")
