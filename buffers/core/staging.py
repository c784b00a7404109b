"""Host pages on their way to a device: copied in one piece, and written again when that is done."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from buffers.core.memory import allocation, check_fits

__all__ = ["StagingBlock", "StagingBlocks"]


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
        pinned = device.type == "cuda"
        # A device that is the default in a `with` does not count here.
        self.host = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.device = self.host
        if is_staged:
            self.device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if pinned else None

    @property
    def nbytes(self) -> int:
        """Bytes held, on host and device together."""
        return self.host.nbytes * (1 if self.device is self.host else 2)

    def wait(self) -> None:
        """Wait until the host pages may be written again."""
        if self._copied is not None:
            self._copied.synchronize()

    def upload(self, begin: int, end: int) -> None:
        """Enqueue the copy of bytes begin .. end - 1, if there are two memories."""
        if self.device is not self.host:
            self.device[begin:end].copy_(self.host[begin:end], non_blocking=True)
        if self._copied is not None:  # of the stream that copies, which is that of its device
            self._copied.record(torch.cuda.current_stream(self.device.device))


class StagingBlocks:
    """Two blocks in turn: one is filled while the copy of the other may still be under way.

    Args:
        device: Where their twins lie.
        advice: What to do if memory is missing.
        is_staged: As of `StagingBlock`.
    """

    def __init__(self, device: torch.device, advice: str, *, is_staged: bool = True):
        self._device, self._advice, self._is_staged = device, advice, is_staged
        self._blocks: list[StagingBlock] = []
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, on host and device together."""
        return sum(block.nbytes for block in self._blocks)

    def reserve(self, what: str, num_bytes: int) -> None:
        """See to blocks of so many bytes; `what` names what they are for.

        Raises:
            BufferMemoryError: Memory is missing; nothing was changed.
        """
        if self._blocks and num_bytes <= self._blocks[0].host.nbytes:
            return
        if self._device.type != "cpu":
            check_fits(what, 2 * num_bytes, self._device, self._advice)
        with (
            allocation(what, 2 * num_bytes, torch.device("cpu"), self._advice),
            torch.inference_mode(False),
        ):
            blocks = [StagingBlock(num_bytes, self._device, is_staged=self._is_staged)]
            blocks.append(StagingBlock(num_bytes, self._device, is_staged=self._is_staged))
        self._blocks = blocks

    def take(self) -> StagingBlock:
        """The next block, whose host pages may be written; `reserve` comes before."""
        block = self._blocks[self._next]
        self._next = 1 - self._next
        block.wait()
        return block

    def send(self, what: str, *arrays: np.ndarray[Any, Any]) -> list[torch.Tensor]:
        """Enqueue the copy of arrays to the device, in one piece.

        Returns:
            Tensors like the arrays: valid until the next call but one.

        Raises:
            BufferMemoryError: Memory is missing.
        """
        sizes = [array.nbytes for array in arrays]
        self.reserve(what, sum(size + -size % 8 for size in sizes))
        block, begin, sent = self.take(), 0, []
        host = block.host.numpy()
        for array, size in zip(arrays, sizes, strict=True):
            host[begin : begin + size] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            kind = torch.from_numpy(array[:0]).dtype
            sent.append(block.device[begin : begin + size].view(kind).view(array.shape))
            begin += size + -size % 8  # where any dtype may begin
        block.upload(0, begin)
        return sent
