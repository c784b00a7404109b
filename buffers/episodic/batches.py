"""Batches drawn from episodes, as named views of packed rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space

from buffers.core.batches import Batch, BatchArrays, BatchMemory
from buffers.core.columns import torch_dtype
from buffers.core.errors import BufferMisuseError
from buffers.core.spaces import build_tree
from buffers.episodic.layout import HEADER_WORDS, RowField, RowLayout

__all__ = ["BatchShaper", "GoalBatch", "PairBatch", "PairMemory", "SequenceBatch", "StackBatch"]

_MAX_PLANS = 64
_HEADER_NAMES = {"steps": "step", "bounds": "bound"}
# After obs, future_obs and offsets.
_PAIR_FIELDS = ("actions", "rewards", "terminations", "truncations")


class PairMemory(NamedTuple):
    """What the views of a PairBatch lie in: B rows, B observations, B offsets, B row numbers."""

    words: Any  # int64, NumPy array on the CPU, else tensor
    size: int  # B
    layout: RowLayout

    @property
    def block(self) -> torch.Tensor:
        """All of it as a tensor int64."""
        return torch.from_numpy(self.words) if isinstance(self.words, np.ndarray) else self.words

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows int64 (B, W), observations (B, V), offsets (B,) and row numbers (B,)."""
        width, obs_width, size = self.layout.num_words, self.layout.obs_words, self.size
        rows, observations, offsets, chosen = self.block.split(
            [size * width, size * obs_width, size, size]
        )
        return rows.view(size, width), observations.view(size, obs_width), offsets, chosen


@dataclass(slots=True, repr=False, eq=False)
class PairBatch(Batch):
    """B steps and, for each, a later observation of the same episode."""

    obs: Any  # (B, *obs_shape), nested like the observation space
    future_obs: Any  # (B, *obs_shape): the observation `offsets` steps later
    offsets: torch.Tensor  # int64 (B,), at least 1
    actions: torch.Tensor  # (B, *action_shape)
    rewards: torch.Tensor  # float32 (B,)
    terminations: torch.Tensor  # bool (B,), of the step of obs
    truncations: torch.Tensor  # bool (B,)
    extras: dict[str, torch.Tensor]  # (B, ...), the columns the user added
    memory: Any  # PairMemory; None in copies, which are no `out` for the buffer

    _fields = (
        "obs", "future_obs", "offsets", "actions", "rewards", "terminations", "truncations",
    )  # fmt: skip


@dataclass(slots=True, repr=False, eq=False)
class SequenceBatch(Batch):
    """B runs of L steps, each within one episode."""

    obs: Any  # (B, L, *obs_shape)
    next_obs: Any  # (B, L, *obs_shape)
    actions: torch.Tensor  # (B, L, *action_shape)
    rewards: torch.Tensor  # float32 (B, L)
    terminations: torch.Tensor  # bool (B, L)
    truncations: torch.Tensor  # bool (B, L)
    boundaries: torch.Tensor  # bool (B, L)
    steps: torch.Tensor  # int32 (B, L), counted from 0 in the episode
    mask: torch.Tensor  # bool (B, L), False after the end of the episode, where all is zero
    extras: dict[str, torch.Tensor]  # (B, L, ...)

    _fields = (
        "obs", "next_obs", "actions", "rewards", "terminations", "truncations", "boundaries",
        "steps", "mask",
    )  # fmt: skip


@dataclass(slots=True, repr=False, eq=False)
class StackBatch(Batch):
    """B steps, each with the last K observations, the oldest first."""

    obs: Any  # (B, K, *obs_shape); before the start of the episode its first again and again
    next_obs: Any  # (B, K, *obs_shape)
    actions: torch.Tensor  # (B, *action_shape)
    rewards: torch.Tensor  # float32 (B,)
    terminations: torch.Tensor  # bool (B,)
    truncations: torch.Tensor  # bool (B,)
    steps: torch.Tensor  # int32 (B,)
    extras: dict[str, torch.Tensor]

    _fields = (
        "obs", "next_obs", "actions", "rewards", "terminations", "truncations", "steps",
    )  # fmt: skip


@dataclass(slots=True, repr=False, eq=False)
class GoalBatch(Batch):
    """B steps, some of them with a goal that the episode did reach, or had."""

    obs: Any  # (B, *obs_shape); with goals put in if asked for
    next_obs: Any  # (B, *obs_shape)
    actions: torch.Tensor  # (B, *action_shape)
    rewards: torch.Tensor  # float32 (B,), computed anew if asked for
    terminations: torch.Tensor  # bool (B,)
    truncations: torch.Tensor  # bool (B,)
    goal_obs: Any  # (B, *obs_shape): the observation of the same episode that holds the goal
    goal_offsets: torch.Tensor  # int64 (B,), how many steps after obs that is; may be negative
    relabelled: torch.Tensor  # bool (B,), where the goal was replaced
    extras: dict[str, torch.Tensor]

    _fields = (
        "obs", "next_obs", "actions", "rewards", "terminations", "truncations", "goal_obs",
        "goal_offsets", "relabelled",
    )  # fmt: skip


class _View(NamedTuple):
    """How a field is viewed in rows of words, computed beforehand."""

    dtype: torch.dtype
    per_word: int  # items of the dtype in a word
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


def _plan_view(field: RowField, skip: int) -> _View:
    strides = [1] * len(field.shape)
    for axis in range(len(field.shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * field.shape[axis + 1]
    size = field.dtype.itemsize
    start = (field.offset - 8 * skip) // size
    return _View(torch_dtype(field.dtype), 8 // size, field.shape, tuple(strides), start)


class _PairField(NamedTuple):
    """Where a field of a PairBatch lies in its block, in items of its dtype."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


class _PairPlan(NamedTuple):
    fields: list[_PairField]
    num_words: int
    memory: BatchMemory


class BatchShaper:
    """Names the fields of packed rows, and allocates memory for batches.

    Args:
        layout: Of the rows.
        space: The observation space.
        device: Where batches live.
    """

    def __init__(self, layout: RowLayout, space: Space, device: torch.device):
        self.layout, self._space, self._device = layout, space, device
        self._pair_plans: dict[int, _PairPlan] = {}
        fields = layout.fields
        obs = [fields[leaf.path] for leaf in layout.obs_leaves]
        self._obs_views = [_plan_view(field, 0) for field in obs]
        self._bare_obs_views = [_plan_view(field, HEADER_WORDS) for field in obs]
        self._views = {name: _plan_view(field, 0) for name, field in fields.items()}
        self._extra = [leaf.path for leaf in layout.extra]
        self._is_nested = layout.obs_leaves[0].path != "obs"

    def obs(self, words: torch.Tensor, bare: bool = False) -> Any:
        """Observations in rows int64 (*K, W), or in their observations alone."""
        views = _view_all(words, self._bare_obs_views if bare else self._obs_views)
        return build_tree(self._space, views) if self._is_nested else views[0]

    def fields(self, words: torch.Tensor, *names: str) -> dict[str, Any]:
        """Fields of rows int64 (*K, W) by name; "steps" and "bounds" are of the header."""
        views = [self._views[_HEADER_NAMES.get(name, name)] for name in names]
        return dict(zip(names, _view_all(words, views), strict=True))

    def extras(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        """The columns the user added."""
        if not self._extra:
            return {}
        return self.fields(words, *self._extra)

    def empty_words(self, *lead: int, bare: bool = False) -> torch.Tensor:
        """Memory for rows int64 (*lead, W), or for their observations alone."""
        width = self.layout.obs_words if bare else self.layout.num_words
        return torch.empty((*lead, width), dtype=torch.int64, device=self._device)

    def new_pairs(self, batch_size: int) -> PairBatch:
        """A batch of pairs in memory of its own, not filled yet."""
        plan = self._pair_plans.get(batch_size) or self._plan_pairs(batch_size)
        if self._device.type == "cpu":
            kept = plan.memory.take()
            words, *fields = kept.arrays.values()
            views = list(map(torch.from_numpy, fields))
            plan.memory.keep(kept)
        else:
            words = torch.empty(plan.num_words, dtype=torch.int64, device=self._device)
            views = [
                words.view(torch_dtype(dtype)).as_strided(shape, strides, start)
                for _, dtype, shape, strides, start in plan.fields
            ]
        if self._is_nested:
            count = len(self.layout.obs_leaves)
            obs, future = views[:count], views[count : 2 * count]
            views[: 2 * count] = build_tree(self._space, obs), build_tree(self._space, future)
        extra: dict[str, torch.Tensor] = {}
        if self._extra:
            extra = dict(zip(self._extra, views[len(_PAIR_FIELDS) + 3 :], strict=True))
            views[len(_PAIR_FIELDS) + 3 :] = ()
        memory = PairMemory(words, batch_size, self.layout)
        return PairBatch(*views, extras=extra, memory=memory)

    def _plan_pairs(self, batch_size: int) -> _PairPlan:
        """How the fields of a batch of pairs lie in its block."""
        layout = self.layout
        width, obs_width = layout.num_words, layout.obs_words
        future, offsets = batch_size * width, batch_size * (width + obs_width)
        row, later = (width, 0, 0), (obs_width, future, HEADER_WORDS)
        obs = [leaf.path for leaf in layout.obs_leaves]
        placed = [(name, layout.fields[name], *row) for name in obs]
        placed += [("future " + name, layout.fields[name], *later) for name in obs]
        numbers = RowField("offsets", (), np.dtype(np.int64), 0)
        placed.append(("offsets", numbers, 1, offsets, 0))
        placed += [(n, layout.fields[n], *row) for n in (*_PAIR_FIELDS, *self._extra)]
        fields = []
        for name, field, row_words, begin, skip in placed:
            view = _plan_view(field, skip)
            strides = (row_words * view.per_word, *view.strides)
            start = begin * view.per_word + view.start
            shape = (batch_size, *field.shape)
            fields.append(_PairField(name, field.dtype, shape, strides, start))
        num_words = offsets + 2 * batch_size
        if len(self._pair_plans) >= _MAX_PLANS:
            self._pair_plans.clear()
        memory = BatchMemory(8 * num_words, lambda pages: (_view_pairs(pages, fields), None))
        plan = self._pair_plans[batch_size] = _PairPlan(fields, num_words, memory)
        return plan

    def check_pairs(self, out: Any, batch_size: int) -> PairBatch:
        """The batch to be written again; raise BufferMisuseError unless it fits."""
        if not isinstance(out, PairBatch) or getattr(out.memory, "layout", None) is not self.layout:
            raise BufferMisuseError(
                f"out is {type(out).__name__}, expected a PairBatch that sample of this buffer "
                "returned"
            )
        if out.memory.size != batch_size:
            raise BufferMisuseError(f"out has {out.memory.size} rows, expected {batch_size}")
        return out


def _view_pairs(pages: np.ndarray, fields: list[_PairField]) -> BatchArrays:
    """Arrays over the words of a PairBatch: all of them, int64, and then its fields."""
    arrays = {"": pages.view(np.int64)}
    for name, dtype, shape, strides, start in fields:
        size = dtype.itemsize
        steps = [stride * size for stride in strides]
        arrays[name] = np.ndarray(shape, dtype, pages, start * size, steps)
    return arrays


def _view_all(words: torch.Tensor, views: list[_View]) -> list[torch.Tensor]:
    lead, strides, begin = words.shape[:-1], words.stride()[:-1], words.storage_offset()
    typed: dict[torch.dtype, torch.Tensor] = {}
    found = []
    for dtype, per_word, shape, inner, start in views:
        base = typed.get(dtype)
        if base is None:
            base = typed[dtype] = words.view(dtype)
        outer = [stride * per_word for stride in strides]
        found.append(base.as_strided((*lead, *shape), (*outer, *inner), begin * per_word + start))
    return found
