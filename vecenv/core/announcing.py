"""A line in the log if compiling takes so long that the program seems to hang."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator

__all__ = ["announced"]

_logger = logging.getLogger("vecenv")
_SILENT_SECONDS = 2.0


@contextlib.contextmanager
def announced(
    name: str,
    *,
    is_compiling: Callable[[], bool] = lambda: True,
    is_kept: Callable[[], bool] = lambda: True,
    target: str = "",
) -> Iterator[None]:
    """Log a warning after two seconds of compiling in this context.

    Workers (of `multiprocessing` or `AsyncVectorEnv`, and actors of Ray) stay silent: all of them
    would log the same line.

    Args:
        name: Name of the kind of env.
        is_compiling: Called after two seconds; False if code is being loaded from disk.
        is_kept: Called for the message: whether the code will be kept on disk.
        target: What the code is compiled for, as the message says it.
    """
    is_done = threading.Event()

    def tell() -> None:
        while not is_done.wait(_SILENT_SECONDS):
            if is_compiling():
                later = "later runs load it from disk"
                later = later if is_kept() else "it can't be kept for later runs"
                _logger.warning(
                    "vecenv compiles %s%s, which may take a minute; %s", name, target, later
                )
                return

    is_actor = os.path.basename(next(iter(sys.argv), "")) == "default_worker.py"
    if is_actor or multiprocessing.current_process().name != "MainProcess":
        yield
        return
    thread = threading.Thread(target=tell, name="vecenv-announcement", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
