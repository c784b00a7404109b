"""Stepping one env, or a vector env, with random actions: what the backends do in a round.

Every way of stepping counts env steps alike: a step on which autoreset resets is none. Actions are
drawn beforehand; of envs that give masks they are drawn between steps, among those allowed. The
clock stands still meanwhile, but where other envs go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, thread_time_ns
from typing import Any

import numpy as np
from gymnasium import Env, Space
from gymnasium.vector.utils import batch_space

from vecenv.core.random_actions import RandomActions

__all__ = ["BatchStepper", "FirstReadyStepper", "LoopStepper", "RandomPolicy", "Stepper"]

_RING = 64  # batches of actions drawn beforehand
_FEW = 4  # of those that can't be cut out of a larger one
_BATCHES_IN_FLIGHT = 4


class RandomPolicy:
    """Random actions, and as much computing per call as a policy would do.

    Args:
        space: Of one action.
        seed: Of the actions.
        policy_ms: Milliseconds of computing per call, by the clock of the thread.
        most: The largest batch that will be asked for.

    Attributes:
        allowed: What draws actions of envs that give masks; None if those in the ring will do.
        drawing_s: Seconds that drawing these took, between steps.
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
        self.allowed: RandomActions | None = None
        self.drawing_s = 0.0

    def begin(self, envs: Any, results: tuple[Any, Any]) -> None:
        """Heed the masks of envs, or of an env, that have been reset with these results."""
        allowed = RandomActions(envs, self._seed)
        allowed.see(*results)
        self.allowed = allowed if allowed.are_masked else None

    def see(self, obs: Any, infos: Any, env_ids: np.ndarray | None = None) -> None:
        """Note the results of a step of envs, or of these, if they give masks."""
        if self.allowed is not None:
            begin = perf_counter()
            self.allowed.see(obs, infos, env_ids)
            self.drawing_s += perf_counter() - begin

    def _draw_allowed(self, env_ids: np.ndarray | None = None) -> Any:
        assert self.allowed is not None
        begin = perf_counter()
        drawn = self.allowed(env_ids)
        self.drawing_s += perf_counter() - begin
        return drawn

    def _draw(self, count: int, length: int) -> list[Any]:
        space = batch_space(self._space, count)
        space.seed(self._seed)
        return [space.sample() for _ in range(length)]

    def single(self) -> Any:
        """Return an action for one env."""
        if self._busy_ns:
            self._compute()
        if self.allowed is not None:
            return self._draw_allowed()
        self._calls += 1
        return self._single[self._calls % len(self._single)]

    def batch(self, count: int, env_ids: np.ndarray | None = None) -> Any:
        """Return actions for `count` envs, which share memory with those of other calls.

        Args:
            count: How many.
            env_ids: Which envs these are, int64 (count,); None for all in order.
        """
        if self._busy_ns:
            self._compute()
        if self.allowed is not None:
            return self._draw_allowed(env_ids)
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


class Stepper:
    """One way of stepping.

    Args:
        envs: An env, or a vector env; it is reset.
        policy: Draws the actions.
        seed: Of the reset.

    Attributes:
        envs: As given.
        rows_per_call: Env steps that one unit of `run` makes, about.
        act: Returns actions.
        reset_s: Seconds that the first reset of all envs took.
        episodes: int64 (num_envs,), how many have ended, of each env.
    """

    def __init__(self, envs: Any, policy: RandomPolicy, seed: int) -> None:
        self.envs, self.policy = envs, policy
        self.rows_per_call = 1 if isinstance(envs, Env) else envs.num_envs
        self.act: Callable[..., Any] = policy.batch
        self._ended = np.zeros(self.rows_per_call, np.bool_)
        self.episodes = np.zeros(self.rows_per_call, np.int64)
        begin = perf_counter()
        results = envs.reset(seed=seed)
        self.reset_s = perf_counter() - begin
        policy.begin(envs, results)

    def prepare(self) -> None:
        """Take what had been waiting, before a clock starts."""

    def run(self, count: int) -> tuple[int, float]:
        """Step `count` times; return the env steps made and the seconds they took."""
        raise NotImplementedError

    def settle(self) -> None:
        """Take back what is in flight."""


class LoopStepper(Stepper):
    """One env in a loop, as most code begins."""

    def run(self, count: int) -> tuple[int, float]:
        """Step `count` times; resets come on top, they are no steps."""
        env, policy, act, episodes = self.envs, self.policy, self.policy.single, 0
        is_masked, drawing_s = policy.allowed is not None, policy.drawing_s
        begin = perf_counter()
        for _ in range(count):
            obs, _, terminated, truncated, info = env.step(act())
            if terminated or truncated:
                obs, info = env.reset()
                episodes += 1
            if is_masked:
                policy.see(obs, info)
        seconds = perf_counter() - begin - (policy.drawing_s - drawing_s)
        self.episodes += episodes
        return count, seconds


class BatchStepper(Stepper):
    """A vector env whose envs are stepped all at once."""

    def run(self, count: int) -> tuple[int, float]:
        """Step all envs `count` times."""
        envs, policy, act, num_envs = self.envs, self.policy, self.act, self.rows_per_call
        is_masked, drawing_s = policy.allowed is not None, policy.drawing_s
        flags = []
        begin = perf_counter()
        for _ in range(count):
            obs, _, terminations, truncations, infos = envs.step(act(num_envs))
            flags.append((terminations, truncations))
            if is_masked:
                policy.see(obs, infos)
        seconds = perf_counter() - begin - (policy.drawing_s - drawing_s)
        return self._count(flags), seconds

    def _count(self, flags: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
        """Return how many rows were steps rather than resets."""
        is_over = np.array([terminations | truncations for terminations, truncations in flags])
        num_resets = int(self._ended.sum() + is_over[:-1].sum())
        self._ended = is_over[-1]
        self.episodes += is_over.sum(0)
        return is_over.size - num_resets


class FirstReadyStepper(Stepper):
    """A vector env that hands back whoever is ready first, a quarter of the envs at a time."""

    def __init__(self, envs: Any, policy: RandomPolicy, seed: int) -> None:
        super().__init__(envs, policy, seed)
        self.rows_per_call = max(1, envs.num_envs // _BATCHES_IN_FLIGHT)
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
        batch = self._receive(self.rows_per_call)
        self.envs.send(self.act(len(batch.env_ids), batch.env_ids), batch.env_ids)
        return batch

    def _receive(self, *count: int) -> Any:
        batch = self.envs.recv(*count)
        self.policy.see(batch.obs, batch.infos, batch.env_ids)
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
            self._count([self._receive()])
            self._num_in_flight = 0
