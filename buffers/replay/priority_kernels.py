"""Compiled sum tree: priorities at the leaves, sums above, sixteen children to a node.

A tree is one array float64 of levels, leaves first, each padded with zeros to whole nodes; `starts`
int64 (L,) says where each level begins. A node is always computed anew from its children, never
changed by a difference, so nothing drifts. Levels are handled one after the other for the whole
batch, so that waits for memory overlap.

The kernels that are called from Python keep the interpreter's lock, so that no other thread changes
the tree meanwhile.
"""

from __future__ import annotations

import numpy as np

from buffers.core.compiling import njit
from buffers.core.kernels import prefetch, random_word, unit_float
from buffers.replay import indexing as at

__all__ = [
    "FAN_OUT",
    "check_update",
    "draw_leaves",
    "insert_newest",
    "set_leaves",
    "set_newest",
    "set_range",
]

FAN_OUT = 16


@njit(nogil=True, cache=True, inline="always")
def sum_node(rows, r):
    """Sum of row r of float64 (R, 16); written out so that it becomes vector additions."""
    a = (rows[r, 0] + rows[r, 4]) + (rows[r, 8] + rows[r, 12])
    b = (rows[r, 1] + rows[r, 5]) + (rows[r, 9] + rows[r, 13])
    c = (rows[r, 2] + rows[r, 6]) + (rows[r, 10] + rows[r, 14])
    d = (rows[r, 3] + rows[r, 7]) + (rows[r, 11] + rows[r, 15])
    return (a + b) + (c + d)


@njit(nogil=True, cache=True)
def nodes_of(tree):
    """The tree as rows of sixteen children; its last word, the sum of all, is in none."""
    return tree[: tree.shape[0] - 1].reshape(-1, 16)


@njit(cache=True)
def set_leaves(tree, starts, leaves, values, nodes):
    """Write values float64 (K,) to leaves int64 (K,), the last of equal ones; refresh the sums.

    nodes int64 (K,) is scratch memory. What does not change costs nothing further up, and
    neighbours with the same parent refresh it once, so sorted leaves are quickest.
    """
    rows, count = nodes_of(tree), 0
    for i in range(leaves.shape[0]):
        leaf = leaves[i]
        if tree[leaf] != values[i]:
            tree[leaf] = values[i]
            nodes[count] = leaf
            count += 1
    for level in range(1, starts.shape[0]):
        below, here = starts[level - 1] >> 4, starts[level]
        kept, before = 0, -1
        for i in range(count):
            node = nodes[i] >> 4
            if node != before:
                tree[here + node] = sum_node(rows, below + node)
                nodes[kept] = node
                kept += 1
                before = node
        count = kept


@njit(nogil=True, cache=True)
def set_range(tree, starts, begin, stop, value):
    """Write one value to leaves begin .. stop - 1, at least one; refresh the sums."""
    for leaf in range(begin, stop):
        tree[leaf] = value
    rows, first, last = nodes_of(tree), begin, stop - 1
    for level in range(1, starts.shape[0]):
        below, here = starts[level - 1] >> 4, starts[level]
        first, last = first >> 4, last >> 4
        for node in range(first, last + 1):
            tree[here + node] = sum_node(rows, below + node)


@njit(nogil=True, cache=True)
def set_newest(tree, starts, capacity, end, count, value):
    """Write one value to the newest `count` leaves of a ring whose next place is `end`."""
    if count >= capacity:
        set_range(tree, starts, 0, capacity, value)
    elif count > end:
        set_range(tree, starts, capacity - (count - end), capacity, value)
        if end:
            set_range(tree, starts, 0, end, value)
    elif count:
        set_range(tree, starts, end - count, end, value)


@njit(nogil=True, cache=True, inline="always")
def sum_four(tree, begin):
    """Sum of four values."""
    return (tree[begin] + tree[begin + 1]) + (tree[begin + 2] + tree[begin + 3])


@njit(nogil=True, cache=True, inline="always")
def choose(mass, a, b, c, d):
    """Which of four values covers the point `mass` if they lie end to end, and where it begins.

    Never one that is 0, even where rounding leads past the last that is not; one of them must be.
    """
    second, third, fourth = a, a + b, (a + b) + c
    chosen, begin = (1, second) if mass >= second else (0, 0.0)
    chosen, begin = (2, third) if mass >= third else (chosen, begin)
    chosen, begin = (3, fourth) if mass >= fourth else (chosen, begin)
    last, its_begin = (1, second) if b > 0.0 else (0, 0.0)
    last, its_begin = (2, third) if c > 0.0 else (last, its_begin)
    last, its_begin = (3, fourth) if d > 0.0 else (last, its_begin)
    return (last, its_begin) if last < chosen else (chosen, begin)


@njit(cache=True)
def insert_newest(tree, starts, state, inserted, value):
    """Write one value to the leaves of all rows added since the last call, at most all leaves.

    Args:
        tree, starts: See above.
        state: int64 of a buffer with one ring, see `indexing`.
        inserted: int64 (1,), the number of rows added ever until the last call; brought up to date.
        value: See above.
    """
    count, inserted[0] = state[at.ADDED] - inserted[0], state[at.ADDED]
    if count > 0:
        set_newest(tree, starts, state[at.CAPACITY], state[state[at.POINTERS]], count, value)


@njit(cache=True)
def draw_leaves(tree, starts, generator, leaves, masses, ratios):
    """Draw leaves with probability proportional to their values, one from each B-th of the sum.

    Args:
        tree, starts: See above; the sum must be positive.
        generator: uint64 (2,), see `core.kernels`; moves on.
        leaves: int64 (B,), written; leaves with value 0 are never drawn.
        masses: float64 (B,), scratch memory.
        ratios: float32 (B,), written: the smallest value drawn over the value drawn.
    """
    size, top = leaves.shape[0], starts.shape[0] - 1
    key, counter = generator[0], generator[1]
    share = tree[starts[top]] / size
    for i in range(size):
        word = random_word(key, np.add(counter, np.uint64(i)))
        masses[i] = (i + unit_float(word)) * share
        leaves[i] = 0
    generator[1] = np.add(counter, np.uint64(size))
    for level in range(top - 1, -1, -1):
        here, below = starts[level], starts[max(level - 1, 0)]
        for i in range(size):
            begin = here + 16 * leaves[i]
            a, b = sum_four(tree, begin), sum_four(tree, begin + 4)
            c, d = sum_four(tree, begin + 8), sum_four(tree, begin + 12)
            quarter, passed = choose(masses[i], a, b, c, d)
            rest, begin = masses[i] - passed, begin + 4 * quarter
            child, passed = choose(
                rest, tree[begin], tree[begin + 1], tree[begin + 2], tree[begin + 3]
            )
            masses[i] = rest - passed
            leaves[i] = 16 * leaves[i] + 4 * quarter + child
            if level > 0:
                prefetch(tree, 8 * (below + 16 * leaves[i]))
                prefetch(tree, 8 * (below + 16 * leaves[i]) + 64)
    smallest = tree[leaves[0]]
    for i in range(size):
        smallest = min(smallest, tree[leaves[i]])
    for i in range(size):
        ratios[i] = np.float32(smallest / tree[leaves[i]])


@njit(cache=True)
def check_update(leaves, priorities, count, bound, largest, rows, values):
    """Look for a leaf not in 0 .. count - 1, or a priority not in 0 .. bound.

    Args:
        leaves: int64 (K,).
        priorities: float64 (K,).
        count: See above.
        bound: See above.
        largest: float64 (1,), raised to the largest priority if all is well.
        rows: int64 (K,), written: the leaves as they were checked. Another thread may change those
            that were given.
        values: float64 (K,), written: the priorities as they were checked.

    Returns:
        The index of the first that is wrong, or -1.
    """
    found = largest[0]
    for i in range(leaves.shape[0]):
        rows[i], values[i] = leaves[i], priorities[i]
        if not (0 <= rows[i] < count and 0.0 <= values[i] <= bound):
            return i
        found = max(found, values[i])
    largest[0] = found
    return -1
