"""Numba's `njit` with a cache on disk that is never in the way, and that Ctrl-C can't break.

Numba raises when code can't be written, on a full disk for example, or when what it finds is
damaged, although the code is there, or can be compiled. It goes on using code when something has
changed in another file that is compiled into it. Broken off while it loads or compiles, it leaves
things registered in part, and may never compile again. (`vecenv` has a cache of its own, as the two
packages know nothing of each other; see `vecenv.fingerprint`.)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import types
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from buffers.core.interrupts import held_in_forks, interrupts_later

__all__ = ["njit"]

_logger = logging.getLogger("buffers")
_warned: set[str] = set()
_CONSTANTS = (int, float, str, tuple, np.generic, np.dtype)


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

    _is_stamped = False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for a signature, or None."""
        try:
            self._stamp()
            return super().load_overload(sig, target_context)
        except Exception as error:  # whatever reading a damaged file leads to
            _logger.info("compiled code on disk can't be read, %r: compiling anew", error)
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the code on disk, unless that can't be done."""
        try:
            self._stamp()
            super().save_overload(sig, data)
        except Exception as error:  # no room, or a damaged list of what is there
            _say_not_kept(error)

    def _stamp(self) -> None:
        """Let code count as that of other sources if any of the files has changed that it is of."""
        if not self._is_stamped:
            file: Any = self._cache_file
            file._source_stamp = (file._source_stamp, _digest(self._py_func))
            self._is_stamped = True


def _digest(function: Any) -> str:
    """A hash of all that a function is compiled from in its package, but for its own file."""
    found: dict[Any, str] = {}
    _find_sources(function, (function.__module__ or "").partition(".")[0], found)
    return hashlib.sha256(repr(sorted(found.values())).encode()).hexdigest()


def _find_sources(function: types.FunctionType, package: str, found: dict[Any, str]) -> None:
    """Note the hashes of files that a function takes other functions and numbers from.

    Args:
        function: What is called, and what that calls, is noted too.
        package: Others are not looked at.
        found: What was found, by what it was found for; written.
    """
    codes, names = [function.__code__], set[str]()
    for code in codes:  # which grows
        names.update(code.co_names)
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    values = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is in it
            values[name] = cell.cell_contents
    for module in [value for value in values.values() if isinstance(value, types.ModuleType)]:
        # Its functions may be called by its name.
        if module.__name__.partition(".")[0] == package:
            found[module] = _hash_of(module.__file__)
            own = names & vars(module).keys()
            values |= {f"{module.__name__}.{name}": vars(module)[name] for name in own}
    for name, value in values.items():
        called = getattr(value, "py_func", value)
        if isinstance(called, types.FunctionType):
            if called not in found and (called.__module__ or "").partition(".")[0] == package:
                found[called] = _hash_of(called.__code__.co_filename)
                _find_sources(called, package, found)
        elif isinstance(called, _CONSTANTS):
            found[name, repr(called)] = f"{name}={called!r}"


@functools.cache
def _hash_of(path: str | None) -> str:
    """Of the contents of a file; none if it can't be read."""
    try:
        return hashlib.sha256(Path(path or "").read_bytes()).hexdigest()
    except OSError:
        return ""


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
