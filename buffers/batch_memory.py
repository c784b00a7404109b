"""Memory of batches that is used again once nobody has the batch any more.

Fresh memory costs more than filling it: the system hands it out page by page, and views of it have
to be made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount, maxsize
from typing import NamedTuple

import numpy as np
import torch

from buffers.free_memory import allocation

__all__ = ["BatchArrays", "BatchMemory"]

BatchArrays = dict[str, np.ndarray]

_CPU = torch.device("cpu")
_POOL_SIZE = 2  # batches of one kind whose memory is kept
_MAX_POOLED_BYTES = 1 << 26


class _Kept(NamedTuple):
    """Memory in the pool.

    How many references an array has that is in the pool only differs between versions of Python. So
    every look counts those of an array that never leaves the pool as well, which lies in as many
    containers as the others: twice in `counted`, they once here and once in their dict.
    """

    pages: np.ndarray
    arrays: BatchArrays
    counted: list[np.ndarray]  # the one that never leaves, twice, then all in `arrays`


class BatchMemory:
    """Hands out arrays over one piece of memory, to be made into tensors by `torch.from_numpy`.

    Such a tensor, and every view of it, keeps its array alive. An array nobody else refers to
    shows that all tensors over it are gone. Not for several threads at once.

    Args:
        size_bytes: Of the memory.
        view: Makes the arrays over memory uint8 (size_bytes,).
    """

    def __init__(self, size_bytes: int, view: Callable[[np.ndarray], BatchArrays]):
        self._size, self._view = size_bytes, view
        self._pool: list[_Kept] = []

    def take(self) -> tuple[np.ndarray, BatchArrays]:
        """Memory uint8 (size_bytes,) and the arrays over it, not initialised."""
        for pages, arrays, counted in self._pool:
            unused = maxsize
            for array in counted:
                references = getrefcount(array)
                if references > unused:
                    break
                unused = references
            else:
                return pages, arrays
        with allocation("a batch", self._size, _CPU, "draw fewer at once", is_checked=True):
            pages = np.empty(self._size, np.uint8)
        arrays = self._view(pages)
        if len(self._pool) < _POOL_SIZE and self._size <= _MAX_POOLED_BYTES:
            unused = np.empty(0, np.uint8)
            self._pool.append(_Kept(pages, arrays, [unused, unused, *arrays.values()]))
        return pages, arrays
