"""`vecenv bench`: how fast this machine steps a few envs on each backend, on one page."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Group

from vecenv.backends import BACKENDS, COMPARED, TIMED
from vecenv.compare import Comparison, Options, run_comparison
from vecenv.timing.report import new_table

__all__ = ["WORKLOADS", "Bench", "run_bench"]

_LEVEL = 1.1  # a backend that is faster by less is not recommended
_BRIEF = {"episode_length": 20}  # a comparison goes on until each env has ended two episodes
_SYNTHETIC = "vecenv:Synthetic-v0"
# By what the workload stands for: the env, its arguments, and the number of envs.
WORKLOADS: dict[str, tuple[str, dict[str, Any], int]] = {
    "CartPole": ("CartPole-v1", {}, 64),
    "computes 0.5 ms": (_SYNTHETIC, {"cpu_ms": 0.5, **_BRIEF}, 16),
    "waits 2 ms": (_SYNTHETIC, {"wait_ms": 2.0, **_BRIEF}, 16),
    "waits 2-20 ms": (_SYNTHETIC, {"wait_ms": 2.0, "wait_p99_ms": 20.0, **_BRIEF}, 16),
}


class Bench(NamedTuple):
    """The results of the measurements.

    Attributes:
        comparisons: By names in `WORKLOADS`.
    """

    comparisons: dict[str, Comparison]

    def __rich__(self) -> Any:
        """Return one table: a row for each backend, a column for each workload."""
        titles = [f"{title}\n{WORKLOADS[title][2]} envs" for title in self.comparisons]
        table = new_table("env steps per second", ["", *titles], box=SIMPLE_HEAD)
        found = list(self.comparisons.values())
        best = [max(case.steps_per_second for case in c.measured) for c in found]
        for name in COMPARED:
            cells = []
            for comparison, most in zip(found, best, strict=True):
                rates = [c.steps_per_second for c in comparison.measured if c.backend == name]
                text = f"{rates[0]:,.0f}" if rates else ""
                cells.append(f"[bold]{text}[/bold]" if rates == [most] else text)
            table.add_row(name.removeprefix("async-"), *cells)
        told = ["vecenv compare ENV tells more about one env."]
        if (busy := max(c.others_busy or 0.0 for c in found)) > 0.2:
            told.append(
                f"Other programs kept up to {busy:.1f} of {os.cpu_count()} cores busy meanwhile: "
                "repeat this on an idle machine."
            )
        return Group(found[0].machine, "", table, *self.advice(), "", *told)

    def advice(self) -> list[str]:
        """Recommended backends with reasons: a sentence for each workload."""
        sentences = []
        for title, comparison in self.comparisons.items():
            rates = {case.backend: case.steps_per_second for case in comparison.measured}
            usable = {name: rates[name] for name in TIMED if name in rates}
            most = max(usable.values())
            best = next(name for name in usable if _LEVEL * usable[name] >= most)  # the simplest
            text = f"{title}: {BACKENDS[best].use or best}"
            if "loop" in rates:
                text += f", {usable[best] / rates['loop']:.2g} times a loop over the envs"
            sentences.append(f"{text}.")
        return sentences


def run_bench(on_progress: Callable[[str, float], Any], titles: list[str] | None = None) -> Bench:
    """Measure workloads, one after the other.

    Args:
        on_progress: Called with the current work, and the share of all work done.
        titles: Workloads to measure; None for all.
    """
    comparisons: dict[str, Comparison] = {}
    titles = list(WORKLOADS) if titles is None else titles
    times = {"rounds": 3, "round_s": 0.1, "warm_up_s": 0.2, "timed_s": 0.1}
    for number, title in enumerate(titles):
        env, kwargs, count = WORKLOADS[title]

        def show(what: str, share: float, at: int = number, title: str = title) -> None:
            on_progress(f"{title}: {what}", (at + share) / len(titles))

        options = Options(env, env_kwargs=kwargs, num_envs=[count], **times)
        comparisons[title] = found = run_comparison(options, on_progress=show)
        if not found.measured:
            raise RuntimeError(found.verdict)
    return Bench(comparisons)
