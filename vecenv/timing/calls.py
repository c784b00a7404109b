"""The caller's side: a log of calls of the vector env, and of the phases that the user names."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "COLLECT",
    "ENV_CALLS",
    "NUM_ENV_CALLS",
    "RECV",
    "RESET",
    "SEND",
    "STEP",
    "STEP_ASYNC",
    "STEP_WAIT",
    "CallLog",
    "Calls",
]

STEP, SEND, RECV, RESET, STEP_ASYNC, STEP_WAIT, COLLECT = range(7)
ENV_CALLS = ("step", "send", "recv", "reset", "step_async", "step_wait", "collect")
NUM_ENV_CALLS = len(ENV_CALLS)
CAPACITY = 1 << 16  # latest intervals that are kept
# Of an interval that has not ended: a list is twice as fast as an object.
_KIND, _BEGIN, _WAIT_BEGIN, _WAIT_END, _NESTED, _NUM_ROWS = range(6)


class Calls(NamedTuple):
    """Intervals in the order in which they ended; times in nanoseconds.

    Attributes:
        kinds: int64 (M,), numbers into the log's `names`; the first seven are calls of the env.
        begin_ns: int64 (M,).
        end_ns: int64 (M,).
        wait_begin_ns: int64 (M,), when it began to wait for envs, or to run the compiled kernel; 0
            if it never did.
        wait_end_ns: int64 (M,).
        nested_ns: int64 (M,), spent in intervals inside this one.
        num_rows: int64 (M,), number of envs that the call returned.
        sent_ns: int64 (M,), when the step was begun that the call returned: by `step_async`, or by
            the call itself.
    """

    kinds: np.ndarray
    begin_ns: np.ndarray
    end_ns: np.ndarray
    wait_begin_ns: np.ndarray
    wait_end_ns: np.ndarray
    nested_ns: np.ndarray
    num_rows: np.ndarray
    sent_ns: np.ndarray

    def where(self, chosen: np.ndarray | slice) -> Calls:
        """Return the intervals for which `chosen` bool (M,) holds."""
        return Calls(*(column[chosen] for column in self))


class OtherInterval(NamedTuple):
    """A phase of a thread that does not call the vector env; times in nanoseconds."""

    thread: str
    name: str
    begin_ns: int
    end_ns: int


class _Here(threading.local):
    """The intervals of a thread that have not ended, the innermost last."""

    def __init__(self) -> None:
        self.opened: list[list[int]] = []


class CallLog:
    """Intervals of the thread that calls the vector env, and phases of other threads.

    The caller may change; it is the thread of the latest call. What another thread does is counted
    apart, when it ends.

    Attributes:
        names: Names of the kinds of interval: calls of the env, then phases in order of first use.
        begin_ns: When the log began.
        last_ns: When the caller's latest interval began or ended.
        others: The latest phases of other threads.
        others_ns: Time of other threads by phase, without the phases inside it.
    """

    def __init__(self) -> None:
        self.names: list[str] = list(ENV_CALLS)
        self._kinds: dict[str, int] = {}  # of phases, which may have the names of calls
        self._here = _Here()
        self._lock = threading.Lock()  # over what other threads change
        self.clear()

    def clear(self) -> None:
        """Delete the intervals that have ended; those that are open begin now."""
        self.begin_ns = self.last_ns = perf_counter_ns()
        self._caller = self._here.opened
        for interval in self._caller:
            interval[_BEGIN], interval[_NESTED] = self.begin_ns, 0
        self._rows: list[tuple[int, ...]] = []  # as columns of Calls, not taken yet
        self._latest = np.zeros((0, len(Calls._fields)), np.int64)
        self._num_taken = self._sent_ns = 0
        self._own_ns = [0] * len(self.names)
        # Time of timing itself, and how much of it was before `last_ns`.
        self._paused_ns = self._settled_ns = 0
        self.others: deque[OtherInterval] = deque(maxlen=CAPACITY)
        self.others_ns: dict[str, int] = {}
        self._total_ns: dict[str, int] = {}
        self._others_total_ns: dict[str, int] = {}

    def kind(self, name: str) -> int:
        """Return the number of a phase."""
        found = self._kinds.get(name)
        if found is None:
            with self._lock:
                self._own_ns.append(0)
                self.names.append(name)
                found = self._kinds[name] = len(self.names) - 1
        return found

    def begin(self, kind: int, num_rows: int = 0) -> None:
        """Open an interval inside the one that is open; a call that Ctrl-C left open is dropped."""
        opened, now_ns = self._here.opened, perf_counter_ns()
        if kind < NUM_ENV_CALLS:
            self._caller = opened
            if opened and opened[-1][_KIND] < NUM_ENV_CALLS:
                opened.pop()
            if kind == STEP_ASYNC:
                self._sent_ns = now_ns
        if opened is self._caller:
            self.last_ns, self._settled_ns = now_ns, self._paused_ns
        opened.append([kind, now_ns, 0, 0, 0, num_rows])

    def end(self) -> int:
        """Close the interval opened last; return how many may be taken now, 0 in other threads."""
        opened, now_ns = self._here.opened, perf_counter_ns()
        kind, begin_ns, wait_begin_ns, wait_end_ns, nested_ns, num_rows = opened.pop()
        spent_ns = now_ns - begin_ns
        if opened:
            opened[-1][_NESTED] += spent_ns
        # A phase inside of one of its name is counted already.
        is_outer = kind >= NUM_ENV_CALLS and all(one[_KIND] != kind for one in opened)
        if opened is not self._caller:
            self._end_elsewhere(self.names[kind], begin_ns, now_ns, nested_ns, is_outer)
            return 0
        if is_outer:
            name = self.names[kind]
            self._total_ns[name] = self._total_ns.get(name, 0) + spent_ns
        self.last_ns, self._settled_ns = now_ns, self._paused_ns
        self._own_ns[kind] += spent_ns - nested_ns
        sent_ns = begin_ns
        if kind == STEP_WAIT and self._sent_ns:
            sent_ns = self._sent_ns
        if kind < NUM_ENV_CALLS and kind != STEP_ASYNC:
            self._sent_ns = 0
        row = kind, begin_ns, now_ns, wait_begin_ns, wait_end_ns, nested_ns, num_rows, sent_ns
        self._rows.append(row)
        # Else stamps would be added up before the call that waits for them.
        is_idle = not self._sent_ns and (not opened or opened[-1][_KIND] >= NUM_ENV_CALLS)
        return len(self._rows) if is_idle else 0

    def _end_elsewhere(
        self, name: str, begin_ns: int, end_ns: int, nested_ns: int, is_outer: bool
    ) -> None:
        begin_ns = max(begin_ns, self.begin_ns)
        spent_ns = end_ns - begin_ns
        with self._lock:
            own_ns = max(spent_ns - nested_ns, 0)
            self.others_ns[name] = self.others_ns.get(name, 0) + own_ns
            if is_outer:
                self._others_total_ns[name] = self._others_total_ns.get(name, 0) + spent_ns
            thread = threading.current_thread().name
            self.others.append(OtherInterval(thread, name, begin_ns, end_ns))

    @property
    def waiting(self) -> AbstractContextManager[None]:
        """A context in which the open interval waits for envs."""
        return _Waiting(self)

    def note_wait(self, begin_ns: int, end_ns: int) -> None:
        """Note a wait, or a run of the compiled kernel, in the open call of the vector env, if any.

        Of several in one call the first begin counts, and the last end.
        """
        opened = self._here.opened
        if opened and opened[-1][_KIND] < NUM_ENV_CALLS:
            opened[-1][_WAIT_BEGIN] = opened[-1][_WAIT_BEGIN] or begin_ns
            opened[-1][_WAIT_END] = end_ns

    def note_rows(self, count: int) -> None:
        """Note the number of envs that the open interval returns."""
        self._here.opened[-1][_NUM_ROWS] = count

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose time is not counted, for the work of timing itself."""
        begin_ns = perf_counter_ns()
        try:
            yield
        finally:
            if (opened := self._here.opened) is self._caller:
                spent_ns = perf_counter_ns() - begin_ns
                self._paused_ns += spent_ns
                if opened:
                    opened[-1][_NESTED] += spent_ns

    # -- what has been logged ----------------------------------------------------------------------

    @property
    def wall_ns(self) -> int:
        """Time from the beginning of the log to the caller's latest event, without pauses."""
        return self.last_ns - self.begin_ns - self._settled_ns

    @property
    def total_ns(self) -> dict[str, int]:
        """Time in each phase of all threads, with all that is inside it."""
        with self._lock:
            found = dict(self._others_total_ns)
        for name, spent_ns in self._total_ns.copy().items():
            found[name] = found.get(name, 0) + spent_ns
        return found

    def phases_ns(self) -> dict[str, int]:
        """Return the caller's time in each phase, without what is inside it.

        Open phases count until the latest event.
        """
        found = {name: self._own_ns[kind] for name, kind in self._kinds.items()}
        until_ns = self.last_ns
        later_ns = self._paused_ns - self._settled_ns  # counted as nested, but after `until_ns`
        for kind, begin_ns, *_, nested_ns, _num_rows in reversed(self._caller):
            if kind >= NUM_ENV_CALLS:
                found[self.names[kind]] += max(until_ns - begin_ns - nested_ns + later_ns, 0)
            until_ns, later_ns = begin_ns, 0
        return {name: ns for name, ns in found.items() if ns > 0}

    def take(self) -> Calls:
        """Return the intervals that have ended since the last time; they stay among the latest."""
        rows = np.array(self._rows, np.int64).reshape(-1, len(Calls._fields))
        self._rows = []
        self._num_taken += len(rows)
        self._latest = np.concatenate([self._latest, rows])[-CAPACITY:]
        return Calls(*rows.T)

    def latest(self) -> tuple[Calls, int]:
        """Return the latest of those that were taken, and the time since which these are all."""
        calls = Calls(*self._latest.T)
        is_cut = self._num_taken > len(self._latest)
        return calls, int(calls.end_ns[0]) if is_cut else self.begin_ns


class _Waiting(AbstractContextManager[None]):
    __slots__ = ("_begin_ns", "_log")

    def __init__(self, log: CallLog) -> None:
        self._log = log

    def __enter__(self) -> None:
        self._begin_ns = perf_counter_ns()

    def __exit__(self, *_: Any) -> None:
        self._log.note_wait(self._begin_ns, perf_counter_ns())
