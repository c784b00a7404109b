"""Ctrl-C that waits until something is whole that must not be left half done.

(The same as `vecenv.core.interrupts`: the two packages know nothing of each other. A test keeps it
so.)
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["interrupts_later"]

_MOST_PUT_OFF = 2  # of one signal; who is more impatient than that gets through


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Let signal handlers wait until the end of this context; a third Ctrl-C does not wait.

    For what other libraries do once, and can't do again if it was broken off: an import, or what
    Numba loads and compiles. Only the main thread runs handlers; in others this does nothing. At
    the end, every handler is called whose signal has come, also if one of them raises.
    """
    handlers: dict[int, Any] = {}
    replaced: dict[int, Any] = {}  # those of them that have to be put back
    counts: Counter[int] = Counter()
    waiting: dict[int, Any] = {}  # by signal, the frame in which it came first
    thread = threading.get_ident()

    def note(number: int, frame: Any) -> None:
        counts[number] += 1
        # In a fork by another thread, this context has no end.
        if counts[number] > _MOST_PUT_OFF or threading.get_ident() != thread:
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
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    handlers[number] = replaced[number] = handler
                    signal.signal(number, note)
        yield
    finally:
        raised = [*_until_empty(replaced, put_back), *_until_empty(waiting, handle)]
        if raised:
            raise raised[-1]


def _until_empty(left: dict[int, Any], take_one: Callable[[], None]) -> list[BaseException]:
    """Call a function until nothing is left; return what it, or a handler meanwhile, has raised."""
    raised = []
    while left:
        try:
            take_one()
        except BaseException as error:
            raised.append(error)
    return raised
