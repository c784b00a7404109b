"""The options of a run: a dataclass as JSON that people read, and read back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, TypeVar

__all__ = ["load_options", "options_as_plain"]

T = TypeVar("T")

OPTIONS_FILE = "options.json"


def load_options(folder: str | Path, kind: type[T]) -> T:
    """Return the options that a run was begun with.

    Paths, tuples, enums and dataclasses in them come back as the fields' annotations say. Fields
    that the file lacks have their default; so a resumed run can begin with these as defaults of its
    command line: `tyro.cli(Options, default=load_options(folder, Options))`.

    Args:
        folder: The run's.
        kind: The dataclass.

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
    if dataclasses.is_dataclass(options) and not isinstance(options, type):
        options = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    if isinstance(options, Mapping):
        return {str(name): _plain(value, str(name)) for name, value in options.items()}
    raise TypeError(f"options is {type(options).__name__}, expected a dataclass or a dict")


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [_plain(item, where) for item in items]
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return options_as_plain(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # NumPy's and torch's numbers
        return value.item()
    raise TypeError(
        f"the option {where} is {type(value).__name__}, expected numbers, strings, bools, None, "
        "paths, enums, dataclasses, and lists, tuples and dicts of them"
    )


def _revived(value: Any, hint: Any) -> Any:
    """Return a value of JSON as its annotation says."""
    kind, made = typing.get_origin(hint) or hint, typing.cast("Any", hint)
    inner = typing.get_args(hint)
    is_record = dataclasses.is_dataclass(hint)
    if kind is typing.Annotated:
        return _revived(value, inner[0])
    if kind in (typing.Union, types.UnionType):
        found = []
        for one in inner:
            with contextlib.suppress(TypeError, ValueError, KeyError):
                found.append(_revived(value, one))
        if found:
            return next((item for item in found if type(item) is type(value)), found[0])
    if kind in (tuple, list, set, frozenset, dict) and isinstance(value, list | dict):
        return _revived_items(value, kind, inner)
    if is_record and isinstance(value, dict):
        hints = typing.get_type_hints(hint, include_extras=True)
        if unknown := sorted(set(value) - {field.name for field in dataclasses.fields(hint)}):
            raise KeyError(f"{made.__name__} has no {', '.join(unknown)}")
        return made(**{name: _revived(item, hints[name]) for name, item in value.items()})
    if isinstance(hint, type) and issubclass(hint, PurePath | Enum) and isinstance(value, str):
        return hint[value] if issubclass(hint, Enum) else hint(value)
    if kind is float and type(value) is int:
        return float(value)
    is_plain = is_record or kind in (bool, int, float, str, type(None))
    is_choice = kind in (typing.Literal, typing.Union, types.UnionType)
    if (is_plain and type(value) is not kind) or (is_choice and value not in inner):
        raise TypeError(f"{value!r:.99} is no {getattr(kind, '__name__', '')} {inner or ''}")
    return value


def _revived_items(value: Any, kind: Any, inner: tuple[Any, ...]) -> Any:
    if kind is dict:
        of_key, of_item = inner or (Any, Any)  # keys of JSON are strings
        keys = [of_key(key) if of_key in (int, float) else _revived(key, of_key) for key in value]
        return dict(zip(keys, [_revived(x, of_item) for x in value.values()], strict=True))
    is_record = kind is tuple and inner and inner[-1] is not Ellipsis
    hints = inner if is_record else (inner or (Any,))[:1] * len(value)
    return kind(_revived(item, hint) for item, hint in zip(value, hints, strict=True))
