"""The memory of episodes: a ring of packed rows, and a table of episodes with counts for draws.

```
#  rows   int64 (R, words)   | room obs action ... | room obs ... | last obs | room obs ...
#                              '-- step 0 of episode e --'  ...     '- T -'    '- e + 1 ...
#  table  int64 (7, S)       one column (slot) per episode, the oldest first:
#            first row, length, hole          hole: the last boundary, where no pair begins
#            pairs, episodes with a pair      cumulative: how many begin before this episode, so a
#            windows, episodes with a window  draw is a random number and a binary search
```

Row numbers never wrap; number n is at n % R. An episode of T steps has T + 1 rows, the last one for
its final observation. Slots `begin` to `end` of the table are live; at the end of the table they
are moved to its front. On a device, rows and table are tensors that never move, so that CUDA graphs
see their changes.

A *law* (PAIRS or WINDOWS) is two cumulative rows of the table: possible draws, and episodes with at
least one. Windows are first steps of sequences, counted for the `SequenceOptions` of the last draw.
The batches that draws return are defined here, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import check_count
from buffers.core.batches import Batch, SequenceOptions
from buffers.core.errors import BufferMisuseError
from buffers.core.kernels import njit
from buffers.core.memory import allocation, zeroed_bytes
from buffers.core.rows import RowLayout, RowPacker, row_stride, row_views, view_fields
from buffers.core.spaces import Leaf, action_leaf, extra_leaves, obs_leaves

__all__ = [
    "FLAGS",
    "HOLE",
    "PAIRS",
    "WINDOWS",
    "EpisodeTable",
    "GoalBatch",
    "Layout",
    "PairBatch",
    "StackBatch",
    "fill_rooms",
    "plan_layout",
]


FIRST, LENGTH, HOLE, PAIRS, WINDOWS = 0, 1, 2, 3, 5  # rows of the table; a law has two
FLAGS = ("terminations", "truncations", "boundaries")
# Names that no extra column may have: fields, parameters, columns and attributes of batches.
_TAKEN = frozenset((
    "obs", "next_obs", "actions", "rewards", "env_ids", "self", *FLAGS, "room", "step", "remaining",
    "bound", "future_obs", "offsets", "goal_obs", "goal_offsets", "relabelled", "mask", "steps",
    "bounds", "extras", "memory", "count", "index", "valid", "is_first", "learn_mask", "indices",
    "weights", "initial_states", "batch",
))  # fmt: skip
_MAX_ROWS = 2**31 - 1
_FEW_EPISODES = 4096
_NONE = np.iinfo(np.int64).max  # in slots behind the live ones: above any number drawn


class Layout(NamedTuple):
    """Sizes of an episodic buffer; nothing is allocated yet."""

    capacity: int
    max_episodes: int
    row: RowLayout

    @property
    def num_rows(self) -> int:
        """Rows of the ring: one per step, and one per episode for its last observation."""
        return self.capacity + self.max_episodes

    @property
    def num_slots(self) -> int:
        """Columns of the table; at most two thirds are live, so that moving them is rare."""
        return self.max_episodes + self.max_episodes // 2 + 2

    def sizes(self, is_staged: bool) -> dict[str, int]:
        """Bytes held, by purpose; if staged, the table is on the host, too."""
        table = 7 * 8 * self.num_slots
        return {"rows": self.num_rows * self.row.stride, "table": table * (2 if is_staged else 1)}


def plan_layout(
    capacity: Any,
    observation_space: Space,
    action_space: Space,
    max_episodes: Any = None,
    extra_columns: Mapping[str, Space] | None = None,
) -> Layout:
    """Plan an episodic buffer; raise BufferMisuseError if a size or a space does not fit."""
    capacity = check_count("capacity", capacity)
    if max_episodes is None:
        max_episodes = min(capacity, max(_FEW_EPISODES, capacity // 8))
    max_episodes = min(check_count("max_episodes", max_episodes), capacity)
    if capacity + max_episodes > _MAX_ROWS:
        raise BufferMisuseError(
            f"capacity {capacity} with {max_episodes} episodes needs more rows than {_MAX_ROWS}; "
            "make it smaller"
        )
    obs = obs_leaves(observation_space)
    extras = extra_leaves(extra_columns, _TAKEN)
    numbers = [Leaf("rewards", (), np.dtype(np.float32)), *extras]
    flags = [Leaf(name, (), np.dtype(np.bool_)) for name in FLAGS]
    packer = RowPacker()
    packer.add([Leaf("room", (), np.dtype(np.int32))], 8)  # steps to the bound, in the first word
    packer.add(obs, 8)  # whole words, for comparisons by words
    obs_end = packer.end
    packer.add([action_leaf(action_space), *numbers, *flags], 1)
    paths, begin = [leaf.path for leaf in obs], packer.fields[obs[0].path].offset
    row = RowLayout(
        observation_space, packer.fields, paths, [], [leaf.path for leaf in extras], begin,
        obs_end - begin, row_stride(packer.end, 8),
    )  # fmt: skip
    return Layout(capacity, max_episodes, row)


class Live(NamedTuple):
    """The live episodes; replaced as a whole, after the rows and the table were written."""

    begin: int = 0  # slots of the table
    end: int = 0
    num_steps: int = 0
    first_row: int = 0  # number of the oldest row; these numbers never wrap
    next_row: int = 0


class EpisodeTable:
    """Rows and table of complete episodes.

    If staged, draws read a copy of the table on the device; the host writes its own and pushes it.

    Attributes:
        rows: int64 (R, words), on the device.
        columns: Views (R, *shape) of the fields of all rows, by path.
        table, there: int64 (7, S), on the host, and its copy on the device (a view if not staged).
        live_there: int64 (2,), `live.begin` and `live.end` on the device.
        num_restored: Number of restored states.
    """

    def __init__(self, layout: Layout, device: torch.device, is_staged: bool):
        self.layout, self.device, self.is_staged = layout, device, is_staged

        needed = sum(layout.sizes(is_staged and device.type == "cpu").values())
        what = f"an episodic buffer with capacity {layout.capacity}"
        with allocation(what, needed, device, "use a smaller capacity"):
            size, shape = layout.num_rows * layout.row.stride, (7, layout.num_slots)
            pages = zeroed_bytes(size) if device.type == "cpu" else None
            if pages is None:
                pages = torch.zeros(size, dtype=torch.uint8, device=device)
            self.rows = pages.view(layout.num_rows, -1).view(torch.int64)
            self.table, self._slots = np.zeros(shape, np.int64), np.zeros(2, np.int64)
            there = [torch.from_numpy(part) for part in (self.table, self._slots)]
            if is_staged:
                there = [torch.zeros(x.shape, dtype=x.dtype, device=device) for x in there]
            self.there, self.live_there = there
        fields = layout.row.fields
        self.columns = view_fields(self.rows, fields)
        self.live, self.num_restored = Live(), 0
        self.options: SequenceOptions | None = None  # of the counted windows
        self._refill(0)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes held, by purpose."""
        return self.layout.sizes(self.is_staged)

    @property
    def lengths(self) -> np.ndarray:
        """Lengths of the episodes from the oldest to the newest, int64 (E,); a view."""
        return self.table[LENGTH, self.live.begin : self.live.end]

    def places(self, first: int, count: int) -> Iterator[slice]:
        """The one or two slices of the ring for `count` rows from number `first` on."""
        begin, num_rows = first % self.layout.num_rows, self.layout.num_rows
        yield slice(begin, min(begin + count, num_rows))
        if begin + count > num_rows:
            yield slice(0, begin + count - num_rows)

    def live_rows(self) -> list[torch.Tensor]:
        """Views of the rows in use, from the oldest to the newest; one or two."""
        first, end = self.live.first_row, self.live.next_row
        return [self.rows[part] for part in self.places(first, end - first)]

    def total(self, law: int) -> int:
        """Number of possible draws by a law."""
        return int(self.table[law, self.live.end] - self.table[law, self.live.begin])

    def count_windows(self, options: SequenceOptions) -> int:
        """Count the windows of some sequences for the law WINDOWS; return their number."""
        if options != self.options:
            self.options = options
            self.table[WINDOWS : WINDOWS + 2] = 0
            self.table[WINDOWS : WINDOWS + 2, self.live.end + 1 :] = _NONE
            self._extend(WINDOWS, self.live.begin, self.live.end)
            self._push(slice(None), slice(WINDOWS, WINDOWS + 2))
        return self.total(WINDOWS)

    def insert(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Copy episodes into the ring, and drop the oldest ones if there is no room.

        If there are more new episodes than the buffer holds, only the newest are stored, whole.

        Args:
            rows: int64 (K, words), C-contiguous, episode after episode, each with one more row for
                its final observation.
            lengths: int64 (E,), 1 to the capacity each.
        """
        capacity, most = self.layout.capacity, self.layout.max_episodes
        behind = np.cumsum(lengths[::-1])
        skipped = max(int((behind > capacity).sum()), len(lengths) - most, 0)
        rows, lengths = rows[int((lengths[:skipped] + 1).sum()) :], lengths[skipped:]
        # Skipped episodes are newer than all episodes in the ring, so these must go too.
        self._evict(capacity if skipped else int(lengths.sum()), len(lengths))
        self._store([rows], lengths)

    def _store(self, blocks: Sequence[np.ndarray], lengths: np.ndarray) -> None:
        """Write episodes, given as consecutive blocks of rows, behind the live ones."""
        live = self.live
        fields = {"boundaries": self.layout.row.fields["boundaries"]}
        boundaries = np.concatenate([row_views(rows, fields)["boundaries"] for rows in blocks])
        rooms, holes = np.zeros(len(boundaries), np.int32), np.empty_like(lengths)
        fill_rooms(boundaries, lengths, rooms, holes)
        for column, parts in ((self.rows, blocks), (self.columns["room"], [rooms])):
            number = live.next_row  # row numbers never wrap
            for part in parts:
                begin = 0
                for place in self.places(number, len(part)):
                    end = begin + place.stop - place.start
                    column[place].copy_(torch.from_numpy(np.array(part[begin:end])))
                    begin = end
                number += begin
        slots = slice(live.end, live.end + len(lengths))
        firsts = live.next_row + np.cumsum(lengths + 1) - lengths - 1
        self.table[:PAIRS, slots] = firsts % self.layout.num_rows, lengths, holes
        for law in (PAIRS, WINDOWS):
            self._extend(law, slots.start, slots.stop)
        self._push(slice(slots.start, slots.stop + 1))
        num_steps = live.num_steps + int(lengths.sum())
        # Last: until then draws do not see the new rows and slots.
        self._set(live._replace(end=slots.stop, num_steps=num_steps, next_row=number))

    def _evict(self, num_steps: int, num_episodes: int) -> None:
        """Drop the oldest episodes until `num_steps` and `num_episodes` more fit."""
        begin, end, steps, row, next_row = self.live
        capacity, most = self.layout.capacity - num_steps, self.layout.max_episodes - num_episodes
        while begin < end and (steps > capacity or end - begin > most):
            length = int(self.table[LENGTH, begin])
            steps, row = steps - length, row + length + 1
            begin += 1
        if begin > self.live.begin:
            self._set(Live(begin, end, steps, row, next_row))
        if end + num_episodes >= self.layout.num_slots:  # move the live slots to the front
            count = end - begin
            self.table[:PAIRS, :count] = self.table[:PAIRS, begin:end]
            self._refill(count)
            self._set(self.live._replace(begin=0, end=count))

    def _refill(self, count: int) -> None:
        """Recompute both laws for the first `count` slots; the other slots are empty."""
        self.table[PAIRS:] = _NONE
        self.table[PAIRS:, 0] = 0
        for law in (PAIRS, WINDOWS):
            self._extend(law, 0, count)
        self._push(slice(None))

    def _extend(self, law: int, begin: int, end: int) -> None:
        """Add the possible draws of the episodes in some slots to a law."""
        (_, lengths, holes), options = self.table[:PAIRS, begin:end], self.options
        if law == PAIRS:  # all steps but the last one and the hole
            counts = lengths - 1 - (holes < lengths - 1)
        elif options is None:
            return
        else:
            counts = np.maximum(lengths - options.needed + options.period, 0) // options.period
            counts = np.maximum(counts, lengths >= options.needed_at_start)
        for row, numbers in ((law, counts), (law + 1, counts > 0)):
            self.table[row, begin + 1 : end + 1] = self.table[row, begin] + np.cumsum(numbers)

    def _push(self, slots: slice, rows: slice = slice(None)) -> None:
        if self.is_staged:
            self.there[rows, slots].copy_(torch.from_numpy(self.table[rows, slots]))

    def _set(self, live: Live) -> None:
        self.live = live
        self._slots[:] = live[:2]
        if self.is_staged:
            self.live_there.copy_(torch.from_numpy(self._slots))

    def restore(self, blocks: Sequence[np.ndarray], lengths: np.ndarray) -> None:
        """Replace all episodes by those in consecutive blocks of rows."""
        self._set(Live())
        self._refill(0)
        self.num_restored += 1
        self._store(blocks, lengths)


@njit(nogil=True, cache=True)
def fill_rooms(boundaries, lengths, rooms, holes):
    """Write the number of steps from each step to its bound, in one backward pass per episode.

    The bound of step t is the second boundary at or after t, else the only one, else the last step.
    So two steps of an episode have no room: the last one, and the last boundary.

    Args:
        boundaries: bool (K,), of the rows of episodes, each with one more row at its end.
        lengths: int64 (E,).
        rooms: int32 (K,), written: bound - t; 0 in the extra rows.
        holes: int64 (E,), written: the last boundary, or a number above all steps.
    """
    begin = 0
    for e in range(lengths.shape[0]):
        last = lengths[e] - 1
        following, second = -1, -1
        holes[e] = _NONE
        rooms[begin + last + 1] = 0
        for t in range(last, -1, -1):
            if boundaries[begin + t]:
                if following < 0:
                    holes[e] = t
                second = following
                following = t
            bound = last
            if second >= 0:
                bound = second
            elif following >= 0:
                bound = following
            rooms[begin + t] = bound - t
        begin += last + 2


@dataclass(slots=True, repr=False, eq=False)
class PairBatch(Batch):
    """B steps and, for each, a later observation of the same episode."""

    obs: Any  # (B, *obs_shape), nested like the observation space
    future_obs: Any  # (B, *obs_shape): the observation `offsets` steps later
    offsets: torch.Tensor  # int64 (B,), at least 1
    actions: torch.Tensor  # (B, *action_shape)
    rewards: torch.Tensor  # float32 (B,)
    terminations: torch.Tensor  # bool (B,), of the step of obs
    truncations: torch.Tensor  # bool (B,)
    extras: dict[str, torch.Tensor]  # (B, ...), extra columns

    _fields = (
        "obs", "future_obs", "offsets", "actions", "rewards", "terminations", "truncations",
    )  # fmt: skip
    _counted = "offsets"


@dataclass(slots=True, repr=False, eq=False)
class StackBatch(Batch):
    """B steps, each with the last K observations, the oldest first."""

    obs: Any  # (B, K, *obs_shape); the first one is repeated at the start
    next_obs: Any  # (B, K, *obs_shape)
    actions: torch.Tensor  # (B, *action_shape)
    rewards: torch.Tensor  # float32 (B,)
    terminations: torch.Tensor  # bool (B,)
    truncations: torch.Tensor  # bool (B,)
    steps: torch.Tensor  # int32 (B,)
    extras: dict[str, torch.Tensor]

    _fields = (
        "obs", "next_obs", "actions", "rewards", "terminations", "truncations", "steps",
    )  # fmt: skip
    _counted = "steps"


@dataclass(slots=True, repr=False, eq=False)
class GoalBatch(Batch):
    """B steps, each with its own goal or with one that its episode reached."""

    obs: Any  # (B, *obs_shape), with replaced goals
    next_obs: Any  # (B, *obs_shape)
    actions: torch.Tensor  # (B, *action_shape)
    rewards: torch.Tensor  # float32 (B,), recomputed by `compute_reward`
    terminations: torch.Tensor  # bool (B,)
    truncations: torch.Tensor  # bool (B,)
    goal_obs: Any  # (B, *obs_shape): the observation of the same episode that holds the goal
    goal_offsets: torch.Tensor  # int64 (B,), steps from obs to goal_obs; may be negative
    relabelled: torch.Tensor  # bool (B,), where the goal was replaced
    extras: dict[str, torch.Tensor]

    _fields = (
        "obs", "next_obs", "actions", "rewards", "terminations", "truncations", "goal_obs",
        "goal_offsets", "relabelled",
    )  # fmt: skip
    _counted = "relabelled"
