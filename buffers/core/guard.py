"""What calls of a buffer are ordered with: other streams of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["Guard", "exclusive"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Guard:
    """What the calls of a buffer are ordered with.

    Attributes:
        gpu: That the buffer is on, or None.

    Args:
        device: Where the buffer is.
    """

    __slots__ = ("_last", "gpu")

    def __init__(self, device: torch.device | None = None):
        self.gpu = device if device is not None and device.type == "cuda" else None
        self._last: Any = None

    def enter(self) -> None:
        """Let the current stream of the GPU wait for that of the call before.

        A graph that is being captured can't wait for what is outside of it: it is ordered with
        others where it is replayed, so replay it on the stream of the other calls.
        """
        if self.gpu is None:
            return
        stream: Any = torch.cuda.current_stream(self.gpu)
        if stream != self._last and not torch.cuda.is_current_stream_capturing():
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last = stream


def exclusive(method: _Method) -> _Method:
    """Order what a method of an object with a `_guard` enqueues on a GPU as the calls are."""

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._guard.enter()
        return method(self, *args, **kwargs)

    return call  # pyright: ignore[reportReturnType]
