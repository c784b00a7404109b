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
from collections.abc import Iterator
from typing import Any

__all__ = ["interrupts_later"]

_MOST_PUT_OFF = 2  # of one signal: a third Ctrl-C gets through
_SIGNALS = tuple(signal.valid_signals())  # finding them out takes a call for each
_replaced: dict[int, Any] = {}  # handlers that the context under way puts back


def _put_back() -> None:
    """Set the handlers of before; also in a forked child, which may never leave the context."""
    for number, handler in _replaced.items():
        with contextlib.suppress(ValueError):  # another thread is the child's main thread
            signal.signal(number, handler)
    _replaced.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_put_back)


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Call handlers of signals at the end of this context, each once; a third one does not wait.

    Only the main thread runs handlers; in other threads, and inside of itself, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread() or _replaced:
        yield
        return
    handlers: dict[int, Any] = {}
    frames: dict[int, list[Any]] = {}  # in which a signal came

    def note(number: int, frame: Any) -> None:
        frames.setdefault(number, []).append(frame)
        if len(frames[number]) > _MOST_PUT_OFF:
            handlers[number](number, frame)

    try:
        for number in _SIGNALS:
            if callable(handler := signal.getsignal(number)):
                handlers[number] = _replaced[number] = handler
                signal.signal(number, note)
        yield
    finally:
        _put_back()
        for number, seen in frames.items():
            if len(seen) <= _MOST_PUT_OFF:
                handlers[number](number, seen[0])
