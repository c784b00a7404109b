"""Hashes of all that the machine code of a function depends on, and a cache by these hashes.

Numba's own cache notices changes in the file of a function, but not in a function or constant that
it takes from another file. Here the hash covers everything that can be reached, and is part of the
name under which the code is cached.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import hashlib
import logging
import os
import platform
import re
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import llvmlite
import numba
import numpy as np
from numba import NumbaExperimentalFeatureWarning, config, njit
from numba import types as types_of_numba
from numba.extending import is_jitted

from vecenv.core.ending import interrupts_later
from vecenv.core.function_copies import FIXED_PACKAGES, Copies, closed_over, python_function
from vecenv.core.private_numba import (
    CAN_LINK,
    CAN_NUMBER,
    Compiler,
    Files,
    LinkedCompiler,
    OutermostCompiler,
    calls_in_circles,
    registered,
    symbols_of_before,
)

__all__ = ["cached_njit", "fingerprint", "fresh_njit", "is_jit_off", "is_lasting"]

_logger = logging.getLogger("vecenv")
# Settings of Numba that change machine code but are not part of its own cache key.
_SETTINGS = ("BOUNDSCHECK", "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "ENABLE_AVX", "DEBUGINFO")
_VERSIONS = (
    "unique symbols, linked, private",  # how symbols of code are named, and how calls are linked
    *(platform.python_version(), numba.__version__, llvmlite.__version__, np.__version__),
)
_MISSING = object()
_UNKNOWN = "unknown-"  # prefix of fingerprints of what can't be hashed
_PLAIN = (bool, int, float, complex, str, bytes, slice, range, type(...))
_READS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_LIBRARIES = (  # modules whose own functions are known by name; more than `FIXED_PACKAGES`
    *("builtins", "math", "cmath", "operator", "random", "time", "ctypes"),
    *("numpy", "numpy.random", "numpy.linalg", "numpy.fft"),
)


def is_jit_off() -> bool:
    """Whether Numba's compiler is switched off (NUMBA_DISABLE_JIT=1), so kernels run as Python."""
    return bool(vars(config)["DISABLE_JIT"])


def fingerprint(roots: Iterable[Any]) -> str:
    """Return a hash of values and functions, with all functions and constants they refer to.

    It changes with the code of a function, the code of a function it calls (through any number of
    calls, also in other modules), the globals and closed-over constants that these read, and
    the versions of Python, Numba and NumPy.

    If anything can't be hashed, the fingerprint equals no other one, see `is_lasting`.
    """
    walk = _Walk(roots)
    if not walk.unknown:
        return walk.digest.hexdigest()[:20]
    _logger.debug("code is not shared, as it depends on %s", ", ".join(walk.unknown))
    return _UNKNOWN + os.urandom(10).hex()


def is_lasting(found: str) -> bool:
    """Whether equal code has this fingerprint in other processes too, so that it may be cached."""
    return not found.startswith(_UNKNOWN)


def cached_njit(function: Callable[..., Any], **options: Any) -> Any:
    """Compile as `numba.njit(cache=True)` does, but under a name that contains the fingerprint.

    The fingerprint is taken when the function is compiled or loaded, once for each signature. The
    functions it calls are then compiled anew as they are at that moment, unless that was
    done before.

    Where the code is kept is up to Numba: in `NUMBA_CACHE_DIR` if set, else in `__pycache__` beside
    the source, else (read-only installation) in the user's cache directory. If none of these can be
    written, the function is compiled anew in every process.

    Ctrl-C during compilation or loading raises KeyboardInterrupt after it.

    Args:
        function: A plain or an `njit` function; it is not changed.
        **options: Options for `numba.njit`.
    """
    if is_jit_off():
        return function
    if is_jitted(function):
        function = python_function(function)
    dispatcher: Any = njit(_named(function, function.__qualname__), **options)
    dispatcher._compiler.pipeline_class = _pipeline(dispatcher, options, is_outermost=True)
    dispatcher._cache = _FingerprintedCache(dispatcher, function)
    compile_one = dispatcher.compile

    @functools.wraps(compile_one)
    def compile_whole(signature: Any) -> Any:
        # Numba does not survive Ctrl-C: whatever it was registering or compiling is left in parts,
        # and every later compilation fails. Its warning that code for a record also serves one with
        # more fields is true, and no harm.
        with interrupts_later(), warnings.catch_warnings():
            warnings.simplefilter("ignore", NumbaExperimentalFeatureWarning)
            return compile_one(signature)

    dispatcher.compile = compile_whole
    return dispatcher


def fresh_njit(function: Any, **options: Any) -> Any:
    """Compile a function and its callees as they are now; keep nothing on disk.

    Numba itself keeps the globals that a function had when it was first compiled.

    Args:
        function: A plain or an `njit` function; it is not changed.
        **options: Options for `numba.njit`, if the function is a plain one.
    """
    outermost = function if is_jitted(function) else njit(function, **options)
    return _fresh_copies(outermost).copy(outermost)


# Compiled copies by original and fingerprint, so that kinds of env share common functions.
_fresh: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _fresh_copies(outermost: Any = None) -> Copies:
    """Copy compiled functions as functions that are not compiled yet and don't use the disk.

    Only `outermost` can be called from Python: the wrapper for such calls takes as long to
    compile as the function.
    """

    def find(found: Any) -> Any:
        return None if found is outermost else _fresh.get(found, {}).get(fingerprint([found]))

    def remake(found: Any, copy: types.FunctionType) -> Any:
        options = found.targetoptions
        if found is not outermost:  # only compiled code calls it
            options = {**options, "no_cpython_wrapper": True}
            if (copy.__module__ or "").partition(".")[0] == "vecenv":
                options["no_cfunc_wrapper"] = True  # which lets users' functions be values
        made = type(found)(copy, locals=found.locals, targetoptions=options)
        made._compiler.pipeline_class = _pipeline(found, options, is_outermost=found is outermost)
        return made

    def finish(found: Any, made: Any) -> None:
        if not found._can_compile:  # declared with signatures
            for overload in found.overloads.values():
                made.compile(overload.signature)
            made.disable_compile()
        if found is not outermost and is_lasting(name := fingerprint([found])):
            _fresh.setdefault(found, {})[name] = made

    return Copies(remake, finish=finish, find=find)


def _pipeline(found: Any, options: Mapping[str, Any], *, is_outermost: bool) -> Any:
    """Return the compiler class for a copy: Numba's, or one that links."""
    own = found._compiler.pipeline_class
    if own is OutermostCompiler:  # of `cached_njit`, called by another function now
        own = Compiler
    if own is not Compiler or not CAN_LINK or options.get("parallel"):
        return own
    if is_outermost:
        return OutermostCompiler
    return LinkedCompiler if options.get("no_cfunc_wrapper") else own


class _FingerprintedCache:
    """Replaces the attribute `_cache` of a dispatcher."""

    def __init__(self, dispatcher: Any, function: types.FunctionType) -> None:
        self._dispatcher = weakref.ref(dispatcher)
        self.original = function
        self._files: Files | None = None

    @property
    def cache_path(self) -> str | None:
        """Folder of the files, once there are any."""
        return None if self._files is None else self._files.cache_path

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the code for a signature; without any, prepare for compiling it."""
        dispatcher: Any = self._dispatcher()
        options = sorted(map(str, dispatcher.targetoptions.items()))
        own = fingerprint([self.original, options])
        function = _named(self.original, f"{self.original.__name__}-{own}")
        found = self._files = None
        try:
            if CAN_NUMBER and is_lasting(own) and function.__module__ in sys.modules:
                self._files = Files(function)
                found = self._files.load_overload(signature, target)
        except RuntimeError as error:  # "cannot cache function ...: no locator available"
            _warn_once(str(error).rpartition(": ")[2])  # not with the function's name
        except Exception as error:  # reading a damaged file may raise anything
            _logger.info("compiled code on disk can't be read, %r: compiling anew", error)
            with contextlib.suppress(OSError):  # the disk may be full too
                self._files.flush()  # type: ignore[union-attr]  # it has raised that
        if found is None:
            function = _fresh_copies().bind(function, dispatcher)
        dispatcher.py_func = dispatcher._compiler.py_func = function
        return found

    def save_overload(self, signature: Any, overload: Any) -> None:
        """Keep the code on disk, if possible."""
        if self._files is None:
            return
        if old := symbols_of_before(overload.library):
            _logger.warning(
                "compiled code is not kept on disk: it contains %s, compiled before vecenv.jit was "
                "imported; import vecenv.jit first",
                old[0],
            )
        elif circle := calls_in_circles(overload.library):
            _logger.info("compiled code is not kept on disk: %s calls itself by others", circle[0])
        else:
            try:
                self._files.save_overload(signature, overload)
            except Exception as error:  # no room, or a damaged index
                _logger.warning("compiled code is not kept on disk: %s", error)


@functools.cache
def _warn_once(why: str) -> None:
    _logger.warning("compiled code is not kept on disk: %s", why)


def _named(function: types.FunctionType, name: str) -> types.FunctionType:
    """Copy a function under another qualified name."""
    code, scope, closure = function.__code__, function.__globals__, function.__closure__
    copy = types.FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    for own in ("__kwdefaults__", "__doc__", "__module__"):
        setattr(copy, own, getattr(function, own))
    copy.__qualname__ = name
    return copy


class _Walk:
    """Visits functions and constants depth first, each function once, and hashes what it sees.

    It can't hash what it does not know, such as C functions or users' objects: two that look
    alike may compile to different code. Their types are in `unknown`; nothing may be shared then.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.digest = hashlib.sha256()
        self.unknown: list[str] = []  # types of what can't be hashed
        self._seen: dict[int, int] = {}
        self._add(_VERSIONS, [getattr(config, setting, None) for setting in _SETTINGS])
        self._visit(*roots)

    def _add(self, *parts: Any) -> None:
        self.digest.update(repr(parts).encode())

    def _visit(self, *values: Any) -> None:
        for found in values:
            if found is None or type(found) in _PLAIN:  # most values are
                self._add("constant", _stable_repr(found))
            elif not (self._visit_function(found) or self._visit_constant(found)):
                self.unknown.append(f"{type(found).__module__}.{type(found).__qualname__}")

    def _visit_function(self, found: Any) -> bool:
        """Visit a compiled or plain function, or an intrinsic; return whether it was one."""
        value: Any = found
        is_new = id(value) not in self._seen
        if is_jitted(found):
            if is_new:
                self._add("options", sorted(map(str, value.targetoptions.items())))
                for name, kind in sorted(value.locals.items()):  # types of local variables
                    self._visit(name, kind)
                if not value._can_compile:  # declared with signatures
                    self._add([str(one.signature) for one in value.overloads.values()])
            self._enter(value, python_function(value))
        elif isinstance(value, types.FunctionType):
            self._enter(value, value)
            own = getattr(value, "compiled_as", None)  # what is compiled for it, as it says itself
            self._visit(own)
            # Numba registers its own functions only when it compiles for the first time.
            is_plain = is_new and own is None and not _is_fixed(value.__module__)
            for kind in registered(value) if is_plain else ():
                self._overload(kind)
        elif isinstance(getattr(value, "_defn", None), types.FunctionType):  # an intrinsic
            self._enter(value, value._defn)
        else:
            return False
        return True

    def _overload(self, kind: Any) -> None:
        """Visit the functions that compiled code calls instead of a plain function."""
        for template in getattr(kind, "templates", [None]):
            make = getattr(template, "_overload_func", None)
            if not isinstance(make, types.FunctionType):
                self.unknown.append(str(kind))
                continue
            self._add("overload", getattr(template, "_inline", None) is not None)
            self._add(sorted(map(str, getattr(template, "_jit_options", {}).items())))
            if _is_fixed(make.__module__):
                self._visit(*closed_over(make).values())  # of `register_jitable`
            else:
                self._enter(make, make)

    def _visit_constant(self, value: Any) -> bool:
        """Visit a value; return whether its kind is known."""
        if isinstance(value, types.ModuleType):
            self._add("module", value.__name__)
        elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            self._add("array", value.dtype, value.shape)
            self.digest.update(value.tobytes())
        elif isinstance(value, np.dtype) and not value.hasobject:
            self._add("dtype", value)
        elif isinstance(value, enum.Enum):
            self._add("member", type(value).__qualname__, type(value).__mro__[1].__name__)
            self._visit(value.name, value.value)
        elif isinstance(value, tuple | list | frozenset | set):
            items = sorted(value, key=_stable_repr) if isinstance(value, frozenset | set) else value
            self._add(type(value).__name__, getattr(value, "_fields", None), len(value))
            self._visit(*items)
        elif isinstance(value, types_of_numba.Type):
            # Names say everything, unless they contain an address or a number of this process.
            self._add("type", str(value))
            is_external = isinstance(value, types_of_numba.ExternalFunctionPointer)
            is_numbas = _is_fixed(type(value).__module__) and not is_external
            return is_numbas and not re.search(r"0x|#|\$", str(value))
        elif isinstance(value, enum.EnumMeta):
            self._add("enum", value.__mro__[1].__name__, list(value.__members__))
            self._visit(*(one.value for one in value.__members__.values()))  # type: ignore[attr-defined]
        elif isinstance(value, type):  # a named tuple, an exception, or one of a library
            self._add("class", value.__module__, value.__qualname__, getattr(value, "_fields", 0))
            is_fixed = _is_fixed(value.__module__) or value.__module__ == "ctypes"
            if "class_type" in vars(value):  # a jitclass
                return False
            if is_fixed or (issubclass(value, tuple) and hasattr(value, "_fields")):
                return True
            home = sys.modules.get(value.__module__)  # of exceptions, code has the name
            return issubclass(value, BaseException) and getattr(home, value.__name__, 0) is value
        elif (name := _name_in_library(value)) is not None:
            self._add("library", name)
        else:
            return False
        return True

    def _enter(self, key: Any, function: types.FunctionType) -> None:
        if id(key) in self._seen:
            self._add("again", self._seen[id(key)])
            return
        self._seen[id(key)] = len(self._seen)
        if _is_fixed(function.__module__):
            self._add("library", function.__module__, function.__qualname__)
            return
        # Numba saves the name, and imports it when it loads the code.
        self._add("function", function.__module__, function.__module__ in sys.modules)
        self._visit(function.__defaults__)
        for name, value in (function.__kwdefaults__ or {}).items():
            self._visit(name, value)
        self._code(function.__code__, function.__globals__, closed_over(function))

    def _code(
        self, code: types.CodeType, scope: Mapping[str, Any], closed: Mapping[str, Any]
    ) -> None:
        own, names, inner = _parts_of(code)
        self.digest.update(own)
        for one in inner:
            self._code(one, scope, closed)
        values = [scope[name] for name in names if name in scope]
        for value in [*values, *(closed[name] for name in code.co_freevars if name in closed)]:
            self._visit(value)
            if isinstance(value, types.ModuleType):
                self._attributes(value, code.co_names)

    def _attributes(self, module: types.ModuleType, names: tuple[str, ...]) -> None:
        """Visit what code with these names may read from a module."""
        if _is_fixed(module.__name__) or module.__name__ in _LIBRARIES:
            return
        for name in names:
            value = vars(module).get(name, _MISSING)
            if isinstance(value, types.ModuleType):
                self._attributes(value, names)
            elif value is not _MISSING:
                self._visit(value)


def _is_fixed(module: str | None) -> bool:
    """Whether a module belongs to a package whose version stands for its code."""
    return (module or "").partition(".")[0] in FIXED_PACKAGES


def _name_in_library(value: Any) -> str | None:
    """Return the name under which a library has a function of its own, such as `math.sin`."""
    name = getattr(value, "__name__", None)
    if not isinstance(name, str) or not callable(value):
        return None
    for library in _LIBRARIES:
        found = vars(sys.modules[library]).get(name) if library in sys.modules else None
        # Functions of `random` are methods: each look-up makes another, equal one.
        if found is value or (isinstance(found, types.MethodType) and found == value):
            return f"{library}.{name}"
    return None


@functools.lru_cache(maxsize=4096)
def _parts_of(code: types.CodeType) -> tuple[bytes, tuple[str, ...], tuple[types.CodeType, ...]]:
    """Return a hash of code without nested code, the globals it reads, and the nested codes.

    (`co_names` has the names of attributes, too.)
    """
    inner = tuple(one for one in code.co_consts if isinstance(one, types.CodeType))
    literals = ["" if one in inner else _stable_repr(one) for one in code.co_consts]
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    parts = code.co_code, code.co_names, code.co_varnames, literals, arguments
    read = (one.argval for one in dis.get_instructions(code) if one.opname in _READS_GLOBAL)
    return hashlib.sha256(repr(parts).encode()).digest(), tuple(dict.fromkeys(read)), inner


def _stable_repr(value: Any) -> str:
    """Return text that is equal in every process; objects that print an address count by type."""
    if isinstance(value, set | frozenset):  # its order differs between processes
        return f"{type(value).__name__}{sorted(map(_stable_repr, value))}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_stable_repr, value))})"
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" if " at 0x" in text else text
