"""Six ways to step a slow env that also shows its true state, and what each of them costs.

    python examples/compare_stepping.py

The env is CAGE Challenge 2 with the rules of vecenv's simulator, made as slow as an implementation
in plain Python (0.2 ms of computing per step). It is stepped in 1 and in 200 copies: one after the
other, in one process per env over pipes, in chunks over shared memory, first-ready, batched in one
process, and compiled. After each step the learner's side has the true states of all. Tables are
printed and stepping.png is drawn, in a minute; docs/stepping.md has them.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import tyro
from gymnasium.spaces import Box

from vecenv import AsyncVectorEnv, SyncVectorEnv, make_vec

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# Episodes as long as they can be: one step in 65 536 resets, and is counted with the others.
CAGE: dict[str, Any] = {"red_agent": "b_line", "episode_length": 65_535}
COMPUTE, STATE = "env compute", "true state"
PARTS = COMPUTE, "straggler wait", "hand-over", "copying", STATE, "other"


@dataclass
class Options:
    copies: tuple[int, ...] = (1, 200)  # numbers of envs
    cpu_ms: float = 0.2  # milliseconds that a step of the slow env computes
    rounds: int = 5  # in each, every method runs once
    round_s: float = 0.5  # seconds per method and round
    seed: int = 0  # of the envs and the actions
    out: Path = Path("stepping.png")  # picture to draw


class SlowCage(gym.Wrapper):
    """One CAGE 2 env whose steps compute for a set time by the clock of their own thread."""

    def __init__(self, cpu_ms: float) -> None:
        super().__init__(gym.make("vecenv:Cage2-v0", **CAGE))
        self.target_ns, self.cpu_ns = round(cpu_ms * 1e6), 0  # a step's, and of all steps

    @property
    def true_state(self) -> np.ndarray:
        """The true state, a record of 192 bytes."""
        env: Any = self.unwrapped
        return np.frombuffer(env.true_state.tobytes(), np.uint8)

    def step(self, action: Any) -> Any:
        begin = time.thread_time_ns()
        result = self.env.step(action)
        while time.thread_time_ns() - begin < self.target_ns:
            pass
        self.cpu_ns += time.thread_time_ns() - begin
        return result


class Method:
    """A way of stepping envs. `states`, uint8 (num_envs, 192), are the true ones after a step."""

    name = "batched in one process"

    def __init__(self, num_envs: int, options: Options) -> None:
        self.num_envs = num_envs
        self.env_fns = [lambda: SlowCage(options.cpu_ms)] * num_envs
        self.actions = np.random.default_rng(options.seed).integers(0, 145, num_envs)
        self.rates, self.parts = list[float](), dict[str, float]()  # steps/s; shares of the time
        before, begin = memory_bytes(), time.perf_counter()
        self.envs: Any = self.make()
        self.envs.reset(seed=options.seed)
        self.start_s = time.perf_counter() - begin
        self.run(0.2)
        self.memory_bytes = memory_bytes() - before

    def make(self) -> Any:
        return SyncVectorEnv(self.env_fns, copy=False)

    def step(self) -> int:
        """Step, get the true states, and return the number of env steps."""
        self.envs.step(self.actions)
        with self.envs.timing.phase(STATE):
            self.states = self.read()
        return self.num_envs

    def read(self) -> np.ndarray:
        return np.stack(self.envs.get_attr("true_state"))

    def settle(self) -> None:
        """Receive what is in flight."""

    def run(self, seconds: float) -> float:
        """Step for `seconds`, at least once; return env steps per second."""
        begin, steps = time.perf_counter(), self.step()
        while (spent := time.perf_counter() - begin) < seconds:
            steps += self.step()
        return steps / spent

    def break_down(self, seconds: float) -> None:
        """Measure where the time goes, in a run of its own."""
        self.settle()
        self.envs.timing.enable()
        self.run(seconds)
        self.parts = dict(self.envs.timing.report().shares)
        self.settle()
        self.envs.timing.disable()


class OneByOne(Method):
    """Without `envs.timing`: the envs count their own time, the rest is the method's."""

    name, rest, num_processes = "Gymnasium's sync", "other", 1

    def make(self) -> Any:
        return gym.vector.SyncVectorEnv(self.env_fns, copy=False)

    def step(self) -> int:
        self.envs.step(self.actions)
        begin = time.perf_counter_ns()
        self.states = self.read()
        self.state_ns += time.perf_counter_ns() - begin
        return self.num_envs

    state_ns = 0

    def break_down(self, seconds: float) -> None:
        before, self.state_ns, begin = self.cpu_ns(), 0, time.perf_counter_ns()
        self.run(seconds)
        wall_ns = time.perf_counter_ns() - begin
        # Computing that is spread evenly over the cores takes so much of the wall time.
        compute_ns = (self.cpu_ns() - before) / min(CORES, self.num_processes)
        self.parts = {COMPUTE: compute_ns / wall_ns, STATE: self.state_ns / wall_ns}
        self.parts[self.rest] = 1 - sum(self.parts.values())

    def cpu_ns(self) -> int:
        return sum(self.envs.get_attr("cpu_ns"))


class Pipes(OneByOne):
    name, rest = "Gymnasium's async, pipes", "hand-over"

    def make(self) -> Any:
        self.num_processes = self.num_envs
        return gym.vector.AsyncVectorEnv(self.env_fns, shared_memory=False)


class Chunks(Method):
    name = "chunks, shared memory"

    def make(self) -> Any:
        size = self.env_fns[0]().true_state.size
        states: Any = Box(0, 255, (size,), np.uint8)
        return AsyncVectorEnv(self.env_fns, copy=False, publish={"true_state": states})

    def read(self) -> np.ndarray:
        return self.envs.published["true_state"]  # the workers have written it there already


class FirstReady(Chunks):
    name, in_flight = "chunks, first-ready", False

    def step(self) -> int:
        if not self.in_flight:
            self.envs.send(self.actions)
            self.in_flight = True
        batch = self.envs.recv(max(1, self.num_envs // 4))
        with self.envs.timing.phase(STATE):
            self.states = self.envs.published["true_state"][batch.env_ids]
        self.envs.send(self.actions[batch.env_ids], batch.env_ids)
        return len(batch.env_ids)

    def settle(self) -> None:
        if self.in_flight:
            self.envs.recv()
            self.in_flight = False


class Compiled(Method):
    name = "compiled"

    def make(self) -> Any:
        return make_vec("Cage2-v0", self.num_envs, **CAGE)

    def read(self) -> np.ndarray:
        return self.envs.true_state.view(np.uint8).reshape(self.num_envs, -1)


METHODS = OneByOne, Pipes, Chunks, FirstReady, Method, Compiled


def memory_bytes() -> int:
    """Return the proportional set size of this process and its children; 0 if not known."""
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        found = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in ["self", *children]]
    except OSError:
        return 0
    return sum(1024 * int(text.split("Pss:")[1].split()[0]) for text in found)


def measure(num_envs: int, options: Options) -> list[Method]:
    """Run all methods in turn, and return them closed, with their median rates."""
    SlowCage(0).reset()  # compiles the simulator, or loads it
    methods = [method_class(num_envs, options) for method_class in METHODS]
    for _ in range(options.rounds):
        for method in methods:
            method.settle()  # else envs that are ready already would count
            method.rates.append(method.run(options.round_s))
    for method in methods:
        method.break_down(options.round_s)
        method.settle()
        method.envs.close()
    return methods


def table(methods: list[Method]) -> str:
    """Lay out a Markdown table."""
    names = [name for name in PARTS if any(name in method.parts for method in methods)]
    head = ["method", "steps/s", "spread", "x loop", *[f"{n}, µs" for n in names]]
    rows = [[*head, "start, s", "memory, MiB"], [":---", *["---:"] * (len(head) + 1)]]
    loop = statistics.median(methods[0].rates)
    for method in methods:
        rate = statistics.median(method.rates)
        spread = (max(method.rates) - min(method.rates)) / rate
        parts = [f"{1e6 * method.parts.get(n, 0) / rate:.3g}" for n in names]
        costs = [f"{method.start_s:.2f}", f"{max(0, method.memory_bytes) / 2**20:.0f}"]
        rows.append(
            [method.name, f"{rate:,.0f}", f"{spread:.0%}", f"{rate / loop:,.2f}", *parts, *costs]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(found: dict[int, list[Method]], path: Path) -> None:
    """Draw rates and costs, a row for each number of envs."""
    from matplotlib.figure import Figure  # pip install "vecenv[plots]"

    figure = Figure(figsize=(12, 3.1 * len(found) + 0.8), layout="constrained")
    all_axes: Any = figure.subplots(len(found), 2, squeeze=False)
    for (rates, costs), methods in zip(all_axes, found.values(), strict=True):
        labels = [method.name for method in methods]
        speeds = np.array([statistics.median(method.rates) for method in methods])
        rates.plot(speeds, labels, "o")  # a log axis has no zero for bars
        for row, v in enumerate(speeds):
            rates.text(v, row, f"   {v:,.0f}  ({v / speeds[0]:,.2f} x)", va="center")
        rates.set(xscale="log", xlabel="env steps per second (x: over the loop)", ymargin=0.1)
        rates.set_xlim(speeds.min() / 3, speeds.max() * 100)
        rates.set_title(f"copies: {methods[0].num_envs}", loc="left", weight="bold")
        left = np.zeros(len(methods))
        for name in PARTS:
            widths = 1e6 * np.array([method.parts.get(name, 0.0) for method in methods]) / speeds
            costs.barh(labels, widths, left=left, label=name)
            left += widths
        costs.set(xlabel="microseconds of wall time per env step", yticks=[], xmargin=0.1)
        rates.invert_yaxis()
        costs.invert_yaxis()
    figure.legend(*all_axes[0, 1].get_legend_handles_labels(), loc="outside upper right", ncols=6)
    figure.savefig(path, dpi=130)


def main(options: Options) -> dict[int, list[Method]]:
    """Measure, print the tables, draw the picture."""
    found = {num_envs: measure(num_envs, options) for num_envs in sorted(options.copies)}
    for num_envs, methods in found.items():
        print(f"copies: {num_envs}, cores: {CORES}\n\n{table(methods)}\n")
    draw(found, options.out)
    return found


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
