"""Draws from episodes: row numbers, from counts and a random stream.

Draws are operations of torch on hosts and devices, and never wait for a device. On the host,
compiled code draws pairs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.errors import BufferMisuseError
from buffers.core.generator import DeviceGenerator, HostGenerator
from buffers.core.kernels import njit, prefetch, random_word, unit_float
from buffers.episodic.table import HOLE, PAIRS, EpisodeTable

__all__ = ["STRATEGIES", "Draws", "Steps", "is_by_episode", "offsets_below"]

STRATEGIES = ("bound", "episode", "final", "future")
_OVER = {"steps": False, "episodes": True}
_LOW = 0xFFFFFFFF
_ASKED_BYTES = 512  # prefetched of a row that is about to be copied
_ONE = np.uint64(1)


def is_by_episode(over: str) -> bool:
    """Whether `over` is "episodes", not "steps"; raise BufferMisuseError for other values."""
    by_episode = _OVER.get(over) if isinstance(over, str) else None
    if by_episode is None:
        raise BufferMisuseError(f"over is {over!r}, expected one of {sorted(_OVER)}")
    return by_episode


class Steps(NamedTuple):
    """B drawn steps: int64 (B,) each."""

    first: torch.Tensor  # the first row of the episode
    length: torch.Tensor  # of the episode
    step: torch.Tensor


class Draws:
    """Draws from the episodes of a table by its `generator`."""

    def __init__(self, table: EpisodeTable, seed: int | None):
        self._table, self._num_rows = table, table.layout.num_rows
        self._is_compiled = not table.is_staged
        self.generator: Any
        if self._is_compiled:
            self.generator = HostGenerator(seed)
        else:
            self.generator = DeviceGenerator(seed, table.device)

    def uniforms(self, number: int, count: int) -> torch.Tensor:
        """Random numbers float64 (number, count) in [0, 1)."""
        if self._is_compiled:
            out = np.empty((number, count))
            draw_uniforms(self.generator.words, out.reshape(-1))
            return torch.from_numpy(out)
        device, generator = self._table.device, self.generator.torch
        shape = number, count
        return torch.rand(shape, dtype=torch.float64, device=device, generator=generator)

    def steps(self, law: int, period: int, batch_size: int, by_episode: bool) -> Steps:
        """Draw first steps of pairs or windows, by the law PAIRS or WINDOWS; it must not be empty.

        Windows begin every `period` steps. With `by_episode`, episodes are equally likely.
        """
        table = self._table.there
        pick, place = self.uniforms(2, batch_size)
        before = table[law + by_episode]
        low, high = before.index_select(0, self._table.live_there)
        numbers = low + (pick * (high - low)).long()
        if before.is_cpu:  # torch's searchsorted would start threads for some hundred numbers
            found: Any = np.searchsorted(before.numpy(), numbers.numpy(), side="right")
            slots = torch.from_numpy(found) - 1
        else:
            slots = torch.searchsorted(before, numbers, right=True) - 1
        first, length, hole = table[:PAIRS].index_select(1, slots)
        begin = table[law].index_select(0, slots)
        if by_episode:
            counts = table[law].index_select(0, slots + 1) - begin
            step = (place * counts).long() * period
        else:
            step = (numbers - begin) * period
        return Steps(first, length, step + (step >= hole) if law == PAIRS else step)

    def rows(self, steps: Steps, later: torch.Tensor | int = 0) -> torch.Tensor:
        """Rows of the steps `later` steps after, (B,), or (B, L) if `later` is (B, L)."""
        begin = steps.first + steps.step
        is_run = isinstance(later, torch.Tensor) and later.ndim == 2
        return ((begin[:, None] if is_run else begin) + later) % self._num_rows

    def rooms(self, rows: torch.Tensor) -> torch.Tensor:
        """Distances int64 (B,) of the steps in rows int64 (B,) to their bounds."""
        return self._table.columns["room"].index_select(0, rows).long()

    def pairs(self, batch_size: int, discount: float, by_episode: bool) -> tuple[Any, torch.Tensor]:
        """Draw rows int64 (2, B) of steps and of later ones, an array on the host, else a tensor.

        Returns also the distances of each pair in steps, int64 (B,).
        """
        if self._is_compiled:
            table, words = self._table, self.generator.words
            rows, offsets = np.empty((2, batch_size), np.int64), np.empty(batch_size, np.int64)
            log = math.log(discount) if discount > 0 else -math.inf
            law = table.live.begin, table.live.end, log, by_episode
            draw_pairs(table.rows.numpy(), table.table, words, law, rows, offsets)
            return rows, torch.from_numpy(offsets)
        steps = self.steps(PAIRS, 1, batch_size, by_episode)
        rows = self.rows(steps)
        later = offsets_below(self.uniforms(1, batch_size)[0], self.rooms(rows), discount)
        return torch.stack([rows, (rows + later) % self._num_rows]), later

    def goals(
        self, steps: Steps, strategy: str, relabel_ratio: float, discount: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Distances int64 (B,) from steps to their goals, and whether to use them, bool (B,)."""
        uses, place = self.uniforms(2, len(steps.step))
        remaining = steps.length - steps.step
        if strategy == "final":
            later = remaining
        elif strategy == "episode":
            later = 1 + (place * steps.length).long() - steps.step
        else:
            rooms = remaining if strategy == "future" else self.rooms(self.rows(steps))
            later = offsets_below(place, rooms, discount)
        return later, uses < relabel_ratio


def offsets_below(uniforms: torch.Tensor, rooms: torch.Tensor, discount: float) -> torch.Tensor:
    """Numbers int64 (B,) from 1 to room, with probability proportional to discount ** number.

    They are computed from uniforms float64 (B,), in [0, 1), and rooms int64 (B,), at least 1.
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
def draw_uniforms(generator, out):
    """Fill out float64 (K,) with random numbers in [0, 1); advance generator uint64 (2,)."""
    key, counter = generator[0], generator[1]
    for k in range(out.shape[0]):
        out[k] = unit_float(random_word(key, counter))
        counter = np.add(counter, _ONE)
    generator[1] = counter


@njit(nogil=True, cache=True)
def offset_below(uniform, room, log_discount):
    """A number from 1 to room with probability proportional to discount ** number.

    It inverts the distribution function of the truncated law; `min` only clips rounding errors.
    """
    if log_discount == 0.0:
        offset = int(uniform * room)
    elif log_discount < -1e-4:  # log and exp are faster, and exact to twelve digits here
        mass = 1.0 - math.exp(room * log_discount)
        offset = int(math.log(1.0 - uniform * mass) / log_discount)
    else:
        mass = -math.expm1(room * log_discount)  # of 1 .. room in the law that is not truncated
        offset = int(math.log1p(-uniform * mass) / log_discount)
    return min(offset, room - 1) + 1


@njit(nogil=True, cache=True)
def draw_pairs(rows, table, generator, law, chosen, offsets):
    """Draw steps that have room, and for each a later one within its room.

    Args:
        rows: int64 (R, W), the ring; `room` is the lower half of the first word.
        table: int64 (7, S), see `episodic.table`.
        generator: uint64 (2,), advanced.
        law: First and end slot; logarithm of the discount; whether to draw by episodes.
        chosen: int64 (2, B), written: rows of the steps and of the later ones.
        offsets: int64 (B,), written: distances in steps.
    """
    begin, end, log_discount, by_episode = law
    key, counter = generator[0], generator[1]
    num_rows, row_bytes, before = rows.shape[0], 8 * rows.shape[1], table[PAIRS]
    asked_bytes = min(row_bytes, _ASKED_BYTES)
    picked = table[PAIRS + 1] if by_episode else before
    low, count, size = picked[begin], picked[end] - picked[begin], end - begin
    slots, numbers, batch_size = chosen[0], chosen[1], offsets.shape[0]
    for b in range(batch_size):
        numbers[b] = low + int(unit_float(random_word(key, counter)) * count)
        slots[b] = begin
        counter = np.add(counter, _ONE)
    while size > 1:  # binary search for all draws at once, without branches
        half = size >> 1
        for b in range(batch_size):
            slots[b] += half * (picked[np.uint64(slots[b] + half)] <= numbers[b])
        size -= half
    for b in range(batch_size):
        slot = slots[b]
        step = numbers[b] - before[slot]
        if by_episode:
            number_of_steps = before[slot + 1] - before[slot]
            step = int(unit_float(random_word(key, counter)) * number_of_steps)
            counter = np.add(counter, _ONE)
        step += step >= table[HOLE, slot]  # skip the hole
        row = table[0, slot] + step
        row -= num_rows if row >= num_rows else 0
        chosen[0, b] = row
        for line in range(0, asked_bytes, 64):  # so that cache misses overlap
            prefetch(rows, row * row_bytes + line)
    for b in range(batch_size):
        offsets[b] = rows[chosen[0, b], 0] & _LOW
    for b in range(batch_size):
        uniform, row = unit_float(random_word(key, counter)), chosen[0, b]
        counter = np.add(counter, _ONE)
        offsets[b] = offset_below(uniform, offsets[b], log_discount)
        row += offsets[b]
        row -= num_rows if row >= num_rows else 0
        chosen[1, b] = row
        for line in range(0, asked_bytes, 64):
            prefetch(rows, row * row_bytes + line)
    generator[1] = counter
