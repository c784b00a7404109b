"""What backends do in a round: random steps.

All ways of stepping count env steps alike: a step on which autoreset resets does not count. Actions
are drawn beforehand; for envs with masks they are drawn between steps, among the allowed ones. The
clock stops meanwhile, unless other envs go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.vector import VectorEnv

from vecenv.core.masks import RandomActions
from vecenv.core.spaces import take_rows

__all__ = ["BatchStepper", "FirstReadyStepper", "LoopStepper", "Stepper"]

_RING = 64  # batches of actions drawn beforehand
_BATCHES_IN_FLIGHT = 4


class Stepper:
    """One way of stepping.

    Args:
        envs: An env, or a vector env; it is reset.
        seed: Seed of the reset and the actions.

    Attributes:
        envs: As given.
        rows_per_call: Approximate number of env steps in one unit of `run`.
        reset_s: Seconds of the first reset of all envs.
        episodes: int64 (num_envs,), number of ended episodes of each env.
    """

    def __init__(self, envs: Any, seed: int) -> None:
        self.envs = envs
        self.rows_per_call = envs.num_envs if isinstance(envs, VectorEnv) else 1
        self._ended = np.zeros(self.rows_per_call, np.bool_)
        self.episodes = np.zeros(self.rows_per_call, np.int64)
        begin = perf_counter()
        obs, infos = envs.reset(seed=seed)
        self.reset_s = perf_counter() - begin
        self._calls = 0
        self._draw = RandomActions(envs, seed)
        self._draw.see(obs, infos)
        self._is_masked = self._draw.are_masked
        self._drawing_s = 0.0  # time for drawing masked actions between steps
        count = _RING if isinstance(envs, VectorEnv) else 16 * _RING
        self._ring = [] if self._is_masked else [self._draw() for _ in range(count)]

    def act(self, env_ids: np.ndarray | None = None) -> Any:
        """Return actions for all envs, or for some; they share memory with those of other calls.

        Args:
            env_ids: Ids of the envs, int64 (B,).
        """
        if self._is_masked:
            begin = perf_counter()
            drawn = self._draw(env_ids)
            self._drawing_s += perf_counter() - begin
            return drawn
        self._calls += 1
        drawn = self._ring[self._calls % len(self._ring)]
        if env_ids is None or (count := len(env_ids)) == self.envs.num_envs:
            return drawn
        if isinstance(drawn, np.ndarray):
            return drawn[:count]  # quicker
        return take_rows(self.envs.single_action_space, drawn, range(count))

    def see(self, obs: Any, infos: Any, env_ids: np.ndarray | None = None) -> None:
        """Note the masks in the results of a step of all envs, or of some."""
        if self._is_masked:
            begin = perf_counter()
            self._draw.see(obs, infos, env_ids)
            self._drawing_s += perf_counter() - begin

    def prepare(self) -> None:
        """Receive results that are ready, before a clock starts."""

    def run(self, count: int) -> tuple[int, float]:
        """Step `count` times; return the number of env steps and their seconds."""
        raise NotImplementedError

    def settle(self) -> None:
        """Receive everything in flight."""


class LoopStepper(Stepper):
    """One env in a loop, as in most first programs."""

    def run(self, count: int) -> tuple[int, float]:
        """Step `count` times; resets in between are not counted."""
        env, act, is_masked, drawing_s, episodes = (
            self.envs, self.act, self._is_masked, self._drawing_s, 0,
        )  # fmt: skip
        assert isinstance(env, Env)
        begin = perf_counter()
        for _ in range(count):
            obs, _, terminated, truncated, info = env.step(act())
            if terminated or truncated:
                obs, info = env.reset()
                episodes += 1
            if is_masked:
                self.see(obs, info)
        seconds = perf_counter() - begin - (self._drawing_s - drawing_s)
        self.episodes += episodes
        return count, seconds


class BatchStepper(Stepper):
    """A vector env that steps all envs at once."""

    def run(self, count: int) -> tuple[int, float]:
        """Step all envs `count` times."""
        envs, act, is_masked, drawing_s = self.envs, self.act, self._is_masked, self._drawing_s
        flags = []
        begin = perf_counter()
        for _ in range(count):
            obs, _, terminations, truncations, infos = envs.step(act())
            flags.append((terminations, truncations))
            if is_masked:
                self.see(obs, infos)
        seconds = perf_counter() - begin - (self._drawing_s - drawing_s)
        is_over = np.array([terminations | truncations for terminations, truncations in flags])
        num_resets = int(self._ended.sum() + is_over[:-1].sum())
        self._ended = is_over[-1]
        self.episodes += is_over.sum(0)
        return is_over.size - num_resets, seconds


class FirstReadyStepper(Stepper):
    """A vector env that returns the envs that are ready first, a quarter of them at a time."""

    def __init__(self, envs: Any, seed: int) -> None:
        super().__init__(envs, seed)
        self.rows_per_call = max(1, envs.num_envs // _BATCHES_IN_FLIGHT)
        self._is_in_flight = False

    def prepare(self) -> None:
        """Send all envs; receive those that became ready before the clock starts."""
        if not self._is_in_flight:
            self.envs.send(self.act())
            self._is_in_flight = True
        batches: list[Any] = []
        while sum(len(batch.env_ids) for batch in batches) < self.envs.num_envs:
            batches.append(self._turn())
        self._count(batches)

    def run(self, count: int) -> tuple[int, float]:
        """Receive and send again, `count` times."""
        batches: list[Any] = []
        begin = perf_counter()
        for _ in range(count):
            batches.append(self._turn())
        seconds = perf_counter() - begin
        return self._count(batches), seconds

    def _turn(self) -> Any:
        batch = self.envs.recv(self.rows_per_call)
        self.see(batch.obs, batch.infos, batch.env_ids)
        self.envs.send(self.act(batch.env_ids), batch.env_ids)
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
        """Receive everything in flight."""
        if self._is_in_flight:
            batch = self.envs.recv()
            self.see(batch.obs, batch.infos, batch.env_ids)
            self._count([batch])
            self._is_in_flight = False
