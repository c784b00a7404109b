"""One call at a time: what a buffer does in several steps, no other thread sees half done.

An object belongs to one thread; a prefetch has a second one. Calls of one compiled kernel that
keeps the interpreter's lock, as most `add` and `sample` are, need no lock of their own: no other
Python code runs meanwhile. What takes several steps is `exclusive`: it waits for a lock.

On a GPU all calls are exclusive, and what they enqueue is ordered as the calls are, also if they
come from several streams.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from buffers.core.errors import BufferMisuseError

__all__ = ["Guard", "StreamOrder", "exclusive"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


class Guard:
    """What keeps the threads that use a buffer apart.

    Attributes:
        lock: Held during exclusive calls.
        is_busy: Whether an exclusive call is going on.
        is_torn: Whether this process was forked while another thread was in such a call.
        ahead: What draws ahead, if a thread does: see `prefetch`. Everything waits for it.
        streams: Of the GPU that the buffer is on, else None.

    Args:
        device: Where the buffer is.
    """

    __slots__ = ("__weakref__", "ahead", "is_busy", "is_torn", "lock", "streams")

    def __init__(self, device: torch.device | None = None):
        is_gpu = device is not None and device.type == "cuda"
        self.streams = StreamOrder(device) if is_gpu else None
        self.lock = threading.RLock()
        self.is_busy = self.is_torn = False
        self.ahead: Any = None
        _guards.add(self)

    def settle(self) -> bool:
        """Wait for what is drawn ahead; return whether the thread that draws it is the caller."""
        return self.ahead is not None and self.ahead.settle()

    def rewind(self) -> None:
        """Forget what was drawn ahead."""
        if self.ahead is not None:
            self.ahead.rewind()

    def refusal(self) -> BufferMisuseError:
        """The error of a call that finds another one going on although it holds the lock."""
        if self.is_torn:
            return BufferMisuseError(
                "this process was forked while another thread changed the buffer, so its copy is "
                "half changed; load a checkpoint into a new one, or fork while no thread uses it"
            )
        return BufferMisuseError(
            "the buffer was called from within one of its own calls, as by a signal handler or a "
            "finalizer; let those leave a note, and call the buffer when the first call is done"
        )


class StreamOrder:
    """Orders what is enqueued on several streams of a GPU as the calls are that enqueue it.

    A call on another stream than the last one's lets its stream wait for all that the other one
    has been given so far. A graph that is being captured can't wait for what is outside of it: it
    is ordered with others where it is replayed, so replay it on the stream of the other calls.
    """

    def __init__(self, device: torch.device | None):
        self._device, self._last = device, None

    def enter(self) -> None:
        """Order the current stream behind the last one."""
        stream: Any = torch.cuda.current_stream(self._device)
        if stream == self._last or torch.cuda.is_current_stream_capturing():
            return
        if self._last is not None:
            stream.wait_stream(self._last)
        self._last = stream


def exclusive(method: _Method) -> _Method:
    """Let a method of an object with a `_guard` wait until no other thread is in such a method."""

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        guard = self._guard
        if guard.ahead is not None:
            guard.ahead.settle()
        with guard.lock:  # in C, so that no interrupt comes between taking it and being in it
            if guard.is_busy:
                raise guard.refusal()
            try:
                guard.is_busy = True
                if guard.streams is not None:
                    guard.streams.enter()
                return method(self, *args, **kwargs)
            finally:
                guard.is_busy = False

    return call  # pyright: ignore[reportReturnType]


def _before_fork() -> None:
    """Let threads that draw ahead finish: a child could not use what they are in the middle of."""
    for guard in list(_guards):
        with contextlib.suppress(Exception):
            guard.settle()


def _after_fork() -> None:
    """The other threads are not in this process: what they held is free, what they did is torn."""
    for guard in _guards:
        if guard.ahead is not None:
            guard.ahead.abandon()
            guard.ahead = None
        if not guard.lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition does
            guard.lock = threading.RLock()
            guard.is_torn = guard.is_busy


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
