"""Wrappers of vector envs; `out=`, `send` and `recv`, timing and all autoreset modes still work."""

from vecenv.wrappers.base import Part, VecWrapper
from vecenv.wrappers.normalize import NormalizeObservation, NormalizeReward, RunningMoments
from vecenv.wrappers.stack import FrameStack, make_atari_vec
from vecenv.wrappers.statistics import RecordEpisodeStatistics, RecordInfos
from vecenv.wrappers.transform import (
    ClipAction,
    ClipReward,
    RescaleAction,
    TransformAction,
    TransformObservation,
    TransformReward,
)
from vecenv.wrappers.video import RecordVideo

__all__ = [
    "ClipAction",
    "ClipReward",
    "FrameStack",
    "NormalizeObservation",
    "NormalizeReward",
    "Part",
    "RecordEpisodeStatistics",
    "RecordInfos",
    "RecordVideo",
    "RescaleAction",
    "RunningMoments",
    "TransformAction",
    "TransformObservation",
    "TransformReward",
    "VecWrapper",
    "make_atari_vec",
]
