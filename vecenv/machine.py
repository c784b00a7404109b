"""Processors and processes as Linux reports them: usable cores, load, memory, libraries' threads.

The number of cores is that of the affinity mask and the cgroup quota, not of the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from time import perf_counter_ns
from typing import Any

__all__ = [
    "OthersLoad",
    "cgroup_quota",
    "forked_with_one_openblas_thread",
    "is_portable",
    "limit_threads",
    "limited_environment",
    "loaded_libraries",
    "machine_cpu_ns",
    "num_threads",
    "pss_bytes",
    "tree_memory_bytes",
    "usable_cores",
]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_STATES = 8  # of a processor: user, nice, system, idle, iowait, irq, softirq, steal
_OPENBLAS = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
_TORCH = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
_VARIABLES = (*sorted(_OPENBLAS | _TORCH), "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_VARIABLES += ("NUMEXPR_NUM_THREADS",)


def is_portable() -> bool:
    """Return whether processes are started and waited for only by means that every system has.

    This is so on systems other than Linux, and on Linux if the environment variable
    VECENV_PORTABLE is set (and not 0): fresh interpreters and unlinked files replace forks and
    memfds.
    """
    return sys.platform != "linux" or os.environ.get("VECENV_PORTABLE", "0") not in ("", "0")


def usable_cores() -> int:
    """Return the number of cores that processes started here can keep busy, at least 1."""
    has_mask = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_mask else os.cpu_count() or 1
    return max(1, min(cores, math.ceil(cgroup_quota(_CGROUP_ROOT) or cores)))


def cgroup_quota(root: Path, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the CPU quota of the cgroup in cores, or None if there is no limit.

    Args:
        root: Mount point of the cgroup file system, of version 2 or 1.
        membership: File that names the cgroup of this process.
    """
    folders = [root, root / "cpu"]  # the folders of its cgroup and of all above it
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            own = Path(path.lstrip("/"))
            base = root if controllers == "" else root / "cpu"
            folders += [base / part for part in (own, *own.parents)]
    quotas = []
    for folder in folders:
        names = "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"
        quota, period, *_ = (*" ".join(_text(folder / name) for name in names).split(), "", "")
        if quota.isdigit() and period.isdigit():
            quotas.append(float(quota) / float(period))
    return min(quotas, default=None)


def _text(file: Path) -> str:
    """Return the text of a file, empty if it can't be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def machine_cpu_ns() -> int | None:
    """Return the time for which any process has kept busy the processors that this one may use.

    Interrupts and time taken by a hypervisor are included. None if the system does not tell, or if
    a quota allows this process less than these processors: then their load is not its load.
    """
    if not (lines := _text(Path("/proc/stat")).splitlines()):
        return None
    own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    if usable_cores() != len(own):
        return None
    ticks = 0
    for name, *words in map(str.split, lines):
        if name in own:
            user, nice, system, _idle, _waiting, *rest = map(int, words[:_STATES])
            ticks += user + nice + system + sum(rest)
    return ticks * 10**9 // os.sysconf("SC_CLK_TCK")


def pss_bytes(pid: int | None = None) -> int | None:
    """Return the proportional set size of a process (None: this one): shared memory in parts.

    None if there is no such process or the system does not tell.
    """
    text = _text(Path(f"/proc/{'self' if pid is None else pid}/smaps_rollup"))
    sizes = [line.split()[1] for line in text.splitlines() if line.startswith("Pss:")]
    return sum(1024 * int(size) for size in sizes) if sizes else None


def tree_memory_bytes(pid: int) -> int | None:
    """Return the proportional set size of a process and its descendants; None if unknown."""
    sizes = [pss_bytes(process) for process in _tree(pid)]
    return None if sizes[0] is None else sum(size or 0 for size in sizes)  # None if it has ended


class OthersLoad:
    """The load of other processes, in processors that this process may use.

    "Others" are all processes but this one and its descendants, and the hypervisor.
    """

    def __init__(self) -> None:
        self._begin_ns, self._all_ns, self._own_ns = self._now()

    @staticmethod
    def _now() -> tuple[int, int | None, int]:
        all_ns, own_ticks = machine_cpu_ns(), 0
        for pid in _tree(os.getpid()) if all_ns is not None else ():
            fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
            own_ticks += sum(map(int, fields[11:13]))  # in user mode, and in the kernel's
        tick_ns = 0 if all_ns is None else 10**9 // os.sysconf("SC_CLK_TCK")
        return perf_counter_ns(), all_ns, own_ticks * tick_ns

    def cores(self) -> float | None:
        """Return the load of others since this was made, in processors; None if not known."""
        now_ns, all_ns, own_ns = self._now()
        if all_ns is None or self._all_ns is None:
            return None
        others_ns = (all_ns - self._all_ns) - (own_ns - self._own_ns)
        return max(0.0, others_ns / (now_ns - self._begin_ns))


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    pending = [pid]
    while pending:
        yield (process := pending.pop())
        with contextlib.suppress(OSError, ValueError):
            for task in Path(f"/proc/{process}/task").iterdir():
                pending += [int(child) for child in (task / "children").read_text().split()]


def loaded_libraries() -> dict[str, str]:
    """Return the paths of the shared libraries that this process has loaded, by file name."""
    lines = _text(Path("/proc/self/maps")).splitlines()
    paths = [line[line.find("/") :] for line in lines if "/" in line and ".so" in line]
    return {path.rpartition("/")[2]: path for path in paths}


def num_threads() -> int:
    """Return the number of threads of this process, those of libraries too."""
    return len(os.listdir("/proc/self/task"))


# -- threads of libraries: PyTorch, BLAS, OpenMP and Numba start one per core in every process -----


def limited_environment() -> dict[str, str]:
    """Return this process's environment variables, with limits of libraries' threads added.

    Variables that the user has set win; OpenBLAS, MKL and PyTorch also follow OMP_NUM_THREADS.
    """
    names = () if "OMP_NUM_THREADS" in os.environ else _VARIABLES
    return {**dict.fromkeys((*names, "NUMBA_NUM_THREADS"), "1"), **os.environ}


def limit_threads() -> None:
    """Let libraries use one thread in this process.

    What factories set later wins. If OpenBLAS is loaded already, the caller has limited it.
    """
    given, limits = set(os.environ), limited_environment()
    config: Any = getattr(sys.modules.get("numba"), "config", None)
    if config is not None and "NUMBA_NUM_THREADS" not in given:
        del limits["NUMBA_NUM_THREADS"]  # after its import this would reset all of Numba's settings
        if config.NUMBA_NUM_THREADS == config.NUMBA_DEFAULT_NUM_THREADS:
            config.NUMBA_NUM_THREADS = 1
    os.environ.update(limits)
    torch: Any = sys.modules.get("torch")
    if given.isdisjoint(_TORCH) and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)


@contextlib.contextmanager
def forked_with_one_openblas_thread() -> Iterator[None]:
    """Let each copy of OpenBLAS have one thread in processes that are forked in this context.

    OpenBLAS ends its threads before a fork. Setting the number in a fork starts them again, and
    they spin for a while. So the number is set in this process, and set back afterwards.
    """
    told = []
    paths = [path for name, path in loaded_libraries().items() if "openblas" in name]
    is_given = not _OPENBLAS.isdisjoint(os.environ)
    for path, prefix, suffix in product(() if is_given else paths, ("", "scipy_"), ("", "64_")):
        library, form = ctypes.CDLL(path), f"{prefix}openblas_%s_num_threads{suffix}"
        if hasattr(library, form % "set") and (number := library[form % "get"]()) > 1:
            told.append((library[form % "set"], number))
    try:
        for tell, _ in told:
            tell(1)
        yield
    finally:
        for tell, number in told:
            tell(number)
