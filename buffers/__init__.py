"""Preallocated buffers for reinforcement learning: rollouts, replay, episodes, trajectories.

They work with any Gymnasium vector env, and import no environment.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401  # to say what to install
except ModuleNotFoundError as _error:
    if _error.name != "torch":  # torch is installed, but one of its imports is missing
        raise
    _needed = 'buffers needs torch, which is not installed: pip install "vecenv[torch]"'
    raise ModuleNotFoundError(_needed, name="torch") from None

from buffers.core.batches import Batch, SequenceBatch
from buffers.core.errors import (
    BufferClosedError,
    BufferMemoryError,
    BufferMisuseError,
    CheckpointError,
)
from buffers.episodic.buffer import EpisodicReplayBuffer
from buffers.episodic.table import GoalBatch, PairBatch, StackBatch
from buffers.replay.batches import ReplayBatch
from buffers.replay.buffer import PerEnvReplayBuffer, SharedReplayBuffer
from buffers.replay.multiprocess import MultiprocessReplayBuffer, ReplayWriter
from buffers.replay.prioritized import PrioritizedReplayBuffer
from buffers.rollout.buffer import EpisodeStats, RolloutBuffer
from buffers.rollout.gae import gae
from buffers.rollout.minibatches import RolloutBatch
from buffers.rollout.storage import RolloutSlot
from buffers.trajectories import TrajectoryBuffer, TrajectoryStats
from buffers.writer import TransitionWriter

__all__ = [
    "Batch",
    "BufferClosedError",
    "BufferMemoryError",
    "BufferMisuseError",
    "CheckpointError",
    "EpisodeStats",
    "EpisodicReplayBuffer",
    "GoalBatch",
    "MultiprocessReplayBuffer",
    "PairBatch",
    "PerEnvReplayBuffer",
    "PrioritizedReplayBuffer",
    "ReplayBatch",
    "ReplayWriter",
    "RolloutBatch",
    "RolloutBuffer",
    "RolloutSlot",
    "SequenceBatch",
    "SharedReplayBuffer",
    "StackBatch",
    "TrajectoryBuffer",
    "TrajectoryStats",
    "TransitionWriter",
    "gae",
]
