"""Sequences of steps for recurrent networks: their options and batches.

A sequence is L consecutive steps of an episode. Any step may be the first; with an overlap, only
every (L - overlap)-th step from the start of the episode. The first `burn_in` steps update a
recurrent state and are not learned from, unless the sequence begins with its episode. With `pad` a
sequence may end before L steps, if at least one is left to learn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from buffers.core.arguments import MAX_COUNT, check_count
from buffers.core.batches import Batch, each_tensor
from buffers.core.errors import BufferMisuseError

__all__ = [
    "SequenceBatch", "SequenceOptions", "memory_of", "read_sequences", "read_states",
    "zero_padding",
]  # fmt: skip


@dataclass(slots=True, repr=False, eq=False)
class SequenceBatch(Batch):
    """B sequences of L steps, each within one episode."""

    obs: Any  # (B, L, *obs_shape)
    next_obs: Any  # (B, L, *obs_shape)
    actions: torch.Tensor  # (B, L, *action_shape)
    rewards: torch.Tensor  # float32 (B, L)
    terminations: torch.Tensor  # bool (B, L)
    truncations: torch.Tensor  # bool (B, L)
    boundaries: torch.Tensor  # bool (B, L); always False in replay buffers
    steps: torch.Tensor  # int32 (B, L), counted from 0 in the episode
    mask: torch.Tensor  # bool (B, L), False behind the last step, where all is zero
    extras: dict[str, torch.Tensor]  # (B, L, ...), without those of `initial_states`
    learn_mask: Any = None  # bool (B, L), the steps to learn from: `mask` without the burn-in
    is_first: Any = None  # bool (B, L), the first step of an episode
    indices: Any = None  # int64 (B, L), rows of the buffer; -1 behind the last step
    weights: Any = None  # float32 (B,), of prioritized sampling, else None
    initial_states: dict[str, torch.Tensor] = field(default_factory=dict)  # (B, ...), at step 0
    memory: Any = None  # identifies the draw to the buffer; None in copies

    _fields = (
        "obs", "next_obs", "actions", "rewards", "terminations", "truncations", "boundaries",
        "steps", "mask",
    )  # fmt: skip
    _others = ("learn_mask", "is_first", "indices", "weights", "initial_states")
    _counted = "mask"


class SequenceOptions(NamedTuple):
    """Options that define the sequences."""

    length: int  # L
    burn_in: int
    period: int  # between first steps of sequences, from the start of the episode
    pad: bool

    def __str__(self) -> str:
        overlap = self.length - self.period
        begins = "anywhere" if self.period == 1 else f"overlapping by {overlap}"
        how = f"with burn_in={self.burn_in} and pad={self.pad}"
        return f"sequences of {self.length} steps, {begins}, {how}"

    @property
    def needed(self) -> int:
        """Fewest steps of a sequence that does not begin with its episode."""
        return self.burn_in + 1 if self.pad else self.length

    @property
    def needed_at_start(self) -> int:
        """Fewest steps of a sequence that begins with its episode."""
        return 1 if self.pad else self.length

    def masks(self, mask: torch.Tensor, steps: torch.Tensor) -> dict[str, torch.Tensor]:
        """Masks (B, L) of first steps, and of steps to learn from."""
        is_first, learn = mask & (steps == 0), mask.clone()
        learn[:, : self.burn_in] &= is_first[:, :1]
        return {"learn_mask": learn, "is_first": is_first}


def read_sequences(length: Any, burn_in: Any, overlap: Any, pad: Any) -> SequenceOptions:
    """Check the arguments; raise BufferMisuseError if one is wrong or two are contradictory."""
    length = check_count("sequence_length", length, MAX_COUNT)
    burn_in = check_count("burn_in", burn_in) if burn_in != 0 else 0
    overlap = length - 1 if overlap is None else overlap
    kept = check_count("overlap", overlap) if overlap != 0 else 0
    if max(burn_in, kept) >= length:
        raise BufferMisuseError(
            f"burn_in is {burn_in} and overlap is {kept} of sequence_length {length}, which leaves "
            "no step to learn from, or none of its own; make them smaller (overlap=None lets "
            "sequences begin anywhere), or the sequences longer"
        )
    return SequenceOptions(length, burn_in, length - kept, bool(pad))


def read_states(names: Sequence[str] | str, extras: Sequence[str]) -> tuple[str, ...]:
    """Check names of extra columns with recurrent states; raise BufferMisuseError for others."""
    found = (names,) if isinstance(names, str) else tuple(names)
    for name in found:
        if name not in extras:
            raise BufferMisuseError(
                f"initial_states has {name!r}, expected names of extra columns, which are "
                f"{sorted(extras)}; name it in extra_columns of the constructor"
            )
    return found


def memory_of(batch: Any, owner: object) -> Any:
    """Return `batch.memory`; raise BufferMisuseError unless `owner` has drawn the batch."""
    memory = batch.memory if isinstance(batch, SequenceBatch) else None
    if memory is None or memory.owner is not owner:
        raise BufferMisuseError(
            f"batch is a {type(batch).__name__}, expected what sample_sequences of this buffer "
            "returned, not a copy, nor one drawn before a state was loaded or with other options"
        )
    return memory


def zero_padding(tensors: Any, mask: torch.Tensor) -> None:
    """Set tensors (B, L, ...), in dicts and tuples, to zero where mask bool (B, L) is False."""
    each_tensor(tensors, lambda t: t.masked_fill_(~mask.view(*mask.shape, *[1] * (t.ndim - 2)), 0))
