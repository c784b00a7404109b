"""Numbers in the infos of steps travel in shared memory: most envs return the same keys each time.

The caller sees which these are in the first infos of a step, which come pickled as all others do,
and tells the workers. From then on an info of just these keys and types is written to the row of
its env, and a flag says so; whatever else comes is pickled as before. A simulator that returns four
numbers per step costs a fifth more without this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["ROW_BYTES", "InfoKey", "InfoTable", "common_keys"]

ROW_BYTES = 1024  # of one env


class InfoKey(NamedTuple):
    """What infos have under a key: its class, for numbers that of Python or NumPy."""

    key: str
    kind: type
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes in a row."""
        return -(-math.prod(self.shape) * np.dtype(self.dtype).itemsize // 8) * 8


def common_keys(infos: Sequence[Any]) -> list[InfoKey]:
    """Return the keys that all of these infos have, in order; none if they differ or don't fit."""
    found = _keys_of(infos[0])
    is_common = all(_keys_of(info) == found for info in infos[1:])
    return found if is_common and sum(key.size_bytes for key in found) <= ROW_BYTES else []


def _keys_of(info: Any) -> list[InfoKey]:
    """Return what an info has; none if something is no number or array of numbers."""
    found: list[InfoKey] = []
    for key, value in info.items() if info.__class__ is dict else ():
        kind = value.__class__
        if kind not in (int, float, bool, np.ndarray) and not issubclass(kind, np.number):
            return []
        dtype, shape = (value.dtype, value.shape) if kind is np.ndarray else (np.dtype(kind), ())
        is_name = key.__class__ is str and key != "final_obs" and f"_{key}" not in info
        if not is_name or dtype.kind not in "biufc":
            return []
        found.append(InfoKey(key, kind, dtype.str, shape))
    return found


class InfoTable:
    """The infos' numbers of some envs, a row each.

    Args:
        keys: What an info has, see `common_keys`.
        memory: uint8 (envs, ROW_BYTES), shared.
        flags: bool (envs,), shared: whether a row has the info of the env's latest step.
    """

    def __init__(self, keys: Sequence[InfoKey], memory: np.ndarray, flags: np.ndarray) -> None:
        self.flags = flags
        self._columns: list[tuple[str, type, np.ndarray]] = []
        begin = 0
        for entry in keys:
            strides = memory.strides[0], *np.zeros(entry.shape, entry.dtype).strides
            shape = len(memory), *entry.shape
            column = np.ndarray(shape, entry.dtype, memory, begin, strides)
            self._columns.append((entry.key, entry.kind, column))
            begin += entry.size_bytes

    def put(self, info: Any, index: int) -> bool:
        """Write the info of a step to a row, if it has these keys and nothing has been written."""
        if info.__class__ is not dict or len(info) != len(self._columns) or self.flags[index]:
            return False
        for (key, kind, column), (name, value) in zip(self._columns, info.items(), strict=True):
            if name != key or value.__class__ is not kind:
                return False
            if kind is np.ndarray and (value.dtype, value.shape) != (
                column.dtype,
                column.shape[1:],
            ):
                return False
            try:
                column[index] = value
            except OverflowError:  # an integer of more than 64 bits
                return False
        self.flags[index] = True
        return True

    def row(self, index: int) -> dict[str, Any]:
        """Return an info as its env has returned it; empty if it is not here."""
        row = {}
        for key, kind, column in self._columns if self.flags[index] else ():
            row[key] = column[index].copy() if kind is np.ndarray else kind(column[index])
        return row

    def batch(self, rows: slice | np.ndarray) -> dict[str, Any]:
        """Return the infos of some rows, as `add_info` would batch them."""
        flags = self.flags[rows].copy()
        infos, is_whole = dict[str, Any](), flags.all()
        for key, _, column in self._columns if flags.any() else ():
            values = infos[key] = column[rows].copy()
            if not is_whole:
                values[~flags] = 0
            infos[f"_{key}"] = flags.copy()
        return infos
