"""`vecenv bench`: what this machine makes of a few envs, on each backend, on one page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from vecenv.backends import BACKENDS, COMPARED, TIMED
from vecenv.compare import Comparison, Options, run_comparison

__all__ = ["WORKLOADS", "Bench", "Workload", "run_bench"]

_LEVEL = 1.1  # a backend that is faster by less is not worth a change


class Workload(NamedTuple):
    """An env that stands for others.

    Attributes:
        title: What it stands for.
        env: See `vecenv.compare.Options`.
        env_kwargs: For the env.
        num_envs: How many are stepped side by side.
    """

    title: str
    env: str
    env_kwargs: dict[str, Any]
    num_envs: int


_BRIEF = {"episode_length": 20}  # a comparison goes on until each env has ended two episodes
_SPREAD = {"wait_distribution": "lognormal", "wait_p99_ms": 20.0}
WORKLOADS = (
    Workload("CartPole", "CartPole-v1", {}, 64),
    Workload("computes 0.5 ms", "vecenv:Synthetic-v0", {"cpu_ms": 0.5, **_BRIEF}, 16),
    Workload("waits 2 ms", "vecenv:Synthetic-v0", {"wait_ms": 2.0, **_BRIEF}, 16),
    Workload("waits 2-20 ms", "vecenv:Synthetic-v0", {"wait_ms": 2.0, **_SPREAD, **_BRIEF}, 16),
)


class Bench(NamedTuple):
    """What was measured.

    Attributes:
        comparisons: One for each workload measured, in order.
        workloads: They.
        seconds: How long it took.
        left_out: Workloads for which there was no time.
    """

    comparisons: list[Comparison]
    workloads: list[Workload]
    seconds: float
    left_out: list[Workload]

    def __rich__(self) -> Any:
        """One table: a row for each backend, a column for each workload."""
        table = Table(box=SIMPLE_HEAD, title="env steps per second", title_justify="left")
        table.add_column("")
        for workload in self.workloads:
            table.add_column(f"{workload.title}\n{workload.num_envs} envs", justify="right")
        best = [max(case.steps_per_second for case in c.measured) for c in self.comparisons]
        for name in COMPARED:
            cells = []
            for comparison, most in zip(self.comparisons, best, strict=True):
                rates = [c.steps_per_second for c in comparison.measured if c.backend == name]
                text = _short(rates[0]) if rates else ""
                cells.append(f"[bold]{text}[/bold]" if rates == [most] else text)
            table.add_row(name.removeprefix("async-"), *cells)
        told = [f"Measured in {self.seconds:.0f} s; vecenv compare ENV tells more about one env."]
        told += [f"There was no time for: {workload.title}." for workload in self.left_out]
        busy = max((c.others_busy or 0.0 for c in self.comparisons), default=0.0)
        if busy > 0.2:
            told.append(
                f"Other programs kept up to {busy:.1f} of {os.cpu_count()} cores busy meanwhile: "
                "repeat this on an idle machine."
            )
        return Group(self.comparisons[0].machine, "", table, *self.advice(), "", *told)

    def advice(self) -> list[str]:
        """What to use, and why: a sentence for each workload."""
        found = []
        for workload, comparison in zip(self.workloads, self.comparisons, strict=True):
            rates = {case.backend: case.steps_per_second for case in comparison.measured}
            usable = {name: rates[name] for name in TIMED if name in rates}
            most = max(usable.values())
            best = next(name for name in usable if _LEVEL * usable[name] >= most)  # the simplest
            text = f"{workload.title}: {BACKENDS[best].use or best}"
            if "loop" in rates:
                text += f", {usable[best] / rates['loop']:.2g} times a loop over the envs"
            found.append(f"{text}.")
        return found


def _short(rate: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.3g}"


def run_bench(
    workloads: Sequence[Workload] = WORKLOADS,
    *,
    seconds: float = 45.0,
    on_progress: Callable[[str, float], Any] = lambda what, share: None,
) -> Bench:
    """Measure the workloads, one after the other; one that would begin after `seconds` is left out.

    Args:
        workloads: Which.
        seconds: For all of them together, about.
        on_progress: Called with what is measured, and the share of the work that is done.

    Raises:
        RuntimeError: No backend could be run.
    """
    begin, comparisons, done = time.perf_counter(), list[Comparison](), list[Workload]()
    for number, workload in enumerate(workloads):
        if comparisons and time.perf_counter() - begin > seconds:
            break
        options = Options(
            workload.env,
            env_kwargs=workload.env_kwargs,
            num_envs=[workload.num_envs],
            backends=COMPARED,
            rounds=3,
            round_s=0.1,
            warm_up_s=0.2,
            timed_s=0.1,
        )

        def show(what: str, share: float, at: int = number, title: str = workload.title) -> None:
            on_progress(f"{title}: {what}", (at + share) / len(workloads))

        found = run_comparison(options, on_progress=show)
        if not found.measured:
            raise RuntimeError(found.verdict)
        comparisons.append(found)
        done.append(workload)
    seconds = time.perf_counter() - begin
    return Bench(comparisons, done, seconds, list(workloads[len(done) :]))
