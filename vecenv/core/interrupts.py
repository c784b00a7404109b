"""Signals that wait until something is whole which cannot be done again if it is broken off.

Numba does not survive an exception in the midst of a compilation: later ones fail. A process that
has just been started must be known to its owner, or nobody ends it. Elsewhere an interrupted call
simply ends; what an object promises afterwards is in docs/trust.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

__all__ = ["held_in_forks", "interrupts_later"]

_MOST_PUT_OFF = 2  # of one signal: a third Ctrl-C gets through
_SIGNALS = tuple(signal.valid_signals())  # finding them out takes a call for each
_replaced: list[dict[int, Any]] = []  # handlers that the contexts of the main thread put back


def _put_back() -> None:
    """Give a forked child the handlers of before: it may never come to the end of the context."""
    for handlers in reversed(_replaced):
        for number, handler in handlers.items():
            with contextlib.suppress(ValueError):  # another thread is the child's main thread
                signal.signal(number, handler)
    _replaced.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_put_back)


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Call handlers of signals at the end of this context, each once; a third one does not wait.

    Only the main thread runs handlers; in other threads this does nothing. At the end every handler
    is put back and every one called whose signal has come, also if two of them raise.
    """
    handlers: dict[int, Any] = {}
    replaced: dict[int, Any] = {}  # those of them that have to be put back
    counts: Counter[int] = Counter()
    waiting: dict[int, Any] = {}  # by signal, the frame in which it came first

    def note(number: int, frame: Any) -> None:
        counts[number] += 1
        if counts[number] > _MOST_PUT_OFF:
            waiting.pop(number, None)
            handlers[number](number, frame)
        else:
            waiting.setdefault(number, frame)

    def end() -> None:
        while replaced:
            number = next(iter(replaced))
            signal.signal(number, replaced[number])
            del replaced[number]
        while waiting:
            number = next(iter(waiting))
            handlers[number](number, waiting.pop(number))

    try:
        if threading.current_thread() is threading.main_thread():
            _replaced.append(replaced)
            for number in _SIGNALS:
                if callable(handler := signal.getsignal(number)):
                    handlers[number] = replaced[number] = handler
                    signal.signal(number, note)
        yield
    finally:
        if handlers:  # this is the main thread
            _replaced[:] = [other for other in _replaced if other is not replaced]
        try:
            end()
        finally:  # it goes on where a handler has raised
            try:
                end()
            finally:
                end()


def held_in_forks(lock: Any) -> None:
    """Take an `RLock` for each fork, so that a child does not wait for a thread that it has not.

    Its own methods are called, as a Ctrl-C in Python code that a fork calls would be lost.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )
