"""Memory of buffers: what is free, refusing what cannot fit, and pages of the right size."""

from __future__ import annotations

import bisect
import contextlib
import errno
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from buffers.core.errors import BufferMemoryError

__all__ = [
    "allocation",
    "check_fits",
    "check_room",
    "format_bytes",
    "free_bytes",
    "zeroed_bytes",
]

_HUGE_PAGE = 1 << 21
_UNSEEN_BYTES = 1 << 25  # at most these are taken on the CPU without a look at free memory

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
# Of the control group a container runs in: limit, use, and what of the use is page cache the kernel
# can drop at once; version 2, then version 1.
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), *_V1),
)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None where the system does not tell."""
    if device.type == "cuda":  # what torch keeps for itself is free for tensors, too
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type != "cpu":
        return None
    known = []
    with contextlib.suppress(OSError):
        lines = _MEMINFO.read_text().splitlines()
        known += [1024 * int(n.split()[1]) for n in lines if n.startswith("MemAvailable:")]
    own: list[str] = []
    with contextlib.suppress(OSError):
        own = _OWN_GROUPS.read_text().splitlines()
    for root, *names in _GROUPS:
        # In a container the outermost is its own group, and the path below may be the host's.
        folders = {root}
        for _, controllers, path in (line.split(":", 2) for line in own):
            if controllers == "" or "memory" in controllers.split(","):
                below = root / path.lstrip("/")
                folders |= {f for f in (below, *below.parents) if f.is_relative_to(root)}
        for folder in folders:
            with contextlib.suppress(OSError, ValueError):  # ValueError of a group without a limit
                known.append(_left_in_group(folder, *names))
    return min(known, default=None)


def _left_in_group(folder: Path, limit_name: str, use_name: str, cache_name: str) -> int:
    limit = int((folder / limit_name).read_text())
    use = int((folder / use_name).read_text())
    statistics = (folder / "memory.stat").read_text().split()
    numbers = dict(zip(statistics[::2], statistics[1::2], strict=False))
    return max(0, limit - use + int(numbers.get(cache_name, 0)))


def _lack(needed: int, device: torch.device) -> int | None:
    """Free bytes, if they are fewer than needed; of little on the CPU nobody looks."""
    if device.type == "cpu" and needed <= _UNSEEN_BYTES:
        return None
    free = free_bytes(device)
    return None if free is None or needed <= free else free


def check_fits(what: str, needed: int, device: torch.device, advice: str) -> None:
    """Raise BufferMemoryError if `needed` bytes are more than what is free on the device.

    On the CPU requests of some MiB are let through unseen. `what` begins the message, `advice` ends
    it.
    """
    if (free := _lack(needed, device)) is not None:
        raise BufferMemoryError(
            f"{what} needs {format_bytes(needed)} on {device}, but only {format_bytes(free)} are "
            f"free; {advice}"
        )


def check_room(
    what: str, capacity: int, bytes_for: Callable[[int], int], device: torch.device
) -> None:
    """As `check_fits`, of a buffer of `bytes_for(capacity)`; the error names what would fit."""
    needed = bytes_for(capacity)
    if (free := _lack(needed, device)) is not None:
        fits = bisect.bisect_right(range(1, capacity), free, key=bytes_for)
        raise BufferMemoryError(
            f"{what} with capacity {capacity} needs {format_bytes(needed)} on {device}, but only "
            f"{format_bytes(free)} are free" + (f"; a capacity of {fits} would fit" if fits else "")
        )


@contextlib.contextmanager
def allocation(
    what: str, needed: int, device: torch.device, advice: str, *, is_checked: bool = False
) -> Iterator[None]:
    """Around allocating memory: raise BufferMemoryError if it does not fit, or if it fails.

    The arguments are those of `check_fits`, which was called already if `is_checked`.
    """
    if not is_checked:
        check_fits(what, needed, device, advice)
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        # What torch says on the CPU, and CUDA where pages can't be pinned.
        told = "can't allocate memory", "CUDA error: out of memory"
        is_lack = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
        is_lack |= isinstance(error, OSError) and error.errno == errno.ENOMEM
        is_lack |= any(part in str(error) for part in told)
        if isinstance(error, BufferMemoryError) or not is_lack:
            raise
        raise BufferMemoryError(
            f"{what} needs {format_bytes(needed)} on {device}, which the system refused: {error}; "
            f"{advice}, or raise the limits of the process (ulimit -v)"
        ) from error


def format_bytes(number: int) -> str:
    """A size for people.

    >>> format_bytes(1536), format_bytes(640), format_bytes(5 * 2**30)
    ('1.5 KiB', '640 bytes', '5.0 GiB')
    """
    if number < 1024:
        return f"{number} bytes"
    power = min((number.bit_length() - 1) // 10, 4)
    return f"{number / 1024**power:.1f} {' KMGT'[power]}iB"


def zeroed_bytes(size: int) -> torch.Tensor:
    """Zeros uint8 (size,) on the CPU, all of it in memory already, on large pages where there are.

    Rows drawn at random from a large table lie on a page of their own each, and finding a page
    costs as much as reading the row: on pages of 2 MiB batches of 4096 are drawn 1.7 times as fast.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or size < 2 * _HUGE_PAGE:
        return torch.zeros(size, dtype=torch.uint8, device="cpu")
    area = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # kernels without it say so
        area.madvise(advice)
    pages = np.frombuffer(area, np.uint8)  # keeps the area alive
    start = -pages.ctypes.data % _HUGE_PAGE
    pages = pages[start : start + size]
    pages.fill(0)  # takes the memory now rather than in the middle of training
    return torch.from_numpy(pages)
