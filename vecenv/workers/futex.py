"""Numbers of the futex system call, and whether compiled waits can be used here."""

from __future__ import annotations

import os
import platform
import sys

__all__ = ["FUTEX", "FUTEX_WAIT", "FUTEX_WAKE", "has_futex"]

FUTEX = {"x86_64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98}.get(platform.machine(), -1)
FUTEX_WAIT, FUTEX_WAKE = 0, 1  # not the private kind: the words are shared between processes


def has_futex() -> bool:
    """Whether waits can be compiled: Linux, a known processor, Numba's compiler not off."""
    jit_is_off = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
    return sys.platform == "linux" and FUTEX >= 0 and sys.byteorder == "little" and not jit_is_off
