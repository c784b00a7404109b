"""Compiled drawing of batches from memory of the CPU.

A batch is one block of bytes, `pages` uint8, with every field of the batch contiguous in it. Where
each lies is said by `plan` int64: constants at the places named below, then four numbers for each
field: its byte offset in the row, its bytes, its byte offset in the pages, and which row it is
taken from (OWN, LAST, or SUCCESSOR: an observation that may lie elsewhere). SUCCESSOR fields come
behind the others, and behind them stacks: of these the offset in the row is that of the ids of
their frames, and the bytes are those of a frame. Last come the parts of rows that are read, three
numbers each: first byte, last byte + 1, and of which row (OWN or LAST).

Rows are drawn for the whole batch before anything is copied, and the copies ask for the rows some
places ahead: the time is spent waiting for memory, and so the waits overlap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Set
from typing import Any, NamedTuple, assert_never

import numpy as np
import torch

from buffers.core.batches import BatchArrays, BatchMemory
from buffers.core.compiling import njit
from buffers.core.generator import HostGenerator
from buffers.core.kernels import (
    SOON_BYTES,
    address_of,
    bounded,
    bytes_at,
    copy_item_at,
    items_at,
    prefetch,
    prefetch_soon,
    random_word,
)
from buffers.core.rows import RowLayout
from buffers.replay import addresses
from buffers.replay import layout as at
from buffers.replay.batches import LATE, BatchOptions, Draw, ReplayBatch
from buffers.replay.folder import RowFolder
from buffers.replay.storage import ReplayStorage

__all__ = ["BatchPlanner", "CompiledReader"]

BATCH, NUM_FIELDS, NUM_SUCCESSORS = 0, 1, 2
ROWS_TO, LASTS_TO, REWARDS_TO, DISCOUNTS_TO, NUM_STEPS = 3, 4, 5, 6, 7
SPANS, NUM_SPANS = 8, 9
NUM_STACKS, NUM_FRAMES, NUM_PIECES, PLAN_HEADER = 10, 11, 12, 13  # of stacks of frames
OWN, LAST, SUCCESSOR = 0, 1, 2

_AHEAD = 12  # rows asked for before they are copied
_BLOCK = 512  # rows whose windows are walked before they are copied; they fit into the L2 cache
_LINES_AHEAD = 512  # bytes of each frame asked for before it is copied
_ONE = np.uint64(1)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_ALIGNMENT = 64
_MAX_PLANS = 16
_NOTHING = np.zeros((1, 1), np.uint8)
_READ_TIMEOUT = 60.0  # seconds in which a reader has to find rows that are not overwritten
_MOST_AT_ONCE = 1024  # rows of a batch that is drawn without giving up the interpreter's lock
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


class CompiledReader:
    """Draws rows and gathers batches.

    Args:
        storage: Where from.
        options: Of batches.
        seed: Of the generator.
        layout: Of the rows in batches, which may lack columns of the storage; None for all.

    Attributes:
        generator: What rows are drawn by.
        words: Its state, for kernels.
        new: Makes a batch of B transitions, not initialised.
        owner: What the batches belong to.
    """

    def __init__(
        self,
        storage: ReplayStorage,
        options: BatchOptions,
        seed: int | None,
        layout: RowLayout | None = None,
    ):
        planner = BatchPlanner(storage.layout if layout is None else layout, options)
        self._storage = storage
        self._gamma = 1.0 if options.gamma is None else float(options.gamma)
        self._where = storage.addresses.words
        self.generator = HostGenerator(seed)
        self.words = self.generator.words
        self._moved = np.empty(0, np.int64)
        self.new, self.owner = planner.new, planner.owner

    def go_on_with(self, folder: RowFolder) -> None:
        """Take the generator of a folder, or give it this one; readers keep their own."""
        if folder.read_only:
            return
        if folder.is_new:
            folder.generator[:] = self.words
        self.generator.words = self.words = folder.generator

    def fill_at_once(self, batch: ReplayBatch, draw: Draw) -> bool:
        """As `fill`, if it takes one compiled call and no thread is in an exclusive call.

        Returns:
            Whether it was done; otherwise `fill` has to do it, exclusively.
        """
        if draw != "rows" or batch.size > _MOST_AT_ONCE or self._storage.folder is not None:
            return False
        memory = batch.memory
        return sample_uniform(self._where, self.words, memory.plan, memory.pages, self._gamma)

    def gather_at_once(self, batch: ReplayBatch) -> bool:
        """As `gather`; see `fill_at_once`."""
        if batch.size > _MOST_AT_ONCE or self._storage.folder is not None:
            return False
        memory = batch.memory
        return gather_at_once(self._where, memory.plan, memory.pages, self._gamma)

    def fill(self, batch: ReplayBatch, draw: Draw) -> None:
        """Draw rows and gather them."""
        folder, deadline = self._storage.folder, time.monotonic() + _READ_TIMEOUT
        self._draw(batch, draw)
        while folder is not None and folder.read_only:
            if folder.are_there(batch.memory.rows, self._storage.state):
                return
            folder.check_deadline(deadline)
            folder.refresh(self._storage.state)
            self._draw(batch, draw)
        state = self._storage.state
        is_full = state[at.COUNT] == state[at.CAPACITY] * state[at.NUM_RINGS]
        if folder is not None and draw == "rows" and is_full:  # then adds don't change what comes
            self._load_ahead(batch)

    def _load_ahead(self, batch: ReplayBatch) -> None:
        """Read the rows that the next draw of this size will take."""
        storage = self._storage
        assert storage.folder is not None
        rows = np.empty(batch.size, np.int64)
        draw_uniform(storage.state, self.words.copy(), rows)
        storage.folder.load_ahead(storage.state, rows, int(batch.memory.plan[NUM_STEPS]))

    def _draw(self, batch: ReplayBatch, draw: Draw) -> None:
        storage, memory = self._storage, batch.memory
        if draw == "rows":
            draw_uniform(storage.state, self.words, memory.rows)
        elif draw == "rings":
            draw_by_ring(storage.state, self.words, memory.rows)
        elif draw == "distinct":
            draw_distinct(storage.state, self.words, memory.rows, self._table(batch.size))
        else:
            assert_never(draw)
        self.gather(batch)

    def _table(self, size: int) -> np.ndarray:
        """Memory `draw_distinct` needs for so many rows; it grows only."""
        needed = 4 << (size - 1).bit_length()
        if len(self._moved) < needed:
            self._moved = np.empty(needed, np.int64)
        return self._moved[:needed]

    def gather(self, batch: ReplayBatch) -> None:
        """Fill a batch from the rows it lists."""
        storage, memory = self._storage, batch.memory
        if storage.folder is not None:
            storage.folder.load(storage.state, memory.rows, int(memory.plan[NUM_STEPS]))
        gather(
            storage.table, storage.state, memory.plan, memory.pages, self._gamma, *self._kept()
        )  # fmt: skip

    def _kept(self) -> tuple[np.ndarray, np.ndarray]:
        """The newest next observations, and final ones, if they are stored apart; or frames."""
        frames = self._storage.frames
        if frames is not None:
            return frames.main_pages, frames.extra_pages
        kept = self._storage.successors
        return (_NOTHING, _NOTHING) if kept is None else (kept.pending, kept.finals)


class BatchPages(NamedTuple):
    """Memory of one batch: every field contiguous in one block, and the plan for filling it."""

    pages: np.ndarray  # uint8
    plan: np.ndarray  # int64, see above
    rows: np.ndarray  # int64 (B,), view of the pages
    weights: np.ndarray | None  # float32 (B,), view of the pages
    eager: list[np.ndarray]  # views made into tensors at once
    late: BatchArrays  # and those that are when asked for
    owner: object
    columns: frozenset[str] | None  # those that were asked for


class _Part(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    begin: int  # in the pages


_Copied = tuple[str, tuple[int, ...], np.dtype, int, int]  # name, shape, dtype, offset, source


class _Recipe(NamedTuple):
    memory: BatchMemory
    eager: list[str]  # names of what is made into tensors at once


class BatchPlanner:
    """Makes batches for the compiled sampler.

    Args:
        layout: Of the rows.
        options: Of batches.

    Attributes:
        owner: What the batches belong to.
    """

    def __init__(self, layout: RowLayout, options: BatchOptions):
        self._layout, self._has_discounts = layout, options.gamma is not None
        self._num_steps, self._has_weights = options.num_steps, options.has_weights
        # Named by batches instead of the planner, which keeps their memory: no reference cycle.
        self.owner = object()
        self._recipes: dict[Any, _Recipe] = {}

    def _list_fields(self, columns: Set[str]) -> list[_Copied]:
        """What is copied of such columns, but for stacks."""
        layout, found = self._layout, []
        column_of = dict.fromkeys(layout.obs, "obs")
        column_of |= dict.fromkeys(layout.next_obs, "next_obs")
        for path, field in layout.fields.items():
            if path in ("link", "frame_ids") or (path == "rewards" and self._has_discounts):
                continue
            is_last = path in layout.next_obs or path in ("terminations", "truncations")
            source = LAST if is_last else OWN
            if column_of.get(path, path) in columns:
                found.append((path, field.shape, field.dtype, field.offset, source))
            if layout.has_successors and path in layout.obs and "next_obs" in columns:
                name, offset = f"next_{path}", field.offset - layout.obs_at
                found.append((name, field.shape, field.dtype, offset, SUCCESSOR))
        return sorted(found, key=lambda field: field[-1] == SUCCESSOR)

    def _list_stacks(self, columns: Set[str]) -> list[tuple[str, int, int]]:
        """Name, offset of the first id in the row, and source of stacks of frames."""
        if self._layout.frames is None:
            return []
        begin = self._layout.fields["frame_ids"].offset
        stacks = [("obs", begin, OWN), ("next_obs", begin + 4, LAST)]
        return [stack for stack in stacks if stack[0] in columns]

    def new(self, size: int, columns: frozenset[str] | None = None) -> ReplayBatch:
        """A batch of B transitions in memory of its own, not initialised; of some columns only."""
        recipe = self._recipes.get((size, columns)) or self._plan(size, columns)
        kept = recipe.memory.take()
        memory = kept.shared
        tensors = dict(zip(recipe.eager, map(torch.from_numpy, memory.eager), strict=True))
        recipe.memory.keep(kept)
        layout = self._layout
        if not (layout.obs == ["obs"] or layout.frames is not None):
            for column, prefix in (("obs", ""), ("next_obs", "next_")):
                if columns is None or column in columns:
                    leaves = [tensors.pop(prefix + path) for path in layout.obs]
                    tensors[column] = layout.build_obs(leaves)
        extras = {}
        if layout.extras:
            extras = {name: tensors.pop(name) for name in layout.extras if name in tensors}
        return ReplayBatch(tensors, extras, size, memory)

    def _plan(self, size: int, columns: frozenset[str] | None) -> _Recipe:
        layout = self._layout
        chosen = {*ReplayBatch._fields, "env_ids", *layout.extras}
        if columns is not None:
            chosen = {*columns}
        if not self._has_discounts and "discounts" in chosen:
            chosen.add("terminations")  # they follow from these
        fields, stacks = self._list_fields(chosen), self._list_stacks(chosen)
        is_walked = self._has_discounts and (
            not chosen.isdisjoint(("rewards", "discounts"))
            or (self._num_steps > 1 and any(source != OWN for *_, source in (*fields, *stacks)))
        )
        if len(self._recipes) >= _MAX_PLANS:
            self._recipes.clear()
        parts, copies, end = [], [], 0

        def reserve(name: str, shape: tuple[int, ...], dtype: np.dtype) -> int:
            nonlocal end
            begin = end
            parts.append(_Part(name, (size, *shape), dtype, begin))
            end += size * math.prod(shape) * dtype.itemsize
            end += -end % _ALIGNMENT
            return begin

        rows_to = reserve("indices", (), _INT64)
        for name, shape, dtype, offset, source in fields:
            begin = reserve(name, shape, dtype)
            copies += [offset, math.prod(shape) * dtype.itemsize, begin, source]
        places = [-1, 0, 0]  # of last rows, rewards, discounts
        frames = layout.frames
        joined = {}
        for name, offset, source in stacks:
            assert frames is not None
            joined[name] = frames
            begin = reserve(name, frames.memory_shape, frames.dtype)
            copies += [offset, frames.nbytes, begin, source]
        if is_walked:
            sums = [reserve("rewards", (), _FLOAT32), reserve("discounts", (), _FLOAT32)]
            places = [end, *sums]
            end += 8 * size
        if self._has_weights:
            reserve("weights", (), _FLOAT32)
        following = sum(source == SUCCESSOR for *_, source in fields)
        counts = [size, len(fields) - following, following]
        spans = self._spans(fields, stacks)
        spans_at = PLAN_HEADER + len(copies), len(spans)
        copies += [number for span in spans for number in span]
        header = [*counts, rows_to, *places, self._num_steps, *spans_at, len(stacks)]
        header += [1, 1] if frames is None else [frames.num_frames, frames.num_pieces]
        assert len(header) == PLAN_HEADER

        owner, plan = self.owner, np.array(header + copies, np.int64)
        hidden = {*LATE, *({"rewards", "discounts"} - chosen)}
        names = [part.name for part in parts if part.name not in hidden]

        def view(pages: np.ndarray) -> tuple[BatchArrays, BatchPages]:
            found = {
                name: np.ndarray(shape, dtype, pages, begin) for name, shape, dtype, begin in parts
            }
            found |= {name: frames.join(found[name]) for name, frames in joined.items()}
            rows, weights, eager = found["indices"], found.get("weights"), [found[n] for n in names]
            late = {name: found[name] for name in LATE if name in found}
            return found, BatchPages(pages, plan, rows, weights, eager, late, owner, columns)

        recipe = _Recipe(BatchMemory(end, view), names)
        self._recipes[size, columns] = recipe
        return recipe

    def _spans(
        self, fields: list[_Copied], stacks: list[tuple[str, int, int]]
    ) -> list[tuple[int, int, int]]:
        """What is read of a row and of the last row of its window, in pieces lines apart."""
        num_ids = 0 if self._layout.frames is None else 4 * self._layout.frames.num_frames
        pieces = [(o, o + math.prod(s) * d.itemsize, src) for _, s, d, o, src in fields]
        pieces += [(offset, offset + num_ids, source) for _, offset, source in stacks]
        found: list[tuple[int, int, int]] = []
        for row in (OWN, LAST):
            own = [p for p in pieces if p[2] == row or (self._num_steps == 1 and p[2] == LAST)]
            if row == LAST and self._num_steps == 1:
                break  # the same row
            for begin, stop, _ in sorted(own):
                if found and found[-1][2] == row and begin < found[-1][1] + _ALIGNMENT:
                    found[-1] = found[-1][0], max(stop, found[-1][1]), row
                else:
                    found.append((begin, stop, row))
        return found


@njit(nogil=True, cache=True)
def tally(state):
    """Refresh cumulated counts of the rings and the list of those that are not empty."""
    occupied, cumulated = 0, 0
    for ring in range(state[at.NUM_RINGS]):
        count = min(state[state[at.TOTALS] + ring], state[at.CAPACITY])
        cumulated += count
        state[state[at.CUMULATED] + ring] = cumulated
        if count:
            state[state[at.OCCUPIED] + occupied] = ring
            occupied += 1
    state[at.NUM_OCCUPIED] = occupied
    state[at.IS_TALLIED] = 1


@njit(nogil=True, cache=True)
def live_row(state, number):
    """Row of the table that is number 0 .. COUNT - 1 among the live ones; `tally` must be fresh."""
    capacity = state[at.CAPACITY]
    if state[at.COUNT] == capacity * state[at.NUM_RINGS] or state[at.NUM_RINGS] == 1:
        return number
    low, high = 0, state[at.NUM_RINGS] - 1  # the first ring whose cumulated count exceeds number
    while low < high:
        middle = (low + high) // 2
        if state[state[at.CUMULATED] + middle] > number:
            high = middle
        else:
            low = middle + 1
    before = state[state[at.CUMULATED] + low - 1] if low else 0
    return low * capacity + number - before


@njit(nogil=True, cache=True)
def draw_uniform(state, generator, rows):
    """Fill rows int64 (B,) with live rows, drawn with replacement, each equally likely."""
    if not state[at.IS_TALLIED]:
        tally(state)
    key, counter, count = generator[0], generator[1], state[at.COUNT]
    for i in range(rows.shape[0]):
        word = random_word(key, np.add(counter, np.uint64(i)))
        rows[i] = live_row(state, bounded(word, count))
    generator[1] = np.add(counter, np.uint64(rows.shape[0]))


@njit(cache=True)
def draw_by_ring(state, generator, rows):
    """Fill rows int64 (B,): a ring that is not empty, equally likely, then a live row of it."""
    if not state[at.IS_TALLIED]:
        tally(state)
    key, counter, capacity = generator[0], generator[1], state[at.CAPACITY]
    for i in range(rows.shape[0]):
        number = np.add(counter, np.uint64(2 * i))
        chosen = bounded(random_word(key, number), state[at.NUM_OCCUPIED])
        ring = state[state[at.OCCUPIED] + chosen]
        count = min(state[state[at.TOTALS] + ring], capacity)
        rows[i] = ring * capacity + bounded(random_word(key, np.add(number, _ONE)), count)
    generator[1] = np.add(counter, np.uint64(2 * rows.shape[0]))


@njit(nogil=True, cache=True)
def place_of(moved, mask, number):
    """Where the entry of a number is in the table of `draw_distinct`, or would have to be."""
    spread = np.multiply(np.uint64(number), _SPREAD)  # as a product it warns without a compiler
    place = np.int64(spread >> np.uint64(32)) & mask
    while moved[2 * place] != -1 and moved[2 * place] != number:
        place = (place + 1) & mask
    return 2 * place


@njit(nogil=True, cache=True)
def draw_distinct(state, generator, rows, moved):
    """Fill rows int64 (B,) with different live rows; every order of every choice is equally likely.

    The live rows are shuffled, the first B places of them: each place gets what lies in a place
    drawn among it and those behind. Only places that were written are kept, in a table with open
    addresses: a place no longer in order, and the number that lies there.

    Args:
        state: int64, see `layout`; at least B rows are live.
        generator: uint64 (2,), see `core.kernels`; written.
        rows: Written.
        moved: int64 (2 * S,), memory of the table; written. S is a power of 2, at least 2 * B.
    """
    if not state[at.IS_TALLIED]:
        tally(state)
    key, counter, count = generator[0], generator[1], state[at.COUNT]
    mask = moved.shape[0] // 2 - 1
    moved[:] = -1
    for i in range(rows.shape[0]):
        word = random_word(key, np.add(counter, np.uint64(i)))
        drawn = i + bounded(word, count - i)
        found = place_of(moved, mask, drawn)
        rows[i] = moved[found + 1] if moved[found] == drawn else drawn
        own = place_of(moved, mask, i)
        number = moved[own + 1] if moved[own] == i else i
        moved[found], moved[found + 1] = drawn, number
    for i in range(rows.shape[0]):
        rows[i] = live_row(state, rows[i])
    generator[1] = np.add(counter, np.uint64(rows.shape[0]))


@njit(nogil=True, cache=True)
def walk_windows(table, state, plan, gamma, rows, lasts, rewards, discounts):
    """Follow each row for up to NUM_STEPS steps, no further than the episode and the newest row.

    Args:
        table, state, plan: As everywhere here.
        gamma: Discount per step.
        rows: int64 (B,), where the windows begin.
        lasts: int64 (B,), written: the last row of each window.
        rewards: float32 (B,), written: the discounted sum.
        discounts: float32 (B,), written: gamma**m after m steps, 0 if the last one terminates.
    """
    stride, over_at = table.shape[1], state[at.OVER_AT]
    words, floats = table.view(np.int32), table.view(np.float32)
    link_word, reward_word = state[at.LINK_AT] // 4, state[at.REWARD_AT] // 4
    for i in range(rows.shape[0]):
        prefetch(table, rows[i] * stride + over_at)
        lasts[i] = rows[i]
        rewards[i] = np.float32(0.0)
        discounts[i] = np.float32(1.0)
    factor = 1.0
    for step in range(plan[NUM_STEPS]):
        is_final, num_open = step + 1 == plan[NUM_STEPS], 0
        for i in range(rows.shape[0]):
            row = lasts[i]
            if row < 0:  # ended before
                continue
            rewards[i] += np.float32(factor * floats[row, reward_word])
            is_terminated = table[row, over_at] != 0
            discounts[i] = np.float32(0.0 if is_terminated else factor * gamma)
            link = np.int32(0) if link_word < 0 else words[row, link_word]
            if is_final or is_terminated or link <= 0 or table[row, over_at + 1]:
                lasts[i] = -1 - row
            else:
                lasts[i] = link - 1
                num_open += 1
                prefetch(table, (link - 1) * stride + over_at)
        if num_open == 0:
            break
        factor *= gamma
    for i in range(rows.shape[0]):
        lasts[i] = -1 - lasts[i]


@njit(nogil=True, cache=True, inline="always")  # see `storage.write_packed`
def ask_for(table, start, stop):
    """Prefetch the lines of bytes start .. stop - 1."""
    if stop - start > SOON_BYTES:
        for offset in range(start, stop, 64):
            prefetch(table, offset)
        prefetch(table, stop - 1)
        return
    for offset in range(start, stop, 64):
        prefetch_soon(table, offset)
    prefetch_soon(table, stop - 1)


@njit(nogil=True, cache=True)
def copy_fields(table, plan, pages, begin, rows, lasts):
    """Copy the fields of rows int64 (K,) and lasts (K,) to places begin, begin + 1, ... ."""
    stride, num_rows = table.shape[1], rows.shape[0]
    source, to = address_of(table), address_of(pages)
    spans, end = plan[SPANS], plan[SPANS] + 3 * plan[NUM_SPANS]
    for i in range(-_AHEAD, num_rows):
        ahead = i + _AHEAD
        if ahead < num_rows:
            for s in range(spans, end, 3):
                start = (lasts[ahead] if plan[s + 2] == LAST else rows[ahead]) * stride
                ask_for(table, start + plan[s], start + plan[s + 1])
        if i < 0:
            continue
        for f in range(PLAN_HEADER, PLAN_HEADER + 4 * plan[NUM_FIELDS], 4):
            offset, count = plan[f], plan[f + 1]
            target = plan[f + 2] + (begin + i) * count
            row = lasts[i] if plan[f + 3] == LAST else rows[i]
            copy_item_at(to + target, source + row * stride + offset, count)


@njit(nogil=True, cache=True)
def copy_successors(table, state, plan, pages, begin, lasts, pending, finals):
    """Copy the observations after lasts int64 (K,) to places begin, begin + 1, ... .

    They are where the link of a row says: in another row (link > 0), among those that episodes
    ended with (< 0), or the newest of the env (0).

    Returns:
        Whether all were there; `finals` may be one that another thread has replaced.
    """
    stride, obs_at, words = table.shape[1], state[at.OBS_AT], table.view(np.int32)
    link_word, env_word = state[at.LINK_AT] // 4, state[at.ENV_AT] // 4
    first, to = PLAN_HEADER + 4 * plan[NUM_FIELDS], address_of(pages)
    for i in range(-_AHEAD, lasts.shape[0]):
        ahead = i + _AHEAD
        if ahead < lasts.shape[0]:
            start = (words[lasts[ahead], link_word] - 1) * stride + obs_at
            if start > 0:
                ask_for(table, start, start + state[at.OBS_BYTES])
        if i < 0:
            continue
        link = words[lasts[i], link_word]
        for f in range(first, first + 4 * plan[NUM_SUCCESSORS], 4):
            offset, count = plan[f], plan[f + 1]
            target = plan[f + 2] + (begin + i) * count
            if link > 0:
                source = address_of(table) + (link - 1) * stride + obs_at
            elif link < -finals.shape[0]:
                return False
            elif link < 0:
                source = address_of(finals) + (-1 - link) * finals.shape[1]
            else:
                env = words[lasts[i], env_word]
                source = address_of(pending) + env * pending.shape[1]
            copy_item_at(to + target, source + offset, count)
    return True


@njit(nogil=True, cache=True)
def copy_stacks(table, plan, pages, begin, rows, lasts, frames, extra):
    """Copy the stacks of frames of rows int64 (K,) and lasts (K,) to places begin, begin + 1, ... .

    Frames with ids from the number of `frames` on are in `extra`, uint8 (E, B) both.

    Returns:
        Whether all were there; `extra` may be one that another thread has replaced.
    """
    words = table.view(np.int32)
    first = PLAN_HEADER + 4 * (plan[NUM_FIELDS] + plan[NUM_SUCCESSORS])
    number, pieces, num_main = plan[NUM_FRAMES], plan[NUM_PIECES], frames.shape[0]
    out = address_of(pages)
    for i in range(rows.shape[0]):
        ahead = min(i + 1, rows.shape[0] - 1)
        for f in range(first, first + 4 * plan[NUM_STACKS], 4):
            row = lasts[i] if plan[f + 3] == LAST else rows[i]
            coming = lasts[ahead] if plan[f + 3] == LAST else rows[ahead]
            word, count = plan[f] // 4, plan[f + 1]
            target = plan[f + 2] + (begin + i) * number * count
            size = count // pieces
            for k in range(number):
                asked = words[coming, word + k]
                if asked < num_main:
                    for line in range(0, min(count, _LINES_AHEAD), 64):
                        prefetch(frames, asked * frames.shape[1] + line)
                slot = np.int64(words[row, word + k])
                source = address_of(frames) + slot * frames.shape[1]
                if slot >= num_main:
                    slot -= num_main
                    source = address_of(extra) + slot * extra.shape[1]
                    if slot >= extra.shape[0]:
                        return False
                to = out + target + k * size
                for piece in range(pieces):
                    copy_item_at(to + piece * number * size, source + piece * size, size)
    return True


@njit(nogil=True, cache=True)
def gather(table, state, plan, pages, gamma, pending, finals):
    """Fill a batch from the rows listed in it.

    Args:
        table: uint8 (rows, stride).
        state: int64, see `layout`.
        plan: int64, see above.
        pages: uint8, the batch; its list of rows is read, the rest is written.
        gamma: Discount per step, float64.
        pending, finals: uint8 (N, S) and (F, S), if observations are stored once; tables of frames
            if these are; else anything.

    Returns:
        Whether everything was there; see `copy_successors`.
    """
    size, is_walked, stored_once = plan[BATCH], plan[LASTS_TO] >= 0, plan[NUM_SUCCESSORS] > 0
    rows = pages[plan[ROWS_TO] : plan[ROWS_TO] + 8 * size].view(np.int64)
    if not (is_walked or stored_once):
        begin = np.int64(0)  # for a literal 0 the two would be compiled once more
        copy_fields(table, plan, pages, begin, rows, rows)
        return plan[NUM_STACKS] == 0 or copy_stacks(
            table, plan, pages, begin, rows, rows, pending, finals
        )
    lasts_to = plan[LASTS_TO] if is_walked else plan[ROWS_TO]
    lasts = pages[lasts_to : lasts_to + 8 * size].view(np.int64)
    rewards = pages[plan[REWARDS_TO] : plan[REWARDS_TO] + 4 * size].view(np.float32)
    discounts = pages[plan[DISCOUNTS_TO] : plan[DISCOUNTS_TO] + 4 * size].view(np.float32)
    for begin in range(0, size, _BLOCK):
        stop = min(begin + _BLOCK, size)
        own, last = rows[begin:stop], lasts[begin:stop]
        if is_walked:
            walk_windows(
                table, state, plan, gamma, own, last, rewards[begin:stop], discounts[begin:stop]
            )
        copy_fields(table, plan, pages, begin, own, last)
        if stored_once and not copy_successors(
            table, state, plan, pages, begin, last, pending, finals
        ):
            return False
        if plan[NUM_STACKS] and not copy_stacks(
            table, plan, pages, begin, own, last, pending, finals
        ):
            return False
    return True


@njit(cache=True)
def gather_at_once(where, plan, pages, gamma):
    """As `gather` from words of `Addresses`, unless the flag of the buffer's `Guard` is set.

    It keeps the interpreter's lock, so that no other thread adds meanwhile.
    """
    table, state = bytes_at(where, addresses.TABLE), items_at(where, addresses.STATE, np.int64)
    busy = items_at(where, addresses.BUSY, np.int64)
    pending, finals = bytes_at(where, addresses.PENDING), bytes_at(where, addresses.FINALS)
    return busy[0] == 0 and gather(table, state, plan, pages, gamma, pending, finals)


@njit(cache=True)
def sample_uniform(where, generator, plan, pages, gamma):
    """Draw live rows with replacement and fill the batch with them; as `gather_at_once`."""
    table, state = bytes_at(where, addresses.TABLE), items_at(where, addresses.STATE, np.int64)
    busy = items_at(where, addresses.BUSY, np.int64)
    pending, finals = bytes_at(where, addresses.PENDING), bytes_at(where, addresses.FINALS)
    if busy[0] != 0:
        return False
    rows = pages[plan[ROWS_TO] : plan[ROWS_TO] + 8 * plan[BATCH]].view(np.int64)
    draw_uniform(state, generator, rows)
    return gather(table, state, plan, pages, gamma, pending, finals)
