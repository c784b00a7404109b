"""How much memory a process and its children use, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

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
        try:
            rollup = (_PROC / str(process) / "smaps_rollup").read_text()
            for task in (_PROC / str(process) / "task").iterdir():
                pending += [int(child) for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            if process == pid:
                return None
            continue  # it has ended meanwhile
        total += sum(
            1024 * int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")
        )
    return total
