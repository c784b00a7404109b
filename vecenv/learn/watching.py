"""Numbers, flags and functions that a loss reads beside its arguments, and whether they change.

A compiled function has taken them in as they were. They are found by names: those in the code of
the loss, and of all functions, methods and layers that it can reach by such names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from operator import is_
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vecenv.learn.private_torch import MODULE_TABLES

__all__ = ["Watch"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_FOREIGN = {"torch", "numpy", "gymnasium", *sys.stdlib_module_names}
_LAYERS, _BASE = "torch.nn.modules.", "torch.nn.modules.module"
_MOST = 10_000  # places
_GONE = object()


class Watch:
    """What a loss and its module may read, apart from tensors.

    Not noticed are attributes that are found by other means than their names, such as `getattr`,
    those of objects that no name in the loss, its closure and globals, or the module leads to, and
    what lies in objects of torch (other than layers), NumPy and Gymnasium.
    """

    def __init__(self, loss: Any, module: nn.Module) -> None:
        self._places: dict[tuple[int, Any], tuple[Callable[..., Any], Any, str]] = {}
        self._names = {"forward", "__init__", "__call__", "training"}
        self._seen: dict[int, Any] = {}  # by id, so that nothing is freed on the way
        self._owners: list[tuple[Any, str]] = []
        self._visit(loss, "the loss")
        self._visit(module, "module")
        before = -1
        while before != (before := len(self._names) + len(self._seen) + len(self._places)):
            for owner, label in list(self._owners):  # more names have been found meanwhile
                self._visit_attributes(owner, label)
        self._gets = [(get, key) for get, key, _ in self._places.values()]
        self._labels = [label for *_, label in self._places.values()]
        self._values = self._read()
        del self._seen, self._owners, self._names

    def _read(self) -> list[Any]:
        return [get(key, _GONE) for get, key in self._gets]

    def changed(self) -> str:
        """Return the name of something that has changed since, or ""."""
        now = self._read()
        if all(map(is_, now, self._values)):
            return ""
        for label, value, before in zip(self._labels, now, self._values, strict=True):
            is_equal = value is before
            if not is_equal and isinstance(value, _PLAIN) and type(value) is type(before):
                is_equal = value == before or value != value
            if not is_equal:
                return label
        return ""

    def _note(self, holder: Any, get: Callable[..., Any], key: Any, label: str) -> None:
        """Watch one place, and what is there now."""
        value = get(key, _GONE)
        if not isinstance(value, Tensor | ModuleType) and len(self._places) < _MOST:
            self._places.setdefault((id(holder), key), (get, key, label))
            self._seen[id(holder)] = holder
        self._visit(value, label)

    def _visit(self, value: Any, label: str) -> None:
        """Watch what lies in a value."""
        if isinstance(value, (*_PLAIN, Tensor)) or value is _GONE or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, partial):
            self._visit(value.func, label)
            self._visit((value.args, value.keywords), label)
        elif isinstance(value, MethodType):
            self._visit(value.__func__, label)
            self._visit(value.__self__, label.rpartition(".")[0])
        elif isinstance(value, FunctionType):
            if _is_watched(value):
                self._visit_function(value)
        elif isinstance(value, dict | list):
            self._note(value, lambda *_: len(value), "len", label)
            keys = list(value) if isinstance(value, dict) else range(len(value))
            get = value.get if isinstance(value, dict) else partial(_item, value)
            for key in keys:
                self._note(value, get, key, f"{label}[{key!r}]")
        elif isinstance(value, tuple):
            for number, item in enumerate(value):
                self._visit(item, f"{label}[{number}]")
        elif isinstance(value, nn.Module) or _is_watched(value):
            self._owners.append((value, label))

    def _visit_function(self, function: FunctionType) -> None:
        """Watch the globals that a function names, and the variables around it."""
        for name in _names_of(function.__code__):
            if not name.startswith("__"):
                self._names.add(name)
            if name in function.__globals__:
                self._note(function.__globals__, function.__globals__.get, name, name)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._note(cell, partial(_content, cell), None, name)

    def _visit_attributes(self, owner: Any, label: str) -> None:
        """Watch the attributes of an object, a class or a module of code that have known names."""
        own = getattr(owner, "__dict__", {})
        if isinstance(owner, nn.Module):
            for table in MODULE_TABLES:
                for name in own.get(table, ()):
                    self._note(own[table], own[table].get, name, f"{label}.{name}")
                self._note(own, own.get, table, f"{label}.{table}")
        is_class = isinstance(owner, type)
        kinds = [kind for kind in (owner if is_class else type(owner)).__mro__ if _is_watched(kind)]
        is_module = isinstance(owner, nn.Module) or (is_class and issubclass(owner, nn.Module))
        for name in self._names - {"__init__"} if is_module else set(self._names):
            if name in own and not is_class:
                self._note(own, own.get, name, f"{label}.{name}")
            kind = next((kind for kind in kinds if name in vars(kind)), None)
            if kind is None:
                continue
            found = vars(kind)[name]
            if isinstance(found, MemberDescriptorType):  # one of __slots__
                self._note(owner, partial(getattr, owner), name, f"{label}.{name}")
            elif isinstance(found, (*_PLAIN, dict, list, tuple)):
                self._note(kind, vars(kind).get, name, f"{label}.{name}")
                if not is_class:  # the object may get one that hides it
                    self._note(own, own.get, name, f"{label}.{name}")
            else:
                self._visit(getattr(found, "fget", getattr(found, "__func__", found)), name)


def _is_watched(value: Any) -> bool:
    """Whether a function, class, object or module of code is the user's, or of a layer."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    name = name if isinstance(name, str) else ""
    is_layer = name.startswith(_LAYERS) and name != _BASE
    return is_layer or name.partition(".")[0] not in _FOREIGN


def _names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_of(inner)


def _content(cell: CellType, _: None, default: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return default


def _item(items: list[Any], index: int, default: Any) -> Any:
    return items[index] if index < len(items) else default
