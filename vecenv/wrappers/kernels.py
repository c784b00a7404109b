"""Kernels over rows: take numbers into running moments, normalise them; stack words."""

from __future__ import annotations

import numpy as np
from numba import njit

from vecenv.core.moments import joined
from vecenv.fingerprint import cached_njit

__all__ = ["add_rows", "normalize_rows", "stack_rows", "take_and_normalize"]

_joined = njit(joined)


def _add_rows(x, counts, count, mean, variance, sums):
    """Take rows into account.

    Args:
        x: (B, D) numbers.
        counts: bool (B,), which rows are taken; of length 0 for all.
        count: int64 (1,), rows seen so far; changed.
        mean: float64 (D,); changed.
        variance: float64 (D,), mean of squared deviations; changed.
        sums: float64 (3, D), written: working memory.

    Returns:
        Whether all is finite; otherwise nothing was changed.
    """
    num_rows, width = x.shape
    shift, sum_1, sum_2 = sums[0], sums[1], sums[2]
    taken = 0
    for row in range(num_rows):
        if len(counts) and not counts[row]:
            continue
        if taken == 0:
            # Deviations from a number among them lose no digits when they are squared.
            for k in range(width):
                shift[k] = mean[k] if count[0] else np.float64(x[row, k])
                sum_1[k] = 0.0
                sum_2[k] = 0.0
        taken += 1
        for k in range(width):
            change = x[row, k] - shift[k]
            sum_1[k] += change
            sum_2[k] += change * change
    if taken == 0:
        return True
    total = 0.0
    for k in range(width):
        total += sum_2[k]
    if not np.isfinite(total):
        return False
    for k in range(width):
        part_mean = shift[k] + sum_1[k] / taken
        part_squares = max(sum_2[k] - sum_1[k] * sum_1[k] / taken, 0.0)
        _, mean[k], squares = _joined(
            count[0], mean[k], variance[k] * count[0], taken, part_mean, part_squares
        )
        variance[k] = squares / (count[0] + taken)
    count[0] += taken
    return True


def _normalize_rows(x, mean, factor, clip, out):
    """Write (x - mean) * factor, clipped to -clip ... clip, into out (B, D); x is (B, D)."""
    num_rows, width = x.shape
    for row in range(num_rows):
        for k in range(width):
            value = (x[row, k] - mean[k]) * factor[k]
            value = clip if value > clip else value
            out[row, k] = -clip if value < -clip else value


_add = njit(_add_rows)
_write = njit(_normalize_rows)


def _take_and_normalize(  # noqa: PLR0917
    x, counts, count, mean, variance, sums, epsilon, own_mean, own_factor, clip, out
):
    """Take rows into account, then write them normalised; see the two functions above.

    Returns:
        Whether all is finite; otherwise nothing was changed.
    """
    if not _add(x, counts, count, mean, variance, sums):
        return False
    for k in range(len(mean)):
        own_mean[k] = mean[k]
        own_factor[k] = 1.0 / np.sqrt(variance[k] + epsilon)
    _write(x, own_mean, own_factor, clip, out)
    return True


def _stack_rows(areas, first, out):
    """Write the rows of several areas behind each other.

    Args:
        areas: (K, N, W) words, used in turn.
        first: Which area comes first.
        out: (N, K, W), written.
    """
    num_areas, num_rows, width = areas.shape
    for row in range(num_rows):
        for place in range(num_areas):
            area = first + place
            if area >= num_areas:
                area -= num_areas
            for k in range(width):
                out[row, place, k] = areas[area, row, k]


add_rows = cached_njit(_add_rows)
normalize_rows = cached_njit(_normalize_rows)
take_and_normalize = cached_njit(_take_and_normalize)
stack_rows = cached_njit(_stack_rows)
