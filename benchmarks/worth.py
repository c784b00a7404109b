"""What two optimisations are worth, each with and without: a program per run, in turn.

    python benchmarks/worth.py

- *huge pages*: `sample` from a replay buffer of a million rows whose memory is on pages of 2 MiB.
- *first-ready*: 16 envs of 0.2 ms in two workers beside a policy that takes 1.6 ms per 16
  observations (elsewhere, as on a GPU), `recv` of 8 envs at a time; without, `step` of all.

A unit is one env step, or one call of `sample`. "Without" switches a part off by a private name.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from measure import machine, markdown_table

REPETITIONS = 7
THINK_S, NUM_ENVS = 0.0016, 16
ROWS = {
    "huge pages, sample(256, out)": ("sample_256", "small_pages_256"),
    "huge pages, sample(4096, out)": ("sample_4096", "small_pages_4096"),
    "first-ready, 16 envs beside a policy": ("first_ready", "whole"),
}


class Busy(gym.Env):
    """An env that computes for 0.2 ms."""

    observation_space, action_space = Box(-1, 1, (17,), np.float32), Discrete(2)
    obs = np.zeros(17, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        end = perf_counter() + 0.0002
        while perf_counter() < end:
            pass
        return self.obs, 0.0, False, False, {}


def rate(run: Callable[[], object], units: int, repetitions: int = 5) -> float:
    """Units per second, the median of some repetitions after one that is not counted."""
    rates = []
    for _ in range(repetitions + 1):
        begin = perf_counter()
        run()
        rates.append(units / (perf_counter() - begin))
    return statistics.median(rates[1:])


def measure_sample(batch_size: int, on_huge_pages: bool) -> float:
    import torch

    from buffers import SharedReplayBuffer
    from buffers.replay import table

    if not on_huge_pages:

        def zeroed_bytes(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.uint8)

        setattr(table, "zeroed_bytes", zeroed_bytes)  # noqa: B010  # type checkers refuse to assign it
    block, capacity = 10_000, 1_000_000
    buffer = SharedReplayBuffer(capacity, Box(-1, 1, (17,)), Box(-1, 1, (6,)), seed=0)
    obs, flags = np.zeros((block, 17), np.float32), np.zeros(block, bool)
    for _ in range(capacity // block):
        buffer.add(
            obs=obs, next_obs=obs, actions=np.zeros((block, 6), np.float32),
            rewards=np.ones(block), terminations=flags, truncations=flags,
        )  # fmt: skip
    out, count = buffer.sample(batch_size), 500_000 // batch_size

    def run() -> None:
        for _ in range(count):
            buffer.sample(batch_size, out)

    return rate(run, count)


def measure_overlap(how: str) -> float:
    from vecenv import AsyncVectorEnv

    envs = AsyncVectorEnv([Busy] * NUM_ENVS, num_workers=2)
    envs.reset(seed=0)
    actions = np.zeros(NUM_ENVS, int)
    if how == "first_ready":
        envs.send(actions)

    def run() -> None:
        for _ in range(100):
            if how == "whole":
                sleep(THINK_S)
                envs.step(actions)
        received = 0
        while how == "first_ready" and received < 100 * NUM_ENVS:
            batch = envs.recv(NUM_ENVS // 2)
            received += len(batch.env_ids)
            sleep(THINK_S * len(batch.env_ids) / NUM_ENVS)
            envs.send(actions[batch.env_ids], batch.env_ids)

    found = rate(run, 100 * NUM_ENVS)
    if how == "first_ready":
        envs.recv()
    envs.close()
    return found


CASES: dict[str, Callable[[], float]] = {
    "sample_256": lambda: measure_sample(256, True),
    "small_pages_256": lambda: measure_sample(256, False),
    "sample_4096": lambda: measure_sample(4096, True),
    "small_pages_4096": lambda: measure_sample(4096, False),
    "whole": lambda: measure_overlap("whole"),
    "first_ready": lambda: measure_overlap("first_ready"),
}


def run_case(name: str) -> float:
    """Measure in a program of its own."""
    done = subprocess.run(
        [sys.executable, Path(__file__), name], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("case", nargs="?", choices=list(CASES), help="measure one, in this process")
    if case := parser.parse_args().case:
        print(CASES[case]())
        return
    rows = []
    for title, (with_it, without) in ROWS.items():
        pairs = [(run_case(with_it), run_case(without)) for _ in range(REPETITIONS)]
        ratios = sorted(a / b for a, b in pairs)
        medians = [statistics.median(side) for side in zip(*pairs, strict=True)]
        shown = [f"{value:,.0f}" for value in medians]
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        rows.append([title, *shown, f"{statistics.median(ratios):.2f}", spread])
    table = markdown_table(["per second", "with", "without", "ratio", "spread"], rows)
    print(f"{machine('numpy', 'numba', 'torch')}\n\n{table}")


if __name__ == "__main__":
    main()
