"""Batches taken apart into tensors, and put together again inside a compiled function.

A batch is any nest of dicts, lists, tuples, named tuples, dataclasses and objects with `_asdict`,
such as the batches of `buffers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "Layout",
    "UnknownBatchError",
    "named_tensors",
    "num_rows",
    "put_together",
    "row_weights",
    "take_apart",
    "weights_at",
]

_PLAIN = (bool, int, float, str, type(None))


class UnknownBatchError(TypeError):
    """A batch holds an object whose tensors can't be found."""


class Layout(NamedTuple):
    """How a part of a batch is nested; two batches with equal layouts differ in tensors alone."""

    kind: str  # "tensor", "plain", "mapping", "sequence", "named tuple" or "object"
    value: Any = None  # of "plain" the value with its type, of "object" its length, else the type
    names: tuple[Any, ...] = ()  # keys or attributes
    order: tuple[str, ...] = ()  # attributes that unpacking an object gives
    parts: tuple[Layout, ...] = ()


_TENSOR = Layout("tensor")


class Columns:
    """Stands for an object of a batch: has its attributes, its length, and unpacks as it does.

    Attributes:
        _size: What `len` gives.
        _order: Names of the attributes that unpacking gives.
    """

    _size: int
    _order: tuple[str, ...]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self, name) for name in self._order])

    def __getattr__(self, name: str) -> Any:
        extras = vars(self).get("extras", {})
        if name in extras:
            return extras[name]
        raise AttributeError(f"the loss reads batch.{name}, expected columns of tensors only")


def _columns_of(batch: Any) -> dict[str, Any] | None:
    """The attributes of an object by name, or None if they can't be listed."""
    if isinstance(batch, type):
        return None
    if dataclasses.is_dataclass(batch):
        names = [field.name for field in dataclasses.fields(batch)]
        return {name: getattr(batch, name) for name in names if hasattr(batch, name)}
    return batch._asdict() if hasattr(batch, "_asdict") else None


def take_apart(batch: Any, leaves: list[Tensor], name: str = "batch") -> Layout:
    """Append the tensors of a batch to `leaves`; return how they were nested.

    Raises:
        UnknownBatchError: The batch holds something other than tensors, numbers and nests.
    """
    if isinstance(batch, Tensor):
        leaves.append(batch)
        return _TENSOR
    if isinstance(batch, _PLAIN):
        return Layout("plain", (type(batch), batch))
    if isinstance(batch, Mapping):
        parts = tuple(take_apart(part, leaves, f"{name}[{k!r}]") for k, part in batch.items())
        return Layout("mapping", dict, tuple(batch), (), parts)
    if isinstance(batch, tuple | list):
        parts = tuple(take_apart(part, leaves, f"{name}[{k}]") for k, part in enumerate(batch))
        kind = "named tuple" if hasattr(batch, "_fields") else "sequence"
        return Layout(kind, type(batch), (), (), parts)
    columns = _columns_of(batch)
    if columns is None:
        raise UnknownBatchError(
            f"{name} is a {type(batch).__name__}; expected tensors, numbers, and dicts, tuples, "
            "lists or dataclasses of them"
        )
    parts = tuple(take_apart(part, leaves, f"{name}.{k}") for k, part in columns.items())
    order = tuple(getattr(batch, "_fields", ())) if hasattr(batch, "__iter__") else ()
    size = len(batch) if hasattr(batch, "__len__") else 0
    return Layout("object", size, tuple(columns), order, parts)


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
    if kind == "named tuple":
        return value(*found)
    if kind == "sequence":
        return value(found)
    made = Columns()
    made._size, made._order = value if rows is None else rows, order
    vars(made).update(zip(names, found, strict=True))
    return made


def weights_at(layout: Layout) -> int | None:
    """Return which of the tensors is ``batch.weights`` or ``batch["weights"]``, if any."""
    names = layout.value._fields if layout.kind == "named tuple" else layout.names
    counted = 0
    for name, part in zip(names, layout.parts, strict=False):
        if name == "weights" and part.kind == "tensor":
            return counted
        counted += _count_tensors(part)
    return None


def _count_tensors(layout: Layout) -> int:
    return 1 if layout.kind == "tensor" else sum(map(_count_tensors, layout.parts))


def named_tensors(batch: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Go through the tensors of a batch with their names, as far as they can be found."""
    parts: Any = ()
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        parts = [(f"{name}[{key!r}]", part) for key, part in batch.items()]
    elif isinstance(batch, tuple | list) and not hasattr(batch, "_asdict"):
        parts = [(f"{name}[{key}]", part) for key, part in enumerate(batch)]
    elif (columns := _columns_of(batch)) is not None:
        parts = [(f"{name}.{key}", part) for key, part in columns.items()]
    for path, part in parts:
        yield from named_tensors(part, path)


def num_rows(batch: Any) -> int:
    """Return the length of the first tensor that has rows; 0 if there is none."""
    return next((len(x) for _, x in named_tensors(batch) if x.ndim), 0)


def row_weights(batch: Any) -> Tensor | None:
    """Return ``batch.weights`` or ``batch["weights"]``, by which rows count, if there is one."""
    weights = batch.get("weights") if isinstance(batch, Mapping) else None
    weights = getattr(batch, "weights", None) if weights is None else weights
    return weights if isinstance(weights, Tensor) else None
