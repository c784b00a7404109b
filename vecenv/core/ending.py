"""Close vector envs and end their workers, and what envs have started, however a program ends.

Open vector envs are closed when the program ends. If a caller is gone, the kernel kills its
workers, or a thread of theirs where it can't. What envs start (game servers, say) belongs to the
worker's process group. The caller ends that group; if it is gone, a small watcher process does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import IO, Any

from vecenv.core.interrupts import interrupts_later
from vecenv.machine import is_portable

__all__ = ["Watcher", "close_all", "close_at_exit", "end_group", "end_with_caller"]

_PR_SET_PDEATHSIG = 1
_GROUP_S = 0.2  # seconds between SIGTERM and SIGKILL
_LOOK_S = 0.25  # seconds between checks whether the caller lives, where these must be polled
_WATCHER = """
import os, signal, sys, time
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for number in (signal.SIGTERM, 0, signal.SIGKILL):
    for _ in range(1 if number else 50):
        for group in list(groups):
            try:
                os.killpg(group, number)
            except OSError:
                groups.discard(group)
        if groups and not number:
            time.sleep(0.01)
"""
_open: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(envs: Any) -> None:
    """Call `envs.close()` when the program ends, if `envs` are open then; not in forks."""
    _open.add(envs)


def close_all() -> None:
    """Close all open vector envs; a second call does nothing."""
    for envs in list(_open):
        with contextlib.suppress(Exception):  # nobody is left to report it to
            if not envs.closed:
                envs.close()


atexit.register(close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open.clear)


class Watcher:
    """Ends the process groups of this process's workers when this process is gone.

    It is a small process of its own, as nothing else is left then. Processes that begin a session
    of their own (`start_new_session=True`) are not ended.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        # Kept apart from `Popen`, which may outlive this object: closing this file is the signal.
        self._file: IO[bytes] | None = None

    def start(self) -> None:
        """Start the process, which `close` ends."""
        if hasattr(os, "killpg"):  # not in Windows
            command, null = [sys.executable, "-I", "-S", "-c", _WATCHER], subprocess.DEVNULL
            options: dict[str, Any] = {"cwd": "/", "start_new_session": True, "bufsize": 0}
            options.update(stdin=subprocess.PIPE, stdout=null, stderr=null)
            with interrupts_later():  # else Ctrl-C could leave a process that nothing refers to
                process = self._process = subprocess.Popen(command, **options)
                self._file, process.stdin = process.stdin, None

    def tell(self, sign: str, pid: int) -> None:
        """Report a worker that has been started ("+"), or that has ended with its group ("-")."""
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):  # somebody has killed the process
                self._file.write(f"{sign}{pid}\n".encode())

    def close(self, *, is_owner: bool = True) -> None:
        """End the process, after all workers have ended; in a fork, only give it up."""
        process, self._process = self._process, None
        if process is not None and is_owner:
            process.kill()
            process.wait()
        elif process is not None:
            process.returncode = 0  # else it would warn that a process is still running
        if self._file is not None:
            self._file.close()


def end_group(pid: int) -> None:
    """End what a worker has started and left behind; the worker itself has ended."""
    if not hasattr(os, "killpg"):  # not in Windows
        return
    give_up = time.monotonic() + _GROUP_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)
        while time.monotonic() < give_up:
            time.sleep(0.005)
            os.killpg(pid, 0)  # raises once the group is gone
        os.killpg(pid, signal.SIGKILL)


def end_with_caller(caller_pid: int, *, is_child_of_main_thread: bool) -> None:
    """Arrange that this process is killed when process `caller_pid` ends.

    Args:
        caller_pid: Process id of the caller.
        is_child_of_main_thread: Whether the caller's main thread started this process itself. Linux
            then signals the end of the parent; for other threads it would signal the thread's end.
    """
    if is_child_of_main_thread and not is_portable():
        import ctypes

        if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0:
            if os.getppid() != caller_pid:  # it ended before this call, so there is no signal
                signal.raise_signal(signal.SIGKILL)
            return
    threading.Thread(target=_watch, args=(caller_pid,), daemon=True, name="caller-watch").start()


def _watch(caller_pid: int) -> None:
    """Wait for the caller's end and kill this process."""
    if sys.platform == "win32":
        import multiprocess

        caller = multiprocess.parent_process()  # type: ignore[attr-defined]  # multiprocess has no types
        if caller is not None:
            caller.join()
    else:
        is_child = os.getppid() == caller_pid  # then no other process can get its number unnoticed
        with contextlib.suppress(ProcessLookupError):
            while not is_child or os.getppid() == caller_pid:
                os.kill(caller_pid, 0)
                time.sleep(_LOOK_S)
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
