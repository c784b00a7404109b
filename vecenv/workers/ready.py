"""The ring in which envs' results wait for `recv`, in the order in which they became ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict

from vecenv.core.rows import ObjectRows, ObservationRows, TreeRows
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

__all__ = ["ReadyRing", "ring_size"]

VOID = -1  # in place of an env id: the row of a worker that died while it wrote


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
        self._count: Any = memoryview(link.words[ROWS * LINE + COUNT :])  # type: ignore[arg-type]
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
        """Give up all rows that are there; nobody may be writing."""
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
