"""Time of all buffers on a CUDA device.

    python benchmarks/device.py

Without a CUDA device it says so and measures nothing. `--device cpu` runs the same code on the
CPU, which shows that it works and no more.

A transition is 52 float32 obs and next obs, an int64 action, a float32 reward and two flags, in
buffers of `--capacity` transitions that are full. "add" takes 2048 rows from NumPy arrays through
pinned pages to the device; "copy" is the host-to-device copy of as many packed bytes alone. Calls
are timed in runs of many with one wait at the end; "graph" replays a captured `sample(out=)`. GAE
and the PPO update (128 steps of 2048 envs, four times 16 minibatches) take what the environment
wrote into host pages and leave everything on the device.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from measure import machine, markdown_table

from buffers import (
    EpisodicReplayBuffer,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    RolloutBuffer,
    SharedReplayBuffer,
    gae,
)

OBS, ACTIONS = Box(-np.inf, np.inf, (52,), np.float32), Discrete(7)
NUM_ENVS, NUM_STEPS = 2048, 128
Cases = dict[str, Callable[[], object]]


class Timer:
    """Times calls on a device; prints a row for each."""

    def __init__(self, device: torch.device, repetitions: int, seconds: float):
        self.device, self._repetitions, self._seconds = device, repetitions, seconds
        self.rows: list[list[str]] = []

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure(self, name: str, call: Callable[[], object]) -> None:
        for _ in range(3):
            call()
        count = max(1, int(self._seconds / max(self._run(call, 3), 1e-7)))
        times = sorted(1e6 * self._run(call, count) for _ in range(self._repetitions))
        median = f"{statistics.median(times):.4g}"
        self.rows.append([name, median, f"{times[0]:.4g} to {times[-1]:.4g}"])

    def _run(self, call: Callable[[], object], count: int) -> float:
        self.wait()
        begin = perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return (perf_counter() - begin) / count


def make_columns(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "obs": rng.standard_normal((count, 52), np.float32),
        "next_obs": rng.standard_normal((count, 52), np.float32),
        "actions": rng.integers(0, 7, count),
        "rewards": rng.standard_normal(count, np.float32),
        "terminations": rng.random(count) < 0.01,
        "truncations": rng.random(count) < 0.01,
    }


def filled(buffer: Any, capacity: int) -> Any:
    columns = make_columns(NUM_ENVS)
    for _ in range(-(-capacity // NUM_ENVS)):
        buffer.add(**columns)
    return buffer


def time_replay(timer: Timer, capacity: int, options: dict[str, Any]) -> None:
    columns = make_columns(NUM_ENVS)
    long = {"num_envs": NUM_ENVS, "n_step": 3, "gamma": 0.99}
    buffers = {
        "shared": SharedReplayBuffer(capacity, OBS, ACTIONS, **options),
        "per env": PerEnvReplayBuffer(
            capacity // NUM_ENVS, OBS, ACTIONS, num_envs=NUM_ENVS, **options
        ),
        "3 steps": SharedReplayBuffer(capacity, OBS, ACTIONS, **long, **options),
        "stored once": SharedReplayBuffer(
            capacity, OBS, ACTIONS, store_next=False, **long, **options
        ),
        "prioritized": PrioritizedReplayBuffer(capacity, OBS, ACTIONS, **options),
    }
    host = torch.zeros(NUM_ENVS * 448, dtype=torch.uint8, pin_memory=timer.device.type == "cuda")
    target = torch.zeros_like(host, device=timer.device)
    timer.measure("copy of 2048 rows", lambda: target.copy_(host, non_blocking=True))
    for name, buffer in buffers.items():
        filled(buffer, capacity)
        timer.measure(f"{name}: add 2048", partial(buffer.add, **columns))
        for size in (256, 4096):
            out = buffer.new_batch(size)
            timer.measure(f"{name}: sample {size}", partial(buffer.sample, size))
            timer.measure(f"{name}: sample {size}, out=", partial(buffer.sample, size, out))
            if timer.device.type == "cuda":
                replay = captured(buffer, size, out)
                timer.measure(f"{name}: sample {size}, graph", replay)
    per = buffers["prioritized"]
    indices = per.sample(256).indices
    errors = torch.rand(256, device=timer.device) + 0.1
    timer.measure("prioritized: update 256", partial(per.update_priorities, indices, errors))


def captured(buffer: Any, size: int, out: Any) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(buffer.generator)
    with torch.cuda.graph(graph):
        buffer.sample(size, out)
    return graph.replay


def time_episodes(timer: Timer, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    buffer = EpisodicReplayBuffer(200_000, OBS, ACTIONS, max_episodes=1000, **options)
    for _ in range(1000):
        boundaries = np.zeros(200, np.bool_)
        boundaries[rng.choice(200, 5, replace=False)] = True
        buffer.add_episode({
            "obs": rng.standard_normal((201, 52), np.float32),
            "actions": rng.integers(0, 7, 200),
            "rewards": rng.standard_normal(200, np.float32),
            "boundaries": boundaries,
        })  # fmt: skip
    for size in (256, 4096):
        out = buffer.sample(size, 0.95)
        timer.measure(f"episodic: pairs {size}", partial(buffer.sample, size, 0.95, out=out))


def time_advantages(timer: Timer) -> None:
    rng = np.random.default_rng(0)
    shape = NUM_STEPS, NUM_ENVS
    rewards = torch.from_numpy(rng.standard_normal(shape, np.float32)).to(timer.device)
    values = torch.from_numpy(rng.standard_normal((NUM_STEPS + 1, NUM_ENVS), np.float32))
    flags = torch.from_numpy(rng.random((2, *shape)) < 0.01).to(timer.device)
    out = torch.zeros_like(rewards), torch.zeros_like(rewards)
    inputs = rewards, values.to(timer.device), flags[0], flags[1]
    options = {"final_values": torch.zeros_like(rewards), "gamma": 0.99, "gae_lambda": 0.95}
    timer.measure("gae 128 x 2048", lambda: gae(*inputs, **options, out=out, compiled=False))


def time_rollout(timer: Timer, options: dict[str, Any]) -> None:
    rollout = RolloutBuffer(
        NUM_STEPS, NUM_ENVS, OBS, ACTIONS, autoreset_mode="NextStep", **options
    )  # fmt: skip
    columns = make_columns(NUM_ENVS)
    actions = torch.from_numpy(columns["actions"]).to(timer.device)
    floats = torch.zeros(NUM_ENVS, device=timer.device)
    rollout.start(columns["obs"])

    def collect() -> None:
        for t in range(NUM_STEPS):
            rollout.obs_at(t)
            rollout.put(t, actions=actions, log_probs=floats, values=floats)
            slot = rollout.slot(t)
            slot.obs[:] = columns["next_obs"]
            slot.rewards[:] = columns["rewards"]
            slot.terminations[:] = columns["terminations"]
            slot.truncations[:] = columns["truncations"]

    def update() -> None:
        collect()
        rollout.compute_advantages(floats)
        for _ in range(4):
            for _ in rollout.minibatches(16):
                pass
        rollout.advance()

    timer.measure("PPO update", update)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the buffers on a CUDA device.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--capacity", type=int, default=1_000_000, help="transitions held")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.05, help="time of one repetition")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing was measured")
        return
    if device.type == "cpu":
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU, code path only"
    print(name, machine("numpy", "torch"), sep="\n")
    timer = Timer(device, arguments.repetitions, arguments.seconds)
    options = {"device": device, "seed": 0, "staged": True}
    time_replay(timer, arguments.capacity, options)
    time_episodes(timer, options)
    time_advantages(timer)
    time_rollout(timer, options)
    print(f"\n{arguments.capacity} transitions; median of {arguments.repetitions} runs\n")
    print(markdown_table(["call", "µs", "spread"], timer.rows))


if __name__ == "__main__":
    main()
