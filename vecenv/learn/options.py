"""The options of a run: a dataclass as JSON that people read, and read back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import typing
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, TypeVar

__all__ = ["load_options", "options_as_plain"]

T = TypeVar("T")

OPTIONS_FILE = "options.json"


def load_options(folder: str | Path, kind: type[T]) -> T:
    """Return the options that the run in a folder was begun with, `kind` being their dataclass.

    Paths, tuples, enums and dataclasses in them come back as the fields' annotations say. Fields
    that the file lacks have their default; so a resumed run can begin with these as defaults of its
    command line: `tyro.cli(Options, default=load_options(folder, Options))`.

    Raises:
        ValueError: The file holds something else than these options; the sentence names it.
        OSError: It can't be read.
    """
    path = Path(folder) / OPTIONS_FILE
    try:
        return _revived(json.loads(path.read_text(encoding="utf-8")), kind)
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} does not hold options of {kind.__name__} ({error!s:.200}); take the program "
            "that wrote it, or another folder"
        ) from error


def options_as_plain(options: Any) -> dict[str, Any]:
    """Return options, a dataclass or a dict, as what JSON has.

    Raises:
        TypeError: A field is something else than numbers, strings, bools, None, paths, enums,
            dataclasses, and lists, tuples and dicts of them.
    """
    is_record = dataclasses.is_dataclass(options) and not isinstance(options, type)
    if not is_record and not isinstance(options, dict):
        raise TypeError(f"options is {type(options).__name__}, expected a dataclass or a dict")
    return json.loads(json.dumps(options, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum | PurePath):
        return value.name if isinstance(value, Enum) else str(value)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(
        f"an option is {type(value).__name__}, expected numbers, strings, bools, None, paths, "
        "enums, dataclasses, and lists, tuples and dicts of them"
    )


def _revived(value: Any, hint: Any) -> Any:
    """Return a value of JSON as its annotation says."""
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        for one in sorted(inner, key=lambda one: type(value) is not one):  # a str may be a Path
            with contextlib.suppress(TypeError, ValueError, KeyError):
                return _revived(value, one)
    elif dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints, made = typing.get_type_hints(kind), typing.cast("Any", kind)
        if unknown := sorted(set(value) - {field.name for field in dataclasses.fields(kind)}):
            raise KeyError(f"{made.__name__} has no {', '.join(unknown)}")
        return made(**{name: _revived(item, hints[name]) for name, item in value.items()})
    elif kind in (list, tuple) and isinstance(value, list):
        is_record = kind is tuple and inner and inner[-1] is not Ellipsis
        hints = inner if is_record else (inner or (Any,))[:1] * len(value)
        return kind(_revived(item, one) for item, one in zip(value, hints, strict=True))
    elif kind is dict and isinstance(value, dict):
        return {key: _revived(item, (inner or (Any, Any))[1]) for key, item in value.items()}
    elif isinstance(kind, type) and issubclass(kind, PurePath | Enum) and isinstance(value, str):
        return kind[value] if issubclass(kind, Enum) and value in kind.__members__ else kind(value)
    elif kind is float and type(value) is int:
        return float(value)
    is_choice = kind is typing.Literal and value in inner
    if is_choice or kind is Any or (isinstance(kind, type) and isinstance(value, kind)):
        return value
    raise TypeError(f"{value!r:.99} is no {getattr(hint, '__name__', hint)}")
