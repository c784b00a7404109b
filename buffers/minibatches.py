"""Random minibatches of the rows of a finished rollout, gathered into memory that is used again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from sys import getrefcount
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Dict, Tuple

from buffers.batch import Batch
from buffers.columns import Column
from buffers.errors import BufferMisuseError
from buffers.free_memory import check_fits
from buffers.rollout_kernels import shuffle
from buffers.rollout_layout import check_count
from buffers.space_tree import build_tree

__all__ = ["MinibatchSampler", "RolloutBatch", "split_evenly"]

_POOL_SIZE = 2  # batches whose memory is kept
_ALIGNMENT = 64
_ROW_NUMBER = torch.zeros(1, dtype=torch.int64)


@dataclass(slots=True, repr=False, eq=False)
class RolloutBatch(Batch):
    """B transitions of a rollout."""

    obs: Any  # (B, *obs_shape), nested like the observation space
    actions: torch.Tensor  # (B, *action_shape)
    log_probs: torch.Tensor  # float32 (B,), of the actions when they were taken
    values: torch.Tensor  # float32 (B,), when they were taken
    advantages: torch.Tensor  # float32 (B,)
    returns: torch.Tensor  # float32 (B,)
    indices: Any = None  # int64 (B,), rows of the rollout: t * num_envs + env
    extras: dict[str, torch.Tensor] = field(default_factory=dict)  # (B, ...), added by the user

    _fields = ("obs", "actions", "log_probs", "values", "advantages", "returns")
    _others = ("indices",)


def split_evenly(count: int, parts: int) -> Iterator[tuple[int, int]]:
    """Cut range(count) into (start, stop) pieces whose sizes differ by one at most.

    >>> list(split_evenly(7, 3))
    [(0, 3), (3, 5), (5, 7)]
    """
    size, longer = divmod(count, max(parts, 1))
    start = 0
    for part in range(parts):
        stop = start + size + (part < longer)
        yield start, stop
        start = stop


class _Pages:
    """Memory of one batch: an array for each of its columns, cut to the size of the batch.

    Tensors made of such cuts keep these, and so the pages, alive. That nobody refers to the pages
    but this object shows that all of the tensors are gone, views of them included.

    Args:
        sources: A batch has as many columns of their dtypes and shapes, and one of row numbers.
        capacity: Rows of the largest batch.
    """

    def __init__(self, sources: Sequence[torch.Tensor], capacity: int):
        shapes = [(s.numpy().dtype, s.shape[1:]) for s in (*sources, _ROW_NUMBER)]
        ends = list(accumulate(_padded(capacity, shape, dtype) for dtype, shape in shapes))
        self._pages = np.empty(ends[-1] + _ALIGNMENT, np.uint8)
        begin = -self._pages.ctypes.data % _ALIGNMENT
        self._columns = [
            np.ndarray((capacity, *shape), dtype, self._pages, begin + end)
            for (dtype, shape), end in zip(shapes, [0, *ends[:-1]], strict=True)
        ]
        self._count_unused = getrefcount(self._pages)

    @staticmethod
    def nbytes_for(sources: Sequence[torch.Tensor], capacity: int) -> int:
        """Bytes of the pages, but for what aligns them."""
        return capacity * sum(s.element_size() * s[0].numel() for s in (*sources, _ROW_NUMBER))

    @property
    def nbytes(self) -> int:
        return self._pages.nbytes

    def is_unused(self) -> bool:
        """Whether nobody has a batch made of these pages any more, nor a part of one."""
        return getrefcount(self._pages) == self._count_unused

    def cut(self, size: int) -> list[torch.Tensor]:
        """The columns of a batch of some rows, not initialised."""
        return [torch.from_numpy(column[:size]) for column in self._columns]


class MinibatchSampler:
    """Shuffles row indices and gathers rows.

    On the CPU, memory of batches is used again once they are gone: in the usual loop, where a batch
    is held until the next one is there, that makes two. Other devices have an allocator that does
    it.

    Args:
        observation_space: Says how observations nest.
        obs: Columns of the observation leaves, (T + 1, N, ...).
        others: Columns of the other fields of RolloutBatch in their order, (T or T + 1, N, ...).
        extras: Tensors (T, N, ...) of the columns that the user added.
        rows: int64 (T * N,), the row indices to draw from; owned by the caller, shuffled here.
        seed: For the shuffling; None takes entropy of the system.
    """

    def __init__(
        self,
        observation_space: Space,
        obs: Sequence[Column],
        others: Sequence[Column],
        extras: Mapping[str, torch.Tensor],
        rows: Column,
        seed: int | None,
    ):
        self._space = observation_space
        self._num_obs, self._extras = len(obs), list(extras)
        tensors = [column.tensor for column in (*obs, *others)]
        self._sources = [tensor.flatten(0, 1) for tensor in (*tensors, *extras.values())]
        self._is_nested = isinstance(observation_space, Dict | Tuple)
        self._rows = rows
        self._num_rows = rows.spec.shape[0]
        self._is_pooled = rows.tensor.device.type == "cpu" and not rows.is_twofold
        self._pool: list[_Pages] = []
        self._capacity = 0
        self._passes = self._stops = 0
        self.state = np.random.SeedSequence(seed).generate_state(1, np.uint64)

    @property
    def nbytes(self) -> int:
        """Bytes held for batches."""
        return sum(pages.nbytes for pages in self._pool)

    def count_batches(self, num_minibatches: int | None, batch_size: int | None, count: int) -> int:
        """Number of batches for `count` rows; sees to the memory for the largest possible one.

        Raises:
            BufferMisuseError: Not exactly one of the two is given, or it is no integer from 1 to
                T * N.
            BufferMemoryError: Memory for the batches is missing.
        """
        if (num_minibatches is None) == (batch_size is None):
            raise BufferMisuseError(
                "give either num_minibatches or batch_size, got "
                f"num_minibatches={num_minibatches!r}, batch_size={batch_size!r}"
            )
        name = "batch_size" if num_minibatches is None else "num_minibatches"
        number = check_count(name, batch_size if num_minibatches is None else num_minibatches)
        if number > self._num_rows:
            raise BufferMisuseError(
                f"{name} is {number}, but the rollout has {self._num_rows} transitions; "
                "make it smaller"
            )
        if num_minibatches is None:
            self._reserve(number)
            return -(-count // number)
        self._reserve(-(-self._num_rows // number))
        return min(number, count)

    def stop(self) -> None:
        """Let no pass go on, as the rows change."""
        self._stops += 1

    def draw(self, count: int, num_batches: int) -> Iterator[RolloutBatch]:
        """Yield the first `count` rows of the list once each, shuffled, in even batches."""
        return self._draw(count, num_batches, self._stops)

    def _draw(self, count: int, num_batches: int, stops: int) -> Iterator[RolloutBatch]:
        self._require(stops == self._stops)
        self._passes += 1
        number = self._passes
        shuffle(self._rows.host[:count], self.state)
        if self._rows.is_twofold:
            # Blocks: the next epoch shuffles the host pages, which must have left by then.
            self._rows.tensor.copy_(torch.from_numpy(self._rows.host))
        indices = self._rows.tensor
        for start, stop in split_evenly(count, num_batches):
            self._require(number == self._passes and stops == self._stops)
            yield self._gather(indices[start:stop])

    @staticmethod
    def _require(is_current: bool) -> None:
        if not is_current:
            raise BufferMisuseError(
                "these minibatches are over: another pass or rollout has begun, or advantages were "
                "computed again, since; go through one pass at a time, list(rollout.minibatches("
                "...)) keeps the batches of a pass"
            )

    def _gather(self, chosen: torch.Tensor) -> RolloutBatch:
        """The rows int64 (B,) of all columns, in memory of their own."""
        select = torch.index_select
        if self._is_pooled:
            columns = self._unused_pages().cut(len(chosen))
            for source, target in zip(self._sources, columns, strict=False):
                select(source, 0, chosen, out=target)
            indices = columns.pop().copy_(chosen)
        else:
            columns = [select(source, 0, chosen) for source in self._sources]
            indices = chosen.clone()
        extras: dict[str, torch.Tensor] = {}
        if self._extras:
            begin = len(columns) - len(self._extras)
            extras = dict(zip(self._extras, columns[begin:], strict=True))
            del columns[begin:]
        if self._is_nested:
            columns[: self._num_obs] = [build_tree(self._space, columns[: self._num_obs])]
        return RolloutBatch(*columns, indices=indices, extras=extras)

    def _reserve(self, capacity: int) -> None:
        """See to the memory of a first batch of this size, before any row is moved."""
        if capacity > self._capacity:
            self._pool, self._capacity = [], capacity
        if self._is_pooled:
            self._unused_pages()

    def _unused_pages(self) -> _Pages:
        for pages in self._pool:
            if pages.is_unused():
                return pages
        needed = _Pages.nbytes_for(self._sources, self._capacity)
        what = f"a batch of {self._capacity} rows"
        check_fits(what, needed, torch.device("cpu"), "use more minibatches, or keep fewer")
        pages = _Pages(self._sources, self._capacity)
        self._pool = [*self._pool, pages][-_POOL_SIZE:]
        return pages


def _padded(count: int, shape: Sequence[int], dtype: np.dtype) -> int:
    """Bytes of a column, up to where the next one may begin."""
    size = count * math.prod(shape) * dtype.itemsize
    return size + -size % _ALIGNMENT
