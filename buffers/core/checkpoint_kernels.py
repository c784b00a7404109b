"""Compiled checks of checkpoints: checksums of columns, and whether rows contradict one another."""

from __future__ import annotations

import numpy as np

from buffers.core.compiling import njit
from buffers.episodic.kernels import fill_rooms
from buffers.replay import indexing as at

__all__ = ["CHECKSUM_LANES", "are_free", "first_wrong_header", "first_wrong_row", "mix_words"]

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


@njit(nogil=True, cache=True)
def first_wrong_header(lengths, boundaries, headers, rooms):
    """The first row whose header does not follow from the lengths and boundaries; -1 for none.

    Args:
        lengths: int64 (E,), steps of episodes that follow one another; each has one row more.
        boundaries: uint8 (K,), of the rows, K of them together.
        headers: int32 (K, 4): room, step, remaining and bound of each row.
        rooms: int32 (K,), scratch memory.
    """
    begin = 0
    for e in range(lengths.shape[0]):
        length = lengths[e]
        fill_rooms(boundaries[begin : begin + length], rooms[begin : begin + length])
        rooms[begin + length] = 0
        for t in range(length + 1):
            row = begin + t
            if (
                headers[row, 0] != rooms[row]
                or headers[row, 1] != t
                or headers[row, 2] != length - t
                or headers[row, 3] != t + rooms[row]
            ):
                return row
        begin += length + 1
    return -1


@njit(nogil=True, cache=True)
def first_wrong_row(state, links, env_ids, slots, num_finals, newest, is_marked):
    """The first row of a ring whose link, env id or slot contradicts the others; -1 for none.

    What a row has to say follows from the order of the rows: the link of a row is the next row of
    its env, or says where the observation between them is kept, or is 0; that of the newest row of
    an env is 0, and the newest rows are listed. Where it isn't kept whose rows these are, links
    lead to newer rows, and no two to the same.

    Args:
        state: int64, see `indexing`; its constants, counts and pointers are right.
        links: int32 (L,), of the live rows in the order of the table, or (0,).
        env_ids: int32 (L,), or (0,) if they aren't kept.
        slots: int32 (rows,), slot + 1 of each row of the table, or 0; or (0,) if next observations
            are stored.
        num_finals: Number of slots.
        newest: int64 (num_envs,), scratch memory.
        is_marked: uint8 (L + num_finals,), zeros: written. For the slots, behind the rows: whether
            they are in use.

    Returns:
        A row of the table, or the negative number -2 - env if what the state says of an env is
        wrong, or -1.
    """
    capacity, num_rings, num_envs = state[at.CAPACITY], state[at.NUM_RINGS], state[at.NUM_ENVS]
    has_links, has_ids = state[at.LINK_AT] >= 0, state[at.ENV_AT] >= 0
    is_once = slots.shape[0] > 0
    num_live = state[at.COUNT]
    newest[:] = 0
    first = 0  # of the ring, among the live rows
    for ring in range(num_rings):
        total = state[state[at.TOTALS] + ring]
        count = min(total, capacity)
        for number in range(total - count, total):
            k = number % capacity
            row, place = ring * capacity + k, first + k
            env = -1
            if has_ids:
                env = np.int64(env_ids[place])
                if env < 0 or env >= num_envs or (num_rings > 1 and env != ring):
                    return row
            elif num_rings > 1 or num_envs == 1:
                env = ring
            if not has_links:
                continue
            link = np.int64(links[place])
            if is_once:
                slot = np.int64(slots[row])
                if slot != max(-link, 0) or slot > num_finals:
                    return row
                if slot:
                    if is_marked[num_live + slot - 1]:
                        return row
                    is_marked[num_live + slot - 1] = 1
            elif link < 0:
                return row
            if link > 0:
                following = link - 1 - ring * capacity
                if following < 0 or following >= count:
                    return row
                newer = number + (following - k) % capacity
                if newer == number or newer >= total or is_marked[first + following]:
                    return row
                is_marked[first + following] = 1
            if env >= 0:
                if newest[env]:  # what the row before it says
                    before = (newest[env] - 1) % capacity
                    code = np.int64(links[first + before])
                    if code != row + 1 and (code == 0) == is_once:
                        return ring * capacity + before
                    if code > 0 and code != row + 1:
                        return ring * capacity + before
                newest[env] = number + 1
        if has_links:
            is_known = has_ids or num_rings > 1 or num_envs == 1
            for env in range(ring, ring + 1 if num_rings > 1 else num_envs):
                last = state[state[at.LAST] + env]
                if (
                    last < 0
                    or last > total
                    or (is_known and newest[env] > 0 and newest[env] != last)
                ):
                    return -2 - env
                if last > total - count:
                    if is_known and newest[env] == 0:
                        return -2 - env
                    if links[first + (last - 1) % capacity]:
                        return ring * capacity + (last - 1) % capacity
        first += count
    for row in range(slots.shape[0]):  # those of no live row
        if slots[row] and row % capacity >= state[state[at.TOTALS] + row // capacity]:
            return row
    return -1


@njit(nogil=True, cache=True)
def are_free(free, num_free, is_used):
    """Whether free int64 (F,) begins with exactly the slots not in use, uint8 (F,); written."""
    if num_free < 0 or num_free > free.shape[0]:
        return False
    num_used = 0
    for slot in range(is_used.shape[0]):
        num_used += is_used[slot]
    if num_used + num_free != is_used.shape[0]:
        return False
    for i in range(num_free):
        if free[i] < 0 or free[i] >= is_used.shape[0] or is_used[free[i]]:
            return False
        is_used[free[i]] = 1
    return True
