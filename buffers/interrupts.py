"""Ctrl-C that waits until something is whole that must not be left half done.

(`vecenv` has the same, as the two packages know nothing of each other.)
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["interrupts_later"]

_MOST_PUT_OFF = 2  # of one signal; who is more impatient than that gets through


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Let signal handlers wait until the end of this context; a third Ctrl-C does not wait.

    For what Numba loads and compiles, which it can't do again if it was broken off. Only the main
    thread runs handlers; in others this does nothing.
    """
    handlers: dict[int, Any] = {}
    came: list[int] = []

    def note(number: int, frame: Any) -> None:
        came.append(number)
        if came.count(number) > _MOST_PUT_OFF:
            handlers[number](number, frame)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    handlers[number] = handler
                    signal.signal(number, note)
        yield
    finally:
        _put_back(handlers)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


def _put_back(handlers: dict[int, Any]) -> None:
    """Set all handlers, also if one that has been set raises meanwhile."""
    raised: BaseException | None = None
    left = list(handlers)
    while left:
        try:
            signal.signal(left[-1], handlers[left[-1]])
            left.pop()
        except BaseException as error:
            raised = error
    if raised is not None:
        raise raised
