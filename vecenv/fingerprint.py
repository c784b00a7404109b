"""Hashes of everything that the machine code of a function depends on, and caching by them.

Numba's own cache notices when the file of a function changes, but not when a function or a constant
that it takes from another file does. Here the hash covers whatever can be reached, and is part of
the name under which the code is cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numba import config, njit
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

__all__ = [
    "cached_njit",
    "fingerprint",
    "importable_dynamic_module",
    "is_jit_off",
    "without_own_caches",
]

_logger = logging.getLogger("vecenv")
# Settings of Numba that change machine code but are not part of its own cache key.
_SETTINGS = ("BOUNDSCHECK", "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "ENABLE_AVX", "DEBUGINFO")
_FIXED_PACKAGES = ("numba", "numpy", "llvmlite", "math", "builtins", "typing")
_MISSING = object()


def is_jit_off() -> bool:
    """Whether Numba's compiler is switched off (NUMBA_DISABLE_JIT=1) and kernels run as Python."""
    return bool(vars(config)["DISABLE_JIT"])


def fingerprint(roots: Iterable[Any]) -> str:
    """Return a hash of values and functions, with all functions and constants these refer to.

    It changes when the code of a function changes, of a function it calls (through any number of
    calls, also into other modules), or a global or closed-over constant that one of them reads.
    """
    return _Walk(roots).digest.hexdigest()[:20]


def cached_njit(function: Callable[..., Any], **options: Any) -> Any:
    """Compile as `numba.njit(cache=True)` does, but under a name that contains the fingerprint.

    Where the code is kept is up to Numba: in `NUMBA_CACHE_DIR` if set, else in `__pycache__` beside
    the source, else (read-only installation) in the user's cache directory. If none of these can be
    written, the function is compiled anew in every process.

    Args:
        function: A plain or an `njit` function; it is not changed. It may close over constants; if
            it closes over compiled functions, Numba does not find its code again.
        **options: For `numba.njit`.
    """
    if is_jit_off():
        return function
    function = getattr(function, "py_func", function)
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__doc__ = function.__doc__
    copy.__module__ = function.__module__
    copy.__qualname__ = f"{function.__name__}-{fingerprint([function])}"
    try:
        return _with_patient_cache(njit(copy, cache=True, **options))
    except RuntimeError as error:  # "cannot cache function ...: no locator available"
        _logger.warning("compiled code is not kept on disk: %s", error)
        return njit(copy, **options)


def _with_patient_cache(dispatcher: Any) -> Any:
    """Let code be used that can't be written to disk, because that is full for example."""
    save = dispatcher._cache.save_overload

    def save_if_possible(signature: Any, overload: Any) -> None:
        try:
            save(signature, overload)
        except OSError as error:
            _logger.warning("compiled code is not kept on disk: %s", error)

    dispatcher._cache.save_overload = save_if_possible
    return dispatcher


@contextlib.contextmanager
def without_own_caches(roots: Iterable[Any]) -> Iterator[None]:
    """Keep the functions called from `roots` from loading or saving code of their own meanwhile.

    What they have on disk may be older than a function that they call in turn; and writing it costs
    time for nothing, as the caller's code contains theirs.
    """
    saved = [(callee, callee._cache) for callee in _Walk(roots).dispatchers]
    for callee, _ in saved:
        callee._cache = NullCache()
    try:
        yield
    finally:
        for callee, cache in saved:
            callee._cache = cache


@contextlib.contextmanager
def importable_dynamic_module() -> Iterator[None]:
    """Let Numba load code of functions that are in no module, as in `exec` and some test runners.

    It saves the name "<dynamic>" for the module of such a function, and imports that to load it.
    """
    name = "<dynamic>"
    is_missing = name not in sys.modules
    if is_missing:
        sys.modules[name] = types.ModuleType(name)
    try:
        yield
    finally:
        if is_missing:
            del sys.modules[name]


class _Walk:
    """Visits functions and constants depth first, each function once, and hashes what it sees."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.digest = hashlib.sha256()
        self.dispatchers: list[Any] = []
        self._seen: dict[int, int] = {}
        for setting in _SETTINGS:
            self._add(setting, getattr(config, setting, None))
        for root in roots:
            self._visit(root)

    def _visit(self, value: Any) -> None:
        if isinstance(value, Dispatcher):
            if id(value) not in self._seen:
                self.dispatchers.append(value)
                self._add("options", sorted(map(str, value.targetoptions.items())))
            self._enter(value, value.py_func)
        elif isinstance(value, types.FunctionType):
            self._enter(value, value)
        elif hasattr(value, "_defn"):  # an intrinsic
            self._enter(value, value._defn)
        elif isinstance(value, types.ModuleType):
            self._add("module", value.__name__)
        elif isinstance(value, np.ndarray | np.generic):
            self._add("array", value.dtype, value.shape)
            self.digest.update(value.tobytes())
        elif isinstance(value, tuple | list):
            self._add(type(value).__name__, len(value))
            for item in value:
                self._visit(item)
        else:
            self._add("constant", getattr(value, "_fields", None), _stable_repr(value))

    def _enter(self, key: Any, function: types.FunctionType) -> None:
        if id(key) in self._seen:
            self._add("again", self._seen[id(key)])
            return
        self._seen[id(key)] = len(self._seen)
        if function.__module__ and function.__module__.split(".")[0] in _FIXED_PACKAGES:
            self._add("library", function.__module__, function.__qualname__)
            return
        # Numba saves the name, and imports it to load the code.
        self._add("function", function.__module__, function.__module__ in sys.modules)
        self._visit(function.__defaults__)
        code = function.__code__
        cells = function.__closure__ or ()
        closed_over = {
            name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)
        }
        self._code(code, {**function.__globals__, **closed_over})

    def _code(self, code: types.CodeType, scope: dict[str, Any]) -> None:
        self._add("code", code.co_code, code.co_names, code.co_varnames)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, scope)
            else:
                self._add("literal", repr(constant))
        for name in (*code.co_names, *code.co_freevars):
            value = scope.get(name, _MISSING)
            if value is _MISSING:
                continue
            self._visit(value)
            if isinstance(value, types.ModuleType):
                self._attributes(value, code.co_names)

    def _attributes(self, module: types.ModuleType, names: tuple[str, ...]) -> None:
        """Visit what code with these names may read from a module."""
        if module.__name__.split(".")[0] in _FIXED_PACKAGES:
            return
        for name in names:
            value = vars(module).get(name, _MISSING)
            if isinstance(value, types.ModuleType):
                self._attributes(value, names)
            elif value is not _MISSING:
                self._visit(value)

    def _add(self, *parts: Any) -> None:
        self.digest.update(repr(parts).encode())


def _stable_repr(value: Any) -> str:
    """Text that is equal in every process; objects that print their address are known by type."""
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" if " at 0x" in text else text
