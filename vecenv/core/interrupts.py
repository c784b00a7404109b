"""A Ctrl-C that waits until something is whole which cannot be done again if it is broken off.

Numba does not survive an exception in the midst of a compilation: later ones fail. A process that
has just been started must be known to its owner, or nobody ends it. Elsewhere an interrupted call
simply ends; what an object promises afterwards is in docs/trust.md.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["interrupts_later"]

_MOST_PUT_OFF = 2  # a third Ctrl-C gets through


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Call the handler of SIGINT at the end of this context, once; a third Ctrl-C does not wait.

    Only the main thread runs handlers; in other threads this does nothing.
    """
    handler: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    frames: list[Any] = []  # in which it came

    def note(number: int, frame: Any) -> None:
        frames.append(frame)
        if len(frames) > _MOST_PUT_OFF:
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if 0 < len(frames) <= _MOST_PUT_OFF:
            handler(signal.SIGINT, frames[0])
