"""The caller's side of a backend's process: requests with a deadline, and reports of failures."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Pipe
from time import monotonic
from typing import Any

from vecenv.compare.serving import OK, UNAVAILABLE
from vecenv.core.ending import Watcher
from vecenv.core.errors import describe_exit

__all__ = ["RunnerError", "RunnerProcess"]

_LOOK_S = 0.1  # between two checks that the process is alive
_CLOSE_S = 5.0
_DOING = {"open": "making the envs", "warm_up": "warming up"}


class RunnerError(Exception):
    """A backend can't go on; `is_unavailable` means that it does not support this env."""

    is_unavailable = False


class RunnerProcess:
    """A process with a `Runner`; output of its envs goes to a file, which errors quote.

    It leads its own process group; ending it also ends its workers.
    """

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        serve = "from vecenv.compare.serving import serve"
        script = f"{serve}; serve({theirs.fileno()})"
        places = os.pathsep.join(place or os.getcwd() for place in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": places},
            start_new_session=True,
        )
        theirs.close()
        self._watcher = Watcher()
        self._watcher.start()
        self._watcher.tell("+", self._process.pid)

    def call(self, name: str, *args: Any, timeout: float) -> Any:
        """Return the result of a method of the process's `Runner`.

        Args:
            name: Name of the method.
            *args: Its arguments; they are pickled.
            timeout: Longest wait in seconds; then the process is killed.

        Raises:
            RunnerError: The method raised, the process is gone, or it did not answer in time.
        """
        deadline = monotonic() + timeout
        try:
            self._connection.send((name, args))
            while not self._connection.poll(_LOOK_S):
                if self._process.poll() is not None and not self._connection.poll(0):
                    raise EOFError
                if monotonic() > deadline:
                    self.kill()
                    raise RunnerError(
                        f"no answer within {timeout:g} s while {_DOING.get(name, 'stepping')}; an "
                        "env hangs, or its steps take long: give it more time"
                    )
            status, result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if status == OK:
            return result
        error = RunnerError(result)
        error.is_unavailable = status == UNAVAILABLE
        raise error

    def _gone(self) -> RunnerError:
        """Return an error that says how the process ended, with its last output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        reason = f"its process {describe_exit(self._process.returncode)}"
        return RunnerError(f"{reason} ({lines[-1]})" if lines else reason)

    def kill(self) -> None:
        """End the process and its workers at once; does nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self, is_now: bool = False) -> None:
        """End it, and wait until its envs are closed unless `is_now`; may be called twice."""
        if self._output.closed:
            return
        if not is_now and self._process.poll() is None:
            with contextlib.suppress(RunnerError):
                self.call("close", timeout=_CLOSE_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_S)
        self.kill()
        self._watcher.close()
        self._connection.close()
        self._output.close()
