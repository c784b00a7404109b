"""Batches drawn from episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from buffers.core.batches import Batch

__all__ = ["GoalBatch", "PairBatch", "StackBatch"]


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
    extras: dict[str, torch.Tensor]  # (B, ...), extra columns

    _fields = (
        "obs", "future_obs", "offsets", "actions", "rewards", "terminations", "truncations",
    )  # fmt: skip
    _counted = "offsets"


@dataclass(slots=True, repr=False, eq=False)
class StackBatch(Batch):
    """B steps, each with the last K observations, the oldest first."""

    obs: Any  # (B, K, *obs_shape); the first one is repeated at the start
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
    _counted = "steps"


@dataclass(slots=True, repr=False, eq=False)
class GoalBatch(Batch):
    """B steps, each with its own goal or with one that its episode reached."""

    obs: Any  # (B, *obs_shape), with replaced goals
    next_obs: Any  # (B, *obs_shape)
    actions: torch.Tensor  # (B, *action_shape)
    rewards: torch.Tensor  # float32 (B,), recomputed by `compute_reward`
    terminations: torch.Tensor  # bool (B,)
    truncations: torch.Tensor  # bool (B,)
    goal_obs: Any  # (B, *obs_shape): the observation of the same episode that holds the goal
    goal_offsets: torch.Tensor  # int64 (B,), steps from obs to goal_obs; may be negative
    relabelled: torch.Tensor  # bool (B,), where the goal was replaced
    extras: dict[str, torch.Tensor]

    _fields = (
        "obs", "next_obs", "actions", "rewards", "terminations", "truncations", "goal_obs",
        "goal_offsets", "relabelled",
    )  # fmt: skip
    _counted = "relabelled"
