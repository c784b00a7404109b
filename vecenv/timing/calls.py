"""The caller's side: a log of its calls of the vector env, and of the phases it names."""

from __future__ import annotations

from contextlib import AbstractContextManager
from time import perf_counter_ns
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

__all__ = ["ENV_CALLS", "RECV", "RESET", "SEND", "STEP", "CallLog", "Calls"]

STEP, SEND, RECV, RESET = range(4)
ENV_CALLS = ("step", "send", "recv", "reset")
CAPACITY = 1 << 16
_WORDS = 8


class Calls(NamedTuple):
    """What the log holds, in the order in which the intervals ended; times in nanoseconds.

    Attributes:
        kinds: int64 (M,), numbers into the log's `names`; the first four are calls of the env.
        begin_ns: int64 (M,).
        end_ns: int64 (M,).
        wait_begin_ns: int64 (M,), when it began to wait for envs; 0 if it never did.
        wait_end_ns: int64 (M,).
        nested_ns: int64 (M,), spent in intervals inside this one.
        depths: int64 (M,), how many intervals are around this one.
        num_rows: int64 (M,), how many envs the call handed back.
    """

    kinds: np.ndarray
    begin_ns: np.ndarray
    end_ns: np.ndarray
    wait_begin_ns: np.ndarray
    wait_end_ns: np.ndarray
    nested_ns: np.ndarray
    depths: np.ndarray
    num_rows: np.ndarray

    def where(self, chosen: np.ndarray) -> Calls:
        """Return the intervals for which `chosen` bool (M,) holds."""
        return Calls(*(column[chosen] for column in self))


class CallLog:
    """Ring of the caller's latest intervals; it has one writer, the thread that calls.

    Attributes:
        names: Of the kinds of interval: calls of the env, then phases as they came up.
        total_ns: Time spent in each phase since the log began, phases inside it included.
        begin_ns: When the log began.
    """

    def __init__(self) -> None:
        self.names: list[str] = list(ENV_CALLS)
        self.total_ns: dict[str, int] = {}
        self._rows = np.zeros((CAPACITY, _WORDS), np.int64)
        self._words: Any = memoryview(self._rows.reshape(-1))  # type: ignore[arg-type]
        self._kinds = {name: kind for kind, name in enumerate(self.names)}
        self.clear()

    def clear(self) -> None:
        """Forget the intervals that have ended."""
        self.begin_ns = perf_counter_ns()
        self.total_ns.clear()
        self.count = 0
        # Of every open interval: kind, begin, begin and end of waiting, nested time, rows.
        self._open: list[list[int]] = []

    def interval(self, kind: int) -> AbstractContextManager[None]:
        """Return a context that is logged as one interval."""
        return _Interval(self, kind)

    def kind(self, name: str) -> int:
        """Return the number of a phase."""
        found = self._kinds.get(name)
        if found is None:
            found = self._kinds[name] = len(self.names)
            self.names.append(name)
        return found

    def begin(self, kind: int) -> None:
        """Open an interval inside the one that is open."""
        self._open.append([kind, perf_counter_ns(), 0, 0, 0, 0])

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which the open interval waits for envs."""
        return _Waiting(self)

    def begin_wait(self) -> None:
        """Note that the open interval begins to wait for envs; the first note counts."""
        if self._open and self._open[-1][2] == 0:
            self._open[-1][2] = perf_counter_ns()

    def end_wait(self) -> None:
        """Note that it has ended waiting; the last note counts."""
        if self._open:
            self._open[-1][3] = perf_counter_ns()

    def note_rows(self, count: int) -> None:
        """Note how many envs the open interval hands back."""
        if self._open:
            self._open[-1][5] = count

    def end(self) -> None:
        """Close the interval opened last."""
        end_ns = perf_counter_ns()
        if not self._open:  # cleared meanwhile
            return
        kind, begin_ns, wait_begin_ns, wait_end_ns, nested_ns, rows = self._open.pop()
        if self._open:
            self._open[-1][4] += end_ns - begin_ns
        if kind >= len(ENV_CALLS):
            name = self.names[kind]
            self.total_ns[name] = self.total_ns.get(name, 0) + end_ns - begin_ns
        words, at = self._words, self.count % CAPACITY * _WORDS
        words[at], words[at + 1], words[at + 2] = kind, begin_ns, end_ns
        words[at + 3], words[at + 4], words[at + 5] = wait_begin_ns, wait_end_ns, nested_ns
        words[at + 6], words[at + 7] = len(self._open), rows
        self.count += 1

    def read(self) -> Calls:
        """Copy out the intervals that have ended, the oldest first."""
        if self.count <= CAPACITY:
            rows = self._rows[: self.count]
        else:
            rows = np.roll(self._rows, -(self.count % CAPACITY), axis=0)
        return Calls(*rows.T.copy())

    def complete_since(self) -> int:
        """Return the time from which on everything is in the log."""
        if self.count <= CAPACITY:
            return self.begin_ns
        return int(self._rows[self.count % CAPACITY, 2])  # where the oldest one ended


class _Interval(AbstractContextManager[None]):
    __slots__ = ("_kind", "_log")

    def __init__(self, log: CallLog, kind: int) -> None:
        self._log = log
        self._kind = kind

    def __enter__(self) -> None:
        self._log.begin(self._kind)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._log.end()


class _Waiting(AbstractContextManager[None]):
    __slots__ = ("_log",)

    def __init__(self, log: CallLog) -> None:
        self._log = log

    def __enter__(self) -> None:
        self._log.begin_wait()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._log.end_wait()
