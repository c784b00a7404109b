"""Goals of batches in hindsight: where they are put, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from gymnasium import spaces

from buffers.core.arguments import as_tensor
from buffers.core.copies import each_tensor
from buffers.core.errors import BufferMisuseError
from buffers.core.rows import RowLayout
from buffers.core.spaces import space_leaves
from buffers.episodic.batches import GoalBatch

__all__ = ["GoalFunction", "Relabelling"]

GoalFunction = Callable[[Any, Any, Any], Any]

_COLUMNS = {"compute_reward": "rewards", "compute_terminated": "terminations"}


class Relabelling(NamedTuple):
    """What to do with the goals of a batch of a buffer with some rows."""

    row: RowLayout
    keys: tuple[str, str]  # of the goals reached and wanted
    functions: Mapping[str, GoalFunction | None]  # by their names
    chosen: frozenset[str] | None  # columns that the caller wants, None for all
    pass_tensors: bool  # to the functions

    @property
    def has_goals(self) -> bool:
        """Whether the observations have such goals."""
        space = self.row.observation_space
        return isinstance(space, spaces.Dict) and {*self.keys} <= set(space.spaces)

    def needed(self) -> frozenset[str] | None:
        """The columns that this and the caller read; raise BufferMisuseError for unfit goals."""
        given = [name for name, compute in self.functions.items() if compute is not None]
        if given and not self.has_goals:
            raise BufferMisuseError(
                f"{given[0]} needs a Dict observation space with the keys {self.keys[0]!r} and "
                f"{self.keys[1]!r}; leave it out and use goal_obs"
            )
        if not self.has_goals:
            return self.chosen
        space: Any = self.row.observation_space
        parts = [[leaf[:2] for leaf in space_leaves(space[key], "")] for key in self.keys]
        if parts[0] != parts[1]:
            raise BufferMisuseError(
                f"{self.keys[0]} has the parts {parts[0]}, but {self.keys[1]} {parts[1]}; they "
                "must be alike to be exchanged"
            )
        needed = self.chosen
        if needed is None:
            return None
        if any(_COLUMNS[name] in needed for name in given):
            needed |= {"next_obs", *self.row.extras}
        return needed | {"goal_obs"} if {"obs", "next_obs"} & needed else needed

    def apply(self, batch: GoalBatch) -> GoalBatch:
        """Put the goals into the observations, and what follows; with the columns chosen."""
        (achieved, desired), chosen = self.keys, self.chosen
        for name in ("obs", "next_obs") if self.has_goals else ():
            if (obs := getattr(batch, name, None)) is not None:
                pairs = map(_leaves, (obs[desired], batch.goal_obs[achieved]))
                for old, new in zip(*pairs, strict=True):
                    mask = batch.relabelled.view(-1, *[1] * (new.ndim - 1))
                    old.copy_(torch.where(mask, new, old))
        for name, compute in self.functions.items():
            if compute is not None and (chosen is None or _COLUMNS[name] in chosen):
                read = batch.next_obs[achieved], batch.next_obs[desired], dict(batch.extras)
                read = each_tensor(read, lambda t: t.clone())
                if not self.pass_tensors:
                    read = each_tensor(read, lambda t: t.cpu().numpy())
                column = getattr(batch, _COLUMNS[name])
                made = _computed(name, compute(*read), column)
                column.copy_(torch.where(batch.relabelled, made, column))
        if chosen is None:
            return batch
        kept = {*chosen, "goal_offsets", "relabelled"}
        contents = {name: part for name, part in batch._contents().items() if name in kept}
        contents["extras"] = {name: batch.extras[name] for name in batch.extras if name in kept}
        return GoalBatch._made_of(contents)


def _leaves(nest: Any) -> list[torch.Tensor]:
    found = list[torch.Tensor]()
    each_tensor(nest, found.append)
    return found


def _computed(name: str, made: Any, column: torch.Tensor) -> torch.Tensor:
    """What a function of the user's returned, as one number per step."""
    made = as_tensor(f"what {name} returned", made)
    if made.shape != column.shape:
        raise BufferMisuseError(
            f"{name} returned shape {tuple(made.shape)}, expected {tuple(column.shape)}: one "
            "number per step; of a function f of single steps pass "
            "`lambda achieved, desired, _: [f(a, d, {}) for a, d in zip(achieved, desired)]`"
        )
    if column.dtype is torch.bool:
        is_right, expected, stored = (made == 0) | (made == 1), "flags, 0 or 1", made
    else:
        stored = made.to(column.device, column.dtype)
        is_right, expected = stored.isfinite() & made.isfinite().to(stored.device), "finite numbers"
    if not is_right.all():
        wrong = stored[~is_right][0]
        raise BufferMisuseError(f"{name} returned {wrong}, expected {expected}")
    return stored.to(column.device, column.dtype)
