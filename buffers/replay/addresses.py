"""Where the arrays of a buffer lie, for compiled calls that are given one array instead of all.

A call of a compiled function takes about 50 ns for each array, and references to those of the
caller are counted wherever they are handed on, by operations that wait until all that was written
before has reached the cache. Arrays that are found by their address cost neither.
"""

from __future__ import annotations

import numpy as np

from buffers.core.interrupts import interrupts_later

__all__ = ["Addresses"]

# Where the words of each begin: `table` uint8 (rows, stride), `state` int64, the flag int64 (1,) of
# the `Guard`, `columns` int64 (F, C) of `ReplayStorage`, `slots` int32 (rows,) of `Successors`,
# observations of `Successors` or frames, uint8 (N, S) and (F, S), and `free` int64 (F,).
TABLE, STATE, BUSY, COLUMNS, SLOTS, PENDING, FINALS, FREE, _SIZE = range(0, 27, 3)
_NOTHING = np.zeros((0, 1), np.uint8)


class Addresses:
    """Names arrays to kernels, and keeps these alive.

    Attributes:
        words: int64 (24,), for `bytes_at`, `words_at` and `items_at`.
    """

    def __init__(self):
        self.words = np.zeros(_SIZE, np.int64)
        self._named: dict[int, np.ndarray] = {}
        self.name(dict.fromkeys(range(0, _SIZE, 3), _NOTHING))

    def name(self, arrays: dict[int, np.ndarray]) -> None:
        """Let places name C-contiguous arrays; no kernel may run meanwhile."""
        with interrupts_later():  # else some were named and others not
            for place, array in arrays.items():
                row_bytes = array.strides[0] if len(array) else 1
                self.words[place : place + 3] = array.ctypes.data, len(array), row_bytes
            self._named |= arrays
