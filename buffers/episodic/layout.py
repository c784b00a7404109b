"""What an episodic buffer consists of, as arithmetic: packed rows, tables, bytes.

The tables, all of them rings:

- rows int64 (R, W): one per step, one more per episode for its last observation. The first two
  words are four int32: room (how far the bound is), step, remaining (steps to the end of the
  episode, this one included), bound (step + room).
- episodes int64 (M, 4): first row, length, first entry in `starts`, number of entries.
- starts int32 (C,): rows of the steps with room, episode after episode.
- drawable int32 (M,): slots of the episodes that have such steps.
- counters int64 (9,): first and number of each of them, by the names below; the first episode is
  counted on for ever, and its slot is that number modulo M.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space

from buffers.core.arguments import check_count
from buffers.core.columns import ColumnSpec, spec_bytes
from buffers.core.errors import BufferMisuseError
from buffers.core.rows import RowLayout, RowPacker, row_stride
from buffers.core.spaces import Leaf, action_leaf, extra_leaves, space_leaves

__all__ = ["FLAGS", "HEADER", "HEADER_BYTES", "HEADER_WORDS", "EpisodicLayout", "plan_episodic"]

COUNTERS = (
    "first_row",
    "num_rows",
    "first_episode",
    "num_episodes",
    "num_steps",
    "first_start",
    "num_starts",
    "first_drawable",
    "num_drawable",
)
FIRST_ROW, NUM_ROWS, FIRST_EPISODE, NUM_EPISODES, NUM_STEPS = 0, 1, 2, 3, 4
FIRST_START, NUM_STARTS, FIRST_DRAWABLE, NUM_DRAWABLE = 5, 6, 7, 8

HEADER = ("room", "step", "remaining", "bound")  # int32 each
HEADER_WORDS, HEADER_BYTES = 2, 16
FLAGS = ("terminations", "truncations", "boundaries")
# Fields, what no method takes by name, fields of the batches, and attributes every tuple has.
_TAKEN = frozenset((
    "obs", "next_obs", "actions", "rewards", "env_ids", "self", *FLAGS, *HEADER, "future_obs",
    "offsets", "goal_obs", "goal_offsets", "relabelled", "mask", "steps", "bounds", "extras",
    "memory", "count", "index", "valid", "is_first", "learn_mask", "indices", "weights",
    "initial_states", "batch",
))  # fmt: skip
_WORD_BYTES = 8
_MAX_ROWS = 2**31 - 1  # rows are listed as int32
_FEW_EPISODES = 4096
_EPISODE_WORDS = 4  # first row, length, first start, number of starts

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_BOOL, _FLOAT32 = np.dtype(np.bool_), np.dtype(np.float32)


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
            ColumnSpec("counters", (len(COUNTERS),), _INT64, "both"),
        ]

    def nbytes(self, staged: bool) -> int:
        """Bytes of all columns on host and device together."""
        return sum(spec_bytes(self.columns, staged))


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
    row = _pack_rows(observation_space, action_space, extra_columns)
    return EpisodicLayout(capacity, max_episodes, row)


def _pack_rows(
    observation_space: Space, action_space: Space, extra_columns: Mapping[str, Space] | None
) -> RowLayout:
    """Lay out a row: first the header, then the observation, then the rest.

    Raises:
        BufferMisuseError: A space without arrays of fixed size, or a bad name of an extra column.
    """
    obs_leaves = space_leaves(observation_space, "obs")
    if not obs_leaves:
        raise BufferMisuseError(f"observation_space {observation_space} holds no array at all")
    action = action_leaf(action_space)
    extras = extra_leaves(extra_columns, _TAKEN)
    packer = RowPacker()
    packer.add([*(Leaf(name, (), _INT32) for name in HEADER), *obs_leaves], _WORD_BYTES)
    obs_bytes = packer.end - HEADER_BYTES
    flags = [Leaf(name, (), _BOOL) for name in FLAGS]
    packer.add([action, Leaf("rewards", (), _FLOAT32), *extras, *flags], 1)
    return RowLayout(
        observation_space,
        packer.fields,
        [leaf.path for leaf in obs_leaves],
        [],
        [leaf.path for leaf in extras],
        HEADER_BYTES,
        obs_bytes,
        row_stride(packer.end, _WORD_BYTES),
    )
