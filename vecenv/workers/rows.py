"""Step results in shared memory: the rows of all envs for the caller, of its chunk for a worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import Space

from vecenv.core.autoreset import StepRows
from vecenv.core.rows import ObjectRows, ObservationRows, TreeRows
from vecenv.core.slots import slot_rows as caller_rows
from vecenv.workers.arena import Arena
from vecenv.workers.layout import Leaf
from vecenv.workers.messages import SlotLeaves

__all__ = ["SlotTable", "make_slot", "object_rows", "reward_bits", "slot_rows", "unwritten"]

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
    """The callers' `out` slots that have been seen: where they are, and who knows them.

    A slot whose arrays all come from `allocate` gets a number, and workers write into it; the
    number and its leaves are sent to them once. Any other slot is copied into.

    Attributes:
        has_unsent: Whether there may be some that workers have not been told of.
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
