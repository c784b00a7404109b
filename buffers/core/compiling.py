"""Numba's `njit` for kernels of buffers: cached on disk, and announced if it takes long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vecenv.core.announcing import announced
from vecenv.core.compiling import cached_njit, is_jit_off

__all__ = ["njit"]

_announced: list[str] = []  # once in a process is enough: there are dozens of kernels


def njit(*, cache: bool = True, **options: Any) -> Callable[[Any], Any]:
    """Compile a function by `cached_njit` with options of `numba.njit`."""

    def decorate(function: Any) -> Any:
        dispatcher = cached_njit(function, **options)
        if is_jit_off():
            return dispatcher
        compile_or_load = dispatcher.compile

        def is_news() -> bool:
            is_first = bool(dispatcher.stats.cache_misses and not _announced)  # else it is loaded
            _announced.extend([function.__name__] * is_first)
            return is_first

        def compile_announced(signature: Any) -> Any:
            with announced("the kernels of buffers", [function], is_compiling=is_news):
                return compile_or_load(signature)

        dispatcher.compile = compile_announced
        return dispatcher

    return decorate
