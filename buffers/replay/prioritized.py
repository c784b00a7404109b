"""PrioritizedReplayBuffer: transitions drawn in proportion to a power of their priority."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import as_array, as_tensor, read_number
from buffers.core.errors import BufferMisuseError
from buffers.core.guard import exclusive
from buffers.core.sequences import SequenceBatch, read_sequences
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

    New transitions get the largest priority given so far (1 at first). A batch is stratified: its
    b-th transition comes from the b-th of B equal parts of the sum. Its `weights` are
    (N * probability) ** -beta, divided by the largest of the batch. Transitions with priority 0 are
    never drawn.

    Args:
        capacity: Number of transitions held, exactly.
        observation_space: Of a single environment: Box, Discrete, MultiDiscrete, MultiBinary, or
            Dict and Tuple of these.
        action_space: Of a single environment: Box, Discrete, MultiDiscrete or MultiBinary.
        alpha: Exponent of the priorities; 0 draws all alike. A state that is loaded has its own,
            like the next; set the attributes behind that for others.
        beta: Exponent of the weights, unless `sample` is given another.
        num_envs: Number of environments.
        options: As of `SharedReplayBuffer`. With storage="memmap" priorities are kept in the
            folder, too, and survive the process; after a power loss they may be older ones.

    Raises:
        BufferMisuseError: An argument that does not fit.
        BufferMemoryError: More memory is needed than is free. Nothing was allocated.

    >>> from gymnasium.spaces import Box, Discrete
    >>> buffer = PrioritizedReplayBuffer(1000, Box(-1, 1, (4,)), Discrete(2), seed=0)
    >>> obs, flags = np.zeros((3, 4), np.float32), np.zeros(3, bool)
    >>> step = {"obs": obs, "next_obs": obs, "actions": np.ones(3, int), "rewards": np.ones(3)}
    >>> buffer.add(**step, terminations=flags, truncations=flags)
    >>> buffer.update_priorities([0, 1, 2], [0.0, 1.0, 0.0])
    >>> buffer.sample(4).indices.tolist()
    [1, 1, 1, 1]
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
        self._sums: DeviceValues | None = None
        self.alpha, self.beta = alpha, beta
        if options.get("read_only"):
            raise BufferMisuseError(
                "read_only needs a SharedReplayBuffer: that draws all transitions of this folder "
                "alike"
            )
        super().__init__(capacity, observation_space, action_space, num_envs=num_envs, **options)
        self._known = 0, 0  # numbers, from .. to, whose leaves have a value
        self._origin = secrets.randbits(63)  # of batches; another for each state that is loaded
        self._largest = np.ones(1)
        # In a folder: the largest priority, the exponents, and the numbers that have a priority.
        self._numbers = np.array([1.0, self.alpha, self.beta, 0.0])
        if self._folder is not None and self._tree is not None:
            numbers = self._folder.arrays["priority_numbers"]
            largest, alpha, beta, until = numbers.tolist()
            numbers[3] = 0.0  # until all are written they are taken for new ones
            if not self._folder.is_new:  # go on with those in there
                if not _are_exponents(largest, alpha, beta):
                    largest, alpha, beta = 1.0, self.alpha, self.beta
                self._restore(largest, alpha, beta, self._tree.leaves, until)
            self._numbers = numbers
            self._note_numbers()

    def _own_arguments(self) -> Mapping[str, Any]:
        return {"alpha": self.alpha, "beta": self.beta}

    def _note_numbers(self) -> None:
        self._numbers[:] = self._largest[0], self.alpha, self.beta, self._known[1]

    @classmethod
    def _bytes_of(cls, plan: Plan) -> int:
        return super()._bytes_of(plan) + 8 * sum(level_sizes(plan.span))

    @property
    def alpha(self) -> float:
        """Exponent of priorities given from now on, also by updates in a captured CUDA graph."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self._alpha = read_number("alpha", alpha, math.inf)
        if self._sums is not None:
            self._sums.alpha.fill_(self._alpha)
            self._sums.bound.fill_(self._largest_priority())

    @property
    def beta(self) -> float:
        """Exponent of the weights; draws in a captured CUDA graph see what it is set to."""
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._beta = read_number("beta", beta, math.inf)
        if self._sums is not None:
            self._sums.beta.fill_(self._beta)

    def _own_files(self, plan: Plan) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        sizes = sum(level_sizes(plan.span))
        return {"priorities": (_FLOAT64, (sizes,)), "priority_numbers": (_FLOAT64, (4,))}

    def _make_priorities(self, plan: Plan) -> None:
        memory = None if self._folder is None else self._folder.arrays["priorities"]
        self._tree = None if self._is_staged else SumTree(plan.span, memory)
        self._sums = DeviceValues(plan.span, self.device) if self._is_staged else None
        self.alpha, self.beta = self._alpha, self._beta  # on the device, too

    def memory(self) -> dict[str, int]:
        """Bytes held now, by what they are for, host and device together; batches not included."""
        sums: Any = self._tree or self._sums
        return {**super().memory(), "priorities": sums.nbytes}

    @property
    def priorities(self) -> torch.Tensor:
        """float64 (capacity,), priority ** alpha of every row; a copy, on the device."""
        if self._sums is not None:
            return self._sums.leaves.clone()
        assert self._tree is not None
        return torch.from_numpy(self._tree.leaves.copy())

    @property
    def num_refused(self) -> int:
        """Priorities on a device that were left out as they did not fit; waits for the device."""
        return 0 if self._sums is None else int(self._sums.num_refused)

    @property
    def _is_captured(self) -> bool:
        """Whether an add is in a CUDA graph: the device alone knows which rows are new then."""
        return self._there is not None and self._there.is_captured

    def _store(self, *read: Any) -> None:
        if self._is_captured:
            self._settle()
            self._known = self._live()
        super()._store(*read)
        self._insert_new(of_array=True)

    def _insert_new(self, *, of_array: bool = False) -> None:
        """Give rows their first priority: all that were added since this was done the last time.

        An interrupt may have come between an `add` and this.
        """
        (known, until), (begin, end) = self._known, self._live()
        if (begin, end) == self._known or (self._is_captured and not of_array):
            return
        sums: Any = self._tree or self._sums
        if end - begin < self._table.plan.span:  # those that left are not all overwritten
            sums.set_numbers(known, min(begin, until), 0.0)
        value = self._largest[0] ** self.alpha if self._sums is None else self._sums.new_value()
        sums.set_numbers(max(begin, until), end, value)
        self._known = begin, end
        self._note_numbers()

    def _note_rows(self, rows: torch.Tensor) -> None:
        if self._sums is not None and self._is_captured:
            self._sums.insert_rows(rows)
        else:
            self._insert_new()

    def _live(self) -> tuple[int, int]:
        return self._table.live_of_one()

    @exclusive
    def sample(
        self,
        batch_size: int,
        out: ReplayBatch | None = None,
        *,
        beta: float | None = None,
        columns: Iterable[str] | None = None,
    ) -> ReplayBatch:
        """Draw transitions by their priorities, with replacement.

        Args:
            batch_size: B.
            out: A batch that `new_batch` or `sample` returned, to be overwritten; else a new one.
            beta: Exponent of the weights; None takes the constructor's.
            columns: As in `SharedReplayBuffer.sample`; `weights` are always there, too.

        Raises:
            BufferMisuseError: The buffer is empty, or all priorities are 0 (found out on the CPU
                only), or an argument does not fit.
        """
        exponent = None if beta is None else read_number("beta", beta, math.inf)
        batch, generator = self._batch(batch_size, out, columns), self._random.torch
        memory = batch.memory
        self._insert_new()
        batch.num_added, batch.drawn_from = self._table.num_added, self._origin
        if self._sums is not None:
            self._note_captured()
            self._sums.draw(generator, memory.indices, memory.weights, exponent)
        elif self._tree is not None:
            if not self._tree.total > 0:
                raise BufferMisuseError(
                    "all priorities are 0; give some a positive one with update_priorities"
                )
            exponent = self._beta if exponent is None else exponent
            self._tree.draw(generator, memory.indices, memory.weights, exponent)
        self._reader.fill(batch)
        self._keep_generator()
        return batch

    @exclusive
    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """Give transitions new priorities.

        Args:
            indices: The batch they are of: rows that were overwritten since it was drawn are left
                out. Or rows int (K,), such as `batch.indices`, whatever they hold now: update
                before adding then.
            priorities: float (K,), not negative, and so small that no sum of powers overflows: the
                error, plus a little if nothing is to be forgotten. Of equal indices the last
                counts; on a device they should agree. Tensors on a device are not looked at: what
                does not fit there is left out, and counted in `num_refused`.

        Raises:
            BufferMisuseError: An index or a priority does not fit, or the batch was drawn from
                another buffer or before a state was loaded; nothing was changed.
        """
        if self._folder is not None:
            self._folder.require_writable()
        if isinstance(indices, ReplayBatch):
            indices, priorities = self._not_overwritten(indices, priorities)
        pair = indices, priorities
        is_there = all(isinstance(x, torch.Tensor) and x.device == self.device for x in pair)
        if self._sums is not None and is_there and self.device.type != "cpu":  # without waiting
            self._sums.update(indices, priorities, self._table.live_there())
            return
        leaves = _read_list("indices", indices, _INT64, self.device)
        given = _read_list("priorities", priorities, _FLOAT64, self.device)
        if leaves.ndim != 1 or leaves.shape != given.shape:
            raise BufferMisuseError(
                f"indices has shape {leaves.shape} and priorities {given.shape}, expected (K,) both"
            )
        self._insert_new()
        bound, (begin, end), span = self._largest_priority(), self._live(), self._table.plan.span
        is_good = (leaves >= 0) & (leaves < min(end, span)) & (given >= 0.0) & (given <= bound)
        if not is_good.all():
            wrong = int(np.argmin(is_good))
            raise BufferMisuseError(
                f"indices[{wrong}] is {leaves[wrong]} and priorities[{wrong}] {given[wrong]}, "
                f"expected a row from 0 to {min(end, span) - 1} and a priority from 0 to "
                f"{bound:.4g}, so that no sum overflows"
            )
        self._largest[0] = given.max(initial=self._largest[0])
        is_there = (leaves - begin) % span < end - begin  # else it can't be drawn any more
        rows, values = leaves[is_there], given[is_there]
        if self._tree is not None:
            self._tree.update(rows, np.power(values, self.alpha, out=values))
            self._note_numbers()
        elif self._sums is not None and len(rows):
            found, given_there = (torch.from_numpy(x).to(self.device) for x in (rows, values))
            self._sums.update(found, given_there, self._table.live_there())

    def _not_overwritten(self, batch: ReplayBatch, priorities: Any) -> tuple[Any, Any]:
        """The rows of a batch that still hold what was drawn, and their priorities."""
        drawn_at, span = batch.num_added, self._table.plan.span
        if self._is_captured:
            raise BufferMisuseError(
                "an add was captured in a CUDA graph, so the host does not know which rows of the "
                "batch were overwritten since; pass batch.indices, before the next add"
            )
        if drawn_at is None or batch.drawn_from != self._origin:
            raise BufferMisuseError(
                "the batch was not drawn by sample of this buffer: it is from another buffer, from "
                "get, or from before a state was loaded; draw anew"
            )
        rows, given = batch.indices, as_tensor("priorities", priorities)
        if given.shape != rows.shape:
            shape = tuple(given.shape)
            raise BufferMisuseError(f"priorities has shape {shape}, expected {tuple(rows.shape)}")
        if (now := self.num_added) == drawn_at:
            return rows, priorities
        kept = now - drawn_at <= (rows - drawn_at) % span  # adds that leave a row alone
        return rows[kept], given[kept.to(given.device)]

    def sample_sequences(
        self,
        batch_size: int,
        sequence_length: int,
        *,
        burn_in: int = 0,
        overlap: int | None = None,
        pad: bool = False,
        initial_states: Sequence[str] | str = (),
        columns: Iterable[str] | None = None,
        beta: float | None = None,
    ) -> SequenceBatch:
        """Draw sequences in proportion to priority ** alpha, as `sample` draws transitions.

        Sequences have priorities of their own, see `update_sequence_priorities`; a new one gets the
        largest given so far, 1 at first. Once some were given, sequences of other options are
        refused. Otherwise as `SharedReplayBuffer.sample_sequences`.

        Args:
            batch_size: B; see there, like all but the last.
            sequence_length: L.
            burn_in: Steps that are not learned from.
            overlap: Steps shared with the next sequence.
            pad: Whether sequences may run out.
            initial_states: Names of extra columns.
            columns: Names of those to draw.
            beta: Exponent of `weights` float32 (B,); None takes the constructor's.

        Raises:
            BufferMisuseError: See above, and there.
        """
        exponent = self.beta if beta is None else read_number("beta", beta, math.inf)
        options = read_sequences(sequence_length, burn_in, overlap, pad)
        return self._sample_sequences(batch_size, options, initial_states, columns, exponent)

    def _new_sequence_value(self) -> float:
        return 1.0 if self._sequences is None else self._sequences.largest**self.alpha

    @exclusive
    def update_sequence_priorities(
        self, batch: SequenceBatch, errors: Any, *, eta: float = 0.9
    ) -> None:
        """Give sequences the priority eta * max + (1 - eta) * mean of the sizes of their errors.

        Sequences whose first row was overwritten since the batch was drawn are left out.

        Args:
            batch: What `sample_sequences` returned, no copy.
            errors: float (B, L), of any sign; read where `batch.learn_mask` is True.
            eta: See above, from 0 to 1.

        Raises:
            BufferMisuseError: The batch is of another buffer or state, or an error is not finite
                or too large, or a shape does not fit; nothing was changed.
        """
        eta, memory = read_number("eta", eta), self._check_sequences(batch)
        given = np.asarray(_read_list("errors", errors, _FLOAT64, self.device))
        learn = batch.learn_mask.cpu().numpy()
        if given.shape != learn.shape:
            raise BufferMisuseError(
                f"errors has shape {given.shape}, expected {learn.shape}: one for each step"
            )
        sizes, bound = np.abs(np.where(learn, given, 0.0)), self._largest_priority()
        if not (sizes <= bound).all():
            b, k = np.argwhere(~(sizes <= bound))[0].tolist()
            raise BufferMisuseError(
                f"errors[{b}, {k}] is {given[b, k]}, expected at most {bound:.4g} in size"
            )
        means = (sizes / learn.sum(1, keepdims=True)).sum(1)
        priorities = np.minimum(eta * sizes.max(1) + (1 - eta) * means, bound)
        assert self._sequences is not None
        self._sequences.update(memory, priorities, self.alpha)

    def _largest_priority(self) -> float:
        """Up to which priorities are taken: as many as there are rows can be summed up."""
        return math.exp(min(math.log(MAX_VALUE) / max(self.alpha, 1e-9), _LOG_MAX))

    def _own_state(self) -> dict[str, Any]:
        self._insert_new()
        if self._folder is not None:  # which has the priorities
            return {}
        largest = self._largest[0] if self._sums is None else float(self._sums.largest)
        exponents = torch.from_numpy(np.array([largest, self.alpha, self.beta]))
        return {**super()._own_state(), "exponents": exponents, "priorities": self.priorities.cpu()}

    def _check_own_state(self, state: Mapping[str, np.ndarray]) -> None:
        super()._check_own_state(state)
        largest, alpha, beta = state["exponents"].tolist()
        if not _are_exponents(largest, alpha, beta) or not values_fit(state["priorities"]):
            raise contradiction(
                "it has priorities or exponents that cannot be: "
                f"alpha {alpha}, beta {beta}, largest {largest}"
            )

    def _take_own_state(self, state: Mapping[str, np.ndarray]) -> None:
        super()._take_own_state(state)
        largest, alpha, beta = state["exponents"].tolist()
        self._restore(largest, alpha, beta, state["priorities"], math.inf)

    def _restore(
        self, largest: float, alpha: float, beta: float, values: np.ndarray, until: float
    ) -> None:
        """Take over exponents, and values float64 (rows,), which numbers before `until` have.

        Rows that hold nothing get 0, and those with none that can be that of new rows.
        """
        self.alpha, self.beta = alpha, beta
        self._largest[0], self._origin = largest, secrets.randbits(63)
        begin, end = self._known = self._live()
        ages = (np.arange(len(values)) - begin) % len(values)
        is_known = begin + ages < (until if until <= end or until == math.inf else begin)
        is_known &= (values >= 0) & (values <= 1.001 * MAX_VALUE)
        values = np.where(is_known, values, largest**alpha)
        values[ages >= end - begin] = 0.0
        if self._tree is not None:
            self._tree.restore(values)
        elif self._sums is not None:
            self._sums.leaves.copy_(torch.from_numpy(values))
            self._sums.largest.fill_(largest)


def _are_exponents(largest: float, alpha: float, beta: float) -> bool:
    """Whether a state has a largest priority and exponents that can be; false of NaN."""
    are_numbers = 1 <= largest < math.inf and 0 <= alpha < math.inf and 0 <= beta < math.inf
    return are_numbers and alpha * math.log(largest) <= math.log(MAX_VALUE) + 1e-3


def _read_list(name: str, given: Any, dtype: np.dtype, device: torch.device) -> np.ndarray:
    array = as_array(name, given, device)
    if array.dtype == dtype and array.flags.carray:
        return array
    if array.size and array.dtype.kind not in ("iu" if dtype == _INT64 else "fiu"):
        raise BufferMisuseError(f"{name} has dtype {array.dtype}, expected {dtype}; convert it")
    return np.array(array, dtype)
