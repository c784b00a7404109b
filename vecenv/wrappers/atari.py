"""make_atari_vec: Atari games with the preprocessing of DQN and PPO papers."""

from __future__ import annotations

import functools
from typing import Any

from gymnasium.wrappers import AtariPreprocessing

from vecenv.core.base import VecEnv
from vecenv.make import make_vec
from vecenv.wrappers.stack import FrameStack
from vecenv.wrappers.statistics import RecordEpisodeStatistics
from vecenv.wrappers.transform import ClipReward

__all__ = ["make_atari_vec"]


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
