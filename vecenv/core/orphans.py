"""A worker ends when its caller is gone, and what its envs have started ends with the worker.

The kernel, or a thread where it can't, kills a worker whose caller is gone. What envs start, game
servers for example, is in the worker's process group. As soon as a worker has children, a process
of a few lines watches it from outside of the group, and ends the group when the worker is gone: by
whatever way, so also when the caller was killed. A worker without children has no watcher.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import sys
import threading
import time
from typing import Any

from vecenv.machine import is_portable

__all__ = ["Family", "end_with_caller"]

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.25  # between looks after the caller, where it can't be waited for
# By module: the functions by which Python starts processes, but for forks, which have hooks.
_STARTERS = (
    ("subprocess", "_fork_exec"),
    ("_posixsubprocess", "fork_exec"),
    ("os", "posix_spawn"),
    ("os", "posix_spawnp"),
    ("os", "system"),
)
_WATCHER = """
import os, select, signal, sys, time
worker = int(sys.argv[1])
try:
    file = os.pidfd_open(worker)
    if os.getppid() == worker:
        select.select([file], [], [])
except (AttributeError, OSError):
    while os.getppid() == worker:
        time.sleep(0.1)
try:
    os.killpg(worker, signal.SIGTERM)
    for _ in range(50):
        time.sleep(0.01)
        os.killpg(worker, 0)
    os.killpg(worker, signal.SIGKILL)
except OSError:
    pass
"""


class Family:
    """The processes that a worker's envs start; they end with the worker.

    Those that make a session of their own (`start_new_session=True`) are let go.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._watcher: Any = None
        self._has_group = hasattr(os, "setpgid")
        if self._has_group:
            try:
                os.setpgid(0, 0)
            except OSError:  # a session's leader has a group of its own
                self._has_group = os.getpgrp() == self._pid
        if self._has_group:  # which Windows has not
            os.register_at_fork(before=self._note)
            for module, name in _STARTERS:
                self._note_calls(importlib.import_module(module), name)

    def _note_calls(self, module: Any, name: str) -> None:
        """Have the family watched before a function of a module is called for the first time.

        An audit hook would be told of all of them too, but also of every `id()` and other things
        that envs do all the time: `copy.deepcopy` takes many times as long with one.
        """
        start = getattr(module, name, None)
        if start is None:  # in this version of Python
            return

        @functools.wraps(start)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._note()
            return start(*args, **kwargs)

        setattr(module, name, noted)

    def _note(self) -> None:
        if self._watcher is None and os.getpid() == self._pid:
            self._watch()

    def look(self) -> None:
        """Have the children watched, if there are some that compiled code has started."""
        if self._watcher is None and self._has_group:
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except (AttributeError, OSError):
                return  # there are none, or this system can't tell
            self._watch()

    def _watch(self) -> None:
        import subprocess

        self._watcher = ()  # starting it is a start as well
        none = subprocess.DEVNULL
        with contextlib.suppress(Exception):  # envs matter more
            self._watcher = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WATCHER, str(self._pid)],
                stdin=none,
                stdout=none,
                stderr=none,
                cwd="/",
                start_new_session=True,
            )


def end_with_caller(caller_pid: int, *, is_child_of_main_thread: bool) -> None:
    """Arrange that this process is killed when process `caller_pid` ends.

    Args:
        caller_pid: Whom to follow.
        is_child_of_main_thread: Whether the caller's main thread started this process itself. Linux
            then signals the end of the parent; for other threads it would signal the thread's end.
    """
    if is_child_of_main_thread and not is_portable() and _ask_kernel():
        if os.getppid() != caller_pid:  # it ended before we asked
            os._exit(1)
        return
    threading.Thread(target=_watch, args=(caller_pid,), daemon=True, name="caller-watch").start()


def _ask_kernel() -> bool:
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    return prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0


def _watch(caller_pid: int) -> None:
    """Wait for the caller's end and kill this process."""
    file = -1
    if not is_portable():
        try:
            file = os.pidfd_open(caller_pid)
        except ProcessLookupError:
            os._exit(1)
        except (AttributeError, OSError):  # too old, or forbidden
            pass
    if file >= 0:
        import select

        ended = select.poll()  # `select` refuses files above 1023
        ended.register(file, select.POLLIN)
        ended.poll()
    elif sys.platform == "win32":
        from multiprocess.process import parent_process

        caller = parent_process()
        if caller is not None:
            caller.join()
    else:
        _poll(caller_pid)
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def _poll(caller_pid: int) -> None:
    is_child = os.getppid() == caller_pid  # then the number can't be another process's meanwhile
    while True:
        try:
            os.kill(caller_pid, 0)
        except ProcessLookupError:
            return
        if is_child and os.getppid() != caller_pid:
            return
        time.sleep(_LOOK_S)
