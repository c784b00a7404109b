"""Numeric info fields in shared memory.

A field of the batched infos that is an array of numbers gets a column when it is first seen: an
array with a row per env and a mask. From then on workers write it there and say so with one bit.
Whatever is not such a field travels in a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vecenv.shm.arena import Arena
from vecenv.shm.layout import MAX_COLUMNS, Leaf, column_bits
from vecenv.shm.messages import Column

__all__ = ["ColumnReader", "ColumnWriter", "merge_infos"]

_NUMERIC = "biufc"
Path = tuple[str, ...]


def _fields(infos: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, dict[str, Any], str]]:
    """Go through the fields of batched infos that could have a column."""
    for key, value in infos.items():
        if isinstance(value, dict):
            yield from _fields(value, (*path, key))
        elif f"_{key}" in infos and value.dtype.kind in _NUMERIC:
            yield (*path, key), infos, key


class ColumnWriter:
    """A worker's end."""

    def __init__(self, view: Callable[[Leaf], np.ndarray], first: int, last: int) -> None:
        self._view = view
        self._first, self._last = first, last
        self._columns: dict[Path, tuple[int, np.ndarray, np.ndarray]] = {}

    def add(self, columns: list[Column]) -> None:
        """Learn of new columns."""
        rows = slice(self._first, self._last)
        for column in columns:
            arrays = self._view(column.values)[rows], self._view(column.mask)[rows]
            self._columns[column.path] = (len(self._columns), *arrays)

    def write(self, infos: dict[str, Any], index: int | None = None) -> tuple[int, dict[str, Any]]:
        """Write the fields that have a column, of all envs of the chunk or of one.

        Returns:
            The bits of the columns written, and what is left of the infos, which is changed.
        """
        bits = 0
        for path, holder, key in list(_fields(infos)):
            column = self._columns.get(path)
            if column is None:
                continue
            number, values, mask = column
            array = holder[key]
            if array.dtype != values.dtype or array.shape != values.shape:
                continue
            if index is None:
                values[...] = array
                mask[...] = holder[f"_{key}"]
            else:
                values[index] = array[index]
            bits |= 1 << number
            del holder[key], holder[f"_{key}"]
        return bits, _without_empty(infos) if bits else infos


def _without_empty(infos: dict[str, Any]) -> dict[str, Any]:
    """Drop the nested dicts (and their masks) of which every field has gone to a column."""
    for key, value in list(infos.items()):
        if isinstance(value, dict) and not _without_empty(value):
            del infos[key]
            infos.pop(f"_{key}", None)
    return infos


class ColumnReader:
    """The caller's end: makes columns, and puts the batched infos together.

    Attributes:
        columns: All of them; column k has bit k.
        unsent: Those that the workers have not been told of.
    """

    def __init__(self, arena: Arena, num_envs: int, ring_rows: int) -> None:
        self._arena = arena
        self._num_envs = num_envs
        self._ring_rows = ring_rows
        self.columns: list[Column] = []
        self.unsent: list[Column] = []
        self._arrays: list[tuple[Path, np.ndarray, np.ndarray]] = []
        self.ring_arrays: list[np.ndarray] = []

    def learn(self, infos: dict[str, Any]) -> None:
        """Make columns for the fields of infos that came by message and could have one."""
        for path, holder, key in _fields(infos):
            if len(self.columns) >= MAX_COLUMNS or any(c.path == path for c in self.columns):
                continue
            array = holder[key]
            shape = array.shape[1:]
            values = self._arena.allocate((self._num_envs, *shape), array.dtype)
            mask = self._arena.allocate((self._num_envs,), np.bool_)
            if values.size == 0:
                continue
            column = Column(path, self._arena.leaf(values), self._arena.leaf(mask))
            self.columns.append(column)
            self.unsent.append(column)
            self._arrays.append((path, values, mask))
            self.ring_arrays.append(self._arena.allocate((self._ring_rows, *shape), array.dtype))

    def collect(self, bits_of: list[tuple[int, int, int]], infos: dict[str, Any]) -> None:
        """Add the columns to the batched infos of all envs.

        Args:
            bits_of: (bits, first env, last env) per chunk.
            infos: Changed in place.
        """
        found = 0
        for bits, _, _ in bits_of:
            found |= bits
        for number in column_bits(found):
            path, values, mask = self._arrays[number]
            chunks = [(a, b) for bits, a, b in bits_of if bits >> number & 1]
            if len(chunks) == len(bits_of):
                _enter(infos, path, values.copy(), mask.copy())
                continue
            some_values, some_mask = np.zeros_like(values), np.zeros_like(mask)
            for first, last in chunks:
                some_values[first:last] = values[first:last]
                some_mask[first:last] = mask[first:last]
            _enter(infos, path, some_values, some_mask)

    def collect_ring(self, bits: np.ndarray, index: Any, infos: dict[str, Any]) -> None:
        """Add the columns to the infos of the ring rows `index`, with bits int64 (B,)."""
        found = int(np.bitwise_or.reduce(bits))
        for number in column_bits(found):
            mask = (bits >> number & 1).astype(np.bool_)
            values = self.ring_arrays[number][index].copy()
            values[~mask] = 0
            _enter(infos, self._arrays[number][0], values, mask)


def _enter(infos: dict[str, Any], path: Path, values: np.ndarray, mask: np.ndarray) -> None:
    """Enter a field; every dict on the way to it has the mask of the envs in it."""
    for key in path[:-1]:
        outer = infos
        infos = infos.setdefault(key, {})
        present = outer.get(f"_{key}")
        outer[f"_{key}"] = mask.copy() if present is None else present | mask
    key = path[-1]
    if key in infos:  # some envs' values came by message, because their dtype differs
        infos[key][mask] = values[mask]
        infos[f"_{key}"] |= mask
    else:
        infos[key], infos[f"_{key}"] = values, mask


def merge_infos(infos: dict[str, Any], part: dict[str, Any], first: int, num_rows: int) -> None:
    """Enter batched infos of some rows into those of all, in place.

    Args:
        infos: Batched infos with num_rows rows.
        part: Batched infos of the rows first, first + 1, ...; only read.
        first: Its first row.
        num_rows: Rows of `infos`.
    """
    for key, value in part.items():
        if isinstance(value, dict):
            merge_infos(infos.setdefault(key, {}), value, first, num_rows)
            continue
        array = infos.get(key)
        if array is None:
            fill = None if value.dtype == object else 0
            array = infos[key] = np.full((num_rows, *value.shape[1:]), fill, dtype=value.dtype)
        array[first : first + len(value)] = value
