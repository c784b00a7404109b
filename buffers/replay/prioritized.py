"""PrioritizedReplayBuffer: transitions drawn in proportion to a power of their priority."""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import as_array, as_tensor, read_number
from buffers.core.errors import BufferMisuseError
from buffers.core.guard import exclusive
from buffers.core.sequences import SequenceBatch, read_sequences
from buffers.core.staging import StagingBlocks
from buffers.core.state import LoadedState, Placed, contradiction
from buffers.replay import layout as at
from buffers.replay.base import ReplayBuffer
from buffers.replay.batches import ReplayBatch
from buffers.replay.folder import RowFolder
from buffers.replay.frames import FrameStack
from buffers.replay.layout import ReplayOptions
from buffers.replay.priorities import (
    ROUNDING,
    BlockSums,
    SumTree,
    check_update,
    largest_value,
    level_sizes,
    values_fit,
)

__all__ = ["PrioritizedReplayBuffer"]

_ALPHA, _BETA = 0.6, 0.4
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
        alpha: Exponent of the priorities; 0 draws all alike. None means 0.6, until a state with
            another is loaded. One that is given here wins over that of a state, whose priorities
            are raised to the new power.
        beta: Exponent of the weights, unless `sample` is given another. None means 0.4, until a
            state with another is loaded; one that is given here wins.
        num_envs: As in `SharedReplayBuffer`, like all that follow.
        n_step: Length of the windows.
        gamma: Discount per step.
        store_next: Whether next observations are stored besides.
        frame_stack: Number of frames of an observation, each of which is stored once.
        track_env: Keep env ids.
        track_episodes: Keep what follows on what, for `sample_sequences`.
        extra_columns: Names and spaces of further values per transition.
        device: Where the transitions live.
        seed: Of the generator.
        staged: Do on the CPU what is done on other devices, to test it.
        storage: Where the rows are: "memory", or "memmap", files. Priorities are kept in the
            folder, too, and survive the process; after a power loss they may be older ones.
        folder: Of "memmap".

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
        alpha: float | None = None,
        beta: float | None = None,
        num_envs: int | None = None,
        n_step: int = 1,
        gamma: float | None = None,
        store_next: bool = True,
        frame_stack: int | FrameStack | None = None,
        track_env: bool = False,
        track_episodes: bool = False,
        extra_columns: Mapping[str, Space] | None = None,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        staged: bool = False,
        storage: str = "memory",
        folder: str | os.PathLike[str] | None = None,
    ):
        self._given = {"alpha": alpha, "beta": beta}
        self._sums: BlockSums | None = None
        self._bound = -1.0, 0.0  # an alpha, and the largest priority for it
        self.alpha = _ALPHA if alpha is None else alpha
        self.beta = _BETA if beta is None else beta
        super().__init__(
            capacity, observation_space, action_space,
            num_envs=num_envs, n_step=n_step, gamma=gamma, store_next=store_next,
            frame_stack=frame_stack, track_env=track_env, track_episodes=track_episodes,
            extra_columns=extra_columns, device=device, seed=seed, staged=staged,
            storage=storage, folder=folder, read_only=False,
        )  # fmt: skip
        self._num_inserted = 0  # rows that `_sums` knows of
        self._origin = secrets.randbits(63)  # of batches; another for each state that is loaded
        self._largest = np.ones(1)
        if self._storage.folder is not None:
            self._open_priorities(self._storage.folder)

    def _made_anew(self) -> tuple[type[ReplayBuffer], dict[str, Any]]:
        return PrioritizedReplayBuffer, self._given

    @classmethod
    def _bytes_for(cls, options: ReplayOptions) -> Callable[[int], int]:
        others = super()._bytes_for(options)
        return lambda capacity: others(capacity) + 8 * sum(level_sizes(capacity))

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

    def _num_sums(self, capacity: int) -> int:
        return sum(level_sizes(capacity))

    def _make_priorities(self, is_staged: bool) -> None:
        folder = self._storage.folder
        memory = (None, None) if folder is None else (folder.sums, folder.inserted)
        self._tree = None if is_staged else SumTree(self.capacity, *memory)
        self._sums = BlockSums(self.capacity, self.device) if is_staged else None
        self._updates = StagingBlocks(self.device, "update fewer at once")
        self.alpha, self.beta = self._alpha, self._beta  # on the device, too

    def _open_priorities(self, folder: RowFolder) -> None:
        """Go on with the priorities in a folder; rows it doesn't know of are new."""
        assert self._tree is not None
        exponents, count = folder.exponents, len(self)
        if not folder.is_new:
            values, limit = self._tree.leaves.copy(), largest_value(self.capacity)
            inserted = min(max(int(folder.inserted[0]), 0), self.num_added)
            # After a power loss maybe not; pages that were never written have zeros.
            is_good = (values <= limit) & ((values > 0) if folder.is_restarted else (values >= 0))
            largest, alpha, beta = exponents.tolist()
            if not _are_exponents(largest, alpha, beta):
                largest, alpha, beta = 1.0, self.alpha, self.beta
            values[~is_good], values[count:] = largest**alpha, 0.0
            saved = np.array([largest, alpha, beta])
            self._take_own_arrays({"exponents": saved, "priorities": values})
            folder.inserted[0] = inserted
        exponents[:] = self._largest[0], self.alpha, self.beta
        self._largest = exponents[:1]
        self._insert_new()

    def memory(self) -> dict[str, int]:
        """Bytes held now, by what they are for, host and device together; batches not included."""
        sums = self._tree if self._sums is None else self._sums
        assert sums is not None
        return {**super().memory(), "priorities": sums.nbytes}

    @property
    def priorities(self) -> torch.Tensor:
        """float64 (capacity,), priority ** alpha of every row; a copy, on the device."""
        if self._tree is not None:
            return torch.from_numpy(self._tree.leaves.copy())
        assert self._sums is not None
        return self._sums.leaves.clone()

    @property
    def num_refused(self) -> int:
        """Priorities on a device that were left out as they did not fit; waits for the device."""
        return 0 if self._sums is None else int(self._sums.num_refused)

    def add(self, *, env_ids: Any = None, **columns: Any) -> None:
        """Add K transitions with the largest priority so far; otherwise as `SharedReplayBuffer`."""
        super().add(env_ids=env_ids, **columns)
        self._insert_new()

    def _insert_new(self) -> None:
        """Give rows their first priority: all that were added since this was done the last time.

        An interrupt may have come between an `add` and this, or another thread.
        """
        if self._tree is not None:
            self._tree.insert(self._state, self._largest[0] ** self.alpha)
        else:
            self._insert_sums()

    @exclusive
    def _insert_sums(self) -> None:
        self._bring_sums_up_to_date()

    def _bring_sums_up_to_date(self) -> None:
        state, ring = self._state, self._storage.ring
        if ring is not None and ring.is_captured:  # the host does not know which rows are new
            rows, ring.added = ring.added, None
            if rows is not None and self._sums is not None:
                self._sums.insert_rows(rows, ring.count)
            return
        count, end = int(state[at.ADDED]) - self._num_inserted, int(state[state[at.POINTERS]])
        if self._sums is not None and count:
            self._sums.insert(end, count, int(state[at.COUNT]))
            self._num_inserted += count

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
        is_ahead, tree = self._guard.ahead is not None and self._guard.settle(), self._tree
        if tree is not None and not tree.total > 0 and len(self):
            self._insert_new()
            if not tree.total > 0:
                raise BufferMisuseError(
                    "all priorities are 0; give some a positive one with update_priorities"
                )
        batch = self._batch(batch_size, out, columns)
        batch.num_added, batch.drawn_from = int(self._state[at.ADDED]), self._origin
        if tree is None:
            self._draw_on_device(batch, exponent)
            return batch
        memory = batch.memory
        exponent = self._beta if exponent is None else exponent
        tree.draw(self._reader.words, memory.rows, memory.weights, exponent)
        if is_ahead or not self._reader.gather_at_once(batch):
            self._gather(batch)
        return batch

    @exclusive
    def _draw_on_device(self, batch: ReplayBatch, exponent: float | None) -> None:
        assert self._sums is not None
        self._sums.draw(self._reader.generator.torch, batch.indices, batch.weights, exponent)
        self._reader.gather(batch)

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
        self._guard.settle()
        if self._folder is not None:
            self._folder.check_writable()
        if isinstance(indices, ReplayBatch):
            indices, priorities = self._not_overwritten(indices, priorities)
        if self._sums is not None and _is_on(indices, priorities, self.device):
            self._update_sums(indices, priorities)
            return
        leaves = _read_list("indices", indices, _INT64, self.device)
        given = _read_list("priorities", priorities, _FLOAT64, self.device)
        if leaves.ndim != 1 or leaves.shape != given.shape:
            raise BufferMisuseError(
                f"indices has shape {leaves.shape} and priorities {given.shape}, expected (K,) both"
            )
        bound = self._largest_priority()
        if self._tree is None:
            self._refresh()
        rows, values = np.empty(len(leaves), np.int64), np.empty(len(leaves))
        wrong = check_update(
            leaves, given, self._state[at.COUNT], bound, self._largest, rows, values
        )
        if wrong >= 0:
            raise BufferMisuseError(
                f"indices[{wrong}] is {rows[wrong]} and priorities[{wrong}] {values[wrong]}, "
                f"expected a row from 0 to {len(self) - 1} and a priority from 0 to {bound:.4g}, "
                "so that no sum overflows"
            )
        if self._tree is not None:
            self._tree.update(rows, np.power(values, self.alpha, out=values))
        elif len(rows):
            self._send_update(rows, values)

    def _not_overwritten(self, batch: ReplayBatch, priorities: Any) -> tuple[Any, Any]:
        """The rows of a batch that still hold what was drawn, and their priorities."""
        drawn_at, state = batch.num_added, self._state
        if not self._storage.are_counts_known:
            raise BufferMisuseError(
                "an add was captured in a CUDA graph, so the host does not know which rows of the "
                "batch were overwritten since; pass batch.indices, before the next add"
            )
        if drawn_at is None:
            raise BufferMisuseError(
                "the batch was not drawn by sample of a PrioritizedReplayBuffer; pass its indices"
            )
        if batch.drawn_from != self._origin:
            raise BufferMisuseError(
                "the batch was drawn from another buffer, or before a state was loaded into this "
                "one, and its rows hold other transitions now; draw anew"
            )
        now, rows = int(state[at.ADDED]), batch.indices
        if now == drawn_at:
            return rows, priorities
        given = as_tensor("priorities", priorities)
        if given.shape != rows.shape:
            raise BufferMisuseError(
                f"priorities has shape {tuple(given.shape)}, expected {tuple(rows.shape)}"
            )
        kept = at.were_not_overwritten(rows, self.capacity, drawn_at, now)
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
            batch_size: See there, like the next five, and `columns`.
            sequence_length: L.
            burn_in: Number of steps that are not learned from.
            overlap: Number of steps shared with the next sequence.
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
        self._update_sequences(batch, errors, read_number("eta", eta))

    @exclusive
    def _update_sequences(self, batch: SequenceBatch, errors: Any, eta: float) -> None:
        memory = self._check_sequences(batch)
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

    @exclusive
    def _update_sums(self, indices: torch.Tensor, priorities: torch.Tensor) -> None:
        assert self._sums is not None
        self._sums.update(indices, priorities)

    @exclusive
    def _send_update(self, rows: np.ndarray, priorities: np.ndarray) -> None:
        assert self._sums is not None
        with self._updates.sent("an update of priorities", rows, priorities) as sent:
            self._sums.update(*sent)

    def _largest_priority(self) -> float:
        """Up to which priorities are taken: so many rows of it can be summed up."""
        alpha, bound = self._bound
        if alpha != self.alpha:
            logarithm = math.log(largest_value(self.capacity))
            is_free = logarithm >= self.alpha * _LOG_MAX
            bound = sys.float_info.max if is_free else math.exp(logarithm / self.alpha)
            self._bound = self.alpha, bound
        return bound

    def _saved_arrays(self) -> dict[str, Any]:
        # What is loaded takes all its rows for inserted, so those of an `add` half done have to be.
        if self._storage.folder is not None:  # priorities are in there
            self._insert_new()
            return super()._saved_arrays()
        if self._tree is not None:
            self._insert_new()
            largest, values = self._largest[0], self._tree.leaves
        else:
            assert self._sums is not None
            self._bring_sums_up_to_date()
            largest, values = float(self._sums.largest), self._sums.leaves.cpu().numpy()
        exponents = np.array([largest, self.alpha, self.beta])
        return {**super()._saved_arrays(), "exponents": [exponents], "priorities": [values]}

    def _check_arrays(self, state: LoadedState) -> None:
        super()._check_arrays(state)
        if self._storage.folder is not None:
            return
        num_rows, values = state.shapes["rows"][0], state.small["priorities"]
        largest, alpha, beta = state.small["exponents"].tolist()
        fits = (
            _are_exponents(largest, alpha, beta)
            and alpha * math.log(largest) <= math.log(largest_value(self.capacity)) + ROUNDING
            and values_fit(values)
            and not values[num_rows:].any()
        )
        if not fits:
            raise contradiction(
                "it has priorities or exponents that cannot be: "
                f"alpha {alpha}, beta {beta}, largest {largest}"
            )

    def _place(self, state: LoadedState) -> Placed:
        targets, take_rows = super()._place(state)

        def finish() -> None:
            take_rows()
            if self._storage.folder is not None:
                return
            self._take_own_arrays(state.small)

        return targets, finish

    def _forget(self) -> None:
        super()._forget()
        self._restore(1.0, np.zeros(self.capacity))

    def _take_copied_state(self, state: dict[str, Any]) -> None:
        super()._take_copied_state(state)
        arrays = state["arrays"]
        self._take_priorities({n: np.array(arrays[n][0]) for n in ("exponents", "priorities")})

    def _take_own_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore priorities; exponents given to the constructor win over the saved ones."""
        alpha, beta = self.alpha, self.beta
        self._take_priorities(arrays)
        if self._given["beta"] is not None:
            self.beta = beta
        if self._given["alpha"] is not None and alpha != self.alpha:
            values, held = (
                arrays["priorities"].copy(),
                slice(0, int(self._state[at.COUNT])),
            )  # later rows are empty
            powers, largest = values[held], arrays["exponents"][0]
            # With an exponent of 0 nothing is known of the priorities: all are like new.
            with np.errstate(over="ignore"):  # limited below
                given = powers ** (1 / self.alpha) if self.alpha else np.full_like(powers, largest)
            if self._sequences is not None:
                self._sequences.raise_to(self.alpha, alpha)
            self.alpha = alpha
            largest = min(largest, self._largest_priority())
            values[held] = np.minimum(given, largest) ** alpha
            self._restore(largest, values)

    def _take_priorities(self, arrays: Mapping[str, np.ndarray]) -> None:
        largest, self.alpha, self.beta = arrays["exponents"].tolist()
        self._restore(largest, arrays["priorities"])

    def _restore(self, largest: float, values: np.ndarray) -> None:
        self._largest[0], self._origin = largest, secrets.randbits(63)
        self._num_inserted = int(self._state[at.ADDED])
        if self._tree is not None:
            self._tree.restore(values)
            self._tree.inserted[0] = self._num_inserted
        elif self._sums is not None:
            count = int(self._state[at.COUNT])
            self._sums.restore(torch.from_numpy(values).to(self.device), count)
            self._sums.largest.fill_(largest)


def _are_exponents(largest: float, alpha: float, beta: float) -> bool:
    """Whether a state has a largest priority and exponents that can be; false of NaN."""
    return 1 <= largest < math.inf and 0 <= alpha < math.inf and 0 <= beta < math.inf


def _is_on(indices: Any, priorities: Any, device: torch.device) -> bool:
    """Whether both are tensors on a device that must not be waited for."""
    if device.type == "cpu":
        return False
    tensors = isinstance(indices, torch.Tensor) and isinstance(priorities, torch.Tensor)
    return tensors and indices.device == priorities.device == device


def _read_list(name: str, given: Any, dtype: np.dtype, device: torch.device) -> np.ndarray:
    array = as_array(name, given, device)
    if array.dtype == dtype and array.flags.carray:
        return array
    if array.size and array.dtype.kind not in ("iu" if dtype == _INT64 else "fiu"):
        raise BufferMisuseError(f"{name} has dtype {array.dtype}, expected {dtype}; convert it")
    return np.array(array, dtype)
