"""FrameStack: the latest observations of every env, stacked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import batch_space

from vecenv.core.arguments import check_choice, read_count
from vecenv.core.base import VecEnv
from vecenv.core.spaces import leaves
from vecenv.wrappers.base import EVERY, Part, VecWrapper, new_batch
from vecenv.wrappers.transform import require_arrays

__all__ = ["FrameStack"]


class FrameStack(VecWrapper):
    """Stacks the latest observations of each env, the oldest first, along a new first axis.

    Observations are (num_envs, stack_size, *obs_shape), part by part for Dict and Tuple spaces. The
    first observation of an episode is preceded by copies of itself, or by zeros; final observations
    of SAME_STEP are stacked with those before them.

    Stacks that are returned, or in a buffer, are memory of their own and do not change.

    Args:
        env: The vector env; its observations are arrays, or a Dict or Tuple of arrays.
        stack_size: Number of observations, at least 1.
        padding_type: What precedes an episode: "reset" for its first observation, or "zero".

    Raises:
        TypeError: Observations have no fixed shape.
        ValueError: `stack_size` is no integer of at least 1, or `padding_type` is something else.
    """

    changes_obs = True

    def __init__(self, env: VecEnv, stack_size: int, padding_type: str = "reset") -> None:
        name = type(self).__name__
        stack_size = read_count(f"{name}: stack_size", stack_size)
        check_choice(f"{name}: padding_type", padding_type, ("reset", "zero"))
        given = getattr(env, "single_observation_space", None)
        wanted = batch_space(given, stack_size) if isinstance(given, Space) else None
        super().__init__(env, single_observation_space=wanted)
        self._single = env.single_observation_space
        require_arrays(self._single, name)
        self.stack_size, self.padding_type = stack_size, padding_type
        # The latest observations, the oldest first: lists with an array per part of the space.
        parts = leaves(new_batch(self._single, self.num_envs), self._single)
        self._frames = [[np.zeros_like(part) for part in parts] for _ in range(stack_size)]

    def observations(self, obs: Any, part: Part, out: Any) -> None:
        """Write the stacks."""
        rows = part.rows
        for older, newer in pairwise(self._frames):
            for target, source in zip(older, newer, strict=True):
                target[rows] = source[rows]
        for frame, leaf in zip(self._frames[-1], leaves(obs, self._single), strict=True):
            frame[rows] = leaf
        self._pad(np.arange(self.num_envs)[rows][part.begins])
        self._write(self._frames, rows, out)

    def reset_observations(self, obs: Any, part: Part, out: Any) -> None:
        """Write the stacks; for envs that were reset, of one observation."""
        chosen = np.flatnonzero(self._is_reset)
        for frame, leaf in zip(self._frames[-1], leaves(obs, self._single), strict=True):
            frame[chosen] = leaf[chosen]
        self._pad(chosen)
        self._write(self._frames, EVERY, out)

    def _begin(self, is_reset: np.ndarray) -> Part:
        self._is_reset = is_reset
        return super()._begin(is_reset)

    def _pad(self, rows: np.ndarray) -> None:
        """Begin episodes of these rows with their newest observation."""
        *older, newest = self._frames
        for frames in older:
            for frame, first in zip(frames, newest, strict=True):
                frame[rows] = first[rows] if self.padding_type == "reset" else 0

    def _write(self, frames: list[list[np.ndarray]], rows: Any, out: Any) -> None:
        """Write the rows of these frames, the oldest first, into the first places of stacks."""
        for place, parts in enumerate(frames):
            for frame, target in zip(
                parts, leaves(out, self.single_observation_space), strict=True
            ):
                target[:, place] = frame[rows]

    def final_observations(self, obs: Any, rows: np.ndarray) -> Any:
        """Return stacks that end with these observations."""
        found = new_batch(self.single_observation_space, len(rows))
        self._write(self._frames[1:], rows, found)
        targets = leaves(found, self.single_observation_space)
        for target, leaf in zip(targets, leaves(obs, self._single), strict=True):
            target[:, -1] = leaf
        return found

    def own_state(self) -> dict[str, Any]:
        """Return the stacked observations, the oldest first."""
        return {f"{k}.{m}": frame.copy() for k, m, frame in self._numbered()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `own_state` returned."""
        for k, m, frame in self._numbered():
            frame[...] = state[f"{k}.{m}"]

    def _numbered(self) -> Iterator[tuple[int, int, np.ndarray]]:
        for k, parts in enumerate(self._frames):
            for m, frame in enumerate(parts):
                yield k, m, frame
