"""The table of rows behind every replay buffer: its memory, its counters, and the only way in.

```
#  add(columns, env_ids)
#     |  ColumnReader (core.arguments) checks shapes, dtypes, ranges, finite rewards and ids
#     v
#  Table.add, in this order:
#     |  rings[r].begun += K       the rows that are overwritten next can't be drawn any more
#     |  rows[i] = transition      i = r * span + number % span
#     |  rings[r].committed += K   the new rows can be drawn
#     |  link of the row before    now leads to the new row
#     v
#  Table owns  rows    uint8 (R * span, stride), in host memory, a file, shared memory or a device
#     |                | obs actions extras env_ids | next_obs rewards link flags |
#     |                '-------- drawn row ---------'----- last row of window ----'
#     |        rings   (R,) begun, committed: can be drawn if begun - capacity <= number < committed
#     |        envs    (N,) last, is_open: the newest row of each env; whether its episode goes on
#     |        once    `units`, if observations are stored once: the next_obs that no row has
#     v
#  draws.py    begun, committed, generator -> row numbers (B,); along `link` -> last rows of windows
#  batches.py  Reader, gather: row numbers -> columns of a batch
```

A link is 0, or 1 + the row that follows in the episode. With observations stored once, it is 1 +
the unit of the next observation: a row, or a slot of `once`; slot numbers begin behind the rows. An
interrupted add leaves rows between `committed` and `begun`: no link leads to them, and the next add
overwrites them.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.arguments import Transitions
from buffers.core.memory import zeroed_bytes
from buffers.core.rows import Field, row_views, view_fields
from buffers.replay.once import Once, Placed
from buffers.replay.plan import OLDER, Plan

__all__ = ["ENVS", "RINGS", "Memory", "Table", "fence", "wait_for"]

RINGS = np.dtype([("begun", np.int64), ("committed", np.int64)])
ENVS = np.dtype([("last", np.int64), ("is_open", np.bool_)], align=True)
_MANY = 256  # from this many rows on, each item is copied as one piece
_LINKS = ("link", OLDER)  # fields that `_commit` writes
_PAUSE = 0.001  # seconds between two polls
_fence = threading.Lock()


def fence() -> None:
    """Order memory accesses: other cores see those before the call before those after it."""
    with _fence:  # releasing a lock and then acquiring it is a full memory barrier
        pass
    with _fence:
        pass


def wait_for(is_ready: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    """Poll `is_ready`, at least once; raise TimeoutError(why()) after `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_ready():
        if time.monotonic() >= deadline:
            raise TimeoutError(why())
        time.sleep(_PAUSE)


class Memory(NamedTuple):
    """The memory of a table."""

    rows: torch.Tensor  # uint8 (num_rows, stride)
    rings: np.ndarray  # RINGS (R,)
    envs: np.ndarray  # ENVS (N,)


class Table:
    """Rows, rings and environments; one code path writes adds, by NumPy on hosts, torch on devices.

    Args:
        is_staged: Use operations of torch for everything, as on devices.
        memory: Memory to use, of a file or shared with other processes; None allocates it.
        first_row: With several writers: number of the first of these rows in the whole table.
        first_env: With several writers: number of the first of these environments among all.
        order: Memory barrier between writes that other processes must see in order; None for none.

    Attributes:
        rows: uint8 (num_rows, stride) on the device.
        columns: Views (num_rows, *shape) of the fields, by path, as NumPy arrays; empty if staged.
        begun, committed: int64 (R,), views of `rings`, on the host.
        once: Observations stored once, or None.
        is_plain: A single ring whose rows have no links.
        is_captured: A CUDA graph contains an add, so the host does not know the number of rows.
    """

    _begun: Any  # NumPy arrays, or tensors if staged; the next four too
    _committed: Any
    _last: Any
    _is_open: Any
    _links: Any
    _older: Any

    def __init__(
        self, plan: Plan, device: torch.device, *, is_staged: bool,
        memory: Memory | None = None, first_row: int = 0, first_env: int = 0,
        order: Callable[[], None] | None = None,
    ):  # fmt: skip
        self.plan, self.device, self.is_staged = plan, device, is_staged
        self._first_row, self._first_env = first_row, first_env
        fields, shape = plan.layout.fields, (plan.num_rows, plan.layout.stride)
        if memory is None:
            if device.type == "cpu":
                rows = zeroed_bytes(math.prod(shape)).view(shape)
            else:
                rows = torch.zeros(shape, dtype=torch.uint8, device=device)
            memory = Memory(rows, np.zeros(plan.num_rings, RINGS), np.zeros(plan.num_envs, ENVS))
        self.rows, self.rings, envs = memory
        self.begun, self.committed = self.rings["begun"], self.rings["committed"]
        self._begun, self._committed = self.begun, self.committed
        self._last, self._is_open = envs["last"], envs["is_open"]
        self.columns: dict[str, np.ndarray] = {}
        if is_staged:
            self._xp, self._arange = torch, functools.partial(torch.arange, device=device)
            own = self._begun, self._committed, self._last, self._is_open
            self._begun, self._committed, self._last, self._is_open = map(self._there, own)
            columns: Mapping[str, Any] = view_fields(self.rows, fields)
        else:
            self._xp, self._arange = np, np.arange
            self._pages = self.rows.view(torch.int64).numpy()
            columns = self.columns = row_views(self._pages, fields)
            self._items = _items_of(self._pages, fields)
        self._written = {path: c for path, c in columns.items() if path not in _LINKS}
        none = np.zeros((plan.num_rows if plan.is_linked else 0, 0), np.int32)
        self._links, self._older = columns.get("link"), columns.get(OLDER, self._there(none))
        # Counts of the first ring as Python ints, which are faster to read than NumPy scalars.
        self._counts = self.rings.view(np.uint8)[:16].data.cast("q")  # begun, committed
        self.once = Once(plan, device, self._xp) if plan.is_once else None
        self.is_plain = plan.num_rings == 1 and not plan.is_linked
        self._envs_per_ring = plan.num_envs // plan.num_rings if plan.num_envs else 1
        self._order = order or (lambda: None)
        self._is_torn = self.is_captured = False
        number = plan.num_rows if is_staged and plan.has_sequences else 0
        self._mirrors = {path: np.zeros(number, np.int32) for path in ("link", "env_ids")}
        self._changed: list[Any] = []  # rows whose mirrored values are out of date

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes held, by purpose."""
        found = {"rows": self.rows.nbytes, "state": 16 * (len(self.rings) + len(self._last))}
        if self.once is not None:
            found["frames" if self.plan.layout.frames is not None else "kept"] = self.once.nbytes
        return found

    # Reading.

    def live(self) -> tuple[np.ndarray, np.ndarray]:
        """First number that can be drawn, and the one after the last, int64 (R,) each."""
        end = self.committed.copy()  # before `begun`: a writer advances them in the other order
        self._order()
        return np.minimum(np.maximum(self.begun - self.plan.capacity, 0), end), end

    def live_of_one(self) -> tuple[int, int]:
        """Return `live` of a single ring as Python ints."""
        begun, end = self._counts
        return min(max(begun - self.plan.capacity, 0), end), end

    def live_there(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `live` as tensors on the device, without waiting for it."""
        end = self._committed
        return (self._begun - self.plan.capacity).clip(0).minimum(end), end

    @property
    def is_empty(self) -> bool:
        """Whether it is possible that no transition can be drawn; `len` is exact."""
        begin, end = self.live_of_one()  # rows in the first ring can be drawn
        return begin == end

    def __len__(self) -> int:
        begin, end = self.live()
        return int((end - begin).sum())

    @property
    def num_added(self) -> int:
        """Transitions ever added."""
        return int(self.committed.sum())

    def oldest_first(self) -> np.ndarray:
        """Rows that hold transitions, int64, ring by ring, from the oldest to the newest."""
        span, lives = self.plan.span, zip(*self.live(), strict=True)
        return np.concatenate([
            ring * span + np.arange(begin, end) % span for ring, (begin, end) in enumerate(lives)
        ])  # fmt: skip

    def numbers_of(self, rows: np.ndarray, committed: np.ndarray | None = None) -> np.ndarray:
        """The newest committed number in each row int64 (K,); negative if there is none.

        For a row that is being overwritten it is the number of the old transition.
        """
        rings, places = np.divmod(rows, self.plan.span)
        newest = (self.committed if committed is None else committed)[rings] - 1
        return newest - (newest - places) % self.plan.span

    def are_live(self, rows: np.ndarray) -> np.ndarray:
        """Whether existing rows int64 (K,) hold transitions that can be drawn."""
        begin, _ = self.live()
        return self.numbers_of(rows) >= begin[rows // self.plan.span]

    def were_whole(self, rows: np.ndarray, committed: np.ndarray) -> bool:
        """Whether no other process has overwritten rows int64 (K,) while they were read.

        `committed` int64 (R,) must be a copy from before the draw: a transition committed since may
        be whole now, but was not while its row was read.
        """
        self._order()
        return bool(self._are_there(rows, committed).all())

    def _are_there(self, rows: np.ndarray, committed: np.ndarray) -> np.ndarray:
        """Whether rows int64 (K,) still hold what they held when `committed` was read."""
        oldest = np.maximum(self.begun - self.plan.span, 0)
        return self.numbers_of(rows, committed) >= oldest[rows // self.plan.span]

    @property
    def links(self) -> np.ndarray:
        """Links of all rows, int32 (num_rows,), on the host."""
        return self._mirror("link")

    @property
    def row_envs(self) -> np.ndarray:
        """Env ids of all rows, int32 (num_rows,), on the host."""
        return self._mirror("env_ids")

    def _mirror(self, path: str) -> np.ndarray:
        """A column on the host; from a device, only rows that have changed are fetched."""
        columns = {"link": self._links, "env_ids": self._written["env_ids"]}
        if not self.is_staged:
            return columns[path]
        if self._changed:
            rows = torch.concatenate(self._changed)
            self._changed.clear()
            for name, column in columns.items():
                self._mirrors[name][_on_host(rows)] = _on_host(column[rows])
        return self._mirrors[path]

    @property
    def envs(self) -> dict[str, np.ndarray]:
        """`last` int64 (N,), 1 + the number of the newest row, and `is_open` bool (N,)."""
        return {"last": _on_host(self._last), "is_open": _on_host(self._is_open)}

    def kept_links(self) -> tuple[np.ndarray, np.ndarray]:
        """Links and older frames' units of all rows; 0 where the transition is gone."""
        is_there = self._are_there(np.arange(self.plan.num_rows), self.committed)
        links, older = _on_host(self._links), _on_host(self._older)
        return np.where(is_there, links, 0), np.where(is_there[:, None], older, 0)

    # Writing.

    def add(
        self, arrays: Mapping[str, Any], env_ids: np.ndarray, stops: np.ndarray | None = None,
        cuts: np.ndarray | None = None,
    ) -> Any:  # fmt: skip
        """Write checked `Transitions`; at most `span` rows per ring, unless the table is plain.

        If staged, columns of whole steps may be tensors on the device, and the rows int64 (K,) are
        returned there. Raises BufferMemoryError if `once` needs more memory than there is; nothing
        was changed then.
        """
        if self.is_staged:
            arrays = {path: self._there(array) for path, array in arrays.items()}
        else:
            for path, array in arrays.items():
                if array.base is not None and np.may_share_memory(array, self._pages):
                    arrays = {**arrays, path: array.copy()}  # a view of rows, about to change
        self.recover()
        if self.is_plain and not self.is_staged:
            return self._append(arrays, env_ids, len(arrays["rewards"]))
        if not len(arrays["rewards"]):
            return None if cuts is None else self.cut(cuts)
        placed, counts = self._place(arrays, env_ids, stops, cuts)
        if "env_ids" in self._written:
            arrays = {**arrays, "env_ids": self._int32(placed.ids + self._first_env)}
        chosen = None
        if self.once is not None:
            chosen, columns = self.once.choose(arrays, placed, self._older)
            arrays = {**arrays, **columns}
        if cuts is not None:
            self.cut(cuts)
        # First `begun`: readers must know which rows change before the first byte is written.
        self._begun[...] = self._xp.maximum(self._begun, placed.ends)
        is_counted = self.is_staged and not self.is_captured
        if is_counted:
            np.maximum(self.begun, self.committed + counts, out=self.begun)
        self._order()
        self._write(arrays, placed.rows)
        self._order()
        self._is_torn = True  # until links, counts and slots agree again
        self._commit(placed, chosen)
        if is_counted:
            self.committed += counts
        self._is_torn = False
        return placed.rows

    def _there(self, array: Any) -> Any:
        """The array itself; if staged, a copy on the device."""
        if not self.is_staged or isinstance(array, torch.Tensor):
            return array
        return torch.from_numpy(np.array(array, order="C")).to(self.device)

    def _int32(self, values: Any) -> Any:
        return values.astype(np.int32) if self._xp is np else values.int()

    def pieces(self, read: Transitions, limit: int) -> Iterator[Transitions]:
        """Split `Transitions` into parts of at most `limit` rows, at least one, for `add`."""
        arrays, ids, stops, cuts = read
        count = len(arrays["rewards"])
        if count <= limit:
            yield read
            return
        # Later pieces may be views of rows that an earlier piece overwrites, also if staged.
        arrays = {path: x if x.base is None else x.copy() for path, x in arrays.items()}
        ids = np.array(self._ids(ids, count) if self.plan.num_envs else ids)
        for begin in range(0, count, limit):
            part = slice(begin, begin + limit)
            columns = {path: array[part] for path, array in arrays.items()}
            of_stops = None if stops is None else stops[part]
            yield columns, ids[part], of_stops, None if begin else cuts

    def cut(self, env_ids: np.ndarray) -> None:
        """Begin new episodes with the next rows of env_ids int64 (K,)."""
        self._is_open[self._there(env_ids)] = False

    def _ids(self, env_ids: np.ndarray, count: int) -> np.ndarray:
        return env_ids if len(env_ids) else np.arange(count) % max(1, self.plan.num_envs)

    def _append(self, arrays: Mapping[str, np.ndarray], env_ids: np.ndarray, count: int) -> None:
        """Append rows without links to the only ring."""
        span, counts = self.plan.span, self._counts
        if "env_ids" in self._written:
            arrays = {**arrays, "env_ids": self._ids(env_ids, count) + self._first_env}
        for begin in range(0, count, span):
            size = min(span, count - begin)
            piece = arrays
            if count > span:
                piece = {path: array[begin : begin + size] for path, array in arrays.items()}
            start, end = counts[1], counts[1] + size
            counts[0] = max(counts[0], end)  # larger after an interrupted add
            self._order()
            first = start % span
            is_whole = first + size <= span
            rows = slice(first, first + size) if is_whole else (first + np.arange(size)) % span
            self._write(piece, rows)
            self._order()
            counts[1] = end

    def _place(
        self, arrays: Mapping[str, Any], env_ids: np.ndarray, stops: np.ndarray | None,
        cuts: np.ndarray | None,
    ) -> tuple[Placed, Any]:  # fmt: skip
        """Find the rows of transitions, and the rows that they follow; changes nothing.

        Returns:
            `Placed`, and the rows added to each ring: int64 (R,), or one int for every ring.
        """
        xp, span, count = self._xp, self.plan.span, len(arrays["rewards"])
        there, places = self._there, self._arange(count)
        counts: Any = count // self.plan.num_rings  # of whole steps
        ids, added = places % max(1, self.plan.num_envs), counts
        if len(env_ids):
            counts = np.bincount(env_ids // self._envs_per_ring, minlength=self.plan.num_rings)
            ids, added = there(env_ids), there(counts)
        is_over, opens = arrays["terminations"] | arrays["truncations"], self._is_open
        is_over = is_over if stops is None else is_over | there(stops)
        if cuts is not None:
            opens = opens | False  # a copy
            opens[there(cuts)] = False
        # A stable sort by env puts each row behind the one that it follows in this add.
        options: Any = {"stable": True} if xp is torch else {"kind": "stable"}
        is_step = not len(env_ids) and count == self.plan.num_envs
        rings = ids // self._envs_per_ring
        previous, following, newest = places * 0 - 1, places * 0 - 1, places
        ranks = places if self.plan.num_rings == 1 else ids % self._envs_per_ring  # in their rings
        if not is_step:  # in a single step each env is there once
            order = xp.argsort(ids, **options)
            in_order = ids[order]
            is_same = in_order[1:] == in_order[:-1]
            previous[order[1:]] = xp.where(is_same, order[:-1], -1)
            following[order[:-1]] = xp.where(is_same, order[1:], -1)
            newest = order[xp.searchsorted(in_order, ids, side="right") - 1]
        if self.plan.num_rings > 1 and not is_step:
            order = xp.argsort(rings, **options)
            ranks = places * 0
            ranks[order] = places - xp.searchsorted(rings[order], rings[order])
        numbers, ends = self._committed[rings] + ranks, self._committed + added
        at_first = previous < 0
        if not len(self._last):  # envs are not told apart
            before, opens_of = places * 0 - 1, at_first & False
        else:
            before = xp.where(at_first, self._last[ids] - 1, numbers[previous])
            opens_of = xp.where(at_first, opens[ids], ~is_over[previous])
        oldest = (xp.maximum(ends, self._begun) - span).clip(0)[rings]  # not overwritten
        is_joined = opens_of & (before >= oldest)
        is_near = is_joined & (numbers - before <= self.plan.max_gap)
        rows, before_rows = rings * span + numbers % span, rings * span + before % span
        return Placed(
            ids, numbers, rows, before_rows, previous, following, newest, is_over, opens_of,
            is_joined, is_near, ends,
        ), counts  # fmt: skip

    def _write(self, arrays: Mapping[str, Any], rows: Any) -> None:
        """Write columns (K, ...) into distinct rows, int64 (K,) or a slice, without links."""
        if self.is_staged or len(arrays["rewards"]) >= _MANY:
            return write_columns(self._written if self.is_staged else self._items, arrays, rows)
        for path, column in self._written.items():
            column[rows] = arrays[path]

    def _commit(self, placed: Placed, chosen: Any) -> None:
        """Commit written rows: first their links, then the counts, then links of the rows before.

        In this order, a link always leads to a committed row.
        """
        xp, rows, links, first = self._xp, placed.rows, self._links, self._first_row + 1
        if links is None:
            self._committed[...] = placed.ends
        else:
            freed: Any = None
            if self.once is None:
                is_joined = placed.is_joined
                is_followed = (placed.following >= 0) & is_joined[placed.following]
                codes = xp.where(is_followed, rows[placed.following] + first, 0)
            else:
                is_joined, codes = chosen.is_joined, chosen.codes
                freed = self.once.let_go(placed, chosen, links, self._older)
                self._older[rows] = chosen.older
            links[rows] = self._int32(codes)
            self._order()
            self._committed[...] = placed.ends
            is_outer = is_joined & (placed.previous < 0)
            targets = xp.where(is_outer, placed.before_rows, rows)
            links[targets] = self._int32(xp.where(is_outer, rows + first, codes))
            if len(self._mirrors["link"]):
                self._changed += [rows, targets]
            if self.once is not None:
                self.once.commit(placed, chosen, *freed)
        if len(self._last):
            self._last[placed.ids] = placed.numbers[placed.newest] + 1
            self._is_open[placed.ids] = ~placed.is_over[placed.newest]

    def recover(self) -> None:
        """Repair what an interrupted `_commit` left: close all episodes, recount free slots."""
        if self._is_torn:
            self._is_open[...] = False
            if self.is_staged:
                self.take_counts()
            self._recount()
            self._is_torn = False

    def _recount(self, order: np.ndarray | None = None) -> None:
        """Recount the free slots; see `Once.recount`."""
        if self.once is not None:
            links, older = self.kept_links()
            self._links[...], self._older[...] = self._there(links), self._there(older)
            self.once.recount(links, older, order)

    def take_counts(self) -> None:
        """Copy the counts from the device; waits for it."""
        self.begun[...], self.committed[...] = _on_host(self._begun), _on_host(self._committed)

    def forget(self) -> None:
        """Empty the table until `restore`, so that a half-loaded state can't be drawn from."""
        self._is_torn = True
        for counts in (self._begun, self._committed, self.begun, self.committed, self._last):
            counts[...] = 0
        self._is_open[...] = False

    def restore(
        self, rings: np.ndarray, last: np.ndarray | None, is_open: np.ndarray | None,
        links: np.ndarray, older: np.ndarray, free: np.ndarray | None,
    ) -> None:  # fmt: skip
        """Take over counts int64 (R, 2), environments, links and free slots of the present rows."""
        there = self._there
        if last is not None and is_open is not None:
            self._last[...], self._is_open[...] = there(last), there(is_open)
        if self._links is not None:
            self._links[...], self._older[...] = there(links), there(older)
        self.begun[...], self.committed[...] = rings.T
        self._begun[...], self._committed[...] = there(rings[:, 0]), there(rings[:, 1])
        if len(self._mirrors["link"]):
            self._changed = [self._arange(self.plan.num_rows)]
        self._is_torn = False
        self._recount(free)

    def mend(self) -> None:
        """After a power loss, remove links to rows that are not committed."""
        if self._links is not None:
            led = np.maximum(self._links - 1, 0)
            is_wrong = (self._links > self.plan.num_rows) | (self._links < 0)
            led[is_wrong] = 0
            is_wrong |= self.numbers_of(led) <= self.numbers_of(np.arange(self.plan.num_rows))
            self._links[is_wrong] = 0


def _on_host(values: Any) -> np.ndarray:
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()


def _items_of(words: np.ndarray, fields: Mapping[str, Field]) -> dict[str, np.ndarray]:
    """Columns of rows int64 (K, words), without links; an item of several numbers is one void item.

    NumPy copies a void item by one call, in two thirds of the time of its numbers.
    """
    found = row_views(words, {path: fields[path] for path in fields if path not in _LINKS})
    for path, field in fields.items():
        if path in found and field.shape and field.nbytes:
            kind, strides = np.dtype((np.void, field.nbytes)), words.strides[:1]
            found[path] = np.ndarray(len(words), kind, words, field.offset, strides)
    return found


def write_columns(columns: Mapping[str, Any], arrays: Mapping[str, Any], rows: Any) -> None:
    """Write arrays (K, ...) by path into rows, int64 (K,) or a slice, of columns."""
    for path, column in columns.items():
        array, is_here = arrays[path], isinstance(column, np.ndarray)
        if array.ndim > column.ndim:  # one of `_items_of`
            items = np.ascontiguousarray(array).reshape(len(array), -1).view(column.dtype)
            column[rows] = items[:, 0]
        else:
            column[rows] = array if is_here else array.to(column.dtype)
