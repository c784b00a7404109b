"""CAGE Challenge 4 as a kind of compiled environment, for `vecenv.jit.JitVectorEnv`."""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box, MultiDiscrete

from vecenv.cage.challenge4.network.state import STATE_DTYPE
from vecenv.cage.challenge4.rules import dynamics
from vecenv.cage.challenge4.rules.codes import (
    MESSAGE_BITS,
    NUM_ACTIONS,
    NUM_BLUE,
    OBS_LENGTH,
    OBS_LENGTHS,
    OBS_STARTS,
)
from vecenv.cage.challenge4.rules.observation import observe
from vecenv.jit.kernels import EnvKernels

__all__ = ["CAGE4", "action_space", "observation_space"]


def observation_space() -> Box:
    """Return the space of what all five agents see: uint8 (578,), 0 or 1 but for the phases."""
    high = np.ones(OBS_LENGTH, np.uint8)
    for start, length in zip(OBS_STARTS, OBS_LENGTHS, strict=True):
        assert start + length <= OBS_LENGTH
        high[start] = 2
    return Box(np.zeros_like(high), high, dtype=np.uint8)


def action_space() -> MultiDiscrete:
    """Return the space of an action index per agent, then a message of 8 bits per agent."""
    return MultiDiscrete([*NUM_ACTIONS, *([1 << MESSAGE_BITS] * NUM_BLUE)])


CAGE4 = EnvKernels(
    STATE_DTYPE,
    observation_space(),
    action_space(),
    dynamics.reset,
    dynamics.step,
    observe,
    name="CAGE Challenge 4",
)
