"""Errors about mistakes in kernels; their messages begin with the user's line.

Kernels that can't be compiled are compiled one by one, and Numba's message is searched for the
innermost line of the user's. What functions read is found in their instructions.
"""

from __future__ import annotations

import dis
import inspect
import linecache
import os
import random as python_random
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numba
import numpy as np
from numba import from_dtype
from numba import types as numba_types

from vecenv.core.compiling import Copies, closed_over, fresh_njit, python_function
from vecenv.jit import random
from vecenv.jit.driver import RUN_DTYPE
from vecenv.jit.kernels import EnvKernels, arguments_of

_PACKAGE = Path(__file__).parents[1]
_GENERATORS = (
    *(np.random.Generator, np.random.RandomState, np.random.BitGenerator),
    python_random.Random,
)
# Replacements, by the names in NumPy and Python.
_INSTEAD = {
    "uniform(rng)": ("rand", "random", "random_sample", "ranf", "sample", "uniform"),
    "integers(rng, n)": ("randint", "integers", "random_integers", "randrange"),
    "normal(rng)": ("randn", "normal", "standard_normal", "gauss", "normalvariate"),
    "exponential(rng)": ("exponential", "standard_exponential", "expovariate"),
    "gamma(rng, shape)": ("gamma", "standard_gamma", "gammavariate"),
    "poisson(rng, rate)": ("poisson",),
    "binomial(rng, n, p)": ("binomial", "binomialvariate"),
    "choice(rng, weights), or integers(rng, n)": ("choice", "choices"),
    "shuffle(rng, values)": ("shuffle",),
    "permutation(rng, out)": ("permutation", "permuted"),
}
_REASON_LINES = 6
_LINE_LENGTH = 240
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PLACES = re.compile(
    r"(?:\bat|\bfrom) ([^\s()]+\.\w+|<[^>]*>) \((\d+)\)|File \"([^\"]+)\", line (\d+)"
)
_UNTYPED = re.compile(r"Untyped global name '(\w+)'.*<class 'function'>", re.DOTALL)
_BUILT_IN = re.compile(r"<(?:built-in )?function (\w+)")
# Numba's message about a constant from a closure that it can't compile; contains the name.
_NO_CONSTANT = re.compile(
    r"OverloadSelector object at 0x\w+>, \((\w+)\b.*\n.*lowering \".*freevar\((\w+):"
)
_UNDEFINED = re.compile(r"name '(\w+)' is not defined")
_FOREIGN = tuple(str(one) + os.sep for one in (Path(numba.__file__).parent, _PACKAGE))
_NOISE = (
    *("Failed in ", "During:", "There are", "- Of which", "Overload", "With argument", "No match"),
    *("Operator Overload", "Type Restricted", "* (", "Rejected as", "raised from"),
)  # lines about Numba's own passes
_END = ("File ", "During:")
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_ATTRIBUTES = (*_LOADS, "IMPORT_FROM")


class Place(NamedTuple):
    """A line of a function; its text is "FILE:LINE, in FUNCTION" and the line itself."""

    filename: str
    lineno: int
    function: str

    @classmethod
    def of(cls, function: types.FunctionType, line: int | None = None) -> Place:
        """Return a line of a function; its first line if none is given."""
        code = function.__code__
        return cls(code.co_filename, line or code.co_firstlineno, code.co_name)

    def __str__(self) -> str:
        source = linecache.getline(self.filename, self.lineno).strip()
        inside = f", in {self.function}" if self.function else ""
        return f"{self.filename}:{self.lineno}{inside}" + (f"\n    {source}" if source else "")


class _OfALine(Exception):
    """Base of errors about a line of a kernel, or of a function that it calls.

    Attributes:
        filename: File of the line at fault.
        lineno: That line; the first one of the kernel if none is known.
    """

    def __init__(self, message: str, filename: str = "", lineno: int = 0, **more: Any) -> None:
        super().__init__(message)
        self.filename, self.lineno = filename, lineno
        vars(self).update(more)

    @classmethod
    def at(cls, place: Place, text: str, **more: Any) -> Any:
        """Return the error for a line."""
        return cls(f"{place}\n{text}", place.filename, place.lineno, **more)


class KernelCompileError(_OfALine, RuntimeError):
    """A kernel can't be compiled, or is not allowed; begins with file, line and reason.

    Attributes:
        numba_message: Numba's whole message, without colours.
    """

    numba_message = ""


class KernelResultError(_OfALine, RuntimeError):
    """A kernel returns a wrong result, or leaves memory unwritten that it must write."""


class KernelIndexError(_OfALine, IndexError):
    """A kernel uses an index that is out of range."""


# -- what functions read ---------------------------------------------------------------------------


class Read(NamedTuple):
    """An instruction of a function, and the value that it reads."""

    line: int  # in the file
    operation: str = ""
    name: Any = ""  # its argument; for some operations the name that it reads
    value: Any = None  # if known without running the function
    attribute: str = ""  # of the value, that the next instruction reads


def reads(function: types.FunctionType) -> Iterator[Read]:
    """Yield the instructions of a function, and of functions and comprehensions nested in it."""
    return _reads(function.__code__, function.__globals__, closed_over(function))


def _reads(
    code: types.CodeType, scope: Mapping[str, Any], closed: Mapping[str, Any]
) -> Iterator[Read]:
    value, line = None, code.co_firstlineno
    instructions = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    for one, after in pairwise([*instructions, None]):
        assert one is not None
        # `starts_line` is a number before Python 3.13, and a bool since.
        line = (one.positions and one.positions.lineno) or line
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = scope.get(one.argval)
        elif one.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            value = closed.get(one.argval)
        elif one.opname == "IMPORT_NAME":
            value = sys.modules.get(one.argval)
        elif one.opname in _ATTRIBUTES and value is not None:
            is_module = isinstance(value, types.ModuleType)
            value = (getattr if is_module else inspect.getattr_static)(value, one.argval, None)
        else:
            value = None
        attribute = after.argval if after is not None and after.opname in _ATTRIBUTES else ""
        yield Read(line, one.opname, one.argval, value, attribute)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _reads(constant, scope, closed)


def reached(kernel: Any) -> list[types.FunctionType]:
    """Return copies of a kernel and of all functions that it calls."""
    found: list[types.FunctionType] = []

    def note(_: Any, copy: types.FunctionType) -> types.FunctionType:
        found.append(copy)
        return copy

    Copies(note, with_plain=True).copy(kernel)
    return found


def refuse_foreign_draws(kernels: EnvKernels, functions: dict[str, Any]) -> None:
    """Raise KernelCompileError if a kernel may draw from NumPy's or Python's generators.

    They are not part of an env's state, and differ between threads, workers and devices. For
    `functions` see `binding.parts_of`.
    """
    for name, kernel in {**functions, "central_state": kernels.central_state}.items():
        for function in reached(kernel):
            if (function.__module__ or "").partition(".")[0] == _PACKAGE.name:
                continue  # ours draw from nothing else
            own = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
            defaults = [Read(function.__code__.co_firstlineno, value=value) for value in own]
            for one in (*defaults, *reads(function)):
                values = list(one.value.values()) if isinstance(one.value, dict) else one.value
                parts = values if isinstance(values, tuple | list) else ()
                for part in filter(_is_foreign, (one.value, *parts)):
                    _refuse_draw(kernels, name, function, one._replace(value=part))


def _is_foreign(value: Any) -> bool:
    """Return whether a value draws random numbers, or is a module or class that does."""
    if isinstance(value, _GENERATORS) or isinstance(getattr(value, "__self__", None), _GENERATORS):
        return True
    home = value.__name__ if isinstance(value, types.ModuleType) else None
    if home is None and callable(value):
        home = getattr(value, "__module__", None)
    return isinstance(home, str) and (home == "random" or home.startswith("numpy.random"))


def _refuse_draw(
    kernels: EnvKernels, name: str, function: types.FunctionType, read: Read
) -> NoReturn:
    source = getattr(read.value, "__self__", read.value)  # the object of a method
    is_pythons = source is python_random or isinstance(source, python_random.Random)
    is_pythons |= getattr(read.value, "__module__", "") == "random"
    called = read.attribute or getattr(read.value, "__name__", "")
    others = "uniform(rng), random.integers(rng, n), random.normal(rng) or another"
    instead = next((new for new, old in _INSTEAD.items() if called in old), others)
    raise KernelCompileError.at(
        Place.of(function, read.line),
        f"{kernels.name}: kernel {name} draws random numbers from "
        f"{'random' if is_pythons else 'numpy.random'}, of which the env's seed knows nothing: the "
        "same seed would give other runs. Draw from the argument rng: from vecenv.jit import "
        f"random, then random.{instead} (docs/compiled_envs.md, Random numbers)",
    )


# -- kernels that can't be compiled ----------------------------------------------------------------


def explain(
    kernels: EnvKernels,
    compiled: dict[str, Any],
    constants: dict[str, Any],
    error: Exception,
    compile_one: Callable[[Any, tuple[Any, ...]], Any] | None = None,
    where: str = "",
) -> NoReturn:
    """Compile the kernels one by one to find the one at fault; raise KernelCompileError for it.

    For `compiled` and `constants` see `binding.njit_parts`. `compile_one` compiles a Python
    function for argument types; None compiles for the CPU. `where` names the target.
    """
    types_of = _argument_types(constants)
    for name, dispatcher in compiled.items():
        if getattr(kernels, name) is None:
            continue
        kernel = fresh_njit(dispatcher)
        function = python_function(kernel)
        names = arguments_of(name, has_params="params" in types_of)
        given = tuple(types_of[name if one == "out" else one] for one in names)
        listed = ", ".join(f"{a}: {_type_text(t)}" for a, t in zip(names, given, strict=True))
        if function.__code__.co_flags & inspect.CO_VARARGS:  # `*params` is one argument, a tuple
            count = function.__code__.co_argcount
            given = *given[:count], numba_types.StarArgTuple.from_types(given[count:])
        try:
            kernel.compile(given) if compile_one is None else compile_one(kernel.py_func, given)
        except Exception as failure:
            text = _COLOURS.sub("", str(failure))
            place, reason = _place_and_reason(failure, text, kernel, constants)
            raise KernelCompileError.at(
                place,
                f"{reason}\n{kernels.name}: kernel {name}({listed}) can't be compiled{where}; all "
                "that Numba says is in the attribute numba_message",
                numba_message=text,
            ) from None
        signatures = kernel.nopython_signatures if compile_one is None else ()
        if name == "step" and any(one.return_type == numba_types.none for one in signatures):
            raise KernelCompileError.at(
                Place.of(function),
                f"{kernels.name}: kernel step never returns a result; expected a reward and two "
                "flags: `return reward, terminated, truncated`",
            ) from None
    text = _COLOURS.sub("", str(error))
    raise KernelCompileError(
        f"{kernels.name}: each kernel can be compiled{where}, the loop over them can't: "
        f"{_reason(text)}",
        numba_message=text,
    ) from None


def _argument_types(constants: dict[str, Any]) -> dict[str, Any]:
    """Return the types of the kernels' arguments; that of `out` by the kernel's name."""
    dtypes = {name: constants[f"{name.upper()}_DTYPE"] for name in ("state", "params", "action")}
    types_of = {name: from_dtype(dtype) for name, dtype in dtypes.items() if dtype is not None}
    if constants["ACTION_SHAPE"]:
        types_of["action"] = numba_types.Array(
            types_of["action"], len(constants["ACTION_SHAPE"]), "C"
        )
    obs_ndim = max(1, len(constants["OBS_SHAPE"]))
    return types_of | {
        "rng": from_dtype(RUN_DTYPE),
        "observe": numba_types.Array(from_dtype(constants["OBS_DTYPE"]), obs_ndim, "C"),
        "action_mask": numba_types.Array(numba_types.boolean, 1, "C"),
    }


def _place_and_reason(
    failure: Exception, text: str, kernel: Any, constants: dict[str, Any]
) -> tuple[Place, str]:
    """Return the line at fault and the reason."""
    functions = [
        one for one in reached(kernel) if not one.__code__.co_filename.startswith(_FOREIGN)
    ]
    place, reason = _named_place(text, functions), ""
    if isinstance(failure, KeyError):  # raised by Numba's look-up of a field
        name = str(failure.args[0]) if failure.args else ""
        place = _line_with(name, functions, (*_LOADS, "STORE_ATTR")) or place
        reason = _about_field(name, place, constants)
    else:
        reason = _reason(text)
        if (found := _UNDEFINED.search(text)) is not None:
            place = _line_with(found[1], functions, ("LOAD_GLOBAL", "LOAD_NAME")) or place
        elif (found := _UNTYPED.search(text)) is not None:
            reason = f"{found[1]} is a plain function; decorate it with @numba.njit"
    if not reason or "to nestedarray(" in reason:
        for name, (kind, *_) in constants["STATE_DTYPE"].fields.items():
            stored = _line_with(name, functions, ("STORE_ATTR",)) if kind.subdtype else None
            if stored is not None and place in (None, stored):
                place = stored
                reason = (
                    f"the field {name!r} is an array, which is not replaced by another value: "
                    f"write into it, state.{name}[:] = ..., or entry by entry in a loop"
                )
                break
    if "Cannot bind" in reason and place is not None:
        source = linecache.getline(place.filename, place.lineno)
        for name in re.findall(r"\b(\w+)\s*\(\s*rng\b", source):
            if name in random.__all__:
                given = inspect.signature(getattr(random, name).py_func)
                reason = f"{name} of vecenv.jit.random takes {given}"
                reason += ": write low + (high - low) * uniform(rng)" * (name == "uniform")
                reason += ": write mean + deviation * normal(rng)" * (name == "normal")
    if place is None and (found := _BUILT_IN.search(text)) is not None:
        # numba-cuda's messages sometimes lack the line.
        place = _line_with(found[1], functions, (*_LOADS, "LOAD_GLOBAL"))
    reason = reason or f"Numba says no more than {type(failure).__name__}"
    return place or Place.of(python_function(kernel)), reason


def _about_field(name: str, place: Place | None, constants: dict[str, Any]) -> str:
    """Return the reason for a missing field of a record, with the record's name in the line."""
    source = "" if place is None else linecache.getline(place.filename, place.lineno)
    if re.search(rf"\brng\s*\.\s*{re.escape(name)}\b", source):
        return (
            f"rng has no {name!r}: it is drawn from with functions of vecenv.jit.random, such as "
            "uniform(rng), integers(rng, n), normal(rng)"
        )
    records = {"state": constants["STATE_DTYPE"], "params": constants["PARAMS_DTYPE"]}
    told = "; ".join(f"{k} has {', '.join(x.names)}" for k, x in records.items() if x is not None)
    return f"a record has no field {name!r}; {told}"


def _named_place(text: str, functions: list[types.FunctionType]) -> Place | None:
    """Return the first place in Numba's message outside this package and Numba: the innermost."""
    for found in _PLACES.finditer(text):
        filename, line = found[1] or found[3], int(found[2] or found[4])
        if not filename.startswith("<"):
            filename = os.path.abspath(filename)
        if not filename.startswith(_FOREIGN):
            for one in functions:
                lines = [number for *_, number in one.__code__.co_lines()]
                if one.__code__.co_filename == filename and line in lines:
                    return Place(filename, line, one.__name__)
            return Place(filename, line, "")
    return None


def _line_with(
    name: str, functions: list[types.FunctionType], operations: tuple[str, ...]
) -> Place | None:
    """Return the first line that does one of these operations on this name."""
    for function in functions:
        for one in reads(function):
            if one.operation in operations and one.name == name:
                return Place.of(function, one.line)
    return None


def _reason(text: str) -> str:
    """Return Numba's reason, without source and tried overloads."""
    if (found := _NO_CONSTANT.search(text)) is not None:
        kind = found[1].lower() if found[1] in ("List", "Set") else found[1]
        return (
            f"Numba can't compile a constant of type {kind} ({found[2]}); use a tuple or an array"
        )
    told: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith(_END) and told:
            break
        if line and not line.startswith(_NOISE):
            told.append(_cut(line.partition(" Raised from ")[0]))
    return "\n".join(told[:_REASON_LINES]) or _cut(text.strip())


def _cut(text: str) -> str:
    return text if len(text) <= _LINE_LENGTH else text[: _LINE_LENGTH - 3] + "..."


def _type_text(kind: Any) -> str:
    """Return Numba's name of a type; for a record, its fields."""
    if kind == from_dtype(RUN_DTYPE):
        return "random stream"
    if isinstance(kind, numba_types.Record):
        fields = ", ".join(f"{name}: {kind.typeof(name)}" for name in kind.fields)
        return "{" + _cut(fields) + "}"
    return str(kind)
