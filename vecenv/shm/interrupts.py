"""Ctrl-C that waits until something is whole that must not be left half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["interrupts_later"]


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Let signal handlers wait until the end of this context.

    For what other libraries do once, and can't do again if it was broken off: an import, or Numba's
    loading of its own registries. Nothing else should take so long that this would be noticed.
    """
    came: list[tuple[Callable[..., Any], Any, Any]] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # where handlers run
        for number in signal.valid_signals():
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
    try:
        for number, handler in handlers.items():
            signal.signal(number, _note(came, handler))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for handler, *what in came:
            handler(*what)


def _note(came: list[Any], handler: Callable[..., Any]) -> Callable[..., None]:
    def note(number: int, frame: Any) -> None:
        came.append((handler, number, frame))

    return note
