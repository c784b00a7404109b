"""Delay signals while something is done that can't be repeated if it is interrupted.

Numba does not survive an exception in the midst of a compilation: later ones fail. The owner of a
new process must know of it, or nobody ends it. Elsewhere an interrupted call simply ends;
docs/trust.md says what an object promises afterwards.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["interrupts_later"]

# Ctrl-C, requests to end, and timers, which programs use for limits of time; Windows has no timer.
_SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, n)]


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Call the handlers of SIGINT, SIGTERM and SIGALRM at the end of this context, each once.

    Only the main thread runs handlers; in other threads this does nothing.
    """
    came: dict[int, Any] = {}  # signal number: frame in which it first came
    is_main = threading.current_thread() is threading.main_thread()
    found = [(number, signal.getsignal(number)) for number in _SIGNALS]
    handlers: dict[int, Any] = {n: one for n, one in found if callable(one) and is_main}
    try:
        for number in handlers:
            signal.signal(number, came.setdefault)  # the handler keeps the first frame
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in came.items():
            handlers[number](number, frame)
