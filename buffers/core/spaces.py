"""Nested observation spaces as a flat list of array leaves, and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces

from buffers.core.errors import BufferMisuseError

__all__ = [
    "Leaf", "action_leaf", "build_tree", "describe_space", "extra_leaves", "obs_leaves",
    "space_leaves", "space_of",
]  # fmt: skip

_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_MULTI = ("MultiDiscrete", "nvec", "start")
_ARRAY_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class Leaf(NamedTuple):
    """One array of a space: its path in the nest, and its shape and dtype for one environment."""

    path: str  # "obs['camera'][0]"
    shape: tuple[int, ...]
    dtype: np.dtype


def space_leaves(space: Space, name: str) -> list[Leaf]:
    """List the leaves of a space of fixed-size arrays, in the order of the space.

    Raises:
        BufferMisuseError: A leaf is no array of fixed size, or has a dtype that torch lacks.

    >>> space = spaces.Dict({"speed": spaces.Box(0, 1, (3,)), "gear": spaces.Discrete(5)})
    >>> [(leaf.path, leaf.shape, str(leaf.dtype)) for leaf in space_leaves(space, "obs")]
    [("obs['gear']", (), 'int64'), ("obs['speed']", (3,), 'float32')]
    """
    if isinstance(space, spaces.Dict):
        parts = [(child, f"{name}[{key!r}]") for key, child in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        parts = [(child, f"{name}[{index}]") for index, child in enumerate(space.spaces)]
    elif isinstance(space, _ARRAY_SPACES):
        dtype = np.dtype(space.dtype)
        try:
            torch.from_numpy(np.empty(0, dtype))
        except TypeError:
            raise BufferMisuseError(
                f"{name} has dtype {dtype}, which torch does not have; convert it with a wrapper "
                "first"
            ) from None
        return [Leaf(name, tuple(space.shape or ()), dtype)]
    else:
        raise BufferMisuseError(
            f"{name} is the space {space}, expected Box, Discrete, MultiDiscrete or MultiBinary, "
            "or Dict or Tuple of these; flatten or encode it with a wrapper first"
        )
    return [leaf for child, path in parts for leaf in space_leaves(child, path)]


def obs_leaves(space: Space) -> list[Leaf]:
    """List the leaves of an observation space, at least one; see `space_leaves`."""
    if leaves := space_leaves(space, "obs"):
        return leaves
    raise BufferMisuseError(f"observation_space {space} holds no array at all")


def action_leaf(space: Space) -> Leaf:
    """Return the single leaf of an action space.

    Raises:
        BufferMisuseError: It is not a Box, Discrete, MultiDiscrete or MultiBinary space.
    """
    if not isinstance(space, _ARRAY_SPACES):
        raise BufferMisuseError(
            f"action_space is {space}, expected Box, Discrete, MultiDiscrete or MultiBinary; "
            "flatten nested actions with a wrapper first"
        )
    return space_leaves(space, "actions")[0]


def extra_leaves(
    extra_columns: Mapping[str, Space] | None, taken: Set[str], what: str = "extra column"
) -> list[Leaf]:
    """List the extra columns, each a single array; `what` is their name in messages.

    Raises:
        BufferMisuseError: A name is taken or no identifier, or a space is no single array.
    """
    leaves = []
    for name, space in (extra_columns or {}).items():
        is_name = isinstance(name, str) and name not in taken and name.isidentifier()
        if not is_name or not isinstance(space, _ARRAY_SPACES):
            raise BufferMisuseError(
                f"{what} {name!r} has a name that is taken or is no identifier, or its space "
                f"{space} is no Box, Discrete, MultiDiscrete or MultiBinary; choose a name other "
                f"than {sorted(taken)}, and give one column for each array"
            )
        leaves += space_leaves(space, name)
    return leaves


def build_tree(space: Space, leaves: Iterable[Any]) -> Any:
    """Nest leaves, in the order of the space, in dicts and tuples like the space."""
    ordered = iter(leaves)
    if isinstance(space, spaces.Dict):
        return {key: build_tree(child, ordered) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(build_tree(child, ordered) for child in space.spaces)
    return next(ordered)


def describe_space(space: Space) -> list[Any]:
    """Describe a space of arrays by lists, strings, numbers and tensors: its kind and arguments.

    >>> describe_space(spaces.Discrete(3))
    ['Discrete', 3, 0, 'int64']
    """
    if isinstance(space, spaces.Dict):
        return ["Dict", [[key, describe_space(child)] for key, child in space.spaces.items()]]
    if isinstance(space, spaces.Tuple):
        return ["Tuple", [describe_space(child) for child in space.spaces]]
    if isinstance(space, spaces.MultiBinary):
        return ["MultiBinary", list(space.shape)]
    if isinstance(space, spaces.Discrete):
        return ["Discrete", int(space.n), int(space.start), str(np.dtype(space.dtype))]
    kind, *names = ("Box", "low", "high") if isinstance(space, spaces.Box) else _MULTI
    arrays = (torch.from_numpy(np.array(getattr(space, name))) for name in names)
    return [kind, *arrays, str(np.dtype(space.dtype))]


def space_of(described: Any) -> Space:
    """Make the space that `describe_space` described.

    Raises:
        ValueError, TypeError, and errors of the spaces: The description is wrong.
    """
    kind, first, *others = described
    if kind == "Dict":
        return spaces.Dict(OrderedDict((key, space_of(child)) for key, child in first))
    if kind == "Tuple":
        return spaces.Tuple([space_of(child) for child in first])
    if kind == "MultiBinary":
        return spaces.MultiBinary(first)
    second, dtype = others
    if kind == "Box":
        low, high = first.numpy(), second.numpy()
        return spaces.Box(low.copy(), high.copy(), dtype=low.dtype)
    if kind not in ("Discrete", "MultiDiscrete") or dtype not in _INTEGERS:
        raise ValueError(f"there is no {kind!r:.99} space of {dtype!r:.99}")
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(first.numpy(), dtype, start=second.numpy())
    other = {} if dtype == "int64" else {"dtype": dtype}  # Gymnasium 1.1 has only int64
    return spaces.Discrete(first, start=second, **other)
