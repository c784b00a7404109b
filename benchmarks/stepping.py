"""Steps per second of SyncVectorEnv, Gymnasium's class, and a bare loop over the same envs.

    python benchmarks/stepping.py

One step is one `env.step` of one env; envs here never end an episode unless they say so, and the
steps on which NEXT_STEP autoreset resets are not counted (CartPole: under random actions about one
in 23, the same for all). Every vector env runs with copy=False.
"""

from __future__ import annotations

import argparse
import statistics
import tracemalloc
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from measure import alternate, machine, markdown_table, median_ratio
from work import make_slot

from vecenv import StepSlot, SyncVectorEnv

OBS_SIZE = 52
GYMNASIUM, BARE, OURS, OURS_OUT = "gymnasium", "bare loop", "vecenv", "vecenv, out="


class NullEnv(gym.Env[np.ndarray, np.int64]):
    """An env whose step does nothing."""

    observation_space = Box(-1.0, 1.0, (OBS_SIZE,), np.float32)
    action_space = Discrete(2)

    def __init__(self) -> None:
        self._obs = np.zeros(OBS_SIZE, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        return self._obs, {}

    def step(self, action: np.int64):
        return self._obs, 0.0, False, False, {}


gym.register("Null-v0", lambda **_: NullEnv())

ENVS: dict[str, Callable[[], gym.Env]] = {
    "does nothing, bare class": NullEnv,
    "does nothing, from gym.make": lambda: gym.make("Null-v0"),
    "CartPole-v1": lambda: gym.make("CartPole-v1"),
}


def bare_loop(envs: list[gym.Env], actions: np.ndarray, num_steps: int) -> None:
    """Step the envs one after the other and reset who is done: the floor."""
    for _ in range(num_steps):
        for index, env in enumerate(envs):
            _, _, terminated, truncated, _ = env.step(actions[index])
            if terminated or truncated:
                env.reset()


def step_many(envs: gym.vector.VectorEnv, actions: np.ndarray, num_steps: int) -> None:
    """Step a vector env."""
    for _ in range(num_steps):
        envs.step(actions)


def step_into(envs: SyncVectorEnv, actions: np.ndarray, slot: StepSlot, num_steps: int) -> None:
    """Step a vector env into memory of ours."""
    for _ in range(num_steps):
        envs.step(actions, out=slot)


def measure(make_env: Callable[[], gym.Env], num_envs: int, env_steps: int, repetitions: int):
    """Return the rates of the four ways to step `num_envs` envs."""
    loop_envs = [make_env() for _ in range(num_envs)]
    for index, env in enumerate(loop_envs):
        env.reset(seed=index)
    ours = SyncVectorEnv([make_env] * num_envs, copy=False)
    ours_out = SyncVectorEnv([make_env] * num_envs, copy=False)
    theirs = gym.vector.SyncVectorEnv([make_env] * num_envs, copy=False)
    for envs in (ours, ours_out, theirs):
        envs.reset(seed=0)
    slot = make_slot(ours_out)
    actions = np.random.default_rng(0).integers(0, 2, num_envs)
    num_steps = env_steps // num_envs
    cases = {
        BARE: lambda: bare_loop(loop_envs, actions, num_steps),
        GYMNASIUM: lambda: step_many(theirs, actions, num_steps),
        OURS: lambda: step_many(ours, actions, num_steps),
        OURS_OUT: lambda: step_into(ours_out, actions, slot, num_steps),
    }
    return alternate(cases, num_steps * num_envs, repetitions)


def allocated_bytes_per_step(num_envs: int = 64, num_steps: int = 200) -> int:
    """Return the most array bytes that `step(out=...)` ever held beyond what it began with."""
    envs = SyncVectorEnv([NullEnv] * num_envs)
    envs.reset(seed=0)
    slot, actions = make_slot(envs), np.zeros(num_envs, np.int64)
    step_into(envs, actions, slot, 2)
    tracemalloc.start()
    domain = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    peak = 0
    for _ in range(num_steps):
        envs.step(actions, out=slot)
        snapshot = tracemalloc.take_snapshot().filter_traces([domain])
        peak = max(peak, sum(trace.size for trace in snapshot.traces))
    tracemalloc.stop()
    return peak


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Steps per second of SyncVectorEnv and others.")
    parser.add_argument("--env-steps", type=int, default=40_000, help="env steps per repetition")
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    print(machine("gymnasium", "numpy"), end="\n\n")
    header = ["env, envs", BARE, GYMNASIUM, OURS, OURS_OUT]
    header += ["vs gymnasium", "of bare loop", "spread"]
    rows = []
    for name, make_env in ENVS.items():
        for num_envs in (1, 8, 64):
            rates = measure(make_env, num_envs, options.env_steps, options.repetitions)
            middle = statistics.median(rates[OURS])
            spread = (max(rates[OURS]) - min(rates[OURS])) / middle
            row = [f"{name}, {num_envs}"]
            row += [f"{statistics.median(rates[case]) / 1e3:,.0f} k" for case in rates]
            row.append(f"{median_ratio(rates, OURS, GYMNASIUM):.2f} x")
            row += [f"{median_ratio(rates, OURS, BARE):.0%}", f"{spread:.0%}"]
            rows.append(row)
    print(markdown_table(header, rows))
    print(f"\nArray bytes allocated by step(out=...): {allocated_bytes_per_step()}")


if __name__ == "__main__":
    main()
