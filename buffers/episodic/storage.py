"""The memory of an episodic buffer: a ring of packed rows, its tables, and how episodes get in."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from buffers.core.columns import allocate_columns, spec_bytes
from buffers.core.compiling import njit
from buffers.core.memory import check_room
from buffers.core.rows import row_views
from buffers.core.staging import StagingBlocks
from buffers.episodic.layout import (
    COUNTERS,
    FIRST_DRAWABLE,
    FIRST_EPISODE,
    FIRST_ROW,
    FIRST_START,
    HEADER,
    NUM_DRAWABLE,
    NUM_EPISODES,
    NUM_ROWS,
    NUM_STARTS,
    NUM_STEPS,
    EpisodicLayout,
)

__all__ = ["EpisodicStorage", "fill_rooms"]

_TABLES = ("starts", "episodes", "drawable", "counters")
_HEADERS = ("boundaries", *HEADER)
_REFILED_ROWS = 1 << 16
_SPARE_WORDS = 3  # per staged row, for what its episode adds to the tables
_COUNTER = {name: index for index, name in enumerate(COUNTERS)}


class EpisodicStorage:
    """Rows and tables, as `layout` describes them.

    Episodes are put together in `staging`, filed in the tables on the host, and copied behind the
    newest in the ring. If the ring is on a device, rows and changed parts of the tables go there in
    one block.

    Attributes:
        layout: Sizes.
        rows: int64 (R, W), on the device.
        staging: int64 (K, W), where episodes are put together before `insert`; see `reserve`.
        fields: Arrays over the fields of `staging`, by path.
        tables: The tables on the host, by name.
        device_tables: The same as tensors on the device; over the same memory if not staged.
        version: Changes with every insertion.
        num_evicted: Rows that were ever evicted.
        num_restored: How often episodes were loaded or cleared.
    """

    def __init__(self, layout: EpisodicLayout, device: torch.device, *, staged: bool):
        self.layout, self.device, self.is_staged = layout, device, staged
        bytes_for = partial(_bytes_for, layout, device, staged)
        check_room("an episodic buffer", layout.capacity, bytes_for, device)
        self.columns = allocate_columns(
            f"an episodic buffer of {layout.capacity} steps",
            layout.columns,
            device,
            staged=staged,
            allocate=None,
            advice="use a smaller capacity",
        )
        self.rows = self.columns["rows"].tensor
        self.tables = {name: self.columns[name].host for name in _TABLES}
        self.device_tables = {name: self.columns[name].tensor for name in _TABLES}
        self.counters = self.tables["counters"]
        self._table_arrays = (
            self.counters,
            self.tables["episodes"],
            self.tables["starts"],
            self.tables["drawable"],
        )
        self.version = self.num_evicted = self.num_restored = 0
        self._blocks = StagingBlocks(device, "use shorter ones", is_staged=staged)
        self._allocate_staging(0)

    def count(self, name: str) -> int:
        """One of the counters, by its name in `layout`."""
        return int(self.counters[_COUNTER[name]])

    def first_rows(self, count: int, first: int) -> list[slice]:
        """The slices of the ring that `count` rows from `first` on take, in order; one or two."""
        num_rows = self.layout.num_rows
        stop = min(first + count, num_rows)
        rest = first + count - stop
        return [slice(first, stop), slice(0, rest)] if rest else [slice(first, stop)]

    def live_rows(self) -> list[torch.Tensor]:
        """Views of the rows in use, from the oldest to the newest; one or two."""
        slices = self.first_rows(self.count("num_rows"), self.count("first_row"))
        return [self.rows[part] for part in slices]

    def live_lengths(self) -> np.ndarray:
        """int64 (E,), the lengths of the episodes from the oldest to the newest; a copy."""
        slots = self.count("first_episode") + np.arange(self.count("num_episodes"))
        return self.tables["episodes"][slots % self.layout.max_episodes, 1]

    @property
    def staging_bytes(self) -> int:
        """Bytes held for staging."""
        return self._blocks.nbytes

    def reserve(self, num_rows: int) -> None:
        """See to it that `staging` has so many rows that may be written.

        After an insertion it is other memory, whose rows have left for the device earlier.

        Raises:
            BufferMemoryError: Memory is missing; nothing was changed.
        """
        if num_rows > len(self.staging):
            self._allocate_staging(num_rows)
        elif self._is_sent:
            self._take_staging()

    def _allocate_staging(self, num_rows: int) -> None:
        num_words = num_rows * self._words_per_row + len(self.counters) + 4
        self._blocks.reserve("staging an episode", 8 * num_words)
        self._take_staging()

    @property
    def _words_per_row(self) -> int:
        return self.layout.row.num_words + _SPARE_WORDS

    def _take_staging(self) -> None:
        """Let the next block be that where episodes are put together."""
        self._block, self._is_sent = self._blocks.turn(), False
        blocks, width = (self._block.host, self._block.device), self.layout.row.num_words
        self._words, self._device_words = (block.view(torch.int64) for block in blocks)
        num_rows = (len(self._words) - len(self.counters) - 4) // self._words_per_row
        # Behind the words of tables, which never come upon bytes of rows that are in no field.
        self._first_row_at = len(self._words) - num_rows * width
        self.staging = self._words[self._first_row_at :].view(num_rows, width).numpy()
        self.fields = row_views(self.staging, self.layout.row.fields)

    def insert(self, lengths: np.ndarray) -> None:
        """Move episodes from the start of `staging` into the ring; the oldest make room.

        Of more episodes than the buffer holds the newest stay, whole.

        Args:
            lengths: int64 (E,), at least 1 and at most the capacity each; episode after episode
                lies in `staging`, with its last observation as one row more.
        """
        skipped = _count_skipped(lengths, self.layout)
        begin = int((lengths[:skipped] + 1).sum()) if skipped else 0
        kept = lengths[skipped:]
        num_steps = int(kept.sum())
        num_rows = num_steps + len(kept)
        # An episode that is skipped would have outlived all that are in the ring.
        steps = self.layout.capacity if skipped else num_steps
        held = self.count("num_rows")
        evict(*self._table_arrays, steps, len(kept))
        self.num_evicted += held - self.count("num_rows")
        self.counters[_COUNTER["first_episode"]] += skipped
        before = self.counters.copy()
        part = slice(begin, begin + num_rows)
        headers = [self.fields[name][part] for name in _HEADERS]
        file_episodes(*self._table_arrays, kept, *headers)
        self._copy_rows(before, part)
        self.version += 1

    def _copy_rows(self, before: np.ndarray, part: slice) -> None:
        """Copy staged rows, and what `file_episodes` changed in the tables, to the device."""
        width, position = self.layout.row.num_words, self._first_row_at
        begin, end = (position + number * width for number in (part.start, part.stop))
        segments = self._changed_tables(before) if self.is_staged else []
        uploads = []
        for name, where in segments:
            source = torch.from_numpy(self.tables[name][where]).reshape(-1)
            place = slice(position - -(-source.nbytes // 8), position)
            self._words[place].view(source.dtype)[: source.numel()] = source
            uploads.append((self.device_tables[name][where], place))
            position = place.start
        self._block.upload(8 * position, 8 * end)
        block = self._device_words
        rows = block[begin:end].view(-1, width)
        first = (before[0] + before[1]) % self.layout.num_rows
        begin = 0
        for where in self.first_rows(len(rows), int(first)):
            count = where.stop - where.start
            self.rows[where].copy_(rows[begin : begin + count])
            begin += count
        for target, place in uploads:
            values = block[place].view(target.dtype)[: target.numel()]
            target.copy_(values.view(target.shape))
        self._block.release()
        self._is_sent = self.is_staged

    def _changed_tables(self, before: np.ndarray) -> list[tuple[str, slice]]:
        """The parts of the tables that differ since the counters were `before`."""
        changed = [("counters", slice(0, len(self.counters)))]
        for name, first, number in (
            ("starts", "first_start", "num_starts"),
            ("episodes", "first_episode", "num_episodes"),
            ("drawable", "first_drawable", "num_drawable"),
        ):
            size = len(self.tables[name])
            count = self.count(number) - int(before[_COUNTER[number]])
            begin = int(before[_COUNTER[first]] + before[_COUNTER[number]]) % size
            stop = min(begin + count, size)
            parts = [slice(begin, stop), slice(0, begin + count - stop)]
            changed += [(name, where) for where in parts if where.stop > where.start]
        return changed

    def refile(self, lengths: np.ndarray, first_episode: int) -> bool:
        """Rebuild the tables for episodes that were written to the ring from its first row on.

        Args:
            lengths: int64 (E,), which fit into the ring.
            first_episode: Number of the first of them.

        Returns:
            Whether the headers of the rows say the same; if not, the buffer is empty.
        """
        self.wait_for_device()
        self.counters[:] = 0
        self.counters[_COUNTER["first_episode"]] = first_episode
        sizes, begin = np.cumsum(lengths + 1), 0
        is_same = True
        while begin < len(lengths):
            first = int(sizes[begin - 1]) if begin else 0
            limit = first + _REFILED_ROWS
            stop = max(begin + 1, int(np.searchsorted(sizes, limit, side="right")))
            saved = self.rows[first : int(sizes[stop - 1])].cpu().numpy()
            fields = row_views(saved, self.layout.row.fields)
            made = [fields["boundaries"], *(fields[name].copy() for name in _HEADERS[1:])]
            file_episodes(*self._table_arrays, lengths[begin:stop], *made)
            pairs = zip(made[1:], _HEADERS[1:], strict=True)
            is_same &= all(np.array_equal(array, fields[name]) for array, name in pairs)
            begin = stop
        if not is_same:
            self.counters[:] = 0
        for name in _TABLES:
            self.columns[name].upload()
        self.version += 1
        self.num_restored += 1
        return is_same

    def wait_for_device(self) -> None:
        """Wait until the copies of an earlier `refile` have left the tables."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def clear(self) -> None:
        """Forget all episodes; their memory stays."""
        self.wait_for_device()
        self.counters[:] = 0
        self.device_tables["counters"].zero_()
        self.version += 1
        self.num_restored += 1


def _count_skipped(lengths: np.ndarray, layout: EpisodicLayout) -> int:
    """How many of the first episodes would be gone again when the last are in.

    >>> from gymnasium.spaces import Discrete
    >>> from buffers.episodic.layout import plan_episodic
    >>> layout = plan_episodic(10, Discrete(2), Discrete(2), max_episodes=3)
    >>> _count_skipped(np.array([5, 4, 6]), layout), _count_skipped(np.array([1] * 4), layout)
    (1, 1)
    """
    if len(lengths) == 1:
        return 0
    room_behind = layout.capacity - np.cumsum(lengths[::-1])[::-1]
    return max(int((room_behind < 0).sum()), len(lengths) - layout.max_episodes)


def _bytes_for(layout: EpisodicLayout, device: torch.device, staged: bool, capacity: int) -> int:
    """Bytes on the device of a buffer of this capacity, or of a smaller one."""
    episodes = min(capacity, layout.max_episodes)
    columns = layout._replace(capacity=capacity, max_episodes=episodes).columns
    on_host, on_device = spec_bytes(columns, staged)
    return on_device if device.type != "cpu" else on_host + on_device


@njit(nogil=True, cache=True)
def fill_rooms(boundaries, rooms):
    """Write how many steps each step of an episode is away from its bound, in one backward pass.

    The bound of step t is the second next boundary at or after t, else the next, else the last
    step.

    Args:
        boundaries: bool (T,).
        rooms: int32 (T,), written: bound - t.
    """
    last = boundaries.shape[0] - 1
    following, second = -1, -1
    for t in range(last, -1, -1):
        if boundaries[t]:
            second = following
            following = t
        bound = last
        if second >= 0:
            bound = second
        elif following >= 0:
            bound = following
        rooms[t] = bound - t


@njit(nogil=True, cache=True)
def evict(counters, episodes, starts, drawable, num_steps, num_episodes):
    """Drop the oldest episodes until so many steps and episodes more fit."""
    capacity, max_episodes, max_rows = (
        starts.shape[0],
        episodes.shape[0],
        starts.shape[0] + episodes.shape[0],
    )
    while counters[NUM_EPISODES] > 0 and (
        counters[NUM_STEPS] + num_steps > capacity
        or counters[NUM_EPISODES] + num_episodes > max_episodes
    ):
        slot = counters[FIRST_EPISODE] % max_episodes
        length, num_starts = episodes[slot, 1], episodes[slot, 3]
        counters[FIRST_ROW] = (counters[FIRST_ROW] + length + 1) % max_rows
        counters[NUM_ROWS] -= length + 1
        counters[FIRST_EPISODE] += 1
        counters[NUM_EPISODES] -= 1
        counters[NUM_STEPS] -= length
        counters[FIRST_START] = (counters[FIRST_START] + num_starts) % capacity
        counters[NUM_STARTS] -= num_starts
        if num_starts > 0:
            counters[FIRST_DRAWABLE] = (counters[FIRST_DRAWABLE] + 1) % max_episodes
            counters[NUM_DRAWABLE] -= 1


@njit(nogil=True, cache=True)
def file_episodes(
    counters, episodes, starts, drawable, lengths, boundaries, rooms, steps, remaining, bounds
):  # fmt: skip
    """Enter episodes at the end of the tables, for which there is space, and fill their headers.

    Args:
        counters, episodes, starts, drawable: The tables.
        lengths: int64 (E,), steps of each; each takes one row more.
        boundaries: bool (K,), of the rows that are about to be copied to the end of the ring.
        rooms, steps, remaining, bounds: int32 (K,), the headers of these rows, written.
    """
    capacity, max_episodes = starts.shape[0], episodes.shape[0]
    max_rows = capacity + max_episodes
    begin = 0
    for e in range(lengths.shape[0]):
        length = lengths[e]
        row = (counters[FIRST_ROW] + counters[NUM_ROWS]) % max_rows
        slot = (counters[FIRST_EPISODE] + counters[NUM_EPISODES]) % max_episodes
        start = (counters[FIRST_START] + counters[NUM_STARTS]) % capacity
        fill_rooms(boundaries[begin : begin + length], rooms[begin : begin + length])
        rooms[begin + length] = 0
        num_starts = 0
        for t in range(length + 1):
            steps[begin + t] = t
            remaining[begin + t] = length - t
            bounds[begin + t] = t + rooms[begin + t]
            if rooms[begin + t] > 0:
                starts[(start + num_starts) % capacity] = (row + t) % max_rows
                num_starts += 1
        episodes[slot, 0] = row
        episodes[slot, 1] = length
        episodes[slot, 2] = start
        episodes[slot, 3] = num_starts
        if num_starts > 0:
            last = (counters[FIRST_DRAWABLE] + counters[NUM_DRAWABLE]) % max_episodes
            drawable[last] = slot
            counters[NUM_DRAWABLE] += 1
        counters[NUM_ROWS] += length + 1
        counters[NUM_EPISODES] += 1
        counters[NUM_STEPS] += length
        counters[NUM_STARTS] += num_starts
        begin += length + 1
