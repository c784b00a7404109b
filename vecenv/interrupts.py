"""Put off signal handlers where an exception out of one would do lasting harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["without_interrupts"]

_Result = TypeVar("_Result")
_MOST_PUT_OFF = 2  # of one signal; who is that impatient gets through


def without_interrupts(function: Callable[..., _Result], *args: Any, **options: Any) -> _Result:
    """Call a function, and run the handlers of signals that come meanwhile after it.

    So Ctrl-C raises KeyboardInterrupt as soon as it has ended. A third one raises it at once. Only
    the main thread runs handlers, so elsewhere this is a plain call.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(*args, **options)
    handlers: dict[int, Any] = {}
    came: list[int] = []

    def put_off(number: int, frame: Any) -> None:
        came.append(number)
        if came.count(number) > _MOST_PUT_OFF:
            handlers[number](number, frame)

    try:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler) and not isinstance(handler, signal.Handlers):
                handlers[number] = handler
                signal.signal(number, put_off)
        return function(*args, **options)
    finally:
        _put_back(handlers)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


def _put_back(handlers: dict[int, Any]) -> None:
    """Set all handlers, also if one that has been set raises meanwhile."""
    left = list(handlers)
    raised: BaseException | None = None
    while left:
        try:
            signal.signal(left[-1], handlers[left[-1]])
            left.pop()
        except BaseException as error:
            raised = error
    if raised is not None:
        raise raised
