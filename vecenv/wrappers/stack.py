"""FrameStack: the latest observations of every env, stacked; make_atari_vec, which uses it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import AtariPreprocessing

from vecenv.core.arguments import check_choice, read_count
from vecenv.core.base import VecEnv
from vecenv.core.spaces import leaves
from vecenv.make import make_vec
from vecenv.wrappers.base import EVERY, Part, VecWrapper, new_batch
from vecenv.wrappers.statistics import RecordEpisodeStatistics
from vecenv.wrappers.transform import ClipReward, require_arrays

__all__ = ["FrameStack", "make_atari_vec"]


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

    def restart(self, rows: np.ndarray) -> None:
        """Note which envs were reset."""
        self._is_reset = rows

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
        return {name: frame.copy() for name, frame in self._numbered().items()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `own_state` returned."""
        for name, frame in self._numbered().items():
            frame[...] = state[name]

    def _numbered(self) -> dict[str, np.ndarray]:
        pairs = ((k, m, x) for k, parts in enumerate(self._frames) for m, x in enumerate(parts))
        return {f"{k}.{m}": frame for k, m, frame in pairs}


def make_atari_vec(
    env_id: str,
    num_envs: int = 1,
    *,
    frame_skip: int = 4,
    noop_max: int = 30,
    screen_size: int | tuple[int, int] = 84,
    terminal_on_life_loss: bool = False,
    grayscale_obs: bool = True,
    scale_obs: bool = False,
    stack_size: int = 4,
    clip_reward: bool = True,
    statistics: bool = True,
    **make_kwargs: Any,
) -> VecEnv:
    """Make a vector env of an Atari game with the usual preprocessing.

    `gymnasium.wrappers.AtariPreprocessing` skips, pools, resizes and greys the frames of each env
    where it is stepped: in the worker, if there are workers, so that only the small picture gets to
    this process. Around the vector env are the episodes' statistics (of the
    true rewards), rewards clipped to -1 ... 1, and stacked frames.

    Args:
        env_id: An id such as "ALE/Breakout-v5". `ale_py` is registered if it is installed.
        num_envs: Number of envs.
        frame_skip: Frames per step.
        noop_max: Most no-op actions after a reset.
        screen_size: Width and height of the pictures, or one number for both.
        terminal_on_life_loss: Whether losing a life ends an episode.
        grayscale_obs: Whether pictures are grey; else they have three channels, last.
        scale_obs: Whether pixels are float32 from 0 to 1; else uint8.
        stack_size: Pictures in an observation; 1 for a single one, without that axis.
        clip_reward: Whether rewards are clipped.
        statistics: Whether `infos["episode"]` reports episodes that end.
        **make_kwargs: Further arguments of `make_vec`.

    Returns:
        Observations uint8 (num_envs, stack_size, 84, 84), unless arguments change that.

    Raises:
        EnvCreationError: A package of the game is not installed: `pip install ale-py
            opencv-python-headless`.
    """
    try:
        import ale_py  # type: ignore[import-not-found]  # an extra
        import gymnasium

        gymnasium.register_envs(ale_py)
    except ImportError:
        pass  # the id may be registered otherwise; else making the env says what is missing
    preprocess = functools.partial(
        AtariPreprocessing,
        noop_max=noop_max,
        frame_skip=frame_skip,
        screen_size=screen_size,
        terminal_on_life_loss=terminal_on_life_loss,
        grayscale_obs=grayscale_obs,
        scale_obs=scale_obs,
    )
    wrappers = [preprocess, *make_kwargs.pop("wrappers", ())]
    envs = make_vec(env_id, num_envs, wrappers=wrappers, frameskip=1, **make_kwargs)
    if statistics:
        envs = RecordEpisodeStatistics(envs)
    if clip_reward:
        envs = ClipReward(envs, -1.0, 1.0)
    return FrameStack(envs, stack_size) if stack_size > 1 else envs
