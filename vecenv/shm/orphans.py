"""A worker ends when its caller is gone, however that ended."""

from __future__ import annotations

import os
import signal
import sys
import threading

__all__ = ["end_with_caller"]

_PR_SET_PDEATHSIG = 1


def end_with_caller(caller_pid: int, *, is_child_of_main_thread: bool) -> None:
    """Arrange that this process is killed when process `caller_pid` ends.

    Args:
        caller_pid: Whom to follow.
        is_child_of_main_thread: Whether the caller's main thread started this process itself. Linux
            then signals the end of the parent; for other threads it would signal the thread's end.
    """
    if is_child_of_main_thread and sys.platform == "linux" and _ask_kernel():
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
    try:
        file = os.pidfd_open(caller_pid)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):  # not Linux, or too old
        _poll(caller_pid)
    else:
        import select

        select.select([file], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _poll(caller_pid: int) -> None:
    import time

    while True:
        try:
            os.kill(caller_pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.25)
