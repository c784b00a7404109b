"""Work of a GPU that is queued at once: calls of a function, captured in a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from vecenv.learn.compiled import first_line

__all__ = ["Graph"]

_WARMUPS = 2


class Graph:
    """A function without arguments, whose work on a GPU is replayed as a CUDA graph.

    The first two calls call the function, the third captures what it enqueues, later ones replay
    that, without Python. So the function has to do the same on the device each time, with tensors
    that stay where they are, and wait for nothing. On the CPU, and where a capture fails, which a
    sentence says, each call calls the function.

    Args:
        function: What is called.
        device: Where its work is done.
        generators: Of torch, on the device, that it draws with, beside the device's own.
        log: Takes the sentence; None sends it to the logger "vecenv.learn".

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
        self._result: Any = None
        self.is_captured = False

    def __call__(self) -> Any:
        """Return what the function does; once captured, the same tensors, written anew."""
        device, left = self._device, self._calls_left
        self._calls_left = max(left - 1, -1)
        if left > 0:  # on a stream of its own, as a capture will
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
