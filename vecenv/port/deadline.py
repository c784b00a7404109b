"""End calls of users' code that do not return.

    parent                                   child: the command
      waits, and reads the clock        <--    `within` writes what begins, and when it is late
      ends a child that is late                SIGALRM raises StuckError in Python code
      runs the call again, interpreted         compiled code notices no signal

`prove` alone, in a test for one, has the alarm and no parent.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import mmap
import os
import pickle
import signal
import struct
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from vecenv.port.coverage import is_kernel_file, line_text

__all__ = ["INTERRUPTED", "Clock", "StuckError", "guarded", "time_limit", "within"]

_HEAD = struct.Struct("dqq")  # time at which the call is late, length of its name, of its inputs
_SIZE = 1 << 26  # of the shared memory, which takes room only where it is written
_GRACE = 5.0  # seconds that the alarm gets before the process is ended
_BETWEEN = 600.0  # longest time between two calls of users' code
_PAUSE = 0.1
INTERRUPTED = "was interrupted"
_limit: ContextVar[float] = ContextVar("limit", default=30.0)


class StuckError(RuntimeError):
    """A call of users' code did not return in time."""


class Clock:
    """Memory in which a process says what it calls and by when it must have returned."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE)
        self._parent = os.getpid()
        self.write("the start", _BETWEEN)

    def write(self, what: str, seconds: float, inputs: Any = None) -> None:
        """Begin a call; ends the process if the parent has died.

        Args:
            what: Name of the call.
            seconds: Its time.
            inputs: Whatever is needed to make it again; dropped if it is too large.
        """
        if os.getpid() != self._parent != os.getppid():
            os.kill(os.getpid(), signal.SIGKILL)
        name, body = what.encode(), b"" if inputs is None else pickle.dumps(inputs)
        if _HEAD.size + len(name) + len(body) > _SIZE:
            body = b""
        late = time.monotonic() + seconds
        rest = name + body
        self._memory[_HEAD.size : _HEAD.size + len(rest)] = rest
        self._memory[: _HEAD.size] = _HEAD.pack(late, len(name), len(body))

    def time_left(self) -> float:
        """Return the seconds until the call is late."""
        return _HEAD.unpack(self._memory[: _HEAD.size])[0] - time.monotonic()

    def read(self) -> tuple[str, Any]:
        """Return the call of a process that has ended, and its inputs, None without any."""
        _, length, more = _HEAD.unpack(self._memory[: _HEAD.size])
        end = _HEAD.size + length
        try:
            inputs = pickle.loads(self._memory[end : end + more]) if more else None
        except Exception:  # the process ended while it wrote them
            inputs = None
        return self._memory[_HEAD.size : end].decode(errors="replace"), inputs


_clock: ContextVar[Clock | None] = ContextVar("clock", default=None)  # of a guarded process


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Give each call of users' code this long."""
    token = _limit.set(seconds)
    try:
        yield
    finally:
        _limit.reset(token)


class within:  # a context manager
    """Raise StuckError if the body takes longer than the limit; one inside pauses the outer one.

    Args:
        what: Name of the call.
        times: Factor of the limit: compiling takes longer.
        inputs: Returns what is needed to make the call again, see `Clock.write`.
    """

    def __init__(
        self, what: str, times: float = 1.0, inputs: Callable[[], Any] | None = None
    ) -> None:
        self._what, self._seconds, self._inputs = what, times * _limit.get(), inputs
        self._is_armed = False

    def __enter__(self) -> None:
        frame: Any = inspect.currentframe()
        self._caller = frame.f_back
        if (clock := _clock.get()) is not None:
            inputs = None if self._inputs is None else self._inputs()
            clock.write(self._what, self._seconds + _GRACE, inputs)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and hasattr(signal, "setitimer"):
            self._is_armed = True
            # Ticks, as time in which the process is stopped must not count: it gives one of them.
            self._ticks_left = math.ceil(self._seconds)
            tick_s = self._seconds / self._ticks_left
            self._handler = signal.signal(signal.SIGALRM, self._on_alarm)
            self._timer = signal.setitimer(signal.ITIMER_REAL, tick_s, tick_s)

    def __exit__(self, *_: Any) -> None:
        if self._is_armed:
            signal.setitimer(signal.ITIMER_REAL, *self._timer)
            signal.signal(signal.SIGALRM, self._handler)
        del self._caller
        if (clock := _clock.get()) is not None:
            clock.write(f"the work after {self._what}", _BETWEEN)

    def _on_alarm(self, _: int, frame: types.FrameType | None) -> None:
        """Raise StuckError with the innermost line of the users' code, if no tick is left."""
        self._ticks_left -= 1
        if self._ticks_left > 0:
            return
        told = f"{self._what} did not return within {self._seconds:g} s"
        while frame not in (None, self._caller) and not is_kernel_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None and frame is not self._caller:
            place = line_text(frame.f_code.co_filename, frame.f_lineno)
            told += f": `{frame.f_code.co_name}` at {place}"
        raise StuckError(told)


def guarded(work: Callable[[], int], on_end: Callable[[str, str, Any], int]) -> int:
    """Do work in a forked process, which is ended if a call in it does not return.

    The child returns from here, too, with the result of `work`: its callers must end the process.

    Args:
        work: The work; returns the exit status.
        on_end: Called in the parent if the child was ended or has died: with the call, what became
            of it, and its inputs; returns the exit status.
    """
    clock = Clock()
    if (child := os.fork()) == 0:
        _clock.set(clock)
        return work()
    interrupts: list[float] = []
    old = signal.signal(signal.SIGINT, lambda *_: interrupts.append(time.monotonic()))
    try:
        ending, pid, seen_s, stopped_s = "", 0, time.monotonic(), 0.0
        while not ending:
            stopped_s += max(time.monotonic() - seen_s - 1.0, 0.0)  # both processes, by Ctrl-Z
            seen_s = time.monotonic()
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid and os.WIFEXITED(status):
                return os.WEXITSTATUS(status)
            if pid:
                ending = f"ended the process with {signal.Signals(os.WTERMSIG(status)).name}"
            elif interrupts and time.monotonic() > interrupts[0] + _GRACE:
                ending = INTERRUPTED
            elif clock.time_left() + stopped_s < 0.0:
                ending = "did not return in time"
            else:
                time.sleep(_PAUSE)
        if not pid:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        what, inputs = clock.read()
        return on_end(what, ending, inputs)
    finally:
        signal.signal(signal.SIGINT, old)
