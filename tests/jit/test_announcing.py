"""Users are told when compiling takes long: once, and only then."""

import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from choices import needs_jit
from jit.toy_env import observe_x, small_kernels

import vecenv
from vecenv.core import compiling
from vecenv.core.compiling import announced
from vecenv.jit import JitVectorEnv, binding

ROOT = Path(vecenv.__file__).parents[1]


def lines_of(caplog):
    return [one.getMessage() for one in caplog.records if "compiles" in one.getMessage()]


@pytest.mark.slow
@needs_jit
def test_what_is_compiled_is_announced_and_what_is_loaded_is_not(monkeypatch, caplog):
    monkeypatch.setattr(compiling, "_SILENT_SECONDS", 0.05)
    salt = int.from_bytes(os.urandom(4))  # so that there is none on disk

    def reset(state, rng):
        state.x = salt

    def step(state, action, rng):
        state.x += salt
        return 0.0, False, False

    kernels = small_kernels([("x", "i8")], reset, step, observe_x, name="Salted")
    for _ in range(2):
        binding._loops.clear()  # the second one is loaded
        JitVectorEnv(kernels, dry_run=False).close()
    (line,) = lines_of(caplog)
    assert line.startswith("vecenv compiles Salted, which may take a minute; later")
    assert not any("announcement" in thread.name for thread in threading.enumerate())


def test_nothing_is_said_in_time_in_workers_or_of_an_error(monkeypatch, caplog):
    with announced("quick"):
        pass
    monkeypatch.setattr(compiling, "_SILENT_SECONDS", 0.01)
    with announced("loaded", is_compiling=lambda: False):
        time.sleep(0.05)
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.current_process(), "_name", "vecenv-worker-0")
        with announced("of a worker"):
            time.sleep(0.05)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["/ray/_private/workers/default_worker.py"])
        with announced("of an actor"):
            time.sleep(0.05)
    with pytest.raises(ZeroDivisionError), announced("broken"):
        raise ZeroDivisionError
    time.sleep(0.05)
    assert lines_of(caplog) == []
    assert not any("announcement" in thread.name for thread in threading.enumerate())
