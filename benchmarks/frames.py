"""Frames stored once: memory of pictures as Atari's, and time of draws and adds.

    python benchmarks/frames.py

A transition is a stack of four frames of 84 x 84 uint8 and the next one, an int64 action, a float32
reward and two flags; eight envs, episodes of 500 steps on average. "gather" is one `index_select`
of as many rows of 2 x 28 224 bytes, from a table of stacks, the indices being given; "copy" moves
as many bytes in one piece. stable-baselines3, if it is installed, has `optimize_memory_usage`: each
stack once per row. Ours are full, and hold random pictures; a sample ends with torch tensors, "out"
in those of the batch before. One thread.

In "add", eight rows are added, one of each env.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from measure import machine, markdown_table
from replay import installed_peers, repeat, report

from buffers import PrioritizedReplayBuffer, SharedReplayBuffer

STACKS = Box(0, 255, (4, 84, 84), np.uint8)
ACTIONS = Discrete(6)
NUM_ENVS = 8
MILLION = 1_000_000
Columns = dict[str, np.ndarray]


def make(capacity: int, kind: Any = SharedReplayBuffer, **options: Any) -> Any:
    settings: Any = {"num_envs": NUM_ENVS, "seed": 0, "frame_stack": 4, **options}
    return kind(capacity, STACKS, ACTIONS, **settings)


def steps(seed: int = 0) -> Iterator[Columns]:
    """Steps of all envs without end, each frame another; the arrays are used again."""
    rng = np.random.default_rng(seed)
    pool = rng.integers(0, 256, (509, *STACKS.shape[1:]), np.uint8)
    over = np.zeros(NUM_ENVS, np.bool_)
    stacks = np.repeat(pool[:NUM_ENVS, None], 4, axis=1)
    for t in itertools.count():
        following = np.empty_like(stacks)
        following[:, :-1] = stacks[:, 1:]
        following[:, -1] = pool[(np.arange(NUM_ENVS) * 61 + t) % len(pool)]
        over = rng.random((2, NUM_ENVS)) < 0.001
        yield {
            "obs": stacks,
            "next_obs": following,
            "actions": rng.integers(0, 6, NUM_ENVS),
            "rewards": rng.standard_normal(NUM_ENVS, np.float32),
            "terminations": over[0],
            "truncations": over[1],
        }
        is_over = over.any(0)
        stacks = following
        if is_over.any():
            stacks = following.copy()
            stacks[is_over] = following[is_over, -1:]


def fill(add: Callable[[Columns], object], rows: int) -> None:
    for columns in itertools.islice(steps(), -(-rows // NUM_ENVS)):
        add(columns)


def filled(capacity: int, kind: Any = SharedReplayBuffer, **options: Any) -> Any:
    buffer = make(capacity, kind, **options)
    fill(lambda columns: buffer.add(**columns), capacity)
    return buffer


def sb3(capacity: int) -> Any:
    """stable-baselines3's, full, or None if it is not installed."""
    try:
        from stable_baselines3.common import buffers  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    buffer = buffers.ReplayBuffer(
        capacity, STACKS, ACTIONS, "cpu", n_envs=NUM_ENVS,
        optimize_memory_usage=True, handle_timeout_termination=False,
    )  # fmt: skip
    infos: list[dict[str, Any]] = [{} for _ in range(NUM_ENVS)]
    names = "obs", "next_obs", "actions", "rewards", "terminations"
    fill(lambda columns: buffer.add(*[columns[name] for name in names], infos), capacity)
    return buffer


def show_memory(capacity: int) -> None:
    buffer, rows = filled(capacity), []
    million = SharedReplayBuffer.nbytes_for(
        MILLION, STACKS, ACTIONS, num_envs=NUM_ENVS, frame_stack=4
    )
    stacked = SharedReplayBuffer.nbytes_for(MILLION, STACKS, ACTIONS)
    once = SharedReplayBuffer.nbytes_for(
        MILLION, STACKS, ACTIONS, num_envs=NUM_ENVS, store_next=False
    )
    gigabytes = buffer.nbytes / 1e9
    rows.append([f"frames once, {capacity} held, measured", f"{gigabytes:.3f}"])
    rows.append(["the same for 1 000 000", f"{gigabytes * MILLION / capacity:.3f}"])
    for name, size in (("frames once", million), ("stacks once", once), ("stacks twice", stacked)):
        rows.append([f"{name}, 1 000 000, computed", f"{size / 1e9:.3f}"])
    print(f"\n{markdown_table(['memory', 'GB'], rows)}", flush=True)


def gather_rows(table: torch.Tensor, size: int) -> Callable[[], None]:
    """Gather rows, other ones each time, into memory of the caller."""
    indices = itertools.cycle(torch.randint(len(table), (400, size)))
    target = torch.empty((size, table.shape[1]), dtype=torch.uint8)

    def gather() -> None:
        torch.index_select(table, 0, next(indices), out=target)

    return gather


def time_draws(capacity: int, repetitions: int) -> None:
    # A buffer of stacks has the table; what is in it makes no difference to a copy.
    num_bytes = 2 * int(np.prod(STACKS.shape))
    table = torch.ones((capacity, num_bytes), dtype=torch.uint8)
    uniform = filled(capacity)
    others = {
        "prioritized": filled(capacity, PrioritizedReplayBuffer),
        "three steps": filled(capacity, n_step=3, gamma=0.99),
    }
    peer = sb3(capacity)
    for size in (32, 256):
        target = torch.empty((size, num_bytes), dtype=torch.uint8)
        cases = {
            "out": repeat(partial(uniform.sample, size, uniform.new_batch(size))),
            "fresh": repeat(partial(uniform.sample, size)),
            "gather": repeat(gather_rows(table, size)),
            "copy": repeat(partial(target.copy_, table[:size])),
        }
        for name, buffer in others.items():
            cases[f"{name}, out"] = repeat(partial(buffer.sample, size, buffer.new_batch(size)))
        if peer is not None:
            cases["stable-baselines3"] = repeat(partial(peer.sample, size))
        report(f"sample {size} of {capacity}", cases, "out", repetitions)


def time_adds(repetitions: int) -> None:
    capacity = 20_000
    given = list(itertools.islice(steps(), 400))

    def adder(buffer: Any, columns: list[Columns]) -> Callable[[], None]:
        turns = itertools.cycle(enumerate(columns))

        def add() -> None:
            place, step = next(turns)
            if place == 0:  # those that follow the last begin again
                buffer.cut_episodes()
            buffer.add(**step)

        return add

    cases = {
        "stacks": repeat(adder(filled(capacity), given)),
        "stacks stored twice": repeat(adder(filled(capacity // 4, frame_stack=None), given)),
    }
    if (peer := sb3(capacity)) is not None:
        infos: list[dict[str, Any]] = [{} for _ in range(NUM_ENVS)]
        names = "obs", "next_obs", "actions", "rewards", "terminations"
        turns = itertools.cycle(given)
        cases["stable-baselines3"] = repeat(
            lambda: peer.add(*[step[name] for step in [next(turns)] for name in names], infos)
        )
    report("add 8", cases, "stacks", repetitions)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure replay of frames stored once.")
    parser.add_argument("--capacity", type=int, default=100_000, help="transitions held")
    parser.add_argument("--draws", type=int, default=50_000, help="transitions drawn from")
    parser.add_argument("--repetitions", type=int, default=11, help="rounds, after one to warm up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("numpy", "numba", "torch"), installed_peers(), sep="\n")
    show_memory(options.capacity)
    time_draws(options.draws, options.repetitions)
    time_adds(options.repetitions)


if __name__ == "__main__":
    main()
