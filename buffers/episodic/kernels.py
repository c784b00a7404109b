"""Compiled bookkeeping of episodes in a ring: bounds, lists of possible starts, eviction.

The tables, all of them rings:

- rows int64 (R, W): one per step, one more per episode for its last observation. The first two
  words are four int32: room (how far the bound is), step, remaining (steps to the end of the
  episode, this one included), bound (step + room).
- episodes int64 (M, 4): first row, length, first entry in `starts`, number of entries.
- starts int32 (C,): rows of the steps with room, episode after episode.
- drawable int32 (M,): slots of the episodes that have such steps.
- counters int64 (9,): first and number of each of them, by the names below; the first episode is
  counted on for ever, and its slot is that number modulo M.
"""

from __future__ import annotations

from buffers.core.compiling import njit

__all__ = [
    "COUNTERS",
    "collect_episodes",
    "count_windows",
    "evict",
    "file_episodes",
    "fill_rooms",
    "first_break",
    "link_steps",
]

COUNTERS = (
    "first_row",
    "num_rows",
    "first_episode",
    "num_episodes",
    "num_steps",
    "first_start",
    "num_starts",
    "first_drawable",
    "num_drawable",
)
FIRST_ROW, NUM_ROWS, FIRST_EPISODE, NUM_EPISODES, NUM_STEPS = 0, 1, 2, 3, 4
FIRST_START, NUM_STARTS, FIRST_DRAWABLE, NUM_DRAWABLE = 5, 6, 7, 8


@njit(nogil=True, cache=True)
def fill_rooms(boundaries, rooms):
    """Write how many steps each step of an episode is away from its bound, in one backward pass.

    The bound of step t is the second next boundary at or after t, else the next, else the last
    step.

    Args:
        boundaries: bool (T,).
        rooms: int32 (T,), written: bound - t.
    """
    last = boundaries.shape[0] - 1
    following, second = -1, -1
    for t in range(last, -1, -1):
        if boundaries[t]:
            second = following
            following = t
        bound = last
        if second >= 0:
            bound = second
        elif following >= 0:
            bound = following
        rooms[t] = bound - t


@njit(nogil=True, cache=True)
def evict(counters, episodes, starts, drawable, num_steps, num_episodes):
    """Drop the oldest episodes until so many steps and episodes more fit."""
    capacity, max_episodes, max_rows = (
        starts.shape[0],
        episodes.shape[0],
        starts.shape[0] + episodes.shape[0],
    )
    while counters[NUM_EPISODES] > 0 and (
        counters[NUM_STEPS] + num_steps > capacity
        or counters[NUM_EPISODES] + num_episodes > max_episodes
    ):
        slot = counters[FIRST_EPISODE] % max_episodes
        length, num_starts = episodes[slot, 1], episodes[slot, 3]
        counters[FIRST_ROW] = (counters[FIRST_ROW] + length + 1) % max_rows
        counters[NUM_ROWS] -= length + 1
        counters[FIRST_EPISODE] += 1
        counters[NUM_EPISODES] -= 1
        counters[NUM_STEPS] -= length
        counters[FIRST_START] = (counters[FIRST_START] + num_starts) % capacity
        counters[NUM_STARTS] -= num_starts
        if num_starts > 0:
            counters[FIRST_DRAWABLE] = (counters[FIRST_DRAWABLE] + 1) % max_episodes
            counters[NUM_DRAWABLE] -= 1


@njit(nogil=True, cache=True)
def file_episodes(
    counters, episodes, starts, drawable, lengths, boundaries, rooms, steps, remaining, bounds
):  # fmt: skip
    """Enter episodes at the end of the tables, for which there is space, and fill their headers.

    Args:
        counters, episodes, starts, drawable: The tables.
        lengths: int64 (E,), steps of each; each takes one row more.
        boundaries: bool (K,), of the rows that are about to be copied to the end of the ring.
        rooms, steps, remaining, bounds: int32 (K,), the headers of these rows, written.
    """
    capacity, max_episodes = starts.shape[0], episodes.shape[0]
    max_rows = capacity + max_episodes
    begin = 0
    for e in range(lengths.shape[0]):
        length = lengths[e]
        row = (counters[FIRST_ROW] + counters[NUM_ROWS]) % max_rows
        slot = (counters[FIRST_EPISODE] + counters[NUM_EPISODES]) % max_episodes
        start = (counters[FIRST_START] + counters[NUM_STARTS]) % capacity
        fill_rooms(boundaries[begin : begin + length], rooms[begin : begin + length])
        rooms[begin + length] = 0
        num_starts = 0
        for t in range(length + 1):
            steps[begin + t] = t
            remaining[begin + t] = length - t
            bounds[begin + t] = t + rooms[begin + t]
            if rooms[begin + t] > 0:
                starts[(start + num_starts) % capacity] = (row + t) % max_rows
                num_starts += 1
        episodes[slot, 0] = row
        episodes[slot, 1] = length
        episodes[slot, 2] = start
        episodes[slot, 3] = num_starts
        if num_starts > 0:
            last = (counters[FIRST_DRAWABLE] + counters[NUM_DRAWABLE]) % max_episodes
            drawable[last] = slot
            counters[NUM_DRAWABLE] += 1
        counters[NUM_ROWS] += length + 1
        counters[NUM_EPISODES] += 1
        counters[NUM_STEPS] += length
        counters[NUM_STARTS] += num_starts
        begin += length + 1


@njit(nogil=True, cache=True)
def count_windows(counters, episodes, sequence_length, slots, ends):
    """List the episodes that have windows of a length, and count these.

    Args:
        counters, episodes: The tables.
        sequence_length: Steps of a window.
        slots: int64 (M,), written: the episodes with a window.
        ends: int64 (M,), written: the number of windows in these and all listed before.

    Returns:
        How many episodes were listed.
    """
    count, total = 0, 0
    for e in range(counters[NUM_EPISODES]):
        slot = (counters[FIRST_EPISODE] + e) % episodes.shape[0]
        windows = episodes[slot, 1] - sequence_length + 1
        if windows > 0:
            total += windows
            slots[count] = slot
            ends[count] = total
            count += 1
    return count


@njit(nogil=True, cache=True)
def first_break(env_ids, lengths, obs, last_next_obs):
    """Position in env_ids int64 (B,) of the first env that does not go on where it was, or -1.

    Args:
        env_ids: int64 (B,).
        lengths: int64 (N,), steps of the open episodes.
        obs: int64 (B, W), observations before the new steps.
        last_next_obs: int64 (N, W), observations after the last steps.
    """
    for b in range(env_ids.shape[0]):
        env_id = env_ids[b]
        if lengths[env_id] > 0:
            for w in range(obs.shape[1]):
                if obs[b, w] != last_next_obs[env_id, w]:
                    return b
    return -1


@njit(nogil=True, cache=True)
def link_steps(
    env_ids, rows, next_obs, free, num_free, pool, previous, last_rows, lengths, last_next_obs
):  # fmt: skip
    """Append one step to the open episode of each of some envs.

    Args:
        env_ids: int64 (B,), distinct.
        rows: int64 (B, W), the steps.
        next_obs: int64 (B, V), the observations after them.
        free: int32 (P,), a stack of rows of the pool without use.
        num_free: int64 (1,), how many these are, at least B; brought up to date.
        pool: int64 (P, W), rows of open episodes.
        previous: int32 (P,), the row of the step before, -1 for the first.
        last_rows: int32 (N,), the last row of each env, -1 for none.
        lengths: int64 (N,), steps of each env's open episode.
        last_next_obs: int64 (N, V).
    """
    for b in range(env_ids.shape[0]):
        env_id = env_ids[b]
        num_free[0] -= 1
        row = free[num_free[0]]
        pool[row] = rows[b]
        previous[row] = last_rows[env_id]
        last_rows[env_id] = row
        lengths[env_id] += 1
        last_next_obs[env_id] = next_obs[b]


@njit(nogil=True, cache=True)
def collect_episodes(
    env_ids, obs_start, free, num_free, pool, previous, last_rows, lengths, last_next_obs, out
):  # fmt: skip
    """Take the open episodes of some envs out of the pool, each with its last observation.

    Args:
        env_ids: int64 (B,), distinct, with at least one step each.
        obs_start: Word of a row where the observation begins.
        free, num_free, pool, previous, last_rows, lengths, last_next_obs: As in `link_steps`.
        out: int64 (K, W), written: K is the number of steps and episodes.
    """
    begin = 0
    for b in range(env_ids.shape[0]):
        env_id = env_ids[b]
        length = lengths[env_id]
        row = last_rows[env_id]
        for t in range(length - 1, -1, -1):
            out[begin + t] = pool[row]
            free[num_free[0]] = row
            num_free[0] += 1
            row = previous[row]
        last = begin + length
        out[last] = 0
        for w in range(last_next_obs.shape[1]):
            out[last, obs_start + w] = last_next_obs[env_id, w]
        last_rows[env_id] = -1
        lengths[env_id] = 0
        begin = last + 1
