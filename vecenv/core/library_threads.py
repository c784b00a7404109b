"""Limit numeric libraries to one thread, in processes that share the cores with others.

Otherwise PyTorch, BLAS, OpenMP and Numba start a thread per core in every process.
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
    """Return this process's environment variables, with limits of libraries' threads added.

    Variables that the user has set win; OpenBLAS, MKL and PyTorch also follow OMP_NUM_THREADS.
    """
    names = () if "OMP_NUM_THREADS" in os.environ else _VARIABLES
    return {**dict.fromkeys((*names, "NUMBA_NUM_THREADS"), "1"), **os.environ}


def limit_threads() -> None:
    """Let libraries use one thread in this process.

    What factories set later wins. If OpenBLAS is loaded already, the caller has limited it.
    """
    given, limits = set(os.environ), limited_environment()
    config: Any = getattr(sys.modules.get("numba"), "config", None)
    if config is not None and "NUMBA_NUM_THREADS" not in given:
        del limits["NUMBA_NUM_THREADS"]  # after its import this would reset all of Numba's settings
        if config.NUMBA_NUM_THREADS == config.NUMBA_DEFAULT_NUM_THREADS:
            config.NUMBA_NUM_THREADS = 1
    os.environ.update(limits)
    torch: Any = sys.modules.get("torch")
    if given.isdisjoint(_TORCH) and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)


@contextlib.contextmanager
def forked_with_one_openblas_thread() -> Iterator[None]:
    """Let each copy of OpenBLAS have one thread in processes that are forked in this context.

    OpenBLAS ends its threads before a fork. Setting the number in a fork starts them again, and
    they spin for a while. So the number is set in this process, and set back afterwards.
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
