"""Memory of batches that is used again once nobody has the batch any more.

Fresh memory costs more than filling it: the system hands it out page by page, and views of it have
to be made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.free_memory import allocation

__all__ = ["BatchArrays", "BatchMemory", "Kept"]

BatchArrays = dict[str, np.ndarray]

_CPU = torch.device("cpu")
_POOL_SIZE = 2  # batches of one kind whose memory is kept
_MAX_POOLED_BYTES = 1 << 26


class Kept(NamedTuple):
    """Memory of a batch, the arrays over it by name, and what all batches over it share.

    How many references an object has that is in the pool only differs between versions of Python.
    So they are counted, by one expression, when it is made and whenever it is to be used again.
    """

    pages: np.ndarray  # uint8 (size_bytes,)
    arrays: BatchArrays
    shared: Any  # held by each batch; None if there is nothing
    counted: list[Any]  # the arrays and `shared`
    idle_count: int  # references to all these while no batch is over this memory


class BatchMemory:
    """Hands out arrays over one piece of memory, to be made into tensors by `torch.from_numpy`.

    Such a tensor, and every view of it, keeps its array alive. Arrays nobody else refers to show
    that all tensors over them are gone.

    Args:
        size_bytes: Of the memory.
        view: Makes the arrays over memory uint8 (size_bytes,), and what batches share or None.
    """

    def __init__(self, size_bytes: int, view: Callable[[np.ndarray], tuple[BatchArrays, Any]]):
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
            if sum(map(getrefcount, kept[3])) == kept[4]:
                return kept
            pool.append(kept)
        is_small = self._size <= _MAX_POOLED_BYTES  # so much may be there without looking
        with allocation("a batch", self._size, _CPU, "draw fewer at once", is_checked=is_small):
            pages = np.empty(self._size, np.uint8)
        arrays, shared = self._view(pages)
        counted = [*arrays.values()] if shared is None else [*arrays.values(), shared]
        kept = Kept(pages, arrays, shared, counted, 0)
        del shared  # a reference too
        return kept._replace(idle_count=sum(map(getrefcount, kept[3])))

    def keep(self, kept: Kept) -> None:
        """Take memory into the pool, once the tensors are made that show that it is in use."""
        if len(self._pool) < _POOL_SIZE and self._size <= _MAX_POOLED_BYTES:
            self._pool.append(kept)
