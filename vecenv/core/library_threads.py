"""Threads of numeric libraries: one each, in processes that share the cores with others.

PyTorch, BLAS, OpenMP and Numba start a thread per core in every process otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

from vecenv.machine import loaded_libraries

__all__ = ["forked_with_one_openblas_thread", "limit_threads", "limited_environment"]

_OPENBLAS = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
_TORCH = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
_VARIABLES = (*sorted(_OPENBLAS | _TORCH), "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_VARIABLES += ("NUMEXPR_NUM_THREADS",)


def limited_environment() -> dict[str, str]:
    """Return the environment variables of this process, and those that limit libraries' threads.

    Variables that the user has set win, and OpenBLAS, MKL and PyTorch follow OMP_NUM_THREADS.
    """
    names = () if "OMP_NUM_THREADS" in os.environ else _VARIABLES
    return {**dict.fromkeys((*names, "NUMBA_NUM_THREADS"), "1"), **os.environ}


def limit_threads() -> None:
    """Let libraries use one thread in this process.

    What factories set afterwards wins. OpenBLAS, if it is loaded already, was told by the caller.
    """
    given, limits = set(os.environ), limited_environment()
    config: Any = getattr(sys.modules.get("numba"), "config", None)
    if config is not None and "NUMBA_NUM_THREADS" not in given:
        del limits["NUMBA_NUM_THREADS"]  # now it would reset all of Numba's settings
        if config.NUMBA_NUM_THREADS == config.NUMBA_DEFAULT_NUM_THREADS:
            config.NUMBA_NUM_THREADS = 1
    os.environ.update(limits)
    torch: Any = sys.modules.get("torch")
    if given.isdisjoint(_TORCH) and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)


@contextlib.contextmanager
def forked_with_one_openblas_thread() -> Iterator[None]:
    """Let each copy of OpenBLAS have one thread in the processes that are forked meanwhile.

    OpenBLAS ends its threads before a fork, and a fork that is told a number starts them again,
    which then spin for a while. So this process is told, and told its former number afterwards.
    """
    told = []
    paths = [path for name, path in loaded_libraries().items() if "openblas" in name]
    is_given = not _OPENBLAS.isdisjoint(os.environ)
    for path, prefix, suffix in product(() if is_given else paths, ("", "scipy_"), ("", "64_")):
        library, form = ctypes.CDLL(path), f"{prefix}openblas_%s_num_threads{suffix}"
        if hasattr(library, form % "set") and (number := library[form % "get"]()) > 1:
            told.append((library[form % "set"], number))
    try:
        for tell, _ in told:
            tell(1)
        yield
    finally:
        for tell, number in told:
            tell(number)
