"""After the first update no update allocates memory for arrays, neither in NumPy nor in torch.

A row of observations is large here, so a single temporary copy of one would show.
"""

import tracemalloc

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from buffers import RolloutBuffer

NUM_STEPS, NUM_ENVS = 8, 1024
SPACE = Dict({"a": Box(-1, 1, (16,)), "b": Box(0, 255, (64,), np.uint8)})
ROW_BYTES = NUM_ENVS * 4  # of the smallest array of one step that is not bool
MODES = ["NextStep", "SameStep"]


class Update:
    """One update without environment and policy: what both write is there beforehand."""

    def __init__(self, mode):
        self.rollout = RolloutBuffer(
            NUM_STEPS, NUM_ENVS, SPACE, Discrete(4), autoreset_mode=mode, seed=0
        )
        rng = np.random.default_rng(0)
        self.obs = {
            "a": np.ones((NUM_ENVS, 16), np.float32),
            "b": np.ones((NUM_ENVS, 64), np.uint8),
        }
        self.rewards = np.ones(NUM_ENVS, np.float32)
        self.flags = rng.random((2, NUM_STEPS, NUM_ENVS)) < 0.1
        self.flags[1] &= mode == "NextStep"
        self.actions = torch.ones(NUM_ENVS, dtype=torch.int64)
        self.floats = torch.ones(NUM_ENVS)
        self.rollout.start(self.obs)

    def step(self, t):
        rollout = self.rollout
        rollout.obs_at(t)
        rollout.put(t, actions=self.actions, log_probs=self.floats, values=self.floats)
        slot = rollout.slot(t)
        for key, target in slot.obs.items():
            np.copyto(target, self.obs[key])
        np.copyto(slot.rewards, self.rewards)
        np.copyto(slot.terminations, self.flags[0, t])
        np.copyto(slot.truncations, self.flags[1, t])

    def collect(self):
        for t in range(NUM_STEPS):
            self.step(t)

    def learn(self):
        self.rollout.compute_advantages(self.floats)
        for _ in range(2):
            for _ in self.rollout.minibatches(4):
                pass
            for _ in self.rollout.minibatches(4, fixed=True, normalize_advantages=True):
                pass
        self.rollout.episodes()
        self.rollout.advance()

    def run(self):
        self.collect()
        self.learn()


def python_peak(function):
    """Most bytes held at once during a call beyond those before it; NumPy's arrays are counted."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak - before


def tensor_allocations(function):
    """Bytes torch allocated during a call, freed ones included."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()  # single allocations, not sums per operation
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return sum(size for size in sizes if size > 0)


def test_the_gauges_see_what_they_should():
    assert python_peak(lambda: np.empty(5000)) >= 40_000
    assert tensor_allocations(lambda: torch.empty(5000)) == 20_000


@pytest.mark.parametrize("mode", MODES)
def test_collecting_allocates_no_arrays(mode):
    update = Update(mode)
    for _ in range(2):
        update.run()
    assert python_peak(update.collect) < ROW_BYTES
    assert tensor_allocations(update.collect) == 0
