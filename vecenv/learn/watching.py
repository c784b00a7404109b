"""Numbers, flags and functions that a loss reads beside its arguments, and whether they change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from inspect import getattr_static
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Watch"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Tensor)
_LAYERS, _BASE = "torch.nn.modules.", "torch.nn.modules.module"
_FOREIGN, _MOST = {"torch", "numpy", "gymnasium", "builtins"}, 1000  # items of a dict, list or set
_TABLES = "_modules", "_forward_hooks", "_forward_pre_hooks"  # of a module


class Watch:
    """What a loss and its module may read, apart from tensors; compiled code has it as it was.

    From loss and module it goes to closures, globals, attributes, methods and layers, by the names
    in the code that is found so. Not noticed are attributes that are found by other means (such as
    `getattr`), objects that no name leads to, and what lies in long lists, other collections than
    dicts, lists and sets, and objects of torch (but for layers), NumPy and Gymnasium.
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
        elif isinstance(value, dict | list | set):
            if len(value) <= _MOST:
                self._watch(value, "items", value.copy, label)
                items = value.items() if isinstance(value, dict) else enumerate(value)
                yield from ((f"{label}.{key}", x) for key, x in items)
        elif _is_watched(value) and isinstance(value, FunctionType):
            given, code = value.__globals__, value.__code__
            for name in _names_of(code):
                self._names.add(name)
                if name in given:
                    yield self._watch(given, name, partial(given.get, name), name)
            for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
                yield self._watch(cell, name, partial(getattr, cell, "cell_contents", None), name)
        elif _is_watched(value):
            yield from self._of_object(value, label)

    def _of_object(self, owner: Any, label: str) -> Iterator[tuple[str, Any]]:
        """Watch the attributes of an object, a class or a module of code that have known names."""
        if isinstance(owner, nn.Module):
            yield from ((label, getattr(owner, table)) for table in _TABLES)
        for name in [*self._names, *(["__init__"] if isinstance(owner, type) else [])]:
            found = getattr(owner, "__dict__", {}).get(name, getattr_static(owner, name, None))
            if isinstance(found, FunctionType | staticmethod | classmethod | property):
                yield name, getattr(found, "fget", getattr(found, "__func__", found))
            elif found is not None:
                read = partial(getattr, owner, name, None)
                yield self._watch(owner, name, read, f"{label}.{name}")


def _is_same(now: Any, before: Any) -> bool:
    """Whether a value is what it was: another object with its own attributes is not."""
    if now is before or type(now) is not type(before):
        return now is before
    if isinstance(now, dict):
        return [*now] == [*before] and all(map(_is_same, now.values(), before.values()))
    if isinstance(now, list):
        return len(now) == len(before) and all(map(_is_same, now, before))
    return isinstance(now, (*_PLAIN, set)) and not isinstance(now, Tensor) and now == before


def _is_watched(value: Any) -> bool:
    """Whether an object, function, class or module of code is the user's, or of a layer."""
    is_code = isinstance(value, type | FunctionType | ModuleType)
    holder: Any = value if is_code else type(value)
    name = str(getattr(holder, "__name__" if isinstance(value, ModuleType) else "__module__"))
    package, is_layer = name.partition(".")[0], name.startswith(_LAYERS) and name != _BASE
    return is_layer or not (package in _FOREIGN or (is_code and package in sys.stdlib_module_names))


def _names_of(code: CodeType) -> Iterator[str]:
    yield from (name for name in code.co_names if not name.startswith("__"))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_of(inner)
