"""Info dicts as forms: which keys an env's info has, in which order, and how each value is built.

Two infos of the same form differ in numbers only, and in what is not built of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from vecenv.workers.layout import Leaf

__all__ = [
    "ANY",
    "DICT",
    "NUMBERS",
    "OBJECT",
    "OTHER",
    "Column",
    "Field",
    "FormKey",
    "Path",
    "Template",
    "compile_form",
    "form_of",
    "leaf_dtypes",
    "rebuild",
    "store",
    "template_of",
]

NUMERIC = "biufc"
Path = tuple[Any, ...]

# How a value is built: ("array", dtype, shape), ("scalar", dtype), ("python", dtype),
# ("dict", ((key, template), ...)) or ("tuple", (template, ...)).
Template = tuple[Any, ...]

# What becomes of a field when infos are batched: an array of numbers, an array of objects that are
# built of numbers, a dict of fields, or something that is not built of numbers.
NUMBERS, OBJECT, DICT, OTHER = "numbers", "object", "dict", "other"
ANY = "any"  # a field for which there is no room in shared memory, whatever it is

# The form of an info dict: per field the key, one of the words above, and the template, or the form
# of a dict. Hashable.
FormKey = tuple[tuple[Any, str, Any], ...]

_PYTHON_TYPES = {bool: "|b1", int: "<i8", float: "<f8"}
_TO_PYTHON = {dtype: kind for kind, dtype in _PYTHON_TYPES.items()}
_INT64 = range(-(2**63), 2**63)


def template_of(value: Any) -> Template | None:
    """Return how a value is built of numbers, None if it is not built of numbers alone."""
    kind = type(value)
    if kind is np.ndarray:
        is_plain = value.dtype.kind in NUMERIC and value.dtype.isnative and value.size
        return ("array", value.dtype.str, value.shape) if is_plain else None
    if kind in _PYTHON_TYPES:
        return ("python", _PYTHON_TYPES[kind]) if kind is not int or value in _INT64 else None
    if isinstance(value, np.generic):
        # Not the second of two types that have the same numbers, such as longlong.
        is_plain = value.dtype.kind in NUMERIC and np.dtype(value.dtype.str).type is kind
        return ("scalar", value.dtype.str) if is_plain else None
    if kind is dict:
        parts = tuple((key, template_of(part)) for key, part in value.items())
        return None if any(part is None for _, part in parts) else ("dict", parts)
    if kind is tuple:
        parts = tuple(template_of(part) for part in value)
        return None if None in parts else ("tuple", parts)
    return None


def form_of(info: Any) -> FormKey | None:
    """Return the form of an info dict.

    None for one with a key that begins with an underscore: it may be the mask of another key, which
    only `add_info` can sort out.
    """
    fields: list[tuple[Any, str, Any]] = []
    for key, value in info.items():
        if isinstance(key, str) and key[:1] == "_":
            return None
        if isinstance(value, dict) and key != "final_obs":
            inner = form_of(value)
            if inner is None:
                return None
            fields.append((key, DICT, inner))
            continue
        template = template_of(value)
        if template is None:
            fields.append((key, OTHER, None))
        elif key == "final_obs" or template[0] in ("dict", "tuple") or type(value) is np.bool_:
            fields.append((key, OBJECT, template))
        else:
            fields.append((key, NUMBERS, template))
    return tuple(fields)


def leaf_dtypes(template: Template) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Go through the dtypes and shapes of the numbers that a value is built of."""
    kind, about = template[:2]
    if kind in ("dict", "tuple"):
        for part in about:
            yield from leaf_dtypes(part[1] if kind == "dict" else part)
    else:
        yield about, template[2] if kind == "array" else ()


def store(value: Any, leaves: Iterator[np.ndarray], row: int) -> None:
    """Write a value into one row of the arrays of its leaves."""
    if type(value) is dict:
        for part in value.values():
            store(part, leaves, row)
    elif type(value) is tuple:
        for part in value:
            store(part, leaves, row)
    else:
        next(leaves)[row] = value


def rebuild(template: Template, leaves: Iterator[np.ndarray], row: int) -> Any:
    """Return the value in one row of the arrays of its leaves: copies."""
    kind, about = template[:2]
    if kind == "dict":
        return {key: rebuild(part, leaves, row) for key, part in about}
    if kind == "tuple":
        return tuple(rebuild(part, leaves, row) for part in about)
    found = next(leaves)[row]
    if kind == "array":
        return np.array(found)
    return _TO_PYTHON[about](found) if kind == "python" else found


class Column(NamedTuple):
    """A place in shared memory for an info field whose values are all built alike.

    Attributes:
        path: Keys that lead to it in the infos.
        kind: NUMBERS or OBJECT.
        template: How the values are built, see `template_of`.
        values: (num_envs, *shape) of each number or array of numbers in it.
    """

    path: Path
    kind: str
    template: Template
    values: tuple[Leaf, ...]


class Field(NamedTuple):
    """A field of a form, compiled.

    Attributes:
        key, mask_key: In the batched infos.
        kind: One of the words above.
        template: Of the value; the fields of a dict; the place in the message of what goes there.
        target: Where the values are.
    """

    key: Any
    mask_key: str
    kind: str
    template: Any
    target: Any


Target = Callable[[Path, str, Any], Any]


def compile_form(
    form: FormKey, target: Target, others: Iterator[int], path: Path = ()
) -> list[Field]:
    """Bind the fields of a form to where their values are; without a place they go by message."""
    fields = []
    for key, kind, template in form:
        place = None
        inner = (*path, key)
        if kind == DICT:
            template = compile_form(template, target, others, inner)
        elif kind != OTHER:
            place = target(inner, kind, template)
            if place is None:
                kind = ANY
        if kind in (OTHER, ANY):
            template = next(others)
        fields.append(Field(key, f"_{key}", kind, template, place))
    return fields
