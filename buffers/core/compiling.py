"""Numba's `njit` with a cache on disk that is never in the way, and that Ctrl-C can't break.

Numba raises when code can't be written, on a full disk for example, or when what it finds is
damaged, although the code is there, or can be compiled. Broken off while it loads or compiles, it
leaves things registered in part, and may never compile again. (`vecenv` has a cache of its own, as
the two packages know nothing of each other; see `vecenv.fingerprint`.)
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from buffers.core.interrupts import held_in_forks, interrupts_later

__all__ = ["njit"]

_logger = logging.getLogger("buffers")
_warned: set[str] = set()


# A child of a process with a thread that compiles would wait for that for ever. (As in
# `vecenv.fingerprint`; whoever has both takes it twice.)
_compiling: Any = getattr(global_compiler_lock, "_lock", None)
if _compiling is not None and hasattr(os, "register_at_fork"):
    held_in_forks(_compiling)


def njit(**options: Any) -> Any:
    """As `numba.njit` with options; with `cache=True` failures of the cache are logged only.

    A Ctrl-C while the function is compiled or loaded raises KeyboardInterrupt after that.
    """

    def decorate(function: Any) -> Any:
        try:
            dispatcher: Any = numba.njit(**options)(function)
        except RuntimeError as error:  # "cannot cache function ...: no locator available"
            if not options.get("cache"):
                raise
            _say_not_kept(error)
            uncached: Any = {**options, "cache": False}
            dispatcher = numba.njit(**uncached)(function)
        # Another class for the object, which has looked for its folder already.
        if type(getattr(dispatcher, "_cache", None)) is FunctionCache:
            dispatcher._cache.__class__ = _PatientCache
        if isinstance(dispatcher, Dispatcher):  # plain functions where Numba is turned off
            dispatcher.compile = interrupts_later()(dispatcher.compile)
        return dispatcher

    return decorate


class _PatientCache(FunctionCache):
    """Numba's cache of one function; it says why it isn't of use, and is none then."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for a signature, or None."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # whatever reading a damaged file leads to
            _logger.info("compiled code on disk can't be read, %r: compiling anew", error)
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the code on disk, unless that can't be done."""
        try:
            super().save_overload(sig, data)
        except Exception as error:  # no room, or a damaged list of what is there
            _say_not_kept(error)


def _say_not_kept(error: Exception) -> None:
    """Warn, once for each reason: there are dozens of functions."""
    reason = str(getattr(error, "errno", None) or "no folder")
    level = logging.DEBUG if reason in _warned else logging.WARNING
    _warned.add(reason)
    _logger.log(
        level,
        "compiled code is not kept on disk, and is compiled anew by every process: %s; make room, "
        "or let NUMBA_CACHE_DIR name another folder",
        error,
    )
