"""Stamps of env steps: when each began and ended, and when its results had been written.

    thread of env e                 rings[e]: the latest steps             Timing, in the caller
      step begins, ends   ------>   [number % K] = begin, end, done
      one step more       ------>   tallies[e] = number of steps, ...  -->  adds them to totals,
                                                                            before K/2 have passed

One thread at a time steps an env, so a ring has one writer and needs no lock. Rings may be in
memory that several processes share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns, thread_time_ns
from typing import Any, NamedTuple

import numpy as np

__all__ = ["STAMP", "EnvStamps", "StampedEnv", "WorkerProcess", "stamped"]

_MOST_RECORDS = 1 << 18  # of all envs together, unless an env would get fewer than _FEWEST
_FEWEST, _MOST = 64, 1 << 14  # records of one env
# Words of a record, so that a step writes only three of them. Records are reused without clearing:
# an end before the begin means that the step is running; DONE before the end: time unknown.
BEGIN, END, DONE = range(3)  # the begin of a reset is negative
RECORD_WORDS = 3
# Per env: steps that have ended, processor time of the measured steps, their total time.
COUNT, CPU, CPU_OF = range(3)
# Reading the processor time takes longer than a stamp. So it is read for one step in 128, and for
# every step after one that was long enough to make its cost negligible.
_MEASURE_EVERY = 128
_LONG_NS = 250_000


class WorkerProcess(NamedTuple):
    """A process that steps envs.

    Attributes:
        pid: Process id.
        start_s: Seconds from its start until its envs were made; None or negative while they are
            being made.
    """

    pid: int
    start_s: float | None


# A record as it is read; times by `time.perf_counter_ns`. The end is 0 if the step is running, or
# raised; `done_ns` is 0 if unknown, as before further steps of its thread.
_FIELDS = ("env_id", "begin_ns", "end_ns", "done_ns")
STAMP = np.dtype([*((name, np.int64) for name in _FIELDS), ("is_reset", np.bool_)], align=True)


class EnvStamps:
    """The rings of N envs.

    Args:
        rings, tallies: int64 (N, K, 3) and (N, 3), zeros; kept by reference.
    """

    def __init__(self, rings: np.ndarray, tallies: np.ndarray) -> None:
        self.rings = rings
        self.tallies = tallies

    @classmethod
    def make(cls, num_envs: int, allocate: Callable[..., np.ndarray] = np.zeros) -> EnvStamps:
        """Make rings for the latest steps of each env: 16 384 for few envs, at least 64."""
        size = min(max(_MOST_RECORDS // num_envs, _FEWEST), _MOST)
        rings = allocate((num_envs, size, RECORD_WORDS), np.int64)
        return cls(rings, allocate((num_envs, RECORD_WORDS), np.int64))

    def part(self, first: int, last: int) -> EnvStamps:
        """Return the rings of envs first, ..., last - 1, in the same memory."""
        return EnvStamps(self.rings[first:last], self.tallies[first:last])

    def since(self, taken: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """Copy the latest steps, including running ones.

        Args:
            taken: int64 (N,), counts that an earlier call returned: only later steps are copied.

        Returns:
            The records, STAMP (R,), env by env, in order for each env; and the number of ended
            steps of each env, int64 (N,).
        """
        size, counts = self.rings.shape[1], self.tallies[:, COUNT].copy()
        lengths = np.minimum(counts - taken, size - 1) + 1  # the last one may be running
        lasts = np.cumsum(lengths) - 1
        found = np.empty(lengths.sum(), STAMP)
        found["env_id"] = env_ids = np.repeat(np.arange(len(counts)), lengths)
        places = np.arange(len(env_ids)) + (counts % size - lasts)[env_ids]
        places[places < 0] += size
        begin_ns, end_ns, done_ns = self.rings[env_ids, places].T
        found["is_reset"], found["begin_ns"] = begin_ns < 0, np.abs(begin_ns)
        is_running = end_ns < found["begin_ns"]
        found["end_ns"] = np.where(is_running, 0, end_ns)
        found["done_ns"] = np.where(is_running | (done_ns < end_ns), 0, done_ns)
        is_whole = np.ones(len(found), np.bool_)
        is_whole[lasts] = is_running[lasts]
        # New steps may meanwhile have begun where old ones had ended: at the first `lost` records.
        lost = np.minimum(self.tallies[:, COUNT] - size - (counts - lengths), lengths)
        for env in np.flatnonzero(lost > 0).tolist():
            first = lasts[env] + 1 - lengths[env]
            is_whole[first : first + lost[env]] = False
        return found[is_whole], counts


class StampedEnv:
    """Steps, resets and stamps an env of a list; the list's item may be replaced.

    Attributes:
        step: Steps the env between two stamps; if it raises, the second is missing.
        reset: Resets the env between two stamps.
        mark_done: Stamps that the results of the latest step have been written; only the first
            call counts.
    """

    __slots__ = ("mark_done", "reset", "step")

    def __init__(self, envs: Sequence[Any], index: int, stamps: EnvStamps) -> None:
        # Closures, as this runs at every step while timing is on: with methods and attributes a
        # stamp takes a quarter longer. So it does with assignments to items of arrays instead of
        # memoryviews.
        ring: Any = memoryview(stamps.rings[index].reshape(-1))  # type: ignore[arg-type]  # typeshed before 3.12
        tally: Any = memoryview(stamps.tallies[index])  # type: ignore[arg-type]  # typeshed before 3.12
        size, count = len(ring), tally[COUNT]
        at = count * RECORD_WORDS % size
        measured_at = count

        def step(action: Any) -> Any:
            nonlocal at, count
            if count >= measured_at:
                return measure(action)
            ring[at] = perf_counter_ns()
            result = envs[index].step(action)
            ring[at + 1] = perf_counter_ns()
            at += 3  # RECORD_WORDS
            if at == size:
                at = 0
            count += 1
            tally[0] = count
            return result

        def measure(action: Any) -> Any:
            """Step the env, and read the processor time too."""
            nonlocal measured_at
            place, measured_at = at, count + _MEASURE_EVERY
            cpu_begin_ns = thread_time_ns()
            result = step(action)
            tally[CPU] += thread_time_ns() - cpu_begin_ns
            spent_ns = ring[place + END] - ring[place]
            tally[CPU_OF] += spent_ns
            if spent_ns > _LONG_NS:
                measured_at = count
            return result

        def reset(**kwargs: Any) -> Any:
            nonlocal at, count
            ring[at] = -perf_counter_ns()
            result = envs[index].reset(**kwargs)
            ring[at + END] = perf_counter_ns()
            at = (at + RECORD_WORDS) % size
            count += 1
            tally[COUNT] = count
            return result

        def mark_done() -> None:
            last = at - RECORD_WORDS  # may be negative, which indices may be
            if ring[last + DONE] < ring[last + END]:
                ring[last + DONE] = perf_counter_ns()

        self.step, self.reset, self.mark_done = step, reset, mark_done


def stamped(envs: Sequence[Any], stamps: EnvStamps) -> list[StampedEnv]:
    """Return stand-ins for envs; row i of the stamps is env i's."""
    return [StampedEnv(envs, index, stamps) for index in range(len(envs))]
