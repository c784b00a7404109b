"""Batches of transitions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch

from buffers.core.arguments import MAX_COUNT, check_count, read_columns
from buffers.core.batches import Batch
from buffers.core.errors import BufferMisuseError
from buffers.core.rows import RowLayout

__all__ = ["LATE", "BatchOptions", "BatchSource", "Draw", "ReplayBatch", "column_names"]

# Which transitions a reader draws: each equally likely, each ring and then one of its own, or all
# different.
Draw = Literal["rows", "rings", "distinct"]
LATE = ("indices", "truncations")  # columns that most learners do not read: tensors when asked for


class BatchOptions(NamedTuple):
    """What batches are of a buffer."""

    num_steps: int  # longest window, at most the capacity
    gamma: float | None  # discount per step; None for batches without `discounts`
    has_weights: bool


class ReplayBatch(Batch):
    """B transitions; what the buffer does not have is None.

    Attributes:
        obs: (B, *obs_shape), nested like the observation space.
        next_obs: The same: the true observation after the last step, also where an episode ended.
        actions: (B, *action_shape).
        rewards: float32 (B,); over several steps the discounted sum.
        terminations: bool (B,), of the last step.
        truncations: bool (B,), of the last step.
        discounts: float32 (B,), the factor on the value of next_obs: gamma**m after m steps, 0 if
            the last one terminated. A buffer without gamma takes it as 1 here, so that it remains
            to be multiplied by yours; it is computed when asked for.
        env_ids: int32 (B,), or None.
        indices: int64 (B,), the rows of the buffer they were read from.
        weights: float32 (B,), of prioritized sampling, or None.
        extras: The user's columns by name, (B, ...).
        size: B.
        num_added: Of prioritized buffers: how many transitions had been added when it was drawn;
            else None.
        drawn_from: Of prioritized buffers: a number of that buffer, another one after each load.
    """

    __slots__ = (
        "actions", "discounts", "drawn_from", "env_ids", "extras", "indices", "memory", "next_obs",
        "num_added", "obs", "rewards", "size", "terminations", "truncations", "weights",
    )  # fmt: skip
    _fields = (
        "obs", "next_obs", "actions", "rewards", "terminations", "truncations", "discounts",
    )  # fmt: skip
    _others = ("env_ids", "indices", "weights")

    obs: Any
    next_obs: Any
    actions: torch.Tensor
    rewards: torch.Tensor
    terminations: torch.Tensor
    truncations: torch.Tensor
    discounts: torch.Tensor
    env_ids: Any
    indices: torch.Tensor
    weights: Any
    extras: dict[str, torch.Tensor]
    size: int
    num_added: int | None
    drawn_from: int | None
    memory: Any

    def __init__(self, fields: dict[str, Any], extras: dict[str, torch.Tensor], size: int, memory):
        self.env_ids = self.weights = self.num_added = self.drawn_from = None
        for name, tensor in fields.items():
            setattr(self, name, tensor)
        self.extras, self.size, self.memory = extras, size, memory

    def __getattr__(self, name: str) -> torch.Tensor:
        """What sampling does not pay for, or a column the user added."""
        if name == "discounts":  # of a buffer without gamma
            return torch.logical_not(self.terminations).float()
        if name in LATE and self.memory is not None and name in self.memory.late:
            tensor = torch.from_numpy(self.memory.late[name])
            setattr(self, name, tensor)
            return tensor
        return super().__getattr__(name)

    def __len__(self) -> int:
        """Number of transitions."""
        return self.size


class BatchSource:
    """Gives a buffer `new_batch`, and reads what says which batch `sample` is to fill.

    Attributes:
        _reader: Makes batches.
        _column_names: What `columns` may name.
    """

    _reader: Any
    _column_names: tuple[str, ...]

    def new_batch(self, batch_size: int, columns: Iterable[str] | None = None) -> ReplayBatch:
        """Memory for `sample(batch_size, out=...)`, not initialised.

        Args:
            batch_size: B.
            columns: What it is to have, as of `sample`.
        """
        size = check_count("batch_size", batch_size, MAX_COUNT)
        return self._reader.new(size, self._read_columns(columns))

    def _read_columns(self, columns: Iterable[str] | None) -> frozenset[str] | None:
        """Names of columns to draw, None for all; those that are always there are left out."""
        chosen = read_columns(columns, self._column_names)
        return chosen and chosen - {"indices", "weights"}

    def _read_batch(
        self, batch_size: int, out: ReplayBatch | None, columns: Iterable[str] | None
    ) -> ReplayBatch:
        """The batch that `sample` fills; raise BufferMisuseError if an argument does not fit."""
        if type(batch_size) is not int or not 1 <= batch_size <= MAX_COUNT:
            batch_size = check_count("batch_size", batch_size, MAX_COUNT)
        chosen = None if columns is None else self._read_columns(columns)
        if out is None:
            return self._reader.new(batch_size, chosen)
        return _check_out(out, batch_size, self._reader.owner, chosen)


def _check_out(out: Any, size: int, owner: object, columns: frozenset[str] | None) -> ReplayBatch:
    """Raise BufferMisuseError unless out is a batch of this size that `owner` has made.

    Args:
        out: What was given.
        size: Expected.
        owner: See above.
        columns: Expected, if not None.
    """
    if not isinstance(out, ReplayBatch) or getattr(out.memory, "owner", None) is not owner:
        raise BufferMisuseError(
            f"out is a {type(out).__name__}, expected a batch that new_batch or sample of this "
            "buffer returned"
        )
    if out.size != size:
        raise BufferMisuseError(f"out holds {out.size} transitions, expected {size}")
    if columns is not None and columns != out.memory.columns:
        raise BufferMisuseError(
            f"out has other columns than {sorted(columns)}; make it with new_batch and the same "
            "columns"
        )
    return out


def column_names(layout: RowLayout, *, has_weights: bool) -> tuple[str, ...]:
    """The names that `columns=` may have."""
    others = ["indices", *(["env_ids"] if "env_ids" in layout.fields else [])]
    others += ["weights"] if has_weights else []
    return (*ReplayBatch._fields, *layout.extras, *others)
