"""Where results are in shared memory: rows of all envs for a step, a ring of rows for `recv`.

The caller has the rows of all envs, a worker those of its chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict

from vecenv.core.autoreset import StepRows
from vecenv.core.rows import ObjectRows, ObservationRows, TreeRows
from vecenv.core.slots import slot_rows as caller_rows
from vecenv.workers.arena import Arena
from vecenv.workers.layout import (
    CLAIMS_LINE,
    COUNT,
    HAS_MESSAGE,
    LINE,
    RING_WORDS,
    ROW_ENV,
    ROW_SEQUENCE,
    ROW_STATUS,
    ROWS,
    Leaf,
)
from vecenv.workers.links import Link
from vecenv.workers.messages import SlotLeaves

__all__ = [
    "VOID",
    "ReadyRing",
    "SlotTable",
    "make_slot",
    "object_rows",
    "reward_bits",
    "ring_size",
    "slot_rows",
    "unwritten",
]

VOID = -1  # in place of an env id: the row of a worker that died while it wrote

# Bit patterns (NaNs that no computation gives) of rewards that have not been written yet.
_UNWRITTEN = {np.dtype(np.int64): 0x7FF800005EED0001, np.dtype(np.int32): 0x7FC5EED1}


def make_slot(arena: Arena, space: Space, num_envs: int) -> tuple[StepRows, SlotLeaves]:
    """Allocate the rows of one step for all envs."""
    leaves: list[Leaf] = []

    def allocate(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        array = arena.allocate(shape, dtype)
        leaves.append(arena.leaf(array) if array.size else Leaf(0, array.shape, array.dtype.str))
        return array

    rows = StepRows.make(space, num_envs, allocate)
    return rows, SlotLeaves(tuple(leaves[:-3]), *leaves[-3:])


def slot_rows(arena: Arena, space: Space, leaves: SlotLeaves, first: int, last: int) -> StepRows:
    """Return the rows of envs first, ..., last - 1 in a slot, as rows 0, 1, ..."""
    waiting = iter(leaves.obs)

    def take(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return arena.view(next(waiting))[first:last]

    return StepRows(
        ObservationRows.make(space, last - first, take),
        arena.view(leaves.rewards)[first:last],
        arena.view(leaves.terminations)[first:last],
        arena.view(leaves.truncations)[first:last],
    )


def object_rows(rows: ObservationRows) -> Iterator[ObjectRows]:
    """Go through the leaves without fixed shape, in the order of the space."""
    if isinstance(rows, ObjectRows):
        yield rows
    elif isinstance(rows, TreeRows):
        for child in rows.children.values():
            yield from object_rows(child)


def _arrays(rows: ObservationRows) -> Iterator[np.ndarray]:
    """Go through the arrays of observations, in the order of `ObservationRows.make`."""
    if isinstance(rows, TreeRows):
        for child in rows.children.values():
            yield from _arrays(child)
    else:
        assert rows.array is not None
        yield rows.array


def reward_bits(rewards: np.ndarray) -> np.ndarray:
    """Return the rewards' memory as integers of the same size."""
    return rewards.view(np.int64 if rewards.itemsize == 8 else np.int32)


def unwritten(bits: np.ndarray) -> int:
    """Return the mark of a reward that has not been written yet, for `reward_bits`."""
    return _UNWRITTEN[bits.dtype]


class SlotTable:
    """The callers' `out` slots that have been seen, and where they are.

    A slot whose arrays all come from `allocate` gets a number, and workers write into it; the
    number and its leaves are sent to them once. Any other slot is copied into.

    Attributes:
        has_unsent: Whether there may be some that workers do not know.
    """

    def __init__(self, arena: Arena, space: Space, own: StepRows, num_envs: int) -> None:
        self._arena = arena
        self._space = space
        self._own = own
        self._num_envs = num_envs
        self._seen: dict[int, tuple[Any, int, StepRows]] = {}
        self._numbers: dict[SlotLeaves, int] = {}
        self._listed: list[tuple[int, SlotLeaves]] = []  # number 1 first
        self.has_unsent = False

    def find(self, out: Any) -> tuple[int, StepRows]:
        """Return the number of a slot (0: workers can't write there) and the caller's rows in it.

        Raises:
            SlotError: See `vecenv.core.slots.slot_rows`.
        """
        seen = self._seen.get(id(out))
        if seen is not None and seen[0] is out:
            return seen[1], seen[2]
        rows = caller_rows(out, self._own.obs, self._num_envs)
        number = self._number(rows)
        # The fields of a tuple can't be replaced, so it need not be looked at again.
        if isinstance(out, tuple):
            if len(self._seen) >= 1 << 14:
                self._seen.clear()
            self._seen[id(out)] = (out, number, rows)
        return number, rows

    def rows(self, number: int) -> StepRows:
        """Return the rows of all envs in the slot of this number."""
        if number == 0:
            return self._own
        leaves = self._listed[number - 1][1]
        return slot_rows(self._arena, self._space, leaves, 0, self._num_envs)

    def _number(self, rows: StepRows) -> int:
        offset = self._arena.offset
        arrays = [*_arrays(rows.obs), rows.rewards, rows.terminations, rows.truncations]
        if any(array.size and offset(array) is None for array in arrays):
            return 0
        leaves = [Leaf(offset(array) or 0, array.shape, array.dtype.str) for array in arrays]
        key = SlotLeaves(tuple(leaves[:-3]), *leaves[-3:])
        number = self._numbers.get(key)
        if number is None:
            self.has_unsent = True
            number = len(self._listed) + 1
            self._listed.append((number, key))
            self._numbers[key] = number  # last: if Ctrl-C comes before, it gets another
        return number

    @property
    def count(self) -> int:
        """How many slots have a number."""
        return len(self._listed)

    def all_since(self, count: int) -> list[tuple[int, SlotLeaves]]:
        """Return the slots that have got a number after the first `count` of them."""
        return self._listed[count:]


def ring_size(num_envs: int) -> int:
    """Return how many rows a ring has: a row handed out stays for three times as many results."""
    return max(16, 4 * num_envs)


class ReadyRing:
    """The caller's end of the ring.

    Attributes:
        size: How many rows it has.
        head: Position of the first row that has not been handed out.
        has_status, has_forms: Whether a row that the last `wait` found has status bits, or infos.
    """

    def __init__(self, arena: Arena, link: Link, space: Space, own: SlotLeaves) -> None:
        self._link = link
        size = link.layout.ring_rows
        self.size = size
        leaves: list[Leaf] = []

        def allocate(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            array = arena.allocate(shape, dtype)
            leaves.append(
                arena.leaf(array) if array.size else Leaf(0, array.shape, array.dtype.str)
            )
            return array

        self._arena = arena
        self._space = space
        self._obs = ObservationRows.make(space, size, allocate)
        self._rewards = allocate((size,), np.float64)
        self._terminations = allocate((size,), np.bool_)
        self._truncations = allocate((size,), np.bool_)
        pairs = zip((*own.obs, *own[1:]), leaves, strict=True)
        self._table = [(source.offset, target.offset, target.row_bytes) for source, target in pairs]
        begin = link.layout.ring
        rows = link.words[begin : begin + size * RING_WORDS].reshape(size, RING_WORDS)
        self._rows = rows
        self._ids = np.empty(size, np.int64)
        # Reading one word takes half the time of the array's.
        self._count: Any = memoryview(link.words[ROWS * LINE + COUNT :])  # type: ignore[arg-type]  # typeshed before 3.12
        self.head = 0
        self.has_status = self.has_forms = False

    def add_leaf(self, source: Leaf, array: np.ndarray) -> None:
        """Let another array (num_envs, ...) be copied into the ring with every row."""
        target = self._arena.leaf(array)
        self._table.append((source.offset, target.offset, target.row_bytes))

    def leaves(self) -> Leaf:
        """Return the table of arrays that make up a row, int64 (L, 3), for the workers."""
        table = self._arena.allocate((len(self._table), 3), np.int64)
        table[...] = self._table
        return self._arena.leaf(table)

    def wait(self, count: int) -> int:
        """Return how many rows are ready after one wait for `count` of them; note what they are."""
        wanted = self.head + count
        published = self.published()
        if published < wanted:
            self._link.wait_count(ROWS, wanted)
            published = self.published()
        ready = self._read()
        if ready < count and published >= wanted:  # a row before these is still being written
            self._link.wait_count(ROWS, published + 1)
            ready = self._read()
        return ready

    def _read(self) -> int:
        found = self._link.read_ready(self.head, self._ids)
        self.has_status, self.has_forms = bool(found & 1), bool(found & 2)
        return found >> 2

    def published(self) -> int:
        """Return how many rows have been written since the beginning."""
        return self._count[0]

    def skip(self) -> None:
        """Give up all rows that are there; no worker may be writing."""
        self.head = self.claimed()

    def claimed(self) -> int:
        """Return how many rows workers have begun to write since the beginning."""
        return int(self._link.words[CLAIMS_LINE * LINE])

    def void_unwritten(self, end: int) -> None:
        """Declare void the rows before position `end` that were claimed and not written.

        Those from there on are left alone: workers that live may be writing them.
        """
        for position in range(self.head, end):
            row = position % self.size
            if self._rows[row, ROW_SEQUENCE] != position + 1:
                self._rows[row] = position + 1, VOID, 0, 0
        self._link.words[ROWS * LINE + COUNT] = self.claimed()

    def void_unexplained(self, first: int, last: int, is_there: Callable[[int], bool]) -> None:
        """Declare void the rows of envs first, ..., last - 1 whose message will never come.

        Args:
            first: First env of a worker that is gone.
            last: The env after its last.
            is_there: Says whether the message for a position has come.
        """
        for position in range(self.head, self.claimed()):
            row = self._rows[position % self.size]
            has_message = int(row[ROW_STATUS]) & HAS_MESSAGE
            if first <= row[ROW_ENV] < last and has_message and not is_there(position):
                row[ROW_ENV:] = VOID, 0, 0

    def words(self, index: slice | np.ndarray) -> np.ndarray:
        """Return the words of some rows, int64 (count, 4)."""
        return self._rows[index]

    def ids(self, count: int) -> np.ndarray:
        """Return the env ids of the next rows; some may be void."""
        return self._rows[self.index(count)][:, ROW_ENV].copy()

    def read_ids(self, count: int) -> np.ndarray:
        """Do what `ids` does, for rows that the last `wait` has found."""
        return self._ids[:count].copy()

    def index(self, count: int) -> slice | np.ndarray:
        """Return where the next rows are: a slice, unless they wrap."""
        begin = self.head % self.size
        if begin + count <= self.size:
            return slice(begin, begin + count)
        return np.arange(begin, begin + count) % self.size

    def obs(self, index: slice | np.ndarray, objects: Callable[[int], list[Any]]) -> Any:
        """Return observations of some rows; `objects(k)` gives those of shapeless leaf k."""
        counter = iter(range(1 << 30))
        return _select(self._space, self._obs, index, lambda: objects(next(counter)))

    def flags(self, index: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rewards, terminations and truncations of some rows."""
        return self._rewards[index], self._terminations[index], self._truncations[index]


def _select(
    space: Any, rows: ObservationRows, index: slice | np.ndarray, objects: Callable[[], list[Any]]
) -> Any:
    if isinstance(rows, ObjectRows):
        return rows.batch_of(objects())
    if isinstance(rows, TreeRows):
        parts = {
            name: _select(space.spaces[name], child, index, objects)
            for name, child in rows.children.items()
        }
        return parts if isinstance(space, Dict) else tuple(parts.values())
    assert rows.array is not None
    return rows.array[index]
