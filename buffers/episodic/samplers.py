"""Drawing from the episodes of a ring: compiled kernels on the CPU, torch on other devices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.arguments import read_columns
from buffers.core.columns import torch_dtype
from buffers.core.compiling import njit
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import DeviceGenerator, HostGenerator
from buffers.core.kernels import (
    address_of,
    copy_at,
    copy_item_at,
    prefetch,
    random_word,
    unit_float,
)
from buffers.core.memory import allocation
from buffers.core.rows import Field, RowLayout, plan_view
from buffers.core.sequences import SequenceOptions
from buffers.core.staging import StagingBlocks
from buffers.episodic.batches import PairBatch
from buffers.episodic.layout import (
    FIRST_DRAWABLE,
    FIRST_EPISODE,
    FIRST_START,
    HEADER_BYTES,
    HEADER_WORDS,
    NUM_DRAWABLE,
    NUM_EPISODES,
    NUM_STARTS,
)
from buffers.episodic.storage import EpisodicStorage

__all__ = [
    "STRATEGIES",
    "CompiledSampler",
    "PairPlanner",
    "TorchSampler",
    "is_by_episode",
    "offsets_below",
]

STRATEGIES = {"future": 0, "final": 1, "episode": 2, "bound": 3}
_OVER = {"steps": False, "episodes": True}
_LOW = 0xFFFFFFFF
_ONE = np.uint64(1)
_MAX_PLANS = 64
_ALIGNMENT = 64
_NO_MATTER_BYTES = 1 << 26  # that may be there without looking
_CPU = torch.device("cpu")
_BLOCK = 512  # pairs whose rows are asked for before one is copied
# After obs, future_obs and offsets.
_PAIR_FIELDS = ("actions", "rewards", "terminations", "truncations")


def is_by_episode(over: str) -> bool:
    """Read the argument `over`.

    Raises:
        BufferMisuseError: It is none of those.
    """
    by_episode = _OVER.get(over) if isinstance(over, str) else None
    if by_episode is None:
        raise BufferMisuseError(f"over is {over!r}, expected one of {sorted(_OVER)}")
    return by_episode


class PairMemory(NamedTuple):
    """What the views of a PairBatch lie in: B rows, B observations, B offsets, B row numbers."""

    words: Any  # int64, NumPy array on the CPU, else tensor
    size: int  # B
    layout: RowLayout
    columns: frozenset[str] | None = None  # those that were asked for
    plan: Any = None  # int64 (F, 4) of `draw_pair_fields`, if it has these alone

    @property
    def block(self) -> torch.Tensor:
        """All of it as a tensor int64."""
        return torch.from_numpy(self.words) if isinstance(self.words, np.ndarray) else self.words

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows int64 (B, W), observations (B, V), offsets (B,) and row numbers (B,)."""
        width, obs_width, size = self.layout.num_words, self.layout.obs_words, self.size
        rows, observations, offsets, chosen = self.block.split(
            [size * width, size * obs_width, size, size]
        )
        return rows.view(size, width), observations.view(size, obs_width), offsets, chosen


class _PairField(NamedTuple):
    """Where a field of a PairBatch lies in its block, in items of its dtype."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @property
    def in_bytes(self) -> tuple[Any, ...]:
        """Shape, dtype, start and strides, both in bytes."""
        size = self.dtype.itemsize
        strides = tuple(stride * size for stride in self.strides)
        return self.shape, self.dtype, self.start * size, strides


class _PairPlan(NamedTuple):
    fields: list[_PairField]
    num_words: int
    places: dict[str, tuple[Any, ...]]  # of the fields, as `_PairField.in_bytes`
    copies: Any = None

    def new_arrays(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Memory of a batch, int64 (W,), and arrays over it by name; not initialised."""
        size = 8 * self.num_words
        is_small = size <= _NO_MATTER_BYTES  # so much may be there without looking
        with allocation("a batch", size, _CPU, "draw fewer at once", is_checked=is_small):
            words = np.empty(self.num_words, np.int64)
        found = {
            name: np.ndarray(shape, dtype, words, start, strides)
            for name, (shape, dtype, start, strides) in self.places.items()
        }
        return words, found


class PairPlanner:
    """Makes batches of pairs.

    Args:
        layout: Of the rows.
        device: Where batches live.
        is_staged: Whether `TorchSampler` fills them.
    """

    def __init__(self, layout: RowLayout, device: torch.device, *, is_staged: bool):
        self.layout, self._device, self._is_staged = layout, device, is_staged
        self._extra, self._is_nested = layout.extras, layout.obs[0] != "obs"
        self._plans: dict[int, _PairPlan] = {}
        self._narrow_plans: dict[Any, _PairPlan] = {}
        self._column_names = (*PairBatch._fields, *self._extra)

    def read_columns(self, columns: Iterable[str] | None) -> frozenset[str] | None:
        """Names of the columns to draw; None for all."""
        return read_columns(columns, self._column_names)

    def new(self, batch_size: int, columns: frozenset[str] | None = None) -> PairBatch:
        """A batch of pairs in memory of its own, not filled yet; of some columns only."""
        if columns is not None:
            return self._new_narrow(batch_size, columns)
        plan = self._plans.get(batch_size) or self._plan(batch_size)
        if self._device.type == "cpu":
            words, fields = plan.new_arrays()
            views = list(map(torch.from_numpy, fields.values()))
        else:
            words = torch.empty(plan.num_words, dtype=torch.int64, device=self._device)
            views = [
                words.view(torch_dtype(dtype)).as_strided(shape, strides, start)
                for _, dtype, shape, strides, start in plan.fields
            ]
        if self._is_nested:
            build, count = self.layout.build_obs, len(self.layout.obs)
            obs, future = views[:count], views[count : 2 * count]
            views[: 2 * count] = build(obs), build(future)
        extra: dict[str, torch.Tensor] = {}
        if self._extra:
            extra = dict(zip(self._extra, views[len(_PAIR_FIELDS) + 3 :], strict=True))
            views[len(_PAIR_FIELDS) + 3 :] = ()
        memory = PairMemory(words, batch_size, self.layout)
        return PairBatch(*views, extras=extra, memory=memory)

    def _plan(self, batch_size: int) -> _PairPlan:
        """How the fields of a batch of pairs lie in its block."""
        layout = self.layout
        width, obs_width = layout.num_words, layout.obs_words
        future, offsets = batch_size * width, batch_size * (width + obs_width)
        row, later = (width, 0, 0), (obs_width, future, HEADER_BYTES)
        placed = [(name, layout.fields[name], *row) for name in layout.obs]
        placed += [("future " + name, layout.fields[name], *later) for name in layout.obs]
        numbers = Field("offsets", (), np.dtype(np.int64), 0)
        placed.append(("offsets", numbers, 1, offsets, 0))
        placed += [(n, layout.fields[n], *row) for n in (*_PAIR_FIELDS, *layout.extras)]
        fields = []
        for name, field, row_words, begin, skip in placed:
            view = plan_view(field, skip)
            strides = (row_words * 8 // view.itemsize, *view.strides)
            start = begin * 8 // view.itemsize + view.start
            shape = (batch_size, *field.shape)
            fields.append(_PairField(name, field.dtype, shape, strides, start))
        num_words = offsets + 2 * batch_size
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        places = {field.name: field.in_bytes for field in fields}
        plan = self._plans[batch_size] = _PairPlan(fields, num_words, places)
        return plan

    def _new_narrow(self, batch_size: int, columns: frozenset[str]) -> PairBatch:
        """A batch of some columns, each contiguous; on devices a whole one that shows them only."""
        if self._device.type != "cpu" or self._is_staged:
            whole = self.new(batch_size)
            found = {name: getattr(whole, name) for name in {*columns, "offsets"} - {*self._extra}}
            extras = {name: whole.extras[name] for name in self._extra if name in columns}
            memory = whole.memory._replace(columns=columns)
            return PairBatch._made_of({**found, "extras": extras, "memory": memory})
        key = batch_size, columns
        plan = self._narrow_plans.get(key) or self._plan_narrow(*key)
        words, fields = plan.new_arrays()
        tensors = {name: torch.from_numpy(array) for name, array in fields.items()}
        if self._is_nested:
            for column, prefix in (("obs", ""), ("future_obs", "future ")):
                if column in columns:
                    leaves = [tensors.pop(prefix + name) for name in self.layout.obs]
                    tensors[column] = self.layout.build_obs(leaves)
        elif "future obs" in tensors:
            tensors["future_obs"] = tensors.pop("future obs")
        extras = {name: tensors.pop(name) for name in self._extra if name in columns}
        memory = PairMemory(words, batch_size, self.layout, columns, plan.copies)
        return PairBatch._made_of({**tensors, "extras": extras, "memory": memory})

    def _plan_narrow(self, batch_size: int, columns: frozenset[str]) -> _PairPlan:
        """How some columns lie in a block, behind offsets and the rows of both observations."""
        layout = self.layout
        chosen = [("offsets", None, 0)]
        for column, prefix, is_later in (("obs", "", 0), ("future_obs", "future ", 1)):
            if column in columns:
                chosen += [(prefix + name, layout.fields[name], is_later) for name in layout.obs]
        others = [name for name in (*_PAIR_FIELDS, *layout.extras) if name in columns]
        chosen += [(name, layout.fields[name], 0) for name in others]
        fields, copies, end = [], [], 3 * 8 * batch_size
        for name, field, is_later in chosen:
            if field is None:
                fields.append(_PairField(name, np.dtype(np.int64), (batch_size,), (1,), 0))
                continue
            end += -end % _ALIGNMENT
            copies.append((field.offset, field.nbytes, end, is_later))
            strides = (field.nbytes // field.dtype.itemsize, *plan_view(field).strides)
            start, shape = end // field.dtype.itemsize, (batch_size, *field.shape)
            fields.append(_PairField(name, field.dtype, shape, strides, start))
            end += field.nbytes * batch_size
        end += -end % 8
        if len(self._narrow_plans) >= _MAX_PLANS:
            self._narrow_plans.clear()
        places = {field.name: field.in_bytes for field in fields}
        table = np.array(copies, np.int64).reshape(-1, 4)
        plan = self._narrow_plans[batch_size, columns] = _PairPlan(fields, end // 8, places, table)
        return plan

    def check(self, out: Any, batch_size: int, columns: frozenset[str] | None = None) -> PairBatch:
        """The batch to be written again; raise BufferMisuseError unless it fits."""
        if not isinstance(out, PairBatch) or getattr(out.memory, "layout", None) is not self.layout:
            raise BufferMisuseError(
                f"out is {type(out).__name__}, expected a PairBatch that sample of this buffer "
                "returned"
            )
        if out.memory.size != batch_size:
            raise BufferMisuseError(f"out has {out.memory.size} rows, expected {batch_size}")
        if columns is not None and columns != out.memory.columns:
            raise BufferMisuseError(
                f"out has other columns than {sorted(columns)}; pass a batch drawn with the same"
            )
        return out


class WindowTable:
    """Which episodes have windows, and how many; made anew after insertions.

    Attributes:
        period: Steps from the begin of a window to that of the next.
        slots: int64 (E,), the episodes with a window.
        ends: int64 (E,), windows in these and all listed before.
        on_device: int64 (2, max_episodes) and (2,): slots and ends, the last end repeated, and E
            and the number of windows; None before the first `prepare`. They never move, so a CUDA
            graph sees later insertions.
    """

    def __init__(self, storage: EpisodicStorage):
        self._storage = storage
        self._key: tuple[int, SequenceOptions | None] = (-1, None)
        self.period = 1
        self._memory = np.zeros((2, storage.layout.max_episodes), np.int64)
        self.slots, self.ends = self._memory[:, :0]
        self._blocks = StagingBlocks(storage.device, "use fewer episodes")
        self.on_device: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        tables = () if self.on_device is None else self.on_device
        return self._memory.nbytes + self._blocks.nbytes + sum(table.nbytes for table in tables)

    @property
    def total(self) -> int:
        """Number of windows."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def prepare(self, options: SequenceOptions) -> int:
        """List the windows there are; return how many."""
        storage = self._storage
        if self._key != (storage.version, options):
            episodes, self.period = storage.tables["episodes"], options.period
            sizes = options.needed, options.needed_at_start, options.period
            count = int(count_windows(storage.counters, episodes, *sizes, *self._memory))
            self.slots, self.ends = self._memory[:, :count]
            if storage.is_staged:
                self._memory[1, count:] = self.total
                self._send(np.array([count, self.total]))
            self._key = storage.version, options
        return self.total

    def _send(self, counts: np.ndarray) -> None:
        """Enqueue the copy of the table, and of what it has, to its place on the device."""
        with self._blocks.sent("a table of windows", self._memory, counts) as (table, numbers):
            if self.on_device is None:
                with torch.inference_mode(False):
                    self.on_device = torch.empty_like(table), torch.empty_like(numbers)
            for target, given in zip(self.on_device, (table, numbers), strict=True):
                target.copy_(given)


class CompiledSampler:
    """Draws on the CPU, by compiled code.

    Attributes:
        windows: The windows of the last length asked for.
        generator: What is drawn by.
        words: Its state, for kernels.
    """

    def __init__(self, storage: EpisodicStorage, seed: int | None):
        self.windows = WindowTable(storage)
        self.generator = HostGenerator(seed, saved_as=np.uint64)
        self.words = self.generator.words
        self._rows = storage.rows.numpy()
        tables = storage.tables
        self._episodes = tables["episodes"]
        self._sources = (
            self._rows,
            tables["starts"],
            tables["episodes"],
            tables["drawable"],
            tables["counters"],
            self.words,
        )

    def fill_pairs(self, batch: PairBatch, discount: float, by_episode: bool) -> None:
        """Draw pairs into a batch."""
        log = math.log(discount) if discount > 0 else -math.inf
        words, size = batch.memory.words, batch.memory.size
        if batch.memory.plan is not None:
            draw_pair_fields(*self._sources, log, by_episode, batch.memory.plan, size, words)
            return
        draw_pairs(*self._sources, log, by_episode, HEADER_WORDS, size, words)

    def draw_windows(self, batch_size: int, by_episode: bool) -> torch.Tensor:
        """First rows int64 (B,) of windows of the length `windows` was prepared for."""
        chosen = np.empty(batch_size, np.int64)
        table, num_rows = self.windows, len(self._rows)
        slots, ends = table.slots, table.ends
        draw_windows(
            num_rows, self._episodes, slots, ends, table.period, self.words, by_episode, chosen
        )
        return torch.from_numpy(chosen)

    def draw_goals(
        self, chosen: torch.Tensor, strategy: str, relabel_ratio: float, discount: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows int64 (B,) of goals, and whether to use them, bool (B,)."""
        goals, relabelled = np.empty(len(chosen), np.int64), np.empty(len(chosen), np.bool_)
        log = math.log(discount) if discount > 0 else -math.inf
        options = STRATEGIES[strategy], float(relabel_ratio), log
        draw_goals(self._rows, chosen.numpy(), *options, self.words, goals, relabelled)
        return torch.from_numpy(goals), torch.from_numpy(relabelled)

    def gather(self, chosen: torch.Tensor, out: torch.Tensor, *, bare: bool) -> torch.Tensor:
        """Copy rows (or, bare, their observations) into out int64 (*K, W); -1 means zeros."""
        flat = out.flatten(0, -2).numpy()
        gather_rows(self._rows, chosen.reshape(-1).numpy(), HEADER_WORDS if bare else 0, flat)
        return out

    def uniforms(self, count: int) -> torch.Tensor:
        """Numbers float64 (K,) from 0 to below 1, from the same generator."""
        out = np.empty(count)
        draw_uniforms(self.words, out)
        return torch.from_numpy(out)


class TorchSampler:
    """The same in torch, on any device, without waiting for it; has the methods of the other.

    Numbers of steps and episodes are read on the device, so that `fill_pairs` can be captured in a
    CUDA graph (register `generator.torch` with it) and sees later insertions.
    """

    def __init__(self, storage: EpisodicStorage, seed: int | None):
        self.windows = WindowTable(storage)
        self._rows, self._tables = storage.rows, storage.device_tables
        self._device = storage.device
        self._headers = storage.rows[:, :HEADER_WORDS]
        obs_stop = HEADER_WORDS + storage.layout.row.obs_words
        self._observations = storage.rows[:, HEADER_WORDS:obs_stop]
        self.generator = DeviceGenerator(seed, storage.device)

    def uniforms(self, count: int) -> torch.Tensor:
        """Numbers float64 (K,) from 0 to below 1."""
        generator = self.generator.torch
        return torch.rand(count, dtype=torch.float64, device=self._device, generator=generator)

    def fill_pairs(self, batch: PairBatch, discount: float, by_episode: bool) -> None:
        """Draw pairs into a batch."""
        counters, starts = self._tables["counters"], self._tables["starts"]
        start, future, offsets, chosen = batch.memory.parts()
        uniforms = self.uniforms(3 * len(offsets)).view(3, -1)
        first, count = counters[FIRST_START], counters[NUM_STARTS]
        if by_episode:
            drawable = self._tables["drawable"]
            number = (uniforms[0] * counters[NUM_DRAWABLE]).long()
            slots = drawable[(counters[FIRST_DRAWABLE] + number) % len(drawable)]
            first, count = self._tables["episodes"].index_select(0, slots)[:, 2:].unbind(1)
        places = (first + (uniforms[1] * count).long()) % len(starts)
        rows = starts.index_select(0, places).long()
        torch.index_select(self._rows, 0, rows, out=start)
        offsets.copy_(offsets_below(uniforms[2], start[:, 0] & _LOW, discount))
        torch.remainder(rows + offsets, len(self._rows), out=chosen)
        torch.index_select(self._observations, 0, chosen, out=future)

    def draw_windows(self, batch_size: int, by_episode: bool) -> torch.Tensor:
        """First rows int64 (B,) of windows of the length `windows` was prepared for."""
        assert self.windows.on_device is not None
        (slots, ends), (count, total) = self.windows.on_device
        first, second = self.uniforms(2 * batch_size).view(2, -1)
        before = torch.nn.functional.pad(ends[:-1], (1, 0))
        if by_episode:
            chosen = (first * count).long()
            positions = (second * (ends - before)[chosen]).long()
        else:
            numbers = (first * total).long()
            chosen = torch.searchsorted(ends, numbers, right=True)
            positions = numbers - before[chosen]
        begins = self._tables["episodes"][:, 0]
        return (begins[slots[chosen]] + positions * self.windows.period) % len(self._rows)

    def draw_goals(
        self, chosen: torch.Tensor, strategy: str, relabel_ratio: float, discount: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows int64 (B,) of goals, and whether to use them, bool (B,)."""
        headers = self._headers.index_select(0, chosen)
        steps, remaining = headers[:, 0] >> 32 & _LOW, headers[:, 1] & _LOW
        uniforms = self.uniforms(2 * len(chosen)).view(2, -1)
        if strategy == "final":
            later = remaining
        elif strategy == "episode":
            later = 1 + (uniforms[1] * (steps + remaining)).long() - steps
        else:
            rooms = remaining if strategy == "future" else headers[:, 0] & _LOW
            later = offsets_below(uniforms[1], rooms, discount)
        return (chosen + later) % len(self._rows), uniforms[0] < relabel_ratio

    def gather(self, chosen: torch.Tensor, out: torch.Tensor, *, bare: bool) -> torch.Tensor:
        """Copy rows (or, bare, their observations) into out int64 (*K, W); -1 means zeros."""
        flat, chosen = out.flatten(0, -2), chosen.reshape(-1)
        source = self._observations if bare else self._rows
        torch.index_select(source, 0, chosen.clamp(min=0), out=flat)
        flat.masked_fill_((chosen < 0)[:, None], 0)
        return out


def offsets_below(uniforms: torch.Tensor, rooms: torch.Tensor, discount: float) -> torch.Tensor:
    """Numbers int64 (B,) from 1 to room, with probability proportional to discount ** number.

    Args:
        uniforms: float64 (B,), from 0 to below 1.
        rooms: int64 (B,), at least 1.
        discount: From 0 to 1.
    """
    if discount == 1:
        offsets = (uniforms * rooms).long()
    elif discount == 0:
        return torch.ones_like(rooms)
    else:
        log: Any = math.log(discount)
        mass = -torch.expm1(rooms * log)
        offsets = (torch.log1p(-uniforms * mass) / log).long()
    return torch.minimum(offsets, rooms - 1) + 1


@njit(nogil=True, cache=True)
def count_windows(counters, episodes, needed, needed_at_start, period, slots, ends):
    """List the episodes that have windows, and count these.

    Args:
        counters, episodes: The tables.
        needed, needed_at_start, period: See `SequenceOptions`.
        slots: int64 (M,), written: the episodes with a window.
        ends: int64 (M,), written: the number of windows in these and all listed before.

    Returns:
        How many episodes were listed.
    """
    count, total = 0, 0
    for e in range(counters[NUM_EPISODES]):
        slot = (counters[FIRST_EPISODE] + e) % episodes.shape[0]
        length, windows = episodes[slot, 1], 0
        if length >= needed:
            windows = (length - needed) // period + 1
        elif length >= needed_at_start:
            windows = 1
        if windows > 0:
            total += windows
            slots[count] = slot
            ends[count] = total
            count += 1
    return count


@njit(nogil=True, cache=True)
def draw_uniforms(generator, out):
    """Fill out float64 (K,) with numbers from 0 to below 1; generator uint64 (2,) moves on."""
    key, counter = generator[0], generator[1]
    for k in range(out.shape[0]):
        out[k] = unit_float(random_word(key, counter))
        counter = np.add(counter, _ONE)
    generator[1] = counter


@njit(nogil=True, cache=True)
def gather_rows(rows, chosen, first_word, out):
    """Copy rows into out int64 (K, V), as many words of each as there are; -1 means zeros.

    Args:
        rows: int64 (R, W).
        chosen: int64 (K,).
        first_word: Where in a row to begin.
        out: int64 (K, V).
    """
    row_bytes, out_bytes = 8 * rows.shape[1], 8 * out.shape[1]
    for k in range(chosen.shape[0]):
        if chosen[k] >= 0:
            start = address_of(rows) + chosen[k] * row_bytes + 8 * first_word
            copy_at(address_of(out) + k * out_bytes, start, out_bytes)
        else:
            out[k] = 0


@njit(nogil=True, cache=True)
def _offset_below(uniform, room, log_discount):
    """A number from 1 to room with probability proportional to discount ** number.

    The distribution function of the truncated law is inverted; nothing is clipped but rounding.
    """
    if log_discount == 0.0:
        offset = int(uniform * room)
    elif log_discount < -1e-4:  # the quicker functions still have twelve digits
        mass = 1.0 - math.exp(room * log_discount)
        offset = int(math.log(1.0 - uniform * mass) / log_discount)
    else:
        mass = -math.expm1(room * log_discount)  # of the law before it is truncated
        offset = int(math.log1p(-uniform * mass) / log_discount)
    return min(offset, room - 1) + 1


@njit(nogil=True, cache=True)
def draw_pairs(
    rows, starts, episodes, drawable, counters, generator, log_discount, by_episode, first_word,
    batch_size, out,
):  # fmt: skip
    """Draw steps that have room, and for each a later one within its room.

    Memory is asked for one loop before it is read, so that the waits for it overlap.

    Args:
        rows, starts, episodes, drawable, counters: The tables.
        generator: uint64 (2,), moves on.
        log_discount: Natural logarithm of the discount; 0 for equal probabilities.
        by_episode: Draw episodes with equal probability, not steps.
        first_word: Where in a row the observation begins.
        batch_size: B.
        out: int64 (B * W + B * V + B + B,), written: the rows, the observations of the later steps,
            how much later they are, and their rows.
    """
    width = rows.shape[1]
    begin = batch_size * width
    end = out.shape[0] - 2 * batch_size
    row_bytes, obs_bytes = 8 * width, 8 * ((end - begin) // batch_size)
    offsets, chosen = out[end : end + batch_size], out[end + batch_size :]
    key, counter = generator[0], generator[1]
    capacity, num_rows = starts.shape[0], rows.shape[0]
    to, source = address_of(out), address_of(rows)
    for b in range(chosen.shape[0]):
        first, count = counters[FIRST_START], counters[NUM_STARTS]
        if by_episode:
            number = int(unit_float(random_word(key, counter)) * counters[NUM_DRAWABLE])
            slot = drawable[(counters[FIRST_DRAWABLE] + number) % drawable.shape[0]]
            first, count = episodes[slot, 2], episodes[slot, 3]
            counter = np.add(counter, _ONE)
        place = first + int(unit_float(random_word(key, counter)) * count)
        counter = np.add(counter, _ONE)
        row = starts[place - capacity if place >= capacity else place]
        chosen[b] = row
        for line in range(0, row_bytes, 64):
            prefetch(rows, row * row_bytes + line)
    for b in range(chosen.shape[0]):
        row, uniform = chosen[b], unit_float(random_word(key, counter))
        counter = np.add(counter, _ONE)
        offset = _offset_below(uniform, rows[row, 0] & _LOW, log_discount)
        copy_item_at(to + b * row_bytes, source + row * row_bytes, row_bytes)
        row += offset
        row = row - num_rows if row >= num_rows else row
        chosen[b] = row
        offsets[b] = offset
        for line in range(0, obs_bytes, 64):
            prefetch(rows, row * row_bytes + 8 * first_word + line)
    begin *= 8
    for b in range(chosen.shape[0]):
        start = chosen[b] * row_bytes + 8 * first_word
        copy_item_at(to + begin + b * obs_bytes, source + start, obs_bytes)
    generator[1] = counter


@njit(nogil=True, cache=True)
def draw_pair_fields(
    rows, starts, episodes, drawable, counters, generator, log_discount, by_episode, plan,
    batch_size, out,
):  # fmt: skip
    """Draw the pairs that `draw_pairs` draws, and copy some of their fields.

    Args:
        rows, starts, episodes, drawable, counters, generator, log_discount, by_episode: As there.
        plan: int64 (F, 4), of each field its byte in the row, its bytes, its byte in `out`, and
            whether it is of the later row.
        batch_size: B.
        out: int64, written: B offsets, B rows, B rows of the later steps, and the fields.
    """
    row_bytes, num_rows, capacity = 8 * rows.shape[1], rows.shape[0], starts.shape[0]
    offsets, chosen = out[:batch_size], out[batch_size : 2 * batch_size]
    later = out[2 * batch_size : 3 * batch_size]
    to, source = address_of(out), address_of(rows)
    key, first_word = generator[0], generator[1]
    each = 2 if by_episode else 1  # words for a step
    for begin in range(0, batch_size, _BLOCK):
        stop = min(begin + _BLOCK, batch_size)
        for b in range(begin, stop):
            word = np.add(first_word, np.uint64(each * b))
            first, count = counters[FIRST_START], counters[NUM_STARTS]
            if by_episode:
                number = int(unit_float(random_word(key, word)) * counters[NUM_DRAWABLE])
                slot = drawable[(counters[FIRST_DRAWABLE] + number) % drawable.shape[0]]
                first, count = episodes[slot, 2], episodes[slot, 3]
                word = np.add(word, _ONE)
            place = first + int(unit_float(random_word(key, word)) * count)
            chosen[b] = place - capacity if place >= capacity else place
            prefetch(starts, 4 * chosen[b])
        for b in range(begin, stop):
            row = np.int64(starts[chosen[b]])
            chosen[b] = row
            prefetch(rows, row * row_bytes)
            for f in range(plan.shape[0]):
                if plan[f, 3] == 0:
                    ask_for_field(rows, row * row_bytes + plan[f, 0], plan[f, 1])
        for b in range(begin, stop):
            row = chosen[b]
            word = np.add(first_word, np.uint64(each * batch_size + b))
            uniform = unit_float(random_word(key, word))
            offset = _offset_below(uniform, rows[row, 0] & _LOW, log_discount)
            other = row + offset
            other = other - num_rows if other >= num_rows else other
            offsets[b], later[b] = offset, other
            for f in range(plan.shape[0]):
                if plan[f, 3] == 1:
                    ask_for_field(rows, other * row_bytes + plan[f, 0], plan[f, 1])
                else:
                    target, size = to + plan[f, 2] + b * plan[f, 1], plan[f, 1]
                    copy_item_at(target, source + row * row_bytes + plan[f, 0], size)
        for f in range(plan.shape[0]):
            if plan[f, 3] == 1:
                offset, size = plan[f, 0], plan[f, 1]
                for b in range(begin, stop):
                    target = to + plan[f, 2] + b * size
                    copy_item_at(target, source + later[b] * row_bytes + offset, size)
    generator[1] = np.add(first_word, np.uint64((each + 1) * batch_size))


@njit(nogil=True, cache=True)
def ask_for_field(rows, start, count):
    """Prefetch the lines of `count` bytes from byte `start` of the table on."""
    for offset in range(start, start + count, 64):
        prefetch(rows, offset)
    prefetch(rows, start + count - 1)


@njit(nogil=True, cache=True)
def draw_windows(num_rows, episodes, slots, ends, period, generator, by_episode, chosen):
    """Draw first steps of windows.

    Args:
        num_rows: Of the ring.
        episodes: int64 (M, 4), the table.
        slots, ends: int64 (E,), as `count_windows` wrote them.
        period: Steps from the begin of a window to that of the next.
        generator: uint64 (2,), moves on.
        by_episode: Draw episodes with equal probability, not windows.
        chosen: int64 (B,), written: rows.
    """
    key, counter = generator[0], generator[1]
    for b in range(chosen.shape[0]):
        uniform = unit_float(random_word(key, counter))
        counter = np.add(counter, _ONE)
        if by_episode:
            e = int(uniform * slots.shape[0])
            count = ends[e] - (ends[e - 1] if e > 0 else 0)
            position = int(unit_float(random_word(key, counter)) * count)
            counter = np.add(counter, _ONE)
        else:
            number = int(uniform * ends[ends.shape[0] - 1])
            e = np.searchsorted(ends, number, side="right")
            position = number - (ends[e - 1] if e > 0 else 0)
        row = episodes[slots[e], 0] + position * period
        chosen[b] = row - num_rows if row >= num_rows else row
    generator[1] = counter


@njit(nogil=True, cache=True)
def draw_goals(
    rows, chosen, strategy, relabel_ratio, log_discount, generator, goals, relabelled
):  # fmt: skip
    """Draw for each step the row of the observation that is to be its goal.

    Args:
        rows: int64 (R, W), the table.
        chosen: int64 (B,), rows of steps; for strategy 3 of those with room.
        strategy: 0 future: one of the observations after the step; 1 final: the last of the
            episode; 2 episode: any but the first of the episode; 3 bound: one after the step, not
            beyond its bound.
        relabel_ratio: Probability of a new goal.
        log_discount: Of strategies 0 and 3, natural logarithm of the discount.
        generator: uint64 (2,), moves on.
        goals: int64 (B,), written: rows.
        relabelled: bool (B,), written: whether the goal is to be used.
    """
    key, counter = generator[0], generator[1]
    num_rows = rows.shape[0]
    for b in range(chosen.shape[0]):
        row = chosen[b]
        step, remaining = (rows[row, 0] >> 32) & _LOW, rows[row, 1] & _LOW
        relabelled[b] = unit_float(random_word(key, counter)) < relabel_ratio
        counter = np.add(counter, _ONE)
        uniform = unit_float(random_word(key, counter))
        counter = np.add(counter, _ONE)
        if strategy == 1:
            later = remaining
        elif strategy == 2:
            later = 1 + int(uniform * (step + remaining)) - step
        else:
            room = remaining if strategy == 0 else rows[row, 0] & _LOW
            later = _offset_below(uniform, room, log_discount)
        goals[b] = (row + later) % num_rows
    generator[1] = counter
