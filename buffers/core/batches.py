"""Batches of buffers; sequences of steps for recurrent networks, and their options.

A sequence is L consecutive steps of an episode. Any step may be the first; with an overlap, only
every (L - overlap)-th step from the start of the episode. The first `burn_in` steps update a
recurrent state and are not learned from, unless the sequence begins with its episode. With `pad` a
sequence may end before L steps, if at least one is left to learn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import torch

from buffers.core.arguments import MAX_COUNT, check_count
from buffers.core.errors import BufferMisuseError

__all__ = [
    "Batch",
    "SequenceBatch",
    "SequenceOptions",
    "each_tensor",
    "memory_of",
    "read_sequences",
    "read_states",
    "zero_padding",
]


class Batch:
    """Columns of tensors, one row per transition, step or sequence.

    Built-in columns are attributes, such as ``batch.obs``. Columns declared by `extra_columns` are
    in the dict ``batch.extras`` (``batch.extras["costs"]``), and are attributes too. Unpacking
    yields the built-in columns that every batch of the class has, in the order of the class: ``obs,
    actions, *_ = batch``. Other entries (`indices`, `weights`, `env_ids`, `extras`) are accessible
    by name only. ``len(batch)`` is the number of rows. A batch drawn with `columns=` has only these
    columns: access to others, and unpacking, raise AttributeError.

    Batches can be copied (`copy.copy`, `copy.deepcopy`) and pickled. A copy has tensors of its own,
    and the buffer does not accept it as `out`.
    """

    __slots__ = ()

    _fields: ClassVar[tuple[str, ...]]  # columns that unpacking yields, in order
    _others: ClassVar[tuple[str, ...]] = ()  # further columns; None if missing
    _counted: ClassVar[str] = "actions"  # column that every batch has, whatever was drawn

    actions: torch.Tensor
    extras: dict[str, torch.Tensor]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the built-in columns; unpacking uses this."""
        return iter([getattr(self, name) for name in self._fields])

    def __len__(self) -> int:
        """Number of rows."""
        return len(getattr(self, self._counted))

    def __getattr__(self, name: str) -> torch.Tensor:
        """Return an extra column."""
        if not name.startswith("_") and name not in self._names() and name in self.extras:
            return self.extras[name]
        extras = [] if name in self._names() else [*getattr(self, "extras", ())]
        raise AttributeError(
            f"a {type(self).__name__} has no {name!r}; its columns are some of "
            f"{', '.join((*self._fields, *self._others, *extras))}; if it was drawn with columns=, "
            "name it there"
        )

    def __repr__(self) -> str:
        """The number of rows, and names of columns."""
        return f"{type(self).__name__}({len(self)} rows of {', '.join(self._asdict())})"

    def _asdict(self) -> dict[str, Any]:
        """Built-in columns by name, without those that are None."""
        found = {name: getattr(self, name, None) for name in (*self._fields, *self._others)}
        return {name: column for name, column in found.items() if column is not None}

    def _replace(self, **columns: Any) -> Self:
        """Return a batch with some columns replaced; this batch is not changed."""
        unknown = set(columns) - {*self._fields, *self._others, "extras"}
        if unknown:
            raise ValueError(f"a {type(self).__name__} has no columns {sorted(unknown)}")
        return self._made_of({**self._contents(), **columns})

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        """Names of all attributes of the instance."""
        return cls.__slots__

    def _contents(self) -> dict[str, Any]:
        """Attributes of a copy: all but `memory`, which `out=` needs."""
        names = [name for name in self._names() if name != "memory" and hasattr(self, name)]
        return {name: getattr(self, name) for name in names}

    @classmethod
    def _made_of(cls, contents: Mapping[str, Any]) -> Self:
        made = cls.__new__(cls)
        if "memory" in cls._names():
            made.memory = None  # pyright: ignore[reportAttributeAccessIssue]
        for name, value in contents.items():
            setattr(made, name, value)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle clones of the tensors: a view would be pickled with its whole storage."""
        keep = torch.contiguous_format
        own = each_tensor(self._contents(), lambda t: t.detach().clone(memory_format=keep))
        return type(self)._made_of, (own,)


def each_tensor(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Map a function over the tensors in a nest of dicts, tuples and lists."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: each_tensor(item, function) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(each_tensor(item, function) for item in value)
    return value


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
