"""Vector envs that are still open when the program ends are closed."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Any

__all__ = ["close_all", "close_at_exit"]

_open: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(envs: Any) -> None:
    """Have `envs.close()` called at the program's end, if somebody still has them then.

    A fork of this process leaves them alone.
    """
    _open.add(envs)


def close_all() -> None:
    """Close what is open; nothing happens the second time."""
    for envs in list(_open):
        with contextlib.suppress(Exception):  # nobody is left to be told
            if not envs.closed:
                envs.close()


atexit.register(close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open.clear)
