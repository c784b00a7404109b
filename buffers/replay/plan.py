"""The layout of a replay buffer, as arithmetic: the fields of a row, rings, bytes.

A table has R rings of `span` rows; row k of ring r is row r * span + k of the table. A *number*
counts the transitions of a ring, beginning with 0: transition a is in row a % span of its ring
until transition a + span is written. Number a can be drawn while fewer than `capacity` newer ones
were begun. The `span - capacity` rows before these are kept for stacks of frames.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from gymnasium import Space, spaces

from buffers.core.arguments import check_count, read_number
from buffers.core.errors import BufferMisuseError
from buffers.core.rows import FrameLayout, RowLayout, RowPacker, row_stride
from buffers.core.spaces import Leaf, action_leaf, extra_leaves, space_leaves

__all__ = [
    "DEFAULTS", "MAX_ROWS", "OLDER", "PLAIN_DEFAULTS", "ROW_DEFAULTS", "Plan",
    "ReplayOptions", "RowOptions", "plan_replay", "read_options",
]  # fmt: skip

MAX_ROWS = 2**31 - 2**24  # links are 32-bit and count slots behind the rows, too
OLDER = "older frames"  # path of the field with units of older frames of a stack
_INT32 = np.dtype(np.int32)
_GRAIN = 16  # stride is a multiple: the largest item of torch
_WORD = 8  # bytes
_MOST_FRAMES = 2**15
_LINKS_PER_ENV = 4  # a row is at most this many steps of all envs behind the one before it
# Names no extra column may have: columns, attributes of batches, own fields, parameters.
_TAKEN = frozenset((
    "obs", "next_obs", "actions", "rewards", "terminations", "truncations", "env_ids", "indices",
    "discounts", "weights", "extras", "memory", "size", "num_added", "drawn_from", "link", "self",
    "valid",
))  # fmt: skip
_TAKEN_OF_SEQUENCES = frozenset((
    "boundaries", "initial_states", "is_first", "learn_mask", "mask", "steps",
))  # fmt: skip


def plan_frames(space: Space, given: int | None) -> FrameLayout | None:
    """Layout of stacked frames, along the only axis of length `given`; None without stacks.

    Raises:
        BufferMisuseError: The argument does not fit, or the observation is not such a stack.
    """
    if given is None:
        return None
    number, shape = check_count("frame_stack", given, _MOST_FRAMES), tuple(space.shape or ())
    if not isinstance(space, spaces.Box) or shape.count(number) != 1 or not math.prod(shape):
        raise BufferMisuseError(
            f"frame_stack={number} needs a Box with something in it, of which one axis alone has "
            f"length {number}, that along which frames are stacked, got {space}; reshape it with a "
            "wrapper, or leave frame_stack out"
        )
    axis, (leaf,) = shape.index(number), space_leaves(space, "obs")
    return FrameLayout(number, shape[:axis] + shape[axis + 1 :], leaf.dtype, shape, axis)


class RowOptions(TypedDict, total=False):
    """Arguments of replay buffers on which the bytes of a row depend; see `SharedReplayBuffer`."""

    n_step: int
    gamma: float | None
    track_env: bool
    extra_columns: Mapping[str, Space] | None
    store_next: bool
    track_episodes: bool
    frame_stack: int | None


class ReplayOptions(RowOptions, total=False):
    """Arguments of single-process replay buffers, besides sizes and spaces."""

    device: torch.device | str
    seed: int | None
    staged: bool
    storage: str
    folder: str | os.PathLike[str] | None


PLAIN_DEFAULTS: dict[str, Any] = {
    "n_step": 1, "gamma": None, "track_env": False, "extra_columns": None,
}  # fmt: skip
ROW_DEFAULTS = PLAIN_DEFAULTS | {"store_next": True, "track_episodes": False, "frame_stack": None}
DEFAULTS = ROW_DEFAULTS | {
    "device": "cpu", "seed": None, "staged": False, "storage": "memory", "folder": None,
}  # fmt: skip


def read_options(kind: str, given: Any, known: dict[str, Any], own: Any = ()) -> dict[str, Any]:
    """Fill in defaults; TypeError for unknown options names the known ones and `own` keywords."""
    if unknown := sorted(given.keys() - known.keys()):
        names = sorted({*known, "num_envs", *(own or ())})
        raise TypeError(f"{kind} has no option {unknown[0]!r}; expected some of {names}")
    return {**known, **given}


@dataclass(frozen=True)
class Plan:
    """Checked arguments of a constructor, and numbers computed from them.

    Attributes:
        layout: Fields of a row. `obs`, `actions`, extras and `env_ids` come first, then the fields
            read from the last row of a window: `next_obs`, `rewards`, `link` and the flags.
        capacity: Transitions of each ring.
        span: Rows of each ring.
        num_rings: R.
        num_envs: Environments of all rings together; 0 if the buffer does not track them.
        n_step: Longest window.
        gamma: Discount per step, or None.
        is_linked: Rows have links to the next row of their episode.
        is_once: Observations, or frames, are stored once; links lead to the next observation.
        max_gap: Largest distance, in rows, between consecutive frames of a stack.
        has_sequences: Sequences of steps can be drawn.
    """

    layout: RowLayout
    capacity: int
    span: int
    num_rings: int
    num_envs: int
    n_step: int
    gamma: float | None
    is_linked: bool
    is_once: bool
    max_gap: int
    has_sequences: bool

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.span * self.num_rings

    @property
    def num_frames(self) -> int:
        """F; 1 without stacks."""
        return 1 if self.layout.frames is None else self.layout.frames.num_frames

    @property
    def raw_bytes(self) -> int:
        """Bytes of an observation, or frame, without padding to whole words."""
        frames = self.layout.frames
        return self.layout.obs_bytes if frames is None else frames.nbytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of an observation, or frame, at the start of a row, padded to whole words."""
        return -(-self.layout.obs_bytes // _WORD) * _WORD

    @property
    def first_slots(self) -> int:
        """Initial number of slots beside the rows, if observations are stored once."""
        per_env = 1 if self.layout.frames is None else 2 * self.layout.frames.num_frames
        return max(16, self.num_rows // 64) + per_env * self.num_envs

    @property
    def nbytes(self) -> int:
        """Bytes of a table, with the initial slots beside its rows."""
        needed = self.num_rows * self.layout.stride + 16 * (self.num_rings + self.num_envs)
        if not self.is_once:
            return needed
        head = self.num_frames * self.raw_bytes
        return needed + (self.first_slots + 1) * (self.unit_bytes + 8) + self.num_envs * head


def plan_replay(
    capacity: int, observation_space: Space, action_space: Space, options: Mapping[str, Any], *,
    num_envs: int | None, is_per_env: bool = False, num_writers: int = 1,
) -> Plan:  # fmt: skip
    """Check the arguments of a replay buffer.

    Raises:
        BufferMisuseError: An argument is wrong, or two contradict each other.
        TypeError: An option is not in `RowOptions`.
    """
    given = read_options("a replay buffer", options, ROW_DEFAULTS)
    gamma, store_next, track_env = given["gamma"], given["store_next"], given["track_env"]
    track_episodes = given["track_episodes"]
    capacity = check_count("capacity", capacity)
    n_step = check_count("n_step", given["n_step"], MAX_ROWS)
    gamma = None if gamma is None else read_number("gamma", gamma)
    if n_step > 1 and (gamma is None or track_episodes):
        raise BufferMisuseError(
            f"n_step={n_step} needs gamma, the discount per step, and no track_episodes: sequences "
            "have the reward of every step, to be summed by the learner"
        )
    frames = plan_frames(observation_space, given["frame_stack"])
    needs_envs = n_step > 1 or not store_next or track_env or track_episodes or frames is not None
    if needs_envs and num_envs is None:
        raise BufferMisuseError(
            "n_step > 1, store_next=False, track_env=True, track_episodes=True and frame_stack "
            "need num_envs, to tell which rows follow one another; with a single environment give "
            "num_envs=1"
        )
    is_untracked = num_envs is None and not is_per_env
    number = 0 if is_untracked else check_count("num_envs", num_envs, MAX_ROWS)
    num_rings = number if is_per_env else num_writers
    leaves, num_older, max_gap = space_leaves(observation_space, "obs"), 0, 0
    is_once = frames is not None or (not store_next and any(math.prod(x.shape) for x in leaves))
    if frames is not None:
        leaves, num_older = [Leaf("obs", frames.shape, frames.dtype)], frames.num_frames - 1
        max_gap = 1 if is_per_env else _LINKS_PER_ENV * number
    span = capacity + max_gap * num_older
    if span * num_rings > MAX_ROWS:
        raise BufferMisuseError(
            f"capacity {capacity} makes {span * num_rings} rows, expected at most {MAX_ROWS}"
        )
    is_linked = n_step > 1 or is_once or track_episodes
    taken = _TAKEN | _TAKEN_OF_SEQUENCES if track_episodes else _TAKEN
    others = [action_leaf(action_space), *extra_leaves(given["extra_columns"], taken)]
    following = [] if is_once else [leaf._replace(path="next_" + leaf.path) for leaf in leaves]
    own = [*_largest_first(others)]
    own += [Leaf("env_ids", (), _INT32)] if track_env or track_episodes else []
    last = [Leaf("rewards", (), np.dtype(np.float32))]
    last += [Leaf("link", (), _INT32)] if is_linked else []
    last += [Leaf(OLDER, (num_older,), _INT32)] if num_older else []
    last += [Leaf(name, (), np.dtype(np.bool_)) for name in ("terminations", "truncations")]
    packer, start, obs_bytes = _pack(leaves, own, following, last)
    layout = RowLayout(
        observation_space, packer.fields, [leaf.path for leaf in leaves],
        [leaf.path for leaf in following], [leaf.path for leaf in others[1:]],
        start, obs_bytes, row_stride(packer.end, _GRAIN), frames,
    )  # fmt: skip
    return Plan(
        layout, capacity, span, num_rings, number * num_writers, n_step, gamma,
        is_linked, is_once, max_gap, track_episodes,
    )  # fmt: skip


def _pack(
    obs: list[Leaf], own: list[Leaf], following: list[Leaf], last: list[Leaf]
) -> tuple[RowPacker, int, int]:
    """Lay out the fields of a row; return also the first byte of obs, and its size."""
    packer = RowPacker()
    start = packer.add(_largest_first(obs))
    obs_bytes = packer.end - start
    packer.align(_WORD)
    for leaf in own:
        packer.add([leaf])
    packer.align(max([_WORD, *(leaf.dtype.itemsize for leaf in following)]))
    for leaf in (*_largest_first(following), *last):
        packer.add([leaf])
    return packer, start, obs_bytes


def _largest_first(leaves: list[Leaf]) -> list[Leaf]:
    """Sort by item size: in this order no leaf needs padding."""
    return sorted(leaves, key=lambda leaf: -leaf.dtype.itemsize)
