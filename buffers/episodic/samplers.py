"""Drawing from the episodes of a ring: compiled kernels on the CPU, torch on other devices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from buffers.core.generator import DeviceGenerator, HostGenerator
from buffers.episodic.batches import PairBatch
from buffers.episodic.draw_kernels import (
    draw_goals,
    draw_pairs,
    draw_uniforms,
    draw_windows,
    gather_rows,
)
from buffers.episodic.kernels import (
    FIRST_DRAWABLE,
    FIRST_START,
    NUM_DRAWABLE,
    NUM_STARTS,
    count_windows,
)
from buffers.episodic.layout import HEADER_WORDS
from buffers.episodic.storage import EpisodicStorage

__all__ = ["STRATEGIES", "CompiledSampler", "TorchSampler", "WindowTable", "offsets_below"]

STRATEGIES = {"future": 0, "final": 1, "episode": 2}
_LOW = 0xFFFFFFFF


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
        self.device_slots = self.device_ends = torch.zeros(0, dtype=torch.int64)

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
    """

    def __init__(self, storage: EpisodicStorage, seed: int | None):
        self.windows = WindowTable(storage)
        self.generator = HostGenerator(seed, saved_as=np.uint64)
        self._rows = storage.rows.numpy()
        tables = storage.tables
        self._episodes = tables["episodes"]
        self._sources = (
            self._rows,
            tables["starts"],
            tables["episodes"],
            tables["drawable"],
            tables["counters"],
            self.generator.words,
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
        draw_windows(
            num_rows, self._episodes, slots, ends, self.generator.words, by_episode, chosen
        )
        return torch.from_numpy(chosen)

    def draw_goals(
        self, chosen: torch.Tensor, strategy: str, relabel_ratio: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows int64 (B,) of goals, and whether to use them, bool (B,)."""
        goals, relabelled = np.empty(len(chosen), np.int64), np.empty(len(chosen), np.bool_)
        number = STRATEGIES[strategy]
        rows = chosen.numpy()
        draw_goals(
            self._rows, rows, number, float(relabel_ratio), self.generator.words, goals, relabelled
        )
        return torch.from_numpy(goals), torch.from_numpy(relabelled)

    def gather(self, chosen: torch.Tensor, out: torch.Tensor, *, bare: bool) -> torch.Tensor:
        """Copy rows (or, bare, their observations) into out int64 (*K, W); -1 means zeros."""
        flat = out.view(-1, out.shape[-1]).numpy()
        gather_rows(self._rows, chosen.reshape(-1).numpy(), HEADER_WORDS if bare else 0, flat)
        return out

    def uniforms(self, count: int) -> torch.Tensor:
        """Numbers float64 (K,) from 0 to below 1, from the same generator."""
        out = np.empty(count)
        draw_uniforms(self.generator.words, out)
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
        obs_stop = storage.layout.row.obs_stop
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
