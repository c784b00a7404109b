"""Batches of a finished rollout: single rows, or sequences of steps of one environment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from buffers.core.arguments import check_count
from buffers.core.batches import Batch
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import DeviceGenerator, HostGenerator
from buffers.core.kernels import bounded, njit, random_word
from buffers.core.memory import check_fits
from buffers.rollout.storage import RolloutStorage

__all__ = ["RolloutBatch", "Sampler", "shuffle"]

_COLUMNS = ("actions", "log_probs", "values", "advantages", "returns", "rewards")
_BLOCK_BYTES = 1 << 18  # gathered by one call, for several batches if they are small
_ONE, _LAST_KEY = np.uint64(1), 2**63 - 1
_EPSILON = 1e-8  # added to standard deviations, as CleanRL and stable-baselines3 do


@dataclass(slots=True, repr=False, eq=False)
class RolloutBatch(Batch):
    """Transitions of a rollout: B rows, or S sequences of L steps.

    With sequences, shapes are (L, S, ...) instead of (B, ...), and ``len(batch)`` is S.
    """

    obs: Any  # (B, *obs_shape), nested like the observation space
    actions: Tensor  # (B, *action_shape)
    log_probs: Tensor  # float32 (B,), at the time of the step
    values: Tensor  # float32 (B,), at the time of the step
    advantages: Tensor  # float32 (B,)
    returns: Tensor  # float32 (B,)
    rewards: Any = None  # float32 (B,)
    indices: Any = None  # int64 (B,), rows of the rollout: t * num_envs + env
    weights: Any = None  # float32 (B,), with `fixed` or sequences: 1 for rows to learn from, else 0
    is_first: Any = None  # with sequences: bool (L, S), the observation is the first of an episode
    initial_states: Any = None  # with sequences: dict of tensors (S, ...), before the first step
    extras: dict[str, Tensor] = field(default_factory=dict)  # (B, ...), added by the user

    _fields = ("obs", "actions", "log_probs", "values", "advantages", "returns")
    _others = ("rewards", "indices", "weights", "is_first", "initial_states")

    def __len__(self) -> int:
        """Number of rows, or of sequences."""
        return len(self.actions) if self.indices is None else self.indices.shape[-1]


class _Plan(NamedTuple):
    """Plan of one pass over the rows."""

    paths: list[str]  # of the columns to gather
    states: tuple[str, ...]  # columns of which sequences have only the first row
    row_bytes: int  # bytes of a row of a batch
    number: int  # largest number of batches
    size: int  # largest size of a batch
    length: int | None  # of sequences; None: batches have single rows
    is_fixed: bool  # batches of one size, whatever rows are valid
    normalizes: bool  # normalise advantages, in each batch


class Sampler:
    """Iterates over a finished rollout in random order, one pass at a time.

    Attributes:
        generator: Generator of the order of rows.
    """

    def __init__(self, storage: RolloutStorage, seed: int | None):
        self._storage, self._num_passes, device = storage, 0, storage.num_valid.device
        made = HostGenerator(seed) if storage.is_on_host else DeviceGenerator(seed, device)
        self.generator: Any = made
        layout, tensors = storage.layout, storage.tensors
        self._obs = [leaf.path for leaf in layout.obs_leaves]
        self._extras = (*layout.extras, *layout.games)
        # (T * N, ...); game columns (T * N / A, ...).
        self._flat = {
            path: tensors[path][: layout.num_steps].flatten(0, 1)
            for path in (*self._obs, *_COLUMNS, *self._extras, "is_first")
        }

    def draw(
        self,
        num_minibatches: int,
        *,
        normalizes: bool,
        is_fixed: bool = True,
        length: int | None = None,
        states: tuple[str, ...] = (),
    ) -> Iterator[Any]:
        """Iterate over the rows, or sequences of `length` steps; see `RolloutBuffer`."""
        layout, paths, kind = self._storage.layout, [*self._flat], "transitions"
        num_items = layout.num_steps * layout.num_envs
        if length is None:
            paths.remove("is_first")
        else:
            if check_count("length", length) > layout.num_steps:
                raise BufferMisuseError(
                    f"length is {length}, but the rollout has {layout.num_steps} steps; make it "
                    "smaller, or leave it out for sequences of all steps"
                )
            kind = f"sequences of {length} steps"
            num_items = -(-layout.num_steps // length) * layout.num_envs
        paths = [path for path in paths if path not in states]
        flat = [self._flat[path] for path in paths]
        row_bytes = sum(column.nbytes // len(column) for column in flat)
        if (number := check_count("num_minibatches", num_minibatches)) > num_items:
            raise BufferMisuseError(
                f"num_minibatches is {number}, but the rollout has {num_items} {kind}; make it "
                "smaller"
            )
        size = -(-num_items // number)
        num_rows, advice = size * (length or 1), "use more minibatches, or keep fewer"
        check_fits(
            f"a batch of {num_rows} rows", num_rows * row_bytes, self._storage.device, advice
        )
        plan = _Plan(paths, states, row_bytes, number, size, length, is_fixed, normalizes)
        return self._go(plan, self._storage.num_changes)

    def _go(self, plan: _Plan, num_changes: int) -> Iterator[Any]:
        self._require((self._num_passes, num_changes))
        self._num_passes += 1
        begun = self._num_passes, num_changes
        if plan.length is None:
            sizes, parts = self._order(plan.number, plan.size, is_fixed=plan.is_fixed)
        else:
            sizes, parts = self._sequences(plan.number, plan.size, plan.length)
        if self._storage.is_apart:
            parts = [part.to(self._storage.device, non_blocking=True) for part in parts]
        # A call of torch takes longer than copying a small batch, so small ones share a call.
        most = max(sizes, default=1) * max(1, plan.row_bytes)
        at_once, start = max(1, _BLOCK_BYTES // most), 0
        for first in range(0, len(sizes), at_once):
            block = sizes[first : first + at_once]
            stop = start + sum(block)
            self._require(begun)
            made = self._gather(plan, block, *(part[start:stop] for part in parts))
            start = stop
            while made:  # no reference to a yielded batch stays here, so the user can free it
                self._require(begun)
                yield made.pop()

    def _require(self, begun: tuple[int, int]) -> None:
        """Raise BufferMisuseError if another pass has begun or the rows have changed."""
        if begun != (self._num_passes, self._storage.num_changes):
            raise BufferMisuseError(
                "these minibatches are over: another pass or rollout has begun since, or "
                "advantages were computed again; go through one pass at a time, "
                "list(rollout.minibatches(...)) keeps the batches of a pass"
            )

    def _gather(
        self, plan: _Plan, sizes: list[int], rows: Tensor, weights: Tensor | None = None
    ) -> list[Any]:
        """Make batches, in reverse order, of rows int64 (K,) with weights float32 (K,) if any."""
        layout, length = self._storage.layout, plan.length
        shared = rows // layout.agents_per_game if layout.games else rows
        columns: dict[str, Tensor] = {
            path: self._flat[path].index_select(0, shared if path in layout.games else rows)
            for path in plan.paths
        }
        if plan.normalizes:
            _normalize(columns["advantages"], sizes, weights)
        # Copies, and no `split`: autograd counts an in-place change of one batch as a change of all
        # batches that are views of the same tensor.
        columns["indices"] = rows.clone()
        if weights is not None:
            columns["weights"] = weights.clone()
        batches = []
        split = [column.unsafe_split_with_sizes(sizes) for column in columns.values()]
        for parts in zip(*split, strict=True):
            found: dict[str, Any] = dict(zip(columns, parts, strict=True))
            if length is not None:
                first = found["indices"][: plan.size]
                found = {k: x.view(length, len(first), *x.shape[1:]) for k, x in found.items()}
                found["initial_states"] = {
                    name: self._flat[name].index_select(0, first) for name in plan.states
                }
            if self._obs != ["obs"]:
                found["obs"] = self._storage.nest(found.pop(path) for path in self._obs)
            found["extras"] = {name: found.pop(name) for name in self._extras if name in found}
            batches.append(RolloutBatch(**found))
        return batches[::-1]

    def _order(self, number: int, size: int, *, is_fixed: bool) -> tuple[list[int], list[Tensor]]:
        """The valid rows in random order: sizes of the batches, and their rows int64 (K,).

        With batches of one size, also weights float32 (K,): 1 at the first place of a row, 0 where
        it is repeated to fill a batch.
        """
        count: Any = self._storage.num_valid
        if self._storage.is_on_host:
            rows = self._storage.at_env["rows"][: int(count)]
            shuffle(rows.numpy(), self.generator.words)
            number, count = min(number, len(rows)), len(rows)
            if not is_fixed:
                sizes = [count // number + (k < count % number) for k in range(number)]
                return sizes, [rows]
        else:
            rows = self._shuffled(self._storage.at_env["valid"].reshape(-1))
        return [size] * number, [*_pad(rows, count, number, size)]

    def _sequences(self, number: int, size: int, length: int) -> tuple[list[int], list[Tensor]]:
        """The rows of sequences with a valid row, in random order, in batches of one size.

        Returns sizes, rows and weights like `_order`, each batch step after step. A short sequence
        repeats its last row with weight 0; rows that are not valid have weight 0 too.
        """
        layout, valid = self._storage.layout, self._storage.at_env["valid"]
        num_steps, num_envs = layout.num_steps, layout.num_envs
        num_chunks = -(-num_steps // length)
        missing = num_chunks * length - num_steps  # padding of the last chunk
        chunks = pad(valid, (0, 0, 0, missing)).view(num_chunks, length, num_envs)
        has_row = chunks.any(1).reshape(-1)
        if self._storage.is_on_host:
            ids = has_row.nonzero()[:, 0]
            shuffle(ids.numpy(), self.generator.words)
            count: Any = len(ids)
            number = min(number, count)
        else:
            ids, count = self._shuffled(has_row), has_row.sum()
        parts = _pad(ids, count, number, size)
        ids, own = (part.view(number, 1, size) for part in parts)
        step = ids // num_envs * length + torch.arange(length, device=valid.device)[:, None]
        last = step.clamp(max=num_steps - 1)
        rows = (last * num_envs + ids % num_envs).reshape(-1)
        weights = own * (step == last)
        weights = weights.reshape(-1) * valid.reshape(-1).index_select(0, rows)
        return [length * size] * number, [rows, weights]

    def _shuffled(self, mask: Tensor) -> Tensor:
        """Indices of mask bool (K,) in random order; those of True elements come first."""
        keys = torch.empty(len(mask), dtype=torch.int64, device=mask.device)
        keys.random_(generator=self.generator.torch)
        # Masked elements get the largest key, so sorting puts them last.
        return keys.masked_fill_(~mask, _LAST_KEY).argsort()


@njit(nogil=True, cache=True)
def shuffle(rows, generator):
    """Shuffle rows int64 (K,), K < 2**31, in place; advance generator uint64 (2,)."""
    key, counter = generator[0], generator[1]
    for last in range(rows.shape[0] - 1, 0, -1):
        chosen = bounded(random_word(key, counter), last + 1)
        counter = np.add(counter, _ONE)
        rows[last], rows[chosen] = rows[chosen], rows[last]
    generator[1] = counter


def _pad(rows: Tensor, count: Any, num_batches: int, size: int) -> tuple[Tensor, Tensor]:
    """Spread the first `count`, an int or int64 (), of rows int64 (K,) evenly over batches.

    Repeated rows fill the batches, evenly too, so that each half of a batch has rows of its own.
    Weights float32 are 1 at the first place of a row. With fewer rows than batches, a batch takes a
    row of another one.
    """
    find = _places if isinstance(count, Tensor) else _kept_places
    chosen, weights = find(count, num_batches, size, rows.device)
    return rows.index_select(0, chosen), weights


def _places(count: Any, num_batches: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices int64 (K,), below `count`, of the rows in the batches, and the weights of `_pad`."""
    batch = torch.arange(num_batches, device=device)[:, None]
    place = torch.arange(size, device=device)[None]
    each, longer = (count // num_batches, count % num_batches) if num_batches else (0, 0)
    own = each + (batch < longer)
    start = batch * each + batch.clamp(max=longer)
    # The places 0 to `place` hold ceil((place + 1) * own / size) different rows.
    taken, before = (((place + k) * own + size - 1) // size for k in (1, 0))
    weights = (taken > before) | ((own == 0) & (place == 0))
    return (start + taken - 1).clamp_(min=0).reshape(-1), weights.reshape(-1).float()


_kept_places = lru_cache(2)(_places)  # equal for all passes through a rollout


def _normalize(advantages: Tensor, sizes: list[int], weights: Tensor | None = None) -> None:
    """Subtract each batch's mean and divide by its standard deviation, in place.

    Both are taken over rows of weight 1, of which each batch has one: weights float32 (K,) or None.
    """
    start = 0
    for size, batches in groupby(sizes):
        count = len(list(batches))
        stop = start + count * size
        part = advantages[start:stop].view(count, size)
        numbers, number, fewer = part.double(), size, max(1, size - 1)
        own: Any = 1.0 if weights is None else weights[start:stop].view_as(numbers)
        if weights is not None:
            number = own.sum(1, keepdim=True)
            fewer = (number - 1).clamp(min=1)
        # `cumsum` adds from the first row to the last, so results are equal on every processor.
        errors = numbers - (numbers * own).cumsum(1)[:, -1:] / number
        deviation = ((errors.square() * own).cumsum(1)[:, -1:] / fewer).sqrt()
        part.copy_(errors * (1.0 / (deviation + _EPSILON)))
        start = stop
