"""Memory and processor time of processes, as Linux counts them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from vecenv.machine import usable_cores

__all__ = ["cpu_ns", "machine_cpu_ns", "pss_bytes"]

_STATES = 8  # of a processor: user, nice, system, idle, iowait, irq, softirq, steal


def cpu_ns(pids: Iterable[int]) -> int:
    """Return the processor time of processes, in nanoseconds; 0 for those that are gone."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])  # in user mode, and in the kernel's
        except (OSError, ValueError, IndexError):
            continue
    return total * _tick_ns()


def machine_cpu_ns() -> int | None:
    """Return how long the processors that this process may use have been busy, for whomever.

    Interrupts and what a hypervisor takes away are included. None if the system does not tell, and
    if a quota leaves this process less than these processors: then their load is not its load.
    """
    try:
        own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = Path("/proc/stat").read_text().splitlines()
    except (AttributeError, OSError):
        return None
    if usable_cores() != len(own):
        return None
    total = 0
    for name, *words in map(str.split, lines):
        if name in own:
            user, nice, system, _idle, _waiting, *rest = map(int, words[:_STATES])
            total += user + nice + system + sum(rest)
    return total * _tick_ns()


def _tick_ns() -> int:
    return 10**9 // os.sysconf("SC_CLK_TCK")


def pss_bytes(pid: int | None = None) -> int | None:
    """Return the proportional set size of a process: what it shares counts in parts.

    Args:
        pid: Which process; None for this one.

    Returns:
        Bytes, or None if there is no such process or the system does not tell.
    """
    try:
        lines = (
            Path(f"/proc/{'self' if pid is None else pid}/smaps_rollup").read_text().splitlines()
        )
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    except (OSError, ValueError):
        return None
