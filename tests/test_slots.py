"""step(out=): results go into the caller's arrays, and nothing is allocated or copied."""

import tracemalloc

import gymnasium as gym
import numpy as np
import pytest
from envs import (
    NUM_ENVS,
    SPACES,
    counters,
    random_envs,
)
from equality import assert_same
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from vecenv import SlotError, StepSlot, SyncVectorEnv


def make_slot(envs, reward_dtype=np.float64):
    obs = create_empty_array(envs.single_observation_space, envs.num_envs, envs.allocate)
    rewards = envs.allocate((envs.num_envs,), reward_dtype)
    flags = [envs.allocate((envs.num_envs,), np.bool_) for _ in range(2)]
    return StepSlot(obs, rewards, *flags)


def test_calls_after_a_step_into_a_slot_know_the_latest_observations():
    """A partial reset returns all rows, recv those asked for; the slot is not written to again."""
    envs = SyncVectorEnv(counters([9, 9, 9]))
    envs.reset()
    slot = make_slot(envs)
    envs.step([0, 0, 0], out=slot)
    kept = slot.obs.copy()
    obs, _ = envs.reset(options={"reset_mask": np.array([False, True, False])})
    assert obs.tolist() == [[0, 0, 1], [1, 1, 0], [2, 0, 1]]
    envs.step([0, 0, 0], out=slot)
    kept = slot.obs.copy()
    envs.send([0], [2])
    assert envs.recv().obs.tolist() == [[2, 0, 3]]
    envs.step([0, 0, 0])
    assert_same(slot.obs, kept)


class SilentEnv(gym.Env):
    """Returns always the same, so that all memory used is the vector env's."""

    observation_space = spaces.Box(-1, 1, (4096,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)
    obs = np.ones(4096, np.float32)
    info = {}

    def reset(self, *, seed=None, options=None):
        return self.obs, self.info

    def step(self, action):
        return self.obs, 0.5, False, False, self.info


def test_steps_into_slots_allocate_no_array_memory():
    num_envs = 64
    envs = SyncVectorEnv([SilentEnv] * num_envs)
    envs.reset()
    slots = [make_slot(envs, np.float32) for _ in range(2)]
    actions = np.zeros((num_envs, 2), np.float32)
    for slot in slots:
        envs.step(actions, out=slot)
    numpy_only = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for step in range(20):
            envs.step(actions, out=slots[step % 2])
        peak = tracemalloc.get_traced_memory()[1] - before
        snapshot = tracemalloc.take_snapshot().filter_traces([numpy_only])
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in snapshot.traces) == 0
    assert peak < 64 * 1024  # one batch of observations is 1 MiB, so none was made and dropped
    assert (slots[0].obs == 1).all()


@pytest.mark.parametrize("name", ["text", "custom", "dict with objects"])
def test_observations_without_fixed_shape_cannot_go_into_slots(name):
    envs = random_envs(SPACES[name])
    envs.reset(seed=0)
    obs = create_empty_array(SPACES[name], NUM_ENVS)
    slot = StepSlot(obs, np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, bool), np.zeros(NUM_ENVS, bool))
    with pytest.raises(SlotError, match="step without `out`"):
        envs.step([0] * NUM_ENVS, out=slot)
    assert len(envs.step([0] * NUM_ENVS)) == 5
