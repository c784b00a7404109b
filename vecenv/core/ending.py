"""How programs end: signals that wait, vector envs that are closed, workers that are ended.

Open vector envs are closed when the program ends. If it is killed, its workers see the end of
their channels. A small watcher process ends those that are at work, and what envs have started
(game servers, say), which belongs to the worker's process group.
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
from collections.abc import Iterator
from typing import IO, Any

__all__ = ["Watcher", "close_all", "close_at_exit", "end_group", "interrupts_later"]

_GROUP_S = 0.2  # seconds between SIGTERM and SIGKILL
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
# Ctrl-C, requests to end, and timers, which programs use for limits of time; Windows has no timer.
_SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, n)]

_open: weakref.WeakSet[Any] = weakref.WeakSet()


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Call the handlers of SIGINT, SIGTERM and SIGALRM at the end of this context, each once.

    Numba does not survive an exception in the midst of a compilation: later ones fail. The owner of
    a new process must know of it, or nobody ends it. Elsewhere an interrupted call simply ends;
    docs/trust.md says what an object promises afterwards.

    Only the main thread runs handlers; in other threads this does nothing.
    """
    came: dict[int, Any] = {}  # signal number: frame in which it first came
    is_main = threading.current_thread() is threading.main_thread()
    found = [(number, signal.getsignal(number)) for number in _SIGNALS]
    handlers: dict[int, Any] = {n: one for n, one in found if callable(one) and is_main}
    try:
        for number in handlers:
            signal.signal(number, came.setdefault)  # the handler keeps the first frame
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in came.items():
            handlers[number](number, frame)


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

    It is a small process of its own, as nothing else is left then. It sends SIGTERM, which workers
    ignore as they close their envs, and half a second later SIGKILL. Processes that begin a session
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
