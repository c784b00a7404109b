"""Ctrl-C that waits until something is whole that must not be left half done."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["interrupts_later", "put_handlers_back"]

_MOST_PUT_OFF = 2  # of one signal; who is more impatient than that gets through

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
            for number in signal.valid_signals():
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
