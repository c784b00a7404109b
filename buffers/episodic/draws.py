"""What is drawn from episodes: row numbers, from counts and a random stream.

Operations of torch, on hosts and on devices, which they never wait for. Pairs on the host are drawn
by compiled code.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.compiling import njit
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import DeviceGenerator, HostGenerator
from buffers.core.kernels import random_word, unit_float
from buffers.episodic.table import HOLE, PAIRS, EpisodeTable

__all__ = ["STRATEGIES", "Draws", "Steps", "is_by_episode", "offsets_below"]

STRATEGIES = ("bound", "episode", "final", "future")
_OVER = {"steps": False, "episodes": True}
_LOW = 0xFFFFFFFF
_ONE = np.uint64(1)


def is_by_episode(over: str) -> bool:
    """Read the argument `over`.

    Raises:
        BufferMisuseError: It is none of those.
    """
    by_episode = _OVER.get(over) if isinstance(over, str) else None
    if by_episode is None:
        raise BufferMisuseError(f"over is {over!r}, expected one of {sorted(_OVER)}")
    return by_episode


class Steps(NamedTuple):
    """B steps that were drawn: int64 (B,) each."""

    first: torch.Tensor  # the first row of the episode, counted for ever
    length: torch.Tensor  # of the episode
    step: torch.Tensor


class Draws:
    """Draws from the episodes of a table.

    Args:
        table: See above.
        seed: Of the generator; None takes entropy of the system.

    Attributes:
        generator: What is drawn by.
    """

    def __init__(self, table: EpisodeTable, seed: int | None):
        self._table, self._num_rows = table, table.layout.num_rows
        self._is_compiled = not table.is_staged
        self.generator: Any
        if self._is_compiled:
            self.generator = HostGenerator(seed, saved_as=np.uint64)
        else:
            self.generator = DeviceGenerator(seed, table.device)

    def uniforms(self, number: int, count: int) -> torch.Tensor:
        """Numbers float64 (number, count) from 0 to below 1."""
        if self._is_compiled:
            out = np.empty((number, count))
            draw_uniforms(self.generator.words, out.reshape(-1))
            return torch.from_numpy(out)
        device, generator = self._table.device, self.generator.torch
        shape = number, count
        return torch.rand(shape, dtype=torch.float64, device=device, generator=generator)

    def steps(self, law: int, period: int, batch_size: int, by_episode: bool) -> Steps:
        """Draw the first steps of pairs or of windows.

        Args:
            law: PAIRS or WINDOWS, by which something can be drawn.
            period: Steps from the begin of a window to that of the next.
            batch_size: B.
            by_episode: Draw episodes with equal probability, not steps.
        """
        table = self._table.there
        pick, place = self.uniforms(2, batch_size)
        before = table[law + by_episode]
        low, high = before.index_select(0, self._table.live_there)
        numbers = low + (pick * (high - low)).long()
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
        """Rows of the ring so many steps later, (B,), or (B, L) of later (B, L)."""
        begin = steps.first + steps.step
        is_run = isinstance(later, torch.Tensor) and later.ndim == 2
        return ((begin[:, None] if is_run else begin) + later) % self._num_rows

    def rooms(self, rows: torch.Tensor) -> torch.Tensor:
        """How far the bounds of the steps in rows int64 (B,) are, int64 (B,)."""
        return self._table.columns["room"].index_select(0, rows).long()

    def pairs(
        self, batch_size: int, discount: float, by_episode: bool, offsets: torch.Tensor
    ) -> Any:
        """Rows int64 (2, B) of steps and later ones, an array where they are the host's.

        How much later, offsets int64 (B,), is written.
        """
        if self._is_compiled:
            table, words = self._table, self.generator.words
            rows = np.empty((2, batch_size), np.int64)
            log = math.log(discount) if discount > 0 else -math.inf
            law = table.live.begin, table.live.end, log, by_episode
            draw_pairs(table.rows.numpy(), table.table, words, law, rows, offsets.numpy())
            return rows
        steps = self.steps(PAIRS, 1, batch_size, by_episode)
        rows = self.rows(steps)
        offsets.copy_(offsets_below(self.uniforms(1, batch_size)[0], self.rooms(rows), discount))
        return torch.stack([rows, (rows + offsets) % self._num_rows])

    def goals(
        self, steps: Steps, strategy: str, relabel_ratio: float, discount: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How much later the goals of steps are, int64 (B,), and whether to use them, bool (B,)."""
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
def draw_uniforms(generator, out):
    """Fill out float64 (K,) with numbers from 0 to below 1; generator uint64 (2,) moves on."""
    key, counter = generator[0], generator[1]
    for k in range(out.shape[0]):
        out[k] = unit_float(random_word(key, counter))
        counter = np.add(counter, _ONE)
    generator[1] = counter


@njit(nogil=True, cache=True)
def offset_below(uniform, room, log_discount):
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
def draw_pairs(rows, table, generator, law, chosen, offsets):
    """Draw steps that have room, and for each a later one within its room.

    Args:
        rows: int64 (R, W), the ring; `room` is the lower half of the first word.
        table: int64 (7, S), see `table`.
        generator: uint64 (2,), moves on.
        law: From and to which slot; natural logarithm of the discount, 0 for equal probabilities;
            and whether to draw episodes with equal probability, not steps.
        chosen: int64 (2, B), written: the rows of the steps and of the later ones.
        offsets: int64 (B,), written: how much later they are.
    """
    begin, end, log_discount, by_episode = law
    key, counter = generator[0], generator[1]
    num_rows, before = rows.shape[0], table[PAIRS]
    picked = table[PAIRS + 1] if by_episode else before
    low, count = picked[begin], picked[end] - picked[begin]
    for b in range(offsets.shape[0]):
        number = low + int(unit_float(random_word(key, counter)) * count)
        counter = np.add(counter, _ONE)
        slot, size = begin, end - begin
        while size > 1:  # the last slot with a number up to that, without a branch
            half = size >> 1
            slot += half if picked[slot + half] <= number else 0
            size -= half
        step = number - low
        if by_episode:
            number_of_steps = before[slot + 1] - before[slot]
            step = int(unit_float(random_word(key, counter)) * number_of_steps)
            counter = np.add(counter, _ONE)
        else:
            step = number - before[slot]
        step += step >= table[HOLE, slot]
        chosen[0, b] = (table[0, slot] + step) % num_rows
    for b in range(offsets.shape[0]):
        row, uniform = chosen[0, b], unit_float(random_word(key, counter))
        counter = np.add(counter, _ONE)
        offset = offset_below(uniform, rows[row, 0] & _LOW, log_discount)
        row += offset
        chosen[1, b] = row - num_rows if row >= num_rows else row
        offsets[b] = offset
    generator[1] = counter
