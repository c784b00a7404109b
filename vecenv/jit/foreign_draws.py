"""Refuse kernels that draw random numbers from elsewhere than their env's stream."""

from __future__ import annotations

import dis
import inspect
import linecache
import random
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import numpy as np
from numba.extending import is_jitted

from vecenv.core.function_copies import FIXED_PACKAGES, closed_over, python_function
from vecenv.jit.failures import KernelCompileError
from vecenv.jit.kernels import EnvKernels

__all__ = ["refuse_foreign_draws"]

_PACKAGE = __name__.partition(".")[0]
_GENERATORS = np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random
_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME"}
_CLOSED = {"LOAD_DEREF", "LOAD_CLASSDEREF"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"}
# What to write instead, by the names that NumPy and Python have for it.
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


def refuse_foreign_draws(kernels: EnvKernels, functions: dict[str, Any]) -> None:
    """Raise KernelCompileError if a kernel may draw from NumPy's or Python's generators.

    These are no part of an env's state, and differ between threads, workers and devices.

    Args:
        kernels: The kind of env.
        functions: Its kernels by name, see `functions_of`.
    """
    own = {**functions, "central_state": kernels.central_state}
    for name, kernel in own.items():
        for function, found, line, attribute in _draws_of(kernel):
            _refuse(kernels, name, function, found, line, attribute)


def _draws_of(kernel: Any) -> Iterator[tuple[types.FunctionType, Any, int, str]]:
    """Yield what a kernel and the functions it reaches draw from: where, and by which name."""
    seen: dict[int, Any] = {}  # by id; kept, as ids of what is dropped are given again
    found: list[Any] = [kernel]
    while found:
        value = found.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if is_jitted(value):
            value = python_function(value)
        if isinstance(value, tuple | list):
            found += value
        elif isinstance(value, dict):
            found += value.values()
        elif isinstance(value, types.MethodType):
            found.append(value.__func__)
        if not isinstance(value, types.FunctionType):
            continue
        package = (value.__module__ or "").partition(".")[0]
        if package in FIXED_PACKAGES:
            continue
        closed = closed_over(value)
        kept = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        found += kept
        if package == _PACKAGE:  # draws from nothing else, but may call users' functions
            found += closed.values()
            continue
        for one in kept:
            if _is_foreign(one):
                yield value, one, value.__code__.co_firstlineno, ""
        for one, line, attribute in _read_by(value.__code__, value.__globals__, closed):
            if _is_foreign(one):
                yield value, one, line, attribute
            found.append(one)


def _read_by(
    code: types.CodeType, scope: dict[str, Any], closed: dict[str, Any]
) -> Iterator[tuple[Any, int, str]]:
    """Yield what code reads, attributes too: the value, the line, and the attribute read of it."""
    instructions = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    value: Any = None
    for k, one in enumerate(instructions):
        name = one.argval
        if one.opname in _GLOBALS:
            value = scope.get(name)
        elif one.opname in _CLOSED:
            value = closed.get(name)
        elif one.opname == "IMPORT_NAME":
            value = sys.modules.get(name)
        elif one.opname in _ATTRIBUTES and value is not None:
            is_module = isinstance(value, types.ModuleType)
            value = (getattr if is_module else inspect.getattr_static)(value, name, None)
        else:
            value = None
        if value is not None:
            after = instructions[k + 1]
            attribute = after.argval if after.opname in _ATTRIBUTES else ""
            line = one.positions.lineno if one.positions is not None else None
            yield value, line or code.co_firstlineno, attribute
            for part in _parts(value):
                yield part, line or code.co_firstlineno, ""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _read_by(constant, scope, closed)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, tuple | list):
        return value
    return value.values() if isinstance(value, dict) else ()


def _is_foreign(value: Any) -> bool:
    """Whether a value draws random numbers, or is a module or class of what does."""
    if isinstance(value, types.ModuleType):
        name = value.__name__
        return value is random or name == "numpy.random" or name.startswith("numpy.random.")
    if isinstance(value, _GENERATORS) or isinstance(getattr(value, "__self__", None), _GENERATORS):
        return True
    home = getattr(value, "__module__", None) if callable(value) else None
    return isinstance(home, str) and (home == "random" or home.startswith("numpy.random"))


def _refuse(
    kernels: EnvKernels,
    name: str,
    function: types.FunctionType,
    found: Any,
    line: int,
    attribute: str,
) -> NoReturn:
    source = getattr(found, "__self__", found)  # of a method
    is_pythons = source is random or isinstance(source, random.Random)
    home = (
        "random" if is_pythons or getattr(found, "__module__", "") == "random" else "numpy.random"
    )
    called = attribute or getattr(found, "__name__", "")
    instead = next((new for new, old in _INSTEAD.items() if called in old), None)
    code = function.__code__
    text = linecache.getline(code.co_filename, line).strip()
    raise KernelCompileError(
        f"{code.co_filename}:{line}, in {code.co_name}" + (f"\n    {text}" if text else "") + "\n"
        f"{kernels.name}: kernel {name} draws random numbers from {home}, of "
        "which the env's seed knows nothing: the same seed would give other runs. Draw from the "
        "argument rng: from vecenv.jit import random, then "
        f"random.{instead or 'uniform(rng)'}"
        f"{'' if instead else ', random.integers(rng, n), random.normal(rng) or another'}"
        " (docs/compiled_envs.md, Random numbers)",
        filename=code.co_filename,
        lineno=line,
    )
