"""Unfinished episodes of running environments, in a pool of rows."""

from __future__ import annotations

import numpy as np
import torch

from buffers.core.errors import BufferMisuseError
from buffers.core.kernels import njit
from buffers.core.memory import allocation
from buffers.core.rows import row_views
from buffers.episodic.table import EpisodeTable

__all__ = ["OpenEpisodes"]


class OpenEpisodes:
    """One open episode per environment, its steps linked from the last to the first.

    The pool holds the steps of all open episodes. It doubles when it is full, so an env with long
    episodes does not reserve memory for the others. Freed rows are reused.

    Attributes:
        num_envs: N.
        lengths: int64 (N,), steps of the open episodes.
        fields: Views of the fields of the rows to be appended next, by path.
        next_fields: Views of the observations in the rows after these, by path.
    """

    def __init__(self, num_envs: int, table: EpisodeTable):
        row = table.layout.row
        self.num_envs, self._table = num_envs, table
        needed = num_envs * (3 * row.stride + 16)
        what = f"{num_envs} open episodes"
        with allocation(what, needed, torch.device("cpu"), "use fewer envs"):
            self.lengths = np.zeros(num_envs, np.int64)
            self._last = np.full(num_envs, -1, np.int64)  # rows in the pool
            # Rows to append; rows after them, with next_obs; and of these the newest per env.
            self._new, self._after, self._newest = np.zeros((3, num_envs, row.num_words), np.int64)
        self.fields = row_views(self._new, row.fields)
        self.next_fields = row_views(self._after, {path: row.fields[path] for path in row.obs})
        self._obs_words = (row.obs_at + row.obs_bytes) // 8  # up to the end of obs
        self._pool = np.zeros((0, row.num_words), np.int64)
        self._previous, self._free = np.zeros((2, 0), np.int64)  # links; free rows

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        arrays = (self.lengths, self._last, self._new, self._after, self._newest, self._pool,
                  self._previous, self._free)  # fmt: skip
        return sum(array.nbytes for array in arrays)

    def check_continuity(self, env_ids: np.ndarray) -> None:
        """Raise BufferMisuseError if an env's `obs` differs from its last `next_obs` in a byte.

        The rows of `env_ids` int64 (B,) must have been written to `fields`.
        """
        new, words = self._new[: len(env_ids)], self._obs_words
        is_broken = (new[:, :words] != self._newest[env_ids, :words]).any(1)
        is_broken &= self.lengths[env_ids] > 0
        if is_broken.any():
            env_id = env_ids[is_broken][0]
            raise BufferMisuseError(
                f"obs of env {env_id} differs from its last next_obs, but its episode is not over; "
                f"if it was reset, call cut_episodes([{env_id}]) first"
            )

    def reserve(self, count: int) -> None:
        """Ensure memory for `count` more steps; raise BufferMemoryError if there is none."""
        old = len(self._pool)
        if count <= len(self._free):
            return
        size = old + max(old, count, 256)
        what, needed = f"a pool of {size} steps of open episodes", size * (self._new[0].nbytes + 16)
        with allocation(what, needed, torch.device("cpu"), "end episodes earlier"):
            pool = np.zeros((size, self._pool.shape[1]), np.int64)
            previous = np.full(size, -1, np.int64)
        pool[:old], previous[:old] = self._pool, self._previous
        free = np.concatenate([self._free, np.arange(size - 1, old - 1, -1)])
        self._pool, self._previous, self._free = pool, previous, free

    def append(self, env_ids: np.ndarray) -> None:
        """Append the rows in `fields` and `next_fields` to the open episodes of some envs."""
        count = len(env_ids)
        if not count:
            return
        rows = self._free[-count:]
        self._pool[rows], self._previous[rows] = self._new[:count], self._last[env_ids]
        self._newest[env_ids] = self._after[:count]
        self._free = self._free[:-count]
        self._last[env_ids] = rows
        self.lengths[env_ids] += 1

    def close(self, env_ids: np.ndarray) -> None:
        """Move the open episodes of some envs to the table."""
        env_ids = env_ids[self.lengths[env_ids] > 0]
        if len(env_ids):
            block, rows = self.collect(env_ids)
            self._table.insert(block, self.lengths[env_ids])
            self.lengths[env_ids], self._last[env_ids] = 0, -1
            self._free = np.concatenate([self._free, rows])

    def collect(self, env_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copy open episodes for `EpisodeTable.insert`; return also their rows in the pool."""
        lengths = self.lengths[env_ids]
        rows = np.empty(int(lengths.sum()), np.int64)
        follow(self._previous, self._last[env_ids], lengths, rows)
        block = np.empty((len(rows) + len(lengths), self._pool.shape[1]), np.int64)
        is_step, lasts = _split(lengths)
        block[is_step], block[lasts] = self._pool[rows], self._newest[env_ids]
        return block, rows

    def restore(self, lengths: np.ndarray, rows: np.ndarray) -> None:
        """Replace the open episodes; raise BufferMemoryError if memory is missing.

        `lengths` are int64 (N,). `rows` int64 (K, W) have, for each env with an open episode, its
        steps and then a row with the last observation.
        """
        count, env_ids = int(lengths.sum()), np.flatnonzero(lengths)
        self.reserve(count - len(self._pool) + len(self._free))
        is_step, lasts = _split(lengths[env_ids])
        self._pool[:count], self._newest[env_ids] = rows[is_step], rows[lasts]
        self._previous[:count] = np.arange(-1, count - 1)
        self._free = np.arange(len(self._pool) - 1, count - 1, -1)
        self._last[:] = -1
        self._last[env_ids] = np.cumsum(lengths[env_ids]) - 1
        self.lengths[:] = lengths


def _split(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether a row of episodes is a step, bool (K,); and the rows after last steps, int64 (E,)."""
    lasts = np.cumsum(lengths + 1) - 1
    is_step = np.ones(int(lengths.sum()) + len(lengths), np.bool_)
    is_step[lasts] = False
    return is_step, lasts


@njit(nogil=True, cache=True)
def follow(previous, lasts, lengths, rows):
    """Write the rows of chains, each from the first to the last, into rows int64 (K,).

    previous int64 (P,) is the row before each row; lasts int64 (B,) are the last rows of chains,
    and lengths int64 (B,) their numbers of rows.
    """
    end = 0
    for b in range(lasts.shape[0]):
        end += lengths[b]
        row = lasts[b]
        for k in range(lengths[b]):
            rows[end - 1 - k] = row
            row = previous[row]
