"""step(out=): results go into the caller's arrays, and nothing is allocated or copied."""

import numpy as np
import pytest
from envs import (
    NUM_ENVS,
    SPACES,
    random_envs,
)
from gymnasium.vector.utils import create_empty_array

from vecenv import SlotError, StepSlot


@pytest.mark.parametrize("name", ["text", "custom", "dict with objects"])
def test_observations_without_fixed_shape_cannot_go_into_slots(name):
    envs = random_envs(SPACES[name])
    envs.reset(seed=0)
    obs = create_empty_array(SPACES[name], NUM_ENVS)
    slot = StepSlot(obs, np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, bool), np.zeros(NUM_ENVS, bool))
    with pytest.raises(SlotError, match="step without `out`"):
        envs.step([0] * NUM_ENVS, out=slot)
    assert len(envs.step([0] * NUM_ENVS)) == 5
