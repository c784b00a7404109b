"""Priorities of the rows of a ring and drawing by them, in memory of the CPU."""

from __future__ import annotations

import sys

import numpy as np

from buffers.replay.priority_kernels import FAN_OUT, draw_leaves, insert_newest, set_leaves

__all__ = ["SumTree", "largest_value", "level_sizes"]

_WORDS_PER_LINE = 8


def level_sizes(capacity: int) -> list[int]:
    """Nodes of each level, leaves first, padded to whole nodes of the level above; the last is 1.

    >>> level_sizes(100), level_sizes(1)
    ([112, 16, 1], [16, 1])
    """
    sizes = [capacity + -capacity % FAN_OUT]
    while sizes[-1] > 1:
        above = sizes[-1] // FAN_OUT
        sizes.append(above if above == 1 else above + -above % FAN_OUT)
    return sizes


def largest_value(capacity: int) -> float:
    """The largest value so many leaves may have, or their sum would overflow."""
    return sys.float_info.max / (4 * capacity)


class SumTree:
    """Values of the leaves 0 .. capacity - 1 and their sums.

    Attributes:
        leaves: float64 (capacity,), view of the tree; read only.
        inserted: int64 (1,), the number of rows that `insert` knows of.
    """

    def __init__(self, capacity: int):
        sizes = level_sizes(capacity)
        self._capacity = capacity
        self._starts = np.cumsum([0, *sizes[:-1]])
        self._tree = _aligned_zeros(sum(sizes))
        self.leaves = self._tree[:capacity]
        self._nodes, self._masses = np.zeros(0, np.int64), np.zeros(0, np.float64)
        self.inserted = np.zeros(1, np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._tree.nbytes + self._nodes.nbytes + self._masses.nbytes

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self._tree[-1])

    def insert(self, state: np.ndarray, value: float) -> None:
        """Give one value to the leaves of all rows that were added since the last call.

        Args:
            state: int64 of the buffer, see `indexing`.
            value: See above.
        """
        insert_newest(self._tree, self._starts, state, self.inserted, value)

    def update(self, leaves: np.ndarray, values: np.ndarray) -> None:
        """Give values float64 (K,) to leaves int64 (K,); of equal leaves the last counts."""
        nodes = self._nodes  # which another thread may replace
        if len(nodes) < len(leaves):
            nodes = self._nodes = np.zeros(len(leaves), np.int64)
        set_leaves(self._tree, self._starts, leaves, values, nodes)

    def draw(
        self, generator: np.ndarray, leaves: np.ndarray, weights: np.ndarray, beta: float
    ) -> None:
        """Draw leaves by their values, with weights (smallest value drawn / value) ** beta.

        Args:
            generator: uint64 (2,), see `core.kernels`.
            leaves: int64 (B,), written.
            weights: float32 (B,), written.
            beta: Exponent.
        """
        masses = self._masses
        if len(masses) < len(leaves):
            masses = self._masses = np.zeros(len(leaves))
        draw_leaves(self._tree, self._starts, generator, leaves, masses, weights)
        np.power(weights, np.float32(beta), out=weights)

    def restore(self, values: np.ndarray) -> None:
        """Take over all values, float64 (capacity,)."""
        self.update(np.arange(self._capacity), values)


def _aligned_zeros(size: int) -> np.ndarray:
    """Zeros float64 (size,) that begin at a cache line, as nodes then take two lines each."""
    words = np.zeros(size + _WORDS_PER_LINE, np.float64)
    start = -words.ctypes.data % 64 // 8
    return words[start : start + size]
