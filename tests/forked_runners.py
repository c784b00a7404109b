"""Processes of comparisons, forked from the tests' own: without a second of imports for each."""

import contextlib
import os
import subprocess
import sys
import time
import types
import warnings

import pytest

from vecenv.compare.serving import serve


class ForkedProcess:
    """What `RunnerProcess` asks of `subprocess.Popen`."""

    def __init__(self, args, *, stdin, stdout, stderr, pass_fds, env, start_new_session):
        (file,) = pass_fds
        self.returncode = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                os.setsid()
                for number in (1, 2):
                    os.dup2(stdout.fileno(), number)
                sys.stdout = sys.stderr = open(1, "w", buffering=1)  # noqa: SIM115  # for as long as the process
                serve(file)
            os._exit(0)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=60.0):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a runner", timeout)
            time.sleep(0.002)
        return self.returncode


@contextlib.contextmanager
def forking():
    """Let runners be forked. Starts themselves are tested by calls of `RunnerProcess`."""
    there = types.SimpleNamespace(**{**vars(subprocess), "Popen": ForkedProcess})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vecenv.compare.serving.subprocess", there)
        yield


@pytest.fixture
def forked():
    with forking():
        yield
