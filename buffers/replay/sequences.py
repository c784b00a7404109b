"""Sequences in a ring of transitions: which rows follow one another, and which begin a sequence.

Of each row it is kept which one follows it in its episode, its number in that, and its environment.
This is brought up to date with every add, from the links and env ids of the new rows alone; and of
each environment it is kept which number its next row has if the newest one is gone by then. Rows
that begin a sequence have a value in a tree of sums, of which rows are drawn: each new row marks
the one that has become the start of a whole sequence, and removes what it overwrites, so that no
draw searches anything. When other sequences are asked for, all rows are gone through once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.arguments import MAX_COUNT, check_count, read_columns
from buffers.core.compiling import njit
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
from buffers.replay.priorities import SumTree, level_sizes, sum_node, values_fit
from buffers.replay.table import Table

__all__ = ["SequenceDraws", "SequenceIndex", "SequenceMemory", "sequence_bytes"]

_MAX_STEPS = 2**31 - 2
_ENV_BYTES = 8 * 4  # of `Steps.per_env`


def sequence_bytes(plan: Plan) -> int:
    """Bytes a `SequenceIndex` takes."""
    rows, rings = plan.num_rows, plan.num_rings
    return 12 * rows + 8 * sum(level_sizes(rows)) + _ENV_BYTES * plan.num_envs + 16 * rings


class Steps(NamedTuple):
    """What is kept of rows and environments.

    Attributes:
        following: int32 (rows,), row + 1 of the next one in the episode, or 0.
        step_of: int32 (rows,), the number of the row in its episode.
        env_of: int32 (rows,), its environment.
        per_env: int64 (4, N): tails, row + 1 of the newest, or 0 if it is gone; candidates, row + 1
            of the oldest row of the open episode that is not the start of a sequence yet, or 0;
            reaches, rows from that to the newest, both included; numbers of the next rows if the
            episodes go on, which rows behind those that are gone get.
    """

    following: np.ndarray
    step_of: np.ndarray
    env_of: np.ndarray
    per_env: np.ndarray


class SequenceMemory(NamedTuple):
    """What the sequences of a batch were when it was drawn."""

    owner: object
    starts: np.ndarray  # int64 (B,), rows
    totals: np.ndarray  # int64 (rings,), rows ever added to each ring
    version: int


class SequenceIndex:
    """Which rows follow one another, which begin a sequence, and draws of these.

    Args:
        table: With links and env ids.

    Attributes:
        options: Which sequences there are, or None before any was asked for.
        largest: The largest priority of a sequence ever given; at least 1.
        is_updated: Whether any was given.
        version: Changes with the options, and with every state that is loaded.
    """

    def __init__(self, table: Table):
        plan = table.plan
        self._table, self._num_rows, num_rings = table, plan.num_rows, plan.num_rings
        self.tree = SumTree(self._num_rows)
        following, steps, envs = np.zeros((3, self._num_rows), np.int32)
        self._kept = Steps(following, steps, envs, np.zeros((4, plan.num_envs), np.int64))
        self._done, self._dead = self._known = np.zeros((2, num_rings), np.int64)
        self.options: SequenceOptions | None = None
        self.largest, self.is_updated, self.version = 1.0, False, 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        arrays = [*self._kept, self._known]
        arrays += [self._table.row_envs] if self._table.is_staged else []
        return self.tree.nbytes + sum(array.nbytes for array in arrays)

    def cut(self, env_ids: np.ndarray) -> None:
        """Let the next rows of env_ids int64 (K,) begin new episodes."""
        self._kept.per_env[3, env_ids] = 0

    def follow(self, value: float) -> None:
        """Take note of the rows that were added since the last call.

        Args:
            value: Of the sequences that are new, in the tree.
        """
        table, options = self._table, self.options
        begin, _ = table.live()
        wanted = (options.needed, options.needed_at_start, options.period) if options else (1, 1, 0)
        follow_rows(
            (table.links, table.row_envs, table.envs["is_open"]),
            (begin, table.committed, table.plan.span), (self._done, self._dead), self._kept,
            self.tree.arrays, wanted, float(value),
        )  # fmt: skip

    def _first_steps(self) -> np.ndarray:
        """int64 (N,), the number of the oldest row of each environment, or of its next one."""
        found, kept = self._kept.per_env[3].copy(), self._kept
        rows = self._table.oldest_first()[::-1]
        found[kept.env_of[rows]] = kept.step_of[rows]  # the oldest comes last, and stays
        return found

    def _go_through(self, first_steps: np.ndarray, value: float) -> None:
        """Take note of all rows anew, when numbers of the oldest are int64 (N,)."""
        self.tree.restore(np.zeros(self._num_rows))
        self._kept.per_env[:3] = 0
        self._kept.per_env[3] = first_steps
        self._known[:], _ = self._table.live()
        self.version += 1
        self.follow(value)

    def prepare(self, options: SequenceOptions, value: float) -> None:
        """Mark the rows that begin a sequence, if that was not done for these options.

        Args:
            options: Which sequences there are.
            value: Of each, in the tree.

        Raises:
            BufferMisuseError: Sequences of other options have priorities.
        """
        self.follow(value)
        if options == self.options:
            return
        if self.is_updated:
            assert self.options is not None
            raise BufferMisuseError(
                f"{_described(self.options)}, have priorities, got "
                f"{_described(options)}; draw the same ones, or make another buffer"
            )
        self.options = options
        self._go_through(self._first_steps(), value)

    def draw(
        self, generator: torch.Generator, batch_size: int, beta: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, SequenceMemory]:
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
                f"none of the {len(self._table)} transitions begins {_described(options)}"
                + (", or all priorities are 0" if self.is_updated else "")
                + "; add longer episodes, or ask for shorter sequences"
            )
        starts, weights = np.empty(batch_size, np.int64), np.empty(batch_size, np.float32)
        points = torch.empty(batch_size, dtype=torch.float64, device=generator.device)
        points.uniform_(generator=generator)
        self.tree.draw(points.cpu().numpy(), starts, weights, beta)
        rows = np.empty((batch_size, options.length), np.int64)
        steps = np.empty((batch_size, options.length), np.int32)
        walk(self._kept.following, self._kept.step_of, starts, rows, steps)
        memory = SequenceMemory(self, starts, self._table.committed.copy(), self.version)
        return rows, steps, weights, memory

    def are_alive(self, rows: np.ndarray, memory: SequenceMemory) -> np.ndarray:
        """Whether rows int64 (K,) of a batch still hold what they held when it was drawn."""
        begin, _ = self._table.live()
        numbers = self._table.numbers_of(rows, memory.totals)
        return numbers >= begin[rows // self._table.plan.span]

    def update(self, memory: SequenceMemory, priorities: np.ndarray, alpha: float) -> None:
        """Give sequences priorities float64 (B,); those whose first row is gone are left out."""
        is_there = self.are_alive(memory.starts, memory)
        if is_there.any():
            priorities, starts = priorities[is_there], memory.starts[is_there]
            self.largest = max(self.largest, float(priorities.max()))
            self.tree.update(starts, priorities**alpha)
        self.is_updated = True

    def state(self, *, has_priorities: bool) -> dict[str, np.ndarray]:
        """What does not follow from the rows, all of which were taken note of."""
        arrays = {"sequence_steps": self._first_steps()}
        if has_priorities:
            options = self.options or SequenceOptions(0, 0, 0, False)
            numbers = np.array([*options, self.is_updated, self.largest], np.float64)
            leaves = self.tree.leaves.copy()
            arrays |= {"sequence_options": numbers, "sequence_priorities": leaves}
        return arrays

    def check(self, state: Mapping[str, np.ndarray]) -> None:
        """Raise BufferMisuseError unless the same of a state can be restored."""
        steps = state["sequence_steps"]
        if not 0 <= steps.min() <= steps.max() <= _MAX_STEPS:
            raise contradiction("it has numbers of steps that cannot be")
        if "sequence_options" not in state:
            return
        numbers, values = state["sequence_options"], state["sequence_priorities"]
        fits = (  # false of NaN
            np.isfinite(numbers).all()
            and (numbers[:5] == numbers[:5].astype(np.int64)).all()
            and numbers[5] >= 1.0  # the largest priority
            and values_fit(values)
        )
        if fits and numbers[0]:
            length, burn_in, period, pad = map(int, numbers[:4])
            options = length, burn_in, period, pad
            fits = read_sequences(length, burn_in, length - period, pad) == options
        if not fits:
            raise contradiction("it has sequences or priorities of these that cannot be")

    def restore(self, found: Mapping[str, np.ndarray]) -> None:
        """Take over a state, when the table is that of it."""
        self.options, self.largest, self.is_updated = None, 1.0, False
        numbers = found.get("sequence_options")
        if numbers is not None and numbers[0]:
            length, burn_in, period, pad, is_updated, largest = numbers.tolist()
            self.options = SequenceOptions(int(length), int(burn_in), int(period), bool(pad))
            self.is_updated, self.largest = bool(is_updated), largest
        self._go_through(found["sequence_steps"], 1.0)
        if self.options is not None:
            is_start = self.tree.leaves > 0
            self.tree.restore(np.where(is_start, found["sequence_priorities"], 0.0))


def _described(options: SequenceOptions) -> str:
    overlap = options.length - options.period
    begins = "anywhere" if options.period == 1 else f"overlapping by {overlap}"
    return (
        f"sequences of {options.length} steps, {begins}, with burn_in={options.burn_in} and "
        f"pad={options.pad}"
    )


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

        def shaped(tensors: Any) -> Any:
            if isinstance(tensors, torch.Tensor):
                return tensors.unflatten(0, rows.shape)
            if isinstance(tensors, dict):
                return {name: shaped(tensor) for name, tensor in tensors.items()}
            return tuple(map(shaped, tensors))

        drawn_names = [n for n in SequenceBatch._fields if n in ReplayBatch._fields]
        fields = {n: shaped(getattr(drawn, n)) for n in drawn_names if not chosen or n in chosen}
        extras = shaped(drawn.extras)
        if is_short:
            zero_padding((fields, extras), mask)
        if not chosen or "boundaries" in chosen:
            none = torch.zeros((), dtype=torch.bool, device=self.device)
            fields["boundaries"] = none.expand(mask.shape)
        return SequenceBatch._made_of(
            {
                **fields,
                "steps": steps,
                "mask": mask,
                "extras": extras,
                **options.masks(mask, steps),
                "indices": indices,
                "weights": None if beta is None else torch.from_numpy(weights).to(self.device),
                "initial_states": {n: whole[n].index_select(0, starts) for n in names},
                "memory": memory,
            }
        )

    def _check_sequences(self, batch: Any) -> SequenceMemory:
        memory, index = memory_of(batch, self._sequences), self._sequences
        assert index is not None
        if memory.version != index.version:
            raise BufferMisuseError(
                "batch was drawn before a state was loaded, or sequences of other options were "
                "drawn; draw anew"
            )
        return memory

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
def set_leaf(tree, starts, leaf, value):
    """Write a value to a leaf and refresh the sums above."""
    tree[leaf] = value
    node = leaf
    for level in range(1, starts.shape[0]):
        node = node >> 4
        tree[starts[level] + node] = sum_node(tree, starts[level - 1] + 16 * node)


@njit(cache=True)
def follow_rows(rows, live, known, kept, tree, wanted, value):
    """Take note of the rows that were added since the last call, and of those that are gone.

    Args:
        rows: links int32 (rows,), row + 1 of the next one in the episode; or 0, or beyond the rows;
            environments int32 (rows,); and is_open bool (N,), the newest row of the env did not end
            its episode.
        live: The numbers that can be drawn, from .. to, int64 (R,); rows of a ring.
        known: int64 (R,) each, rows of each ring taken note of, and those of them that are gone;
            brought up to date.
        kept: `Steps`, written.
        tree: Of a `SumTree`, and the starts of its levels; written.
        wanted: Steps that have to be there from the first one on, and if that begins its episode;
            and of how many steps one begins a sequence, 0 as long as none does.
        value: Of new sequences.
    """
    links, row_envs, is_open = rows
    begin, end, span = live
    done, dead = known
    following, step_of, env_of, per_env = kept
    leaves, levels = tree
    needed, needed_at_start, period = wanted
    tails, candidates, reaches, nexts = per_env[0], per_env[1], per_env[2], per_env[3]
    num_rows = links.shape[0]
    for ring in range(done.shape[0]):
        for number in range(dead[ring], min(begin[ring], done[ring])):
            row = ring * span + number % span
            env = env_of[row]
            if leaves[row] > 0.0:
                set_leaf(leaves, levels, row, 0.0)
            if candidates[env] == row + 1:
                candidates[env] = following[row]
                reaches[env] -= 1
            if tails[env] == row + 1:
                tails[env] = 0
        dead[ring] = begin[ring]
        for number in range(max(done[ring], begin[ring]), end[ring]):
            row = ring * span + number % span
            env = np.int64(row_envs[row])
            before = tails[env] - 1
            is_joined = before >= 0 and links[before] == row + 1
            env_of[row] = env
            following[row] = 0
            tails[env] = row + 1
            if is_joined:
                following[before] = row + 1
                step_of[row] = step_of[before] + 1
            else:
                step_of[row] = nexts[env] if before < 0 else 0
            is_last = links[row] <= 0 or links[row] > num_rows
            nexts[env] = 0 if is_last and not is_open[env] else step_of[row] + 1
            if is_joined and candidates[env]:
                reaches[env] += 1
            else:
                candidates[env] = row + 1
                reaches[env] = 1
            while period and candidates[env]:
                start = candidates[env] - 1
                if reaches[env] < (needed if step_of[start] else needed_at_start):
                    break
                if step_of[start] % period == 0:
                    set_leaf(leaves, levels, start, value)
                candidates[env] = following[start]
                reaches[env] -= 1
        done[ring] = end[ring]


@njit(nogil=True, cache=True)
def walk(following, step_of, starts, rows, steps):
    """Follow sequences int64 (B,) from their first rows, all at once, so that waits overlap.

    Args:
        following, step_of: As in `Steps`.
        starts: See above.
        rows: int64 (B, L), written: -1 where the episode has no more.
        steps: int32 (B, L), written: 0 there.
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
