"""Stepping one env, or a vector env, with random actions: what the backends do in a round.

Every way of stepping counts env steps alike: a step on which autoreset resets is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, thread_time_ns
from typing import Any, Protocol

import numpy as np
from gymnasium import Env, Space
from gymnasium.vector.utils import batch_space

__all__ = ["BatchStepper", "FirstReadyStepper", "LoopStepper", "RandomPolicy", "Stepper"]

_RING = 64  # batches of actions drawn beforehand
_FEW = 4  # of those that can't be cut out of a larger one
_BATCHES_IN_FLIGHT = 4


class Stepper(Protocol):
    """One way of stepping.

    Attributes:
        envs: What is stepped.
        rows_per_call: Env steps that one unit of `run` makes, about.
        reset_s: Seconds that the first reset of all envs took.
        episodes: int64 (num_envs,), how many have ended, of each env.
    """

    envs: Any
    rows_per_call: int
    reset_s: float
    episodes: np.ndarray

    def prepare(self) -> None:
        """Take what had been waiting, before a clock starts."""

    def run(self, count: int) -> tuple[int, float]:
        """Step `count` times; return the env steps made and the seconds they took."""
        ...

    def settle(self) -> None:
        """Take back what is in flight."""


class RandomPolicy:
    """Random actions drawn beforehand, and as much computing per call as a policy would do.

    Args:
        space: Of one action.
        seed: Of the actions.
        policy_ms: Milliseconds of computing per call, by the clock of the thread.
        most: The largest batch that will be asked for.
    """

    def __init__(self, space: Space, seed: int, policy_ms: float, most: int) -> None:
        self._space = space
        self._seed = seed
        self._busy_ns = round(1e6 * policy_ms)
        self._most = most
        self._calls = 0
        space.seed(seed)
        self._single = [space.sample() for _ in range(16 * _RING)]
        self._rings = {most: self._draw(most, _RING)}
        self._is_array = isinstance(self._rings[most][0], np.ndarray)

    def _draw(self, count: int, length: int) -> list[Any]:
        space = batch_space(self._space, count)
        space.seed(self._seed)
        return [space.sample() for _ in range(length)]

    def single(self) -> Any:
        """Return an action for one env."""
        if self._busy_ns:
            self._compute()
        self._calls += 1
        return self._single[self._calls % len(self._single)]

    def batch(self, count: int) -> Any:
        """Return actions for `count` envs, which share memory with those of other calls."""
        if self._busy_ns:
            self._compute()
        self._calls += 1
        if count == self._most:
            return self._rings[count][self._calls % _RING]
        if self._is_array:
            return self._rings[self._most][self._calls % _RING][:count]
        if count not in self._rings:
            self._rings[count] = self._draw(count, _FEW)
        return self._rings[count][self._calls % _FEW]

    def _compute(self) -> None:
        end_ns = thread_time_ns() + self._busy_ns
        while thread_time_ns() < end_ns:
            for _ in range(16):
                pass


class LoopStepper:
    """One env in a loop, as most code begins."""

    rows_per_call = 1

    def __init__(self, env: Env, policy: RandomPolicy, seed: int) -> None:
        self.envs = env
        self._policy = policy
        self.episodes = np.zeros(1, np.int64)
        begin = perf_counter()
        env.reset(seed=seed)
        self.reset_s = perf_counter() - begin

    def prepare(self) -> None:
        """Nothing waits."""

    def run(self, count: int) -> tuple[int, float]:
        """Step `count` times; resets come on top, they are no steps."""
        env, act, episodes = self.envs, self._policy.single, 0
        begin = perf_counter()
        for _ in range(count):
            _, _, terminated, truncated, _ = env.step(act())
            if terminated or truncated:
                env.reset()
                episodes += 1
        seconds = perf_counter() - begin
        self.episodes += episodes
        return count, seconds

    def settle(self) -> None:
        """Nothing is ever in flight."""


class _VectorStepper:
    """A vector env, reset, and the episodes that have ended in it."""

    def __init__(self, envs: Any, policy: RandomPolicy, seed: int, rows_per_call: int) -> None:
        self.envs, self.rows_per_call = envs, rows_per_call
        self.act: Callable[[int], Any] = policy.batch
        self._ended = np.zeros(envs.num_envs, np.bool_)
        self.episodes = np.zeros(envs.num_envs, np.int64)
        begin = perf_counter()
        envs.reset(seed=seed)
        self.reset_s = perf_counter() - begin


class BatchStepper(_VectorStepper):
    """A vector env whose envs are stepped all at once."""

    def __init__(self, envs: Any, policy: RandomPolicy, seed: int) -> None:
        super().__init__(envs, policy, seed, envs.num_envs)

    def prepare(self) -> None:
        """Nothing waits."""

    def run(self, count: int) -> tuple[int, float]:
        """Step all envs `count` times."""
        envs, act, num_envs = self.envs, self.act, self.rows_per_call
        flags = []
        begin = perf_counter()
        for _ in range(count):
            _, _, terminations, truncations, _ = envs.step(act(num_envs))
            flags.append((terminations, truncations))
        seconds = perf_counter() - begin
        return self._count(flags), seconds

    def _count(self, flags: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
        """Return how many rows were steps rather than resets."""
        is_over = np.array([terminations | truncations for terminations, truncations in flags])
        num_resets = int(self._ended.sum() + is_over[:-1].sum())
        self._ended = is_over[-1]
        self.episodes += is_over.sum(0)
        return is_over.size - num_resets

    def settle(self) -> None:
        """Nothing is in flight between two steps."""


class FirstReadyStepper(_VectorStepper):
    """A vector env that hands back whoever is ready first, a quarter of the envs at a time."""

    def __init__(self, envs: Any, policy: RandomPolicy, seed: int) -> None:
        super().__init__(envs, policy, seed, max(1, envs.num_envs // _BATCHES_IN_FLIGHT))
        self._num_in_flight = 0

    def prepare(self) -> None:
        """Send all envs, and take those that were ready while nobody looked."""
        envs, num_envs = self.envs, self.envs.num_envs
        if self._num_in_flight == 0:
            envs.send(self.act(num_envs))
            self._num_in_flight = num_envs
        batches: list[Any] = []
        while sum(len(batch.env_ids) for batch in batches) < num_envs:
            batches.append(self._turn())
        self._count(batches)

    def run(self, count: int) -> tuple[int, float]:
        """Receive and send again `count` times."""
        batches: list[Any] = []
        begin = perf_counter()
        for _ in range(count):
            batches.append(self._turn())
        seconds = perf_counter() - begin
        return self._count(batches), seconds

    def _turn(self) -> Any:
        batch = self.envs.recv(self.rows_per_call)
        self.envs.send(self.act(len(batch.env_ids)), batch.env_ids)
        return batch

    def _count(self, batches: Sequence[Any]) -> int:
        total = 0
        for batch in batches:
            is_over = batch.terminations | batch.truncations
            total += len(batch.env_ids) - int(self._ended[batch.env_ids].sum())
            self._ended[batch.env_ids] = is_over
            self.episodes[batch.env_ids] += is_over
        return total

    def settle(self) -> None:
        """Receive all that is in flight."""
        if self._num_in_flight:
            self._count([self.envs.recv()])
            self._num_in_flight = 0
