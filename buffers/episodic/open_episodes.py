"""Episodes of running environments, kept in a pool of rows until they are over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from buffers.core.compiling import njit
from buffers.core.errors import BufferMisuseError
from buffers.core.memory import allocation
from buffers.core.rows import row_views
from buffers.episodic.layout import HEADER_BYTES, HEADER_WORDS
from buffers.episodic.storage import EpisodicStorage

__all__ = ["OpenEpisodes"]

_CHUNK_ROWS = 4096  # staged at once, unless one episode is longer


class OpenEpisodes:
    """One open episode per environment, its steps linked from the last to the first.

    The pool holds the steps of all open episodes together and doubles when it is full, so an env
    with long episodes takes no memory for the others. Rows that become free are used again.

    Args:
        num_envs: N.
        storage: Where episodes go when they are over.

    Attributes:
        num_envs: N.
        lengths: int64 (N,), steps of the open episodes.
        fields: Arrays over the fields of the rows `add` takes, by path.
        next_fields: The same for the observations after the steps.
    """

    def __init__(self, num_envs: int, storage: EpisodicStorage):
        layout = storage.layout.row
        self.num_envs = num_envs
        self._storage = storage
        needed = num_envs * (8 * (2 * layout.obs_words + layout.num_words) + 12)
        what = f"{num_envs} open episodes"
        with allocation(what, needed, torch.device("cpu"), "use fewer envs"):
            self.lengths = np.zeros(num_envs, np.int64)
            self._last_rows = np.full(num_envs, -1, np.int32)
            self._last_next_obs = np.zeros((num_envs, layout.obs_words), np.int64)
            self._incoming = np.zeros((num_envs, layout.num_words), np.int64)
            self._incoming_next = np.zeros((num_envs, layout.obs_words), np.int64)
        self.fields = row_views(self._incoming, layout.fields)
        obs_fields = {path: layout.fields[path] for path in layout.obs}
        self.next_fields = row_views(self._incoming_next, obs_fields, skip=HEADER_BYTES)
        self._pool = np.zeros((0, layout.num_words), np.int64)
        self._previous = np.zeros(0, np.int32)
        self._free = np.zeros(0, np.int32)
        self._num_free = np.zeros(1, np.int64)  # written by the kernels: no interrupt loses it

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        arrays = (
            self.lengths,
            self._last_rows,
            self._last_next_obs,
            self._incoming,
            self._incoming_next,
            self._pool,
            self._previous,
            self._free,
        )
        return sum(array.nbytes for array in arrays)

    @property
    def _chains(self) -> tuple[np.ndarray, ...]:
        """The rows of all open episodes and how they are linked, as kernels take them."""
        return (
            self._free,
            self._num_free,
            self._pool,
            self._previous,
            self._last_rows,
            self.lengths,
            self._last_next_obs,
        )

    def check_continuity(self, env_ids: np.ndarray) -> None:
        """Raise BufferMisuseError if an env's `obs` is not its last `next_obs`.

        Args:
            env_ids: int64 (B,), whose rows were written to `fields`.
        """
        obs = self._incoming[: len(env_ids), HEADER_WORDS:]
        obs = obs[:, : self._last_next_obs.shape[1]]
        position = int(first_break(env_ids, self.lengths, obs, self._last_next_obs))
        if position >= 0:
            env_id = env_ids[position]
            raise BufferMisuseError(
                f"obs of env {env_id} differs from its last next_obs, but its episode is not over; "
                f"if it was reset, call cut_episodes([{env_id}]) first"
            )

    def prepare(self, env_ids: np.ndarray, over: np.ndarray) -> np.ndarray:
        """See to the memory for one more step of some envs; return whose episodes end then.

        Args:
            env_ids: int64 (B,).
            over: bool (B,), whether the episode ends.

        Returns:
            int64 (E,), the ids of the envs to `close` after `append`. An episode as long as the
            capacity is among them: it is stored in pieces.

        Raises:
            BufferMemoryError: Memory is missing; nothing was changed.
        """
        lengths = self.lengths[env_ids] + 1
        ends = over | (lengths >= self._storage.layout.capacity)
        if len(env_ids) > self._num_free[0]:
            self._grow(len(env_ids))
        if ends.any():
            self._reserve_staging(lengths[ends])
        return env_ids[ends]

    def append(self, env_ids: np.ndarray) -> None:
        """Append the rows in `fields` and `next_fields` to the open episodes of some envs."""
        count = len(env_ids)
        link_steps(env_ids, self._incoming[:count], self._incoming_next[:count], *self._chains)

    def close(self, env_ids: np.ndarray) -> None:
        """Move the open episodes of some envs, with one step at least each, to the storage."""
        lengths = self.lengths[env_ids]
        self._reserve_staging(lengths)
        for part in _split(lengths + 1, _CHUNK_ROWS):
            self._storage.reserve(0)  # waits until the last block has left
            staging = self._storage.staging
            collect_episodes(env_ids[part], HEADER_WORDS, *self._chains, staging)
            self._storage.insert(lengths[part])

    def _reserve_staging(self, lengths: np.ndarray) -> None:
        together = min(int(lengths.sum()) + len(lengths), _CHUNK_ROWS)
        self._storage.reserve(max(together, int(lengths.max(initial=0)) + 1))

    def _grow(self, needed: int) -> None:
        """Double the pool at least; the rows it has stay where they are."""
        old = len(self._pool)
        size = old + max(old, needed, 256)
        with allocation(
            f"a pool of {size} steps of open episodes",
            8 * size * (self._pool.shape[1] + 1),
            torch.device("cpu"),
            "end episodes earlier or use fewer envs",
        ):
            pool = np.zeros((size, self._pool.shape[1]), np.int64)
            previous, free = np.full(size, -1, np.int32), np.zeros(size, np.int32)
        pool[:old], previous[:old] = self._pool, self._previous
        count = int(self._num_free[0])
        free[:count] = self._free[:count]
        free[count : count + size - old] = np.arange(size - 1, old - 1, -1)
        num_free = np.array([count + size - old])
        self._pool, self._previous, self._free, self._num_free = pool, previous, free, num_free

    def snapshot(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the open episodes: lengths int64 (N,), and rows as `restore` takes them."""
        env_ids = np.flatnonzero(self.lengths)
        rows = np.zeros(
            (int(self.lengths.sum()) + len(env_ids), self._pool.shape[1]), np.int64
        )  # fmt: skip
        collect_episodes(  # copies: nothing is taken out
            env_ids,
            HEADER_WORDS,
            np.empty(len(rows), np.int32),
            np.zeros(1, np.int64),
            self._pool,
            self._previous,
            self._last_rows.copy(),
            self.lengths.copy(),
            self._last_next_obs,
            rows,
        )
        return self.lengths.copy(), rows

    def restore(self, lengths: np.ndarray, rows: np.ndarray) -> None:
        """Replace the open episodes.

        Args:
            lengths: int64 (N,).
            rows: int64 (K, W), env after env with an open episode: its steps, then a row with the
                last observation.
        """
        missing = int(lengths.sum()) - len(self._pool)
        if missing > 0:
            self._grow(missing)
        self.lengths[:] = 0  # until all is there
        last_rows = np.full(self.num_envs, -1, np.int32)
        begin = filled = 0
        for env_id in np.flatnonzero(lengths):
            stop = begin + int(lengths[env_id])
            chosen = slice(filled, filled + stop - begin)
            self._pool[chosen] = rows[begin:stop]
            self._previous[chosen] = np.arange(chosen.start - 1, chosen.stop - 1)
            self._previous[filled] = -1
            last_rows[env_id] = chosen.stop - 1
            last = rows[stop, HEADER_WORDS:]
            self._last_next_obs[env_id] = last[: self._last_next_obs.shape[1]]
            begin, filled = stop + 1, chosen.stop
        num_free, free = np.array([len(self._pool) - filled]), np.zeros(len(self._pool), np.int32)
        free[: len(self._pool) - filled] = np.arange(len(self._pool) - 1, filled - 1, -1)
        lengths = lengths.astype(np.int64)
        self._last_rows, self._free, self._num_free = last_rows, free, num_free
        self.lengths = lengths


def _split(sizes: np.ndarray, limit: int) -> Iterator[slice]:
    """Cut into runs that sum up to the limit at most, or hold a single larger one.

    >>> list(_split(np.array([3, 4, 9, 2]), 7))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    ends = np.cumsum(sizes)
    begin: Any = 0
    while begin < len(sizes):
        before = ends[begin - 1] if begin else 0
        stop = max(begin + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield slice(begin, stop)
        begin = stop


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
def copy_row(target, row, source, source_row):
    """Copy a row; Numba's assignment of rows takes two seconds to compile for its message alone."""
    for k in range(target.shape[1]):
        target[row, k] = source[source_row, k]


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
        copy_row(pool, row, rows, b)
        previous[row] = last_rows[env_id]
        last_rows[env_id] = row
        lengths[env_id] += 1
        copy_row(last_next_obs, env_id, next_obs, b)


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
            copy_row(out, begin + t, pool, row)
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
