"""How much memory is free, and refusing what cannot fit before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from buffers.errors import BufferMemoryError

__all__ = ["check_fits", "format_bytes", "free_bytes"]

_MEMINFO = Path("/proc/meminfo")
# Of the control group a container runs in: limit, use, and what of the use is page cache the kernel
# can drop at once; version 2, then version 1.
_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    known = [
        number for number in (_available_in_machine(), _available_in_group()) if number is not None
    ]
    return min(known, default=None)


def _available_in_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _available_in_group() -> int | None:
    for folder, limit_name, use_name, cache_name in _GROUPS:
        try:
            limit = (folder / limit_name).read_text().strip()
            use = int((folder / use_name).read_text())
            statistics = (folder / "memory.stat").read_text().split()
        except (OSError, ValueError):
            continue
        if limit.isdigit():
            numbers = dict(zip(statistics[::2], statistics[1::2], strict=False))
            return max(0, int(limit) - use + int(numbers.get(cache_name, 0)))
    return None


def check_fits(what: str, needed: int, device: torch.device, advice: str) -> None:
    """Raise BufferMemoryError if `needed` bytes are more than what is free on the device.

    Args:
        what: Names what asks for the memory, at the start of the message.
        needed: Bytes.
        device: Where.
        advice: What the user can do, at the end of the message.
    """
    free = free_bytes(device)
    if free is not None and needed > free:
        raise BufferMemoryError(
            f"{what} needs {format_bytes(needed)} on {device}, but only {format_bytes(free)} are "
            f"free; {advice}"
        )


def format_bytes(number: int) -> str:
    """A size for people.

    >>> format_bytes(1536), format_bytes(640), format_bytes(5 * 2**30)
    ('1.5 KiB', '640 bytes', '5.0 GiB')
    """
    if number < 1024:
        return f"{number} bytes"
    size = float(number)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"
