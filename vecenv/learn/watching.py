"""Numbers, flags and functions that code reads beside its arguments, and whether they change.

A compiled function has taken them in as they were. They are found while the code runs: each
function that is entered shows by the names in it which globals, and which attributes of the
objects it was given, it can read.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from operator import is_
from pathlib import Path
from types import CellType, FrameType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Watch"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LAYERS = str(Path(torch.nn.__file__).parent / "modules")  # of torch's code the only one watched
_OWN = [str(Path(__file__).with_name(f"{name}.py")) for name in ("compiled", "batches", "watching")]
_FOREIGN = (
    "<frozen",
    str(Path(torch.__file__).parent),
    str(Path(np.__file__).parent),
    *_OWN,
)
_STDLIB, _INSTALLED = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
_MOST = 10_000  # places, and entries of one container
_GONE = object()


@cache
def _is_watched(file: str, is_called: bool = True) -> bool:
    """Whether code of a file is the user's, or that of a layer; `is_called` by such code."""
    if file.startswith(_LAYERS):
        return True
    is_installed = file.startswith(_INSTALLED)
    if not is_called and (is_installed or file.startswith("<")):
        return False
    return not ((file.startswith(_STDLIB) and not is_installed) or file.startswith(_FOREIGN))


class Watch:
    """What code has read, noted inside of ``with watch.running():``.

    Not noticed are variables of enclosing functions, other than the loss's own, that get another
    value, and what lies in objects without attributes, such as arrays.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, Any], tuple[Any, Any, str]] = {}
        self._seen: set[tuple[int, int]] = set()
        self._kept: list[Any] = []  # whose ids are in `_seen`
        self._frames: set[int] = set()  # that run and are watched
        self._sizes: list[Any] = []
        self._entries: list[tuple[dict[Any, Any], Any]] = []
        self._others: list[tuple[Any, Any]] = []
        self._values: list[Any] = []
        self._names: list[str] = []

    @contextmanager
    def running(self, function: Callable[..., Any]) -> Iterator[None]:
        """Note what is read inside by `function`, which is called there, and by all it calls."""
        previous = sys.getprofile()
        self._note_function(function, getattr(function, "__name__", "the loss"))
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(previous if callable(previous) else None)

    def settle(self) -> None:
        """Take the values to compare with, once all has run."""
        places = self._places.values()
        self._sizes = [holder for holder, key, _ in places if key is len]
        entries = [p for p in places if isinstance(p[0], dict) and p[1] is not len]
        others = [p for p in places if not isinstance(p[0], dict) and p[1] is not len]
        self._entries = [(holder, key) for holder, key, _ in entries]
        self._others = [(holder, key) for holder, key, _ in others]
        sized = [label for _, key, label in places if key is len]
        self._names = [*sized, *[label for *_, label in (*entries, *others)]]
        self._values = self._read_all()
        self._seen, self._kept, self._frames = set(), [], set()

    def _read_all(self) -> list[Any]:
        return [
            *map(len, self._sizes),
            *[holder.get(key, _GONE) for holder, key in self._entries],
            *[_read(holder, key) for holder, key in self._others],
        ]

    def changed(self) -> str:
        """Return the name of something that has changed since, or ""."""
        now = self._read_all()
        if all(map(is_, now, self._values)):
            return ""
        for name, value, before in zip(self._names, now, self._values, strict=True):
            if value is before:
                continue
            is_plain = isinstance(value, _PLAIN) and type(value) is type(before)
            if not (is_plain and (value == before or value != value)):
                return name
        return ""

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "return":
            self._frames.discard(id(frame))
        if event != "call":
            return
        code, caller = frame.f_code, frame.f_back
        is_called = id(caller) in self._frames or (caller and caller.f_code.co_filename in _OWN)
        # What torch calls are hooks and such of the user, or parts of libraries that torch uses.
        if not _is_watched(code.co_filename, is_called) or code.co_name == "<module>":
            return
        self._frames.add(id(frame))
        names = code.co_names
        for name, value in frame.f_locals.items():
            if not isinstance(value, dict | list | tuple):  # made for the call, or found by name
                self._visit(value, name, names)
        if (id(code), 0) not in self._seen:
            self._seen.add((id(code), 0))
            self._kept.append(code)
            for name in names:
                if name in frame.f_globals:
                    self._note(frame.f_globals, name, name, names)

    def _note(self, holder: Any, key: Any, label: str, names: tuple[str, ...]) -> None:
        """Watch one entry of a dict or list, one attribute, or the content of a cell."""
        value = _read(holder, key)
        is_module = isinstance(value, ModuleType) and not _is_watched(
            getattr(value, "__file__", None) or "<"
        )
        if is_module or isinstance(value, Tensor) or len(self._places) >= _MOST:
            return
        self._places[id(holder), key] = holder, key, label
        self._kept.append(holder)
        self._visit(value, label, names)

    def _visit(self, value: Any, label: str, names: tuple[str, ...]) -> None:
        """Watch what lies in an object, as far as names tell of it."""
        if isinstance(value, (*_PLAIN, Tensor, type)):
            return
        mark = id(value), id(names)
        if mark in self._seen:
            return
        self._seen.add(mark)
        self._kept += value, names
        if isinstance(value, dict | list):
            self._places[id(value), len] = value, len, label
            keys = list(value) if isinstance(value, dict) else range(len(value))
            for key in keys[:_MOST]:
                self._note(value, key, f"{label}[{key!r}]", names)
        elif isinstance(value, tuple):
            for part in value:
                self._visit(part, label, names)
        elif isinstance(value, FunctionType | MethodType | partial):
            self._note_function(value, label)
        else:
            self._note_attributes(value, label, names)

    def _note_attributes(self, owner: Any, label: str, names: tuple[str, ...]) -> None:
        attributes = getattr(owner, "__dict__", {})
        for name in names:
            path = f"{label}.{name}"
            if name in attributes:
                self._note(attributes, name, path, names)
                continue
            kind = next((one for one in type(owner).__mro__ if name in vars(one)), None)
            if kind is None:
                continue
            if isinstance(vars(kind)[name], MemberDescriptorType):  # one of __slots__
                self._note(owner, name, path, names)
            elif isinstance(vars(kind)[name], (*_PLAIN, dict, list, tuple)):
                self._note(kind, name, path, names)
                self._note(attributes, name, path, names)  # which may hide that of the class

    def _note_function(self, function: Any, label: str) -> None:
        """Watch what a function has beside its arguments."""
        if isinstance(function, partial):
            for name in function.keywords:
                self._note(function.keywords, name, f"{label}'s {name}", ())
            return self._note_function(function.func, label)
        function = getattr(function, "__func__", function)
        if not isinstance(function, FunctionType):
            return None
        if not _is_watched(function.__code__.co_filename):
            return None
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._note(cell, None, name, function.__code__.co_names)
        return None


def _read(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(key, _GONE)
    try:
        if isinstance(holder, list):
            return holder[key]
        return holder.cell_contents if isinstance(holder, CellType) else getattr(holder, key, _GONE)
    except (IndexError, ValueError):  # ValueError: an empty cell
        return _GONE
