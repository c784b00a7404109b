"""The table of rows that all replay buffers are: its memory, its counts, and the one way into it.

```
#  add(columns, env_ids)
#     |  ArrayReader.read: shape, dtype, range, finiteness, ids, once            (core.arguments)
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
#  envs    (N,)  last, slot, is_open      the newest row of each environment, and its next_obs
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
`kept`. Rows whose add was interrupted are between `committed` and `begun`: the next call puts right
what leads to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.arguments import Transitions, read_row_ids, read_transitions, tree_leaves
from buffers.core.compiling import njit
from buffers.core.memory import zeroed_bytes
from buffers.core.rows import Field, RowLayout, row_views
from buffers.replay.once import Once, Placed, Prepared
from buffers.replay.plan import Plan

__all__ = ["ENVS", "RINGS", "ArrayReader", "Memory", "Table"]

RINGS = np.dtype([("begun", np.int64), ("committed", np.int64)])
ENVS = np.dtype([("last", np.int64), ("slot", np.int32), ("is_open", np.bool_)], align=True)


_MANY = 256  # rows from which on an item of a column is copied as one piece
_NO_ROWS, _NONE = np.zeros(0, np.int64), -1
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)
_SMALL = 1e30
_NAMES = ("obs", "next_obs", "actions", "rewards", "terminations", "truncations")


class ArrayReader:
    """Reads the columns of adds: arrays that are as they are stored take little asking."""

    def __init__(self, layout: RowLayout):
        fields, once = layout.fields, [*layout.obs]
        kinds = [(n, n) for n in once] + [(f"next_{n}", n) for n in once] + [("actions", "actions")]
        kinds += [(n, n) for n in ("rewards", "terminations", "truncations", *layout.extras)]
        self._layout, self._has_frames = layout, layout.frames is not None
        self._fields = [(path, fields[n].shape, np.dtype(fields[n].dtype.str)) for path, n in kinds]
        self._is_flat, self._extras = layout.obs == ["obs"], {*layout.extras}
        self._rewards: Any = None, None  # shape and dtype of those of the add before
        self._expected = self._fields

    def read(
        self,
        given: tuple[Any, ...],
        extras: Mapping[str, Any],
        env_ids: Any,
        valid: Any,
        num_envs: int,
        device: torch.device,
    ) -> Transitions:
        """Transitions that can be written.

        Args:
            given: Columns in the order of the arguments of `add`; None for one that is not given.
            extras: The extra columns.
            env_ids: As of `add`, like the next.
            valid: See above.
            num_envs: Number of environments, 0 if they are not told apart.
            device: Where tensors may lie besides the CPU.

        Raises:
            BufferMisuseError: Something does not fit.
        """
        rewards = given[3]
        arrays = None
        if valid is None and rewards.__class__ is np.ndarray and not self._has_frames:
            arrays = self._read_plain(given, rewards, extras)
        if arrays is not None:
            count = len(rewards)
            if env_ids is None:
                if not (num_envs and count % num_envs):
                    return arrays, _NO_ROWS, None, None
            elif (
                env_ids.__class__ is np.ndarray
                and env_ids.dtype is _INT64
                and env_ids.shape == (count,)
                and count
                and (not num_envs or env_ids.view(_UINT64).max() < num_envs)  # negative ones, too
            ):
                return arrays, env_ids if num_envs else _NO_ROWS, None, None
            ids = read_row_ids(env_ids, count, num_envs, device)
            return arrays, ids if num_envs else _NO_ROWS, None, None
        named = zip(_NAMES, given, strict=True)
        columns = {name: column for name, column in named if column is not None}
        columns.update(extras)
        return read_transitions(columns, self._layout, env_ids, valid, num_envs, device)

    def _read_plain(
        self, given: tuple[Any, ...], rewards: np.ndarray, extras: Mapping[str, Any]
    ) -> dict[str, np.ndarray] | None:
        """The arrays by path if all are as they are stored, and rewards are finite; else None."""
        if extras or self._extras or not self._is_flat:
            if extras.keys() != self._extras:
                return None
            obs, next_obs, actions, _, *flags = given
            space, more = self._layout.observation_space, [extras[n] for n in self._layout.extras]
            leaves = tree_leaves(space, obs, "obs"), tree_leaves(space, next_obs, "next_obs")
            given = (*leaves[0], *leaves[1], actions, rewards, *flags, *more)
        (shape, dtype), found = self._rewards, {}
        # Most adds are like the one before; arrays have the one object of their dtype, or are read.
        if rewards.shape != shape or rewards.dtype is not dtype:
            shape, dtype = rewards.shape, rewards.dtype
            if len(shape) != 1 or dtype not in (_FLOAT32, _FLOAT64):
                return None
            kinds = ((p, s, dtype if p == "rewards" else own) for p, s, own in self._fields)
            self._expected = [(path, (*shape, *inner), own) for path, inner, own in kinds]
            self._rewards = shape, dtype
        for value, (path, expected, own) in zip(given, self._expected, strict=True):
            if value.__class__ is not np.ndarray or value.dtype is not own:
                return None
            if value.shape != expected:
                return None
            found[path] = value
        # Where the sum of squares is small all are finite, also as float32. Unlike `dot`, `vdot`
        # does not warn of sums that are not.
        return found if np.vdot(rewards, rewards) < _SMALL else None


class Commit(NamedTuple):
    """What an add changes at its end, as values to be set: doing it twice does no harm."""

    envs: np.ndarray
    ends: np.ndarray
    ids: np.ndarray
    once: Prepared | None


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
        memory: Of somebody else; None for own.
        first_row: Of these rows in a table of several writers, which links are for.
        first_env: Of these environments among those of all writers.
        order: Called between what other processes must see in this order; None without any.

    Attributes:
        rows: uint8 (num_rows, stride) on the device.
        words: The same memory int64.
        columns: Views (num_rows, *shape) of the fields, by path, as NumPy arrays; none if staged.
        begun: int64 (R,), view of `rings`.
        committed: The same.
        once: Observations stored once, or None.
        is_torn: An add has begun and not ended.
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
        self._order = order
        stride = plan.layout.stride
        if memory is not None:
            self.rows = memory.rows
        elif device.type == "cpu":
            self.rows = zeroed_bytes(plan.num_rows * stride).view(plan.num_rows, stride)
        else:
            self.rows = torch.zeros((plan.num_rows, stride), dtype=torch.uint8, device=device)
        self.words = self.rows.view(torch.int64)
        self.columns: dict[str, np.ndarray] = {}
        self._items: dict[str, np.ndarray] = {}
        if not is_staged:
            self._pages = self.rows.numpy()
            self.columns = row_views(self.words.numpy(), plan.layout.fields)
            self._items = _items_of(self.words.numpy(), plan.layout.fields)
        self.rings = np.zeros(plan.num_rings, RINGS) if memory is None else memory.rings
        self.envs = np.zeros(plan.num_envs, ENVS) if memory is None else memory.envs
        self.begun, self.committed = self.rings["begun"], self.rings["committed"]
        # Of the first ring as Python's numbers, which take less time than those of NumPy.
        self._counts = self.rings.view(np.uint8)[:16].data.cast("q")  # begun, committed
        self._span = plan.span
        self.once = Once(self, plan) if plan.is_once else None
        # Links of rows that are on a device; the host follows them when it writes.
        self.links = (
            np.zeros(plan.num_rows, np.int32)
            if is_staged and plan.is_linked
            else self.columns.get("link", np.zeros(0, np.int32))
        )
        self._counts_there = torch.zeros((2, plan.num_rings), dtype=torch.int64, device=device)
        self.is_torn = False
        self._commit: Commit | None = None
        self.is_plain = plan.num_rings == 1 and not plan.is_linked
        self._is_unsure = plan.num_rings > 1 or order is not None  # by the first ring's count alone
        self._has_ids = "env_ids" in plan.layout.fields
        self._envs_per_ring = plan.num_envs // plan.num_rings if plan.num_envs else 1
        self._all_envs = np.arange(plan.num_envs)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes held by what they are for."""
        found = {"rows": self.rows.nbytes, "state": self.rings.nbytes + self.envs.nbytes}
        if self.is_staged:
            found["state"] += self.links.nbytes
        if self.once is not None:
            found["frames" if self.plan.layout.frames is not None else "kept"] = self.once.nbytes
        return found

    # What is there.

    def live(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers that can be drawn, from .. to, int64 (R,) each."""
        if self.is_torn:
            self.recover()
        end = self.committed.copy()
        if self._order is not None:
            self._order()
        return np.minimum(np.maximum(self.begun - self.plan.capacity, 0), end), end

    def live_of_one(self) -> tuple[int, int]:
        """The same of the only ring, as Python's numbers."""
        if self.is_torn:
            self.recover()
        begun, end = self._counts
        return min(max(begun - self.plan.capacity, 0), end), end

    @property
    def is_empty(self) -> bool:
        """Whether that may be so: the number of transitions that can be drawn is 0."""
        return not self._counts[1] or self._is_unsure or self.is_torn

    def live_there(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same on the device, which does not wait for it."""
        if self.is_torn:
            self.recover()
        begin, end = self._counts_there
        return begin, end

    def count(self, number: int) -> None:
        """Know of `number` rows of each ring that were added on the device."""
        np.maximum(self.begun, self.committed + number, out=self.begun)
        self.committed += number

    def take_counts(self) -> None:
        """Ask the device how many rows there are; waits."""
        _, end = self._counts_there.cpu().numpy()
        np.maximum(self.begun, end, out=self.begun)
        self.committed[...] = end

    def push_counts(self) -> None:
        """Let the device know which numbers can be drawn."""
        if self.is_staged:
            self.is_torn = False
            self._counts_there.copy_(torch.from_numpy(np.stack(self.live())))

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

    def are_live(self, rows: np.ndarray) -> np.ndarray:
        """Whether rows int64 (K,), which exist, hold transitions that can be drawn."""
        begin, _ = self.live()
        rings = rows // self.plan.span
        return self.numbers_of(rows) >= begin[rings]

    def were_whole(self, rows: np.ndarray, committed: np.ndarray) -> bool:
        """Whether rows int64 (K,), just read, were not written meanwhile by another process.

        Args:
            rows: See above.
            committed: int64 (R,), a copy of that from before they were drawn: what has come since
                may lie in them whole, but not have been whole while they were read.
        """
        if self._order is not None:
            self._order()
        oldest = np.maximum(self.begun - self.plan.span, 0)
        return bool((self.numbers_of(rows, committed) >= oldest[rows // self.plan.span]).all())

    def numbers_of(self, rows: np.ndarray, committed: np.ndarray | None = None) -> np.ndarray:
        """The newest committed number that lies in each row int64 (K,); negative if there is none.

        Those of rows that are being written are of what they held before.
        """
        rings, places = np.divmod(rows, self.plan.span)
        newest = (self.committed if committed is None else committed)[rings] - 1
        return newest - (newest - places) % self.plan.span

    # What comes in.

    def add(
        self,
        arrays: Mapping[str, np.ndarray],
        env_ids: np.ndarray,
        stops: np.ndarray | None = None,
        cuts: np.ndarray | None = None,
    ) -> None:
        """Write checked transitions.

        Args:
            arrays: (K, ...) by path, of the dtypes of the layout. Unless the table is plain they
                are no more in each ring than it has rows.
            env_ids: int64 (K,), or (0,) for whole steps.
            stops: bool (K,), rows after which another episode begins besides those with a flag.
            cuts: int64 (C,), environments whose episodes are cut before.

        Raises:
            BufferMemoryError: There is no memory for more observations beside the rows; nothing was
                changed.
            BufferMisuseError: A stack does not go on from the one before it; nothing was changed.
        """
        if self.is_torn:
            self.recover()
        arrays = self.apart(arrays)
        count = len(arrays["rewards"])
        if self.is_plain:
            if count:
                self._append(arrays, env_ids, count)
            return
        if not count:
            if cuts is not None:
                self.cut(cuts)
            return
        self._write_placed(arrays, self._place(arrays, env_ids, stops, cuts, count))

    def apart(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return arrays, with copies of views of this table's rows, which writing changes."""
        if not self.is_staged:
            for path, array in arrays.items():
                if array.base is not None and np.may_share_memory(array, self._pages):
                    arrays = {**arrays, path: array.copy()}
        return arrays

    def check_frames(
        self,
        arrays: Mapping[str, np.ndarray],
        env_ids: np.ndarray,
        stops: np.ndarray | None,
        cuts: np.ndarray | None,
    ) -> None:
        """Raise what `add` raises of stacks, of any number of transitions; the rest is as there."""
        if self.once is not None and self.plan.layout.frames is not None:
            placed = self._place(arrays, env_ids, stops, cuts, len(arrays["rewards"]))
            self.once.complete(self.plan.layout.frames, arrays, placed)

    def cut(self, env_ids: np.ndarray) -> None:
        """Let the next rows of env_ids int64 (K,) begin new episodes."""
        self.envs["is_open"][env_ids] = False

    def _append(self, arrays: Mapping[str, np.ndarray], env_ids: np.ndarray, count: int) -> None:
        """Write rows that follow on nothing behind the others of the only ring."""
        span, counts = self._span, self._counts
        start = counts[1]
        end = start + count
        if self._has_ids:
            ids = env_ids if len(env_ids) else np.arange(count) % self.plan.num_envs
            arrays = {**arrays, "env_ids": ids + self._first_env}
        if count > span:
            arrays = {path: array[-span:] for path, array in arrays.items()}
            start, count = end - span, span
        self.is_torn = True
        counts[0] = max(counts[0], end)
        if self._order is not None:
            self._order()
        first = start % span
        is_whole = first + count <= span and not self.is_staged
        rows = slice(first, first + count) if is_whole else (first + np.arange(count)) % span
        self._write(arrays, rows)
        if self._order is not None:
            self._order()
        counts[1] = end
        self.is_torn = False
        if self.is_staged:
            self.push_counts()

    def _place(
        self,
        arrays: Mapping[str, np.ndarray],
        env_ids: np.ndarray,
        stops: np.ndarray | None,
        cuts: np.ndarray | None,
        count: int,
    ) -> Placed:
        """Find rows for transitions, and the rows that they follow; changes nothing."""
        plan = self.plan
        ids = env_ids if len(env_ids) else self._all_envs
        if len(ids) != count:
            ids = np.arange(count) % plan.num_envs
        is_over = arrays["terminations"] | arrays["truncations"]
        is_over = is_over if stops is None else is_over | stops
        ids, cuts = np.array(ids), _NO_ROWS if cuts is None else np.array(cuts)
        ends, envs = self.committed.copy(), self.envs.copy()
        found, flags = np.empty((5, count), np.int64), np.empty((2, count), np.bool_)
        newest, sizes = np.full(plan.num_envs, _NONE), (self._envs_per_ring, plan.span)
        has_several = place(ids, is_over, cuts, sizes, newest, envs, ends, (found, flags))
        numbers, rows, before, before_rows, previous = found
        is_open, is_joined = flags
        return Placed(
            ids, rows, numbers, previous if has_several else None, before, before_rows, is_open,
            is_joined, is_over, ends, envs,
        )  # fmt: skip

    def _write_placed(self, arrays: Mapping[str, np.ndarray], placed: Placed) -> None:
        ids, rows, previous = placed.ids, placed.rows, placed.previous
        is_joined, codes = placed.is_joined, None
        once = None if self.once is None else self.once.prepare(arrays, placed)
        if self._has_ids:
            arrays = {**arrays, "env_ids": ids + self._first_env}
        if self.plan.is_linked:
            codes = np.zeros(len(rows), np.int32)
            if once is not None:
                is_joined, codes = once.is_joined, once.codes
            if previous is not None:
                joined = np.flatnonzero(is_joined & (previous >= 0))
                codes[previous[joined]] = rows[joined] + 1 + self._first_row
            arrays = {**arrays, "link": codes}
        envs = placed.envs
        if once is not None and codes is not None:
            has_slot = codes > self.plan.num_rows
            envs["slot"][ids[has_slot]] = codes[has_slot] - 1 - self.plan.num_rows
        self.is_torn = True
        np.maximum(self.begun, placed.ends, out=self.begun)
        if self._order is not None:
            self._order()
        if once is not None and self.once is not None:
            arrays = {**arrays, **self.once.write(once)}
        self._write(arrays, rows)
        if codes is not None:
            joined = is_joined if previous is None else is_joined & (previous < 0)
            codes = rows[joined] + 1 + self._first_row
            self._write_links(placed.before_rows[joined], codes)
        self._commit = Commit(envs, placed.ends, ids, once)
        self._finish()

    def _write(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray | slice) -> None:
        """Write columns (K, ...) into distinct rows int64 (K,), or a slice of them."""
        if self.is_staged:
            self._send(arrays, rows)
        else:
            is_many = len(arrays["rewards"]) >= _MANY
            write_columns(self._items if is_many else self.columns, arrays, rows)

    def _write_links(self, rows: np.ndarray, codes: np.ndarray) -> None:
        if not len(rows):
            return
        self.links[rows] = codes
        if self.is_staged:
            field = self.plan.layout.fields["link"]
            column = self.rows.view(torch.int32)[:, field.offset // 4]
            where, values = torch.from_numpy(rows), torch.from_numpy(codes.astype(np.int32))
            column.index_copy_(0, where.to(self.device), values.to(self.device))

    def _send(self, arrays: Mapping[str, np.ndarray], rows: Any) -> None:
        """Pack rows on the host, and write them on the device by one copy."""
        packed = np.zeros((len(rows), self.plan.layout.stride // 8), np.int64)
        write_columns(_items_of(packed, self.plan.layout.fields), arrays, slice(None))
        if "link" in self.plan.layout.fields:
            self.links[rows] = arrays["link"]
        where = torch.from_numpy(rows).to(self.device)
        self.words.index_copy_(0, where, torch.from_numpy(packed).to(self.device))

    def _finish(self) -> None:
        """Let what an add has written count; it may be done again if it was interrupted."""
        commit = self._commit
        if commit is not None:
            if commit.once is not None and self.once is not None:
                self.once.finish(commit.once, commit.ids)
            if self._order is not None:
                self._order()
            self.committed[...] = commit.ends
            self.envs[...] = commit.envs  # last: see `mend_newest`
        self._commit, self.is_torn = None, False
        self.push_counts()

    def recover(self) -> None:
        """Put right what an interrupted add has left: links to rows that do not count."""
        if self._commit is not None:
            self._finish()
            return
        if self.once is not None:
            self._mend_links()
        elif self.plan.is_linked:
            self.mend_newest()
        self.is_torn = False
        self.push_counts()

    def mend_newest(self) -> None:
        """Let the newest row of each environment lead to none.

        An add that was interrupted, or whose process was killed, may have written a link to a row
        that was never committed, into rows that were the newest: environments are brought up to
        date behind all else.
        """
        last, rings = self.envs["last"] - 1, np.arange(len(self.envs)) // self._envs_per_ring
        alive = last >= np.maximum(self.begun - self.plan.span, 0)[rings]
        rows = rings[alive] * self.plan.span + last[alive] % self.plan.span
        links = self.links[rows] - 1 - self._first_row
        led = np.where((links >= 0) & (links < self.plan.num_rows), links, rows)
        wrong = (links >= 0) & (self.numbers_of(led) <= last[alive])
        self._write_links(rows[wrong], np.zeros(int(wrong.sum()), np.int32))

    def _mend_links(self) -> None:
        plan, rows = self.plan, np.arange(self.plan.num_rows)
        numbers = self.numbers_of(rows)
        oldest = np.repeat(np.maximum(self.begun - plan.span, 0), plan.span)
        links, is_there = self.links.copy(), numbers >= oldest
        leads_to_row = (links > 0) & (links <= plan.num_rows)
        following = np.where(leads_to_row, links.astype(np.int64) - 1, 0)
        is_newer = is_there[following] & (numbers[following] > numbers)
        links[~is_there | (leads_to_row & ~is_newer)] = 0
        if self.once is not None:
            envs = np.arange(plan.num_envs)
            last, rings = self.envs["last"] - 1, envs // self._envs_per_ring
            first = np.maximum(self.begun - plan.span, 0)[rings]
            alive = last >= first
            last_rows = rings[alive] * plan.span + last[alive] % plan.span
            links[last_rows] = self.envs["slot"][alive] + plan.num_rows + 1
            self.once.recover(links)
        changed = np.flatnonzero(links != self.links)
        self._write_links(changed, links[changed])


def _items_of(words: np.ndarray, fields: Mapping[str, Field]) -> dict[str, np.ndarray]:
    """Columns of rows int64 (K, words), an item of several numbers being one of bytes.

    NumPy copies such an item by one call, in two thirds of the time that its numbers take.
    """
    found = row_views(words, fields)
    for path, field in fields.items():
        if field.shape and field.nbytes:
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
def place(ids, is_over, cuts, sizes, newest, envs, ends, written):
    """Find rows for transitions, and the rows that they follow.

    Args:
        ids: int64 (K,), environments.
        is_over: bool (K,), the next row begins another episode.
        cuts: int64 (C,), environments whose episodes are cut before.
        sizes: Environments and rows of a ring.
        newest: int64 (N,), _NONE each; scratch memory.
        envs: ENVS (N,), brought up to date.
        ends: int64 (R,), transitions ever added to each ring; brought up to date.
        written: int64 (5, K): numbers in the ring; rows; the number of the row before of the same
            env, or -1; that row; the place of that among these, or -1. And bool (2, K): the
            episode of the row before goes on; and that row is still there.

    Returns:
        Whether an environment has several rows.
    """
    per_ring, span = sizes
    found, flags = written
    has_several = False
    for env in cuts:
        envs[env]["is_open"] = False
    for i in range(ids.shape[0]):
        env = ids[i]
        ring = env // per_ring
        number, before, previous = ends[ring], envs[env]["last"] - 1, newest[env]
        has_several |= previous >= 0
        found[0, i], found[1, i] = number, ring * span + number % span
        found[2, i], found[3, i] = before, ring * span + before % span
        found[4, i], flags[0, i] = previous, envs[env]["is_open"]
        envs[env]["last"], envs[env]["is_open"] = number + 1, not is_over[i]
        newest[env] = i
        ends[ring] = number + 1
    for i in range(ids.shape[0]):
        first = max(ends[ids[i] // per_ring] - span, 0)
        flags[1, i] = flags[0, i] and found[2, i] >= first
    return has_several
