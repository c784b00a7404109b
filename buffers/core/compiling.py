"""Numba's `njit` for kernels of buffers, cached on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vecenv.core.compiling import cached_njit

__all__ = ["njit"]


def njit(*, cache: bool = True, **options: Any) -> Callable[[Any], Any]:
    """Compile a function by `cached_njit` with options of `numba.njit`."""
    return functools.partial(cached_njit, **options)
