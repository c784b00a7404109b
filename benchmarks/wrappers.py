"""What a wrapper adds to a step of a compiled env, beside a copy of the bytes that it touches.

    python benchmarks/wrappers.py

For each wrapper: the step of the wrapped vector env minus that of the bare one, both into memory
given as `out`, as a share of a copy between two arrays as large as what the wrapper reads and
writes. Observations are float32; FrameStack's are four of them. Gymnasium's vector wrapper of the
same name stands beside, where there is one, around the same envs (it takes no `out`).

The copy is of arrays of which each is half of the bytes touched. Of small batches it is the time of
the calls that is seen, not of the bytes: the last column is what a wrapper costs in microseconds.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import vector as theirs
from measure import machine, markdown_table

import vecenv
from vecenv import wrappers
from vecenv.jit import EnvKernels, JitVectorEnv

ROUNDS = 9
SIZES = [(1024, 4), (1024, 64), (4096, 128)]
STACK = 4


def reset(state: Any, rng: Any) -> None:
    state.number = 0


def step(state: Any, action: Any, rng: Any) -> tuple[float, bool, bool]:
    state.number += 1
    return 0.5 * action, state.number % 200 == 0, False


def observe(state: Any, out: Any) -> None:
    for k in range(out.shape[0]):
        out[k] = state.number + k


def make(num_envs: int, width: int) -> JitVectorEnv:
    kernels = EnvKernels(
        name=f"counter{width}",
        state_dtype=[("number", np.int64)],
        observation_space=Box(-np.inf, np.inf, (width,), np.float32),
        action_space=Discrete(2),
        reset=reset,
        step=step,
        observe=observe,
    )
    return JitVectorEnv(kernels, num_envs, num_threads=1)


def doubled(obs: np.ndarray) -> np.ndarray:
    return obs * np.float32(2)


# Ours, theirs, and the numbers of 4 bytes touched per env with observations of so many.
Case = tuple[Callable[[Any], Any], Callable[[Any], Any] | None, Callable[[int], float]]
CASES: dict[str, Case] = {
    "VecWrapper": (wrappers.VecWrapper, None, lambda width: 0),
    "ClipReward": (
        partial(wrappers.ClipReward, min_reward=-1, max_reward=1),
        None,  # it clips one by one, in milliseconds
        lambda width: 2 * 2,
    ),
    "RecordEpisodeStatistics": (
        wrappers.RecordEpisodeStatistics,
        theirs.RecordEpisodeStatistics,
        lambda width: 2 * 2 + 2 * 2 + 2,
    ),
    "TimeLimit": (partial(wrappers.TimeLimit, max_episode_steps=10**9), None, lambda width: 5),
    "NormalizeReward": (wrappers.NormalizeReward, theirs.NormalizeReward, lambda width: 4 * 2),
    "NormalizeObservation": (
        wrappers.NormalizeObservation,
        theirs.NormalizeObservation,
        lambda width: 3 * width,  # read twice, written once
    ),
    "NormalizeObservation, frozen": (
        lambda envs: _frozen(wrappers.NormalizeObservation(envs)),
        lambda envs: _frozen(theirs.NormalizeObservation(envs)),
        lambda width: 2 * width,
    ),
    "TransformObservation": (
        partial(wrappers.TransformObservation, func=doubled),
        partial(theirs.TransformObservation, func=doubled),
        lambda width: 4 * width,  # the function's result is one more
    ),
    "FrameStack": (
        partial(wrappers.FrameStack, stack_size=STACK),
        None,
        lambda width: 2 * STACK * width,
    ),
}


def _frozen(envs: Any) -> Any:
    envs.update_running_mean = False
    return envs


def slot_of(envs: Any) -> vecenv.StepSlot:
    space, count = envs.single_observation_space, envs.num_envs
    flags = np.zeros((2, count), np.bool_)
    obs = envs.allocate((count, *space.shape), space.dtype)
    return vecenv.StepSlot(obs, np.zeros(count), *flags)


def seconds_of(run: Callable[[], Any], times: int) -> float:
    begin = perf_counter()
    for _ in range(times):
        run()
    return (perf_counter() - begin) / times


def measure(num_envs: int, width: int) -> list[list[str]]:
    actions = np.ones(num_envs, np.int64)
    runs: dict[str, Callable[[], Any]] = {}
    bare = make(num_envs, width)
    bare.reset(seed=1)
    runs["bare"] = partial(bare.step, actions, out=slot_of(bare))
    runs["bare, new arrays"] = partial(bare.step, actions)
    for name, (ours, other, touched) in CASES.items():
        envs = ours(make(num_envs, width))
        envs.reset(seed=1)
        runs[name] = partial(envs.step, actions, out=slot_of(envs))
        if other is not None:
            around = other(make(num_envs, width))
            around.reset(seed=1)
            runs[f"{name} theirs"] = partial(around.step, actions)
        half = max(1, int(touched(width) * num_envs / 2))
        source, target = np.ones(half, np.float32), np.ones(half, np.float32)
        runs[f"{name} copy"] = partial(np.copyto, target, source)
    times = 300 if width < 100 else 60
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + 1):
        for name, run in runs.items():
            spent = seconds_of(run, times)
            if number:
                found[name].append(spent * 1e6)
    gc.collect()
    rows = []
    for name, (_, other, touched) in CASES.items():
        added = [a - b for a, b in zip(found[name], found["bare"], strict=True)]
        copy = statistics.median(found[f"{name} copy"])
        row = [f"{num_envs} × {width}", name, f"{statistics.median(added):.1f}"]
        row.append(f"{copy:.1f}" if touched(width) else "–")
        row.append(f"{statistics.median(added) / copy:.1f}" if touched(width) else "–")
        beside = "–"
        if other is not None:
            base = found["bare, new arrays"]
            extra = [a - b for a, b in zip(found[f"{name} theirs"], base, strict=True)]
            beside = f"{statistics.median(extra):.1f}"
        rows.append([*row, beside])
    return rows


def main() -> None:
    print(machine("numpy", "numba", "gymnasium"))
    header = [
        "envs × numbers",
        "wrapper",
        "added, µs",
        "copy, µs",
        "added / copy",
        "Gymnasium's, µs",
    ]
    for size in SIZES:
        print(markdown_table(header, measure(*size)), flush=True)


if __name__ == "__main__":
    main()
