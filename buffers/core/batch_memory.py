"""Memory of batches that is used again once nobody has the batch any more.

Fresh memory costs more than filling it: the system hands it out page by page, and views of it have
to be made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from typing import NamedTuple

import numpy as np
import torch

from buffers.core.memory import allocation

__all__ = ["BatchArrays", "BatchMemory", "Kept"]

BatchArrays = dict[str, np.ndarray]

_CPU = torch.device("cpu")
_POOL_SIZE = 2  # batches of one kind whose memory is kept
_MAX_POOLED_BYTES = 1 << 26


class Kept(NamedTuple):
    """Memory of a batch, and the arrays over it by name.

    How many references an array has that is in the pool only differs between versions of Python. So
    every look counts those of an array that never leaves the pool as well, which lies in as many
    containers as the others: twice in `counted`, they once here and once in their dict.
    """

    pages: np.ndarray  # uint8 (size_bytes,)
    arrays: BatchArrays
    counted: list[np.ndarray]  # the one that never leaves, twice, then all in `arrays`


class BatchMemory:
    """Hands out arrays over one piece of memory, to be made into tensors by `torch.from_numpy`.

    Such a tensor, and every view of it, keeps its array alive. An array nobody else refers to
    shows that all tensors over it are gone.

    Args:
        size_bytes: Of the memory.
        view: Makes the arrays over memory uint8 (size_bytes,).
    """

    def __init__(self, size_bytes: int, view: Callable[[np.ndarray], BatchArrays]):
        self._size, self._view = size_bytes, view
        self._pool: list[Kept] = []

    def take(self) -> Kept:
        """Memory and the arrays over it, not initialised; to be given to `keep` when tensors are.

        It is not in the pool until then, so that no other thread is given the same.
        """
        pool = self._pool
        for _ in range(len(pool)):
            try:
                kept = pool.pop(0)
            except IndexError:  # another thread was quicker
                break
            references = [*map(getrefcount, kept.counted)]
            if max(references) == references[0]:
                return kept
            pool.append(kept)
        is_small = self._size <= _MAX_POOLED_BYTES  # so much may be there without looking
        with allocation("a batch", self._size, _CPU, "draw fewer at once", is_checked=is_small):
            pages = np.empty(self._size, np.uint8)
        arrays, unused = self._view(pages), np.empty(0, np.uint8)
        return Kept(pages, arrays, [unused, unused, *arrays.values()])

    def keep(self, kept: Kept) -> None:
        """Take memory into the pool, once the tensors are made that show that it is in use."""
        if len(self._pool) < _POOL_SIZE and self._size <= _MAX_POOLED_BYTES:
            self._pool.append(kept)
