"""Sequences in a ring of transitions: which rows follow one another, and which begin a sequence.

```
#  add   --> number_rows   of each new row its number in its episode, and what follows on what
#  draw  --> mark_starts   from the newest row to the oldest: how many rows follow, so whether a
#              |           sequence begins there; its value is a leaf of a tree of sums
#              v
#            tree.draw --> first rows (B,) --walk--> rows (B, L)
```

Of each environment it is kept which number its next row has, also if the newest one is gone by
then. Rows are marked when they are drawn from or get priorities, if some were added since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.arguments import MAX_COUNT, check_count, read_columns
from buffers.core.compiling import njit
from buffers.core.copies import each_tensor
from buffers.core.errors import BufferMisuseError
from buffers.core.guard import exclusive
from buffers.core.sequences import (
    SequenceBatch,
    SequenceOptions,
    memory_of,
    read_sequences,
    read_states,
    zero_padding,
)
from buffers.core.state import contradiction
from buffers.replay.batches import ReplayBatch
from buffers.replay.plan import Plan
from buffers.replay.priorities import SumTree, level_sizes, values_fit
from buffers.replay.table import Table

__all__ = ["SequenceDraws", "SequenceIndex", "SequenceMemory", "sequence_bytes"]

_MAX_STEPS = 2**31 - 2


def sequence_bytes(plan: Plan) -> int:
    """Bytes a `SequenceIndex` takes."""
    rows, rings = plan.num_rows, plan.num_rings
    return 9 * rows + 8 * sum(level_sizes(rows)) + 16 * plan.num_envs + 16 * rings


class Steps(NamedTuple):
    """What is kept of rows and environments."""

    following: np.ndarray  # int32 (rows,), row + 1 of the next one in the episode, or 0
    step_of: np.ndarray  # int32 (rows,), the number of the row in its episode
    newest: np.ndarray  # int64 (N,), number + 1, in its ring, of the newest row of the env, or 0
    next_step: np.ndarray  # int64 (N,), the number in its episode of the row that comes next


class SequenceMemory(NamedTuple):
    """What the sequences of a batch were when it was drawn."""

    owner: object
    starts: np.ndarray  # int64 (B,), rows
    totals: np.ndarray  # int64 (rings,), rows ever added to each ring


class SequenceIndex:
    """Which rows follow one another, which begin a sequence, and draws of these.

    Args:
        table: With links and env ids.

    Attributes:
        tree: Of the values of rows that begin a sequence.
        options: Which sequences there are, or None before any was asked for.
        largest: The largest priority of a sequence ever given; at least 1.
        is_updated: Whether any was given.
        key: Of batches; another one with other options, and with every state that is loaded.
    """

    def __init__(self, table: Table):
        plan = table.plan
        self._table, self._num_rows = table, plan.num_rows
        self.tree = SumTree(self._num_rows)
        following, steps = np.zeros((2, self._num_rows), np.int32)
        self._kept = Steps(following, steps, *np.zeros((2, plan.num_envs), np.int64))
        self._is_start = np.zeros(self._num_rows, np.bool_)
        # Rows of each ring that were taken note of, and those that were marked.
        self._noted, self._marked = self._seen = np.zeros((2, plan.num_rings), np.int64)
        self.options: SequenceOptions | None = None
        self.largest, self._value, self.is_updated, self.key = 1.0, 1.0, False, object()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        arrays = [*self._kept, self._is_start, self._seen]
        arrays += [self._table.row_envs] if self._table.is_staged else []
        return self.tree.nbytes + sum(array.nbytes for array in arrays)

    def cut(self, env_ids: np.ndarray) -> None:
        """Let the next rows of env_ids int64 (K,) begin new episodes."""
        self._kept.next_step[env_ids] = 0

    def follow(self, value: float) -> None:
        """Take note of rows that were added; sequences that are new get this value in the tree."""
        table, self._value = self._table, value
        begin, end = table.live()
        columns = table.links, table.row_envs, table.envs["is_open"]
        number_rows(columns, (begin, end, table.plan.span), self._noted, self._kept)

    def mark(self) -> None:
        """Mark rows that begin a sequence, if some were added; the new ones get their value.

        An interrupt may have come between an add and `follow`.
        """
        self._table.recover()
        self.follow(self._value)
        begin, end = self._table.live()
        if self.options is None or (end == self._marked).all():
            return
        is_start, leaves = written = self._is_start.copy(), self.tree.leaves.copy()
        wanted = self.options.needed, self.options.needed_at_start, self.options.period
        live, runs = (begin, end, self._table.plan.span), np.empty(self._num_rows, np.int32)
        mark_starts(self._kept[:2], live, self._marked, wanted, runs, written, float(self._value))
        self.tree.update(np.arange(self._num_rows), leaves)
        self._is_start, self._marked[:] = is_start, end

    def _go_through(self, first_steps: np.ndarray, value: float) -> None:
        """Take note of all rows anew, when numbers of the oldest are int64 (N,)."""
        self._kept.newest[:], self._kept.next_step[:] = 0, first_steps
        self._seen[:], self.key = 0, object()
        self.follow(value)
        self.mark()

    def prepare(self, options: SequenceOptions, value: float) -> None:
        """Mark the rows that begin a sequence; the new ones get this value in the tree.

        Raises:
            BufferMisuseError: Sequences of other options have priorities.
        """
        if options != self.options:
            if self.is_updated:
                raise BufferMisuseError(
                    f"{self.options}, have priorities, got {options}; draw the same ones, or make "
                    "another buffer"
                )
            self.options, self.key, self._marked[:] = options, object(), 0
        self._value = value
        self.mark()

    def draw(
        self, generator: torch.Generator, batch_size: int, beta: float
    ) -> tuple[np.ndarray, np.ndarray, torch.Tensor, SequenceMemory]:
        """Draw sequences in proportion to their values; `prepare` was called.

        Returns:
            Rows int64 (B, L), -1 where the steps have run out; their numbers in their episodes
            int32 (B, L), 0 there; weights float32 (B,); what the sequences are known by.

        Raises:
            BufferMisuseError: There is none.
        """
        options = self.options
        assert options is not None
        if not self.tree.total > 0:
            raise BufferMisuseError(
                f"none of the {len(self._table)} transitions begins {options}"
                + (", or all priorities are 0" if self.is_updated else "")
                + "; add longer episodes, or ask for shorter sequences"
            )
        starts = torch.empty(batch_size, dtype=torch.int64, device="cpu")
        weights = torch.empty(batch_size, dtype=torch.float32, device="cpu")
        self.tree.draw(generator, starts, weights, beta)
        starts = starts.numpy()
        rows = np.empty((batch_size, options.length), np.int64)
        steps = np.empty((batch_size, options.length), np.int32)
        walk(self._kept.following, self._kept.step_of, starts, rows, steps)
        return rows, steps, weights, SequenceMemory(self.key, starts, self._table.committed.copy())

    def are_alive(self, rows: np.ndarray, memory: SequenceMemory) -> np.ndarray:
        """Whether rows int64 (K,) of a batch still hold what they held when it was drawn."""
        begin, _ = self._table.live()
        numbers = self._table.numbers_of(rows, memory.totals)
        return numbers >= begin[rows // self._table.plan.span]

    def update(self, memory: SequenceMemory, priorities: np.ndarray, alpha: float) -> None:
        """Give sequences priorities float64 (B,); those whose first row is gone are left out."""
        self.mark()
        is_there = self.are_alive(memory.starts, memory)
        priorities, starts = priorities[is_there], memory.starts[is_there]
        self.largest = float(priorities.max(initial=self.largest))
        self.tree.update(starts, priorities**alpha)
        self.is_updated = True

    def state(self, *, has_priorities: bool) -> dict[str, np.ndarray]:
        """What does not follow from the rows, all of which were taken note of."""
        self.mark()
        # Of each environment the number of its oldest row, or of its next one.
        steps, rows = self._kept.next_step.copy(), self._table.oldest_first()[::-1]
        steps[self._table.row_envs[rows]] = self._kept.step_of[rows]  # the last of equal ones stays
        arrays = {"sequence_steps": steps}
        if has_priorities:
            options = self.options or SequenceOptions(0, 0, 0, False)
            numbers = np.array([*options, self.is_updated, self.largest], np.float64)
            leaves = self.tree.leaves.copy()
            arrays |= {"sequence_options": numbers, "sequence_priorities": leaves}
        return arrays

    def check(self, state: Mapping[str, np.ndarray]) -> None:
        """Raise BufferMisuseError unless the same of a state can be restored."""
        steps = state["sequence_steps"]
        fits = bool(0 <= steps.min() <= steps.max() <= _MAX_STEPS)
        if "sequence_options" in state:
            numbers, values = state["sequence_options"], state["sequence_priorities"]
            fits &= bool(np.isfinite(numbers).all()) and numbers[5] >= 1.0 and values_fit(values)
            fits &= bool((abs(numbers[:5]) <= MAX_COUNT).all())
            if fits and numbers[0]:
                length, burn_in, period, pad = map(int, numbers[:4])
                options = SequenceOptions(length, burn_in, period, bool(pad))
                fits = read_sequences(length, burn_in, length - period, pad) == options
        if not fits:
            raise contradiction("it has numbers of steps, sequences or priorities that cannot be")

    def restore(self, found: Mapping[str, np.ndarray]) -> None:
        """Take over a state, when the table is that of it."""
        self.options, self.largest, self.is_updated = None, 1.0, False
        numbers = found.get("sequence_options")
        if numbers is not None and numbers[0]:
            length, burn_in, period, pad, is_updated, largest = numbers.tolist()
            self.options = SequenceOptions(int(length), int(burn_in), int(period), bool(pad))
            self.is_updated, self.largest = bool(is_updated), largest
        self.tree.restore(np.zeros(self._num_rows))
        self._go_through(found["sequence_steps"], 1.0)
        if self.options is not None:
            self.tree.restore(np.where(self._is_start, found["sequence_priorities"], 0.0))


class SequenceDraws:
    """Gives a replay buffer `sample_sequences`, by an index of what follows on what."""

    _guard: Any
    _table: Any
    _reader: Any
    _random: Any
    _sequences: SequenceIndex | None
    device: torch.device

    def rows(self) -> dict[str, Any]:
        """Views of all rows by column."""
        raise NotImplementedError

    def _require_sequences(self) -> SequenceIndex:
        if self._sequences is None:
            raise BufferMisuseError(
                "sample_sequences needs track_episodes=True in the constructor, which keeps what "
                "follows on what"
            )
        return self._sequences

    @exclusive
    def _sample_sequences(
        self,
        batch_size: int,
        options: SequenceOptions,
        initial_states: Sequence[str] | str,
        columns: Iterable[str] | None,
        beta: float | None = None,
    ) -> SequenceBatch:
        index, layout = self._require_sequences(), self._table.plan.layout
        batch_size = check_count("batch_size", batch_size, MAX_COUNT)
        check_count("batch_size * sequence_length", batch_size * options.length, MAX_COUNT)
        names = read_states(initial_states, layout.extras)
        chosen = read_columns(columns, (*SequenceBatch._fields, *layout.extras))
        index.prepare(options, self._new_sequence_value())
        rows, steps, weights, memory = index.draw(self._random.torch, batch_size, beta or 0.0)
        indices, steps = torch.from_numpy(rows), torch.from_numpy(steps)
        mask = indices >= 0
        wanted = {*ReplayBatch._fields, "env_ids", *layout.extras} if chosen is None else chosen
        drawn = self._reader.new(
            rows.size, frozenset(wanted - {*names}).intersection(self._reader.column_names)
        )
        # What has run out is read from the first row, and set to zero below.
        drawn.indices.copy_(torch.where(mask, indices, indices[:, :1]).view(-1))
        self._reader.fill(drawn)
        is_short, whole = not bool(mask.all()), self.rows() if names else {}
        indices, steps, mask, starts = (
            tensor.to(self.device) for tensor in (indices, steps, mask, indices[:, 0])
        )
        fields: dict[str, Any] = {
            name: getattr(drawn, name)
            for name in SequenceBatch._fields
            if name in ReplayBatch._fields and (not chosen or name in chosen)
        }
        fields = each_tensor(
            {**fields, "extras": drawn.extras}, lambda tensor: tensor.unflatten(0, rows.shape)
        )
        if is_short:
            zero_padding(fields, mask)
        if not chosen or "boundaries" in chosen:
            none = torch.zeros((), dtype=torch.bool, device=self.device)
            fields["boundaries"] = none.expand(mask.shape)
        return SequenceBatch._made_of({
            **fields, "steps": steps, "mask": mask, **options.masks(mask, steps),
            "indices": indices, "memory": memory,
            "weights": None if beta is None else weights.to(self.device),
            "initial_states": {n: whole[n].index_select(0, starts) for n in names},
        })  # fmt: skip

    def _check_sequences(self, batch: Any) -> SequenceMemory:
        return memory_of(batch, self._sequences and self._sequences.key)

    def _alive_steps(self, batch: SequenceBatch, memory: SequenceMemory) -> torch.Tensor:
        assert self._sequences is not None
        rows = batch.indices.reshape(-1).cpu().numpy()
        steps = np.flatnonzero(rows >= 0)
        steps = steps[self._sequences.are_alive(rows[steps], memory)]
        return torch.from_numpy(steps).to(self.device)

    def _new_sequence_value(self) -> float:
        """What sequences get that nobody has given a priority yet."""
        return 1.0


@njit(nogil=True, cache=True)
def number_rows(table, live, noted, kept):
    """Take note of the rows that were added since the last call.

    Args:
        table: links int32 (rows,), row + 1 of the next one in the episode; or 0, or beyond the
            rows; environments int32 (rows,); and is_open bool (N,), the newest row of the env did
            not end its episode.
        live: The numbers that can be drawn, from .. to, int64 (R,); rows of a ring.
        noted: int64 (R,), rows of each ring taken note of; brought up to date.
        kept: `Steps`, written.
    """
    (links, row_envs, is_open), (begin, end, span) = table, live
    following, step_of, newest, next_step = kept
    for ring in range(noted.shape[0]):
        for number in range(max(noted[ring], begin[ring]), end[ring]):
            row, env = ring * span + number % span, np.int64(row_envs[ring * span + number % span])
            before = newest[env] - 1
            last, is_gone = ring * span + before % span, before < begin[ring]
            is_joined = not is_gone and links[last] == row + 1
            if is_joined:
                following[last] = row + 1
            step = next_step[env] if is_joined or is_gone else 0
            following[row], step_of[row], newest[env] = 0, step, number + 1
            goes_on = 0 < links[row] <= links.shape[0] or is_open[env]
            next_step[env] = step + 1 if goes_on else 0
        noted[ring] = end[ring]


@njit(nogil=True, cache=True)
def mark_starts(kept, live, marked, wanted, runs, written, value):
    """Mark the rows that begin a sequence.

    Args:
        kept: The first two of `Steps`.
        live: As of `number_rows`.
        marked: int64 (R,), rows of each ring there were when they were marked the last time.
        wanted: Steps that have to be there from the first one on, and if that begins its episode;
            and of how many steps one begins a sequence.
        runs: int32 (rows,), overwritten.
        written: is_start bool (rows,), and their values float64 (rows,), 0 of others.
        value: Of those that are new.
    """
    (following, step_of), (begin, end, span), (is_start, values) = kept, live, written
    needed, needed_at_start, period = wanted
    for ring in range(marked.shape[0]):
        for number in range(end[ring] - 1, end[ring] - span - 1, -1):
            row = ring * span + number % span
            was_start = is_start[row] and begin[ring] <= number < marked[ring]
            is_start[row] = False
            if number >= begin[ring]:
                runs[row] = 1 if following[row] == 0 else runs[following[row] - 1] + 1
                least = needed if step_of[row] else needed_at_start
                is_start[row] = runs[row] >= least and step_of[row] % period == 0
            if not is_start[row]:
                values[row] = 0.0
            elif not was_start:
                values[row] = value


@njit(nogil=True, cache=True)
def walk(following, step_of, starts, rows, steps):
    """Follow sequences from first rows int64 (B,), all at once, so that waits overlap.

    Written are rows int64 (B, L), -1 where the episode has no more, and steps int32 (B, L), 0
    there; `following` and `step_of` are those of `Steps`.
    """
    for b in range(starts.shape[0]):
        rows[b, 0] = starts[b]
        steps[b, 0] = step_of[starts[b]]
    for k in range(1, rows.shape[1]):
        for b in range(starts.shape[0]):
            row = rows[b, k - 1]
            row = np.int64(following[row]) - 1 if row >= 0 else -1
            rows[b, k] = row
            steps[b, k] = step_of[row] if row >= 0 else 0
