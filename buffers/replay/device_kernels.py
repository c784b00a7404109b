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
def add_kernel(word: str) -> DeviceKernel:
    """`add_thread` that writes rows in words of this kind, "uint64" or "uint32"."""
    columns = (f"{word}*",) * MAX_COLUMNS + ("uint8*",) * MAX_COLUMNS
    plans = "int32*", "int32*", "int64*", f"{word}*", "int64*"
    return DeviceKernel(add_thread, (*columns, *plans, *("int64",) * 6))


def add_thread(
    words_0, words_1, words_2, words_3, words_4, words_5,
    words_6, words_7, words_8, words_9, words_10, words_11,
    bytes_0, bytes_1, bytes_2, bytes_3, bytes_4, bytes_5,
    bytes_6, bytes_7, bytes_8, bytes_9, bytes_10, bytes_11,
    word_plan, byte_plan, pointers, table, added,
    count, shift, row_words, word_bytes, capacity, num_rings,
):  # fmt: skip
    """Write one word of a row that is added; see `RowWriter`.

    Args:
        words_0 ... words_11: Columns, contiguous, in words of a row.
        bytes_0 ... bytes_11: The same memory as bytes.
        word_plan: (row_words * 3,), of each word: the column it comes from whole, or -1 if it is
            put together of bytes; words of this column per row; and which one of these.
        byte_plan: (row_words * word_bytes * 3,), the same of bytes; -1 stands for 0.
        pointers: (num_rings,), rows of rings that are written next.
        table: (num_rows * row_words,), written.
        added: (count,), written: the rows.
        count, shift: Rows that are added, each by 2 ** shift threads.
        row_words, word_bytes: Words of a row, and bytes of a word.
        capacity, num_rings: Rows of a ring, and rings; if several, each gets one row.
    """
    thread = cuda.grid(1)
    place = thread >> shift
    word = thread - (place << shift)
    if place >= count or word >= row_words:
        return
    if num_rings == 1:
        row = pointers[0] + place
        if row >= capacity:
            row -= capacity
    else:
        row = place * capacity + pointers[place]
    if word == 0:
        added[place] = row
    target = row * row_words + word
    column = word_plan[3 * word]
    if column >= 0:
        words = (
            words_0, words_1, words_2, words_3, words_4, words_5,
            words_6, words_7, words_8, words_9, words_10, words_11,
        )  # fmt: skip
        table[target] = words[column][place * word_plan[3 * word + 1] + word_plan[3 * word + 2]]
        return
    parts = (
        bytes_0, bytes_1, bytes_2, bytes_3, bytes_4, bytes_5,
        bytes_6, bytes_7, bytes_8, bytes_9, bytes_10, bytes_11,
    )  # fmt: skip
    whole = np.uint64(0)
    for byte in range(word_bytes):
        at = 3 * (word * word_bytes + byte)
        column = byte_plan[at]
        if column >= 0:
            part = parts[column][place * byte_plan[at + 1] + byte_plan[at + 2]]
            whole |= np.uint64(part) << np.uint64(8 * byte)
    table[target] = whole


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
