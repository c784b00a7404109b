"""Rows of batches of any space: share out, select, merge, compare, say why one is outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

__all__ = [
    "ARRAY_SPACES",
    "by_space",
    "chunk_bounds",
    "is_same",
    "join_rows",
    "leaf_by_leaf",
    "leaves",
    "merge_rows",
    "short",
    "stack_rows",
    "take_range",
    "take_row",
    "take_rows",
    "why_outside",
]

ARRAY_SPACES = (Box, Discrete, MultiDiscrete, MultiBinary)


def chunk_bounds(num_envs: int, num_chunks: int) -> list[int]:
    """Cut envs into contiguous chunks whose sizes differ by at most one, larger ones first.

    Returns:
        num_chunks + 1 bounds; chunk c holds the envs bounds[c], ..., bounds[c + 1] - 1.

    Example:
        >>> chunk_bounds(7, 3)
        [0, 3, 5, 7]
    """
    size, longer = divmod(num_envs, num_chunks)
    return [size * chunk + min(chunk, longer) for chunk in range(num_chunks + 1)]


def leaf_by_leaf(function: Callable[[Any], Any], batch: Any) -> Any:
    """Return what a function makes of each array of a batch, nested as the batch is."""
    if isinstance(batch, dict):
        return {key: leaf_by_leaf(function, part) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(leaf_by_leaf(function, part) for part in batch)
    return function(batch)


def by_space(function: Callable[..., Any], space: Space, *batches: Any) -> Any:
    """Return what a function makes of each leaf of a space and what the batches have there."""
    if isinstance(space, Dict):
        parts = space.items()
        return {k: by_space(function, part, *(b[k] for b in batches)) for k, part in parts}
    if isinstance(space, Tuple):
        parts = enumerate(space)
        return tuple(by_space(function, part, *(b[k] for b in batches)) for k, part in parts)
    return function(space, *batches)


def leaves(batch: Any, space: Space) -> list[Any]:
    """Return the arrays of a batch in the order of the space's parts."""
    found: list[Any] = []
    by_space(lambda _, part: found.append(part), space, batch)
    return found


def take_row(single_space: Space, batch: Any, index: int) -> Any:
    """Return what env `index` has in a batch; arrays are views."""
    return by_space(lambda _, rows: rows[index], single_space, batch)


def take_range(single_space: Space, batch: Any, first: int, last: int) -> Any:
    """Return the rows first, ..., last - 1 of a batch; arrays are views."""
    return by_space(lambda _, rows: rows[first:last], single_space, batch)


def take_rows(single_space: Space, batch: Any, indices: Sequence[int]) -> Any:
    """Return a batch of these rows, in this order; an index may come twice."""

    def take(space: Space, rows: Any) -> Any:
        if isinstance(space, ARRAY_SPACES):
            return np.asarray(rows)[np.asarray(indices, dtype=np.int64)]
        return tuple(rows[index] for index in indices)

    return by_space(take, single_space, batch)


def join_rows(single_space: Space, rows: list[tuple[Any, int]]) -> Any:
    """Return a batch of rows that are in several batches, each given as (batch, index)."""
    return stack_rows(single_space, [take_row(single_space, batch, k) for batch, k in rows])


def stack_rows(single_space: Space, rows: Sequence[Any]) -> Any:
    """Return a batch of elements of the space of one env."""

    def stack(space: Space, *found: Any) -> Any:
        if isinstance(space, ARRAY_SPACES):
            return np.stack(found).astype(space.dtype, copy=False)  # stack has native order
        return found

    return by_space(stack, single_space, *rows)


def merge_rows(single_space: Space, batch: Any, other: Any, use_other: np.ndarray) -> Any:
    """Return `batch` with the rows where `use_other`, bool (num_envs,), is True from `other`."""

    def merge(space: Space, rows: Any, others: Any) -> Any:
        if isinstance(space, ARRAY_SPACES):
            merged = np.array(rows)
            merged[use_other] = np.asarray(others)[use_other]
            return merged
        return tuple(o if use else b for b, o, use in zip(rows, others, use_other, strict=True))

    return by_space(merge, single_space, batch, other)


def is_same(a: Any, b: Any) -> bool:
    """Whether two nested values are equal in types, dtypes, shapes and values (NaN equals NaN)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype == object:
            return all(map(is_same, a.flat, b.flat))
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    if type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):
        return is_same(vars(a), vars(b))  # a custom space may have samples that compare by identity
    return bool(a == b) or bool(a != a and b != b)


def why_outside(space: Space, value: Any, name: str) -> str | None:
    """Say what keeps `value` from being in `space`; None if nothing does.

    Args:
        space: Batched space, or that of one env.
        value: What should be an element of it, with exactly its dtype.
        name: How to call the value; the parts of nested values add theirs.
    """
    if isinstance(space, Dict):
        if not isinstance(value, dict) or value.keys() != space.spaces.keys():
            came = list(value) if isinstance(value, dict) else type(value).__name__
            return f"{name} is {came}, expected a dict with the keys {list(space.spaces)}"
        parts = [(space[key], value[key], f"{name}[{key!r}]") for key in space]
    elif isinstance(space, Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            came = f"{type(value).__name__} {short(value)}"
            return f"{name} is a {came}, expected a tuple of {len(space.spaces)}"
        parts = [(part, value[k], f"{name}[{k}]") for k, part in enumerate(space.spaces)]
    elif isinstance(space, ARRAY_SPACES) and not isinstance(space, Discrete):
        return _why_array_outside(space, value, name)
    elif space.contains(value):
        return None
    else:
        return f"{name} is {short(value)}, which is not in {short(space)}"
    reasons = (why_outside(*part) for part in parts)
    return next((reason for reason in reasons if reason is not None), None)


def _why_array_outside(space: Space, value: Any, name: str) -> str | None:
    assert space.dtype is not None
    if isinstance(value, np.generic) and value.dtype == space.dtype.newbyteorder("="):
        value = np.asarray(value, space.dtype)  # of a space without dimensions, in native order
    if not isinstance(value, np.ndarray):
        return f"{name} is a {type(value).__name__}, expected an array of {short(space)}"
    if value.shape != space.shape or value.dtype != space.dtype:
        return (
            f"{name} has shape {value.shape} and dtype {value.dtype}, "
            f"expected shape {space.shape} and dtype {space.dtype}"
        )
    if space.contains(value):
        return None
    if isinstance(space, Box):
        is_outside = ~((value >= space.low) & (value <= space.high))  # NaN is outside too
        if is_outside.any():
            place = tuple(int(k) for k in np.argwhere(is_outside)[0])
            limits = f"[{space.low[place]}, {space.high[place]}]"
            index = ", ".join(map(str, place))
            return f"{name}[{index}] is {value[place]}, outside {limits}"
    return f"{name} is {short(value)}, which is not in {short(space)}"


def short(value: Any, most: int = 100) -> str:
    """Return a representation of at most so many characters, on one line."""
    text = " ".join(repr(value.item() if isinstance(value, np.generic) else value).split())
    return text if len(text) <= most else text[: most - 3] + "..."
