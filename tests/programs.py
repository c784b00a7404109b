"""Programs that tests run in processes of their own, forked from one that has done the imports.

A program is what `python -c` takes, and runs as that does: as `__main__`, in a session of its own,
to the interpreter's own end. Only its imports have been done, once for all programs of a
kind. What is about the start of an interpreter itself needs `subprocess`.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path

ROOT = Path(__file__).parents[1]
_WORKERS = "import vecenv.workers.env, vecenv.workers.worker, workers.started_envs"
# What has been done, and further variables of the environment.
KINDS = {
    "compiled": (
        f"{_WORKERS}, vecenv.workers.pool, vecenv.jit.cartpole",
        {},
    ),
    "interpreted": (_WORKERS, {"NUMBA_DISABLE_JIT": "1"}),
    "buffers": ("import buffers, gymnasium", {}),
}
_NUMBER = struct.Struct("q")
_nurseries = {}  # by kind: the file to ask for a program


class Program:
    """A program that runs, as `subprocess.Popen` tells of it."""

    def __init__(self, code, *args, kind="compiled", cwd=ROOT):
        self.returncode = None
        # Files, not pipes: what the program leaves behind may hold them open.
        self._outputs = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115  # for as long as the process
        self._num_read = 0
        with tempfile.TemporaryFile("w+") as request:
            json.dump([code, [str(arg) for arg in args], str(cwd)], request)
            request.flush()
            self._status, status = os.pipe()
            files = [file.fileno() for file in (request, *self._outputs)]
            with socket.socket(fileno=os.dup(prepare(kind))) as nursery:
                socket.send_fds(nursery, [b"."], [*files, status])
        os.close(status)
        self.pid = self._read_status(120)

    def _read_status(self, seconds):
        if not wait_for_any([self._status], seconds):
            raise subprocess.TimeoutExpired("the program", seconds)
        return _NUMBER.unpack(os.read(self._status, _NUMBER.size))[0]

    def readline(self):
        """Wait for a line that is printed; empty if the program has ended without one."""
        while True:
            has_ended = wait_for_any([self._status], 0.002)
            # The place in the file is the program's too.
            text = os.pread(self._outputs[0].fileno(), 1 << 16, self._num_read)
            line, end, _ = text.partition(b"\n")
            if end or has_ended:
                self._num_read += len(line + end)
                return (line + end).decode()

    def send_signal(self, number):
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout=100):
        """Return the exit code, or minus the signal."""
        if self.returncode is None:
            self.returncode = self._read_status(timeout)
            os.close(self._status)
        return self.returncode

    def communicate(self, timeout=100):
        """Wait for the end; return all that went to stdout and to stderr."""
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired as error:
            self.send_signal(signal.SIGUSR1)  # says where it is
            time.sleep(0.5)
            self.kill()
            error.add_note(self.communicate()[1])
            raise
        told = []
        for file in self._outputs:
            file.seek(0)
            told.append(file.read())
            file.close()
        return told


def run(code, *args, timeout=100, **options):
    """Run a program to its end; return that with `returncode`, `stdout` and `stderr` (text)."""
    program = Program(code, *args, **options)
    told = program.communicate(timeout)
    return subprocess.CompletedProcess(args, program.returncode, *told)


def printed(code, *args, **options):
    """Words that a program has printed which ended well."""
    done = run(code, *args, **options)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-5000:]}"
    return done.stdout.split()


def prepare(kind="compiled"):
    """Start the process for programs of a kind, unless there is one; return its file."""
    preparation, variables = KINDS[kind]
    key = kind, os.getpid()
    if key not in _nurseries:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        path = [str(ROOT / "tests"), str(ROOT), *filter(None, sys.path)]
        start = f"import sys; sys.path[:0] = {path}; from programs import serve"
        with there:
            nursery = subprocess.Popen(
                [sys.executable, "-c", f"{start}\n{preparation}\nexec(serve({there.fileno()}))"],
                env={**os.environ, **variables},
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        atexit.register(nursery.kill)
        _nurseries[key] = here.detach()
    return _nurseries[key]


def serve(file):
    """Fork a program at each request; return its code, in the forked process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=file) as requests:
        while True:
            message, files, *_ = socket.recv_fds(requests, 1, 4)
            if not message:
                os._exit(0)
            if os.fork() == 0:
                break
            for each in files:
                os.close(each)
    request, stdout, stderr, status = files
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():  # this process waits for the program
        os.close(stdout)
        os.write(status, _NUMBER.pack(pid))
        os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        os._exit(0)
    os.setsid()
    for number, given in ((1, stdout), (2, stderr)):
        os.dup2(given, number)
        os.close(given)
    os.close(status)
    sys.stdout.reconfigure(line_buffering=True)  # so that forks of the program print nothing twice
    with open(request) as text:
        text.seek(0)
        code, args, folder = json.load(text)
    os.chdir(folder)
    sys.argv[1:] = args
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    return compile(code, "<string>", "exec")
