"""Child processes that are known for sure, whatever reaps them or reuses their numbers.

A program may ignore `SIGCHLD`, or wait for all of its children in some other place. The number of a
process that has ended is then free at once, and may be another process's when it is used next. So a
process is known here by a file that stands for it (a pidfd) where there is such a thing, and else
counts as gone as soon as it is no child any more; it is never sent a signal by number alone.

A fork of this process has copies of everything here, and none of these children: what is given to
`tell_after_fork` takes notice. They are in no table of `multiprocess`, as a fork would end what is
there when it ends itself.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import wait as wait_for_any
from typing import Any, Protocol

from vecenv.core.interrupts import interrupts_later
from vecenv.machine import is_portable

__all__ = ["Process", "open_pidfd", "tell_after_fork"]

_SLICE_S = 0.05  # between looks after a process that no file stands for


class _Copied(Protocol):
    def leave_to_parent(self, parent_pid: int) -> None:
        """Take notice that this is a copy in a fork of process `parent_pid`."""


_pid = os.getpid()
_ours: weakref.WeakSet[Any] = weakref.WeakSet()  # processes of `multiprocess`
_copied: weakref.WeakSet[Any] = weakref.WeakSet()  # see `tell_after_fork`


def tell_after_fork(thing: _Copied) -> None:
    """Have `leave_to_parent` of a thing called in every fork of this process; keep it weakly."""
    _copied.add(thing)


def _leave_to_parent() -> None:
    """Leave everything to the parent, in a forked child."""
    global _pid
    parent_pid, _pid = _pid, os.getpid()
    table = sys.modules.get("multiprocess.process")
    if table is not None:
        table._children.difference_update(list(_ours))  # type: ignore[attr-defined]  # private to the library
    for thing in list(_copied):
        thing.leave_to_parent(parent_pid)
    _ours.clear()
    _copied.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def open_pidfd(pid: int, sentinel: int) -> int:
    """Return a file that stands for a process that was just started; -1 if there is none.

    Args:
        pid: Of the process.
        sentinel: A file that can be read when it has ended; its number may be another's then.
    """
    if is_portable():
        return -1
    try:
        file = os.pidfd_open(pid)
    except (AttributeError, OSError):  # too old, forbidden, or the process is gone
        return -1
    if wait_for_any([sentinel], 0):
        os.close(file)
        return -1
    return file


class Process:
    """A process of `multiprocess`, as far as it can be known and ended for sure.

    Attributes:
        pid: Its number; None before `start`.
        sentinel: A file that can be read when it has ended, but not while a process that it has
            forked lives; -1 before `start`.
        ending: The file to wait on for its end: what stands for it, or the sentinel.

    Args:
        process: What has not been started.
        starting: Makes a context in which it is to be started.
    """

    def __init__(self, process: Any, starting: Callable[[], Any] = contextlib.nullcontext) -> None:
        self._process = process
        self._starting = starting
        self._popen: Any = None
        self._pidfd = -1
        self._is_served = False  # not by this process
        self._has_ended = False
        self._exit_code: int | None = None
        self.pid: int | None = None
        self.sentinel = self.ending = -1
        tell_after_fork(self)

    def leave_to_parent(self, parent_pid: int) -> None:
        """Close this fork's copy of the file that stands for it."""
        self._has_ended = True  # as far as this fork is concerned
        self._close_pidfd()

    def start(self) -> None:
        """Start it; Ctrl-C waits until it is known, as this process would not end it otherwise."""
        with interrupts_later():
            self._start()

    def _start(self) -> None:
        table = importlib.import_module("multiprocess.process")
        _ours.add(self._process)
        try:
            with self._starting():
                self._process.start()
        finally:  # also if a third Ctrl-C came when it had been started
            # It ends with its owner, which needs no table for that; and a fork must not end it.
            table._children.discard(self._process)
            self._note_start()

    def _note_start(self) -> bool:
        """Note what is known of it, unless that has been done; return whether it was started."""
        popen = self._process._popen
        if popen is None:
            return False
        if self._popen is None:
            self._is_served = popen.method == "forkserver"
            given = popen.pidfd if self._is_served else None
            self._pidfd = open_pidfd(popen.pid, popen.sentinel) if given is None else given
            is_sure = self._pidfd >= 0 and not self._is_served
            self.ending = self._pidfd if is_sure else popen.sentinel
            self.pid, self.sentinel = popen.pid, popen.sentinel
            self._popen = popen
        return True

    def is_alive(self) -> bool:
        """Whether it has been started and has not ended."""
        if self._has_ended or not self._note_start():
            return False
        if self._is_served:  # its parent tells how it has ended
            self._has_ended = self._popen.poll() is not None
        elif self._pidfd >= 0:
            looked = select.poll()
            looked.register(self._pidfd, select.POLLIN)
            self._has_ended = bool(looked.poll(0))
        else:
            self._has_ended = self._is_no_child()
        return not self._has_ended

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.is_alive():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return
            if self.ending == self.sentinel:  # which does not tell of all ends
                left = _SLICE_S if left is None else min(left, _SLICE_S)
            wait_for_any([self.ending], left)

    @property
    def exitcode(self) -> int | None:
        """Exit code, or minus the signal; None while it lives, or if others have reaped it."""
        if self._exit_code is None and not self.is_alive() and self._popen is not None:
            self._exit_code = self._reap()
        return self._exit_code

    def terminate(self) -> None:
        """Ask it to end: of what envs may have handlers for, see `set_up_child`."""
        self._signal("terminate", signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._signal("kill", getattr(signal, "SIGKILL", 0))

    def close(self) -> None:
        """Let go of it, if it has ended."""
        if self.is_alive():
            return
        if self._popen is not None:
            _ = self.exitcode
            if self._popen.returncode is None:  # it was not here that it was reaped
                self._popen.returncode = 0
            self._process.close()
            self._popen = None
        self._close_pidfd()

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            file, self._pidfd = self._pidfd, -1
            os.close(file)

    def _signal(self, name: str, number: int) -> None:
        if not self.is_alive():
            return
        with contextlib.suppress(ProcessLookupError):
            if sys.platform == "win32":  # which has no signals, but the handle of the process
                getattr(self._popen, name)()
            elif self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)
            else:  # a child that has not been reaped still has its number
                assert self.pid is not None
                os.kill(self.pid, number)

    def _is_no_child(self) -> bool:
        """Whether it has ended, where no file stands for it."""
        popen = self._popen
        if sys.platform == "win32":
            return popen.poll() is not None
        if popen.returncode is not None:
            return True
        try:
            found, status = os.waitpid(popen.pid, os.WNOHANG)
        except ChildProcessError:  # other code has reaped it
            return True
        if found == popen.pid:
            popen.returncode = os.waitstatus_to_exitcode(status)
        return found == popen.pid

    def _reap(self) -> int | None:
        """Return the exit code of the process, which has ended; None if it is unknown here."""
        popen = self._popen
        if popen.returncode is None and self._pidfd >= 0 and not self._is_served:
            with contextlib.suppress(ChildProcessError):
                ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
                if ended is not None:
                    sign = 1 if ended.si_code == os.CLD_EXITED else -1
                    popen.returncode = sign * ended.si_status
        return popen.returncode
