"""Memory and processor time of processes, as Linux counts them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from vecenv.cores import usable_cores

__all__ = ["cpu_ns", "machine_cpu_ns", "pss_bytes"]


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
    """Return the processor time of all processes; None if the system does not tell.

    None also if this process may not use all processors: what keeps the rest busy does not matter.
    """
    if usable_cores() != os.cpu_count():
        return None
    try:
        with open("/proc/stat") as file:
            user, nice, system = map(int, file.readline().split()[1:4])
    except (OSError, ValueError):
        return None
    return (user + nice + system) * _tick_ns()


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
