"""Compiled writing of transitions into packed rows."""

from __future__ import annotations

import numpy as np

from buffers.core.compiling import njit
from buffers.core.kernels import copy_field, prefetch_to_write
from buffers.replay import indexing as at
from buffers.replay.indexing import follow, ids_fit, skip_rows, take_row, take_rows

__all__ = [
    "add_rows",
    "keep_successors",
    "place_rows",
    "scatter_field",
    "write_links",
]


_BYTES_AHEAD = 6144


@njit(nogil=True, cache=True)
def shape_fits(shape, num_rows, state, first):
    """Whether a shape is (num_rows, *dims), with the dims in `state` from `first` on."""
    fits = shape[0] == num_rows
    for i in range(len(shape) - 1):
        fits = fits and shape[i + 1] == state[first + i]
    return fits


@njit(nogil=True, cache=True)
def all_finite(rewards):
    """Whether float (K,) have no NaN and nothing that is infinite as float32."""
    total = np.float32(0.0)
    for i in range(rewards.shape[0]):
        total += np.float32(rewards[i]) * np.float32(0.0)
    return total == np.float32(0.0)


@njit(cache=True)
def add_rows(
    table, state, busy, env_ids, obs, next_obs, actions, rewards, terminations, truncations
):  # fmt: skip
    """Check and write transitions with a single array as observation, both observations stored.

    It keeps the interpreter's lock, so that no other thread adds or draws meanwhile.

    Args:
        table: uint8 (rows, stride), written.
        state: int64, see `indexing`; written.
        busy: int64 (1,), the flag of the buffer's `Guard`; nothing is written while it is set.
        env_ids: int64 (K,), or (0,) for whole steps.
        obs, next_obs: (K, *obs_shape), of the dtype of the table, like actions (K, *action_shape).
        rewards: float (K,); stored as float32.
        terminations, truncations: bool (K,).

    Returns:
        Whether everything fits; otherwise nothing was written.
    """
    num_rows = rewards.shape[0]
    fits = (
        busy[0] == 0
        and shape_fits(obs.shape, num_rows, state, state[at.OBS_DIMS])
        and shape_fits(next_obs.shape, num_rows, state, state[at.OBS_DIMS])
        and shape_fits(actions.shape, num_rows, state, state[at.ACTION_DIMS])
        and terminations.shape[0] == num_rows
        and truncations.shape[0] == num_rows
        and ids_fit(state, env_ids, num_rows)
        and all_finite(rewards)
    )
    if not fits:
        return False
    obs_bytes, action_bytes = state[at.OBS_BYTES], state[at.ACTION_BYTES]
    stride, num_envs, num_rings = table.shape[1], state[at.NUM_ENVS], state[at.NUM_RINGS]
    link_at, env_at, over_at = state[at.LINK_AT], state[at.ENV_AT], state[at.OVER_AT]
    reward_word = state[at.REWARD_AT] // 4
    next_at, action_at = state[at.NEXT_AT], state[at.ACTION_AT]
    floats, words = table.view(np.float32), table.view(np.int32)
    # What is written some rows later is asked for now, as writing it has to wait for it as well.
    ahead = _BYTES_AHEAD // stride * stride * (state[at.CAPACITY] if num_rings > 1 else 1)
    end = table.size - stride if ahead else -1
    first = skip_rows(state, num_rows)
    at_once = num_rings == 1 and link_at < 0  # no row needs to know another
    following = take_rows(state, num_rows - first) if at_once else 0
    step, last_env = first % num_envs if num_envs else 0, max(num_envs - 1, 0)
    for i in range(first, num_rows):
        # Limited, as another thread may have changed it since it was checked.
        env = min(max(env_ids[i], 0), last_env) if env_ids.shape[0] else step
        step = step + 1 if step + 1 < num_envs else 0
        ring = env if num_rings > 1 else 0
        if at_once:
            row = following
            following = row + 1 if row + 1 < state[at.CAPACITY] else 0
        else:
            row = take_row(state, ring)
        start = row * stride
        if start + ahead <= end:
            for offset in range(start + ahead, start + ahead + stride, 64):
                prefetch_to_write(table, offset)
        copy_field(table, start, obs, i * obs_bytes, obs_bytes)
        copy_field(table, start + next_at, next_obs, i * obs_bytes, obs_bytes)
        copy_field(table, start + action_at, actions, i * action_bytes, action_bytes)
        floats[row, reward_word] = np.float32(rewards[i])
        table[row, over_at] = terminations[i]
        table[row, over_at + 1] = truncations[i]
        if env_at >= 0:
            words[row, env_at // 4] = env
        if link_at >= 0:
            words[row, link_at // 4] = 0
            before, is_joined = follow(state, ring, env, row, terminations[i] | truncations[i])
            if before >= 0 and is_joined:
                words[before, link_at // 4] = row + 1
    return True


@njit(cache=True)
def place_rows(state, env_ids, is_over, rows, befores, envs):
    """Take rows for transitions that are written field by field.

    Args:
        state: int64, see `indexing`; written.
        env_ids: int64 (K,) in range, or (0,) for whole steps.
        is_over: bool (K,), the episode ends with this row.
        rows: int64 (K,), written: the row of the table, or -1 for rows overwritten at once.
        befores: int64 (K,), written: the row that gets a link to this one, or -1. If the two are
            not in one episode it is -2 - row instead.
        envs: int64 (K,), written.
    """
    num_envs, num_rings = state[at.NUM_ENVS], state[at.NUM_RINGS]
    first = skip_rows(state, rows.shape[0])
    step = first % num_envs if num_envs else 0
    rows[:first] = -1
    befores[:first] = -1
    envs[:first] = 0
    for i in range(first, rows.shape[0]):
        env = env_ids[i] if env_ids.shape[0] else step
        step = step + 1 if step + 1 < num_envs else 0
        ring = env if num_rings > 1 else 0
        row = take_row(state, ring)
        rows[i], befores[i], envs[i] = row, -1, env
        if state[at.LINK_AT] >= 0:
            before, is_joined = follow(state, ring, env, row, is_over[i])
            if before >= 0:
                befores[i] = before if is_joined else -2 - before


@njit(nogil=True, cache=True)
def scatter_field(table, rows, source, offset, count):
    """Copy item i of source uint8 (K * count,) to byte `offset` of row rows[i] int64 (K,)."""
    stride = table.shape[1]
    for i in range(rows.shape[0]):
        if rows[i] >= 0:
            copy_field(table, rows[i] * stride + offset, source, i * count, count)


@njit(nogil=True, cache=True)
def write_links(table, rows, befores, codes, offset):
    """Clear the codes of rows int64 (K,) and give befores[i] the code codes[i], in this order.

    Codes are int32 at byte `offset` of a row. Negative rows and befores are passed over.
    """
    words = table.view(np.int32)
    for i in range(rows.shape[0]):
        if rows[i] >= 0:
            words[rows[i], offset // 4] = 0
        if befores[i] >= 0:
            words[befores[i], offset // 4] = codes[i]


@njit(nogil=True, cache=True)
def same_bytes(left, left_row, right, right_row):
    """Whether row left_row of uint8 (A, S) equals row right_row of uint8 (B, S)."""
    difference = np.uint8(0)
    for k in range(left.shape[1]):
        difference |= left[left_row, k] ^ right[right_row, k]
    return difference == 0


@njit(cache=True)
def keep_successors(
    state, rows, befores, envs, obs, next_obs, slots, pending, finals, free, codes
):  # fmt: skip
    """Decide where each row finds its next observation, if observations are stored once.

    A row's code is 0 while it is the newest of its env (the next observation is in `pending`), row
    + 1 of its successor if that begins with the same bytes, else -1 - slot in `finals`.

    Args:
        state: int64, see `indexing`; its count of free slots is written.
        rows, befores, envs: int64 (K,), from `place_rows`.
        obs, next_obs: uint8 (K, S), packed observations.
        slots: int32 (rows,), written: for each row of the table its slot + 1, or 0.
        pending: uint8 (N, S), written: the newest next observation of each env.
        finals: uint8 (F, S), written.
        free: int64 (F,), the stack of free slots; written. At least K must be free.
        codes: int32 (K,), written: the code of row befores[i].
    """
    num_free = state[at.NUM_FREE]
    for i in range(rows.shape[0]):
        row, env = rows[i], envs[i]
        codes[i] = 0
        if row < 0:
            continue
        if slots[row] > 0:  # the row that is overwritten here had one
            free[num_free] = slots[row] - 1
            num_free += 1
            slots[row] = 0
        is_joined = befores[i] >= 0
        before = befores[i] if is_joined else -2 - befores[i]
        befores[i] = before
        if before >= 0 and is_joined and same_bytes(pending, env, obs, i):
            codes[i] = row + 1
        elif before >= 0:
            num_free -= 1
            slot = free[num_free]
            finals[slot] = pending[env]
            slots[before] = slot + 1
            codes[i] = -1 - slot
        pending[env] = next_obs[i]
    state[at.NUM_FREE] = num_free
