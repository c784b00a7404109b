"""What envs do with the standard library's `multiprocessing`, in workers, which are not its own.

Workers are processes of `multiprocess`, of which the standard library knows nothing. Queues, locks,
pipes and managers that factories hold must reach them all the same, and what envs start there must
end with them.
"""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.process
import multiprocessing.resource_sharer
import multiprocessing.util
import pickle
import sys
import threading
import types
from collections import ChainMap
from typing import Any

__all__ = ["authkey", "end_own", "pickled", "settle", "unpickled"]


def authkey() -> bytes:
    """Return the key with which this process talks to managers."""
    return bytes(multiprocessing.current_process().authkey)


def pickled(factories: list[Any]) -> bytes:
    """Pickle factories by value as far as needed: lambdas, closures, classes of `__main__`.

    Locks, queues, pipes and shared values are handed over as if a process of theirs were started;
    everything else, tensors and bound methods too, as `cloudpickle` does it. Load with `unpickled`.
    """
    import cloudpickle
    import multiprocess.context

    libraries = (multiprocessing, multiprocess)
    names = {"socket", *(library.__name__ for library in libraries)}
    theirs: dict[Any, Any] = {}
    for library in libraries:
        reducers: dict[type, Any] = library.reduction.ForkingPickler._extra_reducers
        for kind, reducer in reducers.items():  # among them those that torch and others have added
            is_shared_value = reducer.__module__ == f"{library.__name__}.sharedctypes"
            if is_shared_value or kind.__module__.partition(".")[0] in names:
                theirs[kind] = reducer

    main = vars(sys.modules["__main__"])
    of_main: dict[str, Any] = {}  # classes and functions of the main script that are pickled

    class Pickler(cloudpickle.Pickler):
        dispatch_table: Any = ChainMap(theirs, cloudpickle.Pickler.dispatch_table)  # type: ignore[arg-type]

        def reducer_override(self, obj: Any) -> Any:
            is_named = isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__"
            if is_named and main.get(obj.__name__) is obj:
                of_main[obj.__name__] = obj
            return super().reducer_override(obj)

    file = io.BytesIO()
    for library in libraries:
        library.context.set_spawning_popen(_Spawning)
    try:
        Pickler(file).dump((factories, of_main))
    finally:
        for library in libraries:
            library.context.set_spawning_popen(None)
    return file.getvalue()


def unpickled(text: bytes) -> list[Any]:
    """Return factories that another process has pickled.

    Classes and functions of its main script become those of this process's, so that their instances
    (infos, exceptions, attributes) find their way back to the very same class over there.
    """
    factories, of_main = pickle.loads(text)
    main = vars(sys.modules["__main__"])
    for name, value in of_main.items():
        main.setdefault(name, value)
    return factories


class _Spawning:
    """Stands for a process being started; file descriptors reach it by a thread and a socket."""

    DupFd = staticmethod(multiprocessing.resource_sharer.DupFd)

    @staticmethod
    def duplicate_for_child(fd: int) -> int:
        return fd


def settle(worker: int, key: bytes) -> None:
    """Tell the standard library, in a worker, that this is a process of its own.

    Otherwise envs would use the caller's connections to managers, their queues would believe that
    the threads that write them out are there, and the caller's processes would pass for theirs.

    Args:
        worker: Number of the worker.
        key: The caller's `authkey`.
    """
    process = multiprocessing.current_process()
    process.name = f"vecenv-worker-{worker}"
    process.authkey = key
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    multiprocessing.util._run_after_forkers()  # type: ignore[attr-defined]


def end_own() -> None:
    """Do at a worker's end what the standard library does at the end of its processes."""
    daemons = [process for process in multiprocessing.active_children() if process.daemon]
    for process in daemons:
        process.terminate()
    for process in daemons:
        process.join(1)
    threading._shutdown()  # type: ignore[attr-defined]  # executors first, while their queues work
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]  # queues are written out
