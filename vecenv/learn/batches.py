"""Batches taken apart into named tensors, and put together again inside a compiled function.

A batch is any nest of dicts, lists, tuples, named tuples, dataclasses and objects with `_asdict`,
such as the batches of `buffers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Layout", "num_rows", "put_together", "row_weights", "take_apart"]

_PLAIN = (bool, int, float, str, type(None))


class Layout(NamedTuple):
    """How a part of a batch is nested; batches with equal layouts differ in their tensors alone."""

    kind: str  # "tensor", "plain", "mapping", "sequence", "named tuple", "object" or "unknown"
    value: Any = None  # of "plain" type and value, of "object" its length, else the type or name
    names: tuple[Any, ...] = ()  # keys or attributes
    order: tuple[str, ...] = ()  # attributes that unpacking an object gives
    parts: tuple[Layout, ...] = ()

    def unknown(self) -> str:
        """Name a part whose tensors can't be found, and its type; "" if there is none."""
        if self.kind == "unknown":
            return self.value
        return next(filter(None, (part.unknown() for part in self.parts)), "")


_TENSOR = Layout("tensor")


def take_apart(batch: Any, leaves: dict[str, Tensor], name: str = "batch") -> Layout:
    """Add the tensors of a batch to `leaves` by their names; return how they were nested."""
    if isinstance(batch, Tensor):
        leaves[name] = batch
        return _TENSOR
    if isinstance(batch, _PLAIN):
        return Layout("plain", (type(batch), batch))
    kind, order, columns = "sequence", (), None
    if isinstance(batch, Mapping):
        parts = tuple(take_apart(part, leaves, f"{name}[{k!r}]") for k, part in batch.items())
        return Layout("mapping", dict, tuple(batch), (), parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch)]
        columns = {field: getattr(batch, field) for field in fields if hasattr(batch, field)}
    elif hasattr(batch, "_asdict") and not isinstance(batch, type):
        columns = batch._asdict()
    if columns is not None:
        kind = "named tuple" if isinstance(batch, tuple) else "object"
        order = tuple(getattr(batch, "_fields", ())) if hasattr(batch, "__iter__") else ()
        parts = tuple(take_apart(part, leaves, f"{name}.{k}") for k, part in columns.items())
        size: Any = batch
        size = len(size) if hasattr(size, "__len__") else 0
        value = type(batch) if kind == "named tuple" else size
        return Layout(kind, value, tuple(columns), order, parts)
    if isinstance(batch, tuple | list):
        parts = tuple(take_apart(part, leaves, f"{name}[{k}]") for k, part in enumerate(batch))
        return Layout(kind, type(batch), (), (), parts)
    return Layout("unknown", f"{name} is a {type(batch).__name__}")


class Columns:
    """Stands for an object of a batch: has its attributes, its length, and unpacks as it does."""

    def __init__(self, columns: Mapping[str, Any], order: tuple[str, ...], rows: int) -> None:
        vars(self).update(columns, _order=order, _rows=rows)

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self, name) for name in self._order])

    def __getattr__(self, name: str) -> Any:
        extras = vars(self).get("extras", {})
        if name in extras:
            return extras[name]
        raise AttributeError(f"the loss reads batch.{name}, expected columns of tensors only")


def put_together(layout: Layout, leaves: Iterator[Tensor], rows: int | None = None) -> Any:
    """Build a batch of the same nesting from as many tensors; objects become `Columns`.

    Args:
        layout: What `take_apart` returned.
        leaves: The tensors, in the order in which `take_apart` found them.
        rows: Length of the objects, if it differs from that in `layout`.
    """
    kind, value, names, order, parts = layout
    if kind == "tensor":
        return next(leaves)
    if kind == "plain":
        return value[1]
    found = [put_together(part, leaves, rows) for part in parts]
    if kind == "mapping":
        return dict(zip(names, found, strict=True))
    if kind == "object":
        length = value if rows is None else rows
        return Columns(dict(zip(names, found, strict=True)), order, length)
    return value(*found) if kind == "named tuple" else value(found)


def num_rows(leaves: Mapping[str, Tensor]) -> int:
    """Return the length of the first tensor that has rows; 0 if there is none."""
    return next((len(leaf) for leaf in leaves.values() if leaf.ndim), 0)


def row_weights(leaves: Mapping[str, Tensor]) -> str | None:
    """Return the name of the tensor by which rows count, if there is one."""
    return next((name for name in ("batch.weights", "batch['weights']") if name in leaves), None)
