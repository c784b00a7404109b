"""Sequences in rings of transitions: which rows follow one another, and which begin a sequence.

```
#  add   --> number_rows   steps[row]: the step of each new row in its episode
#  draw  --> mark_starts   newest row to oldest: runs[row], the rows of its episode from it on; if
#              |           they suffice, a sequence begins there: its value is a leaf of a sum tree
#              v
#            tree.draw --> first rows (B,) --walk over links--> rows (B, L)
```

For each environment the step of its next row is kept, also when its newest row is overwritten.
After an `add`, rows are marked before the next draw or update of priorities.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.arguments import MAX_COUNT, check_count, read_columns
from buffers.core.batches import (
    SequenceBatch,
    SequenceOptions,
    each_tensor,
    read_sequences,
    read_states,
    zero_padding,
)
from buffers.core.errors import BufferMisuseError
from buffers.core.kernels import njit
from buffers.core.rows import view_fields
from buffers.core.state import contradiction
from buffers.replay.batches import Reader, ReplayBatch
from buffers.replay.plan import Plan
from buffers.replay.priorities import SumTree, level_sizes, values_fit
from buffers.replay.table import Table

__all__ = ["SequenceIndex", "SequenceMemory", "sequence_bytes"]

_MAX_STEPS = 2**31 - 2


def sequence_bytes(plan: Plan) -> int:
    """Bytes a `SequenceIndex` takes."""
    rows, rings = plan.num_rows, plan.num_rings
    return 5 * rows + 8 * sum(level_sizes(rows)) + 16 * plan.num_envs + 16 * rings


class SequenceMemory(NamedTuple):
    """State of the rings when a batch was drawn."""

    owner: object
    totals: np.ndarray  # int64 (rings,), rows ever added to each ring


class SequenceIndex:
    """The rows that begin a sequence, and draws of them.

    Args:
        table: With links and env ids.
        reader: Reads batches.
        generator: Generator of the draws.
        alpha: Exponent of priorities; 0 without priorities.

    Attributes:
        tree: Sum tree of the values of rows that begin a sequence.
        options: The options of the marked sequences; None before the first draw.
        largest: Largest priority ever given to a sequence, at least 1.
        is_updated: Whether a priority was given.
        key: Owner of batches; replaced by new options and by loaded states.
    """

    def __init__(self, table: Table, reader: Reader, generator: torch.Generator, alpha: float):
        plan = table.plan
        self._table, self._reader, self._alpha = table, reader, alpha
        self._random, self._num_rows = generator, plan.num_rows
        self.tree = SumTree(self._num_rows)
        self._steps = np.zeros(self._num_rows, np.int32)  # of each row, in its episode
        # Per env: 1 + the number, in its ring, of the newest row, or 0; the step of the next row.
        self._newest, self._next_step = np.zeros((2, plan.num_envs), np.int64)
        self._is_start = np.zeros(self._num_rows, np.bool_)
        # Per ring: rows that `number_rows` and `mark_starts` have seen.
        self._noted, self._marked = self._seen = np.zeros((2, plan.num_rings), np.int64)
        self.options: SequenceOptions | None = None
        self.largest, self.is_updated, self.key = 1.0, False, object()

    def cut(self, env_ids: np.ndarray) -> None:
        """Begin new episodes with the next rows of env_ids int64 (K,)."""
        self._table.recover()
        self.follow()  # rows of an interrupted add belong to the episodes before
        self._next_step[env_ids] = 0

    def follow(self, begun: np.ndarray | None = None) -> None:
        """Number the rows added since the last call; in envs `begun` they begin new episodes."""
        table = self._table
        if begun is not None:
            self._next_step[begun] = 0
        columns = table.links, table.row_envs, table.envs["is_open"]
        kept = self._steps, self._newest, self._next_step
        number_rows(columns, (*table.live(), table.plan.span), self._noted, kept)

    def mark(self) -> None:
        """Mark rows that begin a sequence, if rows were added; new starts get the largest priority.

        Calls `follow` too: an interrupt may have come between an add and `follow`.
        """
        table, options = self._table, self.options
        table.recover()
        self.follow()
        begin, end = table.live()
        if options is None or (end == self._marked).all():
            return
        wanted = options.needed, options.needed_at_start, options.period
        leaves, rows = self.tree.leaves.copy(), np.arange(self._num_rows)
        written = np.empty(self._num_rows, np.int32), self._is_start, leaves
        live, value = (begin, end, table.plan.span), float(self.largest**self._alpha)
        mark_starts(table.links, self._steps, live, self._marked, wanted, written, value)
        self.tree.update(rows, leaves)
        self._marked[:] = end

    def _prepare(self, options: SequenceOptions) -> None:
        """Mark the rows that begin a sequence; raise BufferMisuseError if there is none."""
        if options != self.options:
            if self.is_updated:
                raise BufferMisuseError(
                    f"{self.options}, have priorities, got {options}; draw the same ones, or make "
                    "another buffer"
                )
            self.options, self.key, self._marked[:] = options, object(), 0
        self.mark()
        if not self.tree.total > 0:
            raise BufferMisuseError(
                f"none of the {len(self._table)} transitions begins {options}"
                + (", or all priorities are 0" if self.is_updated else "")
                + "; add longer episodes, or ask for shorter sequences"
            )

    def sample(
        self,
        batch_size: int,
        options: SequenceOptions,
        initial_states: Sequence[str] | str,
        columns: Iterable[str] | None,
        beta: float | None,
    ) -> SequenceBatch:
        """Draw sequences in proportion to priority ** alpha, with weights if beta is given."""
        table, layout, length = self._table, self._table.plan.layout, options.length
        batch_size = check_count("batch_size", batch_size, MAX_COUNT)
        check_count("batch_size * sequence_length", batch_size * length, MAX_COUNT)
        names = read_states(initial_states, layout.extras)
        chosen = read_columns(columns, (*SequenceBatch._fields, *layout.extras))
        self._prepare(options)
        starts = torch.empty(batch_size, dtype=torch.int64, device="cpu")
        weights = torch.empty(batch_size, dtype=torch.float32, device="cpu")
        self.tree.draw(self._random, starts, weights, beta or 0.0)
        rows = np.empty((batch_size, length), np.int64)
        walk(table.links, starts.numpy(), rows)
        indices, mask = torch.from_numpy(rows), torch.from_numpy(rows >= 0)
        steps = torch.from_numpy(self._steps[rows] * (rows >= 0))
        wanted = {*ReplayBatch._fields, "env_ids", *layout.extras} if chosen is None else chosen
        drawn = self._reader.new(
            rows.size, frozenset(wanted - {*names}).intersection(self._reader.column_names)
        )
        # Missing steps read the first row, and are set to zero below.
        drawn.indices.copy_(torch.where(mask, indices, indices[:, :1]).view(-1))
        self._reader.fill(drawn)
        is_short, device = not bool(mask.all()), table.device
        memory = SequenceMemory(self.key, table.committed.copy())
        indices, steps, mask, starts = (t.to(device) for t in (indices, steps, mask, starts))
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
            fields["boundaries"] = torch.zeros_like(mask)
        whole = view_fields(table.rows, layout.fields)
        return SequenceBatch._made_of({
            **fields, "steps": steps, "mask": mask, **options.masks(mask, steps),
            "indices": indices, "memory": memory,
            "weights": None if beta is None else weights.to(device),
            "initial_states": {n: whole[n].index_select(0, starts) for n in names},
        })  # fmt: skip

    def are_alive(self, rows: np.ndarray, memory: SequenceMemory) -> np.ndarray:
        """Whether rows int64 (K,) of a batch still hold what they held when it was drawn."""
        begin, _ = self._table.live()
        numbers = self._table.numbers_of(rows, memory.totals)
        return numbers >= begin[rows // self._table.plan.span]

    def alive_steps(self, batch: SequenceBatch, memory: SequenceMemory) -> torch.Tensor:
        """Steps 0 .. B * L - 1 of a batch whose rows still hold them, int64 (K,) on the device."""
        rows = batch.indices.reshape(-1).cpu().numpy()
        steps = np.flatnonzero(rows >= 0)
        steps = steps[self.are_alive(rows[steps], memory)]
        return torch.from_numpy(steps).to(self._table.device)

    def update(self, batch: SequenceBatch, priorities: np.ndarray) -> None:
        """Give sequences priorities float64 (B,); ignore those whose first row is overwritten."""
        self.mark()
        starts = batch.indices[:, 0].cpu().numpy()
        is_there = self.are_alive(starts, batch.memory)
        priorities, starts = priorities[is_there], starts[is_there]
        self.largest = float(priorities.max(initial=self.largest))
        self.tree.update(starts, priorities**self._alpha)
        self.is_updated = True

    def state(self) -> dict[str, np.ndarray]:
        """Arrays that can't be computed from the rows."""
        self.mark()
        # Per env: the step of its oldest row, or of its next row if it has none.
        first_steps, rows = self._next_step.copy(), self._table.oldest_first()[::-1]
        first_steps[self._table.row_envs[rows]] = self._steps[rows]  # the oldest is written last
        options = self.options or SequenceOptions(0, 0, 0, False)
        numbers = np.array([*options, self.is_updated, self.largest], np.float64)
        return {
            "sequence_steps": first_steps, "sequence_options": numbers,
            "sequence_priorities": self.tree.leaves.copy(),
        }  # fmt: skip

    def check(self, state: Mapping[str, np.ndarray]) -> None:
        """Raise BufferMisuseError unless the arrays of a saved state can be restored."""
        steps, numbers = state["sequence_steps"], state["sequence_options"]
        fits = bool(0 <= steps.min() <= steps.max() <= _MAX_STEPS) and numbers[5] >= 1.0
        fits &= bool((abs(numbers[:5]) <= MAX_COUNT).all() and np.isfinite(numbers).all())
        if fits and numbers[0]:
            length, burn_in, period, pad = (int(number) for number in numbers[:4])
            options = SequenceOptions(length, burn_in, period, bool(pad))
            fits = read_sequences(length, burn_in, length - period, pad) == options
        if not fits or not values_fit(state["sequence_priorities"]):
            raise contradiction("it has numbers of steps, sequences or priorities that cannot be")

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over a checked state, after the table was restored."""
        length, burn_in, period, pad, is_updated, self.largest = state["sequence_options"].tolist()
        self.is_updated, self.key = bool(is_updated), object()
        self.options = None
        if length:
            self.options = SequenceOptions(int(length), int(burn_in), int(period), bool(pad))
        self._newest[:], self._next_step[:], self._seen[:] = 0, state["sequence_steps"], 0
        self._is_start[:] = False
        self.mark()
        self.tree.restore(np.where(self._is_start, state["sequence_priorities"], 0.0))


@njit(nogil=True, cache=True)
def number_rows(table, live, noted, kept):
    """Number the rows that were added since the last call.

    Args:
        table: links int32 (rows,), 1 + the next row of the episode, or 0, or above the number of
            rows; environments int32 (rows,); is_open bool (N,), whether the episode of the env's
            newest row goes on.
        live: First and end number that can be drawn, int64 (R,) each; rows of a ring.
        noted: int64 (R,), rows of each ring numbered so far; updated.
        kept: steps int32 (rows,); newest and next_step int64 (N,), see `SequenceIndex`; written.
    """
    (links, row_envs, is_open), (begin, end, span) = table, live
    steps, newest, next_step = kept
    for ring in range(noted.shape[0]):
        for number in range(max(noted[ring], begin[ring]), end[ring]):
            row, env = ring * span + number % span, np.int64(row_envs[ring * span + number % span])
            before = newest[env] - 1
            is_gone = before < begin[ring]
            goes_on = is_gone or links[ring * span + before % span] == row + 1
            steps[row], newest[env] = next_step[env] if goes_on else 0, number + 1
            is_followed = 0 < links[row] <= links.shape[0] or is_open[env]
            next_step[env] = steps[row] + 1 if is_followed else 0
        noted[ring] = end[ring]


@njit(nogil=True, cache=True)
def mark_starts(links, steps, live, marked, wanted, written, value):
    """Mark the rows that begin a sequence.

    Args:
        links, steps, live: As in `number_rows`.
        marked: int64 (R,), rows of each ring at the last call.
        wanted: needed, needed_at_start and period of `SequenceOptions`.
        written: runs int32 (rows,), is_start bool (rows,), values float64 (rows,), 0 if no start.
        value: Value of new starts.
    """
    (begin, end, span), (runs, is_start, values) = live, written
    needed, needed_at_start, period = wanted
    for ring in range(marked.shape[0]):
        for number in range(end[ring] - 1, end[ring] - span - 1, -1):
            row = ring * span + number % span
            was_start = is_start[row] and begin[ring] <= number < marked[ring]
            is_start[row] = False
            if number >= begin[ring]:
                link = links[row]
                runs[row] = 1 + runs[link - 1] if 0 < link <= links.shape[0] else 1
                least = needed if steps[row] else needed_at_start
                is_start[row] = runs[row] >= least and steps[row] % period == 0
            if not is_start[row]:
                values[row] = 0.0
            elif not was_start:
                values[row] = value


@njit(nogil=True, cache=True)
def walk(links, starts, rows):
    """Write rows int64 (B, L) along links from first rows int64 (B,); -1 behind the end."""
    for k in range(rows.shape[1]):
        for b in range(starts.shape[0]):
            row = np.int64(links[rows[b, k - 1]]) - 1 if k and rows[b, k - 1] >= 0 else -1
            rows[b, k] = (row if row < links.shape[0] else -1) if k else starts[b]
