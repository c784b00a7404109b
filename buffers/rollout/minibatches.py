"""Batches of a finished rollout: single rows, or sequences of steps of one environment."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch

from buffers.core.arguments import check_count, read_columns
from buffers.core.batches import Batch
from buffers.core.errors import BufferMisuseError
from buffers.core.memory import check_fits
from buffers.core.spaces import build_tree
from buffers.rollout.rows import RolloutRows, Split
from buffers.rollout.storage import RolloutStorage

__all__ = ["RolloutBatch", "RolloutSequenceBatch", "Sampler"]

_COLUMNS = ("actions", "log_probs", "values", "advantages", "returns", "rewards")
_ALWAYS = ("indices", "weights")
_BLOCK_BYTES = 1 << 18  # of rows gathered by one call, for several batches if these are small
_EPSILON = 1e-8  # added to standard deviations, as CleanRL and stable-baselines3 do


@dataclass(slots=True, repr=False, eq=False)
class RolloutBatch(Batch):
    """B transitions of a rollout."""

    obs: Any  # (B, *obs_shape), nested like the observation space
    actions: torch.Tensor  # (B, *action_shape)
    log_probs: torch.Tensor  # float32 (B,), of the actions when they were taken
    values: torch.Tensor  # float32 (B,), when they were taken
    advantages: torch.Tensor  # float32 (B,)
    returns: torch.Tensor  # float32 (B,)
    rewards: Any = None  # float32 (B,)
    indices: Any = None  # int64 (B,), rows of the rollout: t * num_envs + env
    weights: Any = None  # of fixed=True: float32 (B,), 1 of the rollout's rows, 0 of padding
    extras: dict[str, torch.Tensor] = field(default_factory=dict)  # (B, ...), added by the user

    _fields = ("obs", "actions", "log_probs", "values", "advantages", "returns")
    _others = ("rewards", "indices", "weights")

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.actions if self.indices is None else self.indices)


@dataclass(slots=True, repr=False, eq=False)
class RolloutSequenceBatch(Batch):
    """S sequences of L steps of a rollout; ``len(batch)`` is S."""

    obs: Any  # (L, S, *obs_shape), nested like the observation space
    actions: torch.Tensor  # (L, S, *action_shape)
    log_probs: torch.Tensor  # float32 (L, S), of the actions when they were taken
    values: torch.Tensor  # float32 (L, S), when the actions were taken
    advantages: torch.Tensor  # float32 (L, S)
    returns: torch.Tensor  # float32 (L, S)
    rewards: Any = None  # float32 (L, S)
    is_first: Any = None  # bool (L, S), the observation is the first of an episode
    indices: Any = None  # int64 (L, S), rows of the rollout: t * num_envs + env
    weights: Any = None  # float32 (L, S), 1 of the rows to learn from, else 0
    initial_states: dict[str, torch.Tensor] = field(default_factory=dict)  # (S, ...), at step 0
    extras: dict[str, torch.Tensor] = field(default_factory=dict)  # (L, S, ...), added by the user

    _fields = ("obs", "actions", "log_probs", "values", "advantages", "returns")
    _others = ("rewards", "is_first", "indices", "weights", "initial_states")

    def __len__(self) -> int:
        """Number of sequences."""
        return (self.actions if self.indices is None else self.indices).shape[1]


class _Plan(NamedTuple):
    """How one pass goes through the rows."""

    columns: dict[str, torch.Tensor]  # (T * N, ...), or fewer rows of games, by path
    states: dict[str, torch.Tensor]  # (T * N, ...), of which sequences have the first row
    split: Split
    length: int | None  # of sequences; None: batches have single rows
    is_fixed: bool  # batches of one size, whatever rows are valid
    normalizes: bool  # advantages, each batch by itself


class Sampler:
    """Draws the passes through a finished rollout, one at a time.

    Args:
        storage: Of the rollout.
        rows: Says which rows there are, and in what order they come.
    """

    def __init__(self, storage: RolloutStorage, rows: RolloutRows):
        self._storage, self._rows = storage, rows
        self._num_passes = self._num_stops = 0

    def stop(self) -> None:
        """Let no pass go on, as the rows change."""
        self._num_stops += 1

    def minibatches(
        self,
        num_minibatches: int | None,
        batch_size: int | None,
        columns: Iterable[str] | None,
        *,
        is_fixed: bool,
        normalizes: bool,
    ) -> Iterator[RolloutBatch]:
        """As `RolloutBuffer.minibatches`."""
        layout = self._storage.layout
        found = self._read_columns(columns, _COLUMNS, normalizes)
        num_rows = layout.num_steps * layout.num_envs
        what = "transitions; make it smaller"
        split = _read_split(num_minibatches, batch_size, num_rows, what)
        plan = _Plan(found, {}, split, None, is_fixed, normalizes)
        self._check_fits(plan, split.size)
        return self._draw(plan, self._num_stops)

    def sequences(
        self,
        num_minibatches: int | None,
        batch_size: int | None,
        columns: Iterable[str] | None,
        *,
        length: int | None,
        initial_states: Collection[str],
        normalizes: bool,
    ) -> Iterator[RolloutSequenceBatch]:
        """As `RolloutBuffer.sequences`; `is_first` is written."""
        layout, tensors = self._storage.layout, self._storage.tensors
        num_steps = layout.num_steps
        for name in initial_states:
            if name not in layout.extras:
                raise BufferMisuseError(
                    f"initial_states has {name!r}, expected names of extra columns, which are "
                    f"{sorted(layout.extras)}; name it in extra_columns of the constructor"
                )
        found = self._read_columns(columns, (*_COLUMNS, "is_first"), normalizes)
        found |= {"is_first": tensors["is_first"][:-1].flatten(0, 1)}
        states = {name: tensors[name].flatten(0, 1) for name in initial_states}
        found = {name: column for name, column in found.items() if name not in states}
        steps = num_steps if length is None else check_count("length", length)
        if steps > num_steps:
            raise BufferMisuseError(
                f"length is {steps}, but the rollout has {num_steps} steps; make it smaller, or "
                "leave it out for sequences of all steps"
            )
        num_sequences = -(-num_steps // steps) * layout.num_envs
        what = f"sequences of {steps} steps; make it smaller, or the sequences shorter"
        split = _read_split(num_minibatches, batch_size, num_sequences, what)
        plan = _Plan(found, states, split, steps, True, normalizes)
        self._check_fits(plan, steps * split.size)
        return self._draw(plan, self._num_stops)

    def _read_columns(
        self, chosen: Iterable[str] | None, names: tuple[str, ...], normalizes: bool
    ) -> dict[str, torch.Tensor]:
        """The columns that batches are to have, as tensors (T * N, ...) by path."""
        storage, layout = self._storage, self._storage.layout
        names += *layout.extras, *layout.games
        kept = read_columns(chosen, ("obs", *names, *_ALWAYS))
        if normalizes and kept is not None and "advantages" not in kept:
            raise BufferMisuseError(
                "normalize_advantages=True needs advantages, but columns does not name them; add "
                '"advantages" to columns'
            )
        paths = [leaf.path for leaf in layout.obs_leaves if kept is None or "obs" in kept]
        paths += [name for name in names if kept is None or name in kept]
        steps = layout.num_steps
        return {path: storage.tensors[path][:steps].flatten(0, 1) for path in paths}

    def _check_fits(self, plan: _Plan, num_rows: int) -> None:
        needed, device = num_rows * _row_bytes(plan), self._storage.device
        advice = "use more minibatches, or keep fewer"
        check_fits(f"a batch of {num_rows} rows", needed, device, advice)

    def _require(self, begun: tuple[int, int]) -> None:
        """Raise BufferMisuseError if a pass is over."""
        if begun != (self._num_passes, self._num_stops):
            raise BufferMisuseError(
                "these minibatches are over: another pass or rollout has begun since, or "
                "advantages were computed again; go through one pass at a time, "
                "list(rollout.minibatches(...)) keeps the batches of a pass"
            )

    def _draw(self, plan: _Plan, num_stops: int) -> Iterator[Any]:
        """Yield the batches of a pass."""
        self._require((self._num_passes, num_stops))
        self._num_passes += 1
        begun = self._num_passes, num_stops
        if plan.length is None:
            sizes, parts = self._rows.order(plan.split, is_fixed=plan.is_fixed)
        else:
            sizes, parts = self._rows.sequences(plan.split, plan.length)
        if self._storage.is_apart:
            parts = [_sent(part, self._storage.device) for part in parts]
        # Not `split`, here and below: autograd would take a batch that is changed in place for a
        # change of the whole block, and refuse gradients of the others.
        own = zip(*(part.unsafe_split_with_sizes(sizes) for part in parts), strict=True)
        # A call of torch takes longer than copying a small batch, so those are gathered together.
        at_once = max(1, _BLOCK_BYTES // max(1, _row_bytes(plan)) // max(sizes, default=1))
        start = 0
        for first in range(0, len(sizes), at_once):
            block = sizes[first : first + at_once]
            stop = start + sum(block)
            self._require(begun)
            rows = [part[start:stop] for part in parts]
            made = self._block(plan, block, rows, list(islice(own, len(block))))
            start = stop
            made.reverse()
            while made:  # a batch that is handed out is named nowhere here, to be freed by the user
                self._require(begun)
                yield made.pop()

    def _block(
        self, plan: _Plan, sizes: list[int], rows: list[torch.Tensor], own: list[Any]
    ) -> list[Any]:
        """Gather rows int64 (K,), with weights if any, as batches that have `own` parts of both."""
        layout, length = self._storage.layout, plan.length
        columns, games = {}, layout.games
        shared = rows[0] // layout.agents_per_game if games else rows[0]
        for path, column in plan.columns.items():
            columns[path] = column.index_select(0, shared if path in games else rows[0])
        if plan.normalizes:
            _normalize(columns["advantages"], sizes, *rows[1:])
        parts = {path: column.unsafe_split_with_sizes(sizes) for path, column in columns.items()}
        batches = []
        for k, (indices, *weights) in enumerate(own):
            found = {path: part[k] for path, part in parts.items()}
            found |= {"indices": indices, "weights": weights[0] if weights else None}
            if length is not None:
                shape = length, plan.split.size
                first = indices[: plan.split.size]
                found = {path: part.view(*shape, *part.shape[1:]) for path, part in found.items()}
                states = {name: state.index_select(0, first) for name, state in plan.states.items()}
                found["initial_states"] = states
            batches.append(self._batch(found, RolloutBatch if length is None else None))
        return batches

    def _batch(self, found: dict[str, Any], kind: type[Batch] | None) -> Batch:
        """A batch of columns by path; of sequences if no other kind is given."""
        layout = self._storage.layout
        paths = [leaf.path for leaf in layout.obs_leaves]
        if paths[0] in found:
            leaves = [found.pop(path) for path in paths]
            found["obs"] = build_tree(layout.observation_space, leaves)
        extras = (*layout.extras, *layout.games)
        found["extras"] = {name: found.pop(name) for name in extras if name in found}
        return (kind or RolloutSequenceBatch)._made_of(found)


def _row_bytes(plan: _Plan) -> int:
    """Bytes of a row of a batch."""
    return sum(column[:1].nbytes for column in plan.columns.values())


def _sent(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device of a part of an order, for which nobody waits."""
    if device.type == "cuda":
        part = part.pin_memory()  # torch keeps the pages until the copy has left them
    return part.to(device, non_blocking=True)


def _read_split(
    num_minibatches: int | None, batch_size: int | None, num_items: int, limit: str
) -> Split:
    """Return how a pass is cut, from the number that was given.

    Args:
        num_minibatches: How many; None if the size is given.
        batch_size: Of each; None if the number is given.
        num_items: In all.
        limit: What items are, and what to do if there are too few, for messages.

    Raises:
        BufferMisuseError: Not exactly one is given, or it is no integer from 1 to `num_items`.
    """
    if (num_minibatches is None) == (batch_size is None):
        raise BufferMisuseError(
            "give either num_minibatches or batch_size, got "
            f"num_minibatches={num_minibatches!r}, batch_size={batch_size!r}"
        )
    is_by_size = num_minibatches is None
    name = "batch_size" if is_by_size else "num_minibatches"
    number = check_count(name, batch_size if is_by_size else num_minibatches)
    if number > num_items:
        raise BufferMisuseError(f"{name} is {number}, but the rollout has {num_items} {limit}")
    other = -(-num_items // number)
    return Split(number, other, True) if is_by_size else Split(other, number, False)


def _normalize(
    advantages: torch.Tensor, sizes: list[int], weights: torch.Tensor | None = None
) -> None:
    """Subtract each batch's mean and divide by its standard deviation, in place.

    Args:
        advantages: float32 (K,), batch after batch.
        sizes: Of the batches.
        weights: float32 (K,), 1 of the rows that mean and deviation are of, at least one of each
            batch, else 0; or None: all.
    """
    start = 0
    for size, batches in groupby(sizes):
        count = len(list(batches))
        stop = start + count * size
        part = advantages[start:stop].view(count, size)
        numbers = part.double()
        own = torch.ones_like(numbers) if weights is None else weights[start:stop].view_as(numbers)
        number = own.sum(1, keepdim=True)
        # Sums from the first row to the last, which are the same on every processor.
        errors = numbers - (numbers * own).cumsum(1)[:, -1:] / number
        squares = (errors.square() * own).cumsum(1)[:, -1:]
        deviation = (squares / (number - 1).clamp(min=1)).sqrt()
        part.copy_(errors * (1.0 / (deviation + _EPSILON)))
        start = stop
