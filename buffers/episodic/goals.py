"""Goals in hindsight: replaced in observations, with recomputed rewards and terminations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from gymnasium import spaces

from buffers.core.arguments import as_tensor
from buffers.core.batches import each_tensor
from buffers.core.errors import BufferMisuseError
from buffers.core.spaces import space_leaves
from buffers.episodic.batches import GoalBatch

__all__ = ["GoalFunction", "check_goals", "relabel"]

GoalFunction = Callable[[Any, Any, Any], Any]

_COLUMNS = {"compute_reward": "rewards", "compute_terminated": "terminations"}


def check_goals(space: Any, keys: tuple[str, str], functions: Mapping[str, Any]) -> bool:
    """Whether observations have both goals; raise if they differ, or functions lack them."""
    has_goals = isinstance(space, spaces.Dict) and {*keys} <= set(space.spaces)
    if not has_goals:
        if given := [name for name, compute in functions.items() if compute is not None]:
            raise BufferMisuseError(
                f"{given[0]} needs a Dict observation space with the keys {keys[0]!r} and "
                f"{keys[1]!r}; leave it out and use goal_obs"
            )
        return False
    parts = [[leaf[:2] for leaf in space_leaves(space[key], "")] for key in keys]
    if parts[0] != parts[1]:
        raise BufferMisuseError(
            f"{keys[0]} has the parts {parts[0]}, but {keys[1]} {parts[1]}; they must be alike to "
            "be exchanged"
        )
    return True


def relabel(batch: GoalBatch, keys: tuple[str, str], functions: Mapping[str, Any]) -> None:
    """Put the goals into the observations, and recompute rewards and terminations.

    `keys` are those of the achieved and the desired goal; `functions` are the user's, by name.
    """
    achieved, desired = keys
    for obs in (batch.obs, batch.next_obs):
        leaves = list[torch.Tensor](), list[torch.Tensor]()
        each_tensor(obs[desired], leaves[0].append)
        each_tensor(batch.goal_obs[achieved], leaves[1].append)
        for old, new in zip(*leaves, strict=True):
            mask = batch.relabelled.view(-1, *[1] * (new.ndim - 1))
            old.copy_(torch.where(mask, new, old))
    for name, compute in functions.items():
        if compute is not None:
            read = batch.next_obs[achieved], batch.next_obs[desired], dict(batch.extras)
            read = each_tensor(read, lambda tensor: tensor.to("cpu", copy=True).numpy())
            column = getattr(batch, _COLUMNS[name])
            made = _computed(name, compute(*read), column)
            column.copy_(torch.where(batch.relabelled, made, column))


def _computed(name: str, made: Any, column: torch.Tensor) -> torch.Tensor:
    """Check the numbers that a function of the user returned, one per step."""
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
