"""Preallocated memory for reinforcement learning: rollouts and their advantages.

Works with any Gymnasium vector env; nothing here knows what an environment is.
"""

from __future__ import annotations

from buffers.batch import Batch
from buffers.checkpoint import restore_generator
from buffers.episodic import EpisodicReplayBuffer
from buffers.episodic_batches import GoalBatch, PairBatch, SequenceBatch, StackBatch
from buffers.errors import BufferMemoryError, BufferMisuseError, CheckpointError
from buffers.gae import gae
from buffers.minibatches import RolloutBatch
from buffers.per_env import PerEnvReplayBuffer
from buffers.prioritized import PrioritizedReplayBuffer
from buffers.replay_batch import ReplayBatch
from buffers.rollout import EpisodeStats, RolloutBuffer
from buffers.rollout_storage import RolloutSlot
from buffers.shared import SharedReplayBuffer
from buffers.trajectories import TrajectoryBuffer, TrajectoryStats
from buffers.writer import TransitionWriter

__all__ = [
    "Batch",
    "BufferMemoryError",
    "BufferMisuseError",
    "CheckpointError",
    "EpisodeStats",
    "EpisodicReplayBuffer",
    "GoalBatch",
    "PairBatch",
    "PerEnvReplayBuffer",
    "PrioritizedReplayBuffer",
    "ReplayBatch",
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
    "restore_generator",
]
