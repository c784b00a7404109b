"""Sequences, frame stacks and goals from the episodes of a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from buffers.core.arguments import MAX_COUNT, check_count, read_number
from buffers.core.errors import BufferMisuseError
from buffers.core.memory import check_fits
from buffers.episodic.batches import BatchShaper, GoalBatch, SequenceBatch, StackBatch
from buffers.episodic.samplers import (
    STRATEGIES,
    CompiledSampler,
    TorchSampler,
    is_by_episode,
)
from buffers.episodic.storage import EpisodicStorage

__all__ = ["EpisodicDraws"]

_LOW = 0xFFFFFFFF
_NO_MATTER_BYTES = 1 << 26  # that may be there without looking
_COMMON = ("actions", "rewards", "terminations", "truncations")


class EpisodicDraws:
    """Draws what is more than pairs; the arguments are those of `EpisodicReplayBuffer`."""

    def __init__(
        self,
        storage: EpisodicStorage,
        sampler: CompiledSampler | TorchSampler,
        shaper: BatchShaper,
    ):
        self._storage, self._sampler, self._shaper = storage, sampler, shaper
        self._num_rows = storage.layout.num_rows

    def sequences(self, batch_size: int, length: int, over: str, pad: bool) -> SequenceBatch:
        """Runs of steps."""
        length = check_count("sequence_length", length, MAX_COUNT)
        self._check_room(batch_size, 3 * length, f"sequences of {length} steps")
        first = self._first_rows(batch_size, 1 if pad else length, over)
        places = torch.arange(length, device=first.device)
        chosen = (first[:, None] + places) % self._num_rows
        remaining = self._headers(first)[:, 1] & _LOW
        mask = places < remaining[:, None]
        words = self._rows(torch.where(mask, chosen, -1))
        following = torch.where(mask, (chosen + 1) % self._num_rows, -1)
        return SequenceBatch(
            obs=self._shaper.obs(words),
            next_obs=self._observations(following),
            mask=mask,
            extras=self._shaper.extras(words),
            **self._shaper.fields(words, *_COMMON, "boundaries", "steps"),
        )

    def stacks(self, batch_size: int, num_frames: int, over: str) -> StackBatch:
        """Steps with the observations before them."""
        num_frames = check_count("num_frames", num_frames, MAX_COUNT)
        self._check_room(batch_size, 3 * num_frames, f"stacks of {num_frames} frames")
        rows = self._first_rows(batch_size, 1, over)
        words = self._rows(rows)
        steps = words[:, 0] >> 32 & _LOW
        back = torch.arange(num_frames - 1, -1, -1, device=rows.device)
        ages = torch.minimum(back, steps[:, None])
        next_ages = torch.minimum(back - 1, steps[:, None])
        return StackBatch(
            obs=self._observations((rows[:, None] - ages) % self._num_rows),
            next_obs=self._observations((rows[:, None] - next_ages) % self._num_rows),
            extras=self._shaper.extras(words),
            **self._shaper.fields(words, *_COMMON, "steps"),
        )

    def goals(self, batch_size: int, strategy: str, relabel_ratio: float, over: str) -> GoalBatch:
        """Steps and the observations that are to give their goals; nothing is replaced yet."""
        if not isinstance(strategy, str) or strategy not in STRATEGIES:
            raise BufferMisuseError(
                f"strategy is {strategy!r}, expected one of {sorted(STRATEGIES)}"
            )
        relabel_ratio = read_number("relabel_ratio", relabel_ratio)
        self._check_room(batch_size, 5, "goals")
        rows = self._first_rows(batch_size, 1, over)
        goals, relabelled = self._sampler.draw_goals(rows, strategy, relabel_ratio)
        words, goal_words = self._rows(rows), self._rows(goals)
        offsets = (goal_words[:, 0] >> 32) - (words[:, 0] >> 32)
        return GoalBatch(
            obs=self._shaper.obs(words),
            next_obs=self._observations((rows + 1) % self._num_rows),
            goal_obs=self._shaper.obs(goal_words),
            goal_offsets=offsets,
            relabelled=relabelled,
            extras=self._shaper.extras(words),
            **self._shaper.fields(words, *_COMMON),
        )

    def relabel(
        self,
        batch: GoalBatch,
        achieved: str,
        desired: str,
        compute_reward: Callable[[Any, Any, Any], Any] | None,
    ) -> GoalBatch:
        """Put the goals into the observations, if the space has keys for them, and rewards."""
        if isinstance(batch.obs, dict) and {achieved, desired} <= set(batch.obs):
            mask, goal = batch.relabelled, batch.goal_obs[achieved]
            chosen = mask.view(-1, *[1] * (goal.ndim - 1))
            for obs in (batch.obs, batch.next_obs):
                if obs[desired].shape != goal.shape:
                    raise BufferMisuseError(
                        f"{achieved} has shape {tuple(goal.shape)}, but {desired} "
                        f"{tuple(obs[desired].shape)}; they must be alike to be exchanged"
                    )
                obs[desired].copy_(torch.where(chosen, goal, obs[desired]))
            if compute_reward is not None:
                reached = batch.next_obs[achieved]
                made = torch.as_tensor(compute_reward(reached, batch.next_obs[desired], {}))
                made = made.to(batch.rewards.device, batch.rewards.dtype)
                batch.rewards.copy_(torch.where(mask, made, batch.rewards))
        elif compute_reward is not None:
            raise BufferMisuseError(
                f"compute_reward needs a Dict observation space with the keys {achieved!r} and "
                f"{desired!r}; leave it out and use goal_obs"
            )
        return batch

    def _first_rows(self, batch_size: int, length: int, over: str) -> torch.Tensor:
        batch_size = check_count("batch_size", batch_size, MAX_COUNT)
        by_episode = is_by_episode(over)
        if not self._sampler.windows.prepare(length):
            held = self._storage.count("num_episodes")
            raise BufferMisuseError(
                f"none of the {held} episodes has {length} steps; add longer ones, or ask for "
                "shorter sequences"
            )
        return self._sampler.draw_windows(batch_size, by_episode)

    def _check_room(self, batch_size: int, rows_each: int, what: str) -> None:
        """Raise BufferMemoryError if a batch takes more memory than there is, intermediates too."""
        count = check_count("batch_size", batch_size, MAX_COUNT)
        needed = 8 * count * rows_each * self._storage.layout.row.num_words
        if needed > _NO_MATTER_BYTES:
            advice = "draw fewer at once"
            check_fits(f"a batch of {count} {what}", needed, self._storage.device, advice)

    def _headers(self, rows: torch.Tensor) -> torch.Tensor:
        return self._storage.rows[:, :2].index_select(0, rows)

    def _rows(self, chosen: torch.Tensor) -> torch.Tensor:
        out = self._shaper.empty_words(*chosen.shape)
        return self._sampler.gather(chosen, out, bare=False)

    def _observations(self, chosen: torch.Tensor) -> Any:
        out = self._shaper.empty_words(*chosen.shape, bare=True)
        self._sampler.gather(chosen, out, bare=True)
        return self._shaper.obs(out, bare=True)
