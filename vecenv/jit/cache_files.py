"""Keeps the folder of compiled code from growing without end."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

__all__ = ["tidy"]

NUM_KEPT = 100  # versions of one function: kinds of env, and states of their source


def tidy(dispatcher: Any) -> None:
    """Note that the cached code of a function was used; if it is new, delete what was used least.

    Numba writes new files for every fingerprint and deletes none.

    Args:
        dispatcher: What `cached_njit` returned, compiled.
    """
    if dispatcher._cache.cache_path is None:
        return
    folder = Path(dispatcher._cache.cache_path)
    name = dispatcher.py_func.__qualname__
    function = name.partition("-")[0]
    with contextlib.suppress(OSError):  # other processes delete too, or the folder is read-only
        for index in folder.glob(f"*.{name}-*.nbi"):
            os.utime(index)
        if not dispatcher.stats.cache_hits:
            indices = sorted(folder.glob(f"*.{function}-*.nbi"), key=_last_use, reverse=True)
            for index in indices[NUM_KEPT:]:
                for file in (*folder.glob(f"{index.stem}.*.nbc"), index):
                    file.unlink(missing_ok=True)


def _last_use(index: Path) -> float:
    return index.stat().st_mtime
