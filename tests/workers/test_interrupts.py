"""Ctrl-C while workers start and end leaves none; that in calls: tests/fuzz/interrupts.py."""

import contextlib
import gc
import sys

import pytest
from workers.faulty_envs import FaultyEnv, children, wait_until_gone

from vecenv import AsyncVectorEnv
from vecenv.workers.pool import Pool


@contextlib.contextmanager
def no_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # an error in a `Popen` changes what it does
@pytest.mark.parametrize("kills", [True, False])
@pytest.mark.parametrize("place", ["open", "_bind_rows", "__init__"])
def test_ctrl_c_just_after_the_start_of_workers_leaves_none(place, kills, monkeypatch):
    """Also more of them, in `__del__` of the vector env and where its pool kills the workers."""
    pids, struck = [], []
    owner = Pool if place == "open" else AsyncVectorEnv
    real = getattr(owner, place)

    def interrupted(*args, **kwargs):
        result = real(*args, **kwargs)
        pids.extend(children())
        raise KeyboardInterrupt
        return result

    def swallowed(envs):
        struck.append(envs)
        struck.clear()
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, place, interrupted)
    monkeypatch.setattr(AsyncVectorEnv, "__del__", swallowed)
    if not kills:
        monkeypatch.setattr(Pool, "kill", swallowed)
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    before = set(children())
    with no_garbage_collection():
        with pytest.raises(KeyboardInterrupt):
            AsyncVectorEnv([FaultyEnv] * 2, num_workers=2)
        pids = set(pids) - before
        assert len(pids) == 3  # with the watcher
        assert wait_until_gone(pids) == []
