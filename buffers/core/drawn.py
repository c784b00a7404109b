"""Base class of buffers that draw batches by a generator of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from buffers.core.arguments import check_place, read_tensor
from buffers.core.batches import SequenceBatch, read_states
from buffers.core.generator import other_generator
from buffers.core.memory import torch_dtype
from buffers.core.rows import RowLayout
from buffers.core.state import SavedBuffer

__all__ = ["DrawnBuffer"]


class DrawnBuffer(SavedBuffer):
    """Mixin with `refresh_states`, `generator` and `nbytes`.

    A class must have the attributes and methods declared here.
    """

    device: torch.device
    _generator: Any  # of the draws; loading a state may replace it
    memory: Callable[[], dict[str, int]]  # bytes held now, by purpose
    _check_sequences: Callable[[Any], Any]  # memory of a batch; raises if another buffer drew it
    # Steps 0 .. B * L - 1 of a batch whose rows still hold them, int64 (K,) on the device.
    _alive_steps: Callable[[SequenceBatch, Any], torch.Tensor]
    # The layout of rows, and views of all rows by the names of extra columns.
    _columns_of_rows: Callable[[], tuple[RowLayout, Mapping[str, torch.Tensor]]]

    @property
    def generator(self) -> torch.Generator | None:
        """The generator on the device, to register with a CUDA graph; None on the CPU."""
        return getattr(self._generator, "torch", None)

    def _check_generator(self, state: Any) -> None:
        """Raise BufferMisuseError unless the state of a generator can be taken over."""
        if not self._generator.accepts_state(state):
            raise other_generator()

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(self.memory().values())

    def refresh_states(self, batch: SequenceBatch, **states: Any) -> None:
        """Replace recurrent states, or other extra columns, in the rows of sequences.

        Rows that were overwritten after the draw are skipped, and so are steps behind the end of a
        sequence. If a row is in several sequences, one of its values is stored.

        Args:
            batch: Returned by `sample_sequences`, not a copy.
            states: New values by name, (B, L, ...), of the dtype of the column or one that fits.

        Raises:
            BufferMisuseError: The batch is of another buffer, an extra column is unknown, or a
                shape or dtype does not fit; nothing was changed.
        """
        memory, (layout, columns) = self._check_sequences(batch), self._columns_of_rows()
        given = {}
        for name in read_states(tuple(states), layout.extras):
            shape, dtype = layout.fields[name].shape, torch_dtype(layout.fields[name].dtype)
            if isinstance(states[name], torch.Tensor):
                check_place(name, states[name], self.device)
            tensor = read_tensor(name, states[name], (*batch.mask.shape, *shape), dtype)
            given[name] = tensor.to(self.device, dtype)
        steps = self._alive_steps(batch, memory)
        rows = batch.indices.reshape(-1)[steps]
        for name, values in given.items():
            columns[name][rows] = values.flatten(0, 1).index_select(0, steps)
