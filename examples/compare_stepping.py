"""Six ways to step a slow env that also shows its true state, and what each of them costs.

    python examples/compare_stepping.py

The env is CAGE Challenge 2 with the rules of vecenv's simulator, made as slow as an implementation
in plain Python (0.2 ms of computing per step). It is stepped in 1 and in 200 copies: one after the
other, in one process per env over pipes, in chunks over shared memory, first-ready, batched in one
process, and compiled. After each step the learner's side has the true states of all.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import tyro
from gymnasium.spaces import Box
from rich.console import Console
from rich.progress import Progress

from vecenv import AsyncVectorEnv, SyncVectorEnv, make_vec

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# Episodes as long as they can be: one step in 65 536 resets, and is counted with the others.
CAGE: dict[str, Any] = {"red_agent": "b_line", "episode_length": 65_535}
COMPUTE, STATE, OTHER = "env compute", "true state", "other"
COLOURS = {
    COMPUTE: "#2a9d8f",
    "straggler wait": "#e76f51",
    "hand-over": "#e9c46a",
    "copying": "#f4a261",
    STATE: "#457b9d",
    OTHER: "#cccccc",
}


@dataclass
class Options:
    copies: tuple[int, ...] = (1, 200)  # numbers of envs
    cpu_ms: float = 0.2  # milliseconds that a step of the slow env computes
    rounds: int = 5  # in each, every method runs once
    round_s: float = 0.5  # seconds per method and round
    seed: int = 0  # of the envs and the actions
    out: Path | None = Path("stepping.png")  # picture to draw; None for the tables only


class SlowCage(gym.Wrapper):
    """One CAGE 2 env whose steps compute for a set time by the clock of their own thread."""

    def __init__(self, cpu_ms: float) -> None:
        super().__init__(gym.make("vecenv:Cage2-v0", **CAGE))
        self.target_ns = round(cpu_ms * 1e6)
        self.cpu_ns = 0  # spent in `step`

    @property
    def true_state(self) -> np.ndarray:
        """The true state, a record of 192 bytes."""
        return np.frombuffer(self.unwrapped.true_state.tobytes(), np.uint8)  # type: ignore[attr-defined]  # CAGE 2's own

    def step(self, action: Any) -> Any:
        begin = time.thread_time_ns()
        result = self.env.step(action)
        while time.thread_time_ns() - begin < self.target_ns:
            pass
        self.cpu_ns += time.thread_time_ns() - begin
        return result


class Method:
    """A method of stepping envs; a subclass makes `envs` and implements it.

    `states`, uint8 (num_envs, 192), are the true states after a step, `rates` the env steps per
    second of each round, `rate` their median, `parts` the wall time per env step in microseconds.
    """

    name = ""

    def __init__(self, num_envs: int, options: Options) -> None:
        self.num_envs = num_envs
        self.env_fns = [lambda: SlowCage(options.cpu_ms)] * num_envs
        self.actions = np.random.default_rng(options.seed).integers(0, 145, num_envs)
        self.rates: list[float] = []
        self.rate = 0.0
        self.parts: dict[str, float] = {}
        before, begin = memory_bytes(), time.perf_counter()
        self.envs: Any = self.make()
        self.envs.reset(seed=options.seed)
        self.start_s = time.perf_counter() - begin
        self.run(0.2)
        self.memory_bytes = memory_bytes() - before

    def make(self) -> Any:
        raise NotImplementedError

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
        """Measure where the time goes, as shares of the wall time of a separate run."""
        self.settle()
        self.envs.timing.enable()
        self.envs.timing.clear()
        self.run(seconds)
        shares = self.envs.timing.report().shares
        self.settle()
        self.envs.timing.disable()
        self.parts = {name: share * 1e6 / self.rate for name, share in shares.items()}

    def close(self) -> None:
        self.envs.close()


class Untimed(Method):
    """Without `envs.timing`: the envs count their own time, the rest is the method's."""

    rest = OTHER  # name of the time for neither computing nor the true state
    num_processes = 1
    state_ns = 0

    def step(self) -> int:
        self.envs.step(self.actions)
        begin = time.perf_counter_ns()
        self.states = self.read()
        self.state_ns += time.perf_counter_ns() - begin
        return self.num_envs

    def break_down(self, seconds: float) -> None:
        compute_ns = -sum(self.envs.get_attr("cpu_ns"))
        self.state_ns, begin = 0, time.perf_counter_ns()
        self.run(seconds)
        wall_ns = time.perf_counter_ns() - begin
        # Computing that is spread evenly over the cores takes so much of the wall time.
        compute_ns += sum(self.envs.get_attr("cpu_ns"))
        compute_ns /= min(CORES, self.num_processes)
        rest_ns = wall_ns - compute_ns - self.state_ns
        shares = {COMPUTE: compute_ns, STATE: self.state_ns, self.rest: rest_ns}
        self.parts = {name: ns / wall_ns * 1e6 / self.rate for name, ns in shares.items()}


class Loop(list[SlowCage]):
    """The least that can be called a vector env."""

    def reset(self, seed: int) -> None:
        for number, env in enumerate(self):
            env.reset(seed=seed + number)

    def step(self, actions: np.ndarray) -> None:
        self.results = [env.step(a) for env, a in zip(self, actions, strict=True)]

    def get_attr(self, name: str) -> list[Any]:
        return [getattr(env, name) for env in self]

    def close(self) -> None:
        for env in self:
            env.close()


class OneByOne(Untimed):
    name = "one by one, in a loop"

    def make(self) -> Any:
        return Loop(env_fn() for env_fn in self.env_fns)


class Pipes(Untimed):
    name = "a process per env, pipes"
    rest = "hand-over"

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
    name = "chunks, first-ready"
    in_flight = False

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


class Batched(Method):
    name = "batched in one process"

    def make(self) -> Any:
        return SyncVectorEnv(self.env_fns, copy=False)


class Compiled(Method):
    name = "compiled"

    def make(self) -> Any:
        return make_vec("Cage2-v0", self.num_envs, **CAGE)

    def read(self) -> np.ndarray:
        return self.envs.true_state.view(np.uint8).reshape(self.num_envs, -1)


METHODS = OneByOne, Pipes, Chunks, FirstReady, Batched, Compiled


def memory_bytes() -> int:
    """Return the proportional set size of this process and its children; 0 if not known."""
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        found = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in ["self", *children]]
    except OSError:
        return 0
    return sum(1024 * int(text.split("Pss:")[1].split()[0]) for text in found)


def measure(num_envs: int, options: Options, advance: Callable[..., None]) -> list[Method]:
    """Run all methods in turn, and return them closed."""
    SlowCage(0).reset()  # compiles the simulator, or loads it
    methods: list[Method] = []
    try:
        for method_class in METHODS:
            advance(description=f"{num_envs} envs, {method_class.name}: making and warming up")
            methods.append(method_class(num_envs, options))
        for number in range(options.rounds):
            for method in methods:
                advance(description=f"{num_envs} envs, {method.name}: round {number + 1}")
                method.settle()  # else envs that are ready already would count
                method.rates.append(method.run(options.round_s))
        for method in methods:
            method.rate = statistics.median(method.rates)
            advance(description=f"{num_envs} envs, {method.name}: where the time goes")
            method.break_down(options.round_s)
    finally:
        for method in methods:
            method.close()
    return methods


def table(methods: list[Method]) -> str:
    """Lay out a Markdown table."""
    names = [name for name in COLOURS if any(name in method.parts for method in methods)]
    head = ["method", "steps/s", "spread", "x loop", "x before", *[f"{n}, µs" for n in names]]
    rows, before = [[*head, "start, s", "memory, MiB"]], methods[0].rate
    rows.append([":---", *["---:"] * (len(rows[0]) - 1)])
    for method in methods:
        spread = f"{(max(method.rates) - min(method.rates)) / method.rate:.0%}"
        factors = [f"{method.rate / other:,.2f}" for other in (methods[0].rate, before)]
        parts = [f"{method.parts[n]:.3g}" if method.parts.get(n) else "" for n in names]
        costs = [f"{method.start_s:.2f}", f"{max(0, method.memory_bytes) / 2**20:.0f}"]
        rows.append([method.name, f"{method.rate:,.0f}", spread, *factors, *parts, *costs])
        before = method.rate
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(found: dict[int, list[Method]], path: Path) -> None:
    """Draw rates and costs, a row for each number of envs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.1 * len(found) + 0.8), layout="constrained")
    all_axes: Any = figure.subplots(len(found), 2, squeeze=False)
    for (rates, costs), methods in zip(all_axes, found.values(), strict=True):
        labels, speeds = (
            [method.name for method in methods],
            np.array([method.rate for method in methods]),
        )
        rates.plot(speeds, labels, "o", color="#457b9d")  # a log axis has no zero for bars
        for row, v in enumerate(speeds):
            rates.text(v, row, f"   {v:,.0f}  ({v / speeds[0]:,.2f} x)", va="center")
        rates.set(xscale="log", xlabel="env steps per second (x: over the loop)", ymargin=0.1)
        rates.grid(axis="x", alpha=0.3)
        rates.set_xlim(speeds.min() / 3, speeds.max() * 100)
        rates.set_title(f"copies: {methods[0].num_envs}", loc="left", weight="bold")
        left = np.zeros(len(methods))
        for name, colour in COLOURS.items():
            widths = np.array([max(0.0, method.parts.get(name, 0.0)) for method in methods])
            costs.barh(labels, widths, left=left, color=colour, label=name)
            left += widths
        costs.bar_label(costs.containers[-1], [f"{total:.3g}" for total in left], padding=4)
        costs.set(xlabel="microseconds of wall time per env step", yticks=[], xmargin=0.1)
    for axes in all_axes.flat:
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*all_axes[0, 1].get_legend_handles_labels(), loc="outside upper right", ncols=6)
    figure.savefig(path, dpi=130)


def main(options: Options) -> dict[int, list[Method]]:
    """Measure, print the tables, draw the picture."""
    if min(*options.copies, options.rounds, len(options.copies)) < 1 or not options.cpu_ms >= 0:
        sys.exit(f"expected copies and rounds of at least 1 and cpu_ms of at least 0: {options}")
    if options.out is not None and not os.access(options.out.parent, os.W_OK):
        sys.exit(f"out is {str(options.out)!r}: its folder is missing or can't be written to")
    found, console = {}, Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(options.copies) * len(METHODS) * (options.rounds + 2))
        for num_envs in sorted(options.copies):
            show = partial(bar.update, task, advance=1)
            found[num_envs] = measure(num_envs, options, show)
    for num_envs, methods in found.items():
        print(f"copies: {num_envs}, cores: {CORES}\n\n{table(methods)}\n")
    if options.out is not None:
        draw(found, options.out)
        print(f"picture: {options.out}")
    return found


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
