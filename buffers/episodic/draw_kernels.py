"""Compiled drawing from episodes: pairs of a step and a later one, windows, goals.

The tables are those of `kernels`, the random words those of `core.kernels`.
"""

from __future__ import annotations

import math

import numpy as np

from buffers.core.compiling import njit
from buffers.core.kernels import copy_bytes, prefetch, random_word, unit_float
from buffers.episodic.kernels import (
    FIRST_DRAWABLE,
    FIRST_START,
    NUM_DRAWABLE,
    NUM_STARTS,
)

__all__ = ["draw_goals", "draw_pairs", "draw_uniforms", "draw_windows", "gather_rows"]

_LOW = 0xFFFFFFFF
_ONE = np.uint64(1)


@njit(nogil=True, cache=True)
def draw_uniforms(generator, out):
    """Fill out float64 (K,) with numbers from 0 to below 1; generator uint64 (2,) moves on."""
    key, counter = generator[0], generator[1]
    for k in range(out.shape[0]):
        out[k] = unit_float(random_word(key, counter))
        counter = np.add(counter, _ONE)
    generator[1] = counter


@njit(nogil=True, cache=True)
def gather_rows(rows, chosen, first_word, out):
    """Copy rows into out int64 (K, V), as many words of each as there are; -1 means zeros.

    Args:
        rows: int64 (R, W).
        chosen: int64 (K,).
        first_word: Where in a row to begin.
        out: int64 (K, V).
    """
    row_bytes, out_bytes = 8 * rows.shape[1], 8 * out.shape[1]
    for k in range(chosen.shape[0]):
        if chosen[k] >= 0:
            start = chosen[k] * row_bytes + 8 * first_word
            copy_bytes(out, k * out_bytes, rows, start, out_bytes)
        else:
            out[k] = 0


@njit(nogil=True, cache=True)
def _offset_below(uniform, room, log_discount):
    """A number from 1 to room with probability proportional to discount ** number.

    The distribution function of the truncated law is inverted; nothing is clipped but rounding.
    """
    if log_discount == 0.0:
        offset = int(uniform * room)
    elif log_discount < -1e-4:  # the quicker functions still have twelve digits
        mass = 1.0 - math.exp(room * log_discount)
        offset = int(math.log(1.0 - uniform * mass) / log_discount)
    else:
        mass = -math.expm1(room * log_discount)  # of the law before it is truncated
        offset = int(math.log1p(-uniform * mass) / log_discount)
    return min(offset, room - 1) + 1


@njit(nogil=True, cache=True)
def draw_pairs(
    rows, starts, episodes, drawable, counters, generator, log_discount, by_episode, first_word,
    batch_size, out,
):  # fmt: skip
    """Draw steps that have room, and for each a later one within its room.

    Memory is asked for one loop before it is read, so that the waits for it overlap.

    Args:
        rows, starts, episodes, drawable, counters: The tables.
        generator: uint64 (2,), moves on.
        log_discount: Natural logarithm of the discount; 0 for equal probabilities.
        by_episode: Draw episodes with equal probability, not steps.
        first_word: Where in a row the observation begins.
        batch_size: B.
        out: int64 (B * W + B * V + B + B,), written: the rows, the observations of the later steps,
            how much later they are, and their rows.
    """
    width = rows.shape[1]
    begin = batch_size * width
    end = out.shape[0] - 2 * batch_size
    row_bytes, obs_bytes = 8 * width, 8 * ((end - begin) // batch_size)
    offsets, chosen = out[end : end + batch_size], out[end + batch_size :]
    key, counter = generator[0], generator[1]
    capacity, num_rows = starts.shape[0], rows.shape[0]
    for b in range(chosen.shape[0]):
        first, count = counters[FIRST_START], counters[NUM_STARTS]
        if by_episode:
            number = int(unit_float(random_word(key, counter)) * counters[NUM_DRAWABLE])
            slot = drawable[(counters[FIRST_DRAWABLE] + number) % drawable.shape[0]]
            first, count = episodes[slot, 2], episodes[slot, 3]
            counter = np.add(counter, _ONE)
        place = first + int(unit_float(random_word(key, counter)) * count)
        counter = np.add(counter, _ONE)
        row = starts[place - capacity if place >= capacity else place]
        chosen[b] = row
        for line in range(0, row_bytes, 64):
            prefetch(rows, row * row_bytes + line)
    for b in range(chosen.shape[0]):
        row, uniform = chosen[b], unit_float(random_word(key, counter))
        counter = np.add(counter, _ONE)
        offset = _offset_below(uniform, rows[row, 0] & _LOW, log_discount)
        copy_bytes(out, b * row_bytes, rows, row * row_bytes, row_bytes)
        row += offset
        row = row - num_rows if row >= num_rows else row
        chosen[b] = row
        offsets[b] = offset
        for line in range(0, obs_bytes, 64):
            prefetch(rows, row * row_bytes + 8 * first_word + line)
    begin *= 8
    for b in range(chosen.shape[0]):
        start = chosen[b] * row_bytes + 8 * first_word
        copy_bytes(out, begin + b * obs_bytes, rows, start, obs_bytes)
    generator[1] = counter


@njit(nogil=True, cache=True)
def draw_windows(num_rows, episodes, slots, ends, generator, by_episode, chosen):
    """Draw first steps of windows.

    Args:
        num_rows: Of the ring.
        episodes: int64 (M, 4), the table.
        slots, ends: int64 (E,), as `count_windows` wrote them.
        generator: uint64 (2,), moves on.
        by_episode: Draw episodes with equal probability, not windows.
        chosen: int64 (B,), written: rows.
    """
    key, counter = generator[0], generator[1]
    for b in range(chosen.shape[0]):
        uniform = unit_float(random_word(key, counter))
        counter = np.add(counter, _ONE)
        if by_episode:
            e = int(uniform * slots.shape[0])
            count = ends[e] - (ends[e - 1] if e > 0 else 0)
            position = int(unit_float(random_word(key, counter)) * count)
            counter = np.add(counter, _ONE)
        else:
            number = int(uniform * ends[ends.shape[0] - 1])
            e = np.searchsorted(ends, number, side="right")
            position = number - (ends[e - 1] if e > 0 else 0)
        row = episodes[slots[e], 0] + position
        chosen[b] = row - num_rows if row >= num_rows else row
    generator[1] = counter


@njit(nogil=True, cache=True)
def draw_goals(rows, chosen, strategy, relabel_ratio, generator, goals, relabelled):
    """Draw for each step the row of the observation that is to be its goal.

    Args:
        rows: int64 (R, W), the table.
        chosen: int64 (B,), rows of steps.
        strategy: 0 future: one of the observations after the step; 1 final: the last of the
            episode; 2 episode: any but the first of the episode.
        relabel_ratio: Probability of a new goal.
        generator: uint64 (2,), moves on.
        goals: int64 (B,), written: rows.
        relabelled: bool (B,), written: whether the goal is to be used.
    """
    key, counter = generator[0], generator[1]
    num_rows = rows.shape[0]
    for b in range(chosen.shape[0]):
        row = chosen[b]
        step, remaining = (rows[row, 0] >> 32) & _LOW, rows[row, 1] & _LOW
        relabelled[b] = unit_float(random_word(key, counter)) < relabel_ratio
        counter = np.add(counter, _ONE)
        uniform = unit_float(random_word(key, counter))
        counter = np.add(counter, _ONE)
        if strategy == 0:
            later = 1 + int(uniform * remaining)
        elif strategy == 1:
            later = remaining
        else:
            later = 1 + int(uniform * (step + remaining)) - step
        goals[b] = (row + later) % num_rows
    generator[1] = counter
