"""Priorities of the rows of a ring and drawing by them, by torch operations on any device.

Sums are kept for blocks of rows only: a draw searches the sums of the blocks, then its block. None
of it waits for the device; what the host would have to look at stays there.
"""

from __future__ import annotations

import torch

__all__ = ["BlockSums"]

BLOCK = 1024


class BlockSums:
    """Values of the leaves 0 .. capacity - 1 and the sums of their blocks.

    Attributes:
        leaves: float64 (capacity,) on the device, view; read only.
        largest: float64 (), the largest priority ever given, before the exponent; at least 1.
        num_refused: int64 (), updates left out as they were negative, not finite or too large.
    """

    def __init__(self, capacity: int, device: torch.device):
        num_blocks = -(-capacity // BLOCK)
        self._capacity = capacity
        # The last block takes what is refused: the others are written without looking at it.
        self._written = torch.zeros((num_blocks + 1, BLOCK), dtype=torch.float64, device=device)
        self._written_sums = torch.zeros(num_blocks + 1, dtype=torch.float64, device=device)
        self._values, self._sums = self._written[:-1], self._written_sums[:-1]
        self.leaves = self._values.view(-1)[:capacity]
        self.largest = torch.ones((), dtype=torch.float64, device=device)
        self.num_refused = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._written.nbytes + self._written_sums.nbytes

    def insert(self, end: int, count: int, alpha: float) -> None:
        """Give the largest priority to the newest `count` leaves, the last of them before `end`."""
        value = self.largest.pow(alpha)
        if count >= self._capacity:
            spans = [(0, self._capacity)]
        elif count > end:
            spans = [(self._capacity - (count - end), self._capacity), (0, end)]
        else:
            spans = [(end - count, end)]
        for begin, stop in spans:
            if stop > begin:
                self.leaves[begin:stop] = value
                first, last = begin // BLOCK, (stop - 1) // BLOCK + 1
                torch.sum(self._values[first:last], 1, out=self._sums[first:last])

    def update(
        self,
        leaves: torch.Tensor,
        priorities: torch.Tensor,
        count: int,
        alpha: float,
        bound: float,
    ) -> None:
        """Give priorities to leaves; those not in 0 .. bound are left out and counted.

        Args:
            leaves: int (K,), on the device; those not in 0 .. count - 1 are left out and counted
                too. Equal ones should have equal priorities.
            priorities: float (K,), on the device.
            count: See above.
            alpha: Exponent.
            bound: See above.
        """
        given = priorities.to(torch.float64)
        is_there = (leaves >= 0) & (leaves < count)
        is_good = (given >= 0) & (given <= bound) & is_there
        leaves = torch.where(is_good, leaves.long(), self._values.numel())
        self._written.view(-1).index_copy_(0, leaves, given.pow(alpha))
        blocks = torch.div(leaves, BLOCK, rounding_mode="floor")
        self._written_sums.index_copy_(0, blocks, self._written.index_select(0, blocks).sum(1))
        largest = torch.where(is_good, given, 0.0).amax()
        torch.maximum(self.largest, largest, out=self.largest)
        self.num_refused.add_((~is_good).sum())

    def draw(
        self, generator: torch.Generator, leaves: torch.Tensor, weights: torch.Tensor, beta: float
    ) -> None:
        """Draw leaves by their values, with weights (smallest value drawn / value) ** beta.

        Args:
            generator: On the device.
            leaves: int64 (B,), written.
            weights: float32 (B,), written.
            beta: Exponent.
        """
        size, device = len(leaves), leaves.device
        places = torch.arange(size, dtype=torch.float64, device=device)
        places += torch.rand(size, generator=generator, dtype=torch.float64, device=device)
        ends = self._sums.cumsum(0)
        masses = places * (ends[-1] / size)
        block = torch.searchsorted(ends, masses, right=True)
        # Rounding may lead past the last block, or into one without values.
        block = torch.where(block < len(ends), block, self._sums.argmax())
        block = torch.where(self._sums.index_select(0, block) > 0, block, self._sums.argmax())
        rest = masses - (ends.index_select(0, block) - self._sums.index_select(0, block))
        values = self._values.index_select(0, block)
        place = torch.searchsorted(values.cumsum(1), rest[:, None], right=True)[:, 0]
        place.clamp_(max=BLOCK - 1)
        found = values.gather(1, place[:, None])[:, 0]
        place = torch.where(found > 0, place, values.argmax(1))
        torch.add(place, block, alpha=BLOCK, out=leaves)
        drawn = values.gather(1, place[:, None])[:, 0]
        weights.copy_((drawn.amin() / drawn).pow(beta))

    def restore(self, values: torch.Tensor) -> None:
        """Take over all values, float64 (capacity,)."""
        self.leaves.copy_(values)
        torch.sum(self._values, 1, out=self._sums)
