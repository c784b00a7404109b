"""Memory of buffers: free bytes, refusal of allocations that do not fit, and huge pages."""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from buffers.core.errors import BufferMemoryError

__all__ = ["allocation", "check_fits", "format_bytes", "free_bytes", "zeroed_bytes"]

_HUGE_PAGE = 1 << 21
_UNSEEN_BYTES = 1 << 25  # smaller allocations on the CPU are not checked

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # cgroup of a container


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None if this is unknown."""
    if device.type == "cuda":  # torch's cached memory is free for tensors, too
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type != "cpu":
        return None
    known = list[int]()
    with contextlib.suppress(OSError):
        lines = _MEMINFO.read_text().splitlines()
        known += [1024 * int(n.split()[1]) for n in lines if n.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # ValueError: a group without a limit
        limit = int((_GROUP / "memory.max").read_text())
        use = int((_GROUP / "memory.current").read_text())
        words = (_GROUP / "memory.stat").read_text().split()
        numbers = dict(zip(words[::2], words[1::2], strict=False))
        # The kernel can drop inactive page cache at once, so it counts as free.
        known.append(max(0, limit - use + int(numbers.get("inactive_file", 0))))
    return min(known, default=None)


def check_fits(what: str, needed: int, device: torch.device, advice: str) -> None:
    """Raise BufferMemoryError if `needed` bytes are more than what is free on the device.

    On the CPU, requests of some MiB are not checked. The message is `what`, the sizes, `advice`.
    """
    if device.type == "cpu" and needed <= _UNSEEN_BYTES:
        return
    free = free_bytes(device)
    if free is not None and needed > free:
        raise BufferMemoryError(
            f"{what} needs {format_bytes(needed)} on {device}, but only {format_bytes(free)} are "
            f"free; {advice}"
        )


@contextlib.contextmanager
def allocation(what: str, needed: int, device: torch.device, advice: str) -> Iterator[None]:
    """Context of an allocation: as `check_fits`, and converts errors of the allocation itself."""
    check_fits(what, needed, device, advice)
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        # Messages of torch on the CPU, and of CUDA where pages can't be pinned.
        told = "can't allocate memory", "CUDA error: out of memory"
        is_lack = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
        is_lack |= getattr(error, "errno", 0) == errno.ENOMEM or any(t in str(error) for t in told)
        if isinstance(error, BufferMemoryError) or not is_lack:
            raise
        raise BufferMemoryError(
            f"{what} needs {format_bytes(needed)} on {device}, which the system refused: {error}; "
            f"{advice}, or raise the limits of the process (ulimit -v)"
        ) from error


def format_bytes(number: int) -> str:
    """Format a size for messages: 640 bytes, 1.5 KiB, 5.0 GiB."""
    if number < 1024:
        return f"{number} bytes"
    power = min((number.bit_length() - 1) // 10, 4)
    return f"{number / 1024**power:.1f} {' KMGT'[power]}iB"


def zeroed_bytes(size: int) -> torch.Tensor:
    """Zeros uint8 (size,) on the CPU, committed at once, on huge pages if the system has them.

    Random rows of a large table are on different pages, and finding a page costs as much as reading
    a row: with pages of 2 MiB, batches of 4096 are drawn 1.7 times as fast.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or size < 2 * _HUGE_PAGE:
        return torch.zeros(size, dtype=torch.uint8, device="cpu")
    area = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        area.madvise(advice)
    pages = np.frombuffer(area, np.uint8)  # keeps the area alive
    start = -pages.ctypes.data % _HUGE_PAGE
    pages = pages[start : start + size]
    pages.fill(0)  # commits the memory now, not in the middle of training
    return torch.from_numpy(pages)
