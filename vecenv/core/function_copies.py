"""Copies of functions together with the functions that they call."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

from numba.extending import is_jitted

__all__ = ["FIXED_PACKAGES", "Copies", "closed_over", "names_in", "python_function"]

# Functions of these packages are not copied, and hashed by name: the version stands for the code.
FIXED_PACKAGES = ("numba", "numpy", "llvmlite", "math", "builtins", "typing")
_MISSING = object()


def names_in(code: types.CodeType) -> set[str]:
    """Names that code, and code nested in it, reads: globals, attributes, closed-over variables."""
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names


class Copies:
    """Copies functions so that the copies call copies, also through modules, tuples and closures.

    A copy has the original's code, and its own global names and closed-over variables, with the
    values that they have now.

    Args:
        remake: Called with a compiled or plain function that was found and the copy of its Python
            function, before names in the copy are bound; returns the replacement.
        finish: Called with the function found and its replacement, once names are bound.
        find: Called with the function found; returns an existing replacement, or None.
        convert: Called with any value that is no function, and with modules whose functions are not
            copied; returns the replacement.
        with_plain: Whether plain functions are copied too.
    """

    def __init__(
        self,
        remake: Callable[[Any, types.FunctionType], Any],
        *,
        finish: Callable[[Any, Any], None] = lambda found, made: None,
        find: Callable[[Any], Any] = lambda found: None,
        convert: Callable[[Any], Any] = lambda value: value,
        with_plain: bool = False,
    ) -> None:
        self._remake, self._finish, self._find = remake, finish, find
        self._convert, self._with_plain = convert, with_plain
        self._made: dict[int, tuple[Any, Any]] = {}  # by id; the original keeps its id taken

    def copy(self, value: Any, names: set[str] | None = None) -> Any:
        """Return a copy of a function, or of a value with its functions replaced by copies.

        Values without functions are passed to `convert`; of a module, only `names` are replaced.
        """
        if is_jitted(value):
            return self._function(value, python_function(value))
        if isinstance(value, types.FunctionType) and self._with_plain:
            return self._function(value, value)
        if isinstance(value, tuple):
            items = [self.copy(item, names) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, types.ModuleType):
            return self._module(value, names or set())
        return self._convert(value)

    def bind(self, function: types.FunctionType, stand_in: Any) -> types.FunctionType:
        """Return a copy of a plain function in which `stand_in` replaces the function itself."""
        copy, fill = _blank(function)
        self._made[id(stand_in)] = (stand_in, stand_in)
        fill(self.copy)
        return copy

    def _function(self, found: Any, function: types.FunctionType) -> Any:
        if id(found) in self._made:
            return self._made[id(found)][1]
        if (function.__module__ or "").split(".")[0] in FIXED_PACKAGES:
            return found
        made = self._find(found)
        if made is not None:
            self._made[id(found)] = (found, made)
            return made
        copy, fill = _blank(function)
        made = self._remake(found, copy)
        self._made[id(found)] = (found, made)
        fill(self.copy)
        self._finish(found, made)
        return made

    def _module(self, module: types.ModuleType, names: set[str]) -> types.ModuleType:
        """Return a module with copies of the functions in it that have one of these names."""
        if id(module) in self._made:
            return self._made[id(module)][1]
        if module.__name__.split(".")[0] in FIXED_PACKAGES:
            return self._convert(module)
        self._made[id(module)] = (module, module)  # in case the module contains itself
        changed = {}
        for name in names:
            value = vars(module).get(name, _MISSING)
            if value is not _MISSING and (new := self.copy(value, names)) is not value:
                changed[name] = new
        del self._made[id(module)]  # other functions read other names of it
        if not changed:
            return module
        twin = types.ModuleType(module.__name__)
        vars(twin).update(vars(module))
        vars(twin).update(changed)
        return twin


def _blank(
    function: types.FunctionType,
) -> tuple[types.FunctionType, Callable[[Callable[[Any, set[str]], Any]], None]]:
    """Copy a function without binding its names; return also a function that binds them."""
    code, given = function.__code__, function.__globals__
    scope = {key: given[key] for key in ("__name__", "__builtins__", "__file__") if key in given}
    cells = tuple(types.CellType() for _ in code.co_freevars)
    copy = types.FunctionType(code, scope, function.__name__, function.__defaults__, cells or None)
    for own in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
        setattr(copy, own, getattr(function, own))

    def fill(convert: Callable[[Any, set[str]], Any]) -> None:
        names = names_in(code)
        for name in sorted(names):
            if name in given and name not in scope:
                scope[name] = convert(given[name], names)
        values = closed_over(function)
        for cell, name in zip(cells, code.co_freevars, strict=True):
            if name in values:
                cell.cell_contents = convert(values[name], names)

    return copy, fill


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
