"""How many cores there are for this process.

What counts are the affinity mask and the cgroup quota, not the core count.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["cgroup_quota", "usable_cores"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")


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
