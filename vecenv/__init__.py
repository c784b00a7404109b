"""Vectorized Gymnasium environments behind one interface."""

from gymnasium.vector import AutoresetMode

from vecenv.base import StepBatch, StepSlot, VecEnv
from vecenv.errors import (
    ActionError,
    ActionTypeError,
    EnvCreationError,
    ObservationError,
    SlotError,
)
from vecenv.make import make_vec
from vecenv.sync import SyncVectorEnv

__all__ = [
    "ActionError",
    "ActionTypeError",
    "AutoresetMode",
    "EnvCreationError",
    "ObservationError",
    "SlotError",
    "StepBatch",
    "StepSlot",
    "SyncVectorEnv",
    "VecEnv",
    "make_vec",
]
__version__ = "0.1.0"
