"""Steps per second of the CAGE 2 simulator, next to what bounds it.

    python benchmarks/cage2.py

A step is one step of one env through `envs.step(actions, out=slot)`: random blue actions given as
an array (a new one each call), the red agent, the reward, autoreset after 100 steps, and 52 float32
written into the caller's memory. Red is B_line in half of the episodes and Meander in the others.
Compilation is not inside. Two compiled loops that only write the outputs of a step bound it: a
plain one, and one that expands bits that lie ready in an array by the simulator's own table.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from measure import Rates, alternate, machine, markdown_table, median_ratio
from numba import njit
from work import make_slot

from vecenv.cage import Cage2VectorEnv
from vecenv.jit.kernels import write_bits

NUM_ROWS = 16  # rows of actions, used in turn
EPISODE_LENGTH = 100
NUM_BITS = np.uint64(52)
TWO_THREADS, ONE_THREAD = "2 threads", "1 thread"
WRITE_PLAINLY, WRITE_BY_TABLE = "writing only, plainly", "writing only, by table"
CASES = (TWO_THREADS, ONE_THREAD, WRITE_PLAINLY, WRITE_BY_TABLE)


@njit(error_model="numpy")
def write_plainly(bits, obs, rewards, terminations, truncations):
    """Write one number per env into observations float32 (N, 52), rewards and flags."""
    for env in range(np.uint64(bits.shape[0])):
        value = np.float32(bits[env])
        for k in range(np.uint64(obs.shape[1])):
            obs[env, k] = value
        rewards[env] = value
        terminations[env] = truncations[env] = False


@njit(error_model="numpy")
def write_by_table(bits, obs, rewards, terminations, truncations):
    """Write the bits uint64 (N,) as observations float32 (N, 52), rewards and flags."""
    for env in range(np.uint64(bits.shape[0])):
        write_bits(bits[env], NUM_BITS, obs[env])
        rewards[env] = np.float32(1.0)
        terminations[env] = truncations[env] = False


def make_envs(num_envs: int, num_threads: int) -> Cage2VectorEnv:
    """Return envs at the first step; every episode draws B_line or Meander."""
    envs = Cage2VectorEnv(
        num_envs, red_agent="mixed", episode_length=EPISODE_LENGTH, num_threads=num_threads
    )
    envs.reset(seed=1)
    return envs


def stepper(envs: Cage2VectorEnv, actions: np.ndarray, num_steps: int) -> Callable[[], None]:
    """Return a function that makes `num_steps` steps of all envs."""
    slot = make_slot(envs)
    rows = [actions[step % NUM_ROWS] for step in range(num_steps)]

    def run() -> None:
        for row in rows:
            envs.step(row, out=slot)

    return run


def writer(write: Any, envs: Cage2VectorEnv, num_steps: int) -> Callable[[], None]:
    """Return a function that writes the outputs of `num_steps` steps with the kernel `write`."""
    slot = make_slot(envs)
    bits = np.random.default_rng(0).integers(0, 1 << 52, envs.num_envs, dtype=np.uint64)

    def run() -> None:
        for _ in range(num_steps):
            write(bits, slot.obs, slot.rewards, slot.terminations, slot.truncations)

    return run


def measure(num_envs: int, env_steps: int, repetitions: int) -> Rates:
    """Return the rates of stepping `num_envs` envs, and of writing as much."""
    num_steps = max(8, env_steps // (num_envs + 200))  # a call costs about what 200 steps do
    actions = np.random.default_rng(0).integers(0, 145, (NUM_ROWS, num_envs))
    two, one = make_envs(num_envs, 2), make_envs(num_envs, 1)
    cases = {
        TWO_THREADS: stepper(two, actions, num_steps),
        ONE_THREAD: stepper(one, actions, num_steps),
        WRITE_PLAINLY: writer(write_plainly, one, num_steps),
        WRITE_BY_TABLE: writer(write_by_table, one, num_steps),
    }
    cases[TWO_THREADS]()  # lets the helper start
    rates = alternate(cases, num_steps * num_envs, repetitions)
    two.close()
    one.close()
    return rates


def report(num_envs: int, rates: Rates) -> list[str]:
    """Lay out one row of the table."""
    row = [f"{num_envs:,}"]
    for name in CASES:
        middle = statistics.median(rates[name])
        spread = (max(rates[name]) - min(rates[name])) / middle
        row.append(f"{middle / 1e6:.2f} ± {spread / 2:.0%}")
    row.append(f"{median_ratio(rates, TWO_THREADS, ONE_THREAD):.2f}")
    row.append(f"{median_ratio(rates, ONE_THREAD, WRITE_PLAINLY):.2f}")
    row.append(f"{median_ratio(rates, ONE_THREAD, WRITE_BY_TABLE):.2f}")
    row.append(f"{1e9 / statistics.median(rates[ONE_THREAD]):.1f}")
    return row


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Steps per second of the CAGE 2 simulator.")
    parser.add_argument("--num-envs", default="1,64,2048,16384,65536,262144")
    parser.add_argument("--env-steps", type=int, default=4_000_000, help="about so many per case")
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    print(machine("numpy", "numba"))
    print(f"Million env-steps per second; median, half the spread, {options.repetitions} rounds.\n")
    header = ["envs", *CASES, "2 threads / 1", "1 / plain writing", "1 / writing by table"]
    header += ["ns per step, 1 thread"]
    rows = [
        report(count, measure(count, options.env_steps, options.repetitions))
        for count in map(int, options.num_envs.split(","))
    ]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
