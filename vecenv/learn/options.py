"""The options of a run: a dataclass as JSON that people read, and read back."""

from __future__ import annotations

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
        fields = json.loads(path.read_text(encoding="utf-8"))
        return _revived(fields, kind)
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
        names = [field.name for field in dataclasses.fields(options)]
        return {name: _plain(getattr(options, name), name) for name in names}
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
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _revived(value, inner[0])
    if origin in (typing.Union, types.UnionType):
        return _of_union(value, inner)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(value, hint)
    if isinstance(hint, type) and issubclass(hint, PurePath) and isinstance(value, str):
        return hint(value)
    if isinstance(hint, type) and issubclass(hint, Enum) and isinstance(value, str):
        return hint[value]
    kind = origin or hint
    if kind in (tuple, list, set, frozenset) and isinstance(value, list):
        return kind(_items(value, kind, inner))
    if kind is dict and isinstance(value, dict):
        key_hint, item_hint = inner or (Any, Any)
        return {_key(k, key_hint): _revived(item, item_hint) for k, item in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if hint in (bool, int, float, str, type(None)) and type(value) is not _type_of(hint):
        raise TypeError(f"{value!r:.99} is no {_type_of(hint).__name__}")
    if origin is typing.Literal and value not in inner:
        raise ValueError(f"{value!r:.99} is none of {inner}")
    return value


def _type_of(hint: Any) -> type:
    return type(None) if hint is None else hint


def _key(name: str, hint: Any) -> Any:
    return hint(name) if hint in (int, float) else _revived(name, hint)  # keys of JSON are strings


def _items(values: list[Any], kind: type, inner: tuple[Any, ...]) -> list[Any]:
    if not inner:
        return values
    if kind is not tuple or (len(inner) == 2 and inner[1] is Ellipsis):
        return [_revived(value, inner[0]) for value in values]
    return [_revived(value, hint) for value, hint in zip(values, inner, strict=True)]


def _of_union(value: Any, kinds: tuple[Any, ...]) -> Any:
    """Return a value as the first kind that it can be; those that leave it as it is come first."""
    revived = []
    for kind in kinds:
        try:
            revived.append(_revived(value, kind))
        except (TypeError, ValueError, KeyError):
            continue
    if not revived:
        raise TypeError(f"{value!r:.99} is none of {kinds}")
    other = [item for item in revived if type(item) is not type(value)]
    if isinstance(value, str) and str in kinds:
        return value
    return other[0] if other and isinstance(value, str | list | dict) else revived[0]


def _dataclass(value: Any, kind: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.99} is no {kind.__name__}")
    hints = typing.get_type_hints(kind, include_extras=True)
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    if unknown := sorted(set(value) - names):
        raise KeyError(f"{kind.__name__} has no {', '.join(unknown)}")
    return kind(**{name: _revived(item, hints[name]) for name, item in value.items()})
