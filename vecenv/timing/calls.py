"""The caller's side: a log of calls of the vector env, and of phases that the user names."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns

import numpy as np

__all__ = ["CALL", "CAPACITY", "ENV_CALLS", "NUM_ENV_CALLS", "CallLog"]

STEP, SEND, RECV, RESET, STEP_ASYNC, STEP_WAIT, COLLECT = range(7)
ENV_CALLS = ("step", "send", "recv", "reset", "step_async", "step_wait", "collect")
NUM_ENV_CALLS = len(ENV_CALLS)
CAPACITY = 1 << 16  # latest intervals that are kept
# An interval that has not ended: a list is twice as fast as an object.
_KIND, _BEGIN, _WAIT_BEGIN, _WAIT_END, _NESTED, _NUM_ROWS = range(6)
# An interval of the caller; times in nanoseconds. `kind` is an index into the log's `names`. The
# wait is for envs, or a run of the compiled kernel; 0 if there is none. `nested_ns` was spent in
# inner intervals; `num_rows` is the number of envs that a call returned; at `sent_ns` their step
# was begun, by `step_async` or by the call itself.
_FIELDS = "kind begin_ns end_ns wait_begin_ns wait_end_ns nested_ns num_rows sent_ns"
CALL = np.dtype([(name, np.int64) for name in _FIELDS.split()])


class _Here(threading.local):
    """A thread's intervals that have not ended, the innermost last."""

    def __init__(self) -> None:
        self.opened: list[list[int]] = []


class CallLog:
    """Intervals of the thread that calls the vector env, and phases of other threads.

    The caller is the thread of the latest call, so it may change. Phases of other threads are
    counted separately.

    Attributes:
        names: Names of the kinds of interval: calls of the env, then phases in order of first use.
        since_ns: Time at which the log began.
        rows: Intervals that have not been taken yet, as fields of CALL.
    """

    def __init__(self) -> None:
        self.names: list[str] = list(ENV_CALLS)
        self._kinds: dict[str, int] = {}  # of phases, whose names may equal those of calls
        self._here = _Here()
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Delete the intervals that have ended; open ones begin now."""
        self.since_ns = self._begin_ns = self._last_ns = perf_counter_ns()
        self._caller = self._here.opened
        for interval in self._caller:
            interval[_BEGIN], interval[_NESTED] = self.since_ns, 0
        self.rows: list[tuple[int, ...]] = []
        self._latest = np.zeros(0, CALL)
        self._num_taken, self._sent_ns = 0, self.since_ns
        # By kind, for other threads (0) and the caller (1): times without inner intervals.
        self._own_ns: tuple[Counter[int], Counter[int]] = (Counter(), Counter())

    def kind(self, name: str) -> int:
        """Return the number of a phase."""
        with self._lock:
            if name not in self._kinds:
                self._kinds[name] = len(self.names)
                self.names.append(name)
            return self._kinds[name]

    def begin(self, kind: int, num_rows: int = 0) -> None:
        """Open an interval inside the current one."""
        opened, now_ns = self._here.opened, perf_counter_ns()
        if kind < NUM_ENV_CALLS:
            self._caller = opened
            if kind != STEP_WAIT:
                self._sent_ns = now_ns
        if opened is self._caller:
            self._last_ns = now_ns
        opened.append([kind, now_ns, 0, 0, 0, num_rows])

    def end(self) -> None:
        """Close the interval opened last."""
        opened, now_ns = self._here.opened, perf_counter_ns()
        kind, begin_ns, wait_begin_ns, wait_end_ns, nested_ns, num_rows = opened.pop()
        if opened:
            opened[-1][_NESTED] += now_ns - begin_ns
        is_caller = opened is self._caller
        if kind >= NUM_ENV_CALLS:
            begin_ns = max(begin_ns, self.since_ns)  # another thread may have cleared the log
            with self._lock:
                self._own_ns[is_caller][kind] += max(now_ns - begin_ns - nested_ns, 0)
        if is_caller:
            self._last_ns = now_ns
            sent_ns = self._sent_ns if kind == STEP_WAIT else begin_ns
            row = kind, begin_ns, now_ns, wait_begin_ns, wait_end_ns, nested_ns, num_rows, sent_ns
            self.rows.append(row)

    def note_wait(self, begin_ns: int, end_ns: int) -> None:
        """Record a wait, or a run of the compiled kernel, in the vector env's open call, if any.

        If a call has several, the first begin and the last end count.
        """
        opened = self._here.opened
        if opened and opened[-1][_KIND] < NUM_ENV_CALLS:
            opened[-1][_WAIT_BEGIN] = opened[-1][_WAIT_BEGIN] or begin_ns
            opened[-1][_WAIT_END] = end_ns

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context in which the open call waits for envs."""
        begin_ns = perf_counter_ns()
        yield
        self.note_wait(begin_ns, perf_counter_ns())

    def note_rows(self, count: int) -> None:
        """Record the number of envs that the open call returns."""
        self._here.opened[-1][_NUM_ROWS] = count

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose time is not counted, for timing's own work."""
        begin_ns = perf_counter_ns()
        yield
        if (opened := self._here.opened) is self._caller:
            spent_ns = perf_counter_ns() - begin_ns
            self._begin_ns += spent_ns
            self._last_ns += spent_ns
            if opened:
                opened[-1][_NESTED] += spent_ns

    # -- what has been logged ----------------------------------------------------------------------

    @property
    def is_callers(self) -> bool:
        """Whether the calling thread is the caller."""
        return self._here.opened is self._caller

    @property
    def wall_ns(self) -> int:
        """Time from the start of the log to the caller's latest event, without pauses."""
        return max(self._last_ns - self._begin_ns, 1)

    @property
    def others_ns(self) -> dict[str, int]:
        """Time of other threads in each phase, without inner intervals."""
        with self._lock:
            return self._by_name(self._own_ns[0])

    @property
    def phases_ns(self) -> dict[str, int]:
        """The caller's time in each phase, without inner intervals.

        Open phases count until the latest event.
        """
        found, until_ns = self._own_ns[1].copy(), self._last_ns
        for kind, begin_ns, *_, nested_ns, _num_rows in reversed(self._caller):
            found[kind] += max(until_ns - begin_ns - nested_ns, 0)
            until_ns = begin_ns
        return self._by_name(found)

    def _by_name(self, times_ns: Counter[int]) -> dict[str, int]:
        found = sorted(times_ns.items())
        return {self.names[kind]: ns for kind, ns in found if kind >= NUM_ENV_CALLS and ns > 0}

    def take(self) -> np.ndarray:
        """Return the intervals since the previous `take`, CALL (M,), in the order of their ends."""
        rows, self.rows = np.array(self.rows, CALL), []
        self._num_taken += len(rows)
        self._latest = np.concatenate([self._latest, rows])[-CAPACITY:]
        return rows

    def latest(self) -> tuple[np.ndarray, int]:
        """Return the latest of the taken intervals, and the time since which they are complete."""
        is_cut = self._num_taken > len(self._latest)
        return self._latest, int(self._latest["end_ns"][0]) if is_cut else self.since_ns
