"""Gathering of batches on a device by one kernel: rows, windows of several steps, successors."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from buffers.core.device_kernels import DeviceKernel

__all__ = ["gather_kernel", "gather_thread"]

# `DeviceKernel` puts it here.
cuda: Any = None


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
