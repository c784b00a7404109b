"""Envs of several kinds for benchmarks."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

OBS_SIZE = 52


class NullEnv(gym.Env[np.ndarray, np.int64]):
    """An env whose step does nothing."""

    observation_space = Box(-1.0, 1.0, (OBS_SIZE,), np.float32)
    action_space = Discrete(2)

    def __init__(self) -> None:
        space = self.observation_space
        self._obs = np.zeros(space.shape or (), space.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        return self._obs, {}

    def step(self, action: np.int64):
        return self._obs, 0.0, False, False, {}


class PixelEnv(NullEnv):
    """An env whose step does nothing but return an Atari-sized stack of frames."""

    observation_space = Box(0, 255, (84, 84, 4), np.uint8)


class BusyEnv(NullEnv):
    """About 0.2 ms of computing per step, and a true state besides the observation."""

    publish = {"true_state": Box(-1.0, 1.0, (OBS_SIZE,), np.float32)}
    rounds = 0  # set by `calibrate`

    def __init__(self) -> None:
        super().__init__()
        self.true_state = np.zeros(OBS_SIZE, np.float32)

    def step(self, action: np.int64):
        total = 0
        for number in range(BusyEnv.rounds):
            total += number
        self.true_state[0] = total % 2
        return super().step(action)


class EvenEnv(NullEnv):
    """Each step takes equally long: it computes until the clock says so, or sleeps."""

    def __init__(self, step_us: float, sleeps: bool) -> None:
        super().__init__()
        self.step_s, self.sleeps = step_us * 1e-6, sleeps

    def step(self, action: np.int64):
        end = time.perf_counter() + self.step_s
        if self.sleeps:
            time.sleep(self.step_s)
        while time.perf_counter() < end:
            pass
        return super().step(action)


class SleepyEnv(NullEnv):
    """Waits: log-normal, mean 2 ms, 99th percentile about 20 ms."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.rng = np.random.default_rng(seed)
        return self._obs, {}

    def step(self, action: np.int64):
        sigma = 1.4
        time.sleep(0.002 * np.exp(sigma * self.rng.normal() - sigma**2 / 2))
        return super().step(action)


def calibrate(seconds: float = 2e-4) -> None:
    """Set how many rounds make a busy step take about this long on an idle core."""
    env = BusyEnv()
    BusyEnv.rounds = 2000
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        env.step(np.int64(0))
        times.append(time.perf_counter() - begin)
    BusyEnv.rounds = int(2000 * seconds / min(times))
