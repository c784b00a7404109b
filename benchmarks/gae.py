"""Time of advantage estimation against copying its inputs once, and against the usual loops.

    python benchmarks/gae.py

"copy" copies the inputs of the call beside it into memory that is there already. "gae" is
`buffers.gae`, argument checks included. The loops are the ones of common training
scripts, one step of all envs per iteration: in NumPy (as Stable-Baselines3 has it) and in torch (as
CleanRL has it). They know neither final values nor dead steps, so they do less; and "torch path" is
what `buffers.gae` does on devices other than the CPU, here on the CPU. One thread.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import torch
from measure import Rates, alternate, machine, markdown_table, median_ratio, repeated

from buffers import gae
from buffers.rollout.gae import estimate

SHAPES = [(128, 2048), (2048, 8), (128, 8)]
GAMMA, LAMBDA = 0.99, 0.95
FOUR, ALL = "gae", "gae, final_values, valid"
COPY_FOUR, COPY_ALL = "copy of 4 inputs", "copy of 6 inputs"
NUMPY_LOOP, TORCH_LOOP, TORCH_PATH = "NumPy loop", "torch loop", "torch path"
BASES = {FOUR: COPY_FOUR, ALL: COPY_ALL, NUMPY_LOOP: COPY_FOUR, TORCH_LOOP: COPY_FOUR}


def make_inputs(num_steps: int, num_envs: int) -> list[np.ndarray]:
    """rewards, values, terminations, truncations, final_values, valid."""
    rng = np.random.default_rng(0)
    shape = (num_steps, num_envs)
    rewards, final_values = rng.standard_normal((2, *shape), np.float32)
    values = rng.standard_normal((num_steps + 1, num_envs), np.float32)
    terminations, truncations = rng.random((2, *shape)) < 0.01
    return [rewards, values, terminations, truncations, final_values, rng.random(shape) < 0.99]


def numpy_loop(rewards, values, dones, advantages) -> np.ndarray:
    last = np.zeros(rewards.shape[1], np.float32)
    for t in reversed(range(len(rewards))):
        continues = 1.0 - dones[t]
        delta = rewards[t] + GAMMA * values[t + 1] * continues - values[t]
        last = delta + GAMMA * LAMBDA * continues * last
        advantages[t] = last
    return advantages + values[:-1]


def torch_loop(rewards, values, dones) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = torch.zeros_like(rewards)
    last = torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        continues = 1.0 - dones[t]
        delta = rewards[t] + GAMMA * values[t + 1] * continues - values[t]
        advantages[t] = last = delta + GAMMA * LAMBDA * continues * last
    return advantages, advantages + values[:-1]


def make_cases(num_steps: int, num_envs: int) -> dict[str, Callable[[], object]]:
    inputs = make_inputs(num_steps, num_envs)
    rewards, values, terminations, truncations, final_values, valid = inputs
    dones = (terminations | truncations).astype(np.float32)
    copies = [np.empty_like(array) for array in inputs]
    out = np.empty_like(rewards)
    options = {"gamma": GAMMA, "gae_lambda": LAMBDA}
    first, more = inputs[:4], {"final_values": final_values, "valid": valid}
    tensors = [torch.from_numpy(array) for array in (rewards, values, dones)]
    there = [*map(torch.from_numpy, first), None, None]
    results = torch.empty((2, num_steps, num_envs))

    def copy(number: int) -> None:
        for target, source in zip(copies[:number], inputs[:number], strict=True):
            np.copyto(target, source)

    return {
        COPY_FOUR: lambda: copy(4),
        FOUR: lambda: gae(*first, **options),
        COPY_ALL: lambda: copy(6),
        ALL: lambda: gae(*first, **more, **options),
        NUMPY_LOOP: lambda: numpy_loop(rewards, values, dones, out),
        TORCH_LOOP: lambda: torch_loop(*tensors),
        TORCH_PATH: lambda: estimate(
            there, results[0], results[1], GAMMA, LAMBDA, is_compiled=False
        ),
    }


def measure(shape: tuple[int, int], repetitions: int, seconds: float) -> Rates:
    cases, counts = {}, {}
    for name, run in make_cases(*shape).items():
        cases[name], counts[name] = repeated(run, seconds)
    return alternate(cases, counts, repetitions)


def report(shape: tuple[int, int], rates: Rates) -> str:
    rows = []
    for name, per_second in rates.items():
        times = sorted(1e6 / rate for rate in per_second)
        base = BASES.get(name)
        ratio = f"{1 / median_ratio(rates, name, base):.2f}" if base else ""
        loop = f"{1 / median_ratio(rates, name, FOUR):.1f}"
        spread = f"{times[0]:.1f} to {times[-1]:.1f}"
        rows.append([name, f"{statistics.median(times):.1f}", spread, ratio, loop])
    header = [f"T = {shape[0]}, N = {shape[1]}", "µs", "spread", "time / copy", "time / gae"]
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time advantage estimation.")
    parser.add_argument("--repetitions", type=int, default=15, help="rounds, after one to warm up")
    parser.add_argument("--seconds", type=float, default=0.02, help="time of a case in one round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("numpy", "numba", "torch"))
    print(f"float32; median and spread over {options.repetitions} alternating rounds")
    for shape in SHAPES:
        print()
        print(report(shape, measure(shape, options.repetitions, options.seconds)))


if __name__ == "__main__":
    main()
