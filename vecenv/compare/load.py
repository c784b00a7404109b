"""Memory and processor time of a process with all below it, and of everybody else, on Linux."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from vecenv.timing.memory import pss_bytes

__all__ = ["OthersLoad", "tree_memory_bytes"]

_PROC = Path("/proc")
_STATES = 8  # of a processor in /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal
_IDLE = (3, 4)


def tree_memory_bytes(pid: int) -> int | None:
    """Return the proportional set size (PSS) of a process and all below it.

    Memory that processes share is counted once, in parts. None where the system does not tell.
    """
    total = 0
    for process in _tree(pid):
        own = pss_bytes(process)
        if own is None:
            if process == pid:
                return None
            continue  # it has ended meanwhile
        total += own
    return total


class OthersLoad:
    """How many of the cores that this process may use are kept busy by others.

    "Others" are all processes but this one and those below it, and what a hypervisor takes away.
    """

    def __init__(self) -> None:
        self._begin_s, self._all, self._own = perf_counter(), _busy_ticks(), _tree_ticks()

    def cores(self) -> float | None:
        """Return the cores busy for others since this object was made; None if nobody knows."""
        now = _busy_ticks()
        if now is None or self._all is None:
            return None
        ticks = (now - self._all) - (_tree_ticks() - self._own)
        seconds = perf_counter() - self._begin_s
        return max(0.0, ticks / os.sysconf("SC_CLK_TCK") / seconds)


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and all below it."""
    pending = [pid]
    while pending:
        yield (process := pending.pop())
        with contextlib.suppress(OSError, ValueError):
            for task in (_PROC / str(process) / "task").iterdir():
                pending += [int(child) for child in (task / "children").read_text().split()]


def _busy_ticks() -> int | None:
    """Return the ticks that the cores this process may use have been busy, for whomever."""
    try:
        lines = (_PROC / "stat").read_text().splitlines()
    except OSError:
        return None
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    total = 0
    for name, *words in map(str.split, lines):
        if name in names:
            ticks = [int(word) for word in words[:_STATES]]
            total += sum(ticks) - sum(ticks[k] for k in _IDLE if k < len(ticks))
    return total


def _tree_ticks() -> int:
    """Return the ticks of this process, of those below it, and of those waited for."""
    total = 0
    for process in _tree(os.getpid()):
        with contextlib.suppress(OSError, ValueError):
            words = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
            total += sum(int(word) for word in words[11:15])
    return total
