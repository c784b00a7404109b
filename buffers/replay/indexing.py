"""Compiled ring arithmetic: which row a transition takes, what it follows, which rows are live.

All of it works on one array `state` int64: constants of the buffer, then what changes, at fixed
places (the names below), then arrays whose places are named by constants. A buffer has R rings of
C rows; row k of ring r is row r * C + k of the table. A *number* counts the rows of a ring from the
first ever added, so a row with number a is alive until number a + C is added.
"""

from __future__ import annotations

from buffers.core.compiling import njit

__all__ = [
    "follow",
    "ids_fit",
    "live_row",
    "mark_cut",
    "skip_rows",
    "take_row",
    "take_rows",
    "tally",
]

CAPACITY, NUM_RINGS, NUM_ENVS = 0, 1, 2
LINK_AT, REWARD_AT, OVER_AT, ENV_AT = 3, 4, 5, 6  # byte offsets in a row, -1 if there is none
OBS_AT, NEXT_AT, ACTION_AT = 7, 8, 9
OBS_BYTES, ACTION_BYTES = 10, 11
POINTERS, TOTALS, LAST, STOPPED, CUMULATED, OCCUPIED = 12, 13, 14, 15, 16, 17  # where arrays begin
OBS_DIMS, ACTION_DIMS = 18, 19
ADDED, COUNT, IS_TALLIED, NUM_OCCUPIED, NUM_FREE = 20, 21, 22, 23, 24  # these change
HEADER = 25


@njit(nogil=True, cache=True)
def ids_fit(state, env_ids, num_rows):
    """Whether env_ids int64 (K,) are one per row and in range, or none and rows make whole steps.

    Without environments (NUM_ENVS 0) any ids will do.
    """
    num_envs = state[NUM_ENVS]
    if env_ids.shape[0] == 0:
        return num_envs == 0 or num_rows % num_envs == 0
    if env_ids.shape[0] != num_rows:
        return False
    if num_envs:
        for i in range(num_rows):
            if env_ids[i] < 0 or env_ids[i] >= num_envs:
                return False
    return True


@njit(nogil=True, cache=True)
def skip_rows(state, num_rows):
    """Pass over the rows of an add that would be overwritten by the same add; return their number.

    Only with a single ring; with one per env, rows are written in order and the last stay.
    """
    skipped = num_rows - state[CAPACITY]
    if state[NUM_RINGS] > 1 or skipped <= 0:
        return 0
    state[state[TOTALS]] += skipped
    state[state[POINTERS]] = (state[state[POINTERS]] + skipped) % state[CAPACITY]
    state[ADDED] += skipped
    state[COUNT] = min(state[state[TOTALS]], state[CAPACITY])
    return skipped


@njit(nogil=True, cache=True)
def take_row(state, ring):
    """Give the next row of a ring to a new transition; return the row of the table."""
    capacity, at = state[CAPACITY], state[POINTERS] + ring
    pointer = state[at]
    state[at] = pointer + 1 if pointer + 1 < capacity else 0
    if state[state[TOTALS] + ring] < capacity:
        state[COUNT] += 1
        state[IS_TALLIED] = 0
    state[state[TOTALS] + ring] += 1
    state[ADDED] += 1
    return ring * capacity + pointer


@njit(nogil=True, cache=True)
def take_rows(state, count):
    """The same for `count` transitions at once, at most the capacity, if there is one ring."""
    capacity, at = state[CAPACITY], state[POINTERS]
    pointer, total = state[at], state[state[TOTALS]]
    state[at] = (pointer + count) % capacity
    state[state[TOTALS]] = total + count
    state[COUNT] = min(total + count, capacity)
    state[ADDED] += count
    state[IS_TALLIED] = 0
    return pointer


@njit(nogil=True, cache=True)
def follow(state, ring, env, row, is_over):
    """Note that `row`, just taken, is the newest of `env`, and what it follows.

    Returns:
        The row before it in the same env, or -1 if that is not alive; and whether the two lie in
        one episode.
    """
    capacity = state[CAPACITY]
    number = state[state[TOTALS] + ring] - 1
    before = state[state[LAST] + env] - 1
    is_joined = state[state[STOPPED] + env] == 0
    state[state[LAST] + env] = number + 1
    state[state[STOPPED] + env] = is_over
    distance = number - before
    if before < 0 or distance >= capacity:
        return -1, False
    row_before = row - distance
    if row_before < ring * capacity:
        row_before += capacity
    return row_before, is_joined


@njit(nogil=True, cache=True)
def mark_cut(state, env_ids):
    """Let the next rows of env_ids int64 (K,) begin new episodes."""
    for i in range(env_ids.shape[0]):
        state[state[STOPPED] + env_ids[i]] = 1


@njit(nogil=True, cache=True)
def tally(state):
    """Refresh cumulated counts of the rings and the list of those that are not empty."""
    occupied, cumulated = 0, 0
    for ring in range(state[NUM_RINGS]):
        count = min(state[state[TOTALS] + ring], state[CAPACITY])
        cumulated += count
        state[state[CUMULATED] + ring] = cumulated
        if count:
            state[state[OCCUPIED] + occupied] = ring
            occupied += 1
    state[NUM_OCCUPIED] = occupied
    state[IS_TALLIED] = 1


@njit(nogil=True, cache=True)
def live_row(state, number):
    """Row of the table that is number 0 .. COUNT - 1 among the live ones; `tally` must be fresh."""
    capacity = state[CAPACITY]
    if state[COUNT] == capacity * state[NUM_RINGS] or state[NUM_RINGS] == 1:
        return number
    low, high = 0, state[NUM_RINGS] - 1  # the first ring whose cumulated count exceeds number
    while low < high:
        middle = (low + high) // 2
        if state[state[CUMULATED] + middle] > number:
            high = middle
        else:
            low = middle + 1
    before = state[state[CUMULATED] + low - 1] if low else 0
    return low * capacity + number - before
