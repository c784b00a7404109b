"""Ctrl-C while workers start and end leaves none; that in calls: tests/fuzz/interrupts.py."""

import asyncio
import contextlib
import faulthandler
import gc
import os
import signal
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
from workers.faulty_envs import FINE, FaultyEnv, children, wait_until_gone

import vecenv
from vecenv import AsyncVectorEnv
from vecenv.workers.pool import Pool

PACKAGE = str(Path(vecenv.__file__).parent)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of this package that a call comes to.

    Attributes:
        has_struck: Whether the call had so many lines.
    """

    def __init__(self, line):
        self.left = line
        self.has_struck = False
        self._pid = os.getpid()

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, kind, error, trace):
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and not self.has_struck and os.getpid() == self._pid:
            self.left -= 1
            if self.left == 0:
                self.has_struck = True
                raise KeyboardInterrupt
        return self._trace


def in_fork(act, *args):
    """Call `act` in a fork, which must end well and in time."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            faulthandler.dump_traceback_later(250, exit=True)
            act(*args)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def strike_closing(stride, options):
    line = 0
    while True:
        line += stride
        envs = AsyncVectorEnv([FaultyEnv] * 2, num_workers=2)
        pids = [seat.process.pid for seat in envs._pool.seats]
        envs.reset()
        interrupt = Interrupt(line)
        with interrupt:
            envs.close(**options)
        envs.close()
        assert envs.closed
        assert wait_until_gone(pids, 5) == []
        if not interrupt.has_struck:
            assert line > 3 * stride
            return


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("stride", "options"), [(83, {}), (3, {}), (3, {"terminate": True})])
def test_a_second_close_ends_what_ctrl_c_has_left_of_the_first(stride, options):
    in_fork(strike_closing, stride, options)


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


def test_workers_end_when_nobody_has_their_vector_env():
    with no_garbage_collection():
        envs = AsyncVectorEnv([FaultyEnv] * 2, num_workers=2)
        pids = [seat.process.pid for seat in envs._pool.seats]
        envs.reset(seed=0)
        envs.send(np.full(2, FINE))
        envs.recv()
        del envs
        assert wait_until_gone(pids, 5) == []


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
        assert wait_until_gone(pids, 5) == []


@pytest.mark.parametrize("started", ["Popen", "fork"])
def test_ctrl_c_twice_while_a_process_is_started_leaves_none(started, monkeypatch):
    import subprocess

    struck = []

    def twice(call):
        def interrupted(*args, **kwargs):
            before = os.getpid()
            result = call(*args, **kwargs)
            if os.getpid() == before:
                struck.append(started)
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return result

        return interrupted

    owner, name = (subprocess.Popen, "__init__") if started == "Popen" else (os, "fork")
    monkeypatch.setattr(owner, name, twice(getattr(owner, name)))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = set(children())
    try:
        with pytest.raises(KeyboardInterrupt):
            AsyncVectorEnv([FaultyEnv] * 2, num_workers=2, context="fork")
        assert struck
        assert wait_until_gone(set(children()) - before, 5) == []
    finally:
        signal.signal(signal.SIGINT, handler)
