"""A learner's draws from memory that other processes write to, against drawing alone.

    python benchmarks/shared_replay.py --realtime

Two writers, processes of their own, add rows for a quarter of a core each: they sleep whenever
their processor time exceeds a quarter of the time that passed. In turn they are let go and stopped;
the learner draws meanwhile, and its own processor time per draw is compared. Where the rows are as
many as fit, every add overwrites the oldest. A row is 448 bytes: two observations of 52 float32.

Compared beside: the same draws from a SharedReplayBuffer, in memory of this process; adds of a
writer; and what two busy processes cost whatever they write to: "elsewhere" they add as much to
another buffer.

With --realtime, which needs rights, the learner has the first core for itself while it is measured,
and the writers come first on the second: other programs on the machine interrupt neither.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from measure import machine, markdown_table

from buffers import MultiprocessReplayBuffer, ReplayWriter, SharedReplayBuffer

SPACES = Box(-1, 1, (52,)), Discrete(7)
SHARE = 0.25  # of a core, that each writer takes
BURST = 0.005  # seconds of processor time between two sleeps of a writer


def columns_for(count: int) -> dict[str, np.ndarray]:
    rng, flags = np.random.default_rng(0), np.zeros(count, np.bool_)
    obs = rng.random((2, count, 52)).astype(np.float32)
    return {
        "obs": obs[0], "next_obs": obs[1], "actions": rng.integers(0, 7, count),
        "rewards": rng.random(count), "terminations": flags, "truncations": flags,
    }  # fmt: skip


@contextlib.contextmanager
def first_on(core: int | None) -> Iterator[None]:
    """Let this process run on that core before all others; None changes nothing."""
    if core is None:
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[core]})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(0, cores)


def write(writer: ReplayWriter, count: int, core: int | None, runs: Any, report: Any) -> None:
    """Add `count` rows at a time while `runs` is set; tell how many, and of what processor time."""
    with first_on(core):
        write_on(writer, count, runs, report)


def write_on(writer: ReplayWriter, count: int, runs: Any, report: Any) -> None:
    """The same, on whatever core."""
    columns = columns_for(count)
    writer.add(**columns)
    report.put((0, 0.0, 0.0))
    while True:
        if not runs.wait(600):
            return
        begin, used, added = time.monotonic(), time.process_time(), 0
        while runs.is_set():
            busy = time.process_time()
            while time.process_time() - busy < BURST:
                writer.add(**columns)
                added += count
            ahead = (time.process_time() - used) / SHARE - (time.monotonic() - begin)
            if ahead > 0:
                time.sleep(ahead)
        seconds = time.monotonic() - begin
        report.put((added, time.process_time() - used, seconds))


def learner_us(buffer: Any, size: int, seconds: float, core: int | None) -> float:
    """Processor time of this process per draw."""
    batch, draws = buffer.sample(size), 0
    with first_on(core):
        begin, used = time.perf_counter(), time.process_time()
        while time.perf_counter() - begin < seconds:
            for _ in range(50):
                buffer.sample(size, batch)
            draws += 50
        return 1e6 * (time.process_time() - used) / draws


class Writers:
    """Two processes that can be let go and stopped."""

    def __init__(self, buffer: MultiprocessReplayBuffer, count: int, core: int | None):
        context = multiprocessing.get_context("spawn")
        self.runs, self.report = context.Event(), context.Queue()
        self.processes = [
            context.Process(
                target=write, args=(buffer.writer(), count, core, self.runs, self.report)
            )
            for _ in range(2)
        ]
        for process in self.processes:
            process.start()
        self.told()

    def told(self) -> list[tuple[int, float, float]]:
        return [self.report.get(timeout=120) for _ in self.processes]

    def stop(self) -> list[tuple[int, float, float]]:
        self.runs.clear()
        return self.told()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


def full(capacity: int) -> tuple[MultiprocessReplayBuffer, MultiprocessReplayBuffer, Any]:
    """Two buffers for writers, and one in memory of this process; all have as much as fits."""
    columns = columns_for(capacity // 100)
    shared, other = (
        MultiprocessReplayBuffer(capacity, *SPACES, num_writers=2, seed=0) for _ in range(2)
    )
    private = SharedReplayBuffer(capacity, *SPACES, seed=0)
    for buffer in (shared, other):
        for index in range(2):
            with buffer.writer(index) as writer:
                for _ in range(50):
                    writer.add(**columns)
    for _ in range(100):
        private.add(**columns)
    return shared, other, private


def measure(size: int, count: int, options: argparse.Namespace) -> list[str]:
    shared, other, private = full(options.capacity)
    cores = (0, 1) if options.realtime else (None, None)
    everybody = {
        name: Writers(b, count, cores[1]) for name, b in (("with", shared), ("elsewhere", other))
    }
    times: dict[str, list[float]] = {name: [] for name in ("alone", "private", *everybody)}
    added, shares = [], []
    for repetition in range(options.rounds + 1):
        found = {"alone": learner_us(shared, size, options.seconds, cores[0])}
        found["private"] = learner_us(private, size, options.seconds, cores[0])
        for name, writers in everybody.items():
            writers.runs.set()
            found[name] = learner_us(shared, size, options.seconds, cores[0])
            told = writers.stop()
            if repetition and name == "with":
                added.append(sum(number / passed for number, _, passed in told))
                shares += [used / passed for _, used, passed in told]
        if repetition:
            for name, value in found.items():
                times[name].append(value)
    for writers in everybody.values():
        writers.end()
    shared.close()
    other.close()

    def ratio(name: str, base: str = "alone") -> str:
        each = [a / b for a, b in zip(times[name], times[base], strict=True)]
        low, *_, high = sorted(each)
        return f"{statistics.median(each):.2f} ({low:.2f} to {high:.2f})"

    return [
        str(size), str(count), f"{statistics.median(times['alone']):.1f}",
        f"{statistics.median(times['with']):.1f}", ratio("with"), ratio("elsewhere"),
        ratio("alone", "private"), f"{statistics.median(added) / 1e3:.0f}",
        f"{statistics.median(shares):.2f}",
    ]  # fmt: skip


def add_us(count: int, rounds: int) -> list[str]:
    """Adds of a writer, and of a buffer in memory."""
    shared = MultiprocessReplayBuffer(100_000, *SPACES, num_writers=1, seed=0)
    targets: dict[str, Any] = {
        "writer": shared.writer(),
        "memory": SharedReplayBuffer(100_000, *SPACES),
    }
    columns, times = columns_for(count), {name: [] for name in targets}
    for _ in range(rounds + 1):
        for name, target in targets.items():
            number = max(1, 20_000 // count)
            begin = time.perf_counter()
            for _ in range(number):
                target.add(**columns)
            times[name].append(1e6 * (time.perf_counter() - begin) / number)
    writer, memory = (statistics.median(times[name][1:]) for name in targets)
    shared.close()
    return [str(count), f"{writer:.2f}", f"{memory:.2f}", f"{writer / memory:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each round and case")
    parser.add_argument("--capacity", type=int, default=500_000)
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--draws", type=int, nargs="*", default=[256, 4096])
    parser.add_argument("--adds", type=int, nargs="*", default=[1, 8, 256], help="rows of an add")
    options = parser.parse_args()
    print(machine("numpy", "numba", "torch"))
    rows = [measure(size, count, options) for size in options.draws for count in options.adds]
    titles = [
        "draw", "rows per add", "alone, µs", "with writers, µs", "with / alone",
        "writers elsewhere / alone", "alone / memory of one process", "added, 1000 rows/s",
        "cores per writer",
    ]  # fmt: skip
    print(markdown_table(titles, rows))
    adds = [add_us(count, options.rounds) for count in (1, 8, 2048)]
    print(markdown_table(["rows per add", "writer, µs", "memory of one process, µs", ""], adds))


if __name__ == "__main__":
    main()
