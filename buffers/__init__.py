"""Preallocated memory for reinforcement learning: rollouts and their advantages.

Works with any Gymnasium vector env; nothing here knows what an environment is.
"""

from __future__ import annotations

from buffers.errors import BufferMemoryError, BufferMisuseError
from buffers.gae import gae
from buffers.minibatches import RolloutBatch
from buffers.rollout import EpisodeStats, RolloutBuffer
from buffers.rollout_storage import RolloutSlot

__all__ = [
    "BufferMemoryError",
    "BufferMisuseError",
    "EpisodeStats",
    "RolloutBatch",
    "RolloutBuffer",
    "RolloutSlot",
    "gae",
]
