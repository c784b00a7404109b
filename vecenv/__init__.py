"""Vectorized Gymnasium environments behind one interface."""

import gymnasium as _gymnasium
from gymnasium.vector import AutoresetMode

from vecenv.check import CheckReport, VectorEnvCheckError, check_vector_env
from vecenv.core.base import StepBatch, StepSlot, VecEnv
from vecenv.core.errors import (
    ActionError,
    ActionTypeError,
    EnvCreationError,
    ForkedEnvError,
    InfoError,
    ObservationError,
    SlotError,
)
from vecenv.core.faults import EnvStepError, StepTimeoutError, WorkerDiedError
from vecenv.make import make_vec
from vecenv.ray.env import RayVectorEnv
from vecenv.sync import SyncVectorEnv
from vecenv.workers.env import AsyncVectorEnv

__all__ = [
    "ActionError",
    "ActionTypeError",
    "AsyncVectorEnv",
    "AutoresetMode",
    "CheckReport",
    "EnvCreationError",
    "EnvStepError",
    "ForkedEnvError",
    "InfoError",
    "ObservationError",
    "RayVectorEnv",
    "SlotError",
    "StepBatch",
    "StepSlot",
    "StepTimeoutError",
    "SyncVectorEnv",
    "VecEnv",
    "VectorEnvCheckError",
    "WorkerDiedError",
    "check_vector_env",
    "make_vec",
]
__version__ = "0.1.0"

# Entry points are strings, so that nothing compiled is imported before somebody makes the env.
_gymnasium.register(
    id="Cage2-v0",
    entry_point="vecenv.cage:Cage2Env",
    vector_entry_point="vecenv.cage:Cage2VectorEnv",
    disable_env_checker=True,
)
_gymnasium.register(id="JitCartPole-v1", vector_entry_point="vecenv.jit.cartpole:CartPoleVectorEnv")
_gymnasium.register(
    id="Synthetic-v0", entry_point="vecenv.synthetic:SyntheticEnv", disable_env_checker=True
)
