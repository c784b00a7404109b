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

from vecenv.core.arguments import check_choice, read_count

__all__ = ["SyntheticEnv"]

_DISTRIBUTIONS = ("constant", "exponential", "lognormal")
_P99 = 2.3263478740408408  # 99th percentile of the standard normal distribution
_MOST_P99 = math.exp(_P99**2 / 2)  # largest p99 over mean of a lognormal distribution
_MOVING = 8  # most numbers of the observation that change in a step
_MEMORY = 0.9  # part of a moving number that a step keeps
_NOISE = math.sqrt(1 - _MEMORY**2)  # keeps its variance at 1


class SyntheticEnv(Env[np.ndarray, np.int64]):
    """An env whose steps take a given time, computing or waiting.

    A step computes for `cpu_ms` by the clock of its own thread, so waiting for the processor does
    not shorten the work, and then sleeps. Without `cpu_ms` it computes for a few microseconds. The
    results depend on the seed and the actions only: the first eight numbers
    of the observation follow a random walk that the actions push (0 down, 1 up, others nothing);
    the others are drawn at random for each episode. The reward is the first number, or minus that
    with action 0. An episode is truncated after `episode_length` steps.

    Args:
        cpu_ms: Milliseconds of computing per step.
        wait_ms: Mean time in milliseconds that a step waits (sleeps, so other threads can run).
        wait_distribution: "constant", "exponential" or "lognormal" around that mean.
        wait_p99_ms: 99th percentile of the lognormal distribution: above the mean, and at
            most 14.96 times the mean.
        obs_shape: Shape of the observation; an integer for one axis.
        obs_dtype: Dtype of the observation: floating, or integer (around the middle of its range).
        episode_length: Number of steps of an episode.
        num_actions: Number of actions, at least 2.

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

    def __init__(
        self,
        *,
        cpu_ms: float = 0.0,
        wait_ms: float = 0.0,
        wait_distribution: str = "constant",
        wait_p99_ms: float | None = None,
        obs_shape: int | Sequence[int] = (4,),
        obs_dtype: Any = np.float32,
        episode_length: int = 100,
        num_actions: int = 2,
    ) -> None:
        self._cpu_ns = round(1e6 * _checked_ms("cpu_ms", cpu_ms))
        self._wait_ms = _checked_ms("wait_ms", wait_ms)
        check_choice("wait_distribution", wait_distribution, _DISTRIBUTIONS)
        self._distribution = wait_distribution
        if wait_distribution == "lognormal":
            if wait_p99_ms is None:
                raise ValueError("wait_p99_ms is None, expected milliseconds for 'lognormal'")
            self._lognormal = _lognormal(self._wait_ms, _checked_ms("wait_p99_ms", wait_p99_ms))
        elif wait_p99_ms is not None:
            raise ValueError(
                f"wait_p99_ms is {wait_p99_ms!r}, but wait_distribution is {wait_distribution!r}; "
                "only 'lognormal' takes a 99th percentile"
            )
        self._length = read_count("episode_length", episode_length)
        self.action_space = Discrete(read_count("num_actions", num_actions, 2))  # type: ignore[assignment]  # narrower than Env's
        lengths = (obs_shape,) if isinstance(obs_shape, int | np.integer) else tuple(obs_shape)
        shape = tuple(read_count(f"obs_shape[{k}]", length) for k, length in enumerate(lengths))
        dtype = np.dtype(obs_dtype)
        if dtype.kind not in "fiu":
            raise ValueError(f"obs_dtype is {obs_dtype!r}, expected a floating or integer dtype")
        # Ten standard deviations: nothing needs clipping. Integers are around the middle of their
        # range; of wide ones, only a part is used, in which floats lose no digits.
        self._limits, self._middle, self._scale = (-10.0, 10.0), 0.0, 1.0
        if dtype.kind != "f":
            limits = np.iinfo(dtype)
            low, high = max(limits.min, -(2**31)), min(limits.max, 2**31 - 1)
            self._limits, self._middle, self._scale = (
                (low, high),
                (low + high) / 2,
                (high - low) / 8,
            )
        self.observation_space = Box(*self._limits, shape, dtype)
        self._obs = np.zeros(shape, dtype)
        self._moving = np.zeros(min(_MOVING, self._obs.size))
        self._left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode; `options` are ignored, and no time is spent on purpose."""
        if options:
            raise ValueError(f"options has {sorted(options)}, but this env knows none")
        super().reset(seed=seed)
        drawn = self.np_random.standard_normal(self._obs.shape, np.float32)
        self._obs[...] = self._converted(drawn)
        self._moving[:] = self.np_random.standard_normal(len(self._moving))
        self._left = self._length
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Compute, wait, and move on; `action` is an integer from 0 to `num_actions` - 1."""
        begin_ns = time.thread_time_ns()
        if not self.action_space.contains(action):
            expected = f"expected an integer from 0 to {self.action_space.n - 1}"  # type: ignore[attr-defined]  # a Discrete, see above
            raise ValueError(f"action is {action!r}, {expected}")
        if self._left == 0:
            raise ResetNeeded("no episode is under way; call reset() before the next step")
        self._left -= 1
        noise = self.np_random.standard_normal(len(self._moving))
        self._moving *= _MEMORY
        self._moving += _NOISE * noise
        if action < 2:
            self._moving += 0.2 * action - 0.1
        reward = float(self._moving[0]) if action != 0 else -float(self._moving[0])
        obs = self._observation()
        wait_s = self._draw_wait(self.np_random)
        end_ns = begin_ns + self._cpu_ns
        while time.thread_time_ns() < end_ns:
            pass
        if wait_s > 0:
            time.sleep(wait_s)
        return obs, reward, False, self._left == 0, {}

    def _draw_wait(self, rng: np.random.Generator) -> float:
        """Draw the seconds that a step waits."""
        if self._distribution == "lognormal":
            return rng.lognormal(*self._lognormal) / 1e3
        mean_s = self._wait_ms / 1e3
        return rng.exponential(mean_s) if self._distribution == "exponential" else mean_s

    def _observation(self) -> np.ndarray:
        """Return a fresh copy of the observation, with the current moving numbers."""
        self._obs.reshape(-1)[: len(self._moving)] = self._converted(self._moving)
        return self._obs.copy()

    def _converted(self, values: np.ndarray) -> np.ndarray:
        """Map numbers around 0 to the range of the dtype."""
        if self._obs.dtype.kind == "f":
            return values
        scaled = np.rint(self._middle + self._scale * values)
        return np.clip(scaled, *self._limits).astype(self._obs.dtype)


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
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} is {value!r}, expected a number of milliseconds")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}, expected milliseconds, 0 or more")
    return float(value)
