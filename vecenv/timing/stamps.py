"""Stamps of env steps: when each began and ended, in which thread.

Every env has a ring of its own. An env is stepped by one thread at a time, so a ring has one writer
at a time and needs no lock; it may lie in memory that several processes share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

__all__ = ["EnvStamps", "StampedEnv", "Stamps", "stamped"]

_MOST_RECORDS = 1 << 18  # of all envs together, unless that leaves one fewer than _FEWEST
_FEWEST, _MOST = 64, 1 << 14  # records of one env
# Words of a record; the third is the thread, times two, plus 1 for a reset.
BEGIN_NS, END_NS = 0, 1
RECORD_WORDS = 3


class Stamps(NamedTuple):
    """Records of env steps, in the order of their beginnings; times by `time.perf_counter_ns`.

    Attributes:
        env_ids: int64 (R,).
        begin_ns: int64 (R,).
        end_ns: int64 (R,); 0 if the step has not ended: it is running, or it raised.
        threads: int64 (R,), as `threading.get_ident`: unique within a process.
        is_reset: bool (R,), whether it was a reset.
    """

    env_ids: np.ndarray
    begin_ns: np.ndarray
    end_ns: np.ndarray
    threads: np.ndarray
    is_reset: np.ndarray

    def where(self, chosen: np.ndarray) -> Stamps:
        """Return the records for which `chosen` bool (R,) holds."""
        return Stamps(*(column[chosen] for column in self))


class EnvStamps:
    """The rings of N envs.

    Args:
        rings: int64 (N, K, 3), zeros; owned by whoever made them.
        counts: int64 (N,), zeros; how many steps of each env have ended.

    Attributes:
        rings, counts: As given.
    """

    def __init__(self, rings: np.ndarray, counts: np.ndarray) -> None:
        self.rings = rings
        self.counts = counts

    @classmethod
    def make(cls, num_envs: int, allocate: Callable[..., np.ndarray] = np.zeros) -> EnvStamps:
        """Make rings for the latest steps of each env, 16 384 for few envs, at least 64."""
        size = min(max(_MOST_RECORDS // num_envs, _FEWEST), _MOST)
        rings = allocate((num_envs, size, RECORD_WORDS), np.int64)
        return cls(rings, allocate((num_envs,), np.int64))

    def part(self, first: int, last: int) -> EnvStamps:
        """Return the rings of envs first, ..., last - 1, in the same memory."""
        return EnvStamps(self.rings[first:last], self.counts[first:last])

    def read(self) -> Stamps:
        """Copy out what the rings hold, steps that are running included."""
        rings = self.rings.copy()
        num_envs = len(rings)
        held = rings[..., BEGIN_NS] > 0
        env_ids = np.broadcast_to(np.arange(num_envs)[:, None], held.shape)[held]
        found = rings[held]
        order = np.argsort(found[:, BEGIN_NS], kind="stable")
        begin_ns, end_ns, notes = found[order].T
        return Stamps(env_ids[order], begin_ns, end_ns, notes >> 1, (notes & 1).astype(np.bool_))

    def complete_since(self) -> int:
        """Return the time from which on no record has been overwritten; 0 if none has been."""
        size = self.rings.shape[1]
        wrapped = np.flatnonzero(self.counts >= size)
        if len(wrapped) == 0:
            return 0
        # The oldest record may be being overwritten, so the one after it counts.
        oldest = self.rings[wrapped, (self.counts[wrapped] + 1) % size, BEGIN_NS]
        return int(oldest.max())


class StampedEnv:
    """Steps and resets an env of a list, and stamps it; the list's item may be replaced.

    This is run at every step while time is taken, so it does as little as it can: assigning to an
    item of a memoryview takes half the time of an array's, and half a microsecond is all it costs.
    """

    __slots__ = ("_at", "_count", "_counts", "_envs", "_index", "_ring", "_size")

    def __init__(self, envs: Sequence[Any], index: int, stamps: EnvStamps) -> None:
        self._envs = envs
        self._index = index
        ring = stamps.rings[index].reshape(-1)
        self._ring: Any = memoryview(ring)  # type: ignore[arg-type]  # typeshed before 3.12
        self._counts: Any = memoryview(stamps.counts)  # type: ignore[arg-type]
        self._size = len(ring)
        self._count = int(stamps.counts[index])
        self._at = self._count * RECORD_WORDS % self._size

    def step(self, action: Any) -> Any:
        """Step the env between two stamps; one that raises leaves the second one out."""
        ring, at = self._ring, self._at
        ring[at + 1] = 0
        ring[at] = perf_counter_ns()
        result = self._envs[self._index].step(action)
        ring[at + 1] = perf_counter_ns()
        ring[at + 2] = get_ident() << 1
        self._counts[self._index] = self._count = self._count + 1
        self._at = (at + RECORD_WORDS) % self._size
        return result

    def reset(self, **kwargs: Any) -> Any:
        """Reset the env between two stamps."""
        ring, at = self._ring, self._at
        ring[at + 1] = 0
        ring[at] = perf_counter_ns()
        result = self._envs[self._index].reset(**kwargs)
        ring[at + 1] = perf_counter_ns()
        ring[at + 2] = get_ident() << 1 | 1
        self._counts[self._index] = self._count = self._count + 1
        self._at = (at + RECORD_WORDS) % self._size
        return result


def stamped(envs: Sequence[Any], stamps: EnvStamps) -> list[StampedEnv]:
    """Return stand-ins for envs, row i of the stamps being env i's."""
    return [StampedEnv(envs, index, stamps) for index in range(len(envs))]
