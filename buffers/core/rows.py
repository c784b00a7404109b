"""Packed rows: the layout of the fields of one step in a row of bytes, and views of them.

A row holds all fields of a step, so that a draw costs one cache miss instead of one per field.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space

from buffers.core.memory import torch_dtype
from buffers.core.spaces import Leaf, build_tree

__all__ = [
    "Field", "FrameLayout", "RowLayout", "RowPacker", "row_stride", "row_views", "view_fields",
]  # fmt: skip

_LINE = 64


class Field(NamedTuple):
    """One array of a step, and its place in the row."""

    path: str  # "next_obs['camera']"
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # bytes from the start of the row

    @property
    def nbytes(self) -> int:
        """Bytes in one row."""
        return math.prod(self.shape) * self.dtype.itemsize


class FrameLayout(NamedTuple):
    """Layout of stacked observations whose frames are stored once.

    A row has only the newest frame of its observation.
    """

    num_frames: int  # F
    shape: tuple[int, ...]  # of a frame
    dtype: np.dtype
    stack_shape: tuple[int, ...]  # of an observation
    axis: int  # of the observation, along which the frames lie

    @property
    def nbytes(self) -> int:
        """Bytes of a frame."""
        return math.prod(self.shape) * self.dtype.itemsize

    def split(self, stacks: Any) -> Any:
        """View stacks (K, *stack_shape), arrays or tensors, as their frames (K, F, *shape)."""
        return _move_axis(stacks, self.axis + 1, 1)

    def join(self, stacks: Any) -> Any:
        """View frames (K, F, *shape) as stacks (K, *stack_shape)."""
        return _move_axis(stacks, 1, self.axis + 1)

    def first_break(self, obs: np.ndarray, next_obs: np.ndarray) -> int | None:
        """The first row of split stacks whose next_obs is not obs shifted by one frame, or None."""
        before, after = (
            np.ascontiguousarray(x).reshape(len(x), self.num_frames, self.nbytes // x.itemsize)
            for x in (obs, next_obs)
        )  # bytes are compared
        is_off = (before.view(np.uint8)[:, 1:] != after.view(np.uint8)[:, :-1]).any((1, 2))
        return int(np.argmax(is_off)) if is_off.any() else None


def _move_axis(values: Any, source: int, target: int) -> Any:
    move: Any = torch.movedim if isinstance(values, torch.Tensor) else np.moveaxis
    return move(values, source, target)


class RowLayout(NamedTuple):
    """A row: its fields, and the distance of rows in bytes."""

    observation_space: Space
    fields: dict[str, Field]  # by path
    obs: list[str]  # paths of the leaves of obs, in the order of the space
    next_obs: list[str]  # paths of the leaves of next_obs; empty if observations are stored once
    extras: list[str]
    obs_at: int  # first byte of the observation, whose leaves are adjacent
    obs_bytes: int
    stride: int
    frames: FrameLayout | None = None  # if frames are stored once; then obs is the newest one

    @property
    def num_words(self) -> int:
        """Words (8 bytes) per row."""
        return self.stride // 8

    def describe(self) -> dict[str, str]:
        """Describe each field, by path; valid in JSON."""
        fields = self.fields.values()
        return {path: f"{dtype} {shape} at byte {at}" for path, shape, dtype, at in fields}

    def build_obs(self, leaves: list[Any]) -> Any:
        """Nest the leaves of an observation like the space."""
        return build_tree(self.observation_space, leaves)


class RowPacker:
    """Lays out blocks of fields one after the other.

    Attributes:
        fields: Fields so far, by path.
        end: The byte after the last field.
    """

    def __init__(self):
        self.fields: dict[str, Field] = {}
        self.end = 0

    def align(self, grain: int) -> int:
        """Pad `end` to a multiple of `grain` bytes, and return it."""
        self.end += -self.end % grain
        return self.end

    def add(self, leaves: Iterable[Leaf], grain: int | None = None) -> int:
        """Append fields in this order, each aligned to its item size; return the first byte.

        Start and end of the block are multiples of `grain`; None takes the largest item size.
        """
        leaves = list(leaves)
        if grain is None:
            grain = max((leaf.dtype.itemsize for leaf in leaves), default=1)
        start = self.align(grain)
        for path, shape, dtype in leaves:
            self.fields[path] = Field(path, shape, dtype, self.align(dtype.itemsize))
            self.end += self.fields[path].nbytes
        self.align(grain)
        return start


def row_stride(size: int, grain: int) -> int:
    """Distance of rows of `size` bytes: whole cache lines if padding is at most an eighth.

    Rows that begin at a cache line are read a third faster.
    """
    to_line = -size % _LINE
    return size + (to_line if to_line * 8 <= size else -size % grain)


def view_fields(rows: torch.Tensor, fields: Mapping[str, Field]) -> dict[str, torch.Tensor]:
    """Views (*K, *shape) of the fields of rows uint8 (*K, stride), by path."""
    found, (*lead, _) = {}, rows.shape
    for path, (_, shape, dtype, offset) in fields.items():
        typed, size = rows.view(torch_dtype(dtype)), dtype.itemsize
        inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        strides = (*typed.stride()[:-1], *inner)
        begin: Any = typed.storage_offset()
        found[path] = typed.as_strided((*lead, *shape), strides, begin + offset // size)
    return found


def row_views(words: np.ndarray, fields: Mapping[str, Field]) -> dict[str, np.ndarray]:
    """Views (K, *shape) of the fields of rows int64 (K, words), by path."""
    pages, views = words.view(np.uint8), {}
    for path, field in fields.items():
        view = pages[:, field.offset : field.offset + field.nbytes].view(field.dtype)
        views[path] = view.reshape(len(words), *field.shape)
    return views
