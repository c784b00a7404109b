"""Batches of transitions, and the memory they are gathered into."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.batches import Batch, BatchArrays, BatchMemory
from buffers.core.errors import BufferMisuseError
from buffers.core.rows import RecordLayout
from buffers.replay import gather_kernels as to

__all__ = ["BatchPlanner", "ReplayBatch"]

_ALIGNMENT = 64
_MAX_PLANS = 16
_LATE = ("indices", "truncations")  # columns that most learners do not read: tensors when asked for
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


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
    """

    __slots__ = (
        "actions", "discounts", "env_ids", "extras", "indices", "memory", "next_obs", "obs",
        "rewards", "size", "terminations", "truncations", "weights",
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
    memory: Any

    def __init__(self, fields: dict[str, Any], extras: dict[str, torch.Tensor], size: int, memory):
        self.env_ids = self.weights = None
        for name, tensor in fields.items():
            setattr(self, name, tensor)
        self.extras, self.size, self.memory = extras, size, memory

    def __getattr__(self, name: str) -> torch.Tensor:
        """What sampling does not pay for, or a column the user added."""
        if name == "discounts":  # of a buffer without gamma
            return torch.logical_not(self.terminations).float()
        if name in _LATE and self.memory is not None and name in self.memory.late:
            tensor = torch.from_numpy(self.memory.late[name])
            setattr(self, name, tensor)
            return tensor
        return super().__getattr__(name)

    def __len__(self) -> int:
        """Number of transitions."""
        return self.size


class BatchPages(NamedTuple):
    """Memory of one batch: every field contiguous in one block, and the plan for filling it."""

    pages: np.ndarray  # uint8
    plan: np.ndarray  # int64, see `gather_kernels`
    rows: np.ndarray  # int64 (B,), view of the pages
    weights: np.ndarray | None  # float32 (B,), view of the pages
    eager: list[np.ndarray]  # views made into tensors at once
    late: BatchArrays  # and those that are when asked for
    owner: object


class _Part(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    begin: int  # in the pages


class _Recipe(NamedTuple):
    plan: np.ndarray
    memory: BatchMemory
    eager: list[str]  # names of what is made into tensors at once


class BatchPlanner:
    """Makes batches for the compiled sampler.

    Args:
        layout: Of the rows.
        num_steps: Length of the windows.
        has_discounts: Whether batches have `discounts`.
        has_weights: Whether batches have `weights`.
    """

    def __init__(
        self, layout: RecordLayout, *, num_steps: int, has_discounts: bool, has_weights: bool
    ):
        self._layout = layout
        self._num_steps, self._has_discounts = num_steps, has_discounts
        self._has_weights = has_weights
        self._recipes: dict[int, _Recipe] = {}
        self._fields = self._list_fields()

    def _list_fields(self) -> list[tuple[str, tuple[int, ...], np.dtype, int, int]]:
        """Name, shape, dtype, offset in the row and source of every field that is copied."""
        layout, found = self._layout, []
        stored_once = not layout.next_obs
        first = min((layout.fields[path].offset for path in layout.obs), default=0)
        for path, field in layout.fields.items():
            if path == "link" or (path == "rewards" and self._has_discounts):
                continue
            is_last = path in layout.next_obs or path in ("terminations", "truncations")
            source = to.LAST if is_last else to.OWN
            found.append((path, field.shape, field.dtype, field.offset, source))
            if stored_once and path in layout.obs:
                name, offset = f"next_{path}", field.offset - first
                found.append((name, field.shape, field.dtype, offset, to.SUCCESSOR))
        return sorted(found, key=lambda field: field[-1] == to.SUCCESSOR)

    def new(self, size: int) -> ReplayBatch:
        """A batch of B transitions in memory of its own, not initialised."""
        recipe = self._recipes.get(size) or self._plan(size)
        kept = recipe.memory.take()
        memory = kept.shared
        tensors = dict(zip(recipe.eager, map(torch.from_numpy, memory.eager), strict=True))
        recipe.memory.keep(kept)
        layout = self._layout
        if len(layout.obs) == 1 and layout.obs[0] == "obs":
            extras = {name: tensors.pop(name) for name in layout.extras}
            return ReplayBatch(tensors, extras, size, memory)
        obs = layout.build_obs([tensors.pop(path) for path in layout.obs])
        following = layout.build_obs([tensors.pop(f"next_{path}") for path in layout.obs])
        extras = {name: tensors.pop(name) for name in layout.extras}
        fields = {"obs": obs, "next_obs": following, **tensors}
        return ReplayBatch(fields, extras, size, memory)

    def check(self, out: Any, size: int) -> ReplayBatch:
        """Raise BufferMisuseError unless out is a batch of this planner and of this size."""
        if not isinstance(out, ReplayBatch) or getattr(out.memory, "owner", None) is not self:
            raise BufferMisuseError(
                f"out is a {type(out).__name__}, expected a batch that new_batch or sample of this "
                "buffer returned"
            )
        if out.size != size:
            raise BufferMisuseError(f"out holds {out.size} transitions, expected {size}")
        return out

    def _plan(self, size: int) -> _Recipe:
        if len(self._recipes) >= _MAX_PLANS:
            self._recipes.clear()
        parts, copies, end = [], [], 0

        def reserve(name: str, shape: tuple[int, ...], dtype: np.dtype) -> int:
            nonlocal end
            begin = end
            parts.append(_Part(name, (size, *shape), dtype, begin))
            end += size * math.prod(shape) * dtype.itemsize
            end += -end % _ALIGNMENT
            return begin

        rows_to = reserve("indices", (), _INT64)
        for name, shape, dtype, offset, source in self._fields:
            begin = reserve(name, shape, dtype)
            copies += [offset, math.prod(shape) * dtype.itemsize, begin, source]
        places = [-1, 0, 0]  # of last rows, rewards, discounts
        if self._has_discounts:
            sums = [reserve("rewards", (), _FLOAT32), reserve("discounts", (), _FLOAT32)]
            places = [end, *sums]
            end += 8 * size
        if self._has_weights:
            reserve("weights", (), _FLOAT32)
        following = sum(source == to.SUCCESSOR for *_, source in self._fields)
        counts = [size, len(self._fields) - following, following]
        header = [*counts, rows_to, *places, self._num_steps, *self._spans()]
        assert len(header) == to.PLAN_HEADER

        plan = np.array(header + copies, np.int64)
        names = [part.name for part in parts if part.name not in _LATE]

        def view(pages: np.ndarray) -> tuple[BatchArrays, BatchPages]:
            found = {
                name: np.ndarray(shape, dtype, pages, begin) for name, shape, dtype, begin in parts
            }
            rows, weights, eager = found["indices"], found.get("weights"), [found[n] for n in names]
            late = {name: found[name] for name in _LATE}
            return found, BatchPages(pages, plan, rows, weights, eager, late, self)

        recipe = _Recipe(plan, BatchMemory(end, view), names)
        self._recipes[size] = recipe
        return recipe

    def _spans(self) -> tuple[int, int]:
        """Where what is read of the own row ends, and of the last row of a window begins."""
        whole = self._num_steps == 1
        own = [o + math.prod(s) * d.itemsize for _, s, d, o, src in self._fields if src == to.OWN]
        last = [o for _, _, _, o, src in self._fields if src == to.LAST]
        return self._layout.stride if whole else max(own), min(last)
