"""Memory of buffers: free bytes, refused allocations, huge pages, and columns allocated once.

A column is NumPy pages on the host, and a tensor over them or on a device.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch

from buffers.core.errors import BufferMemoryError, BufferMisuseError

__all__ = [
    "Allocate",
    "ColumnSpec",
    "allocate_columns",
    "allocation",
    "check_fits",
    "format_bytes",
    "free_bytes",
    "torch_dtype",
    "zeroed_bytes",
]


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


Allocate = Callable[..., Any]  # allocate(shape, dtype) -> zeroed array, or tensor on the device


class ColumnSpec(NamedTuple):
    """Description of a column to be allocated.

    place: Where the column lives if the device is not the CPU: "host" only, "device" only, or
        "both". On the CPU there is one copy in any case.
    is_shared: The environment reads or writes the column, so `allocate` may provide its memory.
    is_on_device: This memory is on the device; host pages, if any, are a copy of the buffer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    place: Literal["host", "device", "both"]
    is_shared: bool = False
    is_on_device: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return math.prod(self.shape) * self.dtype.itemsize


class Column:
    """One array of a buffer.

    Attributes:
        spec: Its description.
        tensor: Shares the memory of `host`, or has memory of its own on another device.
        host: The NumPy pages; None if the column is on the device only.
        is_twofold: Host and device have one copy each.
        nbytes: Bytes held, on host and device together.
    """

    def __init__(
        self, spec: ColumnSpec, device: torch.device, staged: bool, allocate: Allocate | None
    ):
        self.spec, self.host = spec, cast(Any, None)
        dtype, given = torch_dtype(spec.dtype), allocate if spec.is_shared else None
        if not staged or spec.place != "device":
            if given is not None and not spec.is_on_device:
                self.host = _checked(spec, given(spec.shape, spec.dtype), None)
            elif device.type == "cuda" and spec.place == "both":
                # Only pinned memory is copied asynchronously.
                pinned = torch.zeros(spec.shape, dtype=dtype, device="cpu", pin_memory=True)
                self.host = pinned.numpy()
            else:  # torch's allocator aligns to cache lines
                self.host = zeroed_bytes(spec.nbytes).numpy().view(spec.dtype).reshape(spec.shape)
        self._there: Any = None if self.host is None else torch.from_numpy(self.host)
        self.is_twofold = self._there is not None and staged and spec.place == "both"
        if spec.is_on_device and given is not None:
            self.tensor = _checked(spec, given(spec.shape, spec.dtype), device)
        elif self._there is None or self.is_twofold:
            self.tensor = torch.zeros(spec.shape, dtype=dtype, device=device)
        else:
            self.tensor = self._there
        self.nbytes = spec.nbytes * (2 if self.is_twofold else 1)

    def upload(self, where: slice = slice(None)) -> None:
        """Enqueue the copy of host pages, or of some rows, to the device, if both have memory."""
        if self.is_twofold:
            self.tensor[where].copy_(self._there[where], non_blocking=True)


def _checked(spec: ColumnSpec, given: Any, device: torch.device | None) -> Any:
    """Check that `allocate` returned an array, or a tensor on `device`, as described by `spec`."""
    dtype = spec.dtype if device is None else torch_dtype(spec.dtype)
    if isinstance(given, np.ndarray):
        there, is_whole = None, given.flags.carray
    else:
        is_whole = isinstance(given, torch.Tensor) and given.is_contiguous()
        there = given.device if is_whole else None
    shape: Any = getattr(given, "shape", None)
    if not is_whole or (given.dtype, tuple(shape), there) != (dtype, spec.shape, device):
        told = type(given).__name__
        told += "" if shape is None else f" {getattr(given, 'dtype', '')} {tuple(shape)}"
        place = "a NumPy array" if device is None else f"a tensor on {device}"
        raise BufferMisuseError(
            f"allocate returned {told} for {spec.name}, expected {place}, {dtype} {spec.shape}, "
            "C-contiguous and writeable"
        )
    return given


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """The torch dtype of a NumPy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def allocate_columns(
    what: str, specs: Iterable[ColumnSpec], device: torch.device, *, staged: bool,
    allocate: Allocate | None, advice: str,
) -> dict[str, Column]:  # fmt: skip
    """Allocate all columns, zeroed, after comparing their size with the free memory.

    If `staged`, host and device have separate memory; required if the device is not the CPU.

    Raises:
        BufferMemoryError: More memory is needed than is free; nothing was allocated.
        BufferMisuseError: `allocate` returned other memory than requested.
    """
    specs = list(specs)
    host_bytes = sum(spec.nbytes for spec in specs if not staged or spec.place != "device")
    device_bytes = sum(spec.nbytes for spec in specs if staged and spec.place != "host")
    with (
        allocation(what, device_bytes, device, advice),
        allocation(what, host_bytes, torch.device("cpu"), advice),
    ):
        return {spec.name: Column(spec, device, staged, allocate) for spec in specs}
