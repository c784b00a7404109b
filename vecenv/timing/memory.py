"""Memory of a process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["pss_bytes"]


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
