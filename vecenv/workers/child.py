"""How a process for users' envs begins, with what its caller gives it, and how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from vecenv.core.interrupts import put_handlers_back
from vecenv.core.orphans import Family, end_with_caller
from vecenv.core.pickling import load_factories, load_registry

__all__ = ["ChildSetup", "end_child", "limit_threads", "loaded_libraries", "set_up_child"]

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_OPENBLAS_SETTERS = ("scipy_openblas_set_num_threads", "openblas_set_num_threads")


class ChildSetup(NamedTuple):
    """What a process for users' envs is given of its caller.

    Attributes:
        factories: Of envs: a list for a fork, otherwise that list pickled.
        registry: Pickled specs of the caller's env ids; None for a fork.
        caller_pid: Whom to follow into the end.
        is_own_child: Whether the caller's main thread starts it itself, see `end_with_caller`.
        authkey: The caller's, for the managers of `multiprocessing` that envs talk to.
    """

    factories: list[Callable[[], Any]] | bytes
    registry: bytes | None
    caller_pid: int
    is_own_child: bool
    authkey: bytes

    def load(self) -> list[Callable[[], Any]]:
        """Return the factories, in the child; the code of users' classes may raise anything."""
        if isinstance(self.factories, list):
            return self.factories
        assert self.registry is not None
        load_registry(self.registry)
        return load_factories(self.factories)


def set_up_child(setup: ChildSetup, name: str) -> Family:
    """Leave signals to the caller, end with it, and be a process of its own for the libraries.

    Otherwise envs would use the caller's connections to managers, their queues would believe that
    the threads that write them out are there, and the caller's processes would pass for theirs.

    Args:
        setup: What the caller has given.
        name: Of the process.

    Returns:
        The processes that envs will start.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C and then closes us
    if hasattr(signal, "SIGCHLD"):  # not in Windows
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # what the caller does is not for our envs
    _leave_sigterm_to_caller()
    put_handlers_back()
    end_with_caller(setup.caller_pid, is_child_of_main_thread=setup.is_own_child)
    family = Family()
    # Workers are processes of `multiprocess`, of which the standard library knows nothing.
    process = multiprocessing.current_process()
    process.name = name
    process.authkey = setup.authkey
    multiprocessing.process._children = set()  # type: ignore[attr-defined]  # private to the library
    multiprocessing.util._run_after_forkers()  # type: ignore[attr-defined]  # private to the library
    return family


def _leave_sigterm_to_caller() -> None:
    """Stay when SIGTERM comes: job schedulers send it to all processes, and the caller saves first.

    A function, because programs that envs start would inherit that a signal is ignored.
    """
    owner = os.getpid()

    def stay(number: int, frame: Any) -> None:
        if os.getpid() != owner:  # a fork that an env has made
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    signal.signal(signal.SIGTERM, stay)


def end_child() -> None:
    """Do at the child's end what the standard library does at the end of its processes."""
    daemons = [process for process in multiprocessing.active_children() if process.daemon]
    for process in daemons:
        process.terminate()
    for process in daemons:
        process.join(1)
    threading._shutdown()  # type: ignore[attr-defined]  # executors first, while their queues work
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]  # queues are written out


def limit_threads() -> None:
    """Let libraries use one thread in this process, which shares its cores with other workers.

    PyTorch, BLAS, OpenMP and Numba otherwise start a thread per core in every worker. Variables
    such as OMP_NUM_THREADS that the user has set win, and so does what factories set.
    """
    given = {name for name in (*_THREAD_VARIABLES, "NUMBA_NUM_THREADS") if name in os.environ}
    if "NUMBA_NUM_THREADS" not in given:
        numba = sys.modules.get("numba")
        if numba is None:
            os.environ["NUMBA_NUM_THREADS"] = "1"
        elif hasattr(numba, "config"):
            _limit_numba(vars(numba.config))
    if "OMP_NUM_THREADS" in given:
        return  # OpenBLAS, MKL and PyTorch follow it
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, "1")
    if "OPENBLAS_NUM_THREADS" not in given:
        _limit_openblas()
    torch = sys.modules.get("torch")
    if "MKL_NUM_THREADS" not in given and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)  # type: ignore[union-attr]  # a module, as it has that


def loaded_libraries() -> dict[str, str]:
    """Return the paths of the shared libraries that this process has loaded, by file name."""
    libraries = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            start = line.find("/")
            if start >= 0 and ".so" in (name := line[line.rfind("/") + 1 :]):
                libraries[name] = line[start:]
    return libraries


def _limit_numba(config: dict[str, Any]) -> None:
    """Set the number of threads that Numba will start; a variable now would reset its settings."""
    parallel = sys.modules.get("numba.np.ufunc.parallel")
    is_launched = getattr(parallel, "_is_initialized", False)
    if not is_launched and config["NUMBA_NUM_THREADS"] == config["NUMBA_DEFAULT_NUM_THREADS"]:
        config["NUMBA_NUM_THREADS"] = 1


def _limit_openblas() -> None:
    """Tell copies of OpenBLAS that a fork has inherited; they have read their variables before.

    The functions for that start threads again which the fork has ended, and these spin for a while.
    So the number is written directly where it can be.
    """
    for name, path in loaded_libraries().items():
        if "openblas" not in name:
            continue
        library = ctypes.CDLL(path)
        if hasattr(library, "blas_cpu_number"):
            ctypes.c_int.in_dll(library, "blas_cpu_number").value = 1
            continue
        for setter in _OPENBLAS_SETTERS:
            for suffix in ("", "64_"):
                if hasattr(library, setter + suffix):
                    getattr(library, setter + suffix)(1)
