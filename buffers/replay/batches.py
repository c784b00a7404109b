"""Batches of transitions: row numbers turned into columns, one contiguous tensor each.

```
#  rows (B,) --walks--> lists of rows (J, B)      drawn rows, last rows of windows, units of next
#                          |                      observations, frames of stacks
#                          v
#  gather: some fields of the rows in each list --> columns of the batch, in one piece of memory
```

On hosts `gather` is one compiled function; on devices, one `index_select` of torch per column.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.arguments import MAX_COUNT, check_count, read_columns
from buffers.core.batches import Batch
from buffers.core.errors import BufferMisuseError
from buffers.core.kernels import address_of, copy_item_at, njit, prefetch
from buffers.core.memory import allocation, torch_dtype
from buffers.core.rows import Field, view_fields
from buffers.replay.draws import find_windows, find_windows_there
from buffers.replay.plan import OLDER
from buffers.replay.table import Table

__all__ = ["Reader", "ReplayBatch"]

_LITTLE_BYTES = 1 << 26  # a batch below this is made without a look at free memory
_LINE = 64
_BLOCK = 16  # rows copied at a time, part by part, while the next block is prefetched
_SEEN_BYTES = 512  # prefetched of a row; processors fetch the rest by themselves
_MAX_PLANS = 16  # cached plans
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
# What `gather` copies: bytes of the rows in a list; their first target, `pitch` bytes apart.
_PARTS = np.dtype([(name, np.int64) for name in ("list", "offset", "size", "start", "pitch")])


class Memory(NamedTuple):
    """Memory of a batch, and what `fill` needs to know."""

    owner: Any  # the reader that fills it
    columns: frozenset[str] | None  # chosen names, None for all
    plan: _Plan
    # By name: "indices", the first list; columns by path; "rewards" and "discounts" of windows;
    # "weights"; on devices "lists" int64 (J, B).
    tensors: dict[str, torch.Tensor]
    arrays: dict[str, np.ndarray]  # on hosts, the same memory and "lists" as arrays; else empty
    pages: np.ndarray | None  # on hosts, the memory of all tensors, uint8 (size,)

    @property
    def indices(self) -> torch.Tensor:
        """int64 (B,), rows."""
        return self.tensors["indices"]

    @property
    def weights(self) -> torch.Tensor | None:
        """float32 (B,), of prioritized draws."""
        return self.tensors.get("weights")


class ReplayBatch(Batch):
    """B transitions; columns that the buffer does not have are None.

    `discounts` is the factor on the value of next_obs: gamma**m after m steps, 0 if the last step
    terminated. In a buffer without gamma it is 1 instead of gamma; multiply by your own gamma.
    """

    __slots__ = (
        "actions", "discounts", "env_ids", "extras", "indices", "memory", "next_obs",
        "obs", "rewards", "size", "terminations", "truncations", "weights",
    )  # fmt: skip
    _fields = (
        "obs", "next_obs", "actions", "rewards", "terminations", "truncations", "discounts",
    )  # fmt: skip
    _others = ("env_ids", "indices", "weights")

    obs: Any  # (B, *obs_shape), nested like the observation space
    next_obs: Any  # like obs: the true observation after the last step, final ones too
    actions: torch.Tensor  # (B, *action_shape)
    rewards: torch.Tensor  # float32 (B,); with n_step > 1 the discounted sum
    terminations: torch.Tensor  # bool (B,), of the last step
    truncations: torch.Tensor  # bool (B,), of the last step
    discounts: torch.Tensor  # float32 (B,)
    env_ids: Any  # int32 (B,), or None
    indices: torch.Tensor  # int64 (B,), rows of the buffer
    weights: Any  # float32 (B,), of prioritized sampling, or None
    extras: dict[str, torch.Tensor]  # the user's columns by name, (B, ...)
    size: int  # B
    memory: Any

    def __getattr__(self, name: str) -> Any:
        """Compute discounts over single steps, when asked for; or return an extra column."""
        if name == "discounts" and self.memory is not None and self.memory.plan.has_discounts:
            return torch.where(self.memory.tensors["terminations"], 0.0, self.memory.owner.gamma)
        return super().__getattr__(name)

    def __len__(self) -> int:
        """Number of transitions."""
        return self.size


class _Source(NamedTuple):
    """Source of a column of a batch: a field, or a frame of a stack."""

    path: str  # of the column
    rows: int  # index of the list of rows
    field: Field
    frame: int = -1  # of a stack; -1 for a field


class _Plan(NamedTuple):
    """Layout of batches of one size and choice of columns."""

    # Name, shape and dtype of each tensor, and, on hosts, its first byte.
    places: list[tuple[str, tuple[int, ...], np.dtype, int]]
    host_names: list[str]  # of the places that are tensors on hosts
    size_bytes: int  # of all tensors
    sources: list[_Source]  # what columns are read from
    parts: np.ndarray  # _PARTS (P,), the sources for `gather`
    spans: np.ndarray  # int64 (J, 2), see `gather`
    names: list[str]  # attributes that are tensors of the same name
    made: dict[str, Callable[[dict[str, torch.Tensor]], Any]]  # nested attributes
    has_discounts: bool  # computed from `terminations` when asked for


class Reader:
    """Reads batches from a table; `column_names` are the names that `columns=` may have."""

    def __init__(self, table: Table, *, has_weights: bool = False):
        plan = table.plan
        self.table, self._has_weights, self._frames = table, has_weights, plan.layout.frames
        self.gamma = 1.0 if plan.gamma is None else plan.gamma
        self._plans: dict[tuple[int, frozenset[str] | None], _Plan] = {}
        others = ["indices", *(["env_ids"] if "env_ids" in plan.layout.fields else [])]
        others += ["weights"] if has_weights else []
        self.column_names = (*ReplayBatch._fields, *plan.layout.extras, *others)
        # Order of the lists: drawn rows, last rows of windows, next observations, frames of obs,
        # frames of next_obs. Single steps need no last rows, and share older frames with obs.
        self._is_long = plan.n_step > 1
        self._last = int(self._is_long)
        self._next = self._last + int(plan.is_once)
        self._stacks = self._next + 1, self._next + plan.num_frames
        self._views = view_fields(table.rows, plan.layout.fields)
        self._pages = table.rows.numpy() if table.device.type == "cpu" else None
        names = ("rewards", "link", "terminations", "truncations")
        self._walked = tuple(table.columns.get(name) for name in names)

    def read_columns(self, columns: Iterable[str] | None) -> frozenset[str] | None:
        """Names of columns to draw, without `indices` and `weights`; None for all."""
        chosen = read_columns(columns, self.column_names)
        return chosen and chosen - {"indices", "weights"}

    def batch(
        self, batch_size: int, out: ReplayBatch | None, columns: Iterable[str] | None
    ) -> ReplayBatch:
        """Return the batch that a draw fills: `out`, or a new one.

        Raises:
            BufferMisuseError: An argument does not fit, or `out` is not of this reader.
        """
        batch_size = check_count("batch_size", batch_size, MAX_COUNT)
        chosen = None if columns is None else self.read_columns(columns)
        if out is None:
            return self.new(batch_size, chosen)
        is_own = isinstance(out, ReplayBatch) and getattr(out.memory, "owner", None) is self
        if not is_own or out.size != batch_size or chosen not in (None, out.memory.columns):
            raise BufferMisuseError(
                f"out is a {type(out).__name__} of {getattr(out, 'size', 0)} rows, expected a "
                f"batch that new_batch or sample of this buffer returned, of {batch_size} rows "
                "and the same columns"
            )
        return out

    def new(self, size: int, columns: frozenset[str] | None = None) -> ReplayBatch:
        """Make a batch of some columns, None for all; not initialised."""
        plan = self._plans.get((size, columns))
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[size, columns] = self._plan(size, columns)
        if plan.size_bytes < _LITTLE_BYTES:
            made = self._allocate(plan)
        else:
            what, device = f"a batch of {size}", self.table.device
            with allocation(what, plan.size_bytes, device, "draw fewer at once"):
                made = self._allocate(plan)
        tensors = made[0]
        batch = ReplayBatch.__new__(ReplayBatch)
        batch.memory, batch.size = Memory(self, columns, plan, *made), size
        batch.env_ids = batch.weights = None
        for name in plan.names:
            setattr(batch, name, tensors[name])
        for name, make in plan.made.items():
            setattr(batch, name, make(tensors))
        return batch

    def _allocate(
        self, plan: _Plan
    ) -> tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray | None]:
        """Allocate `tensors`, `arrays` and `pages` of a batch."""
        if self._pages is not None:
            pages = np.empty(plan.size_bytes, np.uint8)
            arrays = {
                name: np.ndarray(shape, dtype, pages, at) for name, shape, dtype, at in plan.places
            }
            return {k: torch.from_numpy(arrays[k]) for k in plan.host_names}, arrays, pages
        tensors = {
            name: torch.empty(shape, dtype=torch_dtype(dtype), device=self.table.device)
            for name, shape, dtype, _ in plan.places
        }
        tensors["indices"] = tensors["lists"][0]
        return tensors, {}, None

    def _plan(self, size: int, columns: frozenset[str] | None) -> _Plan:
        plan, layout = self.table.plan, self.table.plan.layout
        plain = ("actions", "rewards", "terminations", "truncations", "discounts", "env_ids")
        everything = frozenset(("obs", "next_obs", *plain, *layout.extras))
        chosen = everything if columns is None else columns
        sources = [*self._sources(chosen)]
        num_lists = 1 + max((source.rows for source in sources), default=0)
        walks = self._is_long and (num_lists > 1 or not chosen.isdisjoint(("rewards", "discounts")))
        num_lists = max(num_lists, 1 + walks)
        blocks: dict[str, tuple[tuple[int, ...], np.dtype]] = {"lists": ((num_lists, size), _INT64)}
        for path, _, field, frame in sources:
            blocks[path] = (size, *([plan.num_frames] * (frame >= 0)), *field.shape), field.dtype
        has_discounts = not self._is_long and "discounts" in chosen
        more = ["rewards", "discounts"] * walks
        more += ["weights"] * self._has_weights
        blocks |= dict.fromkeys(more, ((size,), _FLOAT32))
        begins, places, end = {}, [], 0
        for name, (shape, dtype) in blocks.items():
            begins[name] = end
            places.append((name, shape, dtype, end))
            end += -(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE
        if self._pages is not None:
            places.append(("indices", (size,), _INT64, 0))  # the first list
        names = ["indices", *(n for n in plain if n in blocks and n in chosen)]
        names += ["weights"] * self._has_weights
        made: dict[str, Callable[..., Any]] = {
            name: self._maker([prefix + path for path in layout.obs])
            for name, prefix in (("obs", ""), ("next_obs", "next_"))
            if name in chosen
        }
        extras = [name for name in layout.extras if name in chosen]
        made["extras"] = lambda tensors: {name: tensors[name] for name in extras}
        parts = np.zeros(len(sources), _PARTS)
        for number, (path, rows, field, frame) in enumerate(sources):
            begin, width = begins[path] + max(frame, 0) * field.nbytes, field.nbytes
            pitch = width * (plan.num_frames if frame >= 0 else 1)
            parts[number] = rows, field.offset, width, begin, pitch
        spans = np.zeros((num_lists, 2), np.int64)
        for number in range(num_lists):
            if len(read := parts[parts["list"] == number]):
                ends, begin = read["offset"] + read["size"], read["offset"].min()
                spans[number] = begin, min(ends.max(), begin + _SEEN_BYTES)
        host_names = [name for name, *_ in places if name != "lists"]
        return _Plan(places, host_names, end, sources, parts, spans, names, made, has_discounts)

    def _sources(self, chosen: frozenset[str]) -> Iterator[_Source]:
        """Yield the sources of chosen columns."""
        layout, frames, last = self.table.plan.layout, self._frames, self._last
        fields, of_obs, of_next = layout.fields, "obs" in chosen, "next_obs" in chosen
        kinds = dict.fromkeys(("actions", "env_ids", *layout.extras), 0)
        kinds |= dict.fromkeys(("terminations", "truncations"), last)
        kinds |= {} if self._is_long else {"rewards": 0}
        for name, rows in kinds.items():
            is_asked = name in chosen or (name == "terminations" and "discounts" in chosen)
            if is_asked and name in fields:
                yield _Source(name, rows, fields[name])
        if frames is None:
            for path in layout.obs:
                name = f"next_{path}"
                if of_obs:
                    yield _Source(path, 0, fields[path])
                if of_next and name in fields:
                    yield _Source(name, last, fields[name])
                elif of_next:
                    yield _Source(name, self._next, fields[path])
            return
        newest, (older, older_next) = frames.num_frames - 1, self._stacks
        for k in range(frames.num_frames):
            if of_obs:
                yield _Source("obs", older + k if k < newest else 0, fields["obs"], k)
            if of_next:
                # Over a single step, frames shift by one.
                after = older + k + 1 if k + 1 < newest else 0
                rows = older_next + k if self._is_long else after
                yield _Source("next_obs", rows if k < newest else self._next, fields["obs"], k)

    def _maker(self, paths: list[str]) -> Callable[[dict[str, torch.Tensor]], Any]:
        """Return a function that makes an observation from tensors."""
        layout, frames = self.table.plan.layout, self._frames
        if frames is not None:
            return lambda tensors: frames.join(tensors[paths[0]])
        if layout.obs == ["obs"]:
            return operator.itemgetter(*paths)
        return lambda tensors: layout.build_obs([tensors[path] for path in paths])

    def fill(self, batch: ReplayBatch) -> None:
        """Read the transitions of the rows in `batch.memory.indices` into the batch."""
        memory, table = batch.memory, self.table
        plan, num_lists = memory.plan, len(memory.plan.spans)
        if memory.pages is None or table.is_staged:
            return self._fill_there(memory)
        lists = memory.arrays["lists"]
        if self._is_long and num_lists > 1:
            sums = memory.arrays["rewards"], memory.arrays["discounts"]
            counts, n_step = (table.committed, table.plan.span), table.plan.n_step
            find_windows(self._walked, *counts, lists, n_step, self.gamma, sums)
        others = self._pages
        if table.once is not None:
            others = table.once.units.numpy()
            self._find_units(torch.from_numpy(lists))
        return gather(self._pages, others, lists, plan.spans, plan.parts, memory.pages)

    def _find_units(self, lists: torch.Tensor) -> None:
        """Fill the lists of units, of observations or frames that are stored once."""
        if len(lists) <= self._next:
            return
        last = lists[self._last]
        torch.sub(self._views["link"].index_select(0, last), 1, out=lists[self._next])
        if OLDER in self._views:
            older, size = self._views[OLDER], self.table.plan.num_frames - 1
            of_obs, of_next = (lists[first:][:size] for first in self._stacks)
            if len(of_obs):
                of_obs.copy_(older.index_select(0, lists[0]).T)
            if len(of_next):  # frames of the last row, shifted by one; it is the newest
                of_next[:-1].copy_(older.index_select(0, last).T[1:])
                of_next[-1].copy_(last)

    def _fill_there(self, memory: Memory) -> None:
        """Do what `fill` does by operations of torch, without waiting for the device."""
        once, num_rows, given = self.table.once, self.table.plan.num_rows, memory.tensors
        there = given.get("lists")
        lists = torch.from_numpy(memory.arrays["lists"]) if there is None else there
        if self._is_long and len(lists) > 1:
            sums, n_step = (given["rewards"], given["discounts"]), self.table.plan.n_step
            lists[1] = find_windows_there(self._views, lists[0], n_step, self.gamma, *sums)
        if once is not None:
            self._find_units(lists)
        for path, number, field, frame in memory.plan.sources:
            rows, target = lists[number], memory.tensors[path]
            if frame >= 0:
                target = target[:, frame]
            view = self._views[field.path]
            if once is None or number < self._next:
                torch.index_select(view, 0, rows, out=target)
                continue
            (others,) = view_fields(once.units, {path: field}).values()
            found = view.index_select(0, rows.clamp(max=num_rows - 1))
            others = others.index_select(0, (rows - num_rows).clamp_(min=0))
            is_kept = (rows >= num_rows).view(-1, *[1] * (found.ndim - 1))
            target.copy_(torch.where(is_kept, others, found))


@njit(nogil=True, cache=True)
def gather(table, kept, lists, spans, parts, out):
    """Copy parts, _PARTS (P,), of rows into out uint8 (size,).

    Args:
        table: uint8 (num_rows, stride).
        kept: uint8 (P, bytes), units beside the rows; their numbers begin at num_rows.
        lists: int64 (J, B), rows or units.
        spans: int64 (J, 2), first and end byte to prefetch of the rows in each list.
    """
    begin, others, target = address_of(table), address_of(kept), address_of(out)
    num_rows, stride, unit = table.shape[0], table.shape[1], kept.shape[1]
    size = lists.shape[1]
    for first in range(-_BLOCK, size, _BLOCK):
        behind = min(first + _BLOCK, size)
        for j in range(lists.shape[0]):
            for row in lists[j, behind : behind + _BLOCK]:
                if row < num_rows:
                    for line in range(spans[j, 0], spans[j, 1], _LINE):
                        prefetch(table, row * stride + line)
        for p in range(parts.shape[0]):
            part = parts[p]
            rows, nbytes, to = lists[part["list"]], part["size"], target + part["start"]
            for i in range(max(first, 0), behind):
                row = rows[i]
                at = begin + row * stride if row < num_rows else others + (row - num_rows) * unit
                copy_item_at(to + i * part["pitch"], at + part["offset"], nbytes)
