"""Batches taken apart into tensors, and put together again inside a compiled function.

A batch is any nest of dicts, lists, tuples, named tuples, dataclasses and objects with `_asdict`,
such as the batches of `buffers`. Of objects only the attributes that the loss reads are taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "Layout",
    "Reads",
    "UnknownBatchError",
    "put_together",
    "read_as",
    "record_reads",
    "take_apart",
    "tensors_in",
    "weights_at",
]

Reads = dict[tuple[Any, ...], set[str]]  # path to an object in a batch -> attributes that were read

_PLAIN = (bool, int, float, str, type(None))


class UnknownBatchError(TypeError):
    """A batch holds something of which it is unknown where its tensors are."""


class Layout(NamedTuple):
    """How a part of a batch is nested; two batches with equal ones differ in tensors alone."""

    kind: str  # "tensor", "plain", "mapping", "sequence", "named tuple" or "object"
    value: Any = None  # of "plain" the value, else the type
    names: tuple[Any, ...] = ()  # keys or attributes
    parts: tuple[Layout, ...] = ()


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

    def __iter__(self) -> Any:
        return iter([getattr(self, name) for name in self._order])


class _Recorder:
    """Stands for an object of a batch, and notes which attributes are read."""

    def __init__(self, of: Any, reads: Reads, path: tuple[Any, ...]):
        self.__dict__["_recorded"] = of, reads, path

    def __getattr__(self, name: str) -> Any:
        of, reads, path = self.__dict__["_recorded"]
        value = getattr(of, name)
        if name.startswith("_") or callable(value):
            raise AttributeError(
                f"the loss reads {type(of).__name__}.{name}, expected columns of tensors only"
            )
        reads.setdefault(path, set()).add(name)
        return record_reads(value, reads, (*path, name))

    def __len__(self) -> int:
        return len(self.__dict__["_recorded"][0])

    def __iter__(self) -> Any:
        return iter([getattr(self, name) for name in _order_of(self.__dict__["_recorded"][0])])


def _is_object(batch: Any) -> bool:
    if isinstance(batch, type | tuple | Mapping | Tensor):
        return False
    return hasattr(batch, "_asdict") or dataclasses.is_dataclass(batch)


def _order_of(batch: Any) -> tuple[str, ...]:
    """Names in the order in which an object unpacks; empty if it does not."""
    return tuple(getattr(batch, "_fields", ())) if hasattr(batch, "__iter__") else ()


def record_reads(batch: Any, reads: Reads, path: tuple[Any, ...] = ()) -> Any:
    """The same batch, with stand-ins for its objects that note in `reads` what is read of them."""
    if _is_object(batch):
        reads.setdefault(path, set())
        return _Recorder(batch, reads, path)
    if isinstance(batch, Mapping):
        return {name: record_reads(part, reads, (*path, name)) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [record_reads(part, reads, (*path, k)) for k, part in enumerate(batch)]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, as far as it is known where they are."""
    if isinstance(batch, Tensor):
        return [batch]
    parts: Any = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, tuple | list):
        parts = batch
    elif hasattr(batch, "_asdict"):
        parts = batch._asdict().values()
    elif dataclasses.is_dataclass(batch):
        parts = [getattr(batch, field.name, None) for field in dataclasses.fields(batch)]
    return [tensor for part in parts for tensor in tensors_in(part)]


def take_apart(
    batch: Any, reads: Reads, leaves: list[Tensor], path: tuple[Any, ...] = ()
) -> Layout:
    """Append the tensors of a batch to `leaves`; return how they were nested.

    Raises:
        UnknownBatchError: The batch holds something else than tensors, numbers and nests.
    """
    if isinstance(batch, Tensor):
        leaves.append(batch)
        return _TENSOR
    if isinstance(batch, _PLAIN):
        return Layout("plain", batch)
    if isinstance(batch, Mapping):
        kind, of, names = "mapping", dict, tuple(batch)
        found = [(name, batch[name]) for name in names]
    elif isinstance(batch, tuple | list):
        kind, of = "named tuple" if hasattr(batch, "_fields") else "sequence", type(batch)
        names, found = (), list(enumerate(batch))
    elif path in reads:
        kind, of, names = "object", _order_of(batch), tuple(sorted(reads[path]))
        found = [(name, getattr(batch, name)) for name in names]
        size = len(batch) if hasattr(batch, "__len__") else 0
        names = (size, *names)
    else:
        where = "".join(f"[{name!r}]" for name in path)
        raise UnknownBatchError(
            f"batch{where} is a {type(batch).__name__}; expected tensors, numbers, and dicts, "
            "tuples, lists or dataclasses of them"
        )
    parts = tuple(take_apart(part, reads, leaves, (*path, name)) for name, part in found)
    return Layout(kind, of, names, parts)


_TENSOR = Layout("tensor")


def read_as(layout: Layout, batch: Any, leaves: list[Tensor]) -> bool:
    """Append the tensors of a batch to `leaves`; return whether it is nested as `layout` says.

    As `take_apart` and a comparison, in less time.

    Raises:
        AttributeError: An object lacks what was read of others.
    """
    kind, value, names, parts = layout
    if kind == "object":
        size, *names = names
        found = [getattr(batch, name) for name in names]
        is_same = _is_object(batch) and size == (len(batch) if hasattr(batch, "__len__") else 0)
        is_same = is_same and _order_of(batch) == value
    elif kind == "mapping":
        is_same = isinstance(batch, Mapping) and tuple(batch) == names
        found = [batch[name] for name in names] if is_same else []
    elif kind in {"sequence", "named tuple"}:
        is_same = type(batch) is value and len(batch) == len(parts)
        found = batch
    else:
        found, parts, is_same = [batch], [layout], True
    if not is_same:
        return False
    for part, x in zip(parts, found, strict=True):
        if part is _TENSOR:
            if not isinstance(x, Tensor):
                return False
            leaves.append(x)
        elif part.kind == "plain":
            if isinstance(x, Tensor) or not isinstance(x, _PLAIN) or x != part.value:
                return False
        elif not read_as(part, x, leaves):
            return False
    return True


def put_together(layout: Layout, leaves: list[Tensor], rows: int | None = None) -> Any:
    """A batch of the same nesting; objects become `Columns`.

    Args:
        layout: What `take_apart` returned.
        leaves: As many tensors as there; emptied.
        rows: Length of the objects, if it is another one now.
    """
    kind, value, names, parts = layout
    if kind == "tensor":
        return leaves.pop(0)
    if kind == "plain":
        return value
    found = [put_together(part, leaves, rows) for part in parts]
    if kind == "mapping":
        return dict(zip(names, found, strict=True))
    if kind == "named tuple":
        return value(*found)
    if kind == "sequence":
        return value(found)
    made = Columns()
    made._size, made._order = names[0] if rows is None else rows, value
    for name, part in zip(names[1:], found, strict=True):
        setattr(made, name, part)
    return made


def weights_at(layout: Layout, counted: int = 0) -> int | None:
    """Which of the tensors is ``batch.weights`` or ``batch["weights"]``, if there is one."""
    names = layout.names
    if layout.kind == "object":
        names = names[1:]
    elif layout.kind == "named tuple":
        names = layout.value._fields
    for name, part in zip(names, layout.parts, strict=False):
        if name == "weights" and part.kind == "tensor":
            return counted
        counted += count_tensors(part)
    return None


def count_tensors(layout: Layout) -> int:
    """Number of tensors in a nest."""
    if layout.kind == "tensor":
        return 1
    return sum(count_tensors(part) for part in layout.parts)
