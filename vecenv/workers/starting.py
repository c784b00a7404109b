"""How processes for envs start: forked where that is harmless, else as a fresh interpreter.

Neither runs the main script again: a fork has a copy of it, and a fresh interpreter gets the
factories by `cloudpickle`, with the classes and functions of the main script that they need.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import multiprocessing.connection  # noqa: F401  # sets its own hook before the one below
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from vecenv.core.ending import close_all, end_group, interrupts_later
from vecenv.core.pickling import dump_factories, dump_registry, load_factories, load_registry
from vecenv.machine import (
    is_portable,
    limit_threads,
    limited_environment,
    loaded_libraries,
    num_threads,
)
from vecenv.workers.channel import socket_pair
from vecenv.workers.memory import Memory

__all__ = ["ChildSetup", "Process", "set_up_child", "start_process", "why_fresh"]

atexit.register(close_all)  # before `multiprocessing` waits for its processes, so after its import
_LIBRARIES = ("multiprocess", "multiprocessing")
# Libraries that are loaded to use a GPU or a display, which a forked child can't.
_DEVICES = ("libcuda.so", "libEGL_", "libGLX_", "libOSMesa")
# Code of a fresh interpreter. It reads `sys.path` first, where all other imports are looked up.
_PROLOGUE = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from vecenv.workers.starting import be_fresh; be_fresh(sys.stdin.buffer)"
)


def why_fresh(method: str | None) -> str | None:
    """Return why processes for envs must be fresh interpreters at present; None to fork.

    Args:
        method: "fork"; "forkserver" or "spawn" for a fresh interpreter; None for the method that
            was set with `set_start_method` of `multiprocess` or `multiprocessing`. If none is set,
            processes fork where that is harmless, which takes a millisecond to find out.
    """
    if method not in (None, "fork", "forkserver", "spawn"):
        raise ValueError(f"context is {method!r}, expected 'fork', 'forkserver', 'spawn' or None")
    if multiprocessing.current_process().daemon:  # daemons can't fork processes with children
        return "this process is a daemon"
    # `allow_none`: else asking would fix the method. The system's default is not the user's choice.
    libraries: Any = filter(None, map(sys.modules.get, _LIBRARIES))
    known = (
        (lib.get_start_method(allow_none=True), lib.get_all_start_methods()) for lib in libraries
    )
    method = method or next((found for found, most in known if found not in (None, most[0])), None)
    if method is None and not is_portable():
        return why_not_fork()
    return None if method == "fork" else f"the start method is {method or 'spawn'!r}"


def start_process(
    fresh: str | None,
    target: Callable[..., None],
    name: str,
    factories: Sequence[Callable[[], Any]],
    *args: Any,
    variables: Mapping[str, str] | None = None,
) -> tuple[Process, socket.socket]:
    """Start a process that calls `target(channel, child, *args)`; return it and a channel to it.

    Call it under `interrupts_later`: after Ctrl-C nothing would refer to the process. It is forked
    unless `fresh` gives a reason against that, see `why_fresh`. A fresh interpreter has the
    environment `variables` from its start.

    Raises:
        Exception: Factories for a fresh interpreter can't be pickled; a note says what to do.
    """
    authkey = bytes(multiprocessing.current_process().authkey)
    child = ChildSetup(name, list(factories), authkey)
    if fresh is not None:
        try:
            child = child._replace(factories=(dump_registry(), dump_factories(list(factories))))
        except Exception as error:
            error.add_note(
                f"Envs for {name} are pickled with cloudpickle, as it is a fresh interpreter: "
                f"{fresh}. context='fork', without worker_env, needs no pickling."
            )
            raise
    here, there = socket_pair()
    try:
        if fresh is None:
            inner: Any = _Fork(here, partial(target, there, child, *args))
        else:
            inner = _start_fresh(target, there, child, args, variables or {})
        return Process(inner), here
    except Exception:
        here.close()
        raise
    finally:
        there.close()


class _Fork(multiprocessing.get_context("fork").Process if hasattr(os, "fork") else object):  # type: ignore[misc]  # Windows forks nothing
    """A process of `multiprocessing` that forks of its parent do not wait for."""

    def __init__(self, here: socket.socket, task: Callable[[], None]) -> None:
        super().__init__(daemon=False)
        self._owner, self._here, self._task = os.getpid(), here, task
        self.start()
        del self._here, self._task

    def run(self) -> None:
        """Do the task in the child, after closing `here`, which no hook of forks knows yet."""
        self._here.close()
        self._task()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end; not in forks of the owner, where `multiprocessing` calls it at exit."""
        if os.getpid() == self._owner:
            super().join(timeout)

    def poll(self) -> int | None:
        """Return the exit code, as `Popen` does."""
        return self.exitcode


class Process:
    """A child process, however it was started.

    A program may ignore `SIGCHLD`, or wait for all of its children elsewhere. So the end of its
    channel tells that a process has ended; this class tells how it ended, and ends it.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.pid: int = inner.pid
        self._code: int | None = None

    @property
    def exit_code(self) -> int | None:
        """Exit code, or minus the signal; None while it lives, or if other code has reaped it."""
        with contextlib.suppress(ValueError):  # it has been closed
            self._code = self._inner.poll()
        return self._code

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        if self.exit_code is not None:
            return False
        try:
            if sys.platform != "win32":
                os.kill(self.pid, 0)  # sends nothing, and raises if there is no such process
        except OSError as error:  # no such process: other code has reaped it
            return not isinstance(error, ProcessLookupError)
        return True

    def join(self, timeout: float) -> None:
        """Wait until the process has ended, at most `timeout` seconds.

        It polls, as forks of the process may hold open the file that `multiprocessing` waits for.
        """
        end, pause_s = time.monotonic() + timeout, 0.0005
        while self.is_alive() and time.monotonic() < end:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)

    def kill(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ValueError):  # it has been closed
            self._inner.kill()

    def close(self) -> None:
        """Release the process after its end, and end what it has started and left behind."""
        end_group(self.pid)
        with contextlib.suppress(ValueError, AttributeError):  # reaped by other code; or a `Popen`
            self._inner.close()

    def leave_to_parent(self) -> None:
        """Give up the process, in a fork of its parent."""
        self._inner.returncode = 0  # else a `Popen` would warn that it is still running


def _start_fresh(
    target: Callable[..., None],
    there: socket.socket,
    child: ChildSetup,
    args: tuple[Any, ...],
    variables: Mapping[str, str],
) -> subprocess.Popen:
    """Start an interpreter, and write to its standard input what to do."""
    handles = [arg.handle[0] for arg in args if isinstance(arg, Memory)]
    # Without users' categories: their modules must not be imported before the factories.
    filters = [entry for entry in warnings.filters if entry[2].__module__ == "builtins"]
    told = io.BytesIO()  # pickled before the process starts, as that may raise; the channel later
    pickle.dump([os.path.abspath(path) for path in sys.path if isinstance(path, str)], told)
    pickle.dump((list(getattr(sys, "argv", [])), filters), told)
    pickle.dump((target, child, args), told)
    is_windows = sys.platform == "win32"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROLOGUE],  # -P: the current folder is not on `sys.path`
        stdin=subprocess.PIPE,
        pass_fds=() if is_windows else (there.fileno(), *handles),
        env={**limited_environment(), **variables},
    )
    pickle.dump(there.share(process.pid) if is_windows else there.fileno(), told)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # its channel tells its end
        stdin.write(told.getvalue())
    return process


def be_fresh(file: Any) -> None:
    """Run a fresh interpreter: do what `_start_fresh` has written to `file`."""
    argv, filters = pickle.load(file)
    sys.argv[:] = argv
    warnings.resetwarnings()
    warnings.filters.extend(filters)  # type: ignore[attr-defined]  # typeshed says Sequence
    target, child, args = pickle.load(file)
    found = pickle.load(file)
    nothing = os.open(os.devnull, os.O_RDONLY)  # standard input from here on
    os.dup2(nothing, 0)
    os.close(nothing)
    if isinstance(found, bytes):
        channel = socket.fromshare(found)  # type: ignore[attr-defined]  # of Windows
    else:
        channel = socket.socket(fileno=found)
        channel.set_inheritable(False)
    target(channel, child, *args)


# -- whether forking is harmless ------------------------------------------------------------------


def why_not_fork() -> str | None:
    """Return why a fork of this process may hang or break; None if no reason is known.

    The system counts the threads, as Python does not know those of PyTorch or Numba. Libraries that
    can cope with forks (such as NumPy's OpenBLAS) end their threads before a fork. So if there are
    threads, a child is forked that does nothing, and the threads that are left are counted.
    """
    if (count := threading.active_count()) > 1:
        return f"this process has {count} Python threads"
    if "jax" in sys.modules:
        return "JAX has been imported"
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "PyTorch uses a GPU"
    for library in loaded_libraries():
        if library.startswith(_DEVICES):
            return f"{library} has been loaded"
    if num_threads() > 1:
        with interrupts_later():
            with warnings.catch_warnings():
                # Python 3.12 warns of threads too, by a less exact count.
                warnings.simplefilter("ignore")
                pid = os.fork()
            if pid == 0:
                os.kill(os.getpid(), signal.SIGKILL)  # runs no code of the program
            with contextlib.suppress(ChildProcessError):  # a user's handler has reaped all children
                os.waitpid(pid, 0)
        if (count := num_threads()) > 1:
            return f"this process has {count} threads"
    return None


# -- what a process for envs does first ------------------------------------------------------------


class ChildSetup(NamedTuple):
    """What a process for users' envs gets from its caller.

    Attributes:
        name: Name of the process.
        factories: Factories of envs, for a fork; else the caller's registry and the factories, both
            pickled.
        authkey: The caller's key, for the managers of `multiprocessing` that envs talk to.
    """

    name: str
    factories: list[Callable[[], Any]] | tuple[bytes, bytes]
    authkey: bytes

    def load(self) -> list[Callable[[], Any]]:
        """Return the factories, in the child; code of users' classes may raise anything."""
        if isinstance(self.factories, list):
            return self.factories
        registry, factories = self.factories
        load_registry(registry)
        return load_factories(factories)


def set_up_child(setup: ChildSetup, channel: socket.socket) -> None:
    """Leave signals to the caller, lead a process group, and use one thread.

    Job schedulers send SIGTERM to all processes; workers ignore it, so that the caller can save
    its state first.
    """
    worker = os.getpid()

    def stay(number: int, frame: Any) -> None:  # not SIG_IGN, which started programs would inherit
        if os.getpid() != worker:  # a fork that an env has made
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    signal.signal(signal.SIGTERM, stay)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C, and ends workers
    if hasattr(signal, "SIGCHLD"):  # not in Windows
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the caller's handler is not for envs
    process = multiprocessing.current_process()
    process.name, process.authkey = setup.name, setup.authkey
    if hasattr(os, "setpgid"):  # not in Windows
        with contextlib.suppress(OSError):  # a session's leader has a group of its own
            os.setpgid(0, 0)
    if hasattr(os, "register_at_fork"):  # processes that an env forks must not keep it open
        os.register_at_fork(after_in_child=channel.close)
    limit_threads()
