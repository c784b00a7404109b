"""Memory of batches that is used again once nobody has the batch any more.

Fresh memory costs more than filling it: the system hands it out page by page, and views of it have
to be made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount

import numpy as np

__all__ = ["BatchArrays", "BatchMemory"]

BatchArrays = dict[str, np.ndarray]

_POOL_SIZE = 2  # batches of one kind whose memory is kept
_MAX_POOLED_BYTES = 1 << 26
_UNUSED = 3  # references to an array that is in the pool only: its dict, loop variable, argument


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
        self._pool: list[tuple[np.ndarray, BatchArrays]] = []

    def take(self) -> tuple[np.ndarray, BatchArrays]:
        """Memory uint8 (size_bytes,) and the arrays over it, not initialised."""
        for kept in self._pool:
            for array in kept[1].values():
                if getrefcount(array) > _UNUSED:
                    break
            else:
                return kept
        pages = np.empty(self._size, np.uint8)
        made = pages, self._view(pages)
        if len(self._pool) < _POOL_SIZE and self._size <= _MAX_POOLED_BYTES:
            self._pool.append(made)
        return made
