"""What an episodic buffer consists of, as arithmetic: fields packed into rows, sizes, bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space

from buffers.core.arguments import check_count, extra_leaves
from buffers.core.columns import ColumnSpec, spec_bytes
from buffers.core.errors import BufferMisuseError
from buffers.core.spaces import Leaf, action_leaf, space_leaves

__all__ = [
    "HEADER_WORDS",
    "EpisodicLayout",
    "RowField",
    "RowLayout",
    "pack_rows",
    "plan_episodic",
    "row_views",
]

HEADER_WORDS = 2  # room, step, remaining, bound: int32 each
_HEADER = ("room", "step", "remaining", "bound")
_FLAGS = ("terminations", "truncations", "boundaries")
_RESERVED = frozenset(
    ("obs", "next_obs", "actions", "rewards", "env_ids", "self", *_FLAGS, *_HEADER)
)
# Fields of the batches besides, and attributes every tuple has.
_BATCH_NAMES = frozenset(
    ("future_obs", "offsets", "goal_obs", "goal_offsets", "relabelled", "mask", "steps", "bounds",
     "extras", "memory", "count", "index")
)  # fmt: skip
_WORD_BYTES, _LINE_BYTES = 8, 64
_MAX_ROWS = 2**31 - 1  # rows are listed as int32
_FEW_EPISODES = 4096
_EPISODE_WORDS = 4  # first row, length, first start, number of starts

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_BOOL, _FLOAT32 = np.dtype(np.bool_), np.dtype(np.float32)


class RowField(NamedTuple):
    """One field of a row; `path` says where it comes from, as in "obs['camera']"."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # bytes from the start of the row

    @property
    def nbytes(self) -> int:
        """Bytes of the field in one row."""
        return math.prod(self.shape) * self.dtype.itemsize


class RowLayout(NamedTuple):
    """How the fields of one step lie in a row.

    One row holds everything that is known of a step, so that drawing it costs one miss of the cache
    instead of one per field. First the header, then the observation, then the rest.

    Attributes:
        fields: All fields by path.
        obs_leaves: Of the observation space.
        action: Of the action space.
        extra: Fields the user added.
        obs_stop: Word after the observation, which begins at HEADER_WORDS.
        num_words: Words (8 bytes) per row.
    """

    fields: dict[str, RowField]
    obs_leaves: list[Leaf]
    action: Leaf
    extra: list[Leaf]
    obs_stop: int
    num_words: int

    @property
    def obs_words(self) -> int:
        """Words of the observation."""
        return self.obs_stop - HEADER_WORDS


def pack_rows(
    observation_space: Space,
    action_space: Space,
    extra_columns: Mapping[str, Space] | None,
    taken: frozenset[str] = frozenset(),
) -> RowLayout:
    """Lay out a row.

    Args:
        observation_space: See the buffers, like the next two.
        action_space: See above.
        extra_columns: See above.
        taken: Names, besides those of the fields, that no extra column may have.

    Raises:
        BufferMisuseError: A space without arrays of fixed size, or a bad name of an extra column.
    """
    obs_leaves = space_leaves(observation_space, "obs")
    if not obs_leaves:
        raise BufferMisuseError(f"observation_space {observation_space} holds no array at all")
    action = action_leaf(action_space)
    extra = extra_leaves(extra_columns, _RESERVED | taken)
    header = [Leaf(name, (), _INT32) for name in _HEADER]
    flags = [Leaf(name, (), _BOOL) for name in _FLAGS]
    fields: dict[str, RowField] = {}
    used = _place(fields, [*header, *obs_leaves], 0)
    obs_stop = -(-used // _WORD_BYTES)
    others = [action, Leaf("rewards", (), _FLOAT32), *extra, *flags]
    used = _place(fields, others, obs_stop * _WORD_BYTES)
    # Rows that begin at a cache line are read a third faster; not worth it if much is wasted.
    lines = -(-used // _LINE_BYTES) * _LINE_BYTES
    padded = lines if 8 * lines <= 9 * used else -(-used // _WORD_BYTES) * _WORD_BYTES
    num_words = padded // _WORD_BYTES
    return RowLayout(fields, obs_leaves, action, extra, obs_stop, num_words)


def _place(fields: dict[str, RowField], leaves: list[Leaf], offset: int) -> int:
    """Enter fields one after the other from a byte on, aligned; return the byte after the last."""
    for leaf in leaves:
        offset = -(-offset // leaf.dtype.itemsize) * leaf.dtype.itemsize
        fields[leaf.path] = RowField(*leaf, offset)
        offset += fields[leaf.path].nbytes
    return offset


def row_views(
    words: np.ndarray, fields: Mapping[str, RowField], skip: int = 0
) -> dict[str, np.ndarray]:
    """Arrays (K, *shape) over the fields of rows.

    Args:
        words: int64 (K, num_words), C-contiguous; the caller's.
        fields: What to view.
        skip: Words at the start of a row that are not there.
    """
    pages, views = words.view(np.uint8), {}
    for path, field in fields.items():
        begin = field.offset - skip * _WORD_BYTES
        view = pages[:, begin : begin + field.nbytes].view(field.dtype)
        views[path] = view.reshape(len(words), *field.shape)
        assert view.size == 0 or np.may_share_memory(view, views[path])
    return views


class EpisodicLayout(NamedTuple):
    """Sizes of an episodic buffer; nothing is allocated yet."""

    capacity: int
    max_episodes: int
    row: RowLayout

    @property
    def num_rows(self) -> int:
        """Rows of the ring: one per step, and one per episode for its last observation."""
        return self.capacity + self.max_episodes

    @property
    def columns(self) -> list[ColumnSpec]:
        """What is allocated for the episodes."""
        return [
            ColumnSpec("rows", (self.num_rows, self.row.num_words), _INT64, "device"),
            ColumnSpec("starts", (self.capacity,), _INT32, "both"),
            ColumnSpec("episodes", (self.max_episodes, _EPISODE_WORDS), _INT64, "both"),
            ColumnSpec("drawable", (self.max_episodes,), _INT32, "both"),
            ColumnSpec("counters", (9,), _INT64, "both"),
        ]

    def nbytes(self, staged: bool) -> int:
        """Bytes of all columns on host and device together."""
        return sum(spec_bytes(self.columns, staged))

    @property
    def bytes_per_step(self) -> int:
        """Bytes that one more step of capacity costs, for advice."""
        return self.nbytes(False) // self.capacity + 1


def plan_episodic(
    capacity: Any,
    observation_space: Space,
    action_space: Space,
    max_episodes: Any = None,
    extra_columns: Mapping[str, Space] | None = None,
) -> EpisodicLayout:
    """Plan an episodic buffer.

    Raises:
        BufferMisuseError: A size that is no positive integer, or a space that does not fit.
    """
    capacity = check_count("capacity", capacity)
    if max_episodes is None:
        max_episodes = min(capacity, max(_FEW_EPISODES, capacity // 8))
    max_episodes = min(check_count("max_episodes", max_episodes), capacity)
    if capacity + max_episodes > _MAX_ROWS:
        raise BufferMisuseError(
            f"capacity {capacity} with {max_episodes} episodes needs more rows than {_MAX_ROWS}; "
            "make it smaller"
        )
    row = pack_rows(observation_space, action_space, extra_columns, _BATCH_NAMES)
    return EpisodicLayout(capacity, max_episodes, row)
