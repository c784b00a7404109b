"""Pure arithmetic of time intervals."""

from __future__ import annotations

import numpy as np

__all__ = ["Coverage"]


class Coverage:
    """The union of intervals of time, and the part of any other interval that it covers.

    Args:
        begins: int64 (R,), in any order.
        ends: int64 (R,), not before their begins.

    Example:
        >>> busy = Coverage(np.array([0, 5, 20]), np.array([10, 12, 30]))
        >>> busy.between(np.array([0, 11, 0]), np.array([30, 25, 100]))
        array([22,  6, 22])
    """

    def __init__(self, begins: np.ndarray, ends: np.ndarray) -> None:
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        # An interval that begins after all before it have ended begins a new block.
        is_first = np.ones(len(begins), dtype=np.bool_)
        is_first[1:] = begins[1:] > ends[:-1]
        is_last = np.ones(len(begins), dtype=np.bool_)
        is_last[:-1] = is_first[1:]
        self.begins: np.ndarray = begins[is_first]
        self.ends: np.ndarray = ends[is_last]
        lengths = self.ends - self.begins
        self._sums = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    @property
    def length_ns(self) -> int:
        """Length of the union."""
        return int(self._sums[-1])

    def between(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return the covered length of each interval, int64 (M,)."""
        return self._until(ends) - self._until(begins)

    def _until(self, times: np.ndarray) -> np.ndarray:
        """Return the covered length before each time, int64 (M,)."""
        block = np.searchsorted(self.begins, times, side="right")  # blocks that have begun
        if len(self.begins) == 0:
            return np.zeros(len(times), dtype=np.int64)
        overhang = np.maximum(self.ends[block - 1] - times, 0)
        return np.where(block > 0, self._sums[block] - overhang, 0)
