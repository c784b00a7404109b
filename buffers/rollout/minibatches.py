"""Random minibatches of the rows of a finished rollout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Dict, Tuple

from buffers.core.arguments import check_count, read_columns
from buffers.core.batches import Batch
from buffers.core.columns import Column
from buffers.core.errors import BufferMisuseError
from buffers.core.generator import HostGenerator
from buffers.core.memory import check_fits
from buffers.core.spaces import build_tree
from buffers.core.staging import StagingBlocks
from buffers.rollout.kernels import ADVANTAGE_EPSILON, normalize_batches, pad_batches, shuffle
from buffers.rollout.on_device import DeviceRows

__all__ = [
    "BatchColumns",
    "MinibatchPlan",
    "MinibatchSampler",
    "PassCounter",
    "RolloutBatch",
    "RolloutRows",
    "normalize_advantages",
    "read_split",
    "split_evenly",
]

_OTHERS = ("actions", "log_probs", "values", "advantages", "returns")  # columns but observations
_BLOCK_BYTES = 1 << 18  # of rows gathered by one call, for several batches if these are small


@dataclass(slots=True, repr=False, eq=False)
class RolloutBatch(Batch):
    """B transitions of a rollout."""

    obs: Any  # (B, *obs_shape), nested like the observation space
    actions: torch.Tensor  # (B, *action_shape)
    log_probs: torch.Tensor  # float32 (B,), of the actions when they were taken
    values: torch.Tensor  # float32 (B,), when they were taken
    advantages: torch.Tensor  # float32 (B,)
    returns: torch.Tensor  # float32 (B,)
    indices: Any = None  # int64 (B,), rows of the rollout: t * num_envs + env
    weights: Any = None  # of fixed=True: float32 (B,), 1 of the rollout's rows, 0 of padding
    extras: dict[str, torch.Tensor] = field(default_factory=dict)  # (B, ...), added by the user

    _fields = ("obs", "actions", "log_probs", "values", "advantages", "returns")
    _others = ("indices", "weights")

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.actions if self.indices is None else self.indices)


class PassCounter:
    """Tells a pass through batches whether it may go on: one at a time, and in one rollout.

    Attributes:
        stops: How often the rows changed.
    """

    def __init__(self):
        self._passes = self.stops = 0

    def stop(self) -> None:
        """Let no pass go on, as the rows change."""
        self.stops += 1

    def begin(self, stops: int) -> tuple[int, int]:
        """Begin a pass, which ends the one before.

        Args:
            stops: Value of the attribute when the pass was asked for.

        Returns:
            What `require` is to be given before every batch.
        """
        self.require((self._passes, stops))
        self._passes += 1
        return self._passes, stops

    def require(self, begun: tuple[int, int]) -> None:
        """Raise BufferMisuseError if the pass is over."""
        if begun != (self._passes, self.stops):
            raise BufferMisuseError(
                "these minibatches are over: another pass or rollout has begun since, or "
                "advantages were computed again; go through one pass at a time, "
                "list(rollout.minibatches(...)) keeps the batches of a pass"
            )


class MinibatchPlan(NamedTuple):
    """How one pass goes through rows."""

    columns: BatchColumns
    num_rows: int
    num_batches: int
    padded_size: int | None  # of all batches; None: they have the rows alone
    normalizes: bool  # advantages, each batch by itself


def split_evenly(count: int, parts: int) -> Iterator[tuple[int, int]]:
    """Cut range(count) into (start, stop) pieces whose sizes differ by one at most.

    >>> list(split_evenly(7, 3))
    [(0, 3), (3, 5), (5, 7)]
    """
    size, longer = divmod(count, max(parts, 1))
    start = 0
    for part in range(parts):
        stop = start + size + (part < longer)
        yield start, stop
        start = stop


class RolloutRows(NamedTuple):
    """The columns of a rollout that minibatches are gathered from."""

    observation_space: Space  # says how observations nest
    obs: Sequence[Column]  # of the observation leaves, (T + 1, N, ...)
    columns: Mapping[str, Column]  # all by name, of which the other fields of a batch are taken
    extras: Mapping[str, torch.Tensor]  # (T, N, ...), which the user added
    games: Mapping[str, torch.Tensor]  # (T, N / A, ...), with one row for A of the others'

    @property
    def indices(self) -> Column:
        """int64 (T * N,), the row indices to draw from."""
        return self.columns["rows"]

    @property
    def is_host(self) -> bool:
        """Whether batches are gathered by the processor."""
        return self.indices.tensor.device.type == "cpu" and not self.indices.is_twofold

    def read_columns(
        self, columns: Iterable[str] | None, others: tuple[str, ...]
    ) -> frozenset[str] | None:
        """Names of the columns that batches are to have besides those always there; None for all.

        Args:
            columns: As the user gave them.
            others: Those that such batches can have besides observations and extras.

        Raises:
            BufferMisuseError: They are no names of columns, or there is none.
        """
        always = ("indices", "weights")
        chosen = read_columns(columns, ("obs", *others, *self.extras, *self.games, *always))
        return chosen and chosen.difference(always)


class BatchColumns:
    """The columns that batches of one kind have.

    Attributes:
        row_bytes: Bytes of a row of a batch.

    Args:
        rows: What they are gathered from.
        others: Names of columns besides observations and extras.
        chosen: The columns and extras that batches have; None for all.
        without: Extra columns that they don't have.
    """

    def __init__(
        self,
        rows: RolloutRows,
        others: Sequence[str],
        chosen: frozenset[str] | None = None,
        without: Collection[str] = (),
    ):
        def choose(names: Iterable[str]) -> list[str]:
            return [name for name in names if chosen is None or name in chosen]

        obs = rows.obs if choose(["obs"]) else ()
        extras = [name for name in choose(rows.extras) if name not in without]
        games = choose(rows.games)
        self._space, self._num_obs = rows.observation_space, len(obs)
        self.others, self.extras = choose(others), [*extras, *games]
        # Whether the columns, in their order, are the first fields of a batch.
        is_nested = isinstance(self._space, Dict | Tuple)
        self.is_plain = chosen is None and not (is_nested or self.extras)
        self.advantages_at = -1  # which of the columns they are
        if "advantages" in self.others:
            self.advantages_at = self._num_obs + self.others.index("advantages")
        tensors = [column.tensor for column in (*obs, *(rows.columns[n] for n in self.others))]
        tensors += [*(rows.extras[n] for n in extras), *(rows.games[n] for n in games)]
        num_envs = rows.columns["actions"].tensor.shape[1]
        sharing = next((num_envs // rows.games[name].shape[1] for name in games), 1)
        self._flat = [tensor.flatten(0, 1) for tensor in tensors]
        self._num_shared, self._sharing = len(games), sharing
        self.row_bytes = sum(column.element_size() * column[0].numel() for column in self._flat)

    def check_fits(self, num_rows: int) -> None:
        """Raise BufferMemoryError unless there is memory for a batch of so many rows."""
        if self._flat:
            device, advice = self._flat[0].device, "use more minibatches, or keep fewer"
            check_fits(f"a batch of {num_rows} rows", num_rows * self.row_bytes, device, advice)

    def gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows int64 (B,) of all columns, in memory of their own."""
        num_own = len(self._flat) - self._num_shared
        found = [torch.index_select(column, 0, rows) for column in self._flat[:num_own]]
        if self._num_shared:
            shared = rows // self._sharing
            found += [torch.index_select(column, 0, shared) for column in self._flat[num_own:]]
        return found

    def require_advantages(self) -> None:
        """Raise BufferMisuseError unless the advantages are among the columns."""
        if self.advantages_at < 0:
            raise BufferMisuseError(
                "normalize_advantages=True needs advantages, but columns does not name them; add "
                '"advantages" to columns'
            )

    def contents(self, columns: Sequence[Any]) -> dict[str, Any]:
        """Attributes of a batch, given its columns in their order."""
        begin = self._num_obs + len(self.others)
        found = dict(zip(self.others, columns[self._num_obs : begin], strict=True))
        if self._num_obs:
            found["obs"] = build_tree(self._space, columns[: self._num_obs])
        found["extras"] = dict(zip(self.extras, columns[begin:], strict=True))
        return found


class MinibatchSampler:
    """Shuffles row indices and gathers rows.

    Args:
        rows: What they are gathered from; the row indices are shuffled here.
        seed: For the shuffling; None takes entropy of the system.
        deferred: What shuffles on the device instead, in batches of one size, or None.
    """

    def __init__(self, rows: RolloutRows, seed: int | None, deferred: DeviceRows | None = None):
        self._source, self._deferred = rows, deferred
        self._columns: dict[frozenset[str] | None, BatchColumns] = {
            None: BatchColumns(rows, _OTHERS)
        }
        self._rows, self._is_host = rows.indices, rows.is_host
        self._num_rows = self._rows.spec.shape[0]
        self._sent = StagingBlocks(self._rows.tensor.device, "use fewer rows")
        self.passes = PassCounter()
        self.generator = HostGenerator(seed)

    @property
    def nbytes(self) -> int:
        """Bytes held to send the order of rows to a device."""
        return self._sent.nbytes

    def plan(
        self,
        num_minibatches: int | None,
        batch_size: int | None,
        count: int,
        *,
        fixed: bool,
        normalizes: bool,
        columns: Iterable[str] | None,
    ) -> MinibatchPlan:
        """Cut `count` rows into batches.

        Raises:
            BufferMisuseError: Not exactly one of the two is given, or it is no integer from 1 to
                T * N; or these are no columns, or without those that are to be normalised.
            BufferMemoryError: Memory for the batches is missing.
        """
        names = None if columns is None else self._source.read_columns(columns, _OTHERS)
        chosen = self._columns.get(names) or BatchColumns(self._source, _OTHERS, names)
        if normalizes:
            chosen.require_advantages()
        size, most = read_split(
            num_minibatches, batch_size, self._num_rows, "transitions; make it smaller"
        )
        chosen.check_fits(max(size, self._block_rows(chosen)))
        self._columns[names] = chosen
        if self._deferred is not None:
            count = self._num_rows  # at most
        num_batches = -(-count // size) if num_minibatches is None else min(most, count)
        return MinibatchPlan(chosen, count, num_batches, size if fixed else None, normalizes)

    def _block_rows(self, columns: BatchColumns) -> int:
        """How many rows are gathered by one call, unless a batch has more."""
        return min(self._num_rows, _BLOCK_BYTES // max(1, columns.row_bytes))

    def draw(self, plan: MinibatchPlan) -> Iterator[RolloutBatch]:
        """Yield the first rows of the list once each, shuffled, in even batches."""
        return self._draw(plan, self.passes.stops)

    def _draw(self, plan: MinibatchPlan, stops: int) -> Iterator[RolloutBatch]:
        require, begun = self.passes.require, self.passes.begin(stops)
        chosen, num_rows, num_batches, padded, normalizes = plan
        is_plain = chosen.is_plain
        if padded is None:
            sizes = [stop - start for start, stop in split_evenly(num_rows, num_batches)]
            order = [self._shuffled(num_rows)]
        else:
            sizes, order = [padded] * num_batches, self._padded(num_rows, num_batches, padded)
        # A call of torch takes longer than copying a small batch, so those are gathered together.
        at_once = max(1, self._block_rows(chosen) // max(sizes, default=1))
        blocks = [sizes[begin : begin + at_once] for begin in range(0, num_batches, at_once)]
        # Not `split_with_sizes`, here and below: autograd would take a batch that is changed in
        # place for a change of the whole block, and refuse gradients of the others.
        spans = list(map(sum, blocks))
        pieces = zip(*[part.unsafe_split_with_sizes(spans) for part in order], strict=True)
        for sizes, own in zip(blocks, pieces, strict=True):
            require(begun)
            # Nothing that is handed out is named here: it would be held until the next batch.
            if len(sizes) == 1:
                if is_plain:
                    yield RolloutBatch(*self._gather(own, sizes, chosen, normalizes), *own)
                else:
                    yield _batch(chosen, [*self._gather(own, sizes, chosen, normalizes), *own], own)
                continue
            columns = *self._gather(own, sizes, chosen, normalizes), *own
            block = [column.unsafe_split_with_sizes(sizes) for column in columns]
            for parts in zip(*block, strict=True):
                require(begun)
                yield RolloutBatch(*parts) if is_plain else _batch(chosen, parts, own)

    def _shuffled(self, count: int) -> torch.Tensor:
        """The first rows int64 (count,) of the list, shuffled; a copy, of which batches have part.

        To other devices a copy is sent: the next pass shuffles the host pages.
        """
        rows = self._rows.host[:count]
        shuffle(rows, self.generator.words)
        if self._is_host:
            return self._rows.tensor[:count].clone()
        with self._sent.sent("the order of rows", rows) as (order,):
            return order.clone()

    def _padded(self, count: int, num_batches: int, size: int) -> list[torch.Tensor]:
        """The first rows of the list, shuffled, in batches of one size; and their weights.

        Returns:
            int64 and float32 (num_batches * size,); batches have parts of both.
        """
        if self._deferred is not None:
            return self._deferred.padded(num_batches, size)
        rows = self._rows.host[:count]
        shuffle(rows, self.generator.words)
        total = num_batches * size
        order, weights = np.empty(total, np.int64), np.empty(total, np.float32)
        pad_batches(rows, num_batches, size, order, weights)
        if self._is_host:
            return [torch.from_numpy(order), torch.from_numpy(weights)]
        with self._sent.sent("the order of rows", order, weights) as sent:
            return [part.clone() for part in sent]

    def _gather(
        self,
        own: Sequence[torch.Tensor],
        sizes: list[int],
        chosen: BatchColumns,
        normalizes: bool,
    ) -> list[Any]:
        """Columns of batches of some sizes, given their rows int64 (B,), and weights if any."""
        columns = chosen.gather(own[0])
        if normalizes:
            advantages = columns[chosen.advantages_at]
            normalize_advantages(advantages, sizes, *own[1:], is_host=self._is_host)
        return columns


def _batch(chosen: BatchColumns, parts: Sequence[Any], own: Sequence[Any]) -> RolloutBatch:
    """A batch of columns and, behind them, the rows' indices, and weights if `own` has two."""
    *columns, indices, weights = parts if len(own) > 1 else (*parts, None)
    found = {"indices": indices, "weights": weights}
    return RolloutBatch._made_of({**chosen.contents(columns), **found})


def read_split(
    num_minibatches: int | None, batch_size: int | None, num_items: int, limit: str
) -> tuple[int, int]:
    """Return the size of batches and the most that there can be, from the one that was given.

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
    name = "batch_size" if num_minibatches is None else "num_minibatches"
    number = check_count(name, batch_size if num_minibatches is None else num_minibatches)
    if number > num_items:
        raise BufferMisuseError(f"{name} is {number}, but the rollout has {num_items} {limit}")
    other = -(-num_items // number)
    return (number, other) if num_minibatches is None else (other, number)


def normalize_advantages(
    advantages: torch.Tensor,
    sizes: list[int],
    weights: torch.Tensor | None = None,
    *,
    is_host: bool,
) -> None:
    """Normalise advantages in place, batch by batch.

    Args:
        advantages: float32 (K,), of some batches, one after another.
        sizes: Of the batches.
        weights: float32 (K,), 1 of the rows that make means and standard deviations, else 0.
        is_host: Whether compiled code may do it.
    """
    if is_host:
        own = None if weights is None else weights.numpy()
        normalize_batches(advantages.numpy(), np.array(sizes), own)
        return
    weights = torch.ones_like(advantages) if weights is None else weights
    for part, own in zip(advantages.split(sizes), weights.split(sizes), strict=True):
        count = own.sum()
        part.sub_((own * part).sum() / count)
        deviation = ((own * part.square()).sum() / (count - 1).clamp_(min=1)).sqrt_()
        part.div_(deviation.add_(ADVANTAGE_EPSILON))
