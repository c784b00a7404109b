"""What taking the time costs: steps per second with `envs.timing` off and on.

    python benchmarks/timing.py

A step is one step of one env of about 50 us of computing, in a vector env of 16; and of one that
does nothing, to see the cost of the stamps themselves. "absent" is the loop without the line that
asks whether time is taken, as near as it gets: stepping through the backend's own method.

Rounds alternate. They have as many steps as timing takes between two times at which it adds its
stamps to the totals: that is part of every round. Switching timing on and off is not, nor is the
first such time after it, which takes new memory. The costs are medians over rounds, each with its
standard error.
"""

from __future__ import annotations

import argparse
import math
import statistics
from time import perf_counter, perf_counter_ns
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from measure import machine, markdown_table

from vecenv import AsyncVectorEnv, SyncVectorEnv
from vecenv.core.base import VecEnv

NUM_ENVS = 16
NUM_STEPS = 4096  # of a round: stamps of 16 envs are added up after so many
ABSENT, OFF, ON = "absent", "off", "on"
BACKENDS = ("sync", "async")


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


def round_ns(envs: VecEnv, case: str) -> float:
    """Step all envs, with timing as the case says; return the time per env step."""
    actions = np.zeros(NUM_ENVS, np.int64)
    (envs.timing.enable if case == ON else envs.timing.disable)()
    for _ in range(NUM_STEPS if case == ON else 20):  # caches, and workers awake
        envs.step(actions)
    begin_ns = perf_counter_ns()
    if case == ABSENT:
        for _ in range(NUM_STEPS):
            envs._calls.require_ready("step")
            envs._step(envs._actions.check(actions), None)
    else:
        for _ in range(NUM_STEPS):
            envs.step(actions)
    return (perf_counter_ns() - begin_ns) / (NUM_STEPS * NUM_ENVS)


def measure(backend: str, step_us: float, seconds: float) -> list[str]:
    """Return one row of the table."""
    envs = make_envs(backend, step_us)
    cases = [ABSENT, OFF, ON]
    times: dict[str, list[float]] = {case: [] for case in cases}
    end = perf_counter() + seconds
    while perf_counter() < end or len(times[ON]) < 3:
        for case in cases:
            times[case].append(round_ns(envs, case))
        cases.reverse()
    envs.close()
    medians = {case: statistics.median(times[case]) for case in times}
    row = [f"{backend}, {step_us:g} us", str(len(times[ON]))]
    row += [f"{1e9 / ns:,.0f}" for ns in medians.values()]
    for case, base in ((OFF, ABSENT), (ON, OFF)):
        costs = [a / b - 1 for a, b in zip(times[case], times[base], strict=True)]
        cost = statistics.median(costs)
        deviation = statistics.median(abs(one - cost) for one in costs)
        # Of normally distributed costs, by their median absolute deviation.
        error = 1.2533 * 1.4826 * deviation / math.sqrt(len(costs))
        row.append(f"{cost:.2%} ± {error:.2%}")
    differences = [a - b for a, b in zip(times[ON], times[OFF], strict=True)]
    return [*row, f"{statistics.median(differences):,.0f} ns"]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="The cost of envs.timing.")
    parser.add_argument("--seconds", type=float, default=120, help="of the rows of 50 us")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    options = parser.parse_args()
    print(machine("gymnasium", "numpy", "numba"))
    print("Steps per second, medians of rounds in turn; 16 envs.\n")
    rows = [
        measure(backend, step_us, options.seconds * share)
        for backend in options.backends
        for step_us, share in ((50.0, 1), (0.0, 0.2))
    ]
    header = ["backend, env step", "rounds", ABSENT, OFF, ON, "cost off", "cost on", "per step"]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
