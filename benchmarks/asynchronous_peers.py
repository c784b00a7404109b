"""Multi-process vector envs of other libraries beside AsyncVectorEnv, on do-nothing envs.

    python benchmarks/asynchronous_peers.py [--busy-core]

Peers are measured if they are installed, in turn, each made anew for every repetition: processes of
some of them are busy while they wait. One step is one `env.step` of one env; envs never end an
episode. With `--busy-core` another process keeps one core busy meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from async_envs import NullEnv
from measure import machine, markdown_table

from vecenv import AsyncVectorEnv, SyncVectorEnv

Step = tuple[Callable[[], Any], Callable[[], Any]]  # step all envs once; close


def gymnasium_envs(kind: Any, num_envs: int, **options: Any) -> Step:
    envs = kind([NullEnv] * num_envs, copy=False, **options)
    envs.reset(seed=0)
    actions = np.zeros(num_envs, np.int64)
    return lambda: envs.step(actions), envs.close


def stable_baselines3_envs(num_envs: int) -> Step:
    from stable_baselines3.common.vec_env import (  # pyright: ignore[reportMissingImports]
        SubprocVecEnv,
    )

    envs = SubprocVecEnv([NullEnv] * num_envs, start_method="fork")
    envs.reset()
    actions = np.zeros(num_envs, np.int64)
    return lambda: envs.step(actions), envs.close


def tianshou_envs(num_envs: int) -> Step:
    from tianshou.env import ShmemVectorEnv  # pyright: ignore[reportMissingImports]

    envs = ShmemVectorEnv([NullEnv] * num_envs)
    envs.reset()
    actions = np.zeros(num_envs, np.int64)
    return lambda: envs.step(actions), envs.close


def torchrl_envs(num_envs: int) -> Step:
    import torch
    from torchrl.envs import GymWrapper, ParallelEnv  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    envs = ParallelEnv(num_envs, lambda: GymWrapper(NullEnv()), mp_start_method="fork")
    state = envs.reset()
    state["action"] = torch.zeros_like(envs.rand_action(state)["action"])
    return lambda: envs.step(state), envs.close


def pufferlib_envs(num_envs: int) -> Step:
    import pufferlib.emulation  # pyright: ignore[reportMissingImports]
    import pufferlib.vector  # pyright: ignore[reportMissingImports]

    def make(buf: Any = None, seed: int = 0) -> Any:
        return pufferlib.emulation.GymnasiumPufferEnv(env=NullEnv(), buf=buf, seed=seed)

    envs = pufferlib.vector.make(
        make, num_envs=num_envs, num_workers=2, backend=pufferlib.vector.Multiprocessing
    )
    envs.reset()
    actions = np.zeros(num_envs, np.int64)
    return lambda: envs.step(actions), envs.close


MAKERS: dict[str, Callable[[int], Step]] = {
    "AsyncVectorEnv, workers": lambda n: gymnasium_envs(AsyncVectorEnv, n),
    "AsyncVectorEnv, caller_steps": lambda n: gymnasium_envs(AsyncVectorEnv, n, caller_steps=True),
    "SyncVectorEnv": lambda n: gymnasium_envs(SyncVectorEnv, n),
    "gymnasium AsyncVectorEnv": lambda n: gymnasium_envs(gym.vector.AsyncVectorEnv, n),
    "stable-baselines3 SubprocVecEnv": stable_baselines3_envs,
    "tianshou ShmemVectorEnv": tianshou_envs,
    "torchrl ParallelEnv": torchrl_envs,
    "pufferlib Multiprocessing": pufferlib_envs,
}


def rate(step: Callable[[], Any], num_envs: int, seconds: float) -> float:
    """Return env steps per second."""
    count, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        step()
        count += num_envs
    return count / elapsed


def burn() -> None:
    """Keep a core busy."""
    while True:
        pass


def measure(num_envs: int, options: argparse.Namespace) -> dict[str, str]:
    """Return the median thousand env steps per second of every library that can be had."""
    rates: dict[str, list[float]] = {name: [] for name in MAKERS}
    cells = dict.fromkeys(MAKERS, "")
    for _ in range(options.repetitions):
        for name, make in MAKERS.items():
            if num_envs > options.most_processes and name.startswith(("torchrl", "tianshou")):
                continue  # a process per env, each with torch in it
            if cells[name]:
                continue
            try:
                step, close = make(num_envs)
            except Exception as error:  # not installed, or not for this Python
                cells[name] = type(error).__name__
                continue
            rate(step, num_envs, options.seconds / 2)
            rates[name].append(rate(step, num_envs, options.seconds))
            with contextlib.suppress(Exception):  # nobody else's processes are there meanwhile
                close()
    medians = {name: statistics.median(found) / 1e3 for name, found in rates.items() if found}
    return cells | {name: f"{median:,.1f}" for name, median in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="AsyncVectorEnv beside other libraries.")
    parser.add_argument("--busy-core", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="*", default=[8, 64, 512])
    parser.add_argument("--seconds", type=float, default=0.3, help="per library and repetition")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--most-processes", type=int, default=64)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(machine("gymnasium", "numpy"), end="\n\n")
    burner = multiprocessing.get_context("fork").Process(target=burn, daemon=True)
    if options.busy_core:
        burner.start()
    columns = [measure(num_envs, options) for num_envs in options.sizes]
    rows = [[name, *(column[name] for column in columns)] for name in MAKERS]
    suffix = ", beside a busy process" if options.busy_core else ""
    header = [f"thousand steps per second of do-nothing envs{suffix}", *map(str, options.sizes)]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
