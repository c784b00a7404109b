"""Random minibatches of the rows of a finished rollout, gathered into memory that is used again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space

from buffers.columns import Column
from buffers.errors import BufferMisuseError
from buffers.free_memory import check_fits
from buffers.rollout_kernels import shuffle
from buffers.rollout_layout import check_count
from buffers.space_tree import build_tree

__all__ = ["MinibatchSampler", "RolloutBatch", "split_evenly"]

_MAX_CACHED_SIZES = 16


class RolloutBatch(NamedTuple):
    """B transitions; the tensors are overwritten by the next batch."""

    obs: Any  # (B, *obs_shape), nested like the observation space
    actions: torch.Tensor  # (B, *action_shape)
    log_probs: torch.Tensor  # float32 (B,), of the actions when they were taken
    values: torch.Tensor  # float32 (B,), when they were taken
    advantages: torch.Tensor  # float32 (B,)
    returns: torch.Tensor  # float32 (B,)


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


class MinibatchSampler:
    """Shuffles row indices and gathers rows; allocates only for a batch larger than all before.

    Args:
        observation_space: Says how observations nest.
        obs: Columns of the observation leaves, (T + 1, N, ...).
        others: Columns of the other fields of RolloutBatch in their order, (T or T + 1, N, ...).
        rows: int64 (T * N,), the row indices to draw from; owned by the caller, shuffled here.
        seed: For the shuffling; None takes entropy of the system.
    """

    def __init__(
        self,
        observation_space: Space,
        obs: Sequence[Column],
        others: Sequence[Column],
        rows: Column,
        seed: int | None,
    ):
        self._space = observation_space
        self._num_obs = len(obs)
        self._sources = [column.tensor.flatten(0, 1) for column in (*obs, *others)]
        self._rows = rows
        self._num_rows = rows.spec.shape[0]
        self._targets: list[torch.Tensor] = []
        self._capacity = 0
        self._by_size: dict[int, tuple[list[torch.Tensor], RolloutBatch]] = {}
        self.state = np.random.SeedSequence(seed).generate_state(1, np.uint64)

    @property
    def nbytes(self) -> int:
        """Bytes held for batches."""
        return sum(target.nbytes for target in self._targets)

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

    def draw(self, count: int, num_batches: int) -> Iterator[RolloutBatch]:
        """Yield the first `count` rows of the list once each, shuffled, in even batches."""
        shuffle(self._rows.host[:count], self.state)
        if self._rows.is_twofold:
            # Blocks: the next epoch shuffles the host pages, which must have left by then.
            self._rows.tensor.copy_(torch.from_numpy(self._rows.host))
        select, sources, indices = torch.index_select, self._sources, self._rows.tensor
        for start, stop in split_evenly(count, num_batches):
            targets, batch = self._by_size.get(stop - start) or self._view(stop - start)
            chosen = indices[start:stop]
            for source, target in zip(sources, targets, strict=True):
                select(source, 0, chosen, out=target)
            yield batch

    def _reserve(self, capacity: int) -> None:
        if capacity <= self._capacity:
            return
        needed = sum(s.element_size() * s[0].numel() * capacity for s in self._sources)
        device = self._sources[0].device
        check_fits(f"a batch of {capacity} rows", needed, device, "use more minibatches")
        self._by_size.clear()
        with torch.inference_mode(False):
            self._targets = [s.new_empty((capacity, *s.shape[1:])) for s in self._sources]
        self._capacity = capacity

    def _view(self, size: int) -> tuple[list[torch.Tensor], RolloutBatch]:
        if len(self._by_size) >= _MAX_CACHED_SIZES:  # sizes vary with the number of dead steps
            self._by_size.clear()
        targets = [target[:size] for target in self._targets]
        obs = build_tree(self._space, targets[: self._num_obs])
        self._by_size[size] = targets, RolloutBatch(obs, *targets[self._num_obs :])
        return self._by_size[size]
