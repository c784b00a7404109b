"""Kernels over rows: take numbers into running moments, normalise them; stack words.

Rows of few numbers are done several at a time, as one long row of `lanes` numbers: a loop over four
numbers takes more than twice as long for each.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from vecenv.core.compiling import cached_njit
from vecenv.core.moments import joined

__all__ = [
    "add_rows",
    "lanes_of",
    "normalize_rows",
    "scale_rewards",
    "stack_rows",
    "take_and_normalize",
]

_LANES = 128
_BLOCK_WORDS = 512  # which stay in the nearest cache while they are written
_joined = njit(joined)


def lanes_of(width: int) -> int:
    """Return how many numbers are done at a time: a multiple of `width`."""
    return width * max(1, _LANES // max(1, width))


@njit
def _add_all(x, shift, sum_1, sum_2):
    """Add deviations of rows of x (B, D) from shift (L,), and their squares, to sums (L,)."""
    lanes = len(shift)
    flat = x.reshape(-1)
    num_wide = len(flat) // lanes
    wide = flat[: num_wide * lanes].reshape(-1, lanes)
    for quarter in range(num_wide // 4):  # four rows for each time that sums are loaded and stored
        a, b = wide[4 * quarter], wide[4 * quarter + 1]
        c, d = wide[4 * quarter + 2], wide[4 * quarter + 3]
        for k in range(lanes):
            of_a, of_b = a[k] - shift[k], b[k] - shift[k]
            of_c, of_d = c[k] - shift[k], d[k] - shift[k]
            sum_1[k] += (of_a + of_b) + (of_c + of_d)
            sum_2[k] += (of_a * of_a + of_b * of_b) + (of_c * of_c + of_d * of_d)
    rest = flat[num_wide // 4 * 4 * lanes :]
    for begin in range(0, len(rest), lanes):
        row = rest[begin : begin + lanes]
        for k in range(len(row)):
            change = row[k] - shift[k]
            sum_1[k] += change
            sum_2[k] += change * change


@njit
def _add_some(x, counts, shift, sum_1, sum_2):
    """The same of the rows where counts, bool (B,), is set, row by row; return how many it is."""
    taken = 0
    for row in range(x.shape[0]):
        if counts[row]:
            taken += 1
            for k in range(x.shape[1]):
                change = x[row, k] - shift[k]
                sum_1[k] += change
                sum_2[k] += change * change
    return taken


def _add_rows(x, counts, count, mean, variance, sums):
    """Take rows into account.

    Args:
        x: (B, D) numbers, C-contiguous.
        counts: bool (B,), which rows are taken; of length 0 for all.
        count: int64 (1,), rows seen so far; changed.
        mean: float64 (D,); changed.
        variance: float64 (D,), mean of squared deviations; changed.
        sums: float64 (3, L), L as of `lanes_of` or D, written: working memory.

    Returns:
        Whether all is finite; otherwise nothing was changed.
    """
    num_rows, width = x.shape
    lanes = sums.shape[1]
    shift, sum_1, sum_2 = sums[0], sums[1], sums[2]
    first = 0
    while len(counts) and first < num_rows and not counts[first]:
        first += 1
    if first == num_rows:
        return True
    # Deviations from a number among them lose no digits when they are squared.
    for k in range(width):
        shift[k] = mean[k] if count[0] else np.float64(x[first, k])
    for k in range(width, lanes):
        shift[k] = shift[k - width]
    for k in range(lanes):
        sum_1[k] = 0.0
        sum_2[k] = 0.0
    taken = num_rows
    if len(counts):
        taken = _add_some(x, counts, shift, sum_1, sum_2)
    elif width:
        _add_all(x, shift, sum_1, sum_2)
        for k in range(lanes - 1, width - 1, -1):
            sum_1[k - width] += sum_1[k]
            sum_2[k - width] += sum_2[k]
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
    """Write (x - mean) * factor, clipped to -clip ... clip.

    Args:
        x: (B, D), C-contiguous.
        mean: (L,), those of a row repeated, L as of `lanes_of` or D.
        factor: (L,), the same.
        clip: The bound.
        out: (B, D), C-contiguous, written.
    """
    lanes = len(mean)
    if lanes == 0:
        return
    flat, flat_out = x.reshape(-1), out.reshape(-1)
    end = len(flat) // lanes * lanes
    wide, wide_out = flat[:end].reshape(-1, lanes), flat_out[:end].reshape(-1, lanes)
    for row in range(len(wide)):
        for k in range(lanes):
            value = (wide[row, k] - mean[k]) * factor[k]
            value = clip if value > clip else value
            wide_out[row, k] = -clip if value < -clip else value
    rest, rest_out = flat[end:], flat_out[end:]
    for k in range(len(rest)):
        value = (rest[k] - mean[k]) * factor[k]
        value = clip if value > clip else value
        rest_out[k] = -clip if value < -clip else value


_add = njit(_add_rows)
_write = njit(_normalize_rows)


def _take_and_normalize(  # noqa: PLR0917  # a kernel's
    x, counts, is_counted, count, mean, variance, sums, epsilon, own_mean, own_factor, clip, out
):
    """Take rows into account, if `is_counted`, then write them normalised; see the functions above.

    Returns:
        Whether all is finite; otherwise nothing was changed.
    """
    if is_counted and not _add(x, counts, count, mean, variance, sums):
        return False
    width = len(mean)
    for k in range(width):
        own_mean[k] = mean[k]
        own_factor[k] = 1.0 / np.sqrt(variance[k] + epsilon)
    for k in range(width, len(own_mean)):
        own_mean[k] = own_mean[k - width]
        own_factor[k] = own_factor[k - width]
    _write(x, own_mean, own_factor, clip, out)
    return True


def _scale_rewards(  # noqa: PLR0917  # a kernel's
    rewards, acted, is_counted, gamma, returns, count, mean, variance, sums, epsilon, clip, out
):
    """Add rewards to discounted returns, take these into account, write rewards in their units.

    Args:
        rewards: float64 (B,).
        acted: bool (B,), whose rewards count; of length 0 for all.
        is_counted: Whether the returns are taken into account.
        gamma: The discount.
        returns: float64 (B,), changed.
        count: As for `_add_rows`, of one number, as the next three.
        mean: See there.
        variance: See there.
        sums: See there.
        epsilon: Added to the variance.
        clip: The bound.
        out: float64 (B,), written: rewards by the standard deviation, clipped to -clip ... clip.

    Returns:
        Whether all is finite; otherwise only the returns were changed.
    """
    if len(acted):
        for row in range(len(rewards)):
            returns[row] = returns[row] * gamma + (rewards[row] if acted[row] else 0.0)
    else:
        for row in range(len(rewards)):
            returns[row] = returns[row] * gamma + rewards[row]
    if is_counted:
        if not _add(returns.reshape(-1, 1), acted, count, mean, variance, sums):
            return False
    elif not np.isfinite(returns).all():
        return False
    factor = 1.0 / np.sqrt(variance[0] + epsilon)
    for row in range(len(rewards)):
        value = rewards[row] * factor
        value = clip if value > clip else value
        out[row] = -clip if value < -clip else value
    return True


@njit
def _stack_short_rows(areas, first, out):
    """Write rows of one or two words, with no loop over these, and a part of the rows at a time."""
    num_areas, num_rows, width = areas.shape
    block = max(1, _BLOCK_WORDS // (num_areas * width))
    for begin in range(0, num_rows, block):
        for place in range(num_areas):
            area = (first + place) % num_areas
            source = areas[area, begin : begin + block]
            target = out[begin : begin + block, place]
            if width == 1:
                for row in range(len(source)):
                    target[row, 0] = source[row, 0]
            else:
                for row in range(len(source)):
                    target[row, 0] = source[row, 0]
                    target[row, 1] = source[row, 1]


def _stack_rows(areas, first, out):
    """Write the rows of several areas behind each other.

    Args:
        areas: (K, N, W) words, used in turn.
        first: Which area comes first.
        out: (N, K, W), written.
    """
    num_areas, num_rows, width = areas.shape
    if 1 <= width <= 2:
        _stack_short_rows(areas, first, out)
        return
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
scale_rewards = cached_njit(_scale_rewards)
stack_rows = cached_njit(_stack_rows)
