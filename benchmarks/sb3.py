"""Steps per second of stable-baselines3 through its own vector envs and through ours.

    pip install stable-baselines3
    python benchmarks/sb3.py

CartPole-v1. "stepping" is `step` of the vector env alone, with random actions, from the moment a
policy has chosen to the moment it can choose again; "PPO" is `learn`, collecting and updating,
with SB3's default networks and options, but for 2048 steps an update. Envs report episodes in all
cases (`Monitor`, or ours). One thread of torch.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from measure import Rates, machine, markdown_table
from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.env_util import (  # pyright: ignore[reportMissingImports]
    make_vec_env,
)
from stable_baselines3.common.vec_env import (  # pyright: ignore[reportMissingImports]
    DummyVecEnv,
    SubprocVecEnv,
)

from vecenv.adapters.sb3 import make_sb3_env

STEPS_PER_UPDATE = 2048
CASES: dict[str, Callable[[int], Any]] = {
    "DummyVecEnv": lambda n: make_vec_env("CartPole-v1", n, vec_env_cls=DummyVecEnv),
    "SubprocVecEnv": lambda n: make_vec_env(
        "CartPole-v1",
        n,
        vec_env_cls=SubprocVecEnv,
        vec_env_kwargs={"start_method": "fork"},  # the others take minutes to import torch n times
    ),
    "vecenv, sync": lambda n: make_sb3_env("CartPole-v1", n, backend="sync"),
    "vecenv, async": lambda n: make_sb3_env("CartPole-v1", n, backend="async"),
    "vecenv, compiled": lambda n: make_sb3_env("JitCartPole-v1", n),
}


def stepper(envs: Any, num_steps: int) -> Callable[[], None]:
    rows = np.random.default_rng(0).integers(2, size=(64, envs.num_envs))
    envs.reset()

    def run() -> None:
        for t in range(num_steps):
            envs.step(rows[t % 64])

    return run


def learner(envs: Any, num_steps: int) -> Callable[[], Any]:
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=STEPS_PER_UPDATE // envs.num_envs,
        batch_size=256,
        seed=1,
        device="cpu",
    )
    return lambda: model.learn(num_steps)


def seconds(run: Callable[[], Any]) -> float:
    begin = perf_counter()
    run()
    return perf_counter() - begin


def measure(num_envs: int, args: argparse.Namespace) -> list[list[str]]:
    """Return one row of the table per case; envs are made anew in every round, and closed."""
    steps = max(1, args.env_steps // num_envs)
    stepping: Rates = {name: [] for name in CASES}
    learning: Rates = {name: [] for name in CASES}
    for _ in range(args.repetitions):
        for name, make in CASES.items():
            envs = make(num_envs)
            step, learn = stepper(envs, steps), learner(envs, args.ppo_steps)
            stepper(envs, 20)()  # what is done once is not counted
            stepping[name].append(steps * num_envs / seconds(step))
            learning[name].append(args.ppo_steps / seconds(learn))
            envs.close()
    table = []
    for name in CASES:
        row = [f"{num_envs}, {name}"]
        for rates in (stepping, learning):
            low, high = min(rates[name]), max(rates[name])
            row += [f"{statistics.median(rates[name]):,.0f}", f"{low:,.0f} – {high:,.0f}"]
        table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of stable-baselines3")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--env-steps", type=int, default=8192)
    parser.add_argument("--ppo-steps", type=int, default=STEPS_PER_UPDATE)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(machine("stable-baselines3", "gymnasium", "torch"), flush=True)
    header = ["envs", "stepping, steps/s", "from – to", "PPO, steps/s", "from – to"]
    for num_envs in args.num_envs:
        print(markdown_table(header, measure(num_envs, args)), flush=True)


if __name__ == "__main__":
    main()
