"""How much memory a process and its children use, as Linux counts it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from vecenv.timing.memory import pss_bytes

__all__ = ["tree_memory_bytes"]

_PROC = Path("/proc")


def tree_memory_bytes(pid: int) -> int | None:
    """Return the proportional set size (PSS) of a process and all below it.

    Memory that processes share is counted once, in parts. None where the system does not tell.
    """
    total = 0
    pending = [pid]
    while pending:
        process = pending.pop()
        own = pss_bytes(process)
        if own is None:
            if process == pid:
                return None
            continue  # it has ended meanwhile
        total += own
        with contextlib.suppress(OSError, ValueError):
            for task in (_PROC / str(process) / "task").iterdir():
                pending += [int(child) for child in (task / "children").read_text().split()]
    return total
