"""Short errors for kernels that can't be compiled: the line at fault first, then the reason."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numba
from numba import from_dtype
from numba import types as numba_types

from vecenv.core.compiling import fresh_njit
from vecenv.core.function_copies import python_function
from vecenv.jit import random
from vecenv.jit.episodes import RUN_DTYPE
from vecenv.jit.errors import KernelCompileError, Place
from vecenv.jit.kernels import ARGUMENTS, EnvKernels
from vecenv.jit.reading import reached, reads

__all__ = ["explain"]

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
_FOREIGN = tuple(  # functions of Numba and of this package
    str(folder) + os.sep for folder in (Path(numba.__file__).parent, Path(__file__).parents[1])
)
_NOISE = (
    *("Failed in ", "During:", "There are", "- Of which", "Overload", "With argument", "No match"),
    *("Operator Overload", "Type Restricted", "* (", "Rejected as", "raised from"),
)  # lines about Numba's own passes
_END = ("File ", "During:")
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")


def explain(
    kernels: EnvKernels,
    compiled: dict[str, Any],
    constants: dict[str, Any],
    error: Exception,
    *,
    compile_one: Callable[[Any, tuple[Any, ...]], Any] | None = None,
    where: str = "",
) -> NoReturn:
    """Compile the kernels one by one to find the one at fault; raise KernelCompileError for it.

    Args:
        kernels: The kernels that could not be compiled.
        compiled: Their Numba functions, by name.
        constants: Global constants of the templates, see `binding`.
        error: Numba's error.
        compile_one: Compiles a kernel for argument types; None compiles for the CPU.
        where: " for ...", the target of the compilation, for the message.
    """
    compile_one = compile_one or (lambda kernel, given: kernel.compile(given))
    for name, types_all in _signatures(constants).items():
        if getattr(kernels, name) is None:
            continue
        kernel = fresh_njit(compiled[name])
        function = python_function(kernel)
        names = [*ARGUMENTS[name], "params"] if name != "sampler" else ["params", "rng"]
        listed = ", ".join(f"{a}: {_type_text(t)}" for a, t in zip(names, types_all, strict=False))
        try:
            compile_one(kernel, _with_star(function, types_all))
        except Exception as failure:
            text = _COLOURS.sub("", str(failure))
            place, reason = _place_and_reason(failure, text, kernel, constants)
            raise KernelCompileError.at(
                place,
                f"{reason}\n{kernels.name}: kernel {name}({listed}) can't be compiled{where}; all "
                "that Numba says is in the attribute numba_message",
                numba_message=text,
            ) from None
    text = _COLOURS.sub("", str(error))
    raise KernelCompileError(
        f"{kernels.name}: each kernel can be compiled{where}, the loop over them can't: "
        f"{_reason(text)}",
        numba_message=text,
    ) from None


def _signatures(constants: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the types of the arguments of each kernel."""
    state, rng = from_dtype(constants["STATE_DTYPE"]), from_dtype(RUN_DTYPE)
    params = [] if constants["PARAMS_DTYPE"] is None else [from_dtype(constants["PARAMS_DTYPE"])]
    action = from_dtype(constants["ACTION_DTYPE"])
    if constants["ACTION_SHAPE"]:
        action = numba_types.Array(action, len(constants["ACTION_SHAPE"]), "C")
    obs_ndim = max(1, len(constants["OBS_SHAPE"]))
    obs = numba_types.Array(from_dtype(constants["OBS_DTYPE"]), obs_ndim, "C")
    mask = numba_types.Array(numba_types.boolean, 1, "C")
    return {
        "reset": [state, rng, *params],
        "step": [state, action, rng, *params],
        "observe": [state, obs, *params],
        "action_mask": [state, mask, *params],
        "sampler": [*params, rng],
    }


def _with_star(function: types.FunctionType, types_all: list[Any]) -> tuple[Any, ...]:
    """Return the types of the arguments; `*params` counts as one argument, a tuple."""
    if not function.__code__.co_flags & inspect.CO_VARARGS:
        return tuple(types_all)
    count = function.__code__.co_argcount
    rest = numba_types.StarArgTuple.from_types(tuple(types_all[count:]))
    return *types_all[:count], rest


def _place_and_reason(
    failure: Exception, text: str, kernel: Any, constants: dict[str, Any]
) -> tuple[Place, str]:
    """Return the line at fault and the reason."""
    functions = [one for one in reached(kernel) if not _is_foreign(one.__code__.co_filename)]
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


def _is_foreign(filename: str) -> bool:
    return filename.startswith(_FOREIGN)


def _named_place(text: str, functions: list[types.FunctionType]) -> Place | None:
    """Return the first place in Numba's message outside this package and Numba: the innermost."""
    for found in _PLACES.finditer(text):
        filename, line = found[1] or found[3], int(found[2] or found[4])
        if not filename.startswith("<"):
            filename = os.path.abspath(filename)
        if not _is_foreign(filename):
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
