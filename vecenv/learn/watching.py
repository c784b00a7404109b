"""Numbers, flags and functions that a loss reads beside its arguments, and whether they change.

A compiled function has taken them in as they were. They are found by names: those in the code of
the loss, and of all functions, methods and layers that it can reach by such names.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Watch"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Tensor)
_CODE = (FunctionType, staticmethod, classmethod, property)
_FOREIGN = {"torch", "numpy", "gymnasium"}  # and of the standard library, code
_LAYERS, _BASE = "torch.nn.modules.", "torch.nn.modules.module"
_TABLES = "_modules", "_forward_hooks", "_forward_pre_hooks"  # of a module
_MOST = 1000  # items of a dict, list, set or deque
_READERS = {"__getitem__", "__getattr__"}  # which find attributes by other means than names


class Watch:
    """What a loss and its module may read, apart from tensors.

    Not noticed are attributes that are found by other means than their names, such as `getattr`
    (but all of objects, other than modules, with a `__getitem__` or `__getattr__` of their own are
    watched); those of objects that no name in the loss, its closure and globals, or the module
    leads to; and what lies in long lists and in objects of torch (other than layers), NumPy and
    Gymnasium.
    """

    def __init__(self, loss: Any, module: nn.Module) -> None:
        self._names = {"forward", "__call__", "training"}
        self._places: dict[tuple[int, str], tuple[str, Callable[[], Any], Any]] = {}
        size = -1
        while size != (size := len(self._names) + len(self._places)):  # with the names found so far
            self._seen: dict[int, Any] = {}  # by id, so that nothing is freed on the way
            queue = [("the loss", loss), ("module", module)]
            for label, value in queue:  # which grows meanwhile
                if not isinstance(value, _PLAIN) and id(value) not in self._seen:
                    self._seen[id(value)] = value
                    queue.extend(self._look_into(value, label))

    def changed(self) -> str:
        """Return the name of something that has changed since, or ""."""
        for label, read, before in self._places.values():
            now = read()
            if now is not before and not _is_same(now, before):
                return label
        return ""

    def _watch(self, holder: Any, key: str, read: Callable[[], Any], label: str) -> tuple[str, Any]:
        """Watch one place; return its name and what is there now."""
        value = read()
        if not isinstance(value, Tensor | ModuleType):
            self._places.setdefault((id(holder), key), (label, read, value))
        return label, value

    def _look_into(self, value: Any, label: str) -> Iterator[tuple[str, Any]]:
        """Watch what lies in a value; go through that, by name."""
        if isinstance(value, partial):
            yield from ((label, x) for x in (value.func, value.args, value.keywords))
        elif isinstance(value, MethodType):
            yield from ((label.rpartition(".")[0], x) for x in (value.__func__, value.__self__))
        elif isinstance(value, tuple):
            yield from ((label, x) for x in value)
        elif isinstance(value, dict | list | set | deque):
            if len(value) <= _MOST:
                self._watch(value, "items", value.copy, label)
                items = value.items() if isinstance(value, dict) else enumerate(value)
                yield from ((f"{label}.{key}", x) for key, x in items)
        elif isinstance(value, nn.Module) or _is_watched(value):
            is_code = isinstance(value, FunctionType)
            yield from self._of_function(value) if is_code else self._of_object(value, label)

    def _of_function(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        """Watch the globals that a function names, and the variables around it."""
        given, code = function.__globals__, function.__code__
        for name in _names_of(code):
            self._names.add(name)
            if name in given:
                yield self._watch(given, name, partial(given.get, name), name)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield self._watch(cell, name, partial(getattr, cell, "cell_contents", None), name)

    def _of_object(self, owner: Any, label: str) -> Iterator[tuple[str, Any]]:
        """Watch the attributes of an object, a class or a module of code that have known names."""
        is_class, own = isinstance(owner, type), getattr(owner, "__dict__", {})
        if isinstance(owner, nn.Module):
            yield from ((label, own[table]) for table in _TABLES if table in own)
        of_class: Any = owner if is_class else type(owner)
        kinds = [kind for kind in of_class.__mro__ if _is_watched(kind)]
        is_plain = is_class or isinstance(owner, nn.Module | ModuleType)
        if not is_plain and any(_READERS & vars(kind).keys() for kind in kinds):
            yield label, own
        for name in [*self._names, *(["__init__"] if is_class else [])]:
            found = next((vars(kind)[name] for kind in kinds if name in vars(kind)), None)
            if isinstance(found, _CODE) and (is_class or name not in own):
                yield name, getattr(found, "fget", getattr(found, "__func__", found))
            elif name in own or found is not None:
                read = partial(getattr, owner, name, None)
                yield self._watch(owner, name, read, f"{label}.{name}")


def _is_same(now: Any, before: Any) -> bool:
    """Whether a value is what it was: another object with its own attributes is not."""
    if now is before or type(now) is not type(before):
        return now is before
    if isinstance(now, dict):
        return [*now] == [*before] and all(map(_is_same, now.values(), before.values()))
    if isinstance(now, list | deque):
        return len(now) == len(before) and all(map(_is_same, now, before))
    return isinstance(now, (*_PLAIN, set)) and not isinstance(now, Tensor) and now == before


def _is_watched(value: Any) -> bool:
    """Whether a function, class or module of code is the user's, or of a layer.

    So is an object with attributes, also of a class of the standard library.
    """
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    name = name if name and isinstance(name, str) else "builtins"
    is_layer = name.startswith(_LAYERS) and name != _BASE
    is_code = isinstance(value, type | FunctionType | ModuleType) or not hasattr(value, "__dict__")
    package = name.partition(".")[0]
    return is_layer or not (package in _FOREIGN or (is_code and package in sys.stdlib_module_names))


def _names_of(code: CodeType) -> Iterator[str]:
    yield from (name for name in code.co_names if not name.startswith("__"))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_of(inner)
