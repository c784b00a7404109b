"""Time of drawing pairs from episodes against the usual ways.

    python benchmarks/episodic.py

Pairs: 256 steps and for each a later one, geometrically distributed up to the second next boundary,
from 1 000 episodes of 200 steps (52 float32 observed) with five boundaries each, into torch
tensors. "loop" goes through the batch item by item; "table" keeps the boundaries of each episode in
a table 100 wide, looks up the rows drawn, masks those before the step and sorts. All return
observations, later observations, offsets, actions and rewards; `sample` returns flags besides.
Columns: observations and later ones only, at two sizes, against two `index_select` of a plain table
of observations, rows of both given. Growth: the same call for longer episodes and more boundaries
at the same number of steps. One thread.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Callable

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from measure import Rates, alternate, machine, markdown_table, median_ratio, repeated

from buffers import EpisodicReplayBuffer

BATCH, DISCOUNT, OBS_SIZE = 256, 0.95, 52
TABLE_WIDTH = 100  # a table cannot know how many boundaries there will be
SAMPLE, REUSED, LOOP = "sample", "sample, out=", "loop"
TABLE, TORCH_TABLE = "table, mask, sort (NumPy)", "table, mask, sort (torch)"
TORCH = "torch path"


class Episodes:
    """The same episodes in plain arrays, with the two usual ways to draw from them."""

    def __init__(self, num_episodes: int, length: int, num_boundaries: int):
        rng = np.random.default_rng(0)
        shape = (num_episodes, length)
        self.rng = rng
        self.obs = rng.standard_normal((num_episodes, length + 1, OBS_SIZE), np.float32)
        self.actions = rng.integers(0, 7, shape)
        self.rewards = rng.standard_normal(shape, np.float32)
        places = [rng.choice(length, num_boundaries, replace=False) for _ in range(num_episodes)]
        self.table = np.sort(np.array(places), axis=1)
        self.lists = self.table.tolist()  # Python's own numbers compare faster
        self.random = random.Random(0).random
        self.wide = np.full((num_episodes, TABLE_WIDTH), -1)
        self.wide[:, :num_boundaries] = self.table
        self.tensors = [torch.from_numpy(x) for x in (self.obs, self.actions, self.rewards)]
        self.wide_tensor = torch.from_numpy(self.wide)
        self.length = length

    def fill(self, buffer: EpisodicReplayBuffer) -> EpisodicReplayBuffer:
        for obs, actions, rewards, places in zip(
            self.obs, self.actions, self.rewards, self.table, strict=True
        ):
            flags = np.zeros(self.length, np.bool_)
            flags[places] = True
            buffer.add_episode(
                {"obs": obs, "actions": actions, "rewards": rewards, "boundaries": flags}
            )
        return buffer

    def draw_by_loop(self) -> list[torch.Tensor]:
        obs, future_obs, offsets, actions, rewards = [], [], [], [], []
        while len(obs) < BATCH:
            e = int(self.random() * len(self.obs))
            t = int(self.random() * self.length)
            following = [place for place in self.lists[e] if place >= t][:2]
            bound = following[-1] if following else self.length - 1
            if bound == t:
                continue
            mass = 1 - DISCOUNT ** (bound - t)
            offset = 1 + int(math.log(1 - self.random() * mass) / math.log(DISCOUNT))
            obs.append(self.obs[e, t])
            future_obs.append(self.obs[e, t + offset])
            offsets.append(offset)
            actions.append(self.actions[e, t])
            rewards.append(self.rewards[e, t])
        return [torch.from_numpy(np.array(x)) for x in (obs, future_obs, offsets, actions, rewards)]

    def draw_by_torch_table(self) -> list[torch.Tensor]:
        e = torch.randint(len(self.obs), (BATCH,))
        t = torch.randint(self.length - 1, (BATCH,))
        last = self.length - 1
        rows = self.wide_tensor[e]
        ahead = torch.where(rows >= t[:, None], rows, self.length).sort(dim=1).values[:, :2]
        bound = torch.where(ahead[:, 1] < self.length, ahead[:, 1], ahead[:, 0])
        room = (torch.where(bound < self.length, bound, last) - t).clamp(min=1)
        mass = 1 - DISCOUNT ** room.double()
        uniforms = torch.rand(BATCH, dtype=torch.float64)
        offsets = 1 + ((1 - uniforms * mass).log() / math.log(DISCOUNT)).long()
        obs, actions, rewards = self.tensors
        return [obs[e, t], obs[e, t + offsets], offsets, actions[e, t], rewards[e, t]]

    def draw_by_table(self) -> list[torch.Tensor]:
        e = self.rng.integers(len(self.obs), size=BATCH)
        t = self.rng.integers(self.length - 1, size=BATCH)
        last = self.length - 1
        ahead = np.where(self.wide[e] >= t[:, None], self.wide[e], self.length)
        ahead = np.sort(ahead, axis=1)[:, :2]
        bound = np.where(ahead[:, 1] < self.length, ahead[:, 1], ahead[:, 0])
        bound = np.where(bound < self.length, bound, last)
        room = np.maximum(bound - t, 1)
        mass = 1 - DISCOUNT**room
        offsets = 1 + (np.log(1 - self.rng.random(BATCH) * mass) / np.log(DISCOUNT)).astype(int)
        found = (
            self.obs[e, t], self.obs[e, t + offsets], offsets, self.actions[e, t],
            self.rewards[e, t],
        )  # fmt: skip
        return [torch.from_numpy(x) for x in found]


def make_buffer(num_steps: int, **options) -> EpisodicReplayBuffer:
    return EpisodicReplayBuffer(
        num_steps, Box(-1, 1, (OBS_SIZE,)), Discrete(7), max_episodes=1000, seed=0, **options
    )


def measure(cases: dict[str, Callable[[], object]], repetitions: int, seconds: float) -> Rates:
    many = {name: repeated(run, seconds) for name, run in cases.items()}
    runs = {name: run for name, (run, _) in many.items()}
    return alternate(runs, {name: count for name, (_, count) in many.items()}, repetitions)


def report(title: str, rates: Rates, base: str) -> str:
    rows = []
    for name, per_second in rates.items():
        times = sorted(1e6 / rate for rate in per_second)
        ratio = f"{1 / median_ratio(rates, name, base):.2f}"
        spread = f"{times[0]:.1f} to {times[-1]:.1f}"
        rows.append([name, f"{statistics.median(times):.1f}", spread, ratio])
    return markdown_table([title, "µs", "spread", f"time / {base}"], rows)


def pair_cases() -> dict[str, Callable[[], object]]:
    episodes = Episodes(1000, 200, 5)
    buffer = episodes.fill(make_buffer(200_000))
    staged = episodes.fill(make_buffer(200_000, staged=True))
    return {
        SAMPLE: lambda: buffer.sample(BATCH, DISCOUNT),
        TORCH: lambda: staged.sample(BATCH, DISCOUNT),
        TABLE: episodes.draw_by_table,
        TORCH_TABLE: episodes.draw_by_torch_table,
        LOOP: episodes.draw_by_loop,
    }


def column_cases(size: int) -> dict[str, Callable[[], object]]:
    episodes = Episodes(1000, 200, 5)
    buffer, chosen = episodes.fill(make_buffer(200_000)), ("obs", "future_obs")
    table = torch.from_numpy(episodes.obs.reshape(-1, OBS_SIZE))
    steps = itertools.cycle(torch.randint(len(table) - 60, (2_000_000 // size, size)))
    rooms = itertools.cycle(torch.randint(1, 60, (1_999_000 // size, size)))

    def gather() -> list[torch.Tensor]:
        rows = next(steps)
        return [table.index_select(0, rows), table.index_select(0, rows + next(rooms))]

    return {
        "gather": gather,
        "columns": lambda: buffer.sample(size, DISCOUNT, columns=chosen),
        "whole": lambda: buffer.sample(size, DISCOUNT),
    }


def growth_cases() -> dict[str, Callable[[], object]]:
    cases = {}
    for num_episodes, length, boundaries in ((1000, 200, 5), (1000, 200, 80), (20, 10_000, 5)):
        buffer = Episodes(num_episodes, length, boundaries).fill(make_buffer(200_000))
        name = f"{num_episodes} x {length}, {boundaries} boundaries"
        cases[name] = lambda buffer=buffer: buffer.sample(BATCH, DISCOUNT)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description="Time episodic sampling.")
    parser.add_argument("--repetitions", type=int, default=15, help="rounds, after one to warm up")
    parser.add_argument("--seconds", type=float, default=0.02, help="time of a case in one round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("numpy", "numba", "torch"))
    print(f"median and spread over {options.repetitions} alternating rounds")
    arguments = options.repetitions, options.seconds
    print("\n" + report(f"pairs, B = {BATCH}", measure(pair_cases(), *arguments), SAMPLE))
    for size in (BATCH, 4096):
        rates = measure(column_cases(size), *arguments)
        print("\n" + report(f"two columns, B = {size}", rates, "gather"))
    cases = growth_cases()
    print("\n" + report("growth", measure(cases, *arguments), next(iter(cases))))


if __name__ == "__main__":
    main()
