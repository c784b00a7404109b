"""Ctrl-C while workers start and end leaves none; that in calls: tests/fuzz/interrupts.py."""

import asyncio
import contextlib
import gc
import signal
import sys

import pytest
from workers.faulty_envs import FaultyEnv, children, wait_until_gone

from vecenv import AsyncVectorEnv
from vecenv.workers.pool import Pool


def test_handlers_that_waited_are_called_once():
    from vecenv.core.interrupts import interrupts_later

    before = signal.getsignal(signal.SIGINT)
    loop, told = asyncio.new_event_loop(), []

    async def be_interrupted() -> None:
        loop.add_signal_handler(signal.SIGINT, told.append, 1)
        with interrupts_later():
            signal.raise_signal(signal.SIGINT)
            assert not told
        await asyncio.sleep(0.01)

    try:
        loop.run_until_complete(be_interrupted())
        loop.close()
        assert told == [1]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt), interrupts_later(), interrupts_later():
            signal.raise_signal(signal.SIGINT)
            told.append(2)
        assert told == [1, 2]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


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
