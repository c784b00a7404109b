"""The caller's side: a log of a thread's calls of the vector env, and of the phases it names."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import get_ident
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "COLLECT",
    "ENV_CALLS",
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
CAPACITY = 1 << 16
_WORDS = 8
_NUM_ENV_CALLS = len(ENV_CALLS)
_ROW = struct.Struct(f"{_WORDS}q")
_pack_row, _ROW_BYTES = _ROW.pack_into, _ROW.size
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
        depths: int64 (M,), how many intervals are around this one.
        num_rows: int64 (M,), number of envs that the call returned.
    """

    kinds: np.ndarray
    begin_ns: np.ndarray
    end_ns: np.ndarray
    wait_begin_ns: np.ndarray
    wait_end_ns: np.ndarray
    nested_ns: np.ndarray
    depths: np.ndarray
    num_rows: np.ndarray

    def where(self, chosen: np.ndarray | slice) -> Calls:
        """Return the intervals for which `chosen` bool (M,) holds."""
        return Calls(*(column[chosen] for column in self))


class CallLog:
    """A thread's intervals: the latest in a ring, and running totals of all; only it writes.

    Attributes:
        names: Names of the kinds of interval: calls of the env, then phases in order of first use.
        total_ns: Time spent in each phase since the log began, phases inside it included, those of
            its own name once.
        own_ns: Time in intervals by kind, without what is inside them.
        begin_ns: When the log began.
        last_ns: When the latest interval began or ended.
        count: Number of intervals that have ended.
        fold_at: The `count` at which `fold` is called.
        fold: Returns what adds the rings to the totals before they are overwritten, or None.
        pause_depth: Nesting depth of the current pauses.
        waiting: A context in which the open interval waits for envs.
    """

    def __init__(self) -> None:
        self.thread = get_ident()
        self.names: list[str] = list(ENV_CALLS)
        self.total_ns: dict[str, int] = {}
        self._rows = np.zeros((CAPACITY, _WORDS), np.int64)
        self._bytes = memoryview(self._rows.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # typeshed before 3.12
        self._kinds: dict[str, int] = {}  # of phases, which may have the names of calls
        # Of every open interval; they stay open when the log is cleared.
        self._open: list[list[int]] = []
        # Made once, as they are entered at every step; they do not refer to the log: a cycle would
        # delay the release of the ring.
        self.waiting: AbstractContextManager[None] = _Waiting(self._open)
        self.pause_depth = 0
        self.fold: Callable[[], Callable[[], None] | None] = lambda: None
        self.fold_at = CAPACITY // 2
        self.clear()

    def shrink(self) -> None:
        """Give back the memory that is not used; nothing can be logged afterwards."""
        if self.count < len(self._rows):
            self._bytes = memoryview(b"")  # refers to all of them
            self._rows = self._rows[: self.count].copy()

    def clear(self) -> None:
        """Delete the intervals that have ended; those that are open begin now."""
        self.begin_ns = self.last_ns = perf_counter_ns()
        self.total_ns.clear()
        self.own_ns: list[int] = [0] * len(self.names)
        self._paused_ns = 0  # time of timing itself before `last_ns`
        self._pauses: list[tuple[int, int]] = []  # begin and length of those after it
        self.count = 0
        for interval in self._open:
            interval[_BEGIN], interval[_NESTED] = self.begin_ns, 0

    def interval(self, kind: int) -> AbstractContextManager[None]:
        """Return a context that is logged as one interval."""
        return _Interval(self, kind)

    def kind(self, name: str) -> int:
        """Return the number of a phase."""
        found = self._kinds.get(name)
        if found is None:
            self.own_ns.append(0)
            self.names.append(name)
            found = self._kinds[name] = len(self.names) - 1
        return found

    def begin(self, kind: int, num_rows: int = 0) -> None:
        """Open an interval inside the one that is open; a call that Ctrl-C left open is dropped."""
        opened = self._open
        if kind < _NUM_ENV_CALLS and opened and opened[-1][_KIND] < _NUM_ENV_CALLS:
            opened.pop()
        self.last_ns = now_ns = perf_counter_ns()
        opened.append([kind, now_ns, 0, 0, 0, num_rows])

    def note_kernel(self, begin_ns: int, end_ns: int) -> None:
        """Note the run of the compiled kernel in the open call of the vector env, if any."""
        interval = self._open[-1] if self._open else None
        if interval is not None and interval[_KIND] < len(ENV_CALLS):
            interval[_WAIT_BEGIN] = interval[_WAIT_BEGIN] or begin_ns
            interval[_WAIT_END] = end_ns

    def note_rows(self, count: int) -> None:
        """Note the number of envs that the open interval returns."""
        if self._open:
            self._open[-1][_NUM_ROWS] = count

    def end(self) -> None:
        """Close the interval opened last."""
        self.last_ns = end_ns = perf_counter_ns()
        opened = self._open
        kind, begin_ns, wait_begin_ns, wait_end_ns, nested_ns, rows = opened.pop()
        spent_ns = end_ns - begin_ns
        self.own_ns[kind] += spent_ns - nested_ns
        if opened:
            opened[-1][_NESTED] += spent_ns
        if kind >= _NUM_ENV_CALLS and not (opened and _holds(opened, kind)):
            name = self.names[kind]
            self.total_ns[name] = self.total_ns.get(name, 0) + spent_ns
        _pack_row(  # the columns of `Calls`
            self._bytes,
            self.count % CAPACITY * _ROW_BYTES,
            kind,
            begin_ns,
            end_ns,
            wait_begin_ns,
            wait_end_ns,
            nested_ns,
            len(opened),
            rows,
        )
        self.count += 1
        if self._pauses:
            self._settle_pauses()
        if self.count >= self.fold_at:
            with self.paused():
                if (fold := self.fold()) is not None:
                    fold()
            self.last_ns = perf_counter_ns()
            self._settle_pauses()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context whose time is not counted, for the work of timing itself."""
        return _Paused(self)

    def note_pause(self, begin_ns: int, end_ns: int) -> None:
        """Exclude some time from all totals."""
        self._pauses.append((begin_ns, end_ns - begin_ns))
        if self._open:
            self._open[-1][_NESTED] += end_ns - begin_ns

    def _settle_pauses(self) -> None:
        """Count the pauses before the latest start or end of an interval, and only those."""
        self._paused_ns += sum(ns for begin_ns, ns in self._pauses if begin_ns < self.last_ns)
        self._pauses = [pause for pause in self._pauses if pause[0] >= self.last_ns]

    @property
    def wall_ns(self) -> int:
        """Time from the beginning of the log to the latest event, without pauses."""
        self._settle_pauses()
        return self.last_ns - self.begin_ns - self._paused_ns

    @property
    def env_ns(self) -> int:
        """Time in calls of the vector env."""
        return sum(self.own_ns[: len(ENV_CALLS)])

    def phases_ns(self) -> dict[str, int]:
        """Return the time in each phase without nested intervals; open phases count until now."""
        found = {name: self.own_ns[kind] for name, kind in self._kinds.items()}
        self._settle_pauses()
        inside_begin_ns = self.last_ns
        later_ns = sum(ns for _, ns in self._pauses)  # in the innermost one, after `last_ns`
        for interval in reversed(self._open):
            own_ns = inside_begin_ns - interval[_BEGIN] - interval[_NESTED] + later_ns
            later_ns = 0
            if interval[_KIND] >= len(ENV_CALLS):
                found[self.names[interval[_KIND]]] += max(own_ns, 0)
            inside_begin_ns = interval[_BEGIN]
        return {name: ns for name, ns in found.items() if ns > 0}

    def since(self, first: int, last: int) -> Calls:
        """Copy out the intervals first, ..., last - 1, counted from the beginning of the log."""
        places = np.arange(max(first, last - CAPACITY), last) % CAPACITY
        return Calls(*self._rows[places].T.copy())

    def read(self) -> Calls:
        """Copy out the intervals in the ring, the oldest first."""
        return self.since(0, self.count)

    def open_since(self) -> int | None:
        """Return the start of the open outermost call of the vector env; None if there is none."""
        begins = [one[_BEGIN] for one in self._open if one[_KIND] < len(ENV_CALLS)]
        return min(begins, default=None)

    def complete_since(self) -> int:
        """Return the time since which all intervals are in the ring."""
        if self.count <= CAPACITY:
            return self.begin_ns
        return int(self._rows[self.count % CAPACITY, 2])  # where the oldest one ended


def _holds(opened: list[list[int]], kind: int) -> bool:
    """Whether a phase is inside one of the same name, which counts its time already."""
    return any(interval[_KIND] == kind for interval in opened)


class _Interval(AbstractContextManager[None]):
    __slots__ = ("_kind", "_log")

    def __init__(self, log: CallLog, kind: int) -> None:
        self._log, self._kind = log, kind

    def __enter__(self) -> None:
        self._log.begin(self._kind)

    def __exit__(self, *_: Any) -> None:
        self._log.end()


class _Waiting(AbstractContextManager[None]):
    """Of several waits of an interval the first begin counts, and the last end."""

    __slots__ = ("_open",)

    def __init__(self, opened: list[list[int]]) -> None:
        self._open = opened

    def __enter__(self) -> None:
        if self._open and not (interval := self._open[-1])[2]:  # _WAIT_BEGIN, _WAIT_END below:
            interval[2] = perf_counter_ns()  # globals would take longer, at every step

    def __exit__(self, *_: Any) -> None:
        if self._open:
            self._open[-1][3] = perf_counter_ns()


class _Paused(AbstractContextManager[None]):
    __slots__ = ("_begin_ns", "_log")

    def __init__(self, log: CallLog) -> None:
        self._log = log

    def __enter__(self) -> None:
        self._begin_ns = perf_counter_ns()
        self._log.pause_depth += 1

    def __exit__(self, *_: Any) -> None:
        self._log.pause_depth -= 1
        if self._log.pause_depth == 0:  # the outermost pause includes the others
            self._log.note_pause(self._begin_ns, perf_counter_ns())
