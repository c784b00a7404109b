"""Numbers, flags and functions that a loss reads beside its arguments, and whether they change.

A compiled function has taken them in as they were. They are found by names: those in the code of
the loss, and of all functions, methods and layers that it can reach by such names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from operator import getitem, is_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vecenv.learn.private_torch import MODULE_TABLES

__all__ = ["Watch"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CODE = (FunctionType, staticmethod, classmethod, property)
_FOREIGN = {"torch", "numpy", "gymnasium", *sys.stdlib_module_names}
_LAYERS, _BASE = "torch.nn.modules.", "torch.nn.modules.module"
_MOST = 1000  # items of a dict or list
_GONE = object()


class Watch:
    """What a loss and its module may read, apart from tensors.

    Not noticed are attributes that are found by other means than their names, such as `getattr`,
    those of objects that no name in the loss, its closure and globals, or the module leads to, and
    what lies in objects of torch (other than layers), NumPy and Gymnasium.
    """

    def __init__(self, loss: Any, module: nn.Module) -> None:
        self._names = {"forward", "__call__", "training"}
        self._places: dict[tuple[int, Any], tuple[Callable[..., Any], Any, Any, str]] = {}
        size = -1
        while size != (size := len(self._names) + len(self._places)):  # with the names found so far
            self._seen: dict[int, Any] = {}  # by id, so that nothing is freed on the way
            self._queue: list[tuple[Any, str]] = [(loss, "the loss"), (module, "module")]
            for value, label in self._queue:  # which grows meanwhile
                self._visit(value, label)
        self._gets = [(get, holder, key) for get, holder, key, _ in self._places.values()]
        self._values = [_value_of(*place) for place in self._gets]

    def changed(self) -> str:
        """Return the name of something that has changed since, or ""."""
        try:
            now = [get(holder, key) for get, holder, key in self._gets]
            if all(map(is_, now, self._values)):
                return ""
        except (LookupError, AttributeError, ValueError):  # something is gone
            now = [_value_of(*place) for place in self._gets]
        for value, before, (*_, label) in zip(
            now, self._values, self._places.values(), strict=True
        ):
            is_plain = isinstance(value, _PLAIN) and type(value) is type(before)
            if value is not before and not (is_plain and (value == before or value != value)):
                return label
        return ""

    def _note(self, get: Callable[..., Any], holder: Any, key: Any, label: str) -> None:
        """Watch one place, and what is there now."""
        value = _value_of(get, holder, key)
        if value is not _GONE and not isinstance(value, Tensor | ModuleType):
            self._places.setdefault((id(holder), key), (get, holder, key, label))
        self._queue.append((value, label))

    def _visit(self, value: Any, label: str) -> None:
        """Watch what lies in a value."""
        if isinstance(value, (*_PLAIN, Tensor)) or value is _GONE or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, partial | MethodType | tuple):
            inner: Any = value
            if isinstance(value, partial):
                inner = value.func, *value.args, value.keywords
            elif isinstance(value, MethodType):
                inner, label = (value.__func__, value.__self__), label.rpartition(".")[0]
            self._queue.extend((part, label) for part in inner)
        elif isinstance(value, dict | list):
            self._visit_items(value, label, label + "[{!r}]")
        elif isinstance(value, nn.Module) or _is_watched(value):
            if isinstance(value, FunctionType):
                self._visit_function(value)
            else:
                self._visit_attributes(value, label)

    def _visit_items(self, items: Any, label: str, item_label: str) -> None:
        self._note(lambda x, _: len(x), items, "len", label)
        for key in islice(items if isinstance(items, dict) else range(len(items)), _MOST):
            self._note(getitem, items, key, item_label.format(key))

    def _visit_function(self, function: FunctionType) -> None:
        """Watch the globals that a function names, and the variables around it."""
        for name in _names_of(function.__code__):
            self._names.add(name)
            self._note(getitem, function.__globals__, name, name)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._note(getattr, cell, "cell_contents", name)

    def _visit_attributes(self, owner: Any, label: str) -> None:
        """Watch the attributes of an object, a class or a module of code that have known names."""
        is_class, own = isinstance(owner, type), getattr(owner, "__dict__", {})
        if isinstance(owner, nn.Module):
            for table in MODULE_TABLES:
                self._visit_items(own[table], label, label + ".{}")
        of_class: Any = owner if is_class else type(owner)
        kinds = [k for k in of_class.__mro__ if _is_watched(k)]
        for name in [*self._names, *(["__init__"] if is_class else [])]:
            found = next((vars(kind)[name] for kind in kinds if name in vars(kind)), _GONE)
            found = own[name] if name in own and not is_class else found
            if isinstance(found, _CODE) and (is_class or name not in own):
                code = getattr(found, "fget", getattr(found, "__func__", found))
                self._queue.append((code, name))
            elif found is not _GONE:
                self._note(getattr, owner, name, f"{label}.{name}")


def _is_watched(value: Any) -> bool:
    """Whether a function, class, object or module of code is the user's, or of a layer."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    name = name if name and isinstance(name, str) else "builtins"
    is_layer = name.startswith(_LAYERS) and name != _BASE
    return is_layer or name.partition(".")[0] not in _FOREIGN


def _names_of(code: CodeType) -> Iterator[str]:
    yield from (name for name in code.co_names if not name.startswith("__"))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_of(inner)


def _value_of(get: Callable[..., Any], holder: Any, key: Any) -> Any:
    try:
        return get(holder, key)
    except (LookupError, AttributeError, ValueError):
        return _GONE
