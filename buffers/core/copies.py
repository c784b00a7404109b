"""Copies and pickles of buffers: made anew and filled, not taken over part by part.

A buffer looks at one piece of memory through arrays, tensors and views of both. Copied part by
part, every one of them would become memory of its own, and what is written through one would not be
seen through another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


__all__ = ["Rebuilt", "each_tensor", "fill_block"]

_names_by_maker: dict[type, frozenset[str]] = {}  # attributes that constructors make


class Rebuilt:
    """Lets `copy.deepcopy`, `copy.copy` and pickle make a whole, independent buffer.

    The new one is made by the constructor and then filled, so that all views of its memory are of
    the same memory again. It never shares memory with the old one; what `allocate` supplied there
    is private memory here. Attributes that users added are copied too.

    A class takes part by:

    - calling `self._remember(TheClass, size, *arguments)` as the last line of its constructor, with
      the arguments, also by name, that make an empty buffer of the same kind. The first is its
      size. Leave out `seed` (the generator is part of the state) and `allocate`.
    - `_copied_state()`: all that is held, as a dict of what pickles well: NumPy arrays, numbers,
      lists of them. Views of the buffer's memory will do.
    - `_take_copied_state(state)`: copies that into a buffer fresh from the constructor. Arrays may
      be read-only. Nothing need be checked.
    """

    _made_by: tuple[type, tuple[Any, ...], dict[str, Any]]

    def _remember(self, maker: type, *arguments: Any, **options: Any) -> None:
        # No `vars(self)` here: an object it was called on finds its attributes more slowly.
        self._made_by = maker, arguments, options

    def _copied_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _take_copied_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _check_copyable(self) -> None:
        """Raise if what the object holds is not copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_copyable()
        maker, arguments, options = self._made_by
        if maker not in _names_by_maker:
            small = rebuild(maker, maker, (1, *arguments[1:]), {**options, "device": "cpu"})
            _names_by_maker[maker] = frozenset(vars(small))
        added = {n: value for n, value in vars(self).items() if n not in _names_by_maker[maker]}
        return rebuild, (type(self), *self._made_by), (self._copied_state(), added)

    def __setstate__(self, parts: tuple[dict[str, Any], dict[str, Any]]) -> None:
        state, added = parts
        self._take_copied_state(state)
        for name, value in added.items():
            setattr(self, name, value)


def rebuild(
    cls: type[Any], maker: type[Any], arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """An object of a class, as the constructor of `maker`, one of its bases, leaves it."""
    made = object.__new__(cls)
    maker.__init__(made, *arguments, **options)
    return made


def fill_block(block: torch.Tensor, pages: np.ndarray) -> None:
    """Copy an array, read-only or not, into a tensor of the same shape on any device."""
    block.copy_(torch.from_numpy(pages if pages.flags.writeable else pages.copy()))


def each_tensor(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same nest of dicts, tuples and lists with what the function returns for each tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: each_tensor(item, function) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(each_tensor(item, function) for item in value)
    return value
