"""FrameStack: the latest observations of every env, stacked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict, Tuple
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

    The env writes its newest observation into one of `stack_size` areas, which take turns, so
    nothing is shifted. Each stack is then written once to its destination, the only copy. So stacks
    that are returned, or in a buffer, are memory of their own and do not change. (Views
    of one rolling area would change when an env is reset.)

    Args:
        env: The vector env; its observations are arrays, or a Dict or Tuple of arrays.
        stack_size: Number of observations, at least 1.
        padding_type: What precedes an episode: "reset" for its first observation, or "zero".

    Raises:
        TypeError: Observations have no fixed shape.
        ValueError: `stack_size` is no integer of at least 1, or `padding_type` is something else.
    """

    changes_obs = True
    follows_episodes = True

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
        # For every part of the observations, an array (stack_size, num_envs, ...).
        parts = leaves(new_batch(self._single, 0), self._single)
        shapes = [(self.stack_size, self.num_envs, *part.shape[1:]) for part in parts]
        blocks = [
            env.allocate(shape, part.dtype) for shape, part in zip(shapes, parts, strict=True)
        ]
        self._frames = [[block[k] for block in blocks] for k in range(self.stack_size)]
        self._areas = [_nested(self._single, iter(frames)) for frames in self._frames]
        self._newest = 0  # area of the newest observations; older ones lie before it

    def _env_obs(self) -> Any:
        """Return the oldest observations as memory for the env to overwrite."""
        return self._areas[(self._newest + 1) % self.stack_size]

    def _order(self) -> list[list[np.ndarray]]:
        """Return the areas' arrays, the oldest first."""
        first = (self._newest + 1) % self.stack_size
        return self._frames[first:] + self._frames[:first]

    def observations(self, obs: Any, part: Part, out: Any) -> None:
        """Write the stacks."""
        given = leaves(obs, self._single)
        if isinstance(part.rows, slice):
            self._newest = (self._newest + 1) % self.stack_size  # where the env has just written
            if given[0] is not self._frames[self._newest][0]:
                for frame, leaf in zip(self._frames[self._newest], given, strict=True):
                    frame[...] = leaf
        else:
            order = self._order()
            for older, newer in pairwise(order):
                for target, source in zip(older, newer, strict=True):
                    target[part.rows] = source[part.rows]
            for frame, leaf in zip(order[-1], given, strict=True):
                frame[part.rows] = leaf
        if part.begins.any():
            chosen = np.flatnonzero(part.begins)
            self._pad(chosen if isinstance(part.rows, slice) else part.rows[chosen])
        self._write(part.rows, out)

    def reset_observations(self, obs: Any, part: Part, out: Any) -> None:
        """Write the stacks; for envs that were reset, of one observation."""
        chosen = np.flatnonzero(self._is_reset)
        for frame, leaf in zip(self._frames[self._newest], leaves(obs, self._single), strict=True):
            frame[chosen] = leaf[chosen]
        self._pad(chosen)
        self._write(EVERY, out)

    def _begin(self, is_reset: np.ndarray) -> Part:
        self._is_reset = is_reset
        return super()._begin(is_reset)

    def _pad(self, rows: np.ndarray) -> None:
        """Begin episodes of these rows with their newest observation."""
        *older, newest = self._order()
        for frames in older:
            for frame, first in zip(frames, newest, strict=True):
                frame[rows] = first[rows] if self.padding_type == "reset" else 0

    def _write(self, rows: Any, out: Any) -> None:
        targets = leaves(out, self.single_observation_space)
        for place, frames in enumerate(self._order()):
            for frame, target in zip(frames, targets, strict=True):
                target[:, place] = frame[rows]

    def final_observations(self, obs: Any, rows: np.ndarray) -> Any:
        """Return stacks that end with these observations."""
        # The env has already written its newest over the oldest; the stacked ones are newer.
        kept = [self._frames[(self._newest - k) % self.stack_size] for k in range(self.stack_size)]
        found = new_batch(self.single_observation_space, len(rows))
        targets = leaves(found, self.single_observation_space)
        for target, leaf in zip(targets, leaves(obs, self._single), strict=True):
            target[:, -1] = leaf
        for age, frames in enumerate(kept[: self.stack_size - 1]):
            for frame, target in zip(frames, targets, strict=True):
                target[:, self.stack_size - 2 - age] = frame[rows]
        return found

    def own_state(self) -> dict[str, Any]:
        """Return the stacked observations, the oldest first."""
        return {
            f"{age}.{k}": frame.copy()
            for age, frames in enumerate(self._order())
            for k, frame in enumerate(frames)
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `own_state` returned."""
        for age, frames in enumerate(self._order()):
            for k, frame in enumerate(frames):
                frame[...] = state[f"{age}.{k}"]


def _nested(space: Space, parts: Iterator[np.ndarray]) -> Any:
    """Return parts, in the order of `leaves`, nested as a space is."""
    if isinstance(space, Dict):
        return {key: _nested(part, parts) for key, part in space.items()}
    if isinstance(space, Tuple):
        return tuple(_nested(part, parts) for part in space.spaces)
    return next(parts)
