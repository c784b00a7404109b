"""From row numbers to columns: compiled code on hosts, torch on devices."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from buffers.core.kernels import address_of, copy_item_at, njit
from buffers.episodic.table import EpisodeTable

__all__ = ["Columns", "Gather"]

Columns = tuple[tuple[str, int], ...]  # name of each column, and index of its list of rows

_OBS = frozenset(("obs", "next_obs", "future_obs", "goal_obs"))  # columns nested like observations
_ALIGNMENT = 64
_MAX_PLANS = 64


class Gather:
    """Copies columns of the rows of a table."""

    def __init__(self, table: EpisodeTable):
        self._table, self._layout = table, table.layout.row
        self._is_flat = self._layout.obs == ["obs"]
        self._words = None if table.is_staged else table.rows.numpy()
        self._plan = functools.lru_cache(_MAX_PLANS)(self._make_plan)

    def take(self, wanted: Columns, lists: Any, lead: tuple[int, ...]) -> dict[str, Any]:
        """Columns (*lead, *shape) by name; observations nested, extra columns in a dict.

        `lists` are rows int64 (J, K), where K is the product of `lead`; on the host they may be an
        array.
        """
        if self._words is None:
            columns = [
                self._table.columns[p].index_select(0, lists[j]) for p, j in self._paths(wanted)
            ]
            tensors = iter([column.view(*lead, *column.shape[1:]) for column in columns])
        else:
            arrays, copies, nbytes = self._plan(wanted, lead)
            block = np.empty(nbytes, np.uint8)
            rows = lists if isinstance(lists, np.ndarray) else lists.contiguous().numpy()
            gather(self._words, rows, copies, block)
            tensors = iter([
                torch.from_numpy(np.ndarray(shape, dtype, block, begin))
                for shape, dtype, begin in arrays
            ])  # fmt: skip
        found = {}
        for name, _ in wanted:
            if name not in _OBS or self._is_flat:
                found[name] = next(tensors)
            else:
                found[name] = self._layout.build_obs([next(tensors) for _ in self._layout.obs])
        extras = {name: found.pop(name) for name in self._layout.extras if name in found}
        return {**found, "extras": extras}

    def _paths(self, wanted: Columns) -> list[tuple[str, int]]:
        """Paths of the fields of the wanted columns, each with its list of rows."""
        obs = self._layout.obs
        return [(path, j) for name, j in wanted for path in (obs if name in _OBS else (name,))]

    def _make_plan(self, wanted: Columns, lead: tuple[int, ...]) -> tuple[Any, np.ndarray, int]:
        """Layout of columns in one block of host memory, and the size of the block.

        Returns shape, dtype and first byte of each array; then copies int64 (F, 4): byte in the
        row, number of bytes, first byte in the block, list of rows; then the size in bytes.
        """
        arrays, copies, end, size = [], [], 0, int(np.prod(lead, dtype=object))
        for path, j in self._paths(wanted):
            _, shape, dtype, offset = field = self._layout.fields[path]
            end += -end % _ALIGNMENT
            arrays.append(((*lead, *shape), dtype, end))
            copies.append((offset, field.nbytes, end, j))
            end += size * field.nbytes
        return arrays, np.array(copies, np.int64).reshape(-1, 4), end


@njit(nogil=True, cache=True)
def gather(rows, lists, copies, block):
    """Copy fields of rows int64 (R, W) into block uint8, as described by copies int64 (F, 4).

    lists int64 (J, K) are row numbers.
    """
    row_bytes, source, to = 8 * rows.shape[1], address_of(rows), address_of(block)
    for f in range(copies.shape[0]):
        offset, size, target = source + copies[f, 0], copies[f, 1], to + copies[f, 2]
        chosen = lists[copies[f, 3]]
        for k in range(chosen.shape[0]):
            copy_item_at(target + k * size, offset + chosen[k] * row_bytes, size)
