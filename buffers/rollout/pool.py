"""Memory of minibatches, used again once nobody has the batches any more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from sys import getrefcount

import numpy as np
import torch

from buffers.core.errors import BufferMisuseError
from buffers.core.kernels import gather_items
from buffers.core.memory import check_fits

__all__ = ["BatchPool", "PassCounter"]

_POOL_SIZE = 2  # batches whose memory is kept
_ALIGNMENT = 64
_SMALL_BYTES = 2**20  # up to which one thread, without torch's calls, copies in less time


class PassCounter:
    """Tells a pass through batches whether it may go on: one at a time, and in one rollout.

    Attributes:
        stops: How often the rows changed.
    """

    def __init__(self):
        self._passes = self.stops = 0

    def stop(self) -> None:
        """Let no pass go on, as the rows change."""
        self.stops += 1

    def begin(self, stops: int) -> tuple[int, int]:
        """Begin a pass, which ends the one before.

        Args:
            stops: Value of the attribute when the pass was asked for.

        Returns:
            What `require` is to be given before every batch.
        """
        self.require((self._passes, stops))
        self._passes += 1
        return self._passes, stops

    def require(self, begun: tuple[int, int]) -> None:
        """Raise BufferMisuseError if the pass is over."""
        if begun != (self._passes, self.stops):
            raise BufferMisuseError(
                "these minibatches are over: another pass or rollout has begun since, or "
                "advantages were computed again; go through one pass at a time, "
                "list(rollout.minibatches(...)) keeps the batches of a pass"
            )


class _Pages:
    """An array of some rows for each of several columns, all in one piece of memory.

    Tensors made of cuts of the arrays keep the memory alive, and so do views of the tensors. That
    nobody refers to it but this object shows that all of them are gone.

    Args:
        columns: Tensors (K, ...) on the CPU; there is an array (capacity, ...) like each of them.
        capacity: Rows.
        sharing: Of each column, how many rows have one row of it in common.

    Attributes:
        plan: int64 (F, 4), of `gather_items`, which copies rows of the columns into the arrays.
    """

    def __init__(self, columns: Sequence[torch.Tensor], capacity: int, sharing: Sequence[int]):
        shapes = [((capacity, *column.shape[1:]), column.numpy().dtype) for column in columns]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
        ends = list(accumulate(size + -size % _ALIGNMENT for size in sizes))
        self._memory = np.empty(ends[-1] + _ALIGNMENT, np.uint8)
        first = -self._memory.ctypes.data % _ALIGNMENT
        self._arrays = [
            np.ndarray(shape, dtype, self._memory, first + begin)
            for (shape, dtype), begin in zip(shapes, [0, *ends[:-1]], strict=True)
        ]
        places = [
            (column.data_ptr(), array.ctypes.data, array.nbytes // max(capacity, 1), rows)
            for column, array, rows in zip(columns, self._arrays, sharing, strict=True)
        ]
        self.plan = np.array(places, np.int64)
        self._count_unused = getrefcount(self._memory)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def is_unused(self) -> bool:
        """Whether all tensors that were made here are gone."""
        return getrefcount(self._memory) == self._count_unused

    def cut(self, size: int) -> list[torch.Tensor]:
        """A tensor (size, ...) for each column, not initialised."""
        return [torch.from_numpy(array[:size]) for array in self._arrays]


class BatchPool:
    """Memory for copies of rows, used again once nobody has the copies any more.

    In the usual loop, where a batch is held until the next one is there, that makes two.

    Args:
        columns: Tensors (K, ...), like which the copies are; there may be none.
        is_host: Whether they are on the CPU; other devices have an allocator that does it.
        num_shared: So many columns, the last ones, have one row for several of the others'.
        sharing: For so many: (K // sharing, ...).
    """

    def __init__(
        self,
        columns: Sequence[torch.Tensor],
        *,
        is_host: bool,
        num_shared: int = 0,
        sharing: int = 1,
    ):
        self._columns, self._is_host = columns, is_host
        self._sharing = [1] * (len(columns) - num_shared) + [sharing] * num_shared
        self.row_bytes = sum(column.element_size() * column[0].numel() for column in columns)
        self._capacity = 0
        self._kept: list[_Pages] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(pages.nbytes for pages in self._kept)

    def reserve(self, capacity: int) -> None:
        """See to memory for copies of so many rows.

        Raises:
            BufferMemoryError: It is missing.
        """
        if capacity <= self._capacity or not self._columns:
            return
        self._check(capacity)
        self._kept, self._capacity = [], capacity
        self.take(capacity)

    def take(self, size: int) -> list[torch.Tensor] | None:
        """A tensor (size, ...) for each column; None on devices that have an allocator."""
        return self._free_pages().cut(size) if self._is_host else None

    def _free_pages(self) -> _Pages:
        for pages in self._kept:
            if pages.is_unused():
                return pages
        self._check(self._capacity)
        pages = _Pages(self._columns, self._capacity, self._sharing)
        self._kept = [*self._kept, pages][-_POOL_SIZE:]
        return pages

    def gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The rows int64 (B,) of all columns, in memory of their own."""
        if not self._columns:
            return []
        pages = self._free_pages() if self._is_host else None
        if pages is not None and rows.numel() * self.row_bytes <= _SMALL_BYTES:
            gather_items(rows.numpy(), pages.plan)
            return pages.cut(rows.numel())
        places = [rows] * len(self._columns)
        if self._sharing[-1] != 1:
            shared = rows // self._sharing[-1]
            places = [rows if sharing == 1 else shared for sharing in self._sharing]
        targets = [None] * len(places) if pages is None else pages.cut(len(rows))
        whole = zip(self._columns, places, targets, strict=True)
        return [torch.index_select(column, 0, own, out=to) for column, own, to in whole]

    def _check(self, capacity: int) -> None:
        needed, device = capacity * self.row_bytes, self._columns[0].device
        advice = "use more minibatches, or keep fewer"
        check_fits(f"a batch of {capacity} rows", needed, device, advice)
