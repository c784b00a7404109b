"""Warn of kernels that allocate memory in every call, and of what is slow to compile."""

from __future__ import annotations

import dis
import types
import warnings
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

from vecenv.core.function_copies import closed_over
from vecenv.jit.failures import reached
from vecenv.jit.kernels import EnvKernels

__all__ = ["warn_of_allocations"]

# Functions of NumPy that make new arrays, and those of them that take seconds to compile.
_SLOW = frozenset(
    {
        *("argsort", "clip", "histogram", "median", "nanmedian", "nanpercentile", "nanquantile"),
        *("partition", "percentile", "quantile", "sort", "unique"),
    }
)
_ALLOCATING = frozenset(
    {
        *_SLOW,
        *("append", "arange", "argwhere", "array", "bincount", "column_stack"),
        *("concatenate", "convolve", "copy", "cumprod", "cumsum", "delete", "diag", "diff"),
        *("empty", "empty_like", "eye", "flatnonzero", "full", "full_like", "hstack", "identity"),
        *("linspace", "nonzero", "ones", "ones_like", "repeat", "roll", "stack", "take"),
        *("vstack", "zeros", "zeros_like"),
    }
)
_METHODS = frozenset({"argsort", "astype", "copy", "cumsum", "flatten", "nonzero", "repeat"})


def warn_of_allocations(kernels: EnvKernels) -> None:
    """Warn of calls in kernels, and in functions they call, that allocate; names file and line."""
    told: set[tuple[str, int, str]] = set()
    for name in ("reset", "step", "observe", "action_mask"):
        given = getattr(kernels, name)
        for kernel in given.values() if isinstance(given, Mapping) else [given]:
            for function in () if kernel is None else reached(kernel):
                for line, call in _found(function):
                    place = function.__code__.co_filename, line, call
                    if place not in told:
                        told.add(place)
                        _warn(kernels, name, function, line, call)


def _warn(
    kernels: EnvKernels, name: str, function: types.FunctionType, line: int, call: str
) -> None:
    advice = "keep such memory in a field of the state, or loop over numbers"
    if call == "np.clip":
        advice = "use min and max on numbers"
    if call.removeprefix("np.") in _SLOW:
        advice += f". {call} may take many seconds to compile, too"
    scope = function.__globals__
    warnings.warn_explicit(
        f"{kernels.name}: {call} in {function.__name__} allocates memory each time that kernel "
        f"{name} gets there; {advice}",
        UserWarning,
        function.__code__.co_filename,
        line,
        module=scope.get("__name__"),
        registry=scope.setdefault("__warningregistry__", {}),
    )


def _found(function: types.FunctionType) -> Iterator[tuple[int, str]]:
    """Yield line and name of each call that allocates."""
    values = {**function.__globals__, **closed_over(function)}
    line, last = function.__code__.co_firstlineno, None
    for one in chain.from_iterable(map(dis.get_instructions, _codes(function.__code__))):
        line = (one.positions and one.positions.lineno) or line
        found: Any = None
        if one.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
            found = values.get(one.argval)
            yield from _named(line, found)
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if last is np:
                yield from _named(line, getattr(np, one.argval, None))
            elif one.argval in _METHODS and not isinstance(last, types.ModuleType):
                yield line, f"the method {one.argval}"
        elif one.opname == "BUILD_LIST":
            yield line, "a list"
        last = found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code and that of comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _named(line: int, value: Any) -> Iterator[tuple[int, str]]:
    """Yield the line and name if this is a function of NumPy that allocates."""
    name = getattr(value, "__name__", "")
    if name in _ALLOCATING and getattr(np, name, None) is value:
        yield line, f"np.{name}"
