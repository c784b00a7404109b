"""RayVectorEnv against AsyncVectorEnv on one machine: steps, fragments, recovery.

    python benchmarks/ray_scaling.py fragments latency recovery

Needs `pip install 'vecenv[ray]'`. A step is one step of one env; the steps of NEXT_STEP that only
reset an ended episode are left out. Both sides compute the same policy, a linear one in NumPy, on
128 envs per update: in one call of 128 rows where the caller acts, in two of 64 in the actors.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from functools import partial
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
from measure import alternate, machine, markdown_table, median_ratio

from vecenv import AsyncVectorEnv, RayVectorEnv, StepSlot, VecEnv

NUM_ENVS, NUM_STEPS, NUM_WORKERS = 128, 64, 2
COSTS_US = (0, 20, 100, 1000)  # of a step of the synthetic env, computing
LENGTH = 200


class LinearPolicy:
    """Actions of the larger of `num_actions` linear functions of the observation, plus noise."""

    def __init__(self, envs: VecEnv) -> None:
        space: Any = envs.single_observation_space
        self.weights = np.zeros((int(np.prod(space.shape)), 2), np.float32)

    def load(self, weights: np.ndarray) -> None:
        self.weights = weights.copy()

    def act(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        return (obs.reshape(len(obs), -1) @ self.weights + noise).argmax(-1)


def env_fns(cost_us: int, num_envs: int = NUM_ENVS) -> list[Any]:
    """CartPole, or the synthetic env with steps of this cost."""
    if cost_us == 0:
        return [partial(gym.make, "CartPole-v1", disable_env_checker=True)] * num_envs
    make = partial(gym.make, "Synthetic-v0", disable_env_checker=True)
    return [partial(make, cpu_ms=cost_us / 1000, episode_length=LENGTH)] * num_envs


class Rollouts:
    """A vector env, and memory for its steps."""

    def __init__(self, envs: VecEnv, num_steps: int) -> None:
        self.envs, self.rng = envs, np.random.default_rng(0)
        shape, count = envs.observation_space.shape, envs.num_envs
        assert shape is not None
        self.slots = [
            StepSlot(
                envs.allocate(shape, envs.single_observation_space.dtype),
                envs.allocate((count,), np.float32),
                *(envs.allocate((count,), np.bool_) for _ in range(2)),
            )
            for _ in range(num_steps)
        ]
        self.actions = np.zeros((num_steps, count), np.int64)
        self.policy = LinearPolicy(envs)
        self.obs = envs.reset(seed=1)[0]
        self.over = np.zeros(count, np.bool_)
        self.num_steps = 0  # that were no mere resets
        if isinstance(envs, RayVectorEnv):
            envs.set_policy(LinearPolicy)

    def update(self) -> None:
        """Hand out new weights and fill the memory."""
        weights = self.rng.normal(size=self.policy.weights.shape).astype(np.float32)
        noise = self.rng.gumbel(size=(*self.actions.shape, 2)).astype(np.float32)
        if isinstance(self.envs, RayVectorEnv):
            fields = {"actions": self.actions}
            self.envs.collect(self.slots, weights, inputs=[noise], fields=fields)
        else:
            self.policy.load(weights)
            for t, slot in enumerate(self.slots):
                self.actions[t] = self.policy.act(self.obs, noise[t])
                self.obs = self.envs.step(self.actions[t], out=slot)[0]
        for slot in self.slots:
            self.num_steps += int((~self.over).sum())
            self.over = slot.terminations | slot.truncations

    def measured(self) -> int:
        """Update once; return the steps that were made."""
        before = self.num_steps
        self.update()
        return self.num_steps - before


def start_ray() -> None:
    settings: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
    settings |= {"num_cpus": NUM_WORKERS, "object_store_memory": 200 * 2**20}
    import_module("ray").init("local", **settings)


def fragments() -> None:
    """Throughput of collecting, by cost of the envs' steps."""
    rows = []
    for cost_us in COSTS_US:
        num_steps = NUM_STEPS if cost_us < 1000 else NUM_STEPS // 4
        num_updates = 5 if cost_us < 100 else 1  # a round takes a third of a second or more
        sides = {
            "async": Rollouts(AsyncVectorEnv(env_fns(cost_us), num_workers=NUM_WORKERS), num_steps),
            "ray": Rollouts(RayVectorEnv(env_fns(cost_us), num_workers=NUM_WORKERS), num_steps),
        }
        share = {name: [] for name in sides}

        def run(name: str, sides: Any = sides, share: Any = share, n: int = num_updates) -> None:
            share[name].append(sum(sides[name].measured() for _ in range(n)))

        rates = alternate({name: partial(run, name) for name in sides}, 1, repetitions=7)
        for name, found in rates.items():
            rates[name] = [a * b for a, b in zip(found, share[name][1:], strict=True)]
        for side in sides.values():
            side.envs.close()
        label = "CartPole-v1" if cost_us == 0 else f"synthetic, {cost_us} us"
        speeds = [f"{statistics.median(rates[name]):,.0f}" for name in ("async", "ray")]
        rows.append([label, *speeds, f"{median_ratio(rates, 'ray', 'async'):.2f}"])
    print(markdown_table(["env", "async, steps/s", "ray collect, steps/s", "ray / async"], rows))


def latency() -> None:
    """Time of one step of all envs through actors, and from which cost on that is no matter."""
    rows = []
    for num_envs in (2, NUM_ENVS):
        fns = env_fns(0, num_envs)
        both: dict[str, VecEnv] = {
            "async": AsyncVectorEnv(fns, num_workers=NUM_WORKERS),
            "ray": RayVectorEnv(fns, num_workers=NUM_WORKERS),
        }
        for envs in both.values():
            envs.reset(seed=1)

        def run(envs: VecEnv, num_envs: int = num_envs) -> None:
            actions = np.zeros(num_envs, np.int64)
            for _ in range(100):
                envs.step(actions)

        rates = alternate({name: partial(run, envs) for name, envs in both.items()}, 100)
        for envs in both.values():
            envs.close()
        medians = [1e6 / statistics.median(rates[name]) for name in ("async", "ray")]
        label = f"CartPole-v1, {num_envs} envs"
        rows.append([label, *(f"{us:,.0f}" for us in medians), f"{medians[1] - medians[0]:,.0f}"])
    print(markdown_table(["step of all envs", "async, us", "ray step, us", "more, us"], rows))


def recovery() -> None:
    """Seconds of an update in which an actor is killed, less those of an undisturbed one."""
    seconds = []
    rollouts = Rollouts(
        RayVectorEnv(env_fns(100), num_workers=NUM_WORKERS, on_error="restart"), NUM_STEPS
    )
    for _ in range(5):
        begin = time.perf_counter()
        rollouts.update()
        undisturbed = time.perf_counter() - begin
        envs: Any = rollouts.envs
        os.kill(envs._pool.seats[1].pid, signal.SIGKILL)
        begin = time.perf_counter()
        rollouts.update()
        seconds.append(time.perf_counter() - begin - undisturbed)
    rollouts.envs.close()
    shown = ", ".join(f"{s:.2f}" for s in sorted(seconds))
    print(f"recovery from a killed actor: median {statistics.median(seconds):.2f} s of {shown}")


PARTS = {"fragments": fragments, "latency": latency, "recovery": recovery}

if __name__ == "__main__":
    print(machine("vecenv", "ray", "numpy", "gymnasium"))
    start_ray()
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
