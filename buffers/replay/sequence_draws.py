"""Draws of sequences: which steps follow one another, read like other transitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from buffers.core.arguments import MAX_COUNT, check_count, read_columns
from buffers.core.errors import BufferMisuseError
from buffers.core.guard import exclusive
from buffers.core.sequences import (
    SequenceBatch,
    SequenceOptions,
    memory_of,
    read_states,
    zero_padding,
)
from buffers.replay.batches import ReplayBatch
from buffers.replay.sequences import SequenceIndex, SequenceMemory

__all__ = ["SequenceDraws"]


class SequenceDraws:
    """Gives a replay buffer `sample_sequences`, by an index of what follows on what."""

    _guard: Any
    _table: Any
    _reader: Any
    _random: Any
    _sequences: SequenceIndex | None
    device: torch.device

    def rows(self) -> dict[str, Any]:
        """Views of all rows by column."""
        raise NotImplementedError

    def _require_sequences(self) -> SequenceIndex:
        if self._sequences is None:
            raise BufferMisuseError(
                "sample_sequences needs track_episodes=True in the constructor, which keeps what "
                "follows on what"
            )
        return self._sequences

    @exclusive
    def _sample_sequences(
        self,
        batch_size: int,
        options: SequenceOptions,
        initial_states: Sequence[str] | str,
        columns: Iterable[str] | None,
        beta: float | None = None,
    ) -> SequenceBatch:
        index, layout = self._require_sequences(), self._table.plan.layout
        batch_size = check_count("batch_size", batch_size, MAX_COUNT)
        check_count("batch_size * sequence_length", batch_size * options.length, MAX_COUNT)
        names = read_states(initial_states, layout.extras)
        chosen = read_columns(columns, (*SequenceBatch._fields, *layout.extras))
        index.prepare(options, self._new_sequence_value())
        rows, steps, weights, memory = index.draw(self._random.torch, batch_size, beta or 0.0)
        indices, steps = torch.from_numpy(rows), torch.from_numpy(steps)
        mask = indices >= 0
        wanted = {*ReplayBatch._fields, "env_ids", *layout.extras} if chosen is None else chosen
        drawn = self._reader.new(
            rows.size, frozenset(wanted - {*names}).intersection(self._reader.column_names)
        )
        # What has run out is read from the first row, and set to zero below.
        drawn.indices.copy_(torch.where(mask, indices, indices[:, :1]).view(-1))
        self._reader.fill(drawn)
        is_short, whole = not bool(mask.all()), self.rows() if names else {}
        indices, steps, mask, starts = (
            tensor.to(self.device) for tensor in (indices, steps, mask, indices[:, 0])
        )

        def shaped(tensors: Any) -> Any:
            if isinstance(tensors, torch.Tensor):
                return tensors.unflatten(0, rows.shape)
            if isinstance(tensors, dict):
                return {name: shaped(tensor) for name, tensor in tensors.items()}
            return tuple(map(shaped, tensors))

        drawn_names = [n for n in SequenceBatch._fields if n in ReplayBatch._fields]
        fields = {n: shaped(getattr(drawn, n)) for n in drawn_names if not chosen or n in chosen}
        extras = shaped(drawn.extras)
        if is_short:
            zero_padding((fields, extras), mask)
        if not chosen or "boundaries" in chosen:
            none = torch.zeros((), dtype=torch.bool, device=self.device)
            fields["boundaries"] = none.expand(mask.shape)
        return SequenceBatch._made_of(
            {
                **fields,
                "steps": steps,
                "mask": mask,
                "extras": extras,
                **options.masks(mask, steps),
                "indices": indices,
                "weights": None if beta is None else torch.from_numpy(weights).to(self.device),
                "initial_states": {n: whole[n].index_select(0, starts) for n in names},
                "memory": memory,
            }
        )

    def _check_sequences(self, batch: Any) -> SequenceMemory:
        memory, index = memory_of(batch, self._sequences), self._sequences
        assert index is not None
        if memory.version != index.version:
            raise BufferMisuseError(
                "batch was drawn before a state was loaded, or sequences of other options were "
                "drawn; draw anew"
            )
        return memory

    def _alive_steps(self, batch: SequenceBatch, memory: SequenceMemory) -> torch.Tensor:
        assert self._sequences is not None
        rows = batch.indices.reshape(-1).cpu().numpy()
        steps = np.flatnonzero(rows >= 0)
        steps = steps[self._sequences.are_alive(rows[steps], memory)]
        return torch.from_numpy(steps).to(self.device)

    def _new_sequence_value(self) -> float:
        """What sequences get that nobody has given a priority yet."""
        return 1.0
