"""Random words in compiled code: a generator whose state is two words.

    word number c of a key = mix(rotated key + c * (key | 1))

with the finaliser of SplitMix64 as `mix`. A generator is uint64 (2,): key and number of the next
word, so it fits into a checkpoint and can be continued anywhere.
"""

from __future__ import annotations

import numpy as np

from buffers.core.compiling import njit

__all__ = ["bounded", "random_word", "unit_float"]

_ONE = np.uint64(1)
_HALF = np.uint64(32)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53


@njit(nogil=True, cache=True)
def random_word(key, counter):
    """Word uint64 number `counter` uint64 of the sequence `key` uint64."""
    start = (key << _HALF) | (key >> _HALF)
    word = np.add(start, np.multiply(counter, key | _ONE))
    word = np.multiply(word ^ (word >> np.uint64(30)), _MIX_1)
    word = np.multiply(word ^ (word >> np.uint64(27)), _MIX_2)
    return word ^ (word >> np.uint64(31))


@njit(nogil=True, cache=True)
def bounded(word, bound):
    """Map a word to int64 0 .. bound - 1 (bound int64 below 2**31) by multiplying and shifting."""
    return np.int64(((word >> _HALF) * np.uint64(bound)) >> _HALF)


@njit(nogil=True, cache=True)
def unit_float(word):
    """Map a word to float64 in [0, 1)."""
    return np.float64(word >> np.uint64(11)) * _UNIT
