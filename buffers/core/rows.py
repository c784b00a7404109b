"""How the fields of a transition are packed into one row of bytes, as arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import extra_leaves
from buffers.core.columns import torch_dtype
from buffers.core.spaces import Leaf, action_leaf, build_tree, space_leaves

__all__ = ["COLUMNS", "Field", "RecordLayout", "field_view", "plan_records"]

COLUMNS = ("obs", "next_obs", "actions", "rewards", "terminations", "truncations")

_LINE = 64
_GRAIN = 16  # of the stride: the largest item torch has
# Fields and attributes of batches, the field of the buffer's own, and what no method takes by name.
_BATCH_NAMES = ("indices", "discounts", "weights", "extras", "memory", "size")
_TAKEN = frozenset((*COLUMNS, "env_ids", *_BATCH_NAMES, "link", "self"))


class Field(NamedTuple):
    """One array of a transition, and where in the row it lies."""

    path: str  # "next_obs['camera']"
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in one row."""
        return math.prod(self.shape) * self.dtype.itemsize


class RecordLayout(NamedTuple):
    """A row: its fields, and how many bytes apart rows lie."""

    observation_space: Space
    fields: dict[str, Field]  # by path; "link" is for the buffer itself
    obs: list[str]  # paths of the leaves of obs, in the order of the space
    next_obs: list[str]  # those of next_obs; empty if observations are stored once
    extras: list[str]
    obs_bytes: int  # the leaves of an observation lie side by side
    stride: int

    def describe(self) -> list[list[Any]]:
        """Path, shape, dtype and offset of each field, as lists that survive JSON."""
        return [
            [path, list(field.shape), field.dtype.str, field.offset]
            for path, field in self.fields.items()
        ]

    def build_obs(self, leaves: list[Any]) -> Any:
        """Nest the leaves of an observation like the space."""
        return build_tree(self.observation_space, leaves)


class _Packer:
    """Lays blocks of fields side by side, each at a multiple of its largest item."""

    def __init__(self):
        self.fields: dict[str, Field] = {}
        self.end = 0

    def add(self, leaves: list[Leaf]) -> int:
        """Append leaves, largest items first, so that none needs padding; return their start."""
        largest = max((leaf.dtype.itemsize for leaf in leaves), default=1)
        self.end += -self.end % largest
        start = self.end
        for leaf in sorted(leaves, key=lambda leaf: -leaf.dtype.itemsize):
            self.fields[leaf.path] = Field(leaf.path, leaf.shape, leaf.dtype, self.end)
            self.end += self.fields[leaf.path].nbytes
        self.end += -self.end % largest  # the block may be copied as one, and put side by side
        return start


def plan_records(
    observation_space: Space,
    action_space: Space,
    extra_columns: Mapping[str, Space] | None,
    *,
    store_next: bool,
    is_linked: bool,
    has_env_ids: bool,
) -> RecordLayout:
    """Pack obs, next_obs (if stored), actions, extras, rewards, links, env ids and flags.

    What a walk over several steps reads (rewards, links, flags) lies together at the end. Rows are
    padded to whole cache lines where that costs an eighth at most.

    Raises:
        BufferMisuseError: A space that has no arrays of fixed size, or a name that is taken.
    """
    obs_leaves = space_leaves(observation_space, "obs")
    following = [_renamed(leaf) for leaf in obs_leaves] if store_next else []
    extras = extra_leaves(extra_columns, _TAKEN)
    packer = _Packer()
    start = packer.add(obs_leaves)
    obs_bytes = packer.end - start
    packer.add(following)
    for leaf in sorted([action_leaf(action_space), *extras], key=lambda f: -f.dtype.itemsize):
        packer.add([leaf])
    packer.add([Leaf("rewards", (), np.dtype(np.float32))])
    if is_linked:
        packer.add([Leaf("link", (), np.dtype(np.int32))])
    if has_env_ids:
        packer.add([Leaf("env_ids", (), np.dtype(np.int32))])
    for name in ("terminations", "truncations"):
        packer.add([Leaf(name, (), np.dtype(np.bool_))])
    return RecordLayout(
        observation_space,
        packer.fields,
        [leaf.path for leaf in obs_leaves],
        [leaf.path for leaf in following],
        [leaf.path for leaf in extras],
        obs_bytes,
        _stride(packer.end),
    )


def _renamed(leaf: Leaf) -> Leaf:
    return leaf._replace(path="next_" + leaf.path)


def _stride(size: int) -> int:
    """Distance of rows of `size` bytes.

    >>> _stride(430), _stride(70)
    (448, 80)
    """
    to_line = -size % _LINE
    return size + (to_line if to_line * 8 <= size else -size % _GRAIN)


def field_view(rows: torch.Tensor, field: Field) -> torch.Tensor:
    """A field of packed rows uint8 (K, stride), as a strided view (K, *shape) of its dtype."""
    piece = rows[:, field.offset : field.offset + field.nbytes].view(torch_dtype(field.dtype))
    return piece.unflatten(1, field.shape) if field.shape else piece[:, 0]
