"""What a replay buffer consists of, as arithmetic: rows, integers that say what is in them, bytes.

The integers of a buffer are one array `state` int64, so that compiled code gets them in one piece:
constants of the buffer, then what changes, at fixed places (the names below), then arrays whose
places are named by constants. A buffer has R rings of C rows; row k of ring r is row r * C + k of
the table. A *number* counts the rows of a ring from the first ever added, so a row with number a is
alive until number a + C is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import numpy as np
from gymnasium import Space

from buffers.core.arguments import check_count, read_number
from buffers.core.errors import BufferMisuseError
from buffers.core.rows import FrameLayout, RowLayout, RowPacker, row_stride
from buffers.core.spaces import Leaf, action_leaf, extra_leaves, space_leaves
from buffers.replay.frames import FrameStack, frame_bytes, plan_frames

__all__ = [
    "PlainOptions",
    "ReplayOptions",
    "RowOptions",
    "constant_part",
    "first_slots",
    "new_state",
    "plan_replay",
    "were_not_overwritten",
]

CAPACITY, NUM_RINGS, NUM_ENVS = 0, 1, 2
LINK_AT, REWARD_AT, OVER_AT, ENV_AT = 3, 4, 5, 6  # byte offsets in a row, -1 if there is none
OBS_AT, NEXT_AT, ACTION_AT = 7, 8, 9
OBS_BYTES, ACTION_BYTES = 10, 11
POINTERS, TOTALS, LAST, STOPPED, CUMULATED, OCCUPIED = 12, 13, 14, 15, 16, 17  # where arrays begin
OBS_DIMS, ACTION_DIMS = 18, 19  # nothing but saved files, which are compared, has these any more
ADDED, COUNT, IS_TALLIED, NUM_OCCUPIED, NUM_FREE = 20, 21, 22, 23, 24  # these change
HEADER = 25

_ARRAYS = (POINTERS, TOTALS, LAST, STOPPED, CUMULATED, OCCUPIED)

# The same of sequences.
_TAKEN_OF_SEQUENCES = frozenset((
    "boundaries", "initial_states", "is_first", "learn_mask", "mask", "steps",
))  # fmt: skip

_MAX_ROWS = 2**31 - 2  # links between rows are 32-bit, with a sign, like env ids
_GRAIN = 16  # of the stride: the largest item torch has
# Columns, attributes of batches, the field of the buffer's own, and what no method takes by name.
_TAKEN = frozenset((
    "obs", "next_obs", "actions", "rewards", "terminations", "truncations", "env_ids", "indices",
    "discounts", "weights", "extras", "memory", "size", "num_added", "drawn_from", "link", "self",
    "valid",
))  # fmt: skip


class ReplayOptions(NamedTuple):
    """Checked arguments of a constructor, and what follows from them."""

    layout: RowLayout
    capacity: int  # rows of each ring
    num_rings: int
    num_envs: int  # 0 if no track of them is kept
    num_steps: int
    gamma: float | None
    has_sequences: bool = False

    def nbytes(self, capacity: int) -> int:
        """Bytes a buffer of another capacity takes at first; final observations may need more."""
        num_rows = capacity * self.num_rings
        state_bytes = 8 * _state_words(self.layout, self.num_rings, self.num_envs)
        needed = num_rows * self.layout.stride + state_bytes
        if self.layout.frames is not None:
            needed += frame_bytes(self.layout.frames, num_rows, self.num_envs)
        if self.layout.has_successors:
            needed += _successor_bytes(num_rows, self.num_envs, self.layout.obs_bytes)
        return needed


class PlainOptions(TypedDict, total=False):
    """Arguments of all replay buffers on which the bytes of a row depend."""

    n_step: int
    gamma: float | None
    track_env: bool
    extra_columns: Mapping[str, Space] | None


class RowOptions(PlainOptions, total=False):
    """Those of buffers besides that no other process fills."""

    store_next: bool
    track_episodes: bool
    frame_stack: int | FrameStack | None


def plan_replay(
    capacity: int,
    observation_space: Space,
    action_space: Space,
    *,
    num_envs: int | None,
    is_per_env: bool = False,
    n_step: int = 1,
    gamma: float | None = None,
    store_next: bool = True,
    track_env: bool = False,
    track_episodes: bool = False,
    extra_columns: Mapping[str, Space] | None = None,
    frame_stack: int | FrameStack | None = None,
) -> ReplayOptions:
    """Check the arguments of a replay buffer.

    Raises:
        BufferMisuseError: One of them is wrong, or two do not go together.
    """
    capacity, n_step = check_count("capacity", capacity), check_count("n_step", n_step, _MAX_ROWS)
    if gamma is not None:
        gamma = read_number("gamma", gamma)
    if n_step > 1 and gamma is None:
        raise BufferMisuseError(f"n_step={n_step} needs gamma, the discount per step")
    frames = plan_frames(observation_space, frame_stack)
    if n_step > 1 and track_episodes:
        raise BufferMisuseError(
            f"track_episodes=True needs n_step=1, got {n_step}: sequences have the reward of every "
            "step, to be summed by the learner"
        )
    needs_envs = n_step > 1 or not store_next or track_env or track_episodes or frames is not None
    if needs_envs and num_envs is None:
        raise BufferMisuseError(
            "n_step > 1, store_next=False, track_env=True, track_episodes=True and frame_stack "
            "need num_envs, to tell which rows follow one another; with a single environment give "
            "num_envs=1"
        )
    store_next = store_next or frames is not None  # a row has the frames of both
    is_untracked = num_envs is None and not is_per_env
    number = 0 if is_untracked else check_count("num_envs", num_envs, _MAX_ROWS)
    num_rings = number if is_per_env else 1
    if capacity * num_rings > _MAX_ROWS:
        raise BufferMisuseError(
            f"capacity {capacity} makes {capacity * num_rings} rows, expected at most {_MAX_ROWS}"
        )
    layout = _plan_rows(
        observation_space,
        action_space,
        extra_columns,
        store_next=store_next,
        is_linked=n_step > 1 or not store_next or track_episodes,
        has_env_ids=track_env or not store_next or track_episodes,
        frames=frames,
        taken=_TAKEN | _TAKEN_OF_SEQUENCES if track_episodes else _TAKEN,
    )
    return ReplayOptions(layout, capacity, num_rings, number, n_step, gamma, track_episodes)


def _plan_rows(
    observation_space: Space,
    action_space: Space,
    extra_columns: Mapping[str, Space] | None,
    *,
    store_next: bool,
    is_linked: bool,
    has_env_ids: bool,
    frames: FrameLayout | None,
    taken: frozenset[str],
) -> RowLayout:
    """Pack obs, next_obs (if stored), actions, extras, rewards, links, env ids and flags.

    In place of observations whose frames are stored once there are the ids of these. Observations
    in which there is no number are in each row whatever `store_next` says, as they take no room.
    What a walk over several steps reads (rewards, links, flags) lies together at the end. Rows are
    padded to whole cache lines where that costs an eighth at most.

    Raises:
        BufferMisuseError: A space that has no arrays of fixed size, or a name that is taken.
    """
    obs_leaves = space_leaves(observation_space, "obs")
    is_empty = not any(math.prod(leaf.shape) for leaf in obs_leaves)
    following = [_renamed(leaf) for leaf in obs_leaves] if store_next or is_empty else []
    if frames is not None:
        ids = Leaf("frame_ids", (frames.num_frames + 1,), np.dtype(np.int32))
        obs_leaves, following = [ids], []
    extras = extra_leaves(extra_columns, taken if frames is None else taken | {"frame_ids"})
    packer = RowPacker()
    start = packer.add(_largest_first(obs_leaves))
    obs_bytes = packer.end - start
    packer.add(_largest_first(following))
    for leaf in _largest_first([action_leaf(action_space), *extras]):
        packer.add([leaf])
    packer.add([Leaf("rewards", (), np.dtype(np.float32))])
    if is_linked:
        packer.add([Leaf("link", (), np.dtype(np.int32))])
    if has_env_ids:
        packer.add([Leaf("env_ids", (), np.dtype(np.int32))])
    for name in ("terminations", "truncations"):
        packer.add([Leaf(name, (), np.dtype(np.bool_))])
    return RowLayout(
        observation_space,
        packer.fields,
        [leaf.path for leaf in obs_leaves],
        [leaf.path for leaf in following],
        [leaf.path for leaf in extras],
        start,
        obs_bytes,
        row_stride(packer.end, _GRAIN),
        frames,
    )


def _renamed(leaf: Leaf) -> Leaf:
    return leaf._replace(path="next_" + leaf.path)


def _largest_first(leaves: list[Leaf]) -> list[Leaf]:
    """In this order none needs padding."""
    return sorted(leaves, key=lambda leaf: -leaf.dtype.itemsize)


def _state_words(layout: RowLayout, num_rings: int, num_envs: int) -> int:
    """Length of the array of `new_state`."""
    dims = len(layout.fields[layout.obs[0]].shape) if layout.obs else 0
    return HEADER + 4 * num_rings + 2 * num_envs + dims + len(layout.fields["actions"].shape)


def new_state(layout: RowLayout, capacity: int, num_rings: int, num_envs: int) -> np.ndarray:
    """State int64 of an empty buffer."""
    state = np.zeros(_state_words(layout, num_rings, num_envs), np.int64)
    state[CAPACITY], state[NUM_RINGS], state[NUM_ENVS] = capacity, num_rings, num_envs
    fields = layout.fields
    places = {LINK_AT: "link", REWARD_AT: "rewards", OVER_AT: "terminations"}
    for place, name in {**places, ENV_AT: "env_ids", ACTION_AT: "actions"}.items():
        state[place] = fields[name].offset if name in fields else -1
    leaves, following = (
        [fields[path] for path in paths] for paths in (layout.obs, layout.next_obs)
    )
    state[OBS_AT] = min((leaf.offset for leaf in leaves), default=0)
    state[NEXT_AT] = min((leaf.offset for leaf in following), default=-1)
    state[OBS_BYTES], state[ACTION_BYTES] = layout.obs_bytes, fields["actions"].nbytes
    sizes = (num_rings, num_rings, num_envs, num_envs, num_rings, num_rings)
    begin = HEADER
    for place, size in zip(_ARRAYS, sizes, strict=True):
        state[place] = begin
        begin += size
    shapes = {
        OBS_DIMS: leaves[0].shape if leaves else (),
        ACTION_DIMS: fields["actions"].shape,
    }
    for place, shape in shapes.items():
        state[place] = begin
        state[begin : begin + len(shape)] = shape
        begin += len(shape)
    return state


def constant_part(state: np.ndarray) -> list[int]:
    """What of a state depends on the constructor's arguments only."""
    return state[:ADDED].tolist()


def first_slots(num_rows: int, num_envs: int) -> int:
    """Final observations there is room for at first: one per env, and one in 64 rows."""
    return max(16, num_envs, num_rows // 64)


def _successor_bytes(num_rows: int, num_envs: int, obs_bytes: int) -> int:
    """Bytes a new `Successors` takes."""
    slots = first_slots(num_rows, num_envs)
    return (num_envs + slots) * obs_bytes + 8 * slots + 4 * num_rows


def were_not_overwritten(rows: Any, capacity: int, before: Any, now: Any) -> Any:
    """Whether rows of rings still hold what they held at an earlier time.

    Args:
        rows: int64 (K,), array or tensor, rows counted from the first of their ring.
        capacity: Rows of a ring.
        before: Rows ever added to the ring at that time; a number, or int64 (K,).
        now: The same now.

    >>> were_not_overwritten(np.arange(4), 4, before=6, now=8)  # rows 2 and 3 were written since
    array([ True,  True, False, False])
    """
    return now - before <= (rows - before) % capacity  # adds that leave a row alone
