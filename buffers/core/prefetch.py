"""Batches that are drawn, and copied to a device, before they are asked for."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch

from buffers.core.arguments import check_count, resolve_device
from buffers.core.batches import Batch
from buffers.core.copies import each_tensor
from buffers.core.errors import BufferMisuseError
from buffers.core.guard import Guard

__all__ = ["Prefetch"]

_B = TypeVar("_B", bound=Batch)
_MAX_DEPTH = 64


class Prefetch(Iterator[_B], Generic[_B]):
    """Batches of a buffer, drawn ahead of the learner; made by `buffer.prefetch`.

    The first `next` draws `depth` + 1 batches, each later one draws one more, and returns the
    oldest. So a batch shows the buffer as it was `depth` batches before, and if nothing is added in
    between the batches are those that as many calls of `sample` would have returned. Those for a
    GPU are copied there beside what the learner has queued, and nothing waits for that.

    Batches that were drawn and not taken are dropped by `close`, and when the buffer is saved,
    copied or loaded; if nothing else was drawn since, the generator goes back to before the first
    of them. Another prefetch of the buffer closes this one.

    Args:
        draw: Draws a batch.
        generator: What it draws by.
        guard: Of the buffer.
        depth: See above.
        device: Where batches are copied to; None leaves them.

    Raises:
        BufferMisuseError: An argument does not fit.
    """

    def __init__(
        self,
        draw: Callable[[], _B],
        generator: Callable[[], Any],
        guard: Guard,
        depth: int,
        device: torch.device | str | None,
    ):
        self._draw, self._generator, self._guard = draw, generator, guard
        self._depth = check_count("depth", depth, _MAX_DEPTH)
        self._device = None if device is None else resolve_device(device)
        # Batches, when their copies to a GPU are done, and where the generator stood before.
        self._ahead: collections.deque[tuple[_B, Any, Any]] = collections.deque()
        self._after: Any = None  # where the generator stood after the last of them
        self._stream: Any = None
        if guard.ahead is not None:  # of two both could not be rewound
            guard.ahead.close()
        guard.ahead = self

    def __iter__(self) -> Self:
        """Itself."""
        return self

    def __next__(self) -> _B:
        """The next batch.

        Raises:
            BufferMisuseError: This was closed, or `sample` raised it: the buffer is empty, say. Any
                error of the draw comes here, and the next call draws anew.
        """
        if self._guard.ahead is not self:
            raise BufferMisuseError("this prefetch was closed; ask the buffer for another")
        while len(self._ahead) <= self._depth:
            before, batch = self._generator().get_state(), self._draw()
            self._after = self._generator().get_state()
            self._ahead.append((*self._moved(batch), before))
        batch, is_copied, _ = self._ahead.popleft()
        if is_copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(is_copied)
            each_tensor(batch._contents(), lambda tensor: tensor.record_stream(stream))
        return batch

    def rewind(self) -> None:
        """Drop what was drawn and not taken."""
        if self._ahead and np.array_equal(self._generator().get_state(), self._after):
            self._generator().set_state(self._ahead[0][2])
        self._ahead.clear()

    def close(self) -> None:
        """Drop what was drawn and not taken. Twice does no harm."""
        self.rewind()
        if self._guard.ahead is self:
            self._guard.ahead = None

    def __enter__(self) -> Self:
        """Itself; closed at the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def _moved(self, batch: Any) -> tuple[Any, Any]:
        """A copy of a batch on the device, and what to wait for there."""
        device, contents = self._device, batch._contents()
        if device is None:
            return batch, None
        if device.type != "cuda":
            moved = each_tensor(contents, lambda tensor: tensor.to(device))
            return type(batch)._made_of(moved), None
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # of batches drawn on a GPU
        with torch.cuda.stream(self._stream):
            moved = each_tensor(
                contents,
                lambda tensor: (tensor if tensor.is_cuda else tensor.pin_memory()).to(
                    device, non_blocking=True
                ),
            )
        return type(batch)._made_of(moved), self._stream.record_event()
