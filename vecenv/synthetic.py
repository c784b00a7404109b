"""SyntheticEnv: an env with given cost and size, to see what these mean for a vector env."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Discrete

from vecenv.core.arguments import read_count

__all__ = ["SyntheticEnv"]

_P99 = 2.3263478740408408  # 99th percentile of the standard normal distribution
_MOST_P99 = math.exp(_P99**2 / 2)  # largest p99 over mean of a lognormal distribution
_MOVING = 8  # most numbers of the observation that change in a step
_MEMORY = 0.9  # part of a moving number that a step keeps
_NOISE = math.sqrt(1 - _MEMORY**2)  # keeps its variance at 1
_MOST_OBS = 10.0  # ten standard deviations: nothing needs clipping


class SyntheticEnv(Env[np.ndarray, np.int64]):
    """An env whose steps take a given time, computing or waiting.

    A step computes for `cpu_ms` by the clock of its own thread, so waiting for the processor does
    not shorten the work, and then sleeps. Without `cpu_ms` it computes for a few microseconds. The
    results depend on the seed and the actions only: the first eight numbers of the observation
    follow a random walk that the actions push (0 down, 1 up); the others are drawn at random for
    each episode. The reward is the first number, or minus that with action 0.

    Args:
        cpu_ms: Milliseconds of computing per step.
        wait_ms: Mean time in milliseconds that a step waits (sleeps, so other threads can run).
        wait_p99_ms: 99th percentile of waits with a lognormal distribution: above the mean, and
            at most 14.96 times the mean. None for constant waits.
        obs_shape: Shape of the observation, float32; an integer for one axis.
        episode_length: Number of steps after which an episode is truncated.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it.

    Example:
        >>> env = SyntheticEnv(cpu_ms=0.05, obs_shape=(3,), episode_length=2)
        >>> obs, info = env.reset(seed=1)
        >>> obs.shape, obs.dtype
        ((3,), dtype('float32'))
        >>> [env.step(1)[3] for _ in range(2)]
        [False, True]
    """

    metadata: dict[str, Any] = {"render_modes": []}
    action_space = Discrete(2)

    def __init__(
        self,
        *,
        cpu_ms: float = 0.0,
        wait_ms: float = 0.0,
        wait_p99_ms: float | None = None,
        obs_shape: int | Sequence[int] = (4,),
        episode_length: int = 100,
    ) -> None:
        self._cpu_ns = round(1e6 * _checked_ms("cpu_ms", cpu_ms))
        self._wait_ms = _checked_ms("wait_ms", wait_ms)
        self._lognormal = None
        if wait_p99_ms is not None:
            self._lognormal = _lognormal(self._wait_ms, _checked_ms("wait_p99_ms", wait_p99_ms))
        self._length = read_count("episode_length", episode_length)
        lengths = (obs_shape,) if isinstance(obs_shape, int | np.integer) else tuple(obs_shape)
        shape = tuple(read_count(f"obs_shape[{k}]", length) for k, length in enumerate(lengths))
        self.observation_space = Box(-_MOST_OBS, _MOST_OBS, shape)
        self._obs = np.zeros(shape, np.float32)
        self._moving = np.zeros(min(_MOVING, self._obs.size))
        self._left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode; `options` are ignored, and no time is spent on purpose."""
        super().reset(seed=seed)
        self._obs[...] = self.np_random.standard_normal(self._obs.shape, np.float32)
        self._moving[:] = self.np_random.standard_normal(len(self._moving))
        self._left = self._length
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Compute, wait, and move on; `action` is 0 or 1."""
        begin_ns = time.thread_time_ns()
        if not self.action_space.contains(action):
            raise ValueError(f"action is {action!r}, expected 0 or 1")
        if self._left == 0:
            raise ResetNeeded("no episode is under way; call reset() before the next step")
        self._left -= 1
        noise = self.np_random.standard_normal(len(self._moving))
        self._moving *= _MEMORY
        self._moving += _NOISE * noise + (0.2 * action - 0.1)
        reward = float(self._moving[0]) if action != 0 else -float(self._moving[0])
        obs = self._observation()
        wait_s = self._wait_ms / 1e3
        if self._lognormal is not None:
            wait_s = self.np_random.lognormal(*self._lognormal) / 1e3
        end_ns = begin_ns + self._cpu_ns
        while time.thread_time_ns() < end_ns:
            pass
        if wait_s > 0:
            time.sleep(wait_s)
        return obs, reward, False, self._left == 0, {}

    def _observation(self) -> np.ndarray:
        """Return a fresh copy of the observation, with the current moving numbers."""
        self._obs.reshape(-1)[: len(self._moving)] = self._moving
        return self._obs.copy()


def _lognormal(mean: float, p99: float) -> tuple[float, float]:
    """Return mu and sigma of the lognormal distribution with this mean and 99th percentile.

    Raises:
        ValueError: There is none: p99 is not above the mean, or more than 14.96 times the mean.
    """
    if not mean < p99 <= _MOST_P99 * mean:
        raise ValueError(
            f"wait_p99_ms is {p99!r}, expected more than wait_ms ({mean!r}) and at most "
            f"{_MOST_P99:.2f} times of it ({_MOST_P99 * mean:.3g})"
        )
    sigma = _P99 - math.sqrt(_P99**2 - 2 * math.log(p99 / mean))
    return math.log(mean) - sigma**2 / 2, sigma


def _checked_ms(name: str, value: Any) -> float:
    """Return milliseconds, 0 or more; raise TypeError or ValueError for others."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} is {value!r}, expected a number of milliseconds")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}, expected milliseconds, 0 or more")
    return float(value)
