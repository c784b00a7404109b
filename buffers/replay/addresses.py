"""Where the arrays of a buffer lie, for compiled calls that are given one array instead of all.

A call of a compiled function takes about 50 ns for each array, and references to those of the
caller are counted wherever they are handed on, by operations that wait until all that was written
before has reached the cache. Arrays that are found by their address cost neither.
"""

from __future__ import annotations

import numpy as np

from buffers.core.compiling import njit
from buffers.core.interrupts import interrupts_later
from buffers.core.kernels import bytes_at, items_at

__all__ = ["Addresses", "open_kept", "open_pages", "open_sources", "open_table"]

# Three words each: address, number of rows, and bytes of a row.
TABLE, STATE, BUSY, SOURCES, SLOTS, PENDING, FINALS, FREE, _SIZE = range(0, 27, 3)
_NOTHING = np.zeros((0, 1), np.uint8)


class Addresses:
    """Names arrays to kernels, and keeps these alive.

    Attributes:
        words: int64 (24,), for the functions below.
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


@njit(nogil=True, cache=True, inline="always")
def open_table(words):
    """The table uint8 (rows, stride), the state int64 and the flag int64 (1,) of the `Guard`."""
    table = bytes_at(words[TABLE], words[TABLE + 1], words[TABLE + 2])
    state = items_at(words[STATE], words[STATE + 1], np.int64)
    return table, state, items_at(words[BUSY], 1, np.int64)


@njit(nogil=True, cache=True, inline="always")
def open_pages(words):
    """`pending` and `finals`: observations of `Successors`, or frames; uint8 (N, S) and (F, S)."""
    pending = bytes_at(words[PENDING], words[PENDING + 1], words[PENDING + 2])
    return pending, bytes_at(words[FINALS], words[FINALS + 1], words[FINALS + 2])


@njit(nogil=True, cache=True, inline="always")
def open_sources(words):
    """int64 (F, 4), of `ReplayStorage`."""
    sources = items_at(words[SOURCES], words[SOURCES + 1] * 4, np.int64)
    return sources.reshape(words[SOURCES + 1], 4)


@njit(nogil=True, cache=True, inline="always")
def open_kept(words):
    """`slots` int32 (rows,) and `free` int64 (F,) of `Successors`."""
    slots = items_at(words[SLOTS], words[SLOTS + 1], np.int32)
    return slots, items_at(words[FREE], words[FREE + 1], np.int64)
