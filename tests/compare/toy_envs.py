"""Envs for the tests of vecenv.compare; its processes import this file by name."""

import os
import signal
import sys
import time

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

NOT_CALLABLE = 3


class Counter(gym.Env):
    """Counts its steps; an episode has `length` of them."""

    observation_space = Box(0, 1000, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, length=5):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.length
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.left -= 1
        obs = np.full(2, self.length - self.left, np.float32)
        return obs, 1.0, self.left == 0, False, {}


class Breaking(Counter):
    """After so many steps it hangs, or takes its process down."""

    def __init__(self, how, after):
        super().__init__(length=10)
        self.how, self.after, self.steps = how, after, 0

    def step(self, action):
        self.steps += 1
        if self.steps > self.after:
            if self.how == "hang":
                time.sleep(600)
            sys.stdout.write("last words\n")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class SlowResets(Counter):
    """Ten steps of a millisecond, then a reset of twenty."""

    def __init__(self):
        super().__init__(length=10)

    def reset(self, **kwargs):
        time.sleep(0.02)
        return super().reset(**kwargs)

    def step(self, action):
        time.sleep(0.001)
        return super().step(action)


class OnlyInMainProcess(Counter):
    """Breaks in worker processes."""

    def step(self, action):
        import multiprocessing

        if multiprocessing.parent_process() is not None:
            raise RuntimeError("not in a worker")
        return super().step(action)


class Nested(Counter):
    """Actions and observations that are no arrays."""

    observation_space = Dict({"a": Box(-1, 1, (2,), np.float32), "b": Discrete(3)})
    action_space = Tuple((Discrete(2), MultiDiscrete([2, 3])))

    def reset(self, **kwargs):
        super().reset(**kwargs)
        return {"a": np.zeros(2, np.float32), "b": np.int64(0)}, {}

    def step(self, action):
        assert self.action_space.contains(action)
        _, *rest = super().step(0)
        return {"a": np.ones(2, np.float32), "b": np.int64(1)}, *rest


def no_level():
    raise KeyError("no level 7")
