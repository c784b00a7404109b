"""Ctrl-C that waits until something is whole that must not be left half done.

(The same as `buffers.core.interrupts`: the two packages know nothing of each other. A test keeps it
so.)
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import operator
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["held_in_forks", "interrupts_later", "put_handlers_back"]

_MOST_PUT_OFF = 2  # of one signal; who is more impatient than that gets through

_SIGNALS = tuple(signal.valid_signals())  # finding them out takes a call for each

_put_off: list[dict[int, Any]] = []  # handlers, one dict for each context that has not ended


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Let signal handlers wait until the end of this context; a third Ctrl-C does not wait.

    For what other libraries do once, and can't do again if it was broken off: an import, what Numba
    loads and compiles, or a fork, in whose hooks Python swallows exceptions. Only the main thread
    runs handlers; in others this does nothing. At the end, every handler is called whose signal has
    come, also if one of them raises. A fork has no end of this context, see `put_handlers_back`.
    """
    handlers: dict[int, Any] = {}
    replaced: dict[int, Any] = {}  # those of them that have to be put back
    counts: Counter[int] = Counter()
    waiting: dict[int, Any] = {}  # by signal, the frame in which it came first
    begun_in = os.getpid(), threading.get_ident()

    def note(number: int, frame: Any) -> None:
        counts[number] += 1
        # In a fork this context has no end.
        is_fork = begun_in != (os.getpid(), threading.get_ident())
        if counts[number] > _MOST_PUT_OFF or is_fork:
            waiting.pop(number, None)  # one call stands for all, as with signals of the system
            handlers[number](number, frame)
        else:
            waiting.setdefault(number, frame)

    def put_back() -> None:
        number = next(iter(replaced))
        signal.signal(number, replaced[number])
        del replaced[number]

    def handle() -> None:
        # Called, as event loops would be told twice of a signal that is raised again.
        number = next(iter(waiting))
        handlers[number](number, waiting.pop(number))

    try:
        if threading.current_thread() is threading.main_thread():
            _put_off.append(handlers)
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    handlers[number] = replaced[number] = handler
                    signal.signal(number, note)
        yield
    finally:
        if handlers:  # of the main thread, which alone changes this
            _put_off[:] = [others for others in _put_off if others is not handlers]
        raised = [*_until_empty(replaced, put_back), *_until_empty(waiting, handle)]
        try:
            if raised:
                raise raised[-1]
        finally:  # it would keep what is kept by its traceback, which is this frame and all around
            del raised


def put_handlers_back() -> None:
    """Put back, in a fork that one of these contexts has made, the handlers that wait for its end.

    Signals of which the fork has set a handler since are left alone.
    """
    while _put_off:  # the innermost has what the outer ones have put in place
        for number, handler in _put_off.pop().items():
            if getattr(signal.getsignal(number), "__module__", None) == __name__:
                signal.signal(number, handler)


def held_in_forks(lock: Any) -> None:
    """Take an `RLock` for each fork, so that the child does not wait for a thread it has not.

    A Ctrl-C in what a fork calls would be lost: Python swallows exceptions there. So nothing that a
    fork calls is Python code, in which handlers of signals are run, unless another thread has the
    lock. What a handler raises while a fork waits for that is raised after it.
    """
    after_parent: list[Callable[[], Any]] = []  # what to call when a handler has raised
    after_child: list[Callable[[], Any]] = []

    def wait() -> bool:
        """Wait for the lock, whatever handlers raise meanwhile."""
        raised: list[BaseException] = []
        while True:
            try:
                while not lock._is_owned():
                    lock.acquire()
                is_main = threading.current_thread() is threading.main_thread()
                if raised and is_main and not after_parent:
                    raise_later(raised[0])
                return True
            except BaseException as error:
                raised.append(error)

    def raise_later(error: BaseException) -> None:
        """Let a signal raise in the parent, once the fork is done; its handler has been called."""
        number, usual = signal.SIGINT, signal.getsignal(signal.SIGINT)
        if usual is None:  # it can't be put back
            return

        def handle(*_: Any) -> None:
            signal.signal(number, usual)
            raise error

        after_parent[:] = [functools.partial(_thread.interrupt_main, number)]
        after_child[:] = [functools.partial(signal.signal, number, usual)]
        signal.signal(number, handle)

    # Called from the last to the first: `wait` once more, if a signal came before its first line.
    acquire = functools.partial(lock.acquire, blocking=False)
    for is_held in (lock._is_owned, acquire):
        os.register_at_fork(before=_until_true([is_held, wait]))
    for call in (lock.release, _until_true(after_parent), after_parent.clear):
        os.register_at_fork(after_in_parent=call)
    for call in (lock.release, _until_true(after_child), after_child.clear):
        os.register_at_fork(after_in_child=call)


def _until_true(functions: list[Callable[[], Any]]) -> Callable[[], bool]:
    """Return what calls functions until one returns something true, and is no Python code."""
    begin = functools.partial(map, operator.methodcaller("__call__"), functions)
    calls: Any = type("Calls", (), {"__iter__": staticmethod(begin)})()
    return functools.partial(any, calls)


def _until_empty(left: dict[int, Any], take_one: Callable[[], None]) -> list[BaseException]:
    """Call a function until nothing is left; return what it, or a handler meanwhile, has raised."""
    raised = []
    while left:
        try:
            take_one()
        except BaseException as error:
            raised.append(error)
    try:
        return raised
    finally:
        del raised
