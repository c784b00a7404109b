"""Batches drawn from episodes, as named views of packed rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from buffers.core.batches import Batch
from buffers.core.rows import RowLayout, plan_view, view_fields
from buffers.episodic.layout import HEADER_BYTES

__all__ = ["BatchShaper", "GoalBatch", "PairBatch", "StackBatch"]

_HEADER_NAMES = {"steps": "step", "bounds": "bound"}


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


class BatchShaper:
    """Names the fields of packed rows, and allocates memory for some.

    Args:
        layout: Of the rows.
        device: Where they live.
    """

    def __init__(self, layout: RowLayout, device: torch.device):
        self._layout, self._device = layout, device
        self._is_nested = layout.obs[0] != "obs"
        obs = [layout.fields[path] for path in layout.obs]
        self._obs_views = [plan_view(field) for field in obs]
        self._bare_obs_views = [plan_view(field, HEADER_BYTES) for field in obs]
        self._views = {name: plan_view(field) for name, field in layout.fields.items()}

    def obs(self, words: torch.Tensor, bare: bool = False) -> Any:
        """Observations in rows int64 (*K, W), or in their observations alone."""
        leaves = view_fields(words, self._bare_obs_views if bare else self._obs_views)
        return self._layout.build_obs(leaves) if self._is_nested else leaves[0]

    def fields(self, words: torch.Tensor, *names: str) -> dict[str, Any]:
        """Fields of rows int64 (*K, W) by name; "steps" and "bounds" are of the header."""
        views = [self._views[_HEADER_NAMES.get(name, name)] for name in names]
        return dict(zip(names, view_fields(words, views), strict=True))

    def extras(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        """The columns the user added."""
        names = self._layout.extras
        return self.fields(words, *names) if names else {}

    def empty_words(self, *lead: int, bare: bool = False) -> torch.Tensor:
        """Memory for rows int64 (*lead, W), or for their observations alone."""
        width = self._layout.obs_words if bare else self._layout.num_words
        return torch.empty((*lead, width), dtype=torch.int64, device=self._device)
