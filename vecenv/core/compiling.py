"""Compile functions as they are now, and keep the code on disk by a hash of all it depends on.

Numba's own cache notices changes in the file of a function, but not in a function or constant that
it takes from another file. Here the hash covers everything that can be reached, and is part of the
name under which the code is cached. Functions that are called are copied before, as Numba itself
keeps the globals that a function had when it was first compiled.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import hashlib
import logging
import multiprocessing
import os
import platform
import re
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import llvmlite
import numba
import numpy as np
from numba import NumbaExperimentalFeatureWarning, config, njit
from numba import types as types_of_numba
from numba.extending import is_jitted

from vecenv.core.ending import interrupts_later
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

__all__ = [
    "FIXED_PACKAGES",
    "Copies",
    "announced",
    "cached_njit",
    "closed_over",
    "fingerprint",
    "fresh_njit",
    "is_jit_off",
    "is_lasting",
    "python_function",
]

# Functions of these packages are not copied, and hashed by name: the version stands for the code.
FIXED_PACKAGES = ("numba", "numpy", "llvmlite", "math", "builtins", "typing")
_LIBRARIES = (  # modules whose own functions are known by name
    *("builtins", "math", "cmath", "operator", "random", "time", "ctypes"),
    *("numpy", "numpy.random", "numpy.linalg", "numpy.fft"),
)
# Settings of Numba that change machine code but are not part of its own cache key.
_SETTINGS = ("BOUNDSCHECK", "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "ENABLE_AVX", "DEBUGINFO")
_VERSIONS = (
    "unique symbols, linked, private, 2",  # how symbols are named, calls linked, and this hashes
    *(platform.python_version(), numba.__version__, llvmlite.__version__, np.__version__),
)
_UNKNOWN = "unknown-"  # prefix of fingerprints of what can't be hashed
_SCOPE = ("__name__", "__builtins__", "__file__")  # globals that every function has
_PLAIN = (bool, int, float, complex, str, bytes, slice, range, type(...), type(None))
_READS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_SILENT_SECONDS = 2.0

_logger = logging.getLogger("vecenv")


def is_jit_off() -> bool:
    """Whether Numba's compiler is switched off (NUMBA_DISABLE_JIT=1), so kernels run as Python."""
    return bool(vars(config)["DISABLE_JIT"])


def cached_njit(function: Callable[..., Any], **options: Any) -> Any:
    """Compile as `numba.njit(cache=True)` does, but under a name that contains the fingerprint.

    The fingerprint is taken when the function is compiled or loaded, once for each signature. The
    functions it calls are then compiled anew as they are at that moment.

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
    dispatcher: Any = njit(_twin(function, function.__globals__, function.__closure__), **options)
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

    Args:
        function: A plain or an `njit` function; it is not changed.
        **options: Options for `numba.njit`, if the function is a plain one.
    """
    outermost = function if is_jitted(function) else njit(function, **options)
    return _recompiled(outermost)


@contextlib.contextmanager
def announced(
    name: str,
    *,
    is_compiling: Callable[[], bool] = lambda: True,
    is_kept: Callable[[], bool] = lambda: True,
    target: str = "",
) -> Iterator[None]:
    """Log a warning after two seconds of compiling in this context: the program seems to hang.

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
                told = "vecenv compiles %s%s, which may take a minute; %s"
                _logger.warning(told, name, target, later)
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


# -- what a function refers to ---------------------------------------------------------------------


class _Code(NamedTuple):
    """A hash of code with the codes nested in it; globals that it reads; these and attributes."""

    digest: bytes
    reads: frozenset[str]
    names: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _read_code(code: types.CodeType) -> _Code:
    inner = [_read_code(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    literals = [_stable_repr(one) for one in code.co_consts if not isinstance(one, types.CodeType)]
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    parts = code.co_code, code.co_names, code.co_varnames, literals, arguments
    digest = hashlib.sha256(repr((parts, [one.digest for one in inner])).encode()).digest()
    reads = {one.argval for one in dis.get_instructions(code) if one.opname in _READS_GLOBAL}
    names = {*code.co_names, *code.co_freevars}
    return _Code(
        digest,
        frozenset(reads.union(*(one.reads for one in inner))),
        frozenset(names.union(*(one.names for one in inner))),
    )


def closed_over(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables that a function closes over, if they have a value."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found


def python_function(dispatcher: Any) -> types.FunctionType:
    """Return the Python function of a compiled one, with the globals of its module."""
    return getattr(dispatcher._cache, "original", dispatcher.py_func)


def _is_fixed(module: str | None) -> bool:
    """Whether a module belongs to a package whose version stands for its code."""
    return (module or "").partition(".")[0] in FIXED_PACKAGES


# -- copies ----------------------------------------------------------------------------------------


class Copies:
    """Copies functions so that the copies call copies, also through modules, tuples and closures.

    A copy has the original's code, and its own global names and closed-over variables, with the
    values that they have now.

    Args:
        remake: Called with a compiled or plain function that was found and the copy of its Python
            function, before names in the copy are bound; returns the replacement.
        convert: Called with any value that is no function, and with modules whose functions are not
            copied; returns the replacement.
        with_plain: Whether plain functions are copied too.

    Attributes:
        made: Pairs of a function that was found and its replacement, by the id of the first.
    """

    def __init__(
        self,
        remake: Callable[[Any, types.FunctionType], Any],
        *,
        convert: Callable[[Any], Any] = lambda value: value,
        with_plain: bool = False,
    ) -> None:
        self._remake, self._convert, self._with_plain = remake, convert, with_plain
        self.made: dict[int, tuple[Any, Any]] = {}  # the original keeps its id taken

    def copy(self, value: Any, names: Iterable[str] = ()) -> Any:
        """Return a copy of a function, or of a value with its functions replaced by copies.

        Values without functions are passed to `convert`; of a module, only `names` are replaced.
        """
        if id(value) in self.made:
            return self.made[id(value)][1]
        if is_jitted(value) or (isinstance(value, types.FunctionType) and self._with_plain):
            function = python_function(value) if is_jitted(value) else value
            if _is_fixed(function.__module__):
                return value
            self.bind(function, value)
            return self.made[id(value)][1]
        if isinstance(value, tuple):
            items = [self.copy(item, names) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, types.ModuleType) and not _is_fixed(value.__name__):
            return self._module(value, names)
        return self._convert(value)

    def bind(self, function: types.FunctionType, found: Any) -> types.FunctionType:
        """Replace `found`, whose Python function this is; return the copy of that."""
        given, code = function.__globals__, function.__code__
        scope = {key: given[key] for key in _SCOPE if key in given}
        cells = tuple(types.CellType() for _ in code.co_freevars)
        copy = _twin(function, scope, cells)
        self.made[id(found)] = found, self._remake(found, copy)
        names = _read_code(code).names
        for name in sorted(names & (given.keys() - scope.keys())):
            scope[name] = self.copy(given[name], names)
        values = closed_over(function)
        for cell, name in zip(cells, code.co_freevars, strict=True):
            if name in values:
                cell.cell_contents = self.copy(values[name], names)
        return copy

    def _module(self, module: types.ModuleType, names: Iterable[str]) -> types.ModuleType:
        """Return a module with copies of the functions in it that have one of these names."""
        self.made[id(module)] = module, module  # in case the module contains itself
        own = {name: vars(module)[name] for name in names if name in vars(module)}
        copies = {name: self.copy(value, names) for name, value in own.items()}
        del self.made[id(module)]  # other functions read other names of it
        if all(copies[name] is value for name, value in own.items()):
            return module
        twin = types.ModuleType(module.__name__)
        vars(twin).update(vars(module) | copies)
        return twin


def _twin(function: types.FunctionType, scope: dict[str, Any], cells: Any) -> types.FunctionType:
    """Copy a function with other globals and cells."""
    name, defaults = function.__name__, function.__defaults__
    copy = types.FunctionType(function.__code__, scope, name, defaults, cells or None)
    for own in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
        setattr(copy, own, getattr(function, own))
    return copy


def _recompiled(outermost: Any, function: Any = None) -> Any:
    """Copy compiled functions as functions that are not compiled yet and don't use the disk.

    Only `outermost` can be called from Python: the wrapper for such calls takes as long to
    compile as the function. With `function`, a copy of that plain function is returned, which
    `outermost` is to compile.
    """

    def remake(found: Any, copy: types.FunctionType) -> Any:
        is_outermost, options = found is outermost, found.targetoptions
        if is_outermost and function is not None:
            return found
        if not is_outermost:  # only compiled code calls it
            options = {**options, "no_cpython_wrapper": True}
            if (copy.__module__ or "").partition(".")[0] == "vecenv":
                options["no_cfunc_wrapper"] = True  # which lets users' functions be values
        made = type(found)(copy, locals=found.locals, targetoptions=options)
        made._compiler.pipeline_class = _pipeline(found, options, is_outermost=is_outermost)
        return made

    copies = Copies(remake)
    result = copies.copy(outermost) if function is None else copies.bind(function, outermost)
    for found, made in list(copies.made.values()):
        if made is not found and not found._can_compile:  # declared with signatures
            for overload in found.overloads.values():
                made.compile(overload.signature)
            made.disable_compile()
    return result


def _pipeline(found: Any, options: dict[str, Any], *, is_outermost: bool) -> Any:
    """Return the compiler class for a copy: Numba's, or one that links."""
    own = found._compiler.pipeline_class
    if own is OutermostCompiler:  # of `cached_njit`, called by another function now
        own = Compiler
    if own is not Compiler or not CAN_LINK or options.get("parallel"):
        return own
    if is_outermost:
        return OutermostCompiler
    return LinkedCompiler if options.get("no_cfunc_wrapper") else own


# -- the cache -------------------------------------------------------------------------------------


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
        function = _twin(self.original, self.original.__globals__, self.original.__closure__)
        function.__qualname__ = f"{self.original.__name__}-{own}"
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
            function = _recompiled(dispatcher, function)
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


# -- fingerprints ----------------------------------------------------------------------------------


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
            if type(found) in _PLAIN:  # most values are
                self._add("constant", _stable_repr(found))
            elif not (self._visit_function(found) or self._visit_constant(found)):
                self.unknown.append(f"{type(found).__module__}.{type(found).__qualname__}")

    def _visit_function(self, found: Any) -> bool:
        """Visit a compiled or plain function, or an intrinsic; return whether it was one."""
        value: Any = found  # which type checkers do not narrow
        function = python_function(value) if is_jitted(found) else getattr(value, "_defn", value)
        if not isinstance(function, types.FunctionType):
            return False
        if id(value) in self._seen:
            self._add("again", self._seen[id(value)])
            return True
        self._seen[id(value)] = len(self._seen)
        self._enter(function)
        if is_jitted(found):
            self._add("options", sorted(map(str, value.targetoptions.items())))
            self._visit(*sorted(value.locals.items()))  # types of local variables
            if not value._can_compile:  # declared with signatures
                self._add([str(one.signature) for one in value.overloads.values()])
        elif (own := getattr(value, "compiled_as", None)) is not None:  # as it says itself
            self._visit(own)
        elif function is value and not _is_fixed(function.__module__):  # Numba's come and go
            for kind in registered(function):
                for template in getattr(kind, "templates", [None]):
                    if (make := getattr(template, "_overload_func", None)) is None:
                        self.unknown.append(str(kind))
                    self._add(
                        "overload", sorted(map(str, getattr(template, "_jit_options", {}).items()))
                    )
                    self._visit(make)  # which makes the function that is called instead
        return True

    def _enter(self, function: types.FunctionType) -> None:
        """Visit the code of a function and all that it reads."""
        if _is_fixed(function.__module__):
            self._add("library", function.__module__, function.__qualname__)
            return
        # Numba saves the name, and imports it when it loads the code.
        self._add("function", function.__module__, function.__module__ in sys.modules)
        code, scope = _read_code(function.__code__), function.__globals__
        self.digest.update(code.digest)
        read = {name: scope[name] for name in sorted(code.reads & scope.keys())}
        read |= closed_over(function)
        self._visit(function.__defaults__, *(function.__kwdefaults__ or {}).items())
        for item in read.items():
            self._visit(item)
            self._visit_attributes(item[1], code.names)

    def _visit_attributes(self, module: Any, names: frozenset[str]) -> None:
        """Visit what code with these names may read from a value, if that is a module."""
        if not isinstance(module, types.ModuleType) or _is_fixed(module.__name__):
            return
        if module.__name__ not in _LIBRARIES:
            for name in sorted(names & vars(module).keys()):
                self._visit(vars(module)[name])
                self._visit_attributes(vars(module)[name], names)

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


def _stable_repr(value: Any) -> str:
    """Return text that is equal in every process; objects that print an address count by type."""
    if isinstance(value, set | frozenset):  # its order differs between processes
        return f"{type(value).__name__}{sorted(map(_stable_repr, value))}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_stable_repr, value))})"
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" if " at 0x" in text else text
