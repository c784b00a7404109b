"""What calls of a buffer are ordered with: other streams of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["Guard", "exclusive"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Guard:
    """The `Prefetch` of a buffer that is open, and the GPU it is on; None without."""

    def __init__(self, device: torch.device | None = None):
        self.gpu = device if device is not None and device.type == "cuda" else None
        self._last: Any = None

    def enter(self) -> None:
        """Let the current stream of the GPU wait for that of the call before.

        A graph that is being captured can't: replay it on the stream of the other calls.
        """
        if self.gpu is not None and not torch.cuda.is_current_stream_capturing():
            last, self._last = self._last, torch.cuda.current_stream(self.gpu)
            if last is not None and last != self._last:
                self._last.wait_stream(last)


def exclusive(method: _Method) -> _Method:
    """Order what a method of an object with a `_guard` enqueues on a GPU as the calls are."""

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._guard.enter()
        return method(self, *args, **kwargs)

    return call  # pyright: ignore[reportReturnType]
