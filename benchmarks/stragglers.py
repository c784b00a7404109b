"""64 envs that wait for very different times: stepped all at once, and first-ready.

    python benchmarks/stragglers.py --picture docs/stragglers.png

Prints the timing report of both, and draws what each env did for a while: with `step` everybody
waits for the slowest, with `send` and `recv` nobody does. `--trace FOLDER` writes the timelines for
Perfetto.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from vecenv import AsyncVectorEnv
from vecenv.synthetic import SyntheticEnv
from vecenv.timing.recording import Recording

NUM_ENVS, BATCH = 64, 16
SHOWN_MS = 150.0
BARRIER, FIRST_READY = "step: everybody waits for the slowest", "send and recv: first come"


def make_envs() -> AsyncVectorEnv:
    """Return envs whose steps take 2 ms on average, one in a hundred more than 20 ms."""
    make = partial(SyntheticEnv, wait_ms=2.0, wait_distribution="lognormal", wait_p99_ms=20.0)
    envs = AsyncVectorEnv([make] * NUM_ENVS, num_workers=NUM_ENVS)
    envs.reset(seed=1)
    return envs


def run_barrier(num_rounds: int) -> AsyncVectorEnv:
    """Step all envs at once."""
    envs = make_envs()
    actions = np.zeros(NUM_ENVS, np.int64)
    envs.step(actions)
    envs.timing.enable()
    for _ in range(num_rounds):
        envs.step(actions)
    return envs


def run_first_ready(num_rounds: int) -> AsyncVectorEnv:
    """Step whoever is ready, at least 16 at a time."""
    envs = make_envs()
    envs.timing.enable()
    envs.send(np.zeros(NUM_ENVS, np.int64))
    received = 0
    while received < num_rounds * NUM_ENVS:
        batch = envs.recv(BATCH)
        received += len(batch.env_ids)
        envs.send(np.zeros(len(batch.env_ids), np.int64), batch.env_ids)
    envs.recv()
    return envs


def draw(recordings: dict[str, Recording], path: Path) -> None:
    """Draw the steps of every env for a while, one panel per recording."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    for axes, (title, recording) in zip(
        figure.subplots(len(recordings), 1, sharex=True), recordings.items(), strict=True
    ):
        begin_ns, _, stamps = recording.window()
        assert stamps is not None
        since_ns = begin_ns + int(20e6)
        begin_ms = (stamps["begin_ns"] - since_ns) / 1e6
        end_ms = (stamps["end_ns"] - since_ns) / 1e6
        shown = (end_ms > 0) & (begin_ms < SHOWN_MS)
        width = end_ms - begin_ms
        axes.barh(
            stamps["env_id"][shown],
            width[shown],
            left=begin_ms[shown],
            height=0.9,
            color=np.where(stamps["env_id"][shown] % 2 == 0, "#2a9d8f", "#457b9d"),
        )
        inside = np.clip(end_ms, 0, SHOWN_MS) - np.clip(begin_ms, 0, SHOWN_MS)
        busy = inside[shown].sum() / (SHOWN_MS * NUM_ENVS)
        axes.set_title(f"{title} (envs at work {busy:.0%} of the time)", loc="left")
        axes.set_xlim(0, SHOWN_MS)
        axes.set_ylim(NUM_ENVS - 0.5, -0.5)
        axes.set_ylabel("env")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[-1].set_xlabel("time (ms)")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Run both, print the reports, draw and write what was asked for."""
    parser = argparse.ArgumentParser(description="Barrier against first-ready with a heavy tail.")
    parser.add_argument("--rounds", type=int, default=60, help="steps of every env")
    parser.add_argument("--picture", type=Path, help="file to draw into")
    parser.add_argument("--trace", type=Path, help="folder for the timelines")
    options = parser.parse_args()
    recordings: dict[str, Any] = {}
    for title, run in ((BARRIER, run_barrier), (FIRST_READY, run_first_ready)):
        envs = run(options.rounds)
        Console(width=100).print(title, envs.timing.report(), "")
        recordings[title] = envs.timing.recording()
        if options.trace is not None:
            options.trace.mkdir(parents=True, exist_ok=True)
            envs.timing.write_trace(options.trace / f"{title.partition(':')[0]}.json")
        envs.close()
    if options.picture is not None:
        draw(recordings, options.picture)


if __name__ == "__main__":
    main()
