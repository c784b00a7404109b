"""Kernels of replay on a device: adds, batches, draws by priority and their updates."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from buffers.core.device_kernels import DeviceKernel

__all__ = [
    "MAX_COLUMNS",
    "add_kernel",
    "count_kernel",
    "draw_kernel",
    "gather_kernel",
    "gather_thread",
    "sum_kernel",
    "update_kernel",
]

MAX_COLUMNS = 12  # that `add_thread` takes

# `DeviceKernel` puts it here.
cuda: Any = None


@functools.cache
def add_kernel(unit: str) -> DeviceKernel:
    """`add_thread` that copies in units of this kind, such as "uint64"."""
    addresses = *(f"{unit}*",) * (MAX_COLUMNS + 1), "int32*", "int64*", "int64*"
    return DeviceKernel(add_thread, (*addresses, *("int64",) * 6))


def add_thread(
    column_0, column_1, column_2, column_3, column_4, column_5,
    column_6, column_7, column_8, column_9, column_10, column_11,
    table, plan, pointers, added,
    count, num_units, shift, row_units, capacity, num_rings,
):  # fmt: skip
    """Write one unit of four rows that are added; see `RowWriter`.

    Four reads are under way at once, and what has to be found out before serves them all.

    Args:
        column_0 ... column_11: Contiguous, in units.
        table: (num_rows * row_units,), written.
        plan: (num_units * 4,), of each unit: where it is in a row; the column it comes from, or -1
            if it is 0; units of this column per row; and which one of these.
        pointers: (num_rings,), rows of rings that are written next.
        added: (count,), written: the rows.
        count, num_units, shift: Rows that are added, each four by 2 ** shift threads, of which
            as many as there are units have work.
        row_units: Units of a row.
        capacity, num_rings: Rows of a ring, and rings; if several, each gets one row.
    """
    thread = cuda.grid(1)
    group = thread >> shift
    unit = thread - (group << shift)
    place_0 = group << 2
    if place_0 >= count or unit >= num_units:
        return
    # The last rows are written several times, with the same in them, where four are too many.
    place_1, place_2 = min(place_0 + 1, count - 1), min(place_0 + 2, count - 1)
    place_3 = min(place_0 + 3, count - 1)
    if num_rings == 1:
        begin = pointers[0]
        row_0, row_1 = begin + place_0, begin + place_1
        row_2, row_3 = begin + place_2, begin + place_3
        row_0 = row_0 - capacity if row_0 >= capacity else row_0
        row_1 = row_1 - capacity if row_1 >= capacity else row_1
        row_2 = row_2 - capacity if row_2 >= capacity else row_2
        row_3 = row_3 - capacity if row_3 >= capacity else row_3
    else:
        row_0 = place_0 * capacity + pointers[place_0]
        row_1 = place_1 * capacity + pointers[place_1]
        row_2 = place_2 * capacity + pointers[place_2]
        row_3 = place_3 * capacity + pointers[place_3]
    if unit == 0:
        added[place_0], added[place_1] = row_0, row_1
        added[place_2], added[place_3] = row_2, row_3
    at, column = np.int64(plan[4 * unit]), plan[4 * unit + 1]
    width, offset = np.int64(plan[4 * unit + 2]), np.int64(plan[4 * unit + 3])
    value_0 = value_1 = value_2 = value_3 = np.uint64(0)
    if column >= 0:
        columns = (
            column_0, column_1, column_2, column_3, column_4, column_5,
            column_6, column_7, column_8, column_9, column_10, column_11,
        )  # fmt: skip
        source = columns[np.uint64(column)]
        value_0, value_1 = source[place_0 * width + offset], source[place_1 * width + offset]
        value_2, value_3 = source[place_2 * width + offset], source[place_3 * width + offset]
    table[row_0 * row_units + at], table[row_1 * row_units + at] = value_0, value_1
    table[row_2 * row_units + at], table[row_3 * row_units + at] = value_2, value_3


@functools.cache
def count_kernel() -> DeviceKernel:
    """`count_thread`."""
    return DeviceKernel(count_thread, (*("int64*",) * 5, "int64", "int64"))


def count_thread(totals, pointers, counts, live, added, num_rows, capacity):
    """Count rows that were added to a buffer of one ring, by one thread.

    Args:
        totals, pointers, counts: (1,): rows ever added, row that is written next, live rows.
        live, added: (1,), live rows and rows ever added of all rings.
        num_rows, capacity: Rows added now, and those of the ring.
    """
    if cuda.grid(1) != 0:
        return
    total = totals[0] + num_rows
    totals[0] = total
    pointers[0] = total % capacity
    alive = min(total, capacity)
    counts[0] = alive
    live[0] = alive
    added[0] += num_rows


@functools.cache
def gather_kernel(word: str) -> DeviceKernel:
    """`gather_thread` that copies next observations in words of this kind, such as "int64"."""
    rows = "int64*", "float32*", "int32*", "uint8*"
    observations = (f"{word}*",) * 3
    batch = "int64*", "int64*", "int64*", f"{word}*", "float32*", "float32*"
    return DeviceKernel(gather_thread, (*rows, *observations, *batch, *("int64",) * 13, "float64"))


def gather_thread(
    rows, floats, ints, flags, observations, finals, pending,
    indices, own, last, successors, rewards, discounts,
    batch_size, row_words, last_words, obs_words, obs_stride, obs_at, reward_at, link_at, env_at,
    over_at, num_steps, has_sums, has_once, gamma,
):  # fmt: skip
    """Copy one word of what a batch has of one transition; see `TorchReader.gather`.

    Each thread walks through the window itself if it copies what lies at its end: neighbours read
    the same links, which costs what reading once does.

    Args:
        rows: The table in words of 64 bits, (num_rows * row_words,).
        floats, ints, flags: The same memory as float32, int32 and uint8.
        observations: The same memory in words of an observation.
        finals, pending: See `Successors`, in these words.
        indices: (B,), rows drawn.
        own, last: (B * row_words,), written: the rows drawn, and the last ones of their windows.
        successors: (B * obs_words,), written: next observations, if they are stored once.
        rewards, discounts: (B,), written if has_sums.
        batch_size: B.
        row_words, last_words: Words of a row, and those of a row in `last`; 0 if there is none.
        obs_words, obs_stride, obs_at: Words of an observation, those of a row, and where an
            observation begins there.
        reward_at, link_at, env_at, over_at: Where these begin in a row, in their own words.
        num_steps: Length of windows.
        has_sums, has_once: Whether rewards are summed, and next observations looked up.
        gamma: Discount per step.
    """
    thread = cuda.grid(1)
    width = row_words + last_words + obs_words
    place = thread // width
    if place >= batch_size:
        return
    word = thread - place * width
    row = indices[place]
    if word < row_words:
        own[place * row_words + word] = rows[row * row_words + word]
        if word > 0 or not has_sums:
            return
    factor, total, discount = 1.0, np.float32(0.0), np.float32(0.0)
    step = 0
    while has_sums:
        total += np.float32(factor) * floats[row * (2 * row_words) + reward_at]
        over = row * (8 * row_words) + over_at
        factor *= gamma
        discount = np.float32(0.0) if flags[over] != 0 else np.float32(factor)
        step += 1
        if step >= num_steps or flags[over] != 0 or flags[over + 1] != 0:
            break
        link = ints[row * (2 * row_words) + link_at]
        if link <= 0:
            break
        row = np.int64(link) - 1
    if word < row_words:
        rewards[place] = total
        discounts[place] = discount
        return
    word -= row_words
    if word < last_words:
        last[place * last_words + word] = rows[row * row_words + word]
        return
    word -= last_words
    if has_once:
        link = np.int64(ints[row * (2 * row_words) + link_at])
        if link > 0:
            found = observations[(link - 1) * obs_stride + obs_at + word]
        elif link < 0:
            found = finals[(-1 - link) * obs_words + word]
        else:
            env = np.int64(ints[row * (2 * row_words) + env_at])
            found = pending[env * obs_words + word]
        successors[place * obs_words + word] = found


@functools.cache
def draw_kernel() -> DeviceKernel:
    """`draw_thread`."""
    return DeviceKernel(draw_thread, (*("float64*",) * 5, "int64*", "float64*", *("int64",) * 3))


def draw_thread(
    ends, sums, groups, values, uniforms, leaves, drawn, num_draws, num_blocks, fan_out
):
    """Find the leaf of one draw; see `BlockSums.draw`.

    Args:
        ends: (num_blocks,), where the values of each block end if they lie end to end.
        sums, groups, values: Of blocks, groups and leaves.
        uniforms: (num_draws,), in 0 .. 1.
        leaves, drawn: (num_draws,), written: the leaf, and its value.
        num_draws, num_blocks, fan_out: Numbers; groups of a block, and leaves of a group.
    """
    draw = cuda.grid(1)
    if draw >= num_draws:
        return
    mass = (draw + uniforms[draw]) * (ends[num_blocks - 1] / num_draws)
    low, high = 0, num_blocks - 1
    while low < high:
        middle = (low + high) // 2
        if ends[middle] > mass:
            high = middle
        else:
            low = middle + 1
    while low > 0 and not sums[low] > 0.0:  # where rounding led past the last that is not 0
        low -= 1
    while low < num_blocks - 1 and not sums[low] > 0.0:
        low += 1
    if not sums[low] > 0.0:  # nothing has a value
        low = 0
    rest, part = mass - (ends[low] - sums[low]), low
    for level in range(2):
        found, base, total = 0, 0.0, 0.0
        for place in range(fan_out):
            at = part * fan_out + place
            value = groups[at] if level == 0 else values[at]
            if value > 0.0:
                found, base = place, total
                total += value
                if total > rest:
                    break
        part, rest = part * fan_out + found, rest - base
    leaves[draw] = part
    drawn[draw] = values[part]


@functools.cache
def update_kernel() -> DeviceKernel:
    """`update_thread`."""
    kinds = "int64*", "float64*", "float64*", "int64*", "float64*"
    return DeviceKernel(
        update_thread, (*kinds, "float64*", "int64*", "float64*", "int64*", "int64", "int64")
    )


def update_thread(
    leaves, given, powers, num_rows, bound, values, targets, taken, refused, count, spare
):
    """Write one priority where it fits; see `BlockSums.update`.

    Args:
        leaves, given, powers: (count,), of priorities: where to, what, and to the power of alpha.
        num_rows, bound: (1,), leaves in use, and the largest priority that is taken.
        values: Of leaves, written.
        targets, taken, refused: (count,), written: the leaf, or `spare` if it was refused; what was
            given, or 0; 0, or 1.
        count, spare: Numbers.
    """
    place = cuda.grid(1)
    if place >= count:
        return
    leaf, priority = leaves[place], given[place]
    if 0 <= leaf < num_rows[0] and 0.0 <= priority <= bound[0]:
        values[leaf] = powers[place]
        targets[place] = leaf
        taken[place] = priority
        refused[place] = 0
    else:
        targets[place] = spare
        taken[place] = 0.0
        refused[place] = 1


@functools.cache
def sum_kernel() -> DeviceKernel:
    """`sum_thread`."""
    return DeviceKernel(sum_thread, ("int64*", "float64*", "float64*", *("int64",) * 3))


def sum_thread(leaves, parts, sums, count, size, fan_out):
    """Sum anew what one leaf is a part of: `fan_out` parts, which hold `size` leaves together."""
    place = cuda.grid(1)
    if place >= count:
        return
    whole = leaves[place] // size
    total = 0.0
    for part in range(fan_out):
        total += parts[whole * fan_out + part]
    sums[whole] = total
