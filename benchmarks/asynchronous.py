"""AsyncVectorEnv beside SyncVectorEnv, Gymnasium's classes, a bare loop and two loose processes.

    python benchmarks/asynchronous.py [null busy pixels sleep cartpole start]

One step is one `env.step` of one env; envs here never end an episode, except CartPole, whose reset
steps are counted for all alike. Vector envs run with copy=False. "L2" is what two independent
processes reach side by side in the same run, each with half of the envs in a SyncVectorEnv.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from async_envs import (
    BusyEnv,
    LooseProcesses,
    NullEnv,
    PixelEnv,
    SleepyEnv,
    calibrate,
    loop_over,
    threads_over,
)
from measure import Rates, alternate, machine, markdown_table, median_ratio

from vecenv import AsyncVectorEnv, SyncVectorEnv, make_vec

L2, LOOP = "L2", "bare loop"
GYM_ASYNC, GYM_SYNC, SYNC = "gymnasium async", "gymnasium sync", "vecenv sync"
WORKERS, CALLER = "workers", "caller + workers"


def sync_steps(make_env: Callable[[], gym.Env], num_envs: int) -> Callable[[int], None]:
    """Return a function that steps a SyncVectorEnv so many times."""
    envs = SyncVectorEnv([make_env] * num_envs, copy=False)
    envs.reset(seed=0)
    actions = np.zeros(num_envs, np.int64)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            envs.step(actions)

    return run


def measure(
    make_env: Callable[[], gym.Env],
    num_envs: int,
    env_steps: int,
    repetitions: int,
    read: Callable[[Any], Any] = lambda envs: None,
    without: tuple[str, ...] = (),
) -> Rates:
    """Return the rates of all ways to step `num_envs` envs; `read` is called after every step."""
    fns = [make_env] * num_envs
    makers: dict[str, Callable[[], Any]] = {
        GYM_ASYNC: lambda: gym.vector.AsyncVectorEnv(fns, copy=False),
        GYM_SYNC: lambda: gym.vector.SyncVectorEnv(fns, copy=False),
        SYNC: lambda: SyncVectorEnv(fns, copy=False),
        WORKERS: lambda: AsyncVectorEnv(fns, copy=False),
        CALLER: lambda: AsyncVectorEnv(fns, copy=False, caller_steps=True),
    }
    pools = {name: make() for name, make in makers.items() if name not in without}
    loose = LooseProcesses(lambda half: sync_steps(make_env, half), num_envs)
    loop = loop_over(make_env, num_envs)
    space = next(iter(pools.values())).action_space
    space.seed(0)
    actions = space.sample()
    num_steps = max(2, env_steps // num_envs)

    def run(envs: Any, steps: int) -> None:
        for _ in range(steps):
            envs.step(actions)
            read(envs)

    cases: dict[str, Callable[[], object]] = {
        L2: lambda: loose.run(num_steps),
        LOOP: lambda: loop(num_steps),
    }
    units = dict.fromkeys(cases, num_steps * num_envs)
    for name, envs in pools.items():
        envs.reset(seed=0)
        steps = max(2, num_steps // (100 if name == GYM_ASYNC and env_steps > 10_000 else 1))
        cases[name] = lambda envs=envs, steps=steps: run(envs, steps)
        units[name] = steps * num_envs
    try:
        return alternate(cases, units, repetitions)
    finally:
        loose.close()
        for envs in pools.values():
            envs.close()


def row(label: str, rates: Rates) -> list[str]:
    """Lay out medians, and the better of ours against the others."""
    ours = max((WORKERS, CALLER), key=lambda name: statistics.median(rates[name]))
    columns = [L2, LOOP, GYM_ASYNC, GYM_SYNC, SYNC, WORKERS, CALLER]
    cells = [f"{statistics.median(rates[c]) / 1e3:,.1f}" if c in rates else "" for c in columns]
    ratios = [
        f"{median_ratio(rates, ours, base):.2f}" if base in rates else ""
        for base in (L2, GYM_ASYNC, GYM_SYNC, SYNC)
    ]
    return [label, *cells, *ratios]


HEADER = [
    "thousand env steps per second",
    L2,
    LOOP,
    GYM_ASYNC,
    GYM_SYNC,
    SYNC,
    WORKERS,
    CALLER,
    "ours/L2",
    "/gymnasium async",
    "/gymnasium sync",
    "/vecenv sync",
]


def bench_null(options: argparse.Namespace) -> None:
    """Do-nothing envs, bare and with the wrappers that `gymnasium.make` puts around them."""
    gym.register(
        "Null-v0", lambda **_: NullEnv(), max_episode_steps=10**9, disable_env_checker=True
    )
    kinds: dict[str, Callable[[], gym.Env]] = {
        "null": NullEnv,
        "null, by gymnasium.make": lambda: gym.make("Null-v0"),
    }
    rows = [
        row(f"{name}, {n}", measure(make, n, options.env_steps, options.repetitions))
        for name, make in kinds.items()
        for n in (8, 64, 512)
    ]
    print(markdown_table(HEADER, rows))


def bench_pixels(options: argparse.Namespace) -> None:
    """Observations of 28 kB."""
    rates = measure(PixelEnv, 64, options.env_steps // 4, options.repetitions)
    print(markdown_table(HEADER, [row("84x84x4 uint8, 64", rates)]))


def bench_busy(options: argparse.Namespace) -> None:
    """Envs that compute, with their true state read after every step."""
    calibrate()

    def read(envs: Any) -> Any:
        published = getattr(envs, "published", None)
        return published["true_state"] if published else envs.get_attr("true_state")

    num_envs = 200
    rates = measure(
        BusyEnv, num_envs, 10 * num_envs, max(3, options.repetitions // 2), read, (GYM_SYNC, SYNC)
    )
    print(markdown_table(HEADER, [row(f"0.2 ms, {num_envs}, true state", rates)]))
    kinds = {"one process per env": gym.vector.AsyncVectorEnv, "ours": AsyncVectorEnv}
    memory = {name: added_memory(kind, num_envs) for name, kind in kinds.items()}
    print(f"\nAdditional memory (proportional set size): {memory}")


def added_memory(kind: Any, num_envs: int) -> int:
    """Return the bytes by which this process and its children grow with a vector env of BusyEnv."""
    before = memory_bytes()
    envs = kind([BusyEnv] * num_envs, copy=False)
    envs.reset()
    envs.step(np.zeros(num_envs, np.int64))
    added = memory_bytes() - before
    envs.close()
    return added


def memory_bytes() -> int:
    """Return the proportional set size of this process and its children."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        pids += [int(pid) for pid in file.read().split()]
    total = 0
    for pid in set(pids):
        with open(f"/proc/{pid}/smaps_rollup") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return total * 1024


def bench_sleep(options: argparse.Namespace) -> None:
    """Envs that wait with a heavy tail: first-ready against the barrier, and bare threads."""
    num_envs, seconds = 64, 1.0
    fns = [SleepyEnv] * num_envs
    loose = LooseProcesses(lambda half: threads_over(SleepyEnv, half), num_envs)
    ours = functools.partial(AsyncVectorEnv, fns, copy=False, num_workers=num_envs)
    pools = {
        "first-ready": ours(),
        "first-ready, 4 workers": ours(num_workers=4),
        "barrier": ours(),
        "gymnasium": gym.vector.AsyncVectorEnv(fns, copy=False),
    }
    actions = np.zeros(num_envs, np.int64)
    for envs in pools.values():
        envs.reset(seed=0)
        for _ in range(5):
            envs.step(actions)

    def first_ready(ready: Any) -> int:
        total = 0
        ready.send(actions)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            batch = ready.recv(options.min_envs)
            total += len(batch.env_ids)
            ready.send(actions[: len(batch.env_ids)], batch.env_ids)
        ready.recv()
        return total

    def steps(envs: Any) -> int:
        total, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            envs.step(actions)
            total += num_envs
        return total

    rates: Rates = {name: [] for name in ("bare threads", *pools)}
    for _ in range(options.repetitions):
        rates["bare threads"].append(sum(loose.run(seconds)) / seconds)
        for name, envs in pools.items():
            count = first_ready if name.startswith("first-ready") else steps
            rates[name].append(count(envs) / seconds)
    ideal = num_envs / 0.002
    rows = [
        [name, f"{statistics.median(rate):,.0f}", f"{statistics.median(rate) / ideal:.0%}"]
        for name, rate in rates.items()
    ]
    print(markdown_table(["64 sleeping envs", "steps/s", "of 64 / mean sleep"], rows))
    loose.close()
    for envs in pools.values():
        envs.close()


def bench_cartpole(options: argparse.Namespace) -> None:
    """CartPole with the backend that "auto" picks."""
    rows = []
    for num_envs in (1, 8, 64, 512):
        begin = time.perf_counter()
        auto = make_vec("CartPole-v1", num_envs, backend="auto", copy=False)
        made_s = time.perf_counter() - begin
        envs = {"auto": auto, "sync": make_vec("CartPole-v1", num_envs, backend="sync", copy=False)}
        actions = np.random.default_rng(0).integers(0, 2, num_envs)
        for pool in envs.values():
            pool.reset(seed=0)
        num_steps = max(2, 20_000 // num_envs)

        def run(pool: Any, num_steps: int = num_steps, actions: np.ndarray = actions) -> None:
            for _ in range(num_steps):
                pool.step(actions)

        cases = {name: lambda pool=pool: run(pool) for name, pool in envs.items()}
        rates = alternate(cases, num_steps * num_envs, options.repetitions)
        ratio = median_ratio(rates, "auto", "sync")
        rows.append([str(num_envs), type(auto).__name__, f"{ratio:.2f}", f"{made_s:.2f}"])
        for pool in envs.values():
            pool.close()
    print(markdown_table(["CartPole envs", "chosen", "auto/sync", "s to make"], rows))


def bench_start(options: argparse.Namespace) -> None:
    """Seconds until 64 envs have been made and reset."""
    fns = [lambda: gym.make("CartPole-v1")] * 64
    rows = []
    for context in ("fork", "spawn"):
        seconds: dict[str, list[float]] = {"gymnasium": [], "ours": []}
        for _ in range(3 if context == "fork" else 1):
            for name, kind in (("gymnasium", gym.vector.AsyncVectorEnv), ("ours", AsyncVectorEnv)):
                begin = time.perf_counter()
                envs: Any = kind(fns, context=context)
                envs.reset(seed=0)
                seconds[name].append(time.perf_counter() - begin)
                envs.close()
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        ratio = medians["ours"] / medians["gymnasium"]
        rows.append(
            [context, *[f"{medians[n]:.2f}" for n in ("gymnasium", "ours")], f"{ratio:.2f}"]
        )
    print(markdown_table(["start of 64 envs, s", "gymnasium", "ours", "ours/gymnasium"], rows))


BENCHES = {
    "null": bench_null,
    "busy": bench_busy,
    "pixels": bench_pixels,
    "sleep": bench_sleep,
    "cartpole": bench_cartpole,
    "start": bench_start,
}


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description="AsyncVectorEnv beside its peers.")
    parser.add_argument("benches", nargs="*", default=list(BENCHES), help=f"of {list(BENCHES)}")
    parser.add_argument("--env-steps", type=int, default=200_000, help="env steps per repetition")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--min-envs", type=int, default=1, help="of recv, for the sleeping envs")
    options = parser.parse_args()
    print(machine("gymnasium", "numpy"), end="\n\n")
    for name in options.benches:
        BENCHES[name](options)
        print(flush=True)


if __name__ == "__main__":
    main()
