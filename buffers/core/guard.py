"""What calls of a buffer wait for: batches that are drawn ahead, and other streams of a GPU.

An object belongs to one thread. A prefetch has a second one: `exclusive` calls wait until it has
drawn what it was asked for. On a GPU what calls enqueue is ordered as the calls are, also if they
come from several streams.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["Guard", "exclusive"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


class Guard:
    """What the calls of a buffer wait for.

    Attributes:
        ahead: What draws ahead, if a thread does: a `Prefetch`.
        gpu: That the buffer is on, or None.

    Args:
        device: Where the buffer is.
    """

    __slots__ = ("__weakref__", "_last", "ahead", "gpu")

    def __init__(self, device: torch.device | None = None):
        self.gpu = device if device is not None and device.type == "cuda" else None
        self.ahead: Any = None
        self._last: Any = None
        _guards.add(self)

    def enter(self) -> None:
        """Wait for what is drawn ahead, and let the current stream wait for the last one.

        A graph that is being captured can't wait for what is outside of it: it is ordered with
        others where it is replayed, so replay it on the stream of the other calls.
        """
        self.settle()
        if self.gpu is None:
            return
        stream: Any = torch.cuda.current_stream(self.gpu)
        if stream != self._last and not torch.cuda.is_current_stream_capturing():
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last = stream

    def settle(self) -> None:
        """Wait for what is drawn ahead."""
        if self.ahead is not None:
            self.ahead.settle()

    def rewind(self) -> None:
        """Forget what was drawn ahead."""
        if self.ahead is not None:
            self.ahead.rewind()


def exclusive(method: _Method) -> _Method:
    """Let a method of an object with a `_guard` wait for what its guard says."""

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._guard.enter()
        return method(self, *args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


def _before_fork() -> None:
    """Let threads that draw ahead finish: a child has no such thread, and the buffer as it is."""
    for guard in list(_guards):
        with contextlib.suppress(Exception):
            guard.settle()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(before=_before_fork)
