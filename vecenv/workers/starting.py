"""How processes for users' envs are started: forked where that is harmless, else from a clean one.

Forking is fastest, and children have all that the caller has. But a child has only the thread that
forked: locks that another one held stay locked, pools of threads (PyTorch's, JAX's, Numba's) wait
for threads that are not there, and GPUs and displays refuse to work. Then processes are forked by a
server instead that has run no user code (`vecenv.workers.server`), and factories are pickled.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from vecenv.core.interrupts import interrupts_later
from vecenv.core.pickling import dump_factories, dump_registry
from vecenv.machine import is_portable
from vecenv.workers.child import ChildSetup, loaded_libraries
from vecenv.workers.process import Process

__all__ = [
    "Start",
    "StartMethod",
    "choose_method",
    "make_start",
    "prepare_start",
    "starts_quickly",
    "why_not_fork",
]

_logger = logging.getLogger("vecenv")
_said: set[str] = set()  # warnings that have been given in this process
_hiding = threading.Lock()  # of the main script, while a process is spawned
_hidden: list[Any] = []  # the main script meanwhile

# Libraries that are loaded to use a GPU or a display, which a forked child can't.
_DEVICES = ("libcuda.so", "libEGL_", "libGLX_", "libOSMesa")


class Start(NamedTuple):
    """How a process for some factories is to be started.

    Attributes:
        context: Of `multiprocess`.
        setup: What the process is given of this one.
    """

    context: Any
    setup: ChildSetup

    def process(self, target: Callable[..., None], *args: Any, **kwargs: Any) -> Process:
        """Return a process that is to be started."""
        process = self.context.Process(target=target, args=args, **kwargs)
        is_spawn = self.context.get_start_method() == "spawn"
        return Process(process, _hidden_main if is_spawn else contextlib.nullcontext)


class StartMethod(NamedTuple):
    """A start method of `multiprocess`.

    Attributes:
        name: "fork", "forkserver" or "spawn".
        why_not_fork: Why it is not "fork", if that would have been our choice.
    """

    name: str
    why_not_fork: str | None


def choose_method(method: str | None) -> StartMethod:
    """Return the start method for processes of envs, as things are now.

    Args:
        method: "fork", "forkserver" or "spawn"; None for the one that the user has set with
            `multiprocess.set_start_method` or `multiprocessing.set_start_method`, and if there is
            none, for "spawn" where `vecenv.machine.is_portable`, for "fork" where it is harmless
            and "forkserver" elsewhere. Whether it is takes a millisecond to find out.
    """
    method = method or _set_by_user()
    if method is not None:
        return StartMethod(method, None)
    if is_portable():
        return StartMethod("spawn", None)
    reason = why_not_fork()
    return StartMethod("fork" if reason is None else "forkserver", reason)


def make_start(chosen: StartMethod, factories: Sequence[Callable[[], Any]]) -> Start:
    """Prepare a process for some factories, which are pickled if need be.

    Those that can't be pickled are forked all the same if the method was our choice, and the log
    says so.
    """
    method, reason = chosen
    if method != "fork":
        try:
            return _start(method, dump_factories(list(factories)), dump_registry())
        except Exception as error:
            if reason is None:
                error.add_note(
                    f"Envs for workers started by {method!r} are pickled with cloudpickle; "
                    "context='fork' needs no pickling."
                )
                raise
            _warn_once(
                f"workers are forked, which may hang as {reason}: their factories can't be pickled "
                f"({type(error).__name__}: {error})"
            )
    return _start("fork", list(factories), None)


def _start(
    method: str, factories: list[Callable[[], Any]] | bytes, registry: bytes | None
) -> Start:
    context = _context(method)
    is_main_thread = threading.current_thread() is threading.main_thread()
    is_own_child = is_main_thread and context.get_start_method() != "forkserver"
    authkey = bytes(multiprocessing.current_process().authkey)
    return Start(context, ChildSetup(factories, registry, os.getpid(), is_own_child, authkey))


def prepare_start(method: str | None) -> StartMethod:
    """Choose a start method, and start the server if processes will need one."""
    chosen = choose_method(method)
    if chosen.name == "forkserver":
        from vecenv.workers.server import ensure_running

        ensure_running()
    return chosen


def starts_quickly() -> bool:
    """Whether processes start in milliseconds (once there is a server) unless told otherwise."""
    return choose_method(None).name != "spawn"


def _context(method: str) -> Any:
    import multiprocess

    if method == "forkserver" and "forkserver" in multiprocess.get_all_start_methods():  # type: ignore[attr-defined]  # multiprocess has no types
        from vecenv.workers.server import ServedContext

        return ServedContext()
    return multiprocess.get_context(method)  # type: ignore[attr-defined]  # multiprocess has no types


def _set_by_user() -> str | None:
    """Return the start method that the user has set; None if it is the system's default.

    Asking for the start method fixes it, so the default says nothing about users' wishes.
    """
    import multiprocess

    for library in (multiprocess, multiprocessing):
        method = library.get_start_method(allow_none=True)  # type: ignore[attr-defined]  # multiprocess has no types
        if method is not None and method != library.get_all_start_methods()[0]:  # type: ignore[attr-defined]  # multiprocess has no types
            return method
    return None


def _warn_once(text: str) -> None:
    _logger.log(logging.DEBUG if text in _said else logging.WARNING, text)
    _said.add(text)


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep a spawned process from running the main script again (and importing what it imports).

    Factories are pickled with all they need from `__main__`, so nothing there is missed.
    """
    with _hiding:
        main = sys.modules["__main__"]
        try:
            _hidden.append(main)
            sys.modules["__main__"] = type(sys)("__main__")
            yield
        finally:
            sys.modules["__main__"] = main
            _hidden.clear()


def _show_main() -> None:
    """Give a forked child its main script, if another thread was spawning a process just then."""
    global _hiding  # noqa: PLW0603  # one for the process
    _hiding = threading.Lock()
    if _hidden:
        sys.modules["__main__"] = _hidden[0]
        _hidden.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_show_main)


# -- whether forking is harmless ------------------------------------------------------------------


def why_not_fork() -> str | None:
    """Say what in this process may hang or break in a fork of it; None if nothing is known to.

    Threads are counted by the system: those of PyTorch or Numba are unknown to Python. Libraries
    that can cope with forks (OpenBLAS, which NumPy starts threads of) end their threads before one,
    so if there are threads a child is forked that does nothing, and those left are counted.
    """
    if (count := threading.active_count()) > 1:
        return f"this process has {count} Python threads"
    if "jax" in sys.modules:
        return "JAX has been imported"
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "PyTorch uses a GPU"
    for library in loaded_libraries():
        if library.startswith(_DEVICES):
            return f"{library} has been loaded"
    if _num_threads() > 1:
        _let_libraries_prepare()
        if (count := _num_threads()) > 1:
            return f"this process has {count} threads"
    return None


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _let_libraries_prepare() -> None:
    """Fork a child that ends at once: libraries do before a fork what they must."""
    with interrupts_later():
        with warnings.catch_warnings():
            # Python 3.12 counts threads too, and knows less of them.
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):  # a handler of the user's waits for all
            os.waitpid(pid, 0)
