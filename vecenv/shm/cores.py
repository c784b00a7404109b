"""Which cores there are for this process, and which a worker had better use.

What counts are the affinity mask and the cgroup quota, not the core count.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from time import perf_counter_ns
from typing import Any

__all__ = ["CoreChoice", "usable_cores"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_FEWEST, _MOST, _TIMED = 8, 1 << 12, 64  # commands
_WORTHWHILE = 0.8


class CoreChoice:
    """Moves a worker away from its caller's core, if that makes commands come faster.

    The Linux scheduler likes to put who is woken on the core of who wakes it. Two processes that
    wake each other in turn may stay together on one core although another is free.

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


def usable_cores() -> int:
    """Return the number of cores that processes started here can keep busy, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cgroup_quota(_CGROUP_ROOT)
    return max(1, min(cores, cores if quota is None else math.ceil(quota)))


def cgroup_quota(root: Path, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the cores that the cgroup's CPU quota amounts to, or None if there is no limit.

    Args:
        root: Where the cgroup file system is mounted.
        membership: File that says which cgroup this process is in.
    """
    quotas = []
    for folder in _own_folders(root, membership):
        quotas += [_quota_v2(folder / "cpu.max"), _quota_v1(folder)]
    limits = [quota for quota in quotas if quota is not None]
    return min(limits) if limits else None


def _own_folders(root: Path, membership: Path) -> list[Path]:
    """Return the folders of this process's cgroup and of all above it."""
    folders = [root, root / "cpu"]
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            base = root if controllers == "" else root / "cpu"
            own = Path(path.lstrip("/"))
            folders += [base / part for part in [own, *own.parents]]
    return folders


def _quota_v2(file: Path) -> float | None:
    quota, _, period = _text(file).partition(" ")
    return float(quota) / float(period) if quota.isdigit() and period.strip() else None


def _quota_v1(folder: Path) -> float | None:
    quota = _text(folder / "cpu.cfs_quota_us").strip()
    period = _text(folder / "cpu.cfs_period_us").strip()
    return float(quota) / float(period) if quota.isdigit() and period.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
