"""Stamps of env steps: when each began and ended, and when its results had been written.

Every env has its own ring. An env is stepped by one thread at a time, so a ring has one writer at a
time and needs no lock; it may be in memory that several processes share. The rings hold the latest
steps; `Timing` adds them to its totals before they are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns, thread_time_ns
from typing import Any, NamedTuple

import numpy as np

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]  # Windows has none

__all__ = ["EnvStamps", "StampedEnv", "Stamps", "stamped"]

_MOST_RECORDS = 1 << 18  # of all envs together, unless an env would have fewer than _FEWEST
_FEWEST, _MOST = 64, 1 << 14  # records of one env
# Words of a record. To write few of them at a step, words of an earlier record stay where they are
# not valid: END_NS if it is before BEGIN_NS (the step has not ended); DONE_NS, when the thread had
# written the results, if it is before END_NS; NOTE, which is 1 for a reset, plus twice (processor
# time in ns + 1) if that was taken, unless BEGIN_NS is negative.
BEGIN_NS, END_NS, DONE_NS, NOTE = range(4)
RECORD_WORDS = 4
# Reading the processor time takes longer than a stamp: it is taken of one step in 128, of more if a
# ring is small, and of every step after one that was long enough to make its cost negligible.
_MOST_UNCOUNTED = 128
_LONG_NS = 250_000
_MOST_LINES = 10  # of a description
_RUSAGE_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)  # on Linux
_getrusage: Any = getattr(resource, "getrusage", None)


class Stamps(NamedTuple):
    """Records of env steps, sorted by start; times by `time.perf_counter_ns`.

    Attributes:
        env_ids: int64 (R,).
        begin_ns: int64 (R,).
        end_ns: int64 (R,); 0 if the step has not ended: it is running, or it raised.
        done_ns: int64 (R,), when its results had been written; 0 if the thread stepped another env
            first, or if it is not known.
        cpu_ns: int64 (R,), processor time of the thread, or the whole duration if the thread never
            gave up its processor voluntarily; -1 if it was not taken.
        is_reset: bool (R,), whether it was a reset.
    """

    env_ids: np.ndarray
    begin_ns: np.ndarray
    end_ns: np.ndarray
    done_ns: np.ndarray
    cpu_ns: np.ndarray
    is_reset: np.ndarray

    def where(self, chosen: np.ndarray | slice) -> Stamps:
        """Return the records for which `chosen` bool (R,), or an index, holds."""
        return Stamps(*(column[chosen] for column in self))

    def joined(self, other: Stamps) -> Stamps:
        """Return these records and then those of another."""
        if len(other.env_ids) == 0:
            return self
        if len(self.env_ids) == 0:
            return other
        return Stamps(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))

    @staticmethod
    def of(env_ids: np.ndarray, words: np.ndarray) -> Stamps:
        """Unpack records of these envs, int64 (R,).

        What earlier records have left in them is dropped.

        Args:
            env_ids: See above.
            words: int64 (RECORD_WORDS, R), of records as in a ring; changed, and kept in part.
        """
        begin_ns, end_ns, done_ns, notes = words
        noted = np.flatnonzero(begin_ns < 0)  # few if steps are short
        cpu_ns, is_reset = np.full(len(env_ids), -1), np.zeros(len(env_ids), np.bool_)
        cpu_ns[noted], is_reset[noted] = (notes[noted] >> 1) - 1, notes[noted] & 1
        begin_ns[noted] *= -1
        done_ns *= (end_ns > 0) & (done_ns >= end_ns)
        return Stamps(env_ids, begin_ns, end_ns, done_ns, cpu_ns, is_reset)


class EnvStamps:
    """The rings of N envs.

    Args:
        rings: int64 (N, K, RECORD_WORDS), zeros; kept by reference.
        counts: int64 (N,), zeros; number of steps of each env that have ended, as of its latest
            step of which the processor time was taken: see `counted`.

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

    def counted(self) -> np.ndarray:
        """Return the number of steps of each env that have ended, int64 (N,)."""
        counts = self.counts.copy()
        # To write less at a step, its count is not. The records since are those in ascending order.
        size = self.rings.shape[1]
        places = (counts % size)[:, None] + np.arange(-1, _most_uncounted(size))
        places[places >= size] -= size  # which takes a fifth of the time of a remainder of each
        places[places < 0] += size
        places += (size * np.arange(len(counts)))[:, None]
        records = self.rings.reshape(-1, RECORD_WORDS)
        begins, ends = records[places, BEGIN_NS], records[places, END_NS]
        np.abs(begins, out=begins)
        begins[counts == 0, 0] = 0  # there is none before the first
        is_next = (begins[:, 1:] > begins[:, :-1]) & (ends[:, 1:] >= begins[:, 1:])
        counts += np.logical_and.accumulate(is_next, axis=1).sum(1)
        return counts

    def read(self) -> Stamps:
        """Copy out the rings, running steps included."""
        counts, rings = self.counted(), self.rings.copy()
        env_ids = np.repeat(np.arange(len(rings)), rings.shape[1])
        records = rings.reshape(-1, RECORD_WORDS)
        # While this copies, steps may begin where old ones ended.
        begins_ns = np.abs(records[:, BEGIN_NS])
        ended = (begins_ns > 0) & (records[:, END_NS] >= begins_ns)
        ended_steps = Stamps.of(env_ids[ended], records[ended].T.copy())
        found = ended_steps.joined(self._running(rings, counts))
        return found.where(np.argsort(found.begin_ns, kind="stable"))

    @staticmethod
    def _running(rings: np.ndarray, counts: np.ndarray) -> Stamps:
        """Return the steps that have begun since the last one of their env has ended."""
        every, size = np.arange(len(counts)), rings.shape[1]
        records = rings[every, counts % size]
        is_running = np.abs(records[:, BEGIN_NS]) > records[:, END_NS]
        records[:, END_NS:] = 0
        return Stamps.of(every[is_running], records[is_running].T.copy())

    def since(self, taken: np.ndarray) -> tuple[Stamps, np.ndarray]:
        """Copy out the steps that have ended since an earlier call, then the running ones.

        Args:
            taken: int64 (N,), the counts that the earlier call returned.

        Returns:
            The records, env by env, in order for each env; and for the next call the number of
            records of each env taken so far, int64 (N,).
        """
        size = self.rings.shape[1]
        counts = self.counted()
        lengths = np.minimum(counts - taken, size - 1)
        parts = []
        for ring, end, length in zip(self.rings, (counts % size).tolist(), lengths, strict=True):
            begin = end - int(length)
            if begin < 0:
                parts.append(ring[begin:])
            parts.append(ring[max(begin, 0) : end])
        env_ids = np.repeat(np.arange(len(counts)), lengths)
        begins_ns = np.concatenate([part[:, BEGIN_NS] for part in parts])
        words = np.empty((RECORD_WORDS, len(begins_ns)), np.int64)
        for number in reversed(range(RECORD_WORDS)):  # the begin again, and last
            np.concatenate([part[:, number] for part in parts], out=words[number])
        # Where a begin is another one now, a step has begun where the oldest one was.
        ended = (words[END_NS] >= np.abs(begins_ns)) & (words[BEGIN_NS] == begins_ns)
        if not ended.all():
            env_ids, words = env_ids[ended], words[:, ended]
        return Stamps.of(env_ids, words).joined(self._running(self.rings, counts)), counts

    def complete_since(self) -> int:
        """Return the time since which no record has been overwritten; 0 if none has been."""
        size, counts = self.rings.shape[1], self.counted()
        wrapped = np.flatnonzero(counts >= size)
        if len(wrapped) == 0:
            return 0
        # The oldest record may be being overwritten, so the one after it counts.
        oldest = self.rings[wrapped, (counts[wrapped] + 1) % size, BEGIN_NS]
        return int(np.abs(oldest).max())

    def describe_latest(self, env_ids: np.ndarray) -> str:
        """List the latest steps of some envs, running ones first, then the newest.

        Args:
            env_ids: int64 (B,), the envs to list.

        Returns:
            One line per step, empty if there are none.
        """
        records = self.read()
        records = records.where(np.isin(records.env_ids, env_ids))
        now_ns = perf_counter_ns()
        order = np.lexsort((-records.begin_ns, records.end_ns > 0))[:_MOST_LINES]
        lines = []
        for k in order.tolist():
            what = "reset" if records.is_reset[k] else "step"
            ago_ms = (now_ns - int(records.begin_ns[k])) / 1e6
            took_ms = (int(records.end_ns[k]) - int(records.begin_ns[k])) / 1e6
            how = f"took {took_ms:.3f} ms" if records.end_ns[k] else "has not ended"
            lines.append(f"  env {records.env_ids[k]}: {what} begun {ago_ms:.3f} ms ago, {how}")
        return "\n".join(["Latest steps, by the stamps of envs.timing:", *lines]) if lines else ""


def _most_uncounted(size: int) -> int:
    """Return the most steps that a ring of `size` records may hold uncounted, a power of two.

    It is at most a quarter of the ring: what is not counted is never overwritten.
    """
    return min(_MOST_UNCOUNTED, 1 << max((size // 4).bit_length() - 1, 0))


def _usage() -> tuple[int, int]:
    """Return how often this thread has waited, and its processor time in nanoseconds."""
    if _RUSAGE_THREAD is None:  # all time but processor time counts as waiting
        return perf_counter_ns(), thread_time_ns()
    usage = _getrusage(_RUSAGE_THREAD)
    return usage.ru_nvcsw, round(1e9 * (usage.ru_utime + usage.ru_stime))


class StampedEnv:
    """Steps and resets an env of a list, and stamps it; the list's item may be replaced.

    Attributes:
        step: Steps the env between two stamps; if it raises, the second is missing.
        reset: Resets the env between two stamps.
        mark_done: Stamps that the results of the latest step have been written; the first call
            counts.
    """

    __slots__ = ("mark_done", "reset", "step")

    def __init__(  # noqa: PLR0915  # its functions'
        self, envs: Sequence[Any], index: int, stamps: EnvStamps
    ) -> None:
        # Functions with variables of their own, as this runs at every step while timing is on: with
        # methods and attributes a stamp takes a quarter longer. So does assigning to items of
        # arrays instead of memoryviews.
        flat = stamps.rings[index].reshape(-1)
        ring: Any = memoryview(flat)  # type: ignore[arg-type]  # typeshed before 3.12
        its_count: Any = memoryview(stamps.counts[index : index + 1])  # type: ignore[arg-type]  # typeshed before 3.12
        size = len(ring)
        count = int(stamps.part(index, index + 1).counted()[0])
        its_count[0] = count
        at = counted_at = count * RECORD_WORDS % size
        mask = 0  # the processor time is taken where this leaves nothing of `at`
        short_mask = _most_uncounted(size // RECORD_WORDS) * RECORD_WORDS - 1

        def step(action: Any) -> Any:
            nonlocal at
            here = at
            if here & mask == 0:
                return measure(envs[index].step, 0, action)
            ring[here] = perf_counter_ns()
            result = envs[index].step(action)
            ring[here + 1] = perf_counter_ns()
            at = here + 4  # RECORD_WORDS
            if at == size:
                at = 0
            return result

        def reset(**kwargs: Any) -> Any:
            return measure(envs[index].reset, 1, **kwargs)

        def measure(call: Callable[..., Any], kind: int, *args: Any, **kwargs: Any) -> Any:
            """Call a method of the env between two stamps, and take the processor time as well."""
            nonlocal at, count, counted_at, mask
            waits, cpu_begin_ns = _usage()
            begin_ns = perf_counter_ns()
            ring[at] = -begin_ns
            result = call(*args, **kwargs)
            end_ns = perf_counter_ns()
            more_waits, cpu_ns = _usage()
            computed_ns = end_ns - begin_ns
            if more_waits != waits:  # else it may have been preempted, but did not wait
                computed_ns = min(computed_ns, cpu_ns - cpu_begin_ns)
            ring[at + END_NS] = end_ns
            ring[at + NOTE] = (computed_ns + 1) << 1 | kind
            if kind == 0:
                mask = 0 if end_ns - begin_ns > _LONG_NS else short_mask
            at = (at + RECORD_WORDS) % size
            count += (at - counted_at) % size // RECORD_WORDS
            its_count[0], counted_at = count, at
            return result

        def mark_done() -> None:
            last = at - RECORD_WORDS  # may be negative, as indices may
            if ring[last + DONE_NS] < ring[last + END_NS]:
                ring[last + DONE_NS] = perf_counter_ns()

        self.step, self.reset, self.mark_done = step, reset, mark_done


def stamped(envs: Sequence[Any], stamps: EnvStamps) -> list[StampedEnv]:
    """Return stand-ins for envs, row i of the stamps being env i's."""
    return [StampedEnv(envs, index, stamps) for index in range(len(envs))]
