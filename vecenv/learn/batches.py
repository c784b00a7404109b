"""Batches as named tensors, and put together again inside a compiled function.

A batch is any nest of dicts, lists, tuples, named tuples, dataclasses and objects with `_asdict`,
such as the batches of `buffers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["exchange", "num_rows", "row_weights", "take_apart"]

PLAIN = (bool, int, float, str, type(None))


class Columns:
    """Stands for an object of a batch: has its attributes, its rows, and unpacks as it does."""

    def __init__(self, columns: dict[str, Any], fields: tuple[str, ...]) -> None:
        vars(self).update(columns, _columns=columns, _fields=fields)

    def _asdict(self) -> dict[str, Any]:
        return self._columns

    def __len__(self) -> int:
        return num_rows(take_apart(self)[1])

    def __iter__(self) -> Iterator[Any]:
        return (self._columns[name] for name in self._fields)

    def __getattr__(self, name: str) -> Any:
        extras = vars(self).get("extras", {})
        if name in extras:
            return extras[name]
        raise AttributeError(f"the loss reads batch.{name}, expected columns of tensors only")


def exchange(batch: Any, leaf: Callable[[str, Any], Any], name: str = "batch") -> Any:
    """Return a batch of what `leaf(name, value)` makes of each tensor, number, and other object."""
    if isinstance(batch, (Tensor, *PLAIN)):
        return leaf(name, batch)
    if isinstance(batch, Mapping):
        return {key: exchange(x, leaf, f"{name}[{key!r}]") for key, x in batch.items()}
    if dataclasses.is_dataclass(batch):
        fields = [field.name for field in dataclasses.fields(batch)]
        columns = {field: getattr(batch, field) for field in fields if hasattr(batch, field)}
    elif hasattr(batch, "_asdict"):
        columns = batch._asdict()
    elif isinstance(batch, tuple | list):
        return type(batch)(exchange(x, leaf, f"{name}[{k}]") for k, x in enumerate(batch))
    else:
        return leaf(name, batch)
    found = {key: exchange(x, leaf, f"{name}.{key}") for key, x in columns.items()}
    if isinstance(batch, tuple):
        return type(batch)(**found)
    return Columns(found, tuple(getattr(batch, "_fields", ())))


def take_apart(batch: Any) -> tuple[Any, dict[str, Tensor], dict[str, Any]]:
    """Return a batch without its tensors, these by name, and by name what else is in it.

    Of objects that are neither tensors nor plain values there is the type only.
    """
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}

    def leaf(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors[name] = value
            return None
        others[name] = type(value), value if isinstance(value, PLAIN) else None
        return value

    return exchange(batch, leaf), tensors, others


def num_rows(leaves: Mapping[str, Tensor]) -> int:
    """Return the length of the first tensor that has rows; 0 if there is none."""
    return next((len(leaf) for leaf in leaves.values() if leaf.ndim), 0)


def row_weights(leaves: Mapping[str, Tensor]) -> str | None:
    """Return the name of the tensor by which rows count, if there is one."""
    return next((name for name in ("batch.weights", "batch['weights']") if name in leaves), None)
