"""Getting transitions to a device: one block of host pages and one copy for each add."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from buffers.core.kernels import scatter_fields
from buffers.core.rows import RowLayout, as_words, plan_view, view_fields
from buffers.core.staging import StagingBlocks
from buffers.replay import layout as at

__all__ = ["Staging"]

_ADVICE = "add fewer rows at once"


class Staging:
    """Writes transitions into rows on a device, and keeps the counts of live rows there.

    A block holds, in this order: counts of the rings int64 (R,), where rows go int64 (K,), rows
    whose link changes int64 (2 K,), their links as int64 (2 K,), and the packed rows (K, stride).
    Each row appears at most once in a list, so the device may write in any order. The first packed
    row is at the same byte of a block whatever K is, so links and bytes that are in no field, which
    are never written, stay 0; saved files are the same then for the same transitions.

    Args:
        layout: Of a row.
        rows: uint8 (num_rows, stride) on the device; written.
        state: int64, see `layout`; read.

    Attributes:
        counts: int64 (R,) on the device, live rows of each ring.
    """

    def __init__(self, layout: RowLayout, rows: torch.Tensor, state: np.ndarray):
        self._layout, self._rows, self._state = layout, rows, state
        self.counts = torch.zeros(int(state[at.NUM_RINGS]), dtype=torch.int64, device=rows.device)
        self._links = None
        if "link" in layout.fields:
            self._links = rows.view(torch.int32)[:, layout.fields["link"].offset // 4]
        self._blocks = StagingBlocks(rows.device, _ADVICE)
        self._places = StagingBlocks(rows.device, _ADVICE)
        plans = [plan_view(field) for field in layout.fields.values()]
        self._columns = dict(zip(layout.fields, view_fields(rows, plans), strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes held, on host and device together."""
        return self._blocks.nbytes + self._places.nbytes + self.counts.nbytes

    def _size(self, count: int) -> int:
        lists = 5 if self._links is not None else 1
        return 8 * (len(self.counts) + lists * count) + count * self._layout.stride

    def reserve(self, count: int) -> None:
        """See to memory for adds of `count` rows.

        Raises:
            BufferMemoryError: It is missing; nothing was changed.
        """
        self._blocks.reserve(f"staging {count} rows", self._size(count))

    def reserve_places(self, count: int) -> None:
        """See to memory for `write_tensors` of `count` rows; raises as `reserve`."""
        self._places.reserve(f"the places of {count} rows", 8 * (len(self.counts) + count))

    def write_tensors(self, columns: Mapping[str, torch.Tensor], rows: np.ndarray) -> torch.Tensor:
        """Write transitions that are on the device, and as they are stored.

        Args:
            columns: (K, ...) by path.
            rows: int64 (K,), distinct, where they go.

        Returns:
            The latter on the device.
        """
        with self._places.sent("places", self.host_counts(), rows) as (counts, where):
            self.counts.copy_(counts)
            for path, column in columns.items():
                self._columns[path].index_copy_(0, where, column)
            return where.clone()

    def write(
        self,
        arrays: Mapping[str, np.ndarray],
        rows: np.ndarray,
        befores: np.ndarray,
        codes: np.ndarray,
    ) -> None:
        """Write transitions; as in `place_rows` and `write_links`.

        Args:
            arrays: (K, ...) by path.
            rows: int64 (K,), where they go, -1 for nowhere.
            befores: int64 (K,), rows that get a new link, or negative.
            codes: int32 (K,), the links.
        """
        if len(rows) <= self._state[at.CAPACITY]:  # none of them is overwritten by another
            kept = np.arange(len(rows))
        else:
            kept = _last_of_each(rows)
        where, links = rows[kept], _final_links(rows, befores, codes)
        if self._links is None:
            links = np.zeros((2, 0), np.int64)
        counts = self.host_counts()
        words = np.concatenate([counts, where, *links])
        if len(kept) < len(rows):
            arrays = {path: array[kept] for path, array in arrays.items()}
        middle = self._first_row_at
        begin, end = middle - 8 * len(words), middle + len(kept) * self._layout.stride
        with self._blocks.taken() as block:
            host = block.host.numpy()
            host[begin:middle] = words.view(np.uint8)
            packed = host[middle:end].reshape(len(kept), -1)
            scatter_fields(packed, np.arange(len(kept)), self._layout.places(), arrays)
            block.upload(begin, end)
            sizes = [len(counts), len(where), *map(len, links)]
            self._spread(block.device[begin:middle], sizes, block.device[middle:end])

    @property
    def _first_row_at(self) -> int:
        """The byte of a block where packed rows begin: behind the words of as many as fit."""
        num_bytes, stride = self._blocks.num_bytes, self._layout.stride
        return num_bytes - (num_bytes - self._size(0)) // (self._size(1) - self._size(0)) * stride

    def _spread(self, words: torch.Tensor, sizes: list[int], packed: torch.Tensor) -> None:
        """Move what has arrived on the device to its places."""
        counts, where, linked, links = words.view(torch.int64).split(sizes)
        self.counts.copy_(counts)
        rows, packed = as_words(self._rows, packed.view(-1, self._layout.stride))
        rows.index_copy_(0, where, packed)
        if self._links is not None:
            # The low halves: nothing is allocated, and so nothing fails once rows are counted.
            self._links.index_copy_(0, linked, links.view(torch.int32)[::2])

    def host_counts(self) -> np.ndarray:
        """int64 (R,), live rows of each ring."""
        totals = self._state[self._state[at.TOTALS] :][: self._state[at.NUM_RINGS]]
        return np.minimum(totals, self._state[at.CAPACITY])

    def refresh(self) -> None:
        """Bring the counts on the device up to date, after the state was loaded."""
        self.counts.copy_(torch.from_numpy(self.host_counts()))


def _last_of_each(numbers: np.ndarray) -> np.ndarray:
    """Where each number from 0 on is found for the last time, in order of place.

    >>> _last_of_each(np.array([4, -1, 5, 4])).tolist()
    [2, 3]
    """
    backwards = numbers[::-1]
    _, first = np.unique(backwards, return_index=True)
    places = np.sort(len(numbers) - 1 - first)
    return places[numbers[places] >= 0]


def _final_links(rows: np.ndarray, befores: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """int64 (2, L), rows and their links, after clearing rows[i] and setting befores[i] in turn."""
    changed = np.stack([rows, befores], 1).reshape(-1)
    values = np.stack([np.zeros(len(codes), np.int64), codes], 1).reshape(-1)
    kept = _last_of_each(changed)
    return np.stack([changed[kept], values[kept]])
