"""A process that has run no user code, from which others are forked.

Forking a process that has threads, or has used a GPU or a display, leaves the child with locks that
are never released. So there is a helper process with one thread, which has imported what workers
need and nothing else, and forks when asked. Unlike the fork server of `multiprocessing` it never
imports the main script, belongs to one caller alone (it has no address, only one end of a pair of
sockets), and its children are given what a fork of the caller would have had: environment
variables, `sys.path`, folder, processors, output files, filters of warnings, start methods.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import wait as wait_for_any
from typing import Any, NamedTuple

import multiprocess
import multiprocess.context
import multiprocess.popen_fork
import multiprocess.process
import multiprocess.reduction
import multiprocess.resource_tracker
import multiprocess.spawn
import multiprocess.util
import numpy as np

from vecenv.workers.process import open_pidfd

__all__ = ["ServedContext", "ensure_running", "serve"]

_PATIENCE_S = 60.0  # for the server's answer; its own start takes about a second
_MOST_FDS = 250  # that Linux passes at once
_NUMBER = struct.Struct("q")
# What libraries that the server has imported have read from its environment: where one of these
# has changed since, another server is started.
_READ_AT_IMPORT = ("OMP_", "OPENBLAS_", "MKL_", "KMP_", "GOMP_", "NUMBA_", "NPY_", "PYTHON", "LD_")

# Runs before anything is imported: NumPy's library starts its threads while it is loaded.
_PROLOGUE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.path[:] = {path!r}
from vecenv.workers.server import serve
serve({file}, {caller})
os._exit(0)  # at once: there is nothing to tidy up
"""


class _ServedProcess(multiprocess.process.BaseProcess):
    _start_method = None  # children keep what the caller has set

    @staticmethod
    def _Popen(process: Any) -> Any:  # type: ignore[override]  # of a class without types
        return _ServedPopen(process)


class ServedContext(multiprocess.context.ForkServerContext):
    """The context "forkserver" of `multiprocess`, with a server of our own."""

    Process = _ServedProcess


class _Setting(NamedTuple):
    """What a child is given of the caller's state.

    Attributes:
        attributes: `name` and `authkey` of the process.
        environ: All environment variables.
        path, argv: Of `sys`.
        folder, original_folder: The current one, and the one of the program's start.
        cores: Processors that the calling thread may use; None if they are unknown.
        filters: Of warnings, with module and name for the category.
        methods: Start methods that have been set, by library.
        streams: Which of the files passed stand for stdout and stderr.
        trackers: Which of them lead to the resource tracker of a library.
    """

    attributes: dict[str, Any]
    environ: dict[str, str]
    path: list[str]
    argv: list[str]
    folder: str | None
    original_folder: str | None
    cores: set[int] | None
    filters: list[tuple[Any, ...]]
    methods: dict[str, str]
    streams: dict[int, int]
    trackers: dict[str, int]


class _DupFd:
    """A file descriptor on its way to a child: its place among those passed."""

    def __init__(self, place: int) -> None:
        self.place = place

    def detach(self) -> int:
        """Return the descriptor, in the child."""
        return _passed[self.place]


class _ServedPopen(multiprocess.popen_fork.Popen):
    """What a process object knows about the child that the server has forked."""

    method = "forkserver"
    DupFd = _DupFd

    def duplicate_for_child(self, fd: int) -> int:
        """Pass a file descriptor on; return its place."""
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process_obj: Any) -> None:
        self._fds: list[int] = []
        file = io.BytesIO()
        multiprocess.context.set_spawning_popen(self)
        try:
            multiprocess.reduction.dump(_current_setting(process_obj, self), file)
            multiprocess.reduction.dump(process_obj, file)
        finally:
            multiprocess.context.set_spawning_popen(None)
        try:
            to_child = self._request()
        except EOFError:  # the server has been killed, and is needed again first here
            to_child = self._request()
        # If it has ended already, its status will say so.
        with contextlib.suppress(BrokenPipeError), open(to_child, "wb", closefd=False) as pipe:
            pipe.write(file.getbuffer())

    def _request(self) -> int:
        """Have a child forked; return the file that leads to it."""
        self.sentinel, child_status = os.pipe()
        child_input, to_child = os.pipe()
        # The end of `to_child` tells a child that its caller is gone.
        self.finalizer = multiprocess.util.Finalize(
            self, _close_all, ((self.sentinel, to_child),), exitpriority=None
        )
        try:
            _fork([child_input, child_status, *self._fds])
        finally:
            os.close(child_input)
            os.close(child_status)
        try:
            pid = _read_number(self.sentinel, _PATIENCE_S)
            if pid < 0:
                raise OSError(-pid, f"a worker can't be forked: {os.strerror(-pid)}")
        except BaseException:
            self.finalizer()
            raise
        self.pid = pid
        self.pidfd = open_pidfd(pid, self.sentinel)
        return to_child

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, None while the child runs; wait for it if `flag` is 0."""
        if self.returncode is None:
            if not wait_for_any([self.sentinel], 0 if flag == os.WNOHANG else None):
                return None
            try:
                self.returncode = _read_number(self.sentinel, 0)
            except EOFError:  # the server has been killed, which alone learns of the end
                if self.pidfd >= 0:
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
                self.returncode = -int(signal.SIGKILL)
        return self.returncode


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


def _read_number(fd: int, timeout: float) -> int:
    """Read one number that the server has written.

    Raises:
        EOFError: The server is gone.
        RuntimeError: Nothing has come in time.
    """
    if not wait_for_any([fd], timeout):
        raise RuntimeError(
            f"the process that forks workers has not answered for {timeout:.0f} s; "
            "context='spawn' or 'fork' does without it"
        )
    text = os.read(fd, _NUMBER.size)  # shorter than what pipes cut
    if len(text) < _NUMBER.size:
        raise EOFError(
            "the process that forks workers is gone; what it has printed may say why, and "
            "context='spawn' or 'fork' does without it"
        )
    return _NUMBER.unpack(text)[0]


def _current_setting(process: Any, popen: _ServedPopen) -> _Setting:
    """Describe the state of this process that a child takes over."""
    import multiprocessing.resource_tracker

    streams = {}
    for fd in (1, 2):
        with contextlib.suppress(OSError):  # closed, in a service for example
            os.fstat(fd)
            streams[fd] = popen.duplicate_for_child(fd)
    filters: list[Any] = list(warnings.filters)
    # The standard library's is passed if there is one: it knows of shared memory made here.
    trackers: dict[str, Any] = {"multiprocess": multiprocess.resource_tracker.getfd()}
    theirs = getattr(multiprocessing.resource_tracker._resource_tracker, "_fd", None)
    if theirs is not None:
        trackers["multiprocessing"] = theirs
    methods = {
        library.__name__: library.get_start_method(allow_none=True)
        for library in (multiprocess, multiprocessing)
    }
    folder = None
    with contextlib.suppress(OSError):  # it has been deleted
        folder = os.getcwd()
    return _Setting(
        attributes={
            "name": process.name,
            "authkey": multiprocess.process.current_process().authkey,
        },
        environ=dict(os.environ),
        path=[entry for entry in sys.path if isinstance(entry, str)],
        argv=list(getattr(sys, "argv", [])),
        folder=folder,
        original_folder=multiprocess.process.ORIGINAL_DIR,
        cores=os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
        filters=[
            (action, message, (category.__module__, category.__name__), module, line)
            for action, message, category, module, line in filters
        ],
        methods={name: method for name, method in methods.items() if method is not None},
        streams=streams,
        trackers={name: popen.duplicate_for_child(fd) for name, fd in trackers.items()},
    )


# -- the caller's side ----------------------------------------------------------------------------


class _Server(NamedTuple):
    """The server of this process.

    Attributes:
        pid: Of the server.
        file: This side of the pair of sockets.
        environ: The part of the environment that libraries read while they are imported.
    """

    pid: int
    file: int
    environ: dict[str, str]


_lock = threading.Lock()
_server: _Server | None = None
_retired: list[int] = []  # processes that end as soon as their children have


def _forget() -> None:
    """Leave the server to the parent, in a forked child: it will have one of its own."""
    global _lock, _server  # noqa: PLW0603  # one for the process
    _lock = threading.Lock()
    _retired.clear()
    if _server is not None:
        os.close(_server.file)
        _server = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def ensure_running() -> None:
    """Start the server, if there is none, without waiting for it."""
    with _lock:
        _running()


def _retire() -> None:
    global _server  # noqa: PLW0603  # one for the process
    if _server is not None:
        os.close(_server.file)
        _retired.append(_server.pid)
        _server = None


def _running() -> _Server:
    """Return the server, a new one if the old one is gone or was started in other surroundings."""
    global _server  # noqa: PLW0603  # one for the process
    environ = {k: v for k, v in os.environ.items() if k.startswith(_READ_AT_IMPORT)}
    _retired[:] = [pid for pid in _retired if not _has_ended(pid)]
    if _server is not None and (_server.environ != environ or _has_ended(_server.pid)):
        _retire()
    if _server is None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with there:
            # Absolute, as the server may be used from another folder.
            path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
            code = _PROLOGUE.format(path=path, file=there.fileno(), caller=os.getpid())
            command = [os.fsencode(multiprocess.spawn.get_executable() or sys.executable)]
            command += [
                os.fsencode(flag) for flag in multiprocess.util._args_from_interpreter_flags()
            ]
            pid = multiprocess.util.spawnv_passfds(
                command[0], [*command, b"-c", os.fsencode(code)], [there.fileno()]
            )
        _server = _Server(pid, here.detach(), environ)
    return _server


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # other code has waited for all children
        return True


def _fork(fds: list[int]) -> None:
    """Ask the server for a child with these files."""
    if len(fds) > _MOST_FDS:
        raise ValueError(f"{len(fds)} open files can't be passed to a worker, at most {_MOST_FDS}")
    with _lock:
        try:
            _send(_running().file, fds)
        except (BrokenPipeError, ConnectionResetError):  # it ended just now
            _retire()
            _send(_running().file, fds)


def _send(file: int, fds: list[int]) -> None:
    with socket.socket(fileno=os.dup(file)) as requests:
        socket.send_fds(requests, [b"."], fds)


# -- the server's side ----------------------------------------------------------------------------

_passed: list[int] = []  # in a child: files that came with its request


def serve(file: int, caller_pid: int) -> None:
    """Be the server: fork when asked, and report how children end, until the caller is gone.

    Children that are left then are killed: they watch the caller themselves, but only from a thread
    that waits for ever where an env does not let go of Python's lock.
    """
    caller = _watch_caller(caller_pid)
    _import_all()
    wake_up, signalled = os.pipe()
    os.set_blocking(wake_up, False)
    os.set_blocking(signalled, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    own = [file, wake_up, signalled, *caller]
    statuses: dict[int, int] = {}  # by pid: where to write the exit code
    with socket.socket(fileno=file) as requests, selectors.DefaultSelector() as selector:
        for source in (requests, wake_up, *caller):
            selector.register(source, selectors.EVENT_READ)
        is_asked = True
        while is_asked or statuses:
            ready = [key.fileobj for key, _ in selector.select()]
            if wake_up in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_up, 1 << 16)
                _report_ends(statuses)
            if any(source in ready for source in caller):
                for pid in statuses:
                    os.kill(pid, signal.SIGKILL)
                return
            if requests in ready and not _answer(requests, statuses, [*own, selector.fileno()]):
                is_asked = False
                selector.unregister(requests)


def _answer(requests: socket.socket, statuses: dict[int, int], own: list[int]) -> bool:
    """Fork a child as asked; return False at the end of requests: the caller has another server.

    Args:
        requests: This side of the pair of sockets.
        statuses: By pid where to write the exit code; changed in place.
        own: Files that are none of a child's business.
    """
    message, fds, flags, _ = socket.recv_fds(requests, 1, _MOST_FDS)
    if not message:
        return False
    if len(fds) < 2:  # there is no room for them, and no file to report it in
        for fd in fds:
            os.close(fd)
        return True
    given, status, *passed = fds
    pid = -errno.EMFILE if flags & socket.MSG_CTRUNC else _try_to_fork()
    if pid == 0:
        for fd in (*own, status, *statuses.values()):
            os.close(fd)
        _run_child(given, passed)
    _write_number(status, pid)
    if pid > 0:
        statuses[pid] = status
    else:
        os.close(status)
    for fd in (given, *passed):
        os.close(fd)
    return True


def _watch_caller(caller_pid: int) -> list[int]:
    """Return a file that can be read when the caller is gone; none where there is no such file."""
    files = []
    with contextlib.suppress(AttributeError, OSError):  # not Linux, too old, or gone
        files.append(os.pidfd_open(caller_pid))
    if os.getppid() != caller_pid:
        os._exit(0)
    return files


def _try_to_fork() -> int:
    """Return what `os.fork` does, or the negative number of its error."""
    try:
        return os.fork()
    except OSError as error:  # too many processes, or too little memory
        return -(error.errno or errno.EAGAIN)


def _import_all() -> None:
    """Import what workers need, once for all of them, and have their kernels compiled."""
    import cloudpickle  # noqa: F401  # to have it

    import vecenv.workers.worker  # noqa: F401  # to have it
    from vecenv.workers.layout import LINE, ControlLayout
    from vecenv.workers.links import has_futex

    if has_futex():
        from vecenv.workers.futex_link import FutexLink

        link = FutexLink(ControlLayout(1, LINE, LINE))
        link.attach(np.zeros(link.layout.num_words, np.int64), is_caller=True, may_spin=False)


def _report_ends(statuses: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        fd = statuses.pop(pid, None)
        if fd is not None:
            _write_number(fd, os.waitstatus_to_exitcode(status))
            os.close(fd)


def _write_number(fd: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the caller is gone
        os.write(fd, _NUMBER.pack(number))


def _run_child(given: int, passed: list[int]) -> None:
    """Be a child: take over the caller's state, and run the process object."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _passed[:] = passed
        sentinel = os.dup(given)
        with open(given, "rb") as file, _inheriting():
            _take_over(pickle.load(file))
            process = pickle.load(file)
        code = process._bootstrap(parent_sentinel=sentinel)
    except BaseException as error:
        if not isinstance(error, EOFError):  # the caller was interrupted
            traceback.print_exc()
            multiprocess.util._flush_std_streams()
    finally:
        os._exit(code)


@contextlib.contextmanager
def _inheriting() -> Iterator[None]:
    process: Any = multiprocess.process.current_process()
    process._inheriting = True
    try:
        yield
    finally:
        del process._inheriting


def _take_over(setting: _Setting) -> None:
    """Take over the caller's state."""
    import importlib

    for fd, place in setting.streams.items():
        os.dup2(_passed[place], fd)
    if setting.cores is not None:
        with contextlib.suppress(OSError):  # taken away meanwhile
            os.sched_setaffinity(0, setting.cores)
    os.environ.clear()
    os.environ.update(setting.environ)
    sys.path[:] = setting.path
    sys.argv[:] = setting.argv
    sys.modules["__main__"] = type(sys)("__main__")  # not that of the server
    if setting.folder is not None:
        with contextlib.suppress(OSError):
            os.chdir(setting.folder)
    multiprocess.process.ORIGINAL_DIR = setting.original_folder
    for name, value in setting.attributes.items():
        setattr(multiprocess.process.current_process(), name, value)
    for name, method in setting.methods.items():
        importlib.import_module(name).set_start_method(method, force=True)
    for name, place in setting.trackers.items():
        tracker = importlib.import_module(f"{name}.resource_tracker")._resource_tracker
        tracker._fd = _passed[place]
    warnings.resetwarnings()
    for action, message, (home, name), module, line in setting.filters:
        # Those of a module that has not been imported can't be given, but importing it may hurt.
        category = getattr(sys.modules.get(home), name, None)
        if category is not None:
            warnings.filters.append((action, message, category, module, line))  # type: ignore[attr-defined]  # typeshed says Sequence
