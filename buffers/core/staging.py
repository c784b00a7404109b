"""Host pages on their way to a device: copied in one piece, and written again when that is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from buffers.core.errors import BufferMemoryError
from buffers.core.memory import allocation, check_fits

__all__ = ["CopyLane", "StagingBlock", "StagingBlocks"]


class CopyLane:
    """A stream of a GPU for the copies of one block, beside that on which it is read.

    So the host, which waits for a copy before it writes the pages again, does not wait for what was
    queued before that copy, such as the updates of a learner. Three things are ordered by events: a
    copy comes after the reading of what the block had before, reading after the copy, and writing
    of the host pages after the copy.

    Args:
        device: Of the block.
        tensor: The block there, made on the current stream.
    """

    def __init__(self, device: torch.device, tensor: torch.Tensor):
        self._device, self._tensor = device, tensor
        self._stream: Any = torch.cuda.Stream(device)
        self._made_on: Any = torch.cuda.current_stream(device)
        self._copied: Any = torch.cuda.Event()
        self._read: Any = torch.cuda.Event()
        # torch must not give the memory to others while these streams use it.
        tensor.record_stream(self._stream)
        self._read.record(self._made_on)  # zeros are written there first

    def copy(self, begin: int, end: int, host: torch.Tensor) -> None:
        """Enqueue the copy of bytes begin .. end - 1; the current stream goes on after it."""
        current: Any = torch.cuda.current_stream(self._device)
        if current != self._made_on:
            self._tensor.record_stream(current)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._read)
            self._tensor[begin:end].copy_(host[begin:end], non_blocking=True)
            self._copied.record(self._stream)
        current.wait_event(self._copied)

    def wait(self) -> None:
        """Let the host wait until the last copy has left its pages."""
        self._copied.synchronize()

    def release(self) -> None:
        """Let the next copy wait for what the current stream has been given so far."""
        self._read.record(torch.cuda.current_stream(self._device))


class StagingBlock:
    """Host pages, and their twin on a device.

    Args:
        num_bytes: Of both.
        device: Where the twin lies.
        is_staged: False if the host pages are their own twin.

    Attributes:
        host: uint8 (num_bytes,), pinned if the device is a GPU.
        device: uint8 (num_bytes,) on the device.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, is_staged: bool = True):
        is_gpu = device.type == "cuda"
        # A device that is the default in a `with` does not count here.
        self.host = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_gpu)
        self.device = self.host
        if is_staged:
            self.device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._lane = CopyLane(device, self.device) if is_gpu else None

    @property
    def nbytes(self) -> int:
        """Bytes held, on host and device together."""
        return self.host.nbytes * (1 if self.device is self.host else 2)

    def wait(self) -> None:
        """Wait until the host pages may be written again."""
        if self._lane is not None:
            self._lane.wait()

    def upload(self, begin: int, end: int) -> None:
        """Enqueue the copy of bytes begin .. end - 1, if there are two memories."""
        if self._lane is not None:
            self._lane.copy(begin, end, self.host)
        elif self.device is not self.host:
            self.device[begin:end].copy_(self.host[begin:end])

    def release(self) -> None:
        """Say that all that reads the twin has been enqueued, so that it may be copied to again."""
        if self._lane is not None:
            self._lane.release()


class StagingBlocks:
    """Two blocks in turn: one is filled while the copy of the other may still be under way.

    Args:
        device: Where their twins lie.
        advice: What to do if memory is missing.
        is_staged: As of `StagingBlock`; one block will do if not.
    """

    def __init__(self, device: torch.device, advice: str, *, is_staged: bool = True):
        self._device, self._advice, self._is_staged = device, advice, is_staged
        self._number = 2 if is_staged else 1
        self._blocks: list[StagingBlock] = []
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, on host and device together."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes that a block has room for."""
        return self._blocks[0].host.nbytes if self._blocks else 0

    def reserve(self, what: str, num_bytes: int) -> bool:
        """See to blocks of so many bytes, twice as large as before at least, if there is room.

        Args:
            what: Names what they are for.
            num_bytes: See above.

        Returns:
            Whether there are other blocks now.

        Raises:
            BufferMemoryError: Memory is missing; nothing was changed.
        """
        if self._blocks and num_bytes <= self.num_bytes:
            return False
        larger = 2 * self.num_bytes  # so that many small steps up are few new blocks
        if self._device.type == "cuda" and num_bytes:  # torch takes so much for pinned pages
            larger = max(larger, 1 << (num_bytes - 1).bit_length())
        if larger > num_bytes:
            try:
                self._blocks = self._made(what, larger)
                return True
            except BufferMemoryError:
                pass
        self._blocks = self._made(what, num_bytes)
        return True

    def _made(self, what: str, num_bytes: int) -> list[StagingBlock]:
        number, is_staged = self._number, self._is_staged
        if self._device.type != "cpu" and is_staged:
            check_fits(what, number * num_bytes, self._device, self._advice)
        with (
            allocation(what, number * num_bytes, torch.device("cpu"), self._advice),
            torch.inference_mode(False),
        ):
            return [
                StagingBlock(num_bytes, self._device, is_staged=is_staged) for _ in range(number)
            ]

    def turn(self) -> StagingBlock:
        """The next block, whose host pages may be written; `reserve` comes before.

        When all that reads its twin has been enqueued, it is to be told by `StagingBlock.release`.
        """
        self._next = (self._next + 1) % self._number
        block = self._blocks[self._next]
        block.wait()
        return block

    @contextmanager
    def taken(self) -> Iterator[StagingBlock]:
        """The next block, which is read in a `with`; `reserve` comes before."""
        block = self.turn()
        try:
            yield block
        finally:
            block.release()

    @contextmanager
    def sent(self, what: str, *arrays: np.ndarray[Any, Any]) -> Iterator[list[torch.Tensor]]:
        """Enqueue the copy of arrays to the device, in one piece.

        Yields:
            Tensors like the arrays: valid in a `with`.

        Raises:
            BufferMemoryError: Memory is missing.
        """
        sizes = [array.nbytes for array in arrays]
        self.reserve(what, sum(size + -size % 8 for size in sizes))
        with self.taken() as block:
            begin, found = 0, []
            host = block.host.numpy()
            for array, size in zip(arrays, sizes, strict=True):
                host[begin : begin + size] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                kind = torch.from_numpy(array[:0]).dtype
                found.append(block.device[begin : begin + size].view(kind).view(array.shape))
                begin += size + -size % 8  # where any dtype may begin
            block.upload(0, begin)
            yield found
