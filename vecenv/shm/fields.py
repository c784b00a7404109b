"""Batched infos as a sequence of fields, and values of fixed shape inside object arrays.

The order of the fields is that in which `vecenv.infos.add_info` entered them, which is the order of
the keys that users see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = [
    "FlatInfos",
    "Path",
    "Template",
    "enter",
    "fields",
    "is_numeric",
    "leaf_dtypes",
    "merge_infos",
    "rebuild",
    "store",
    "template_of",
]

NUMERIC = "biufc"
Path = tuple[str, ...]
# Fields in order: value (empty for a dict, whose fields follow) and mask.
FlatInfos = dict[Path, tuple[Any, np.ndarray]]

# How a value is built: ("array", dtype, shape), ("scalar", dtype), ("python", dtype),
# ("dict", ((key, template), ...)) or ("tuple", (template, ...)).
Template = tuple[Any, ...]

_PYTHON_TYPES = {bool: "|b1", int: "<i8", float: "<f8"}
_TO_PYTHON = {dtype: kind for kind, dtype in _PYTHON_TYPES.items()}
_INT64 = range(-(2**63), 2**63)


def fields(infos: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any, np.ndarray]]:
    """Go through batched infos: the path of keys, the value, and the mask bool (rows,).

    A dict comes before its own fields.
    """
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        if mask is not None:
            yield (*path, key), value, mask
            if isinstance(value, dict):
                yield from fields(value, (*path, key))


def is_numeric(value: Any) -> bool:
    """Whether the value of a field is an array of numbers."""
    return isinstance(value, np.ndarray) and value.dtype.kind in NUMERIC


def template_of(value: Any) -> Template | None:
    """Return how a value is built of numbers, None if it is not built of numbers alone."""
    kind = type(value)
    if kind is np.ndarray:
        is_plain = value.dtype.kind in NUMERIC and value.dtype.isnative
        return ("array", value.dtype.str, value.shape) if is_plain else None
    if kind in _PYTHON_TYPES:
        return ("python", _PYTHON_TYPES[kind]) if kind is not int or value in _INT64 else None
    if isinstance(value, np.generic):
        return ("scalar", value.dtype.str) if value.dtype.kind in NUMERIC else None
    if kind is dict:
        parts = tuple((key, template_of(part)) for key, part in value.items())
        return None if any(part is None for _, part in parts) else ("dict", parts)
    if kind is tuple:
        parts = tuple(template_of(part) for part in value)
        return None if None in parts else ("tuple", parts)
    return None


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


def enter(
    infos: dict[str, Any], path: Path, value: Any, mask: np.ndarray, rows: Any, num_rows: int
) -> None:
    """Enter a field of some rows into batched infos, in place, as `add_info` would env by env.

    Args:
        infos: Batched infos with num_rows rows.
        path: Where the field is; the dicts around it have been entered before.
        value: A dict for a dict; else an array (B, ...), 0 or None where mask is False.
        mask: bool (B,).
        rows: Slice or int64 (B,): which rows of `infos` these are.
        num_rows: Rows of every array.
    """
    for key in path[:-1]:
        infos = infos[key]
    key = path[-1]
    if isinstance(value, dict):
        infos.setdefault(key, {})
    else:
        array = infos.get(key)
        if array is None and len(value) == num_rows:
            infos[key] = value.copy()
        else:
            if array is None:
                fill = None if value.dtype == object else 0
                array = infos[key] = np.full((num_rows, *value.shape[1:]), fill, dtype=value.dtype)
            _assign(array, np.arange(num_rows)[rows][mask], value[mask])
    present = infos.get(f"_{key}")
    if present is None:
        present = infos[f"_{key}"] = np.zeros(num_rows, np.bool_)
    present[rows] |= mask


def _assign(array: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
    if array.dtype == object:  # one by one: NumPy would take arrays apart
        for row, value in zip(rows.tolist(), values, strict=True):
            array[row] = value
    else:
        array[rows] = values


def merge_infos(infos: dict[str, Any], part: dict[str, Any], rows: Any, num_rows: int) -> None:
    """Enter batched infos of some rows into those of all, in place.

    Args:
        infos: Batched infos with num_rows rows.
        part: Batched infos of B of these rows; only read.
        rows: Slice or int64 (B,): which rows these are.
        num_rows: Rows of `infos`.
    """
    for path, value, mask in fields(part):
        enter(infos, path, value, mask, rows, num_rows)
