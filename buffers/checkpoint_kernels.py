"""Compiled checksum of the columns in a checkpoint."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["CHECKSUM_LANES", "mix_words"]

CHECKSUM_LANES = 8

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True, cache=True)
def mix_words(words, lanes):
    """Fold words uint64 (K,) into lanes uint64 (8,): lane = (lane + word) * odd, word k in k % 8.

    Each step is one to one, so a change of a single word always changes its lane. Eight lanes hide
    the latency of the multiplication; it runs at the speed of memory.
    """
    a, b, c, d = lanes[0], lanes[1], lanes[2], lanes[3]
    e, f, g, h = lanes[4], lanes[5], lanes[6], lanes[7]
    whole = words.shape[0] - words.shape[0] % 8
    for k in range(0, whole, 8):
        a = np.multiply(np.add(a, words[k]), _MULTIPLIER)
        b = np.multiply(np.add(b, words[k + 1]), _MULTIPLIER)
        c = np.multiply(np.add(c, words[k + 2]), _MULTIPLIER)
        d = np.multiply(np.add(d, words[k + 3]), _MULTIPLIER)
        e = np.multiply(np.add(e, words[k + 4]), _MULTIPLIER)
        f = np.multiply(np.add(f, words[k + 5]), _MULTIPLIER)
        g = np.multiply(np.add(g, words[k + 6]), _MULTIPLIER)
        h = np.multiply(np.add(h, words[k + 7]), _MULTIPLIER)
    lanes[0], lanes[1], lanes[2], lanes[3] = a, b, c, d
    lanes[4], lanes[5], lanes[6], lanes[7] = e, f, g, h
    for k in range(whole, words.shape[0]):
        lanes[k % 8] = np.multiply(np.add(lanes[k % 8], words[k]), _MULTIPLIER)
