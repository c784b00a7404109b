"""The margins that the library keeps: beside other libraries, and beside an earlier revision.

    python benchmarks/margins.py
    python benchmarks/margins.py "replay*" "gae*" --quick
    python benchmarks/margins.py --list

`make margins` runs it in an environment with all that it compares with. It prints one table: what
is measured, the bar, the figure and its spread, and "pass", "FAIL", or "skipped" and what is not
installed. A row in which this tree raises an error fails. The exit status is 1 if a row fails.

A figure is a ratio of times within one run. Rows beside other libraries are medians of alternating
repetitions in one process (`measure.alternate`); each row has a process of its own. Rows beside the
earlier revision are rows of `against.py`: processes of both trees take turns, A B B A. If such a
row misses its bar, but by no more than two processes of A differ from each other, it is "unclear".
"(busy)" is a row beside which other programs kept a core busy: measure it again.

Speeds are ours over theirs, and must reach the bar; times and sizes ("at most") must not exceed it.
A step is one `env.step` of one env, those included in which autoreset resets. "updates" of SAC have
four env steps each, as a training has. Observations are 52 float32 where nothing else is said.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import against
import baselines
import gymnasium as gym
import numpy as np
from against import ROOT, Found
from async_envs import NullEnv, SleepyEnv, calibrate
from measure import alternate, machine, markdown_table, repeated
from work import make_columns

import vecenv

BASELINE = "1419e63"  # the last revision before the library was rewritten from the inside
REPETITIONS, QUICK = 9, 3
VERDICTS = ("pass", "FAIL", "unclear", "skipped")
ROW_S = 900.0  # a row that takes longer has failed
SB3_ADD_US = 6.0  # the writer's bars are 12 and 25 µs where stable-baselines3's add takes this

Call = Callable[[], object]
Measure = Callable[[int], list[float]]  # from repetitions to figures


@dataclass(frozen=True)
class Margin:
    """A bar, and how to find the figure that must keep it.

    Attributes:
        name: What is measured.
        bar: What the figure must reach, or must not exceed.
        of: What stands behind the bar: "×" and what the figure is a multiple of, or a unit.
        measure: Returns a figure per repetition; None for a row of `against.py`.
        row: That row.
        is_most: Whether the bar is what the figure must not exceed.
        needs: Modules of other packages.
    """

    name: str
    bar: float
    of: str
    measure: Measure | None = None
    row: str = ""
    is_most: bool = False
    needs: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What came out of a margin.

    Attributes:
        figures: One per repetition, or per generation of `against.py`.
        control: How far two processes of one tree were apart, as a share; None where that is not
            measured.
        why: Why there are no figures, or no more.
        has_failed: Whether that was an error of this tree, and not something that is missing.
        others: Cores that other programs kept busy meanwhile.
    """

    margin: Margin
    figures: list[float] = field(default_factory=list)
    control: float | None = None
    why: str = ""
    has_failed: bool = False
    others: float | None = None

    @property
    def figure(self) -> float:
        """The median."""
        return statistics.median(self.figures)

    @property
    def verdict(self) -> str:
        """Whether the margin is kept: "pass", "FAIL", "unclear" or "skipped"."""
        if self.why:
            return "FAIL" if self.has_failed else "skipped"
        margin = self.margin
        if self.figure <= margin.bar if margin.is_most else self.figure >= margin.bar:
            return "pass"
        is_noise = self.control is not None and abs(1 - self.figure) <= self.control
        return "unclear" if is_noise else "FAIL"


# -- beside other libraries, in one process -----------------------------------------------------


def ratio(ours: Call, theirs: Call, repetitions: int, seconds: float = 0.2) -> list[float]:
    """Return how many times as quick as theirs ours is, in each repetition."""
    runs = {"ours": repeated(ours, seconds), "theirs": repeated(theirs, seconds)}
    counts = {name: count for name, (_, count) in runs.items()}
    rates = alternate({name: run for name, (run, _) in runs.items()}, counts, repetitions)
    return [a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True)]


def inverse(figures: list[float]) -> list[float]:
    """Return shares of time, from speeds."""
    return [1 / figure for figure in figures]


def null_envs(kind: str, repetitions: int, **options: Any) -> list[float]:
    """Step 64 null envs of a bare class in a vector env of Gymnasium's and in ours of that name."""
    both = [
        getattr(module, kind)([NullEnv] * 64, copy=False, **more)
        for module, more in ((vecenv, options), (gym.vector, {}))
    ]
    for envs in both:
        envs.reset(seed=0)
    ours, theirs = (partial(envs.step, np.zeros(64, np.int64)) for envs in both)
    figures = ratio(ours, theirs, repetitions)
    for envs in both:
        envs.close()
    return figures


def sleeping(repetitions: int) -> list[float]:
    """Keep 64 envs that sleep in flight, and receive 16 or more at a time."""
    theirs = baselines.PipedEnvs(SleepyEnv, 64)
    ours = vecenv.AsyncVectorEnv([SleepyEnv] * 64, copy=False, num_workers=64)
    ours.reset(seed=0)
    actions = np.zeros(64, np.int64)

    def receive(envs: Any) -> None:
        received = 0
        while received < 64 * 150:
            env_ids = envs.recv(16).env_ids
            received += len(env_ids)
            envs.send(actions[env_ids], env_ids)

    cases = {}
    for name, envs in {"ours": ours, "theirs": theirs}.items():
        envs.send(actions, np.arange(64))
        cases[name] = partial(receive, envs)
    rates = alternate(cases, 64 * 150, repetitions)
    theirs.close()
    ours.close()
    return [a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True)]


def start(repetitions: int) -> list[float]:
    """Make, reset and close 64 envs."""

    def run(module: Any) -> None:
        envs = module.AsyncVectorEnv([partial(gym.make, "CartPole-v1")] * 64)
        envs.reset(seed=0)
        envs.close()

    return inverse(ratio(partial(run, vecenv), partial(run, gym.vector), repetitions))


def memory(repetitions: int) -> list[float]:
    """Return what 200 envs that compute add to the memory of all processes, over Gymnasium's."""
    calibrate()
    kinds = vecenv.AsyncVectorEnv, gym.vector.AsyncVectorEnv
    found = [
        [baselines.added_memory(kind, 200) for kind in kinds] for _ in range(min(3, repetitions))
    ]
    return [ours / theirs for ours, theirs in found]


def killed(repetitions: int) -> list[float]:
    """Return milliseconds from the end of a worker, in a step, to an error that names it."""

    class SlowEnv(NullEnv):
        pid = property(lambda _: os.getpid())

        def step(self, action: Any) -> Any:
            time.sleep(1.0)
            return super().step(action)

    times = []
    for _ in range(repetitions):
        envs = vecenv.AsyncVectorEnv([SlowEnv] * 8, num_workers=2)
        envs.reset(seed=0)
        pid = envs.get_attr("pid")[-1]
        envs.send(np.zeros(8, np.int64))
        time.sleep(0.1)
        begin = perf_counter()
        os.kill(pid, signal.SIGKILL)
        try:
            envs.recv()
        except Exception as error:
            times.append(1e3 * (perf_counter() - begin))
            if "worker 1" not in str(error):
                raise
        else:
            raise RuntimeError("a worker was killed, and its steps were received")
        envs.close()
    return times


def replay(
    repetitions: int,
    *,
    add: int = 0,
    sample: int = 256,
    kind: str = "SharedReplayBuffer",
    **options: Any,
) -> list[float]:
    """Add rows to 500 000 transitions of ours and of cpprb's, or draw from them into tensors.

    With `n_step` cpprb has a single env and folds rewards when they are added, ours has 2 048 and
    folds when they are drawn. Prioritized draws are followed by new priorities for their rows.
    """
    import torch

    import buffers

    torch.set_num_threads(1)
    capacity, folds = 500_000, "n_step" in options
    is_prioritized = kind == "PrioritizedReplayBuffer"
    theirs = baselines.Cpprb(capacity, is_prioritized, options.get("n_step", 1))
    baselines.fill(theirs.add, capacity)
    if is_prioritized:
        options.update(alpha=baselines.ALPHA, beta=baselines.BETA)
    spaces = baselines.OBS, baselines.ACTIONS
    ours = getattr(buffers, kind)(capacity, *spaces, seed=0, **options)
    num_rows = options["num_envs"] if folds else baselines.CHUNK
    baselines.fill(lambda columns: ours.add(**columns), capacity, num_rows)
    if add:
        columns = make_columns(add)
        return ratio(lambda: ours.add(**columns), lambda: theirs.add(columns), repetitions)
    if not is_prioritized:
        return ratio(lambda: ours.sample(sample), lambda: theirs.sample(sample), repetitions)
    priorities = itertools.cycle(list(np.random.default_rng(0).random((997, sample)) + 0.1))

    def update_ours() -> None:
        ours.update_priorities(ours.sample(sample).indices, next(priorities))

    def update_theirs() -> None:
        theirs.update(theirs.sample(sample), next(priorities))

    return ratio(update_ours, update_theirs, repetitions)


def pairs(repetitions: int) -> list[float]:
    """Draw 256 pairs of steps from 1 000 episodes."""
    import torch

    torch.set_num_threads(1)
    episodes, discount = baselines.Episodes(), baselines.DISCOUNT
    buffer = episodes.buffer()
    return ratio(lambda: buffer.sample(baselines.BATCH, discount), episodes.draw, repetitions)


def writer(num_envs: int, repetitions: int) -> list[float]:
    """Return the time of a writer's step, which adds, in adds of one row by stable-baselines3."""
    import torch

    from buffers import SharedReplayBuffer, TransitionWriter

    torch.set_num_threads(1)
    envs = vecenv.SyncVectorEnv([NullEnv] * num_envs)
    spaces = envs.single_observation_space, envs.single_action_space
    feeder = TransitionWriter(envs, SharedReplayBuffer(100_000, *spaces, num_envs=num_envs, seed=0))
    feeder.reset(envs.reset(seed=0)[0])
    actions = np.zeros(num_envs, np.int64)
    results = envs.step(actions)
    theirs, columns = baselines.StableBaselines3(100_000), make_columns(1)
    step = partial(feeder.step, actions, *results)
    return inverse(ratio(step, lambda: theirs.add(columns), repetitions))


def frames(repetitions: int, *, size: int = 0) -> list[float]:
    """Draw stacks stored once, beside a gather of whole ones; without a size, GB of a million."""
    import torch

    torch.set_num_threads(1)
    capacity = 20_000
    buffer = baselines.frames_once(capacity)
    if not size:
        return [buffer.nbytes / capacity * 1e6 / 1e9]
    num_bytes = 2 * int(np.prod(baselines.STACKS.shape))
    table = torch.ones((capacity, num_bytes), dtype=torch.uint8)
    gather, batch = baselines.gather_rows(table, size), buffer.sample(size)
    return ratio(lambda: buffer.sample(size, out=batch), gather, repetitions)


def gae(repetitions: int) -> list[float]:
    """Compute advantages of 128 x 2 048, beside the loop of stable-baselines3 in NumPy."""
    import torch

    import buffers

    torch.set_num_threads(1)
    rng, shape = np.random.default_rng(0), (128, 2048)
    rewards = rng.standard_normal(shape, np.float32)
    values = rng.standard_normal((129, 2048), np.float32)
    flags = rng.random((2, *shape)) < 0.01
    dones: Any = flags.any(0).astype(np.float32)
    options: Any = {"gamma": baselines.GAMMA, "gae_lambda": 0.95}
    ours = partial(buffers.gae, rewards, values, *flags, **options)
    return ratio(ours, partial(baselines.gae_loop, rewards, values, dones, 0.95), repetitions)


def sac(repetitions: int) -> list[float]:
    """Train on HalfCheetah with 8 envs: `vecenv train`, and stable-baselines3 by the same settings.

    Theirs takes one thread of torch and then as many as there are cores; the quicker one counts.
    """
    import torch

    make_vec_env = importlib.import_module("stable_baselines3.common.env_util").make_vec_env
    model = importlib.import_module("stable_baselines3").SAC(
        "MlpPolicy", make_vec_env("HalfCheetah-v5", 8, seed=1), learning_starts=1000,
        train_freq=1, gradient_steps=2, seed=1, device="cpu",
    )  # fmt: skip
    model.learn(1500)
    figures = []
    for _ in range(min(5, repetitions)):
        with tempfile.TemporaryDirectory() as folder:
            ours = against.run_once(against.ROWS["loop: SAC on HalfCheetah"], ROOT, Path(folder))
        theirs = []
        for num_threads in {1, len(os.sched_getaffinity(0))}:
            torch.set_num_threads(num_threads)
            begin = perf_counter()
            model.learn(1000, reset_num_timesteps=False)
            theirs.append((perf_counter() - begin) / 1000)
        figures.append(min(theirs) / ours)
    return figures


# -- the list -----------------------------------------------------------------------------------

GYM, GYM_ASYNC, CPPRB, GATHER = "× Gymnasium", "× Gymnasium's async", "× cpprb", "× a plain gather"
PAST, SB3_ADD = f"× {BASELINE}", "× SB3's add of a row"
SB3, MUJOCO = ("stable_baselines3",), ("mujoco", "imageio")
_async = partial(null_envs, "AsyncVectorEnv", num_workers=2)


def beside_others(*rows: tuple[Any, ...], **options: Any) -> list[Margin]:
    """Return margins beside other libraries: name, bar, of, measure, and modules that they need."""
    return [Margin(*row[:4], needs=row[4:], **options) for row in rows]


def beside_baseline(bar: float, rows: Sequence[str]) -> list[Margin]:
    """Return margins beside the earlier revision, of rows of `against.py`."""
    return [Margin(name, bar, PAST, row=name) for name in rows]


MARGINS = [
    *beside_others(
        ("sync, 64 null envs", 2.5, GYM, partial(null_envs, "SyncVectorEnv")),
        ("async, 64 null envs, 2 workers", 25, GYM_ASYNC, _async),
        ("async, 64 null envs, caller and worker", 40, GYM_ASYNC,
         partial(_async, caller_steps=True)),
    ),
    *beside_baseline(0.97, [name for name in against.ROWS if name.startswith("make_vec: ")]),
    *beside_others(
        ("64 envs that sleep, batches of 16", 0.9, "× a process an env and pipes", sleeping),
    ),
    *beside_others(
        ("start of 64 envs", 0.5, GYM_ASYNC, start),
        ("memory of 200 envs that compute", 0.2, GYM_ASYNC, memory),
        ("worker killed, until an error names it", 300, "ms", killed),
        is_most=True,
    ),
    *beside_others(
        ("replay: add 2048", 1.5, CPPRB, partial(replay, add=2048), "cpprb"),
        ("replay: sample 256", 2.5, CPPRB, replay, "cpprb"),
        ("replay: sample 4096", 2, CPPRB, partial(replay, sample=4096), "cpprb"),
        ("replay: prioritized, sample and update 256", 2.5, CPPRB,
         partial(replay, kind="PrioritizedReplayBuffer"), "cpprb"),
        ("replay: 3 steps, sample 256", 2, CPPRB,
         partial(replay, num_envs=2048, n_step=3, gamma=0.99), "cpprb"),
        ("episodic: sample 256 pairs", 4, "× vectorised NumPy", pairs),
    ),
    *beside_others(
        ("writer and add, 1 env", 12 / SB3_ADD_US, SB3_ADD, partial(writer, 1), *SB3),
        ("writer and add, 64 envs", 25 / SB3_ADD_US, SB3_ADD, partial(writer, 64), *SB3),
        ("frames stored once, a million of 84 x 84 x 4", 7.6, "GB", frames),
        is_most=True,
    ),
    *beside_others(
        ("frames stored once, sample 32", 0.7, GATHER, partial(frames, size=32)),
        ("frames stored once, sample 256", 0.7, GATHER, partial(frames, size=256)),
        ("gae 128 x 2048", 4, "× SB3's loop", gae),
    ),
    *beside_baseline(
        0.95,
        ["CAGE 2 2048, 1 thread, out=", "CAGE 2 2048, 2 threads, out=", "jit CartPole 64",
         "jit CartPole 1024", "CAGE 4 256"],
    ),
    *beside_baseline(0.9, ["loop: PPO on CAGE 2", "loop: PPO on CartPole"]),
    *beside_others(("SAC updates on HalfCheetah", 2.3, "× SB3", sac, *SB3, *MUJOCO)),
]  # fmt: skip


def measure_own(margin: Margin, repetitions: int) -> Outcome:
    """Measure a margin beside other libraries, in a process of its own."""
    outcome = Outcome(margin, why=against.lacking(margin.needs))
    if outcome.why:
        return outcome
    command = [sys.executable, __file__, margin.name, "--figures", str(repetitions)]
    load = against.Load()
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=answer, stderr=log, env=against.environment(ROOT),
            start_new_session=True,  # so that its workers end with it, whatever happens
        )  # fmt: skip
        try:
            code = process.wait(ROW_S)
        except subprocess.TimeoutExpired:
            outcome.why = f"no answer in {ROW_S:.0f} s"
        else:
            file = log if code else answer
            file.seek(0)
            lines = file.read().strip().splitlines() or [f"exit status {code}"]
            if code:
                outcome.why = lines[-1]
            else:
                outcome.figures = json.loads(lines[-1])
        finally:
            against.end_session(process)
    outcome.has_failed, outcome.others = bool(outcome.why), load.others()
    return outcome


def measure_against(margins: Sequence[Margin], options: argparse.Namespace) -> list[Outcome]:
    """Measure margins beside the earlier revision, by rows of `against.py`."""
    rows = [against.ROWS[margin.row] for margin in margins]
    found = [Found(row.name, row.unit, error=against.lacking(row.needs)) for row in rows]
    try:
        with against.checkout(options.base) as (tree, _), tempfile.TemporaryDirectory() as folder:
            trees = {"A": tree, "B": ROOT}
            for one in trees.values():
                against.check_tree(one, Path(folder))
            short = ["--rounds", "2", "--generations", "1"] if options.quick else []
            settings = against.read_options([options.base, *short])
            settings.deadline = float("inf")
            for number in range(settings.generations):
                print(f"generation {number + 1} beside {options.base}", file=sys.stderr, flush=True)
                against.run_generation(trees, found, settings, Path(folder))
    except SystemExit as error:  # no such revision in this clone
        return [Outcome(margin, why=str(error)) for margin in margins]
    outcomes = []
    for margin, one in zip(margins, found, strict=True):
        outcome = Outcome(margin, why=one.error, has_failed=one.error.startswith("B: "))
        outcome.others = one.most_others
        if one.is_measured:
            outcome.figures, outcome.control = inverse(one.ratios), one.control
        outcomes.append(outcome)
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """Lay the outcomes out."""
    lines = []
    for one in outcomes:
        margin = one.margin
        bar = f"{'at most' if margin.is_most else 'at least'} {margin.bar:.3g} {margin.of}"
        if one.why:
            lines.append([margin.name, bar, "", "", f"{one.verdict} ({one.why})"])
            continue
        spread = f"{min(one.figures):.3g} to {max(one.figures):.3g}"
        if one.control is not None:
            spread += f", A/A ± {one.control:.1%}"
        busy = " (busy)" if (one.others or 0) > against.BUSY_CORES else ""
        lines.append([margin.name, bar, f"{one.figure:.3g}", spread, one.verdict + busy])
    return markdown_table(["row", "bar", "figure", "spread", ""], lines)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Whether the library keeps its margins.",
        epilog="Exit status 1 if a row fails. All rows take about half an hour on an idle machine.",
    )
    parser.add_argument("rows", nargs="*", default=["*"], help="patterns such as 'replay*'")
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    parser.add_argument("--quick", action="store_true", help="few repetitions: figures are rough")
    parser.add_argument("--base", default=BASELINE, help="the earlier revision, or its checkout")
    parser.add_argument("--wait-idle", type=float, default=60, help="seconds to wait for others")
    parser.add_argument("--output", type=Path, help="file for all figures, JSON")
    parser.add_argument("--figures", type=int, help=argparse.SUPPRESS)  # of one row, in here
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the figures."""
    options = read_options(arguments)
    by_name = {margin.name: margin for margin in MARGINS}
    margins = [by_name[name] for name in against.matching(by_name, options.rows)]
    if options.figures is not None:
        (measure,) = (margin.measure for margin in margins)
        assert measure is not None
        print(f"\n{json.dumps(measure(options.figures))}")
        return 0
    if options.list:
        print("\n".join(margin.name for margin in margins))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # children end with it
    begin, before = time.monotonic(), against.wait_for_idle(options.wait_idle)
    found: dict[str, Outcome] = {}
    own = [margin for margin in margins if margin.measure is not None]
    for number, margin in enumerate(own, 1):
        print(f"{number} of {len(own)}: {margin.name}", file=sys.stderr, flush=True)
        found[margin.name] = measure_own(margin, QUICK if options.quick else REPETITIONS)
    rest = [margin for margin in margins if margin.measure is None]
    if rest:
        found |= {one.margin.name: one for one in measure_against(rest, options)}
    outcomes = [found[margin.name] for margin in margins]
    seconds = time.monotonic() - begin
    about = machine("gymnasium", "numpy", "numba", "torch")
    print(f"{about}\n{against.describe(ROOT)} beside {options.base}; {seconds / 60:.0f} minutes")
    if before is not None:
        print(f"before, others kept {before:.2f} cores busy")
    counts = Counter(one.verdict for one in outcomes)
    summary = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])
    print(f"\n{table(outcomes)}\n\n{summary}")
    if options.output is not None:
        rows = [
            {**vars(one), "margin": one.margin.name, "bar": one.margin.bar, "verdict": one.verdict}
            for one in outcomes
        ]
        content = {"machine": about, "base": options.base, "seconds": seconds, "rows": rows}
        options.output.write_text(json.dumps(content, indent=1) + "\n")
    return int(counts["FAIL"] > 0)


if __name__ == "__main__":
    sys.exit(main())
