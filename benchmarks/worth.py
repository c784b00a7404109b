"""What three optimisations are worth, each with and without: a program per run, in turn.

    python benchmarks/worth.py

- *huge pages*: `sample` from a replay buffer of a million rows whose memory is on pages of 2 MiB.
- *info columns*: `AsyncVectorEnv.step` with 64 envs whose info dicts hold four numbers; without,
  every info travels as a message.
- *halves*: 16 envs of 0.2 ms in two workers beside a policy that takes 1.6 ms per 16 observations
  (elsewhere, as on a GPU); without, `step` of all. The third row is `recv` of 8 envs at a time.

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
    "info columns, 64 envs": ("columns", "messages"),
    "halves, 16 envs beside a policy": ("halves", "whole"),
    "first-ready, 16 envs beside a policy": ("first_ready", "whole"),
}


class Told(gym.Env):
    """An env that costs nothing, with numbers in its infos."""

    observation_space, action_space = Box(-1, 1, (17,), np.float32), Discrete(2)

    def __init__(self) -> None:
        self.obs, self.count = np.zeros(17, np.float32), 0

    def info(self) -> dict[str, float]:
        self.count += 1
        position = 0.1 * self.count
        return {"x_position": position, "x_velocity": 1.5, "reward_ctrl": -0.1, "reward_run": 0.3}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        return self.obs, self.info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.obs, 0.0, False, False, self.info()


class Busy(Told):
    """An env that computes for 0.2 ms."""

    def info(self) -> dict[str, float]:
        return {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        end = perf_counter() + 0.0002
        while perf_counter() < end:
            pass
        return super().step(action)


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
    from buffers.replay import storage

    if not on_huge_pages:

        def zeroed_bytes(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.uint8)

        setattr(storage, "zeroed_bytes", zeroed_bytes)  # noqa: B010  # type checkers refuse to assign it
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


def measure_infos(in_columns: bool) -> float:
    from vecenv import AsyncVectorEnv
    from vecenv.workers import info_columns

    if not in_columns:
        setattr(info_columns, "_MOST_FORMS", 0)  # noqa: B010  # type checkers refuse to assign it
    envs = AsyncVectorEnv([Told] * 64, num_workers=2)
    envs.reset(seed=0)
    actions = np.zeros(64, int)

    def run() -> None:
        for _ in range(1000):
            envs.step(actions)

    found = rate(run, 64_000)
    envs.close()
    return found


def measure_overlap(how: str) -> float:
    from vecenv import AsyncVectorEnv

    envs = AsyncVectorEnv([Busy] * NUM_ENVS, num_workers=2)
    envs.reset(seed=0)
    actions, some = np.zeros(NUM_ENVS, int), np.zeros(NUM_ENVS // 2, int)
    halves = envs.halves() if how == "halves" else ()
    for half in halves:
        half.step_async(some)
    if how == "first_ready":
        envs.send(actions)

    def run() -> None:
        for _ in range(100):
            if how == "whole":
                sleep(THINK_S)
                envs.step(actions)
            for half in halves:
                half.step_wait()
                sleep(THINK_S / 2)
                half.step_async(some)
        received = 0
        while how == "first_ready" and received < 100 * NUM_ENVS:
            batch = envs.recv(NUM_ENVS // 2)
            received += len(batch.env_ids)
            sleep(THINK_S * len(batch.env_ids) / NUM_ENVS)
            envs.send(actions[batch.env_ids], batch.env_ids)

    found = rate(run, 100 * NUM_ENVS)
    for half in halves:
        half.step_wait()
    if how == "first_ready":
        envs.recv()
    envs.close()
    return found


CASES: dict[str, Callable[[], float]] = {
    "sample_256": lambda: measure_sample(256, True),
    "small_pages_256": lambda: measure_sample(256, False),
    "sample_4096": lambda: measure_sample(4096, True),
    "small_pages_4096": lambda: measure_sample(4096, False),
    "columns": lambda: measure_infos(True),
    "messages": lambda: measure_infos(False),
    "halves": lambda: measure_overlap("halves"),
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
