"""The table of rows that all replay buffers are: its memory, its counts, and the one way into it.

```
#  add(columns, env_ids)
#     |  ColumnReader: shape, dtype, range, finiteness, ids, once                 (core.arguments)
#     v
#  Table.add    rings[r].begun += K      rows that are about to be written can't be drawn any more
#     |         rows[i] = transition     at number % span of their ring
#     |         link of the row before = this row
#     |         rings[r].committed += K  from here on they can be drawn
#     v
#  rows    uint8 (R * span, stride)     | obs actions extras env_ids | next_obs rewards link flags |
#          host memory, a file,         '------- own row -----------'---- last row of a window ----'
#          shared memory, or a device
#  rings   (R,)  begun, committed         begun - capacity <= number < committed can be drawn
#  envs    (N,)  last, is_open            the newest row of each environment
#  kept    uint8 (P, unit)                with observations stored once: next_obs that no row has,
#                                         in slots that `link` leads to, too
#     |
#     v
#  draws    counts and a random stream -> row numbers
#  walks    link -> the last row of a window, its rewards summed up; frames of stacks
#  gather   row numbers -> a batch of columns
```

A link is 0, or the number of the row that follows in the episode, plus one; with observations
stored once it is where the next observation is, plus one: in a row, or behind the rows in a slot of
`kept`. Rows whose add was interrupted are between `committed` and `begun`: nothing leads to them,
and the next add overwrites them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from buffers.core.arguments import Transitions
from buffers.core.compiling import njit
from buffers.core.memory import zeroed_bytes
from buffers.core.rows import Field, row_views
from buffers.replay.once import Chosen, Once, Placed, commit
from buffers.replay.plan import OLDER, Plan

__all__ = ["ENVS", "RINGS", "Memory", "Table"]

RINGS = np.dtype([("begun", np.int64), ("committed", np.int64)])
ENVS = np.dtype([("last", np.int64), ("is_open", np.bool_)], align=True)
_MANY = 256  # rows from which on an item of a column is copied as one piece
_LINKS = ("link", OLDER)  # fields that are written when rows are committed
_NO_ROWS = np.zeros(0, np.int64)


class Memory(NamedTuple):
    """What a table lies in."""

    rows: torch.Tensor  # uint8 (num_rows, stride)
    rings: np.ndarray  # RINGS (R,)
    envs: np.ndarray  # ENVS (N,)


class Table:
    """Rows, rings, environments.

    Args:
        plan: What there is in a row, and how many there are.
        device: Where the rows are.
        is_staged: The rows are written by operations of torch, as on devices.
        memory: Of somebody else, a file or other processes; None for own.
        first_row: Of these rows in a table of several writers, which links are for.
        first_env: Of these environments among those of all writers.
        order: Called between what other processes must see in this order; None without any.

    Attributes:
        rows: uint8 (num_rows, stride) on the device.
        columns: Views (num_rows, *shape) of the fields, by path, as NumPy arrays; none if staged.
        begun, committed: int64 (R,), views of `rings`.
        links: int32 (num_rows,); of rows that are on a device, what the host has given them.
        older: int32 (num_rows, F - 1), the same of the units of older frames of stacks.
        row_envs: int32 (num_rows,), the same of env ids, where sequences ask for them.
        once: Observations stored once, or None.
        is_plain: Rows follow on nothing, in a single ring.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        *,
        is_staged: bool = False,
        memory: Memory | None = None,
        first_row: int = 0,
        first_env: int = 0,
        order: Callable[[], None] | None = None,
    ):
        self.plan, self.device, self.is_staged = plan, device, is_staged
        self._first_row, self._first_env = first_row, first_env
        fields, frames = plan.layout.fields, plan.layout.frames
        shape = plan.num_rows, plan.layout.stride
        if memory is None:
            is_host = device.type == "cpu"
            rows = (
                zeroed_bytes(math.prod(shape)).view(shape)
                if is_host
                else torch.zeros(shape, dtype=torch.uint8, device=device)
            )
            rings, envs = np.zeros(plan.num_rings, RINGS), np.zeros(plan.num_envs, ENVS)
            memory = Memory(rows, rings, envs)
        self.rows, self.rings, self.envs = memory
        self._words = self.rows.view(torch.int64)
        self.columns: dict[str, np.ndarray] = {}
        if not is_staged:
            words = self._pages = self._words.numpy()
            self.columns, self._items = row_views(words, fields), _items_of(words, fields)
            self._written = {p: column for p, column in self.columns.items() if p not in _LINKS}
        self.begun, self.committed = self.rings["begun"], self.rings["committed"]
        # Of the first ring as Python's numbers, which take less time than those of NumPy.
        self._counts = self.rings.view(np.uint8)[:16].data.cast("q")  # begun, committed
        self.once = Once(plan, device) if plan.is_once else None

        def mirror(path: str, is_needed: bool, *shape: int) -> np.ndarray:
            is_own = is_needed and path not in self.columns
            own = np.zeros((plan.num_rows if is_own else 0, *shape), np.int32)
            return self.columns.get(path, own)

        self.links = mirror("link", plan.is_linked)
        self.older = mirror(OLDER, frames is not None, frames.num_frames - 1 if frames else 0)
        self.row_envs = mirror("env_ids", plan.has_sequences)
        self._counts_there = torch.zeros((2, plan.num_rings), dtype=torch.int64, device=device)
        self._is_stale = False  # what is on the device was not brought up to date
        self.is_plain = plan.num_rings == 1 and not plan.is_linked
        self._is_unsure = plan.num_rings > 1 or order is not None  # by the first ring's count alone
        self._envs_per_ring = plan.num_envs // plan.num_rings if plan.num_envs else 1
        self._order = order or (lambda: None)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes held by what they are for."""
        state = self.rings.nbytes + self.envs.nbytes
        state += self.links.nbytes + self.older.nbytes if self.is_staged else 0
        found = {"rows": self.rows.nbytes, "state": state}
        if self.once is not None:
            found["frames" if self.plan.layout.frames is not None else "kept"] = self.once.nbytes
        return found

    # What is there.

    def live(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers that can be drawn, from .. to, int64 (R,) each."""
        end = self.committed.copy()
        self._order()
        return np.minimum(np.maximum(self.begun - self.plan.capacity, 0), end), end

    def live_of_one(self) -> tuple[int, int]:
        """As `live`, of the only ring, as Python's numbers."""
        begun, end = self._counts
        return min(max(begun - self.plan.capacity, 0), end), end

    @property
    def is_empty(self) -> bool:
        """Whether that may be so: the number of transitions that can be drawn is 0."""
        return not self._counts[1] or self._is_unsure

    def __len__(self) -> int:
        begin, end = self.live()
        return int((end - begin).sum())

    @property
    def num_added(self) -> int:
        """Transitions ever added."""
        return int(self.committed.sum())

    def oldest_first(self) -> np.ndarray:
        """int64, the rows that hold transitions, ring by ring from the oldest to the newest."""
        found = [
            ring * self.plan.span + np.arange(begin, end) % self.plan.span
            for ring, (begin, end) in enumerate(zip(*self.live(), strict=True))
        ]
        return np.concatenate(found)

    def numbers_of(self, rows: np.ndarray, committed: np.ndarray | None = None) -> np.ndarray:
        """The newest committed number that lies in each row int64 (K,); negative if there is none.

        Those of rows that are being written are of what they held before.
        """
        rings, places = np.divmod(rows, self.plan.span)
        newest = (self.committed if committed is None else committed)[rings] - 1
        return newest - (newest - places) % self.plan.span

    def are_live(self, rows: np.ndarray) -> np.ndarray:
        """Whether rows int64 (K,), which exist, hold transitions that can be drawn."""
        begin, _ = self.live()
        return self.numbers_of(rows) >= begin[rows // self.plan.span]

    def are_there(self, rows: np.ndarray, committed: np.ndarray | None = None) -> np.ndarray:
        """Whether what rows int64 (K,) held last, when so much was committed, is in them still."""
        oldest = np.maximum(self.begun - self.plan.span, 0)
        return self.numbers_of(rows, committed) >= oldest[rows // self.plan.span]

    def were_whole(self, rows: np.ndarray, committed: np.ndarray) -> bool:
        """Whether rows int64 (K,), just read, were not written meanwhile by another process.

        `committed` int64 (R,) is a copy from before they were drawn: what has come since may lie in
        them whole, but not have been whole while they were read.
        """
        self._order()
        return bool(self.are_there(rows, committed).all())

    # What the device knows.

    def live_there(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As `live`, on the device, which does not wait for it."""
        if self._is_stale:
            self.mend()
            self.push()
        begin, end = self._counts_there
        return begin, end

    def push(self, rows: np.ndarray | None = None) -> None:
        """Let the device know the links of rows int64 (K,), or of all, and what can be drawn."""
        if not self.is_staged:
            return
        words = self.rows.view(torch.int32)
        for path, values in (("link", self.links), (OLDER, self.older)):
            if values.size and (rows is None or len(rows)):
                begin, width = self.plan.layout.fields[path].offset // 4, values[0].size
                column, values = words[:, begin : begin + width], values.reshape(-1, width)
                if rows is None:
                    column.copy_(torch.from_numpy(values))
                else:
                    where = torch.from_numpy(rows).to(self.device)
                    column.index_copy_(0, where, torch.from_numpy(values[rows]).to(self.device))
        self._counts_there.copy_(torch.from_numpy(np.stack(self.live())))
        self._is_stale = False

    # What comes in.

    def add(
        self,
        arrays: Mapping[str, np.ndarray],
        env_ids: np.ndarray,
        stops: np.ndarray | None = None,
        cuts: np.ndarray | None = None,
    ) -> None:
        """Write checked `Transitions`; unless the table is plain no more than each ring has rows.

        Raises:
            BufferMemoryError: There is no memory for more observations beside the rows; nothing was
                changed.
            BufferMisuseError: A stack does not go on from the one before it; nothing was changed.
        """
        count = len(arrays["rewards"])
        for path, array in arrays.items() if not self.is_staged else ():
            if array.base is not None and np.may_share_memory(array, self._pages):
                arrays = {**arrays, path: array.copy()}  # a view of rows, which writing changes
        if "env_ids" in self.plan.layout.fields:
            arrays = {**arrays, "env_ids": self._ids(env_ids, count) + self._first_env}
        if self.is_plain:
            self._append(arrays, count)
        elif count:
            self._follow(arrays, self._place(arrays, env_ids, stops, cuts))
        elif cuts is not None:
            self.cut(cuts)

    def pieces(self, read: Transitions, limit: int) -> Iterator[Transitions]:
        """Parts of `Transitions` of at most so many rows, one at least, for `add` one by one.

        Raises:
            BufferMisuseError: A stack does not go on from the one before it.
        """
        arrays, ids, stops, cuts = read
        count, frames = len(arrays["rewards"]), self.plan.layout.frames
        if count <= limit:
            yield read
            return
        # As a piece overwrites what those after it may be views of, also of staged rows.
        arrays = {path: x if x.base is None else x.copy() for path, x in arrays.items()}
        ids = np.array(self._ids(ids, count) if self.plan.num_envs else ids)
        if self.once is not None and frames is not None:
            self.once.complete(frames, arrays, self._place(arrays, ids, stops, cuts))
        for begin in range(0, count, limit):
            part = slice(begin, begin + limit)
            columns = {path: array[part] for path, array in arrays.items()}
            of_stops = None if stops is None else stops[part]
            yield columns, ids[part], of_stops, None if begin else cuts

    def cut(self, env_ids: np.ndarray) -> None:
        """Let the next rows of env_ids int64 (K,) begin new episodes."""
        self.envs["is_open"][env_ids] = False

    def _ids(self, env_ids: np.ndarray, count: int) -> np.ndarray:
        return env_ids if len(env_ids) else np.arange(count) % self.plan.num_envs

    def _append(self, arrays: Mapping[str, np.ndarray], count: int) -> None:
        """Write rows that follow on nothing behind the others of the only ring."""
        if not count:
            return
        span, counts = self.plan.span, self._counts
        start = counts[1]
        end = start + count
        if count > span:
            arrays = {path: array[-span:] for path, array in arrays.items()}
            start, count = end - span, span
        self._is_stale = self.is_staged
        counts[0] = max(counts[0], end)
        self._order()
        first = start % span
        is_whole = first + count <= span and not self.is_staged
        rows = slice(first, first + count) if is_whole else (first + np.arange(count)) % span
        self._write(arrays, rows)
        self._order()
        counts[1] = end
        self.push(_NO_ROWS)

    def _place(
        self,
        arrays: Mapping[str, np.ndarray],
        env_ids: np.ndarray,
        stops: np.ndarray | None,
        cuts: np.ndarray | None,
    ) -> Placed:
        """Find rows for transitions, and the rows that they follow; changes nothing."""
        count = len(arrays["rewards"])
        is_over = arrays["terminations"] | arrays["truncations"]
        is_over = is_over if stops is None else is_over | stops
        ids, cuts = np.array(self._ids(env_ids, count)), _NO_ROWS if cuts is None else cuts
        ends, envs = self.committed.copy(), self.envs.copy()
        found, flags = np.empty((3, count), np.int64), np.empty((3, count), np.bool_)
        sizes = self._envs_per_ring, self.plan.span, self.plan.max_gap
        place(ids, is_over, cuts, sizes, self.begun, envs, ends, (found, flags))
        return Placed(ids, *found, *flags, envs, ends)

    def _follow(self, arrays: Mapping[str, np.ndarray], placed: Placed) -> None:
        """Write rows that follow on others, or into several rings."""
        once, chosen = self.once, None
        if once is not None:
            chosen = once.choose(arrays, placed, self.older)
            arrays = {**arrays, **chosen.newest}
        elif self.plan.is_linked:
            self.mend()
        self._is_stale = self.is_staged
        np.maximum(self.begun, placed.ends, out=self.begun)
        self._order()
        if once is not None and chosen is not None:
            once.write(chosen)
        self._write(arrays, placed.rows)
        if self.is_staged and len(self.row_envs):
            self.row_envs[placed.rows] = placed.ids
        self._order()
        self._commit(placed, chosen)
        self.push(np.concatenate([placed.rows, placed.before_rows[placed.before_rows >= 0]]))

    def _write(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray | slice) -> None:
        """Write columns (K, ...) into distinct rows int64 (K,), or a slice of them; no links."""
        if not self.is_staged:
            is_many = len(arrays["rewards"]) >= _MANY
            write_columns(self._items if is_many else self._written, arrays, rows)
            return
        where = torch.from_numpy(rows).to(self.device)
        packed = np.zeros((len(where), self.plan.layout.stride // 8), np.int64)
        write_columns(_items_of(packed, self.plan.layout.fields), arrays, slice(None))
        self._words.index_copy_(0, where, torch.from_numpy(packed).to(self.device))

    def _commit(self, placed: Placed, chosen: Chosen | None) -> None:
        """Let rows that were written count."""
        if self.once is not None and chosen is not None:
            table = self.links, self.older, self.envs, self.committed
            self.once.commit(placed, chosen, table)
            return
        if self.plan.is_linked:
            rows, is_inner = placed.rows, placed.is_joined & (placed.previous >= 0)
            codes, is_outer = np.zeros(len(rows), np.int32), placed.is_joined & ~is_inner
            codes[placed.previous[is_inner]] = rows[is_inner] + 1 + self._first_row
            self.links[rows] = codes
            self.links[placed.before_rows[is_outer]] = rows[is_outer] + 1 + self._first_row
            self._order()
        commit(placed.envs, placed.ends, self.envs, self.committed)

    def mend(self, *, all_rows: bool = False) -> None:
        """Let no row lead to one that was never committed, after an add that was torn.

        Such a link is in a row that is the newest of its environment: environments are brought up
        to date behind all else. With `all_rows` nobody knows which these are.
        """
        if self.once is not None or not len(self.links) or not (self.begun > self.committed).any():
            return
        span, rows = self.plan.span, np.arange(self.plan.num_rows)
        if not all_rows:
            rings = np.arange(len(self.envs)) // self._envs_per_ring
            rows = rings * span + (self.envs["last"] - 1) % span
        rows = rows[self.are_there(rows)]
        links = self.links[rows] - 1 - self._first_row
        led = np.where((links >= 0) & (links < self.plan.num_rows), links, rows)
        wrong = (links >= 0) & (self.numbers_of(led) <= self.numbers_of(rows))
        self.links[rows[wrong]] = 0
        self._is_stale = self.is_staged


def _items_of(words: np.ndarray, fields: Mapping[str, Field]) -> dict[str, np.ndarray]:
    """Columns of rows int64 (K, words) but links, an item of several numbers being one of bytes.

    NumPy copies such an item by one call, in two thirds of the time that its numbers take.
    """
    found = row_views(words, {path: fields[path] for path in fields if path not in _LINKS})
    for path, field in fields.items():
        if path in found and field.shape and field.nbytes:
            kind, strides = np.dtype((np.void, field.nbytes)), words.strides[:1]
            found[path] = np.ndarray(len(words), kind, words, field.offset, strides)
    return found


def write_columns(
    columns: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], rows: np.ndarray | slice
) -> None:
    """Write arrays (K, ...) by path into rows, int64 (K,) or a slice, of columns."""
    for path, column in columns.items():
        array = arrays[path]
        if array.ndim > column.ndim:  # one of `_items_of`
            array = np.ascontiguousarray(array).reshape(len(array), -1).view(column.dtype)[:, 0]
        column[rows] = array


@njit(nogil=True, cache=True)
def place(ids, is_over, cuts, sizes, begun, envs, ends, written):
    """Find rows for transitions, and the rows that they follow.

    `ids` int64 (K,) and `is_over` bool (K,) are those of rows, `cuts` int64 (C,) of environments
    that are cut before; `sizes` environments and rows of a ring, and `max_gap`. Brought up to date
    are ENVS (N,) and `ends` int64 (R,), transitions ever added to each ring, of which `begun` were
    begun. `written` int64 (3, K) and bool (3, K) are `rows` to `is_near` of `Placed`.
    """
    (per_ring, span, max_gap), (found, flags) = sizes, written
    newest, count = np.full(envs.shape[0], -1), ids.shape[0]
    numbers, befores = np.empty(count, np.int64), np.empty(count, np.int64)
    for env in cuts:
        envs[env]["is_open"] = False
    for i in range(count):
        env = ids[i]
        ring = env // per_ring
        number, before = ends[ring], envs[env]["last"] - 1
        numbers[i], befores[i] = number, before
        found[0, i] = ring * span + number % span
        found[1, i] = ring * span + before % span if before >= 0 else -1
        found[2, i], flags[0, i] = newest[env], envs[env]["is_open"]
        envs[env]["last"], envs[env]["is_open"] = number + 1, not is_over[i]
        newest[env] = i
        ends[ring] = number + 1
    for i in range(count):
        ring = ids[i] // per_ring
        first = max(max(ends[ring], begun[ring]) - span, 0)
        flags[1, i] = flags[0, i] and befores[i] >= first
        flags[2, i] = flags[1, i] and numbers[i] - befores[i] <= max_gap
