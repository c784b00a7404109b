"""The instructions of kernels: what they read, and which of it is forbidden."""

from __future__ import annotations

import dis
import inspect
import random
import sys
import types
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numba.extending import is_jitted

from vecenv.core.function_copies import FIXED_PACKAGES, Copies, closed_over, python_function
from vecenv.jit.errors import KernelCompileError, Place
from vecenv.jit.kernels import EnvKernels

__all__ = ["Read", "reached", "reads", "refuse_foreign_draws"]

_PACKAGE = __name__.partition(".")[0]
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"}
_GENERATORS = np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random
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


class Read(NamedTuple):
    """An instruction of a function: its line, name and argument, and the value that it reads.

    Attributes:
        line: Line in the file.
        operation: Name of the instruction.
        name: Its argument; for some operations the name that it reads.
        value: The value that it reads, if known without running the function; else None.
        attribute: The attribute of the value that the next instruction reads, or "".
    """

    line: int
    operation: str
    name: Any
    value: Any
    attribute: str


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
        is_next = after is not None and after.opname in _ATTRIBUTES
        yield Read(line, one.opname, one.argval, value, after.argval if is_next else "")  # type: ignore[union-attr]  # there is one
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

    They are not part of an env's state, and differ between threads, workers and devices.

    Args:
        kernels: The kind of env.
        functions: Its kernels by name, see `functions_of`.
    """
    for name, kernel in {**functions, "central_state": kernels.central_state}.items():
        seen: dict[int, Any] = {}  # by id; kept alive, because ids of deleted objects are reused
        found = [kernel]
        while found:
            value = found.pop()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            found += _parts(value)
            value = (
                python_function(value) if is_jitted(value) else getattr(value, "__func__", value)
            )
            if not isinstance(value, types.FunctionType):
                continue
            package = (value.__module__ or "").partition(".")[0]
            if package in FIXED_PACKAGES:
                continue
            kept = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            found += kept
            if package == _PACKAGE:  # ours draw from nothing else, but may call users'
                found += closed_over(value).values()
                continue
            first = value.__code__.co_firstlineno
            for one in [*(Read(first, "", "", one, "") for one in kept), *reads(value)]:
                for part in (one.value, *_parts(one.value)):
                    if _is_foreign(part):
                        _refuse(kernels, name, value, one._replace(value=part))
                found.append(one.value)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, tuple | list) else []


def _is_foreign(value: Any) -> bool:
    """Return whether a value draws random numbers, or is a module or class that does."""
    if isinstance(value, _GENERATORS) or isinstance(getattr(value, "__self__", None), _GENERATORS):
        return True
    home = value.__name__ if isinstance(value, types.ModuleType) else None
    if home is None and callable(value):
        home = getattr(value, "__module__", None)
    return isinstance(home, str) and (home == "random" or home.startswith("numpy.random"))


def _refuse(kernels: EnvKernels, name: str, function: types.FunctionType, read: Read) -> NoReturn:
    source = getattr(read.value, "__self__", read.value)  # the object of a method
    is_pythons = source is random or isinstance(source, random.Random)
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
