"""Time of drawing sequences against a plain gather of the same bytes.

    python benchmarks/sequences.py

32 sequences of 80 steps with a burn-in of 40 from 200 000 steps of 16 envs (52 float32 observed, a
state of 128 float32 stored with each step, of which a batch has that of the first one). "gather"
draws nothing: it reads the same columns of the rows of a batch drawn before, from packed rows of
the same size, with NumPy, one index for each. Adds: whole steps of 16 envs with and without
`track_episodes`. One thread.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import cycle
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from measure import Rates, alternate, machine, markdown_table, median_ratio, repeated

from buffers import (
    EpisodicReplayBuffer,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)

NUM_ENVS, OBS_SIZE, STATE_SIZE = 16, 52, 128
BATCH, LENGTH, BURN_IN = 32, 80, 40
EPISODE = 500
DRAWN = ("obs", "next_obs", "actions", "rewards", "terminations", "truncations", "env_ids")


def make(cls: Any, capacity: int, **options: Any) -> Any:
    """Make a buffer of steps with a stored state."""
    spaces = Box(-np.inf, np.inf, (OBS_SIZE,)), Discrete(7)
    states = {"state": Box(-np.inf, np.inf, (STATE_SIZE,))}
    capacity = capacity // NUM_ENVS if cls is PerEnvReplayBuffer else capacity
    return cls(capacity, *spaces, num_envs=NUM_ENVS, seed=0, extra_columns=states, **options)


def step(rng: np.random.Generator, t: int) -> dict[str, np.ndarray]:
    """Make a step of all envs; they end their episodes at different times."""
    obs = np.full((NUM_ENVS, OBS_SIZE), 0.5, np.float32)  # an episode must go on where it was
    over = (t + 31 * np.arange(NUM_ENVS)) % EPISODE == EPISODE - 1
    return {
        "obs": obs, "next_obs": obs, "actions": np.ones(NUM_ENVS, np.int64),
        "rewards": np.ones(NUM_ENVS, np.float32), "terminations": over,
        "truncations": np.zeros(NUM_ENVS, np.bool_),
        "state": rng.random((NUM_ENVS, STATE_SIZE), np.float32),
    }  # fmt: skip


def draws(capacity: int) -> dict[str, Any]:
    """Make the calls to be timed: each draws or gathers one batch."""
    calls: dict[str, Any] = {}
    classes = SharedReplayBuffer, PerEnvReplayBuffer, PrioritizedReplayBuffer, EpisodicReplayBuffer
    for cls in classes:
        is_ring = cls is not EpisodicReplayBuffer
        buffer = make(cls, capacity, **({"track_episodes": True} if is_ring else {}))
        rng = np.random.default_rng(0)
        for t in range(capacity // NUM_ENVS):
            buffer.add(**step(rng, t))
        options = {"burn_in": BURN_IN, "initial_states": "state"}

        def draw(buffer: Any = buffer, options: Any = options) -> None:
            buffer.sample_sequences(BATCH, LENGTH, **options)

        calls[cls.__name__] = draw
        if is_ring:
            batch = buffer.sample_sequences(BATCH, LENGTH, **options)
            views = {name: column.numpy() for name, column in buffer.rows().items()}
            columns, indices = [views[name] for name in DRAWN], batch.indices.numpy().reshape(-1)
            size = len(views["rewards"])

            # Other places each time, as those of one batch would stay in the cache.
            def gather(
                columns: Any = columns, state: Any = views["state"], indices: Any = indices,
                rng: Any = rng, size: int = size,
            ) -> None:  # fmt: skip
                rows = (indices + int(rng.integers(size))) % size
                for column in columns:
                    column[rows]
                state[rows[::LENGTH]]

            calls[f"gather, {cls.__name__}"] = gather
    return calls


def adds(capacity: int) -> dict[str, Any]:
    """Make the calls to be timed: each adds a step of all envs to a full buffer."""
    calls = {}
    for cls in (SharedReplayBuffer, PerEnvReplayBuffer, PrioritizedReplayBuffer):
        for tracks in (False, True):
            buffer, rng = make(cls, capacity, track_episodes=tracks), np.random.default_rng(0)
            steps = [step(rng, t) for t in range(2 * EPISODE)]
            for t in range(capacity // NUM_ENVS):
                buffer.add(**steps[t % len(steps)])
            if tracks:
                buffer.sample_sequences(BATCH, LENGTH, burn_in=BURN_IN)

            source = cycle(steps)

            def add(buffer: Any = buffer, following: Any = source) -> None:
                buffer.add(**next(following))

            calls[cls.__name__ + (", track_episodes" if tracks else "")] = add
    return calls


def timed(calls: dict[str, Any], seconds: float, repetitions: int) -> Rates:
    """Time calls in turn; rates are calls per second."""
    cases, units = {}, {}
    for name, call in calls.items():
        cases[name], units[name] = repeated(call, seconds)
    return alternate(cases, units, repetitions)


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each repetition")
    parser.add_argument("--capacity", type=int, default=200_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("torch", "numpy", "numba"))
    rates = timed(draws(options.capacity), options.seconds, options.repetitions)
    rows = []
    for name in (name for name in rates if not name.startswith("gather")):
        row = [name, f"{BATCH * statistics.median(rates[name]):,.0f}"]
        base = f"gather, {name}"
        ratio = f"{1 / median_ratio(rates, name, base):.2f}" if base in rates else ""
        rows.append([*row, ratio])
    print(markdown_table(["", "sequences/s", "time / gather"], rows))
    rates, rows = timed(adds(options.capacity), options.seconds, options.repetitions), []
    for name in (name for name in rates if "," not in name):
        tracking = f"{name}, track_episodes"
        numbers = [1e6 / statistics.median(rates[case]) for case in (name, tracking)]
        ratio = 1 / median_ratio(rates, tracking, name)
        rows.append([name, *(f"{number:.1f}" for number in numbers), f"{ratio:.2f}"])
    print(markdown_table(["add of 16, us", "plain", "track_episodes", "ratio"], rows))


if __name__ == "__main__":
    main()
