"""A line in the log if compiling takes so long that the program seems to hang."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vecenv.core.function_copies import Copies

__all__ = ["announced"]

_logger = logging.getLogger("vecenv")
_SILENT_SECONDS = 2.0
# Seconds for compiling on an idle core, measured for bundled kernels of 700 to 27 000 instructions
# of Python: the true time is from half of this to twice as much.
_FIRST_SECONDS, _PER_SECOND = 2.0, 1500


@contextlib.contextmanager
def announced(
    name: str,
    functions: Iterable[Any],
    *,
    is_compiling: Callable[[], bool] = lambda: True,
    is_kept: Callable[[], bool] = lambda: True,
    target: str = "",
) -> Iterator[None]:
    """Log a warning, with the expected time, after two seconds of compiling in this context.

    Workers (of `multiprocessing` or `AsyncVectorEnv`, and actors of Ray) stay silent: all of them
    would log the same line.

    Args:
        name: Name of the kind of env.
        functions: Its kernels.
        is_compiling: Called after two seconds; False if code is being loaded from disk.
        is_kept: Called for the message: whether the code will be kept on disk.
        target: What the code is compiled for, as the message says it.
    """
    is_done = threading.Event()

    def tell() -> None:
        while not is_done.wait(_SILENT_SECONDS):
            if is_compiling():
                seconds = _FIRST_SECONDS + _count_instructions(functions) / _PER_SECOND
                later = "later runs load it from disk"
                _logger.warning(
                    "vecenv compiles %s%s, which takes about %.0f s on an idle core; %s",
                    *(name, target, seconds),
                    later if is_kept() else "it can't be kept for later runs",
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


def _count_instructions(functions: Iterable[Any]) -> int:
    """Return the number of instructions of Python functions and all functions that they call."""
    codes: list[types.CodeType] = []

    def note(_: Any, copy: types.FunctionType) -> types.FunctionType:
        codes.append(copy.__code__)
        return copy

    copies = Copies(note, with_plain=True)
    for function in functions:
        copies.copy(function)
    for code in codes:  # the list grows in the loop
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return sum(len(code.co_code) // 2 for code in codes)
