"""Threads that compute shares of a gradient, begun and awaited in a few microseconds.

A thread that sleeps, in a queue or for the interpreter's lock, takes 50 to 100 us to wake up where
the core sleeps too: as long as the gradient of a small network. So each side first looks, for about
a millisecond and without the lock, whether the other has something for it, and the caller lets a
worker have the lock until it is in compiled code. The counts that are looked at are hints alone:
tasks and results go through queues, which each side sleeps in where nothing has come.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numba import njit, types

from vecenv.core.atomics import load, pause, store
from vecenv.core.compiling import cached_njit, is_jit_off

__all__ = ["Worker"]

_LINE = 8  # words of a line of memory; of counts of tasks:
_POSTED, _STARTED, _DONE, _CORE = range(0, 4 * _LINE, _LINE)  # the last one is the caller's core
_NEXT_S = 1e-3  # longer than what comes between two gradients of a training loop
_RESULT_S = 200e-6  # by which equal shares differ
_START_S = 20e-6  # of a worker that is awake, until it is in compiled code
_MOST_MISSES = 64
_LAST_S = 5.0  # for shares that are computed when the process ends
_CHECK_S = 1.0  # between looks whether the thread still lives

_has_cores = sys.platform == "linux"
if _has_cores:
    _core: Any = types.ExternalFunction("sched_getcpu", types.int32())
else:
    _core = njit(lambda: -1)


def _post(words, number, num_rounds, start_rounds):
    """Tell a worker that is awake of a task, and give it time to start while we need no lock."""
    words[_CORE] = _core()
    store(words, _POSTED, number)
    for _ in range(num_rounds):
        if load(words, _STARTED) >= number:
            for _ in range(start_rounds):
                pause()
            return
        pause()


def _await_task(words, number, num_rounds):
    """Report that task `number` is done; return whether the next one came soon."""
    store(words, _DONE, number)
    for _ in range(num_rounds):
        if load(words, _POSTED) > number:
            return True
        pause()
    return False


def _await_result(words, number, num_rounds):
    """Return whether task `number` was done soon."""
    for _ in range(num_rounds):
        if load(words, _DONE) >= number:
            return True
        pause()
    return False


def _is_on_core(words):
    """Whether the thread runs on the core that the caller posted from."""
    return _core() == words[_CORE]


post = cached_njit(_post, nogil=True)
await_task = cached_njit(_await_task, nogil=True)
await_result = cached_njit(_await_result, nogil=True)
is_on_core = cached_njit(_is_on_core)


@cache
def _rounds(seconds: float) -> int:
    """How many rounds of waiting take so long; 0 if there is no compiler."""
    if is_jit_off():
        return 0
    words, num_rounds = np.zeros(4 * _LINE, np.int64), 2_000
    await_result(words, 1, 1)
    found = []
    for _ in range(5):
        begin = perf_counter()
        await_result(words, 1, num_rounds)
        found.append(perf_counter() - begin)
    return int(seconds * num_rounds / max(min(found), 1e-9))


_started: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[Any]] = (
    weakref.WeakKeyDictionary()
)


@atexit.register
def _end_all() -> None:
    """End the threads: one in compiled code while the interpreter goes takes the process along."""
    for tasks in list(_started.values()):
        tasks.put(None)
    deadline = perf_counter() + _LAST_S
    for thread in list(_started):
        if thread.is_alive():
            thread.join(max(deadline - perf_counter(), 0.0))


class _Patience:
    """How long to look before sleeping: after looks in vain not at all, ever longer.

    In vain they are if the wait is long, or if the other side waits for our core.
    """

    def __init__(self, seconds: float):
        self._most = _rounds(seconds)
        self._num_skipped = self._to_skip = 0

    def rounds(self) -> int:
        """For how many rounds to look now."""
        if self._to_skip:
            self._to_skip -= 1
            return 0
        return self._most

    def note(self, *, was_in_time: bool) -> None:
        """Say whether it came within the rounds."""
        self._num_skipped = 0 if was_in_time else min(2 * self._num_skipped + 1, _MOST_MISSES)
        self._to_skip = self._num_skipped


class Worker:
    """A thread that runs functions; it ends when nobody refers to the object any more."""

    def __init__(self) -> None:
        self._start_rounds, self._patience = _rounds(_START_S), _Patience(_RESULT_S)
        self._number = 0  # of the task
        self._start()

    def _start(self) -> None:
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        self._results: SimpleQueue[Any] = SimpleQueue()
        self._words = np.zeros(4 * _LINE, np.int64)
        arguments = self._tasks, self._results, self._words
        self._thread = threading.Thread(target=_work, args=arguments, name="gradient", daemon=True)
        self._thread.start()
        self._process = os.getpid()
        _started[self._thread] = self._tasks
        weakref.finalize(self, self._tasks.put, None)

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Let the thread call a function."""
        if self._process != os.getpid():  # the thread is the other process's
            self._start()
        self._number += 1
        self._tasks.put((self._number, function, *arguments))
        if rounds := self._start_rounds:
            post(self._words, self._number, rounds, rounds)

    def end(self) -> Any:
        """Wait for the function begun last; return what it returned, or raise what it raised."""
        if rounds := self._patience.rounds():
            is_done = await_result(self._words, self._number, rounds)
            self._patience.note(was_in_time=is_done)
        while True:
            try:
                number, found = self._results.get(timeout=_CHECK_S)
            except Empty:
                if self._thread.is_alive():
                    continue
                raise RuntimeError(
                    "the thread that computes a share of a gradient is gone"
                ) from None
            if number == self._number:  # not what Ctrl-C kept an earlier call from taking
                break
        if isinstance(found, BaseException):
            raise found
        return found


def _work(tasks: SimpleQueue[Any], results: SimpleQueue[Any], words: np.ndarray) -> None:
    number, patience, can_look = 0, _Patience(_NEXT_S), not is_jit_off()
    while True:
        if can_look:  # with 0 rounds, too: it reports what is done
            rounds = patience.rounds()
            has_come = await_task(words, number, rounds)
            if rounds:
                patience.note(was_in_time=has_come)
        if (task := tasks.get()) is None:
            return
        number, function, *arguments = task
        try:
            if can_look and _has_cores and is_on_core(words):
                _leave_core(int(words[_CORE]))
            words[_STARTED] = number
            torch.get_num_threads()  # tells this thread's OpenMP what `set_num_threads` told others
            found: Any = function(*arguments)
        except BaseException as error:
            found = error
        del function, arguments, task
        results.put((number, found))
        del found


def _leave_core(core: int) -> None:
    """Move to another core: where both threads are short of breaks, Linux leaves them on one."""
    allowed = os.sched_getaffinity(0)  # of this thread alone
    if others := allowed - {core}:
        with suppress(OSError):  # that some containers forbid
            os.sched_setaffinity(0, others)
            os.sched_setaffinity(0, allowed)
