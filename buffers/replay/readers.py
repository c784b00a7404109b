"""Compiled drawing of batches from memory of the CPU."""

from __future__ import annotations

import numpy as np

from buffers.core.generator import HostGenerator
from buffers.core.guard import Guard
from buffers.replay.batches import BatchPlanner, ReplayBatch
from buffers.replay.gather_kernels import (
    draw_by_ring,
    draw_distinct,
    draw_uniform,
    gather,
    gather_at_once,
    sample_uniform,
)
from buffers.replay.storage import ReplayStorage

__all__ = ["CompiledReader"]

_NOTHING = np.zeros((1, 1), np.uint8)
_MOST_AT_ONCE = 1024  # rows of a batch that is drawn without giving up the interpreter's lock


class CompiledReader:
    """Draws rows and gathers batches.

    Args:
        storage: Where from.
        planner: Makes the batches.
        gamma: Discount per step.
        seed: Of the generator.
        guard: Of the buffer.

    Attributes:
        generator: What rows are drawn by.
    """

    def __init__(
        self,
        storage: ReplayStorage,
        planner: BatchPlanner,
        gamma: float,
        seed: int | None,
        guard: Guard,
    ):
        self._storage, self._gamma = storage, float(gamma)
        self._busy = guard.flag
        self.generator = HostGenerator(seed)
        self._moved = np.empty(0, np.int64)
        self.new, self.check = planner.new, planner.check

    def fill_at_once(self, batch: ReplayBatch, draw: str) -> bool:
        """As `fill`, if it takes one compiled call and no thread is in an exclusive call.

        Returns:
            Whether it was done; otherwise `fill` has to do it, exclusively.
        """
        if draw != "rows" or batch.size > _MOST_AT_ONCE:
            return False
        storage, memory = self._storage, batch.memory
        pending, finals = self._kept()
        return sample_uniform(
            storage.table,
            storage.state,
            self._busy,
            self.generator.words,
            memory.plan,
            memory.pages,
            self._gamma,
            pending,
            finals,
        )

    def gather_at_once(self, batch: ReplayBatch) -> bool:
        """As `gather`; see `fill_at_once`."""
        if batch.size > _MOST_AT_ONCE:
            return False
        storage, memory = self._storage, batch.memory
        pending, finals = self._kept()
        return gather_at_once(
            storage.table,
            storage.state,
            self._busy,
            memory.plan,
            memory.pages,
            self._gamma,
            pending,
            finals,
        )

    def fill(self, batch: ReplayBatch, draw: str) -> None:
        """Draw rows ("rows": all equally likely, "rings", "distinct") and gather them."""
        storage, memory = self._storage, batch.memory
        if draw == "rows":
            draw_uniform(storage.state, self.generator.words, memory.rows)
        elif draw == "rings":
            draw_by_ring(storage.state, self.generator.words, memory.rows)
        else:
            draw_distinct(storage.state, self.generator.words, memory.rows, self._table(batch.size))
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
        gather(
            storage.table, storage.state, memory.plan, memory.pages, self._gamma, *self._kept()
        )  # fmt: skip

    def _kept(self) -> tuple[np.ndarray, np.ndarray]:
        """The newest next observations, and final ones, if they are stored apart."""
        kept = self._storage.successors
        return (_NOTHING, _NOTHING) if kept is None else (kept.pending, kept.finals)
