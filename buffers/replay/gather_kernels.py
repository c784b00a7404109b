"""Compiled reading of batches: draw rows, walk windows of several steps, copy fields.

A batch is one block of bytes, `pages` uint8, with every field of the batch contiguous in it. Where
each lies is said by `plan` int64: constants at the places named below, then four numbers for each
field: its byte offset in the row, its bytes, its byte offset in the pages, and which row it is
taken from (OWN, LAST, or SUCCESSOR: an observation that may lie elsewhere; those come last).

Rows are drawn for the whole batch before anything is copied, and the copies ask for the rows some
places ahead: the time is spent waiting for memory, and so the waits overlap.
"""

from __future__ import annotations

import numpy as np

from buffers.core.compiling import njit
from buffers.core.kernels import bounded, copy_field, prefetch, random_word
from buffers.replay import indexing as at
from buffers.replay.indexing import live_row, tally

__all__ = [
    "draw_by_ring",
    "draw_distinct",
    "draw_uniform",
    "gather",
    "gather_at_once",
    "sample_uniform",
]

BATCH, NUM_FIELDS, NUM_SUCCESSORS = 0, 1, 2
ROWS_TO, LASTS_TO, REWARDS_TO, DISCOUNTS_TO, NUM_STEPS = 3, 4, 5, 6, 7
OWN_END, LAST_BEGIN, PLAN_HEADER = 8, 9, 10
OWN, LAST, SUCCESSOR = 0, 1, 2

_AHEAD = 12  # rows asked for before they are copied
_LOOK_EVERY = 64  # steps, whether any window goes on
_BLOCK = 512  # rows whose windows are walked before they are copied; they fit into the L2 cache
_ONE = np.uint64(1)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True, cache=True)
def draw_uniform(state, generator, rows):
    """Fill rows int64 (B,) with live rows, drawn with replacement, each equally likely."""
    if not state[at.IS_TALLIED]:
        tally(state)
    key, counter, count = generator[0], generator[1], state[at.COUNT]
    for i in range(rows.shape[0]):
        word = random_word(key, np.add(counter, np.uint64(i)))
        rows[i] = live_row(state, bounded(word, count))
    generator[1] = np.add(counter, np.uint64(rows.shape[0]))


@njit(cache=True)
def draw_by_ring(state, generator, rows):
    """Fill rows int64 (B,): a ring that is not empty, equally likely, then a live row of it."""
    if not state[at.IS_TALLIED]:
        tally(state)
    key, counter, capacity = generator[0], generator[1], state[at.CAPACITY]
    for i in range(rows.shape[0]):
        number = np.add(counter, np.uint64(2 * i))
        chosen = bounded(random_word(key, number), state[at.NUM_OCCUPIED])
        ring = state[state[at.OCCUPIED] + chosen]
        count = min(state[state[at.TOTALS] + ring], capacity)
        rows[i] = ring * capacity + bounded(random_word(key, np.add(number, _ONE)), count)
    generator[1] = np.add(counter, np.uint64(2 * rows.shape[0]))


@njit(nogil=True, cache=True)
def place_of(moved, mask, number):
    """Where the entry of a number is in the table of `draw_distinct`, or would have to be."""
    place = np.int64((np.uint64(number) * _SPREAD) >> np.uint64(32)) & mask
    while moved[2 * place] != -1 and moved[2 * place] != number:
        place = (place + 1) & mask
    return 2 * place


@njit(nogil=True, cache=True)
def draw_distinct(state, generator, rows, moved):
    """Fill rows int64 (B,) with different live rows; every order of every choice is equally likely.

    The live rows are shuffled, the first B places of them: each place gets what lies in a place
    drawn among it and those behind. Only places that were written are kept, in a table with open
    addresses: a place no longer in order, and the number that lies there.

    Args:
        state: int64, see `indexing`; at least B rows are live.
        generator: uint64 (2,), see `core.kernels`; written.
        rows: Written.
        moved: int64 (2 * S,), memory of the table; written. S is a power of 2, at least 2 * B.
    """
    if not state[at.IS_TALLIED]:
        tally(state)
    key, counter, count = generator[0], generator[1], state[at.COUNT]
    mask = moved.shape[0] // 2 - 1
    moved[:] = -1
    for i in range(rows.shape[0]):
        word = random_word(key, np.add(counter, np.uint64(i)))
        drawn = i + bounded(word, count - i)
        found = place_of(moved, mask, drawn)
        rows[i] = moved[found + 1] if moved[found] == drawn else drawn
        own = place_of(moved, mask, i)
        number = moved[own + 1] if moved[own] == i else i
        moved[found], moved[found + 1] = drawn, number
    for i in range(rows.shape[0]):
        rows[i] = live_row(state, rows[i])
    generator[1] = np.add(counter, np.uint64(rows.shape[0]))


@njit(nogil=True, cache=True)
def walk_windows(table, state, plan, gamma, rows, lasts, rewards, discounts):
    """Follow each row for up to NUM_STEPS steps, no further than the episode and the newest row.

    Args:
        table, state, plan: As everywhere here.
        gamma: Discount per step.
        rows: int64 (B,), where the windows begin.
        lasts: int64 (B,), written: the last row of each window.
        rewards: float32 (B,), written: the discounted sum.
        discounts: float32 (B,), written: gamma**m after m steps, 0 if the last one terminates.
    """
    stride, over_at = table.shape[1], state[at.OVER_AT]
    words, floats = table.view(np.int32), table.view(np.float32)
    link_word, reward_word = state[at.LINK_AT] // 4, state[at.REWARD_AT] // 4
    for i in range(rows.shape[0]):
        prefetch(table, rows[i] * stride + over_at)
        lasts[i] = rows[i]
        rewards[i] = np.float32(0.0)
        discounts[i] = np.float32(1.0)
    factor = 1.0
    for step in range(plan[NUM_STEPS]):
        is_final = step + 1 == plan[NUM_STEPS]
        for i in range(rows.shape[0]):
            row = lasts[i]
            if row < 0:  # ended before
                continue
            rewards[i] += np.float32(factor * floats[row, reward_word])
            is_terminated = table[row, over_at] != 0
            discounts[i] = np.float32(0.0 if is_terminated else factor * gamma)
            link = np.int32(0) if link_word < 0 else words[row, link_word]
            if is_final or is_terminated or link <= 0 or table[row, over_at + 1]:
                lasts[i] = -1 - row
            else:
                lasts[i] = link - 1
                prefetch(table, (link - 1) * stride + over_at)
        if step % _LOOK_EVERY == _LOOK_EVERY - 1 and lasts.max() < 0:
            break
        factor *= gamma
    for i in range(rows.shape[0]):
        lasts[i] = -1 - lasts[i]


@njit(nogil=True, cache=True)
def ask_for(table, start, stop):
    """Prefetch the lines of bytes start .. stop - 1."""
    for offset in range(start, stop, 64):
        prefetch(table, offset)
    prefetch(table, stop - 1)


@njit(nogil=True, cache=True)
def copy_fields(table, plan, pages, begin, rows, lasts):
    """Copy the fields of rows int64 (K,) and lasts (K,) to places begin, begin + 1, ... ."""
    stride, num_rows = table.shape[1], rows.shape[0]
    own_end, last_begin, is_long = plan[OWN_END], plan[LAST_BEGIN], plan[NUM_STEPS] > 1
    for i in range(-_AHEAD, num_rows):
        ahead = i + _AHEAD
        if ahead < num_rows:
            ask_for(table, rows[ahead] * stride, rows[ahead] * stride + own_end)
            if is_long and last_begin < stride:
                start = lasts[ahead] * stride
                ask_for(table, start + last_begin, start + stride)
        if i < 0:
            continue
        for f in range(PLAN_HEADER, PLAN_HEADER + 4 * plan[NUM_FIELDS], 4):
            offset, count = plan[f], plan[f + 1]
            target = plan[f + 2] + (begin + i) * count
            row = lasts[i] if plan[f + 3] == LAST else rows[i]
            copy_field(pages, target, table, row * stride + offset, count)


@njit(nogil=True, cache=True)
def copy_successors(table, state, plan, pages, begin, lasts, pending, finals):
    """Copy the observations after lasts int64 (K,) to places begin, begin + 1, ... .

    They are where the link of a row says: in another row (link > 0), among those that episodes
    ended with (< 0), or the newest of the env (0).

    Returns:
        Whether all were there; `finals` may be one that another thread has replaced.
    """
    stride, obs_at, words = table.shape[1], state[at.OBS_AT], table.view(np.int32)
    link_word, env_word = state[at.LINK_AT] // 4, state[at.ENV_AT] // 4
    first = PLAN_HEADER + 4 * plan[NUM_FIELDS]
    for i in range(-_AHEAD, lasts.shape[0]):
        ahead = i + _AHEAD
        if ahead < lasts.shape[0]:
            start = (words[lasts[ahead], link_word] - 1) * stride + obs_at
            if start > 0:
                ask_for(table, start, start + state[at.OBS_BYTES])
        if i < 0:
            continue
        link = words[lasts[i], link_word]
        for f in range(first, first + 4 * plan[NUM_SUCCESSORS], 4):
            offset, count = plan[f], plan[f + 1]
            target = plan[f + 2] + (begin + i) * count
            if link > 0:
                copy_field(pages, target, table, (link - 1) * stride + obs_at + offset, count)
            elif link < -finals.shape[0]:
                return False
            elif link < 0:
                copy_field(pages, target, finals, (-1 - link) * finals.shape[1] + offset, count)
            else:
                start = words[lasts[i], env_word] * pending.shape[1]
                copy_field(pages, target, pending, start + offset, count)
    return True


@njit(nogil=True, cache=True)
def gather(table, state, plan, pages, gamma, pending, finals):
    """Fill a batch from the rows listed in it.

    Args:
        table: uint8 (rows, stride).
        state: int64, see `indexing`.
        plan: int64, see above.
        pages: uint8, the batch; its list of rows is read, the rest is written.
        gamma: Discount per step, float64.
        pending, finals: uint8 (N, S) and (F, S), if observations are stored once; else anything.

    Returns:
        Whether everything was there; see `copy_successors`.
    """
    size, is_walked, stored_once = plan[BATCH], plan[LASTS_TO] >= 0, plan[NUM_SUCCESSORS] > 0
    rows = pages[plan[ROWS_TO] : plan[ROWS_TO] + 8 * size].view(np.int64)
    if not (is_walked or stored_once):
        copy_fields(table, plan, pages, 0, rows, rows)
        return True
    lasts_to = plan[LASTS_TO] if is_walked else plan[ROWS_TO]
    lasts = pages[lasts_to : lasts_to + 8 * size].view(np.int64)
    rewards = pages[plan[REWARDS_TO] : plan[REWARDS_TO] + 4 * size].view(np.float32)
    discounts = pages[plan[DISCOUNTS_TO] : plan[DISCOUNTS_TO] + 4 * size].view(np.float32)
    for begin in range(0, size, _BLOCK):
        stop = min(begin + _BLOCK, size)
        own, last = rows[begin:stop], lasts[begin:stop]
        if is_walked:
            walk_windows(
                table, state, plan, gamma, own, last, rewards[begin:stop], discounts[begin:stop]
            )
        copy_fields(table, plan, pages, begin, own, last)
        if stored_once and not copy_successors(
            table, state, plan, pages, begin, last, pending, finals
        ):
            return False
    return True


@njit(cache=True)
def gather_at_once(table, state, busy, plan, pages, gamma, pending, finals):
    """As `gather`, unless the flag of the buffer's `Guard` is set in busy int64 (1,).

    It keeps the interpreter's lock, so that no other thread adds meanwhile.
    """
    return busy[0] == 0 and gather(table, state, plan, pages, gamma, pending, finals)


@njit(cache=True)
def sample_uniform(table, state, busy, generator, plan, pages, gamma, pending, finals):
    """Draw live rows with replacement and fill the batch with them; as `gather_at_once`."""
    if busy[0] != 0:
        return False
    rows = pages[plan[ROWS_TO] : plan[ROWS_TO] + 8 * plan[BATCH]].view(np.int64)
    draw_uniform(state, generator, rows)
    return gather(table, state, plan, pages, gamma, pending, finals)
