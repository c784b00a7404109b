"""What buffers have in common whose batches are drawn by a generator of their own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from buffers.core.arguments import MAX_COUNT, check_count
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import other_generator
from buffers.core.guard import exclusive
from buffers.core.prefetch import Prefetch
from buffers.core.rows import RowLayout
from buffers.core.sequences import SequenceBatch, read_new_states
from buffers.core.state import SavedBuffer

__all__ = ["DrawnBuffer"]


class DrawnBuffer(SavedBuffer):
    """Gives a buffer draws ahead, new states of sequences, and what is known of its memory.

    A class has the attributes and methods that are declared here.

    Attributes:
        device: Where the buffer is.
        _draws_by: Names of the methods that draw batches.
    """

    device: torch.device
    _draws_by: tuple[str, ...]
    _generator: Any  # of the draws, another one after some loads
    memory: Callable[[], dict[str, int]]  # bytes held now, by what they are for
    # What is known of a batch of sequences; raises BufferMisuseError if it is not ours.
    _check_sequences: Callable[[Any], Any]
    # int64 (K,) on the device: the steps of a batch (B * L) whose rows hold them still.
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

    def prefetch(
        self,
        batch_size: int,
        *,
        depth: int = 2,
        device: torch.device | str | None = None,
        method: str = "sample",
        **options: Any,
    ) -> Prefetch[Any]:
        """Draw batches ahead of the learner, and copy them to a device; close it when done.

        It pays where the device is a GPU: a batch is copied there while the learner is at the ones
        before.

        Args:
            batch_size: B.
            depth: Batches drawn ahead, 1 to 64. A batch shows the buffer as it was, and priorities
                too, so many batches before it is returned.
            device: Where batches are copied to; None leaves them where they are drawn.
            method: "sample", or another method that draws, such as "sample_sequences". With
                `device` sequences are copies, which can be given no priorities and no states.
            options: Of that method, without `out`.

        Raises:
            BufferMisuseError: An argument does not fit.

        >>> import numpy as np
        >>> from gymnasium.spaces import Box, Discrete
        >>> from buffers import SharedReplayBuffer
        >>> buffer = SharedReplayBuffer(1000, Box(-1, 1, (4,)), Discrete(2), seed=0)
        >>> obs, flags = np.zeros((3, 4), np.float32), np.zeros(3, bool)
        >>> step = {"obs": obs, "next_obs": obs, "actions": np.ones(3, int), "rewards": np.ones(3)}
        >>> buffer.add(**step, terminations=flags, truncations=flags)
        >>> with buffer.prefetch(256, depth=2) as batches:
        ...     for _ in range(3):
        ...         batch = next(batches)
        >>> len(batch)
        256
        """
        if method not in self._draws_by:
            raise BufferMisuseError(f"method is {method!r}, expected one of {list(self._draws_by)}")
        size = check_count("batch_size", batch_size, MAX_COUNT)
        draw = getattr(self, method)
        try:
            if "out" in options:
                raise TypeError("each batch is a new one, so there is no out")
            inspect.signature(draw).bind(size, **options)
        except TypeError as error:
            raise BufferMisuseError(f"options are {options}: {error}") from None
        draw = functools.partial(draw, size, **options)
        return Prefetch(draw, lambda: self._generator, self._guard, depth, device)

    @exclusive
    def refresh_states(self, batch: SequenceBatch, **states: Any) -> None:
        """Replace recurrent states, or other extra columns, in the rows of sequences.

        Rows that were overwritten since the batch was drawn, or whose episodes made room, are left
        out, and so is what lies behind the end of a sequence. Of a row in several sequences one of
        the values stays.

        Args:
            batch: What `sample_sequences` returned, no copy.
            states: New values by name, (B, L, ...), of the dtype of the column or one that fits.

        Raises:
            BufferMisuseError: The batch is of another buffer, there is no such extra column, or a
                shape or dtype does not fit; nothing was changed.
        """
        memory = self._check_sequences(batch)
        layout, columns = self._columns_of_rows()
        given = read_new_states(states, batch, layout, self.device)
        steps = self._alive_steps(batch, memory)
        rows = batch.indices.reshape(-1)[steps]
        for name, values in given.items():
            columns[name][rows] = values.flatten(0, 1).index_select(0, steps)
