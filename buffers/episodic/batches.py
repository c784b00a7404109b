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
    extras: dict[str, torch.Tensor]  # (B, ...), the columns the user added

    _fields = (
        "obs", "future_obs", "offsets", "actions", "rewards", "terminations", "truncations",
    )  # fmt: skip
    _counted = "offsets"


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
    _counted = "steps"


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
    _counted = "relabelled"
