"""Cases of a fuzzer in processes of their own, whose end is looked at.

A *nursery* is a clean process with everything imported. It forks a process per case, so that a case
that dies by a signal or hangs is told from one that passes, with what it said last. `warm` ones
have called `module.warm_up()` before, so that compiled code is there; in the others every case
makes the first calls of its process.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback

LIMIT_S = 40.0  # of a case; they take about a second
_ROOT = pathlib.Path(__file__).parents[2]
_started = {}


def run_apart(module, number, *arguments, warm=True, limit_s=LIMIT_S):
    """Return what `module.run_here(number, *arguments)` returns in a process of its own.

    Raises:
        AssertionError: It raised, died by a signal, or did not end in time.
    """
    key = module, warm
    if key not in _started:
        _started[key] = _Nursery(module, warm)
    nursery = _started[key]
    try:
        return nursery.run(number, arguments, limit_s)
    finally:
        if not nursery.has_answered:
            _started.pop(key).end()


class _Nursery:
    """The process that forks, seen from outside.

    Attributes:
        has_answered: Whether it has said how the latest case ended.
    """

    has_answered = True

    def __init__(self, module, warm):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `end` closes it
        paths = [str(_ROOT), str(_ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.nursery", module, str(int(warm))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        atexit.register(self.end)

    def run(self, number, arguments, limit_s):
        self.has_answered = False
        begin = self._errors.seek(0, os.SEEK_END)
        print(json.dumps([number, arguments, limit_s]), file=self._process.stdin, flush=True)
        answers = self._process.stdout
        is_there = select.select([answers], [], [], limit_s + 120.0)[0]  # also to start and warm up
        line = answers.readline() if is_there else ""
        self._errors.seek(begin)
        said = self._errors.read()[-6000:]
        assert line, f"the nursery is gone or silent (exit {self._process.poll()})\n{said}"
        status, value, told = json.loads(line)
        self.has_answered = True
        assert status == 0, f"case {number} {arguments} {_ended(status)}\n{told}\n{said}"
        return value

    def end(self):
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):
                file.close()
        atexit.unregister(self.end)


def _ended(status):
    if status is None:
        return "hangs"
    return "fails" if status > 0 else f"died by {signal.Signals(-status).name}"


def _serve(name, warm):
    """Fork a process for each line of input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what cases print does not go between the answers
    module = importlib.import_module(name)
    if warm:
        module.warm_up()
    for line in sys.stdin:
        number, arguments, limit_s = json.loads(line)
        here, there = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(here)
            _run(module, number, arguments, there)
        os.close(there)
        status = _status(child, limit_s)
        os.set_blocking(here, False)  # a process that the case has left may hold the other end
        try:
            text = os.read(here, 1 << 16)
        except BlockingIOError:
            text = b""
        os.close(here)
        value, told = json.loads(text) if text else (None, "")
        print(json.dumps([status, value, told]), file=answers, flush=True)


def _run(module, number, arguments, answer):
    """Run a case in the forked process, and end this."""
    value, told, code = None, "", 1
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    try:
        value = module.run_here(number, *arguments)
        code = 0
    except BaseException:
        told = traceback.format_exc()[-8000:]
    finally:
        os.write(answer, json.dumps([value, told]).encode())
        sys.stderr.flush()
        os._exit(code)


def _status(child, limit_s):
    """Exit code of a child, or minus its signal; None if it had to be killed."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGUSR1)  # says where it is
    time.sleep(0.5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2] == "1")
