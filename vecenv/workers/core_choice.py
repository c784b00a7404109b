"""Which core a worker had better use."""

from __future__ import annotations

import os
from time import perf_counter_ns
from typing import Any

__all__ = ["CoreChoice"]

_FEWEST, _MOST, _TIMED = 8, 1 << 12, 64  # commands
_WORTHWHILE = 0.8


class CoreChoice:
    """Moves a worker away from its caller's core, if that makes commands come faster.

    The Linux scheduler often puts a woken process on the core of the process that wakes it. Two
    processes that wake each other in turn may stay on one core although another is free.

    Attributes:
        patience: Commands in a row on the caller's core after which to try another one.
        is_watching: Whether commands are being timed, before or after a move.

    Args:
        times_on_callers_core: One int64: commands in a row that came while on the caller's core.
    """

    def __init__(self, times_on_callers_core: Any) -> None:
        self._times = times_on_callers_core
        self.patience = _FEWEST
        self.is_watching = False
        self._begun = (0, 0)  # number of the command, ns
        self._before_ns: float | None = None  # per command, on the caller's core

    def note_command(self, number: int, callers_core: int) -> None:
        """Decide what to do.

        Args:
            number: Of the command.
            callers_core: On which the caller gave it, plus one.
        """
        if not self.is_watching:
            self._watch(number)
            return
        count = number - self._begun[0]
        if count < _TIMED:
            return
        each_ns = (perf_counter_ns() - self._begun[1]) / count
        self.is_watching = False
        if self._before_ns is not None:  # moved: was it worth it?
            has_helped = each_ns < _WORTHWHILE * self._before_ns
            self.patience = _FEWEST if has_helped else min(4 * self.patience, _MOST)
            self._before_ns, self._times[0] = None, 0
        elif self._times[0] >= count:  # it has been there all the time
            self._before_ns = each_ns
            _leave_core(callers_core - 1)
            self._watch(number)

    def _watch(self, number: int) -> None:
        self.is_watching, self._begun = True, (number, perf_counter_ns())


def _leave_core(core: int) -> None:
    """Move the calling thread to another core; it may come back later."""
    cores = os.sched_getaffinity(0)
    if cores - {core}:
        os.sched_setaffinity(0, cores - {core})
        os.sched_setaffinity(0, cores)
