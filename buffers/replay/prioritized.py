"""PrioritizedReplayBuffer: draws transitions in proportion to priority ** alpha."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import as_array, read_number
from buffers.core.batches import SequenceBatch
from buffers.core.errors import BufferMisuseError
from buffers.core.state import contradiction
from buffers.replay.batches import ReplayBatch
from buffers.replay.buffer import ReplayBuffer
from buffers.replay.plan import Plan, ReplayOptions
from buffers.replay.priorities import MAX_VALUE, DeviceValues, SumTree, level_sizes, values_fit

__all__ = ["PrioritizedReplayBuffer"]

_LOG_MAX = math.log(sys.float_info.max)
_INT64, _FLOAT64 = np.dtype(np.int64), np.dtype(np.float64)


class PrioritizedReplayBuffer(ReplayBuffer):
    """The newest `capacity` transitions, drawn with probability proportional to priority ** alpha.

    New transitions get the largest priority given so far, initially 1. Transitions with priority 0
    are never drawn. Draw b of a batch comes from the b-th of B equal parts of the sum of priority
    ** alpha. The `weights` are (N * probability) ** -beta, divided by the largest of the batch.

    Args:
        capacity: Number of transitions held, exactly.
        observation_space, action_space: As in `SharedReplayBuffer`.
        alpha: Exponent of the priorities; 0 draws uniformly.
        beta: Exponent of the weights, unless `sample` gets another one.
        num_envs: Number of environments.
        options: As in `SharedReplayBuffer`, without storage="memmap".

    Attributes:
        alpha: The argument; read only.
        beta: The argument; may be assigned, and is part of the state.

    Raises:
        BufferMisuseError: An argument does not fit.
        BufferMemoryError: More memory is needed than is free. Nothing was allocated.
    """

    _has_weights = True

    def __init__(
        self,
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        num_envs: int | None = None,
        **options: Unpack[ReplayOptions],
    ):
        self.alpha = read_number("alpha", alpha, math.inf)
        self.beta = read_number("beta", beta, math.inf)
        # The largest accepted priority: powers of all rows can be summed without overflow.
        self._bound = math.exp(min(math.log(MAX_VALUE) / max(self.alpha, 1e-9), _LOG_MAX))
        super().__init__(capacity, observation_space, action_space, num_envs=num_envs, **options)
        self._largest = 1.0
        self._known = 0, 0  # first and end number of rows whose leaves have a value

    def _own_settings(self) -> dict[str, Any]:
        return {"alpha": self.alpha}

    @classmethod
    def _bytes_of(cls, plan: Plan) -> int:
        return super()._bytes_of(plan) + 8 * sum(level_sizes(plan.span))

    def _make_priorities(self, plan: Plan) -> None:
        there = plan.span, self.device, self.alpha, self._bound
        self._sums: Any = DeviceValues(*there) if self._is_staged else SumTree(plan.span)

    def memory(self) -> dict[str, int]:
        """Bytes held now, by purpose, on host and device together, without batches."""
        return {**super().memory(), "priorities": self._sums.nbytes}

    @property
    def priorities(self) -> torch.Tensor:
        """Priority ** alpha of every row, float64 (capacity,); a copy, on the device."""
        if self._is_staged:
            return self._sums.leaves(self._table.live_there())
        self._insert_new()
        return torch.from_numpy(self._sums.leaves.copy())

    @property
    def num_refused(self) -> int:
        """Number of priorities on a device that were ignored as invalid; waits for the device."""
        return int(self._sums.num_refused) if self._is_staged else 0

    def _note_rows(self, rows: Any) -> None:
        if self._is_staged and rows is not None:
            self._sums.insert(rows)
        self._insert_new()

    def _insert_new(self) -> None:
        """On the host, give a priority to all rows added since the last call.

        Callers can't rely on `add`: an interrupt may have come between the rows and their priority.
        """
        (known, until), (begin, end) = self._known, self._table.live_of_one()
        if (begin, end) == self._known or self._is_staged:
            return
        new, span = np.arange(max(begin, until), end), self._table.plan.span
        if end - begin < span:  # some rows have left the ring, but are not overwritten
            left = np.arange(max(known, end - span), min(begin, until))
            self._sums.update(left % span, np.zeros(len(left)))
        self._sums.update(new % span, np.full(len(new), self._largest**self.alpha))
        self._known = begin, end

    def sample(
        self,
        batch_size: int,
        out: ReplayBatch | None = None,
        *,
        beta: float | None = None,
        columns: Iterable[str] | None = None,
    ) -> ReplayBatch:
        """Draw transitions in proportion to priority ** alpha, with replacement.

        Args:
            batch_size: B.
            out: A batch from `new_batch` or `sample`, to be overwritten; None makes a new one.
            beta: Exponent of the weights; None takes the buffer's. A CUDA graph keeps the value of
                its capture.
            columns: As in `SharedReplayBuffer.sample`; `weights` are always there, too.

        Raises:
            BufferMisuseError: The buffer is empty, all priorities are 0 (checked on the CPU only),
                or an argument does not fit.
        """
        exponent = read_number("beta", self.beta if beta is None else beta, math.inf)
        batch = self._batch(batch_size, out, columns)
        self._insert_new()
        self._note_captured()
        if not self._is_staged and not self._sums.total > 0:
            raise BufferMisuseError(
                "all priorities are 0; give some a positive one with update_priorities"
            )
        drawn = batch.memory.indices, batch.memory.weights, exponent
        live = [self._table.live_there()] if self._is_staged else []
        self._sums.draw(self._random.torch, *drawn, *live)
        self._reader.fill(batch)
        return batch

    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """Give transitions new priorities.

        Args:
            indices: int (K,), rows such as `batch.indices`. Call this before the next `add`, which
                may put other transitions into these rows.
            priorities: float (K,), at least 0 and so small that no sum of powers overflows: such as
                the error plus a small constant. For equal indices the last one counts; on a device
                they should be equal. Tensors on a device are not checked: invalid ones are ignored
                there and counted in `num_refused`.

        Raises:
            BufferMisuseError: An index or a priority does not fit; nothing was changed.
        """
        pair = indices, priorities
        is_there = all(isinstance(x, torch.Tensor) and x.device == self.device for x in pair)
        if is_there and self.device.type != "cpu":  # without waiting
            self._sums.update(indices, priorities, self._table.live_there())
            return
        leaves = _read_list("indices", indices, _INT64, self.device)
        given = _read_list("priorities", priorities, _FLOAT64, self.device)
        if leaves.ndim != 1 or leaves.shape != given.shape:
            raise BufferMisuseError(
                f"indices has shape {leaves.shape} and priorities {given.shape}, expected (K,) both"
            )
        self._settle()
        self._insert_new()
        (begin, end), span = self._table.live_of_one(), self._table.plan.span
        bound, num_rows = self._bound, min(end, span)
        is_good = (leaves >= 0) & (leaves < num_rows) & (given >= 0.0) & (given <= bound)
        if not is_good.all():
            wrong = int(np.argmin(is_good))
            raise BufferMisuseError(
                f"indices[{wrong}] is {leaves[wrong]} and priorities[{wrong}] {given[wrong]}, "
                f"expected a row from 0 to {num_rows - 1} and a priority from 0 to {bound:.4g}, so "
                "that no sum overflows"
            )
        is_there = (leaves - begin) % span < end - begin  # else the transition has left the ring
        rows, values = leaves[is_there], given[is_there]
        if self._is_staged:
            found, values = (torch.from_numpy(x).to(self.device) for x in (rows, values))
            self._sums.update(found, values, self._table.live_there())
        else:
            self._largest = float(given.max(initial=self._largest))
            self._sums.update(rows, np.power(values, self.alpha, out=values))

    def update_sequence_priorities(
        self, batch: SequenceBatch, errors: Any, *, eta: float = 0.9
    ) -> None:
        """Give sequences the priority eta * max + (1 - eta) * mean of their absolute errors.

        Sequences whose first row was overwritten after the draw are ignored. New sequences have the
        largest priority given so far, initially 1.

        Args:
            batch: Returned by `sample_sequences`, not a copy.
            errors: float (B, L), of any sign; read where `batch.learn_mask` is True.
            eta: From 0 to 1.

        Raises:
            BufferMisuseError: The batch is of another buffer or state, an error is not finite or
                too large, or a shape does not fit; nothing was changed.
        """
        eta = read_number("eta", eta)
        self._check_sequences(batch)
        given = _read_list("errors", errors, _FLOAT64, self.device)
        learn, bound = batch.learn_mask.cpu().numpy(), self._bound
        if given.shape != learn.shape:
            raise BufferMisuseError(
                f"errors has shape {given.shape}, expected {learn.shape}: one for each step"
            )
        sizes = np.abs(np.where(learn, given, 0.0))
        if not (sizes <= bound).all():
            b, k = np.argwhere(~(sizes <= bound))[0].tolist()
            raise BufferMisuseError(
                f"errors[{b}, {k}] is {given[b, k]}, expected at most {bound:.4g} in size"
            )
        means = (sizes / learn.sum(1, keepdims=True)).sum(1)
        priorities = np.minimum(eta * sizes.max(1) + (1 - eta) * means, bound)
        self._index().update(batch, priorities)

    def _own_state(self) -> dict[str, Any]:
        self._insert_new()
        largest = self._sums.largest.cpu().numpy() if self._is_staged else self._largest
        numbers = np.array([largest, self.beta], np.float64)
        own = {"priority_numbers": numbers, "priorities": self.priorities.cpu()}
        return {**super()._own_state(), **own}

    def _check_own_state(self, state: Mapping[str, np.ndarray]) -> None:
        super()._check_own_state(state)
        largest, beta = state["priority_numbers"].tolist()
        is_largest = 1 <= largest <= 1.001 * self._bound and largest < math.inf  # a bound may be it
        are_numbers = is_largest and 0 <= beta < math.inf
        if not are_numbers or not values_fit(state["priorities"]):
            raise contradiction("it has priorities that cannot be")

    def _take_own_state(self, state: Mapping[str, np.ndarray]) -> None:
        super()._take_own_state(state)
        self._largest, self.beta = state["priority_numbers"].tolist()
        begin, end = self._known = self._table.live_of_one()
        values = state["priorities"].copy()
        values[(np.arange(len(values)) - begin) % len(values) >= end - begin] = 0.0
        if self._is_staged:
            self._sums.restore(values, self._largest)
        else:
            self._sums.restore(values)


def _read_list(name: str, given: Any, dtype: np.dtype, device: torch.device) -> np.ndarray:
    array = as_array(name, given, device)
    if array.dtype == dtype and array.flags.carray:
        return array
    if array.size and array.dtype.kind not in ("iu" if dtype == _INT64 else "fiu"):
        raise BufferMisuseError(f"{name} has dtype {array.dtype}, expected {dtype}; convert it")
    return np.array(array, dtype)
