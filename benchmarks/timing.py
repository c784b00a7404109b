"""What taking the time costs: steps per second with `envs.timing` off and on.

    python benchmarks/timing.py

A step is one step of one env of about 50 us of computing, in a vector env of 16; and of one that
does nothing, to see the cost of the stamps themselves. "absent" is the loop without the line that
asks whether time is taken, as near as it gets: stepping through the backend's own method.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from measure import alternate, machine, markdown_table, median_ratio

from vecenv import AsyncVectorEnv, SyncVectorEnv
from vecenv.core.base import VecEnv

NUM_ENVS = 16
ABSENT, OFF, ON = "absent", "off", "on"


class BusyEnv(gym.Env):
    """Computes for a set time per step."""

    observation_space = Box(-1, 1, (52,), np.float32)
    action_space = Discrete(2)

    def __init__(self, step_us: float) -> None:
        self.step_ns = round(1000 * step_us)
        self._obs = np.zeros(52, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._obs, {}

    def step(self, action: Any) -> Any:
        if self.step_ns:
            end = perf_counter_ns() + self.step_ns
            while perf_counter_ns() < end:
                pass
        return self._obs, 0.0, False, False, {}


def make_envs(backend: str, step_us: float) -> VecEnv:
    """Return 16 envs that have been reset."""
    factories = [lambda: BusyEnv(step_us)] * NUM_ENVS
    kinds = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}
    envs: VecEnv = kinds[backend](factories, copy=False)
    envs.reset(seed=1)
    return envs


def stepper(envs: VecEnv, num_steps: int, case: str) -> Callable[[], None]:
    """Return a function that steps all envs, with timing as the case says."""
    actions = np.zeros(NUM_ENVS, np.int64)

    def run() -> None:
        for _ in range(num_steps):
            if case == ABSENT:
                envs._calls.require_ready("step")
                envs._step(envs._actions.check(actions), None)
            else:
                envs.step(actions)

    def switch_and_run() -> None:
        (envs.timing.enable if case == ON else envs.timing.disable)()
        run()

    return switch_and_run


def measure(backend: str, step_us: float, num_steps: int, repetitions: int) -> list[str]:
    """Return one row of the table."""
    envs = make_envs(backend, step_us)
    cases = {name: stepper(envs, num_steps, name) for name in (ABSENT, OFF, ON)}
    rates = alternate(cases, num_steps * NUM_ENVS, repetitions)
    envs.close()
    row = [f"{backend}, {step_us:g} us"]
    row += [f"{statistics.median(rates[name]):,.0f}" for name in cases]
    row += [f"{1 - median_ratio(rates, name, ABSENT):.1%}" for name in (OFF, ON)]
    return row


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="The cost of envs.timing.")
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    print(machine("gymnasium", "numpy", "numba"))
    print(f"Steps per second, medians of {options.repetitions} rounds in turn; 16 envs.\n")
    rows = [
        measure(backend, step_us, num_steps, options.repetitions)
        for backend in ("sync", "async")
        for step_us, num_steps in ((50.0, 250), (0.0, 4000))
    ]
    header = ["backend, env step", "absent", "off", "on", "cost off", "cost on"]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
