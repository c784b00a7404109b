"""Calls of a function, captured in a CUDA graph: their GPU work is queued at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from vecenv.learn.compiled import first_line

__all__ = ["Graph"]

_WARMUPS = 2


class Graph:
    """A function without arguments whose GPU work is replayed as a CUDA graph.

    The first two calls run the function, the third captures the work that it enqueues, later calls
    replay this work without Python. So the function must do the same work each time, on tensors
    that keep their memory, and never wait for the device. On the CPU, and if a capture fails (which
    is logged), each call runs the function.

    Args:
        function: The function to call.
        device: The device that it computes on.
        generators: Torch generators on that device that it draws from, beside the default one.
        log: Called with the sentence about a failed capture; None uses the logger "vecenv.learn".

    `is_captured` says whether calls replay a graph.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        device: torch.device | str,
        *,
        generators: Iterable[torch.Generator | None] = (),
        log: Callable[[str], Any] | None = None,
    ):
        self._function, self._device = function, torch.device(device)
        self._generators = [generator for generator in generators if generator is not None]
        self._log = log or logging.getLogger("vecenv.learn").info
        self._calls_left = _WARMUPS if self._device.type == "cuda" else -1  # before the capture
        self._graph: Any = None
        self._result, self.is_captured = None, False

    def __call__(self) -> Any:
        """Return the function's result; once captured, the same tensors with new values."""
        device, left = self._device, self._calls_left
        self._calls_left = max(left - 1, -1)  # -1: no capture is due
        if left > 0:  # on a separate stream, like the capture
            current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                result = self._function()
            current.wait_stream(stream)
            return result
        if left == 0:
            self._capture()
        if not self.is_captured:
            return self._function()
        self._graph.replay()
        return self._result

    def _capture(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        try:
            for generator in self._generators:
                self._graph.register_generator_state(generator)
            with torch.cuda.device(self._device), torch.cuda.graph(self._graph):
                self._result = self._function()
            self.is_captured = True
        except Exception as error:
            name = getattr(self._function, "__name__", "the function")
            what = f"graph: {name} can't be captured, so its calls go through Python as before"
            self._log(f"{what}: {first_line(error)}")
