"""Drawing from the episodes of a ring: compiled kernels on the CPU, torch on other devices."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.batches import BatchArrays, BatchMemory
from buffers.core.columns import torch_dtype
from buffers.core.compiling import njit
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import DeviceGenerator, HostGenerator
from buffers.core.kernels import copy_bytes, prefetch, random_word, unit_float
from buffers.core.rows import Field, RowLayout, plan_view
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

STRATEGIES = {"future": 0, "final": 1, "episode": 2}
_OVER = {"steps": False, "episodes": True}
_LOW = 0xFFFFFFFF
_ONE = np.uint64(1)
_MAX_PLANS = 64
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


class _PairPlan(NamedTuple):
    fields: list[_PairField]
    num_words: int
    memory: BatchMemory


class PairPlanner:
    """Makes batches of pairs.

    Args:
        layout: Of the rows.
        device: Where batches live.
    """

    def __init__(self, layout: RowLayout, device: torch.device):
        self.layout, self._device = layout, device
        self._extra, self._is_nested = layout.extras, layout.obs[0] != "obs"
        self._plans: dict[int, _PairPlan] = {}

    def new(self, batch_size: int) -> PairBatch:
        """A batch of pairs in memory of its own, not filled yet."""
        plan = self._plans.get(batch_size) or self._plan(batch_size)
        if self._device.type == "cpu":
            kept = plan.memory.take()
            words, *fields = kept.arrays.values()
            views = list(map(torch.from_numpy, fields))
            plan.memory.keep(kept)
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
        memory = BatchMemory(8 * num_words, lambda pages: (_view_pairs(pages, fields), None))
        plan = self._plans[batch_size] = _PairPlan(fields, num_words, memory)
        return plan

    def check(self, out: Any, batch_size: int) -> PairBatch:
        """The batch to be written again; raise BufferMisuseError unless it fits."""
        if not isinstance(out, PairBatch) or getattr(out.memory, "layout", None) is not self.layout:
            raise BufferMisuseError(
                f"out is {type(out).__name__}, expected a PairBatch that sample of this buffer "
                "returned"
            )
        if out.memory.size != batch_size:
            raise BufferMisuseError(f"out has {out.memory.size} rows, expected {batch_size}")
        return out


def _view_pairs(pages: np.ndarray, fields: list[_PairField]) -> BatchArrays:
    """Arrays over the words of a PairBatch: all of them, int64, and then its fields."""
    arrays = {"": pages.view(np.int64)}
    for name, dtype, shape, strides, start in fields:
        size = dtype.itemsize
        steps = [stride * size for stride in strides]
        arrays[name] = np.ndarray(shape, dtype, pages, start * size, steps)
    return arrays


class WindowTable:
    """Which episodes have windows of one length, and how many; made anew after insertions.

    Attributes:
        slots: int64 (E,), the episodes with a window.
        ends: int64 (E,), windows in these and all listed before.
    """

    def __init__(self, storage: EpisodicStorage):
        self._storage = storage
        self._key: tuple[int, int] = (-1, 0)
        self._memory = np.zeros((2, storage.layout.max_episodes), np.int64)
        self.slots, self.ends = self._memory[:, :0]
        self.device_slots = self.device_ends = torch.zeros(0, dtype=torch.int64, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._memory.nbytes

    @property
    def total(self) -> int:
        """Number of windows."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def prepare(self, length: int) -> int:
        """List the windows of a length; return how many there are."""
        storage = self._storage
        if self._key != (storage.version, length):
            episodes = storage.tables["episodes"]
            count = int(count_windows(storage.counters, episodes, length, *self._memory))
            self.slots, self.ends = self._memory[:, :count]
            if storage.is_staged:
                table = torch.from_numpy(self._memory[:, :count]).to(storage.device, copy=True)
                self.device_slots, self.device_ends = table
            self._key = storage.version, length
        return self.total


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
        draw_pairs(*self._sources, log, by_episode, HEADER_WORDS, size, words)

    def draw_windows(self, batch_size: int, by_episode: bool) -> torch.Tensor:
        """First rows int64 (B,) of windows of the length `windows` was prepared for."""
        chosen = np.empty(batch_size, np.int64)
        table, num_rows = self.windows, len(self._rows)
        slots, ends = table.slots, table.ends
        draw_windows(num_rows, self._episodes, slots, ends, self.words, by_episode, chosen)
        return torch.from_numpy(chosen)

    def draw_goals(
        self, chosen: torch.Tensor, strategy: str, relabel_ratio: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows int64 (B,) of goals, and whether to use them, bool (B,)."""
        goals, relabelled = np.empty(len(chosen), np.int64), np.empty(len(chosen), np.bool_)
        number = STRATEGIES[strategy]
        rows = chosen.numpy()
        draw_goals(self._rows, rows, number, float(relabel_ratio), self.words, goals, relabelled)
        return torch.from_numpy(goals), torch.from_numpy(relabelled)

    def gather(self, chosen: torch.Tensor, out: torch.Tensor, *, bare: bool) -> torch.Tensor:
        """Copy rows (or, bare, their observations) into out int64 (*K, W); -1 means zeros."""
        flat = out.view(-1, out.shape[-1]).numpy()
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
        slots, ends = self.windows.device_slots, self.windows.device_ends
        first, second = self.uniforms(2 * batch_size).view(2, -1)
        before = torch.nn.functional.pad(ends[:-1], (1, 0))
        if by_episode:
            chosen = (first * len(slots)).long()
            positions = (second * (ends - before)[chosen]).long()
        else:
            numbers = (first * self.windows.total).long()
            chosen = torch.searchsorted(ends, numbers, right=True)
            positions = numbers - before[chosen]
        begins = self._tables["episodes"][:, 0]
        return (begins[slots[chosen]] + positions) % len(self._rows)

    def draw_goals(
        self, chosen: torch.Tensor, strategy: str, relabel_ratio: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows int64 (B,) of goals, and whether to use them, bool (B,)."""
        headers = self._headers.index_select(0, chosen)
        steps, remaining = headers[:, 0] >> 32 & _LOW, headers[:, 1] & _LOW
        uniforms = self.uniforms(2 * len(chosen)).view(2, -1)
        if strategy == "future":
            later = 1 + (uniforms[1] * remaining).long()
        elif strategy == "final":
            later = remaining
        else:
            later = 1 + (uniforms[1] * (steps + remaining)).long() - steps
        return (chosen + later) % len(self._rows), uniforms[0] < relabel_ratio

    def gather(self, chosen: torch.Tensor, out: torch.Tensor, *, bare: bool) -> torch.Tensor:
        """Copy rows (or, bare, their observations) into out int64 (*K, W); -1 means zeros."""
        flat, chosen = out.view(-1, out.shape[-1]), chosen.reshape(-1)
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
def count_windows(counters, episodes, sequence_length, slots, ends):
    """List the episodes that have windows of a length, and count these.

    Args:
        counters, episodes: The tables.
        sequence_length: Steps of a window.
        slots: int64 (M,), written: the episodes with a window.
        ends: int64 (M,), written: the number of windows in these and all listed before.

    Returns:
        How many episodes were listed.
    """
    count, total = 0, 0
    for e in range(counters[NUM_EPISODES]):
        slot = (counters[FIRST_EPISODE] + e) % episodes.shape[0]
        windows = episodes[slot, 1] - sequence_length + 1
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
            start = chosen[k] * row_bytes + 8 * first_word
            copy_bytes(out, k * out_bytes, rows, start, out_bytes)
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
        copy_bytes(out, b * row_bytes, rows, row * row_bytes, row_bytes)
        row += offset
        row = row - num_rows if row >= num_rows else row
        chosen[b] = row
        offsets[b] = offset
        for line in range(0, obs_bytes, 64):
            prefetch(rows, row * row_bytes + 8 * first_word + line)
    begin *= 8
    for b in range(chosen.shape[0]):
        start = chosen[b] * row_bytes + 8 * first_word
        copy_bytes(out, begin + b * obs_bytes, rows, start, obs_bytes)
    generator[1] = counter


@njit(nogil=True, cache=True)
def draw_windows(num_rows, episodes, slots, ends, generator, by_episode, chosen):
    """Draw first steps of windows.

    Args:
        num_rows: Of the ring.
        episodes: int64 (M, 4), the table.
        slots, ends: int64 (E,), as `count_windows` wrote them.
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
        row = episodes[slots[e], 0] + position
        chosen[b] = row - num_rows if row >= num_rows else row
    generator[1] = counter


@njit(nogil=True, cache=True)
def draw_goals(rows, chosen, strategy, relabel_ratio, generator, goals, relabelled):
    """Draw for each step the row of the observation that is to be its goal.

    Args:
        rows: int64 (R, W), the table.
        chosen: int64 (B,), rows of steps.
        strategy: 0 future: one of the observations after the step; 1 final: the last of the
            episode; 2 episode: any but the first of the episode.
        relabel_ratio: Probability of a new goal.
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
        if strategy == 0:
            later = 1 + int(uniform * remaining)
        elif strategy == 1:
            later = remaining
        else:
            later = 1 + int(uniform * (step + remaining)) - step
        goals[b] = (row + later) % num_rows
    generator[1] = counter
