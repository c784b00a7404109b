"""Draws by priority: a value for each row of a ring, and sums of the values.

On the host the sums are a tree with sixteen children per node: one float64 array of levels, leaves
first, each padded with zeros to whole nodes; `starts` int64 (L,) is where each level begins. A node
is always recomputed from its children, so rounding errors do not add up. Each level is handled for
the whole batch before the next, so that cache misses overlap.

On devices there is no tree: a draw computes the cumulative sum of all values, in microseconds for a
million rows, and searches it. No call waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch

from buffers.core.kernels import njit

__all__ = ["MAX_VALUE", "DeviceValues", "SumTree", "level_sizes", "set_leaves", "values_fit"]

FAN_OUT = 16
MAX_VALUE = 1e290  # of a leaf: the sum over all rows does not overflow
Live = tuple[torch.Tensor, torch.Tensor]


def level_sizes(capacity: int) -> list[int]:
    """Size of each level, leaves first, padded to whole nodes of the next level; the last is 1."""
    sizes = [capacity + -capacity % FAN_OUT]
    while sizes[-1] > 1:
        above = sizes[-1] // FAN_OUT
        sizes.append(above if above == 1 else above + -above % FAN_OUT)
    return sizes


def values_fit(values: np.ndarray) -> bool:
    """Whether values float64 (K,) are valid for leaves, up to rounding; False for NaN."""
    return bool(0.0 <= values.min() <= values.max() <= 1.001 * MAX_VALUE)


class SumTree:
    """Values of the leaves 0 .. capacity - 1 and their sums.

    Attributes:
        leaves: float64 (capacity,), view of the tree; read only.
        nbytes: Bytes held.
    """

    def __init__(self, capacity: int):
        sizes = level_sizes(capacity)
        self._tree, starts = np.zeros(sum(sizes)), np.cumsum([0, *sizes[:-1]])
        self.leaves, self.nbytes = self._tree[:capacity], self._tree.nbytes
        self._arrays = self._tree, starts

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self._tree[-1])

    def update(self, leaves: np.ndarray, values: np.ndarray) -> None:
        """Set leaves int64 (K,) to values float64 (K,); for equal leaves the last value counts."""
        set_leaves(*self._arrays, leaves, values, np.empty(len(leaves), np.int64))

    def draw(
        self, generator: torch.Generator, leaves: torch.Tensor, weights: torch.Tensor, beta: float
    ) -> None:
        """Draw leaves in proportion to their values; weights are (smallest drawn / value) ** beta.

        Writes leaves int64 (B,) and weights float32 (B,), on the CPU.
        """
        points = torch.empty(len(leaves), dtype=torch.float64, device=generator.device)
        points, ratios = points.uniform_(generator=generator).cpu().numpy(), weights.numpy()
        draw_leaves(*self._arrays, leaves.numpy(), points, ratios)
        np.power(ratios, np.float32(beta), out=ratios)

    def restore(self, values: np.ndarray) -> None:
        """Take over all values, float64 (capacity,)."""
        self.update(np.arange(len(values)), values)


class DeviceValues:
    """Values of the leaves 0 .. capacity - 1 on a device: priorities to the power of alpha.

    `live` are the first number in use and the one behind the last, int64 (1,) each, on the device.
    Leaves that are not in use count as 0.

    Attributes:
        nbytes: Bytes held.
        largest: float64 (), the largest priority ever given, at least 1.
        num_refused: int64 (), updates ignored: negative, not finite, above `bound`, or not in use.
    """

    def __init__(self, capacity: int, device: torch.device, alpha: float, bound: float):
        self._capacity, self._alpha, self._bound = capacity, alpha, bound
        with torch.inference_mode(False):  # tensors made in it can't be changed outside
            # Refused updates go to the extra last element, so that the host need not look.
            self._written = torch.zeros(capacity + 1, dtype=torch.float64, device=device)
            self.largest = torch.ones((), dtype=torch.float64, device=device)
            self.num_refused = torch.zeros((), dtype=torch.int64, device=device)
        self.nbytes = self._written.nbytes

    def _is_live(self, leaves: torch.Tensor, live: Live) -> torch.Tensor:
        begin, end = live
        return (leaves - begin).remainder(self._capacity) < end - begin

    def leaves(self, live: Live) -> torch.Tensor:
        """All values, float64 (capacity,); a copy."""
        places = torch.arange(self._capacity, device=self._written.device)
        return self._written[:-1].where(self._is_live(places, live), 0.0)

    def insert(self, leaves: torch.Tensor) -> None:
        """Give distinct leaves int64 (K,) the value of the largest priority."""
        self._written.index_copy_(0, leaves, self.largest.pow(self._alpha).expand(len(leaves)))

    def update(self, leaves: torch.Tensor, priorities: torch.Tensor, live: Live) -> None:
        """Set leaves int (K,) to priorities float (K,), which must be equal for equal leaves.

        Priorities outside 0 .. bound, or of leaves not in use, are ignored and counted.
        """
        if not len(leaves):
            return
        given = priorities.detach().to(torch.float64)
        is_good = (given >= 0) & (given <= self._bound) & (leaves >= 0) & (leaves < self._capacity)
        is_good &= self._is_live(leaves, live)
        leaves = torch.where(is_good, leaves.long(), self._capacity)
        self._written.index_copy_(0, leaves, given.pow(self._alpha))
        torch.maximum(self.largest, torch.where(is_good, given, 0.0).amax(), out=self.largest)
        self.num_refused.add_((~is_good).sum())

    def draw(
        self,
        generator: torch.Generator,
        leaves: torch.Tensor,
        weights: torch.Tensor,
        beta: float,
        live: Live,
    ) -> None:
        """Draw like `SumTree.draw`, with a generator of the device."""
        size, device, values = len(leaves), leaves.device, self.leaves(live)
        uniforms = torch.rand(size, generator=generator, dtype=torch.float64, device=device)
        ends = values.cumsum(0)
        points = torch.arange(size, dtype=torch.float64, device=device).add_(uniforms)
        found = torch.searchsorted(ends, points * (ends[-1] / size), right=True)
        found.clamp_(max=self._capacity - 1)
        # Rounding may lead to a leaf without a value, or past the last.
        is_good = values.index_select(0, found) > 0
        torch.where(is_good, found, values.argmax(), out=leaves)
        drawn = values.index_select(0, leaves)
        weights.copy_((drawn.amin() / drawn).pow(beta))

    def restore(self, values: np.ndarray, largest: float) -> None:
        """Take over all values, float64 (capacity,)."""
        self._written[:-1].copy_(torch.from_numpy(values))
        self.largest.fill_(largest)


@njit(cache=True)
def set_leaves(tree, starts, leaves, values, nodes):
    """Write values float64 (K,) to leaves int64 (K,), the last of equal ones; update the sums.

    nodes int64 (K,) is scratch memory. Unchanged leaves cost nothing at higher levels, and
    neighbours with the same parent update it once, so sorted leaves are fastest.
    """
    count = 0
    for i in range(leaves.shape[0]):
        leaf = leaves[i]
        if tree[leaf] != values[i]:
            tree[leaf] = values[i]
            nodes[count] = leaf
            count += 1
    for level in range(1, starts.shape[0]):
        kept, before = 0, -1
        for i in range(count):
            node = nodes[i] >> 4
            if node != before:
                begin = starts[level - 1] + 16 * node
                # Four partial sums, which a processor adds in parallel.
                a, b, c, d = tree[begin], tree[begin + 1], tree[begin + 2], tree[begin + 3]
                for k in range(begin + 4, begin + 16, 4):
                    a, b, c, d = a + tree[k], b + tree[k + 1], c + tree[k + 2], d + tree[k + 3]
                tree[starts[level] + node] = (a + b) + (c + d)
                nodes[kept] = node
                kept += 1
                before = node
        count = kept


@njit(cache=True)
def draw_leaves(tree, starts, leaves, masses, ratios):
    """Draw leaves int64 (B,) by value, one from each B-th of the total, which must be positive.

    masses float64 (B,) are random numbers in [0, 1), overwritten. Leaves with value 0 are never
    drawn. ratios float32 (B,) are written: the smallest drawn value / the drawn value.
    """
    size, top = leaves.shape[0], starts.shape[0] - 1
    share = tree[starts[top]] / size
    for i in range(size):
        masses[i] = (i + masses[i]) * share
        leaves[i] = 0
    for level in range(top - 1, -1, -1):
        for i in range(size):
            begin, chosen, mass = starts[level] + 16 * leaves[i], 0, masses[i]
            for child in range(16):
                value = tree[begin + child]
                if value > 0.0:  # if rounding leads past all children, the last positive one stays
                    chosen = child
                    if mass < value:
                        break
                    mass -= value
            masses[i] = mass
            leaves[i] = 16 * leaves[i] + chosen
    smallest = tree[leaves].min()
    for i in range(size):
        ratios[i] = np.float32(smallest / tree[leaves[i]])
