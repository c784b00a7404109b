"""Memory and processor time of a process with all below it, and of everybody else, on Linux."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns

from vecenv.timing.memory import cpu_ns, machine_cpu_ns, pss_bytes

__all__ = ["OthersLoad", "tree_memory_bytes"]

_PROC = Path("/proc")


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
    """How many of the processors that this process may use are kept busy by others.

    "Others" are all processes but this one and those below it, and what a hypervisor takes away.
    """

    def __init__(self) -> None:
        self._begin_ns, self._all_ns, self._own_ns = _now()

    def cores(self) -> float | None:
        """Return the processors busy for others since this was made; None if nobody knows."""
        now_ns, all_ns, own_ns = _now()
        if all_ns is None or self._all_ns is None:
            return None
        others_ns = (all_ns - self._all_ns) - (own_ns - self._own_ns)
        return max(0.0, others_ns / (now_ns - self._begin_ns))


def _now() -> tuple[int, int | None, int]:
    """Return the clock, and processor time of all processes and of this one with those below."""
    return perf_counter_ns(), machine_cpu_ns(), cpu_ns(_tree(os.getpid()))


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and all below it."""
    pending = [pid]
    while pending:
        yield (process := pending.pop())
        with contextlib.suppress(OSError, ValueError):
            for task in (_PROC / str(process) / "task").iterdir():
                pending += [int(child) for child in (task / "children").read_text().split()]
