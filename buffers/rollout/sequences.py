"""Minibatches of sequences: steps of one environment in their order, for recurrent policies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.arguments import check_count
from buffers.core.batches import Batch
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import HostGenerator
from buffers.core.staging import StagingBlocks
from buffers.rollout.kernels import collect_sequences, lay_out_sequences, pad_batches, shuffle
from buffers.rollout.minibatches import (
    BatchColumns,
    PassCounter,
    RolloutRows,
    normalize_advantages,
    read_split,
)
from buffers.rollout.on_device import DeviceRows

__all__ = ["RolloutSequenceBatch", "SequencePlan", "SequenceSampler"]

_OTHERS = ("actions", "log_probs", "values", "advantages", "returns", "is_first")


@dataclass(slots=True, repr=False, eq=False)
class RolloutSequenceBatch(Batch):
    """S sequences of L steps of a rollout; ``len(batch)`` is S."""

    obs: Any  # (L, S, *obs_shape), nested like the observation space
    actions: torch.Tensor  # (L, S, *action_shape)
    log_probs: torch.Tensor  # float32 (L, S), of the actions when they were taken
    values: torch.Tensor  # float32 (L, S), when the actions were taken
    advantages: torch.Tensor  # float32 (L, S)
    returns: torch.Tensor  # float32 (L, S)
    is_first: Any = None  # bool (L, S), the observation is the first of an episode
    indices: Any = None  # int64 (L, S), rows of the rollout: t * num_envs + env
    weights: Any = None  # float32 (L, S), 1 of the rows to learn from, else 0
    initial_states: dict[str, torch.Tensor] = field(default_factory=dict)  # (S, ...), at step 0
    extras: dict[str, torch.Tensor] = field(default_factory=dict)  # (L, S, ...), added by the user

    _fields = ("obs", "actions", "log_probs", "values", "advantages", "returns")
    _others = ("is_first", "indices", "weights", "initial_states")

    def __len__(self) -> int:
        """Number of sequences."""
        return (self.actions if self.indices is None else self.indices).shape[1]


class SequencePlan(NamedTuple):
    """How one pass goes through sequences."""

    columns: BatchColumns
    length: int
    size: int  # sequences of a batch
    most: int  # batches, if all sequences have a valid row
    is_by_size: bool  # there are as many batches as sequences need
    normalizes: bool  # advantages, each batch by itself


class SequenceSampler:
    """Shuffles sequences and gathers their rows.

    Args:
        rows: What they are gathered from.
        initial_states: Names of those of which batches have only what was before their first step.
        valid: uint8 (T, N), the host pages.
        generator: For the shuffling.
        deferred: What shuffles on the device instead, in as many batches as there can be, or None.
    """

    def __init__(
        self,
        rows: RolloutRows,
        initial_states: Sequence[str],
        *,
        valid: np.ndarray,
        generator: HostGenerator,
        deferred: DeviceRows | None = None,
    ):
        self._source, self._initial = rows, list(initial_states)
        self._columns: dict[frozenset[str] | None, BatchColumns] = {}
        self._valid, self._generator, self._deferred = valid, generator, deferred
        self._states = [rows.extras[name].flatten(0, 1) for name in self._initial]
        self._sent = StagingBlocks(rows.indices.tensor.device, "use shorter rollouts")
        self.passes = PassCounter()

    @property
    def nbytes(self) -> int:
        """Bytes held to send the order of rows to a device."""
        return self._sent.nbytes

    def plan(
        self,
        num_minibatches: int | None,
        batch_size: int | None,
        length: int | None,
        *,
        normalizes: bool,
        columns: Iterable[str] | None,
    ) -> SequencePlan:
        """Say how sequences are cut and put into batches.

        Raises:
            BufferMisuseError: Not exactly one of the first two is given, or a number is no integer,
                or out of range; or these are no columns, or without those to be normalised.
            BufferMemoryError: Memory for the batches is missing.
        """
        names = self._source.read_columns(columns, _OTHERS)
        names = None if names is None else names | {"is_first"}
        chosen = self._columns.get(names) or BatchColumns(
            self._source, _OTHERS, names, self._initial
        )
        if normalizes:
            chosen.require_advantages()
        num_steps, num_envs = self._valid.shape
        steps = num_steps if length is None else check_count("length", length)
        if steps > num_steps:
            raise BufferMisuseError(
                f"length is {steps}, but the rollout has {num_steps} steps; make it smaller, or "
                "leave it out for sequences of all steps"
            )
        size, most = read_split(
            num_minibatches,
            batch_size,
            -(-num_steps // steps) * num_envs,
            f"sequences of {steps} steps; make it smaller, or the sequences shorter",
        )
        chosen.check_fits(steps * size)
        self._columns[names] = chosen
        return SequencePlan(chosen, steps, size, most, num_minibatches is None, normalizes)

    def draw(self, plan: SequencePlan) -> Iterator[RolloutSequenceBatch]:
        """Yield each sequence with a valid row once, in random order."""
        return self._draw(plan, self.passes.stops)

    def _draw(self, plan: SequencePlan, stops: int) -> Iterator[RolloutSequenceBatch]:
        begun = self.passes.begin(stops)
        length, size = plan.length, plan.size
        # As for other minibatches: these are not views of one another for autograd.
        parts = [part.unsafe_split(length * size) for part in self._order(plan)]
        for rows, weights in zip(*parts, strict=True):
            self.passes.require(begun)
            # Nothing that is handed out is named here: it would be held until the next batch.
            yield self._batch(*self._gather(rows, weights, plan), rows, weights, plan)

    def _order(self, plan: SequencePlan) -> list[torch.Tensor]:
        """The rows int64 (K,) of all batches of a pass, and their weights float32 (K,)."""
        if self._deferred is not None:
            return self._deferred.padded_sequences(plan.length, plan.most, plan.size)
        ids = np.empty(plan.most * plan.size, np.int64)
        count = int(collect_sequences(self._valid, plan.length, ids))
        shuffle(ids[:count], self._generator.words)
        num_batches = -(-count // plan.size) if plan.is_by_size else min(plan.most, count)
        padded = np.empty(num_batches * plan.size, np.int64)
        is_own = np.empty(len(padded), np.float32)
        pad_batches(ids[:count], num_batches, plan.size, padded, is_own)
        total = num_batches * plan.length * plan.size
        order = [np.empty(total, np.int64), np.empty(total, np.float32)]
        places = [part.reshape(num_batches, plan.length, plan.size) for part in order]
        lay_out_sequences(padded, is_own, self._valid, plan.length, plan.size, *places)
        if not num_batches:
            return []
        if self._source.is_host:
            return list(map(torch.from_numpy, order))
        with self._sent.sent("the order of sequences", *order) as sent:
            return [part.clone() for part in sent]

    def _gather(
        self, rows: torch.Tensor, weights: torch.Tensor, plan: SequencePlan
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The rows int64 (L * S,) of all columns, and the states before the first step."""
        columns = plan.columns.gather(rows)
        if plan.normalizes:
            advantages, is_host = columns[plan.columns.advantages_at], self._source.is_host
            normalize_advantages(advantages, [len(rows)], weights, is_host=is_host)
        first = rows[: plan.size]
        return columns, [torch.index_select(state, 0, first) for state in self._states]

    def _batch(
        self,
        columns: list[torch.Tensor],
        states: list[torch.Tensor],
        rows: torch.Tensor,
        weights: torch.Tensor,
        plan: SequencePlan,
    ) -> RolloutSequenceBatch:
        def shaped(column: torch.Tensor) -> torch.Tensor:
            return column.view(plan.length, plan.size, *column.shape[1:])

        return RolloutSequenceBatch._made_of(
            {
                **plan.columns.contents([shaped(column) for column in columns]),
                "indices": shaped(rows),
                "weights": shaped(weights),
                "initial_states": dict(zip(self._initial, states, strict=True)),
            }
        )
