"""Base class of the batches of all buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

import torch

__all__ = ["Batch", "each_tensor"]


class Batch:
    """Columns of tensors, one row per transition, step or sequence.

    Built-in columns are attributes, such as ``batch.obs``. Columns declared by `extra_columns` are
    in the dict ``batch.extras`` (``batch.extras["costs"]``), and are attributes too. Unpacking
    yields the built-in columns that every batch of the class has, in the order of the class: ``obs,
    actions, *_ = batch``. Other entries (`indices`, `weights`, `env_ids`, `extras`) are accessible
    by name only. ``len(batch)`` is the number of rows. A batch drawn with `columns=` has only these
    columns: access to others, and unpacking, raise AttributeError.

    Batches can be copied (`copy.copy`, `copy.deepcopy`) and pickled. A copy has tensors of its own,
    and the buffer does not accept it as `out`.
    """

    __slots__ = ()

    _fields: ClassVar[tuple[str, ...]]  # columns that unpacking yields, in order
    _others: ClassVar[tuple[str, ...]] = ()  # further columns; None if missing
    _counted: ClassVar[str] = "actions"  # column that every batch has, whatever was drawn

    actions: torch.Tensor
    extras: dict[str, torch.Tensor]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the built-in columns; unpacking uses this."""
        return iter([getattr(self, name) for name in self._fields])

    def __len__(self) -> int:
        """Number of rows."""
        return len(getattr(self, self._counted))

    def __getattr__(self, name: str) -> torch.Tensor:
        """Return an extra column."""
        if not name.startswith("_") and name not in self._names() and name in self.extras:
            return self.extras[name]
        extras = [] if name in self._names() else [*getattr(self, "extras", ())]
        raise AttributeError(
            f"a {type(self).__name__} has no {name!r}; its columns are some of "
            f"{', '.join((*self._fields, *self._others, *extras))}; if it was drawn with columns=, "
            "name it there"
        )

    def __repr__(self) -> str:
        """The number of rows, and names of columns."""
        return f"{type(self).__name__}({len(self)} rows of {', '.join(self._asdict())})"

    def _asdict(self) -> dict[str, Any]:
        """Built-in columns by name, without those that are None."""
        found = {name: getattr(self, name, None) for name in (*self._fields, *self._others)}
        return {name: column for name, column in found.items() if column is not None}

    def _replace(self, **columns: Any) -> Self:
        """Return a batch with some columns replaced; this batch is not changed."""
        unknown = set(columns) - {*self._fields, *self._others, "extras"}
        if unknown:
            raise ValueError(f"a {type(self).__name__} has no columns {sorted(unknown)}")
        return self._made_of({**self._contents(), **columns})

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        """Names of all attributes of the instance."""
        return cls.__slots__

    def _contents(self) -> dict[str, Any]:
        """Attributes of a copy: all but `memory`, which `out=` needs."""
        names = [name for name in self._names() if name != "memory" and hasattr(self, name)]
        return {name: getattr(self, name) for name in names}

    @classmethod
    def _made_of(cls, contents: Mapping[str, Any]) -> Self:
        made = cls.__new__(cls)
        if "memory" in cls._names():
            made.memory = None  # pyright: ignore[reportAttributeAccessIssue]
        for name, value in contents.items():
            setattr(made, name, value)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle clones of the tensors: a view would be pickled with its whole storage."""
        keep = torch.contiguous_format
        own = each_tensor(self._contents(), lambda t: t.detach().clone(memory_format=keep))
        return type(self)._made_of, (own,)


def each_tensor(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Map a function over the tensors in a nest of dicts, tuples and lists."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: each_tensor(item, function) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(each_tensor(item, function) for item in value)
    return value
