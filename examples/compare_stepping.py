"""Six ways to step a slow env that also shows its true state, and what each of them costs.

    python examples/compare_stepping.py

The env is CAGE Challenge 2, made as slow as an implementation in plain Python (0.2 ms of computing
per step). It is stepped in 1 and in 200 copies, and after each step the learner's side has the true
states of all. Tables and stepping.png, in a minute, are explained in docs/stepping.md.
"""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import tyro
from gymnasium.spaces import Box

from vecenv import AsyncVectorEnv, SyncVectorEnv, make_vec

# Episodes as long as they can be: one step in 65 536 resets, and is counted with the others.
CAGE: dict[str, Any] = {"red_agent": "b_line", "episode_length": 65_535}
PARTS = "env compute", "straggler wait", "hand-over", "copying", "true state", "other"


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
        self.step_ns = cpu_ms * 1e6

    @property
    def true_state(self) -> np.ndarray:
        """The true state, a record of 192 bytes."""
        env: Any = self.unwrapped
        return np.frombuffer(env.true_state.tobytes(), np.uint8)

    def step(self, action: Any) -> Any:
        begin = time.thread_time_ns()
        result = self.env.step(action)
        while time.thread_time_ns() - begin < self.step_ns:
            pass
        return result


def in_chunks(env_fns: list) -> AsyncVectorEnv:
    """Return envs whose workers write the true states into memory that is shared, too."""
    return AsyncVectorEnv(
        env_fns, copy=False, publish={"true_state": Box(0, 255, (192,), np.uint8)}
    )


METHODS: dict[str, Callable[[list], Any]] = {
    "Gymnasium's sync": lambda env_fns: gym.vector.SyncVectorEnv(env_fns, copy=False),
    "Gymnasium's async, pipes": lambda env_fns: gym.vector.AsyncVectorEnv(
        env_fns, shared_memory=False
    ),
    "chunks, shared memory": in_chunks,
    "chunks, first-ready": in_chunks,
    "batched in one process": lambda env_fns: SyncVectorEnv(env_fns, copy=False),
    "compiled": lambda env_fns: make_vec("Cage2-v0", len(env_fns), **CAGE),
}


class Method:
    """A way of stepping envs. `states`, uint8 (num_envs, 192), are the true ones after a step."""

    def __init__(self, name: str, num_envs: int, options: Options) -> None:
        self.name, self.num_envs = name, num_envs
        self.actions = np.random.default_rng(options.seed).integers(0, 145, num_envs)
        self.rates, self.parts = list[float](), dict[str, float]()  # steps/s; shares of the time
        begin = time.perf_counter()
        self.envs = METHODS[name]([lambda: SlowCage(options.cpu_ms)] * num_envs)
        self.envs.reset(seed=options.seed)
        self.start_s = time.perf_counter() - begin
        self.timing = getattr(self.envs, "timing", None)  # Gymnasium's have none
        self.phase: Any = nullcontext if self.timing is None else self.timing.phase
        self.is_first_ready, self.is_in_flight = "first-ready" in name, False

    def step(self) -> int:
        """Step, get the true states, and return the number of env steps."""
        if self.is_first_ready:
            if not self.is_in_flight:
                self.envs.send(self.actions)
            ids = self.envs.recv(max(1, self.num_envs // 4)).env_ids
        else:
            ids = np.arange(self.num_envs)
            self.envs.step(self.actions)
        with self.phase("true state"):
            self.states = self.read()[ids]
        if self.is_first_ready:
            self.envs.send(self.actions[ids], ids)
            self.is_in_flight = True
        return len(ids)

    def read(self) -> np.ndarray:
        if self.name == "compiled":
            return self.envs.true_state.view(np.uint8).reshape(self.num_envs, -1)
        if published := getattr(self.envs, "published", None):
            return published["true_state"]  # the workers have written it there already
        return np.stack(self.envs.get_attr("true_state"))

    def settle(self) -> None:
        """Receive what is in flight."""
        if self.is_in_flight:
            self.envs.recv()
            self.is_in_flight = False

    def run(self, seconds: float) -> float:
        """Step for `seconds`, at least once; return env steps per second."""
        begin, steps = time.perf_counter(), self.step()
        while (spent := time.perf_counter() - begin) < seconds:
            steps += self.step()
        return steps / spent

    def break_down(self, seconds: float) -> None:
        """Measure where the time goes, in a run of its own."""
        if self.timing is not None:
            self.timing.enable()
            self.run(seconds)
            self.parts = dict(self.timing.report().shares)


def measure(num_envs: int, options: Options) -> list[Method]:
    """Run all methods in turn, and return them closed."""
    SlowCage(0).reset()  # compiles the simulator, or loads it
    methods = [Method(name, num_envs, options) for name in METHODS]
    for method in methods:
        method.run(0.2)
    for _ in range(options.rounds):
        for method in methods:
            method.settle()  # else envs that are ready already would count
            method.rates.append(method.run(options.round_s))
    for method in methods:
        method.settle()
        method.break_down(options.round_s)
        method.settle()
        method.envs.close()
    return methods


def table(methods: list[Method]) -> str:
    """Lay out a Markdown table of median rates, and of wall time per env step by part."""
    names = [name for name in PARTS if any(name in method.parts for method in methods)]
    head = ["method", "steps/s", "x loop", *[f"{n}, µs" for n in names], "start, s"]
    rows = [head, [":---", *["---:"] * (len(head) - 1)]]
    loop = statistics.median(methods[0].rates)
    for method in methods:
        rate = statistics.median(method.rates)
        parts = [f"{1e6 * method.parts[n] / rate:.3g}" if n in method.parts else "" for n in names]
        numbers = [f"{rate:,.0f}", f"{rate / loop:,.2f}", *parts, f"{method.start_s:.2f}"]
        rows.append([method.name, *numbers])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(found: dict[int, list[Method]], path: Path) -> None:
    """Draw the rates, a picture for each number of envs."""
    from matplotlib.figure import Figure  # pip install "vecenv[plots]"

    figure = Figure(figsize=(12, 3), layout="constrained")
    every = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, methods in zip(every, found.values(), strict=True):
        speeds = np.array([statistics.median(method.rates) for method in methods])
        axes.plot(speeds, [method.name for method in methods], "o")
        for row, v in enumerate(speeds):
            axes.text(v, row, f"   {v:,.0f}  ({v / speeds[0]:,.2f} x)", va="center")
        axes.set(xscale="log", xlabel="env steps per second (x: over Gymnasium's sync)")
        axes.set(xlim=(speeds.min() / 3, speeds.max() * 100), title=f"{methods[0].num_envs} envs")
        axes.invert_yaxis()
    figure.savefig(path, dpi=130)


def main(options: Options) -> dict[int, list[Method]]:
    """Measure, print the tables, draw the picture."""
    found = {num_envs: measure(num_envs, options) for num_envs in sorted(options.copies)}
    for num_envs, methods in found.items():
        print(f"copies: {num_envs}, cores: {os.cpu_count()}\n\n{table(methods)}\n")
    draw(found, options.out)
    return found


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
