"""Goals of batches in hindsight: where they are put, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from gymnasium import spaces

from buffers.core.arguments import as_tensor
from buffers.core.errors import BufferMisuseError
from buffers.core.rows import RowLayout
from buffers.episodic.batches import GoalBatch

__all__ = ["GoalFunction", "Relabelling"]

GoalFunction = Callable[[Any, Any, Any], Any]

_COLUMNS = {"compute_reward": "rewards", "compute_terminated": "terminations"}


class Relabelling(NamedTuple):
    """What to do with the goals of a batch."""

    keys: tuple[str, str] | None  # of the goals reached and wanted, if the space has such
    functions: dict[str, GoalFunction]  # by their names
    chosen: frozenset[str] | None  # columns that the caller wants, None for all
    pass_tensors: bool  # to the functions

    @classmethod
    def of(
        cls,
        row: RowLayout,
        keys: tuple[str, str],
        functions: Mapping[str, GoalFunction | None],
        chosen: frozenset[str] | None,
        pass_tensors: bool,
    ) -> Relabelling:
        """How goals are put into batches with some columns.

        Raises:
            BufferMisuseError: There are functions, but no such goals in the observations.
        """
        space = row.observation_space
        has_goals = isinstance(space, spaces.Dict) and {*keys} <= set(space.spaces)
        given = {name: compute for name, compute in functions.items() if compute is not None}
        if given and not has_goals:
            raise BufferMisuseError(
                f"{next(iter(given))} needs a Dict observation space with the keys {keys[0]!r} "
                f"and {keys[1]!r}; leave it out and use goal_obs"
            )
        used = {n: f for n, f in given.items() if chosen is None or _COLUMNS[n] in chosen}
        return cls(keys if has_goals else None, used, chosen, pass_tensors)

    def needed(self, row: RowLayout) -> frozenset[str] | None:
        """The columns that this and the caller read."""
        if self.chosen is None or self.keys is None:
            return self.chosen
        needed = self.chosen
        if self.functions:
            needed |= {"next_obs", *row.extras}
        return needed | {"goal_obs"} if {"obs", "next_obs"} & needed else needed

    def apply(self, batch: GoalBatch) -> GoalBatch:
        """Put the goals into the observations, and what follows; with the columns chosen."""
        if self.keys is not None:
            achieved, desired = self.keys
            for name in ("obs", "next_obs"):
                if (obs := getattr(batch, name, None)) is not None:
                    _replace(obs[desired], batch.goal_obs[achieved], batch.relabelled, self.keys)
            for name, compute in self.functions.items():
                read = batch.next_obs[achieved], batch.next_obs[desired], dict(batch.extras)
                column = getattr(batch, _COLUMNS[name])
                made = _computed(name, compute(*_copied(read, self.pass_tensors)), column)
                column.copy_(torch.where(batch.relabelled, made, column))
        if self.chosen is None:
            return batch
        kept = {*self.chosen, "goal_offsets", "relabelled"}
        contents = {name: part for name, part in batch._contents().items() if name in kept}
        contents["extras"] = {name: batch.extras[name] for name in batch.extras if name in kept}
        return GoalBatch._made_of(contents)


def _replace(target: Any, goal: Any, mask: torch.Tensor, names: tuple[str, str]) -> None:
    """Copy goals (B, ...), nested or not, where the mask (B,) says so."""
    is_leaf = isinstance(target, torch.Tensor)
    if type(target) is not type(goal) or (not is_leaf and len(goal) != len(target)):
        raise BufferMisuseError(
            f"{names[0]} and {names[1]} are nested differently; they must be alike to be exchanged"
        )
    if not is_leaf:
        for key in target if isinstance(target, dict) else range(len(target)):
            _replace(target[key], goal[key], mask, (f"{names[0]}[{key!r}]", f"{names[1]}[{key!r}]"))
        return
    if target.shape != goal.shape:
        raise BufferMisuseError(
            f"{names[0]} has shape {tuple(goal.shape)}, but {names[1]} {tuple(target.shape)}; they "
            "must be alike to be exchanged"
        )
    target.copy_(torch.where(mask.view(-1, *[1] * (goal.ndim - 1)), goal, target))


def _copied(part: Any, as_tensors: bool) -> Any:
    """Tensors, nested or not, as arrays or tensors of a function's own, which it may change."""
    if isinstance(part, Mapping):
        return {key: _copied(inner, as_tensors) for key, inner in part.items()}
    if isinstance(part, tuple):
        return tuple(_copied(inner, as_tensors) for inner in part)
    return part.clone() if as_tensors else part.cpu().numpy().copy()


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
