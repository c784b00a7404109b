"""Measuring side by side: alternating repetitions, medians, and a table of the result."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

__all__ = [
    "Rates",
    "alternate",
    "machine",
    "markdown_table",
    "median_ratio",
    "repeated",
]

Rates = dict[str, list[float]]


def alternate(
    cases: Mapping[str, Callable[[], object]],
    units: int | Mapping[str, int],
    repetitions: int = 7,
) -> Rates:
    """Run the cases in turn, A B C A B C ..., after one round that is not counted.

    Args:
        cases: What to run; each call does the same work.
        units: Units of work (env steps, say) in one call, for all cases or for each.
        repetitions: Counted rounds.

    Returns:
        Units per second of every case, one number per round.
    """
    rates: Rates = {name: [] for name in cases}
    for repetition in range(repetitions + 1):
        for name, run in cases.items():
            begin = perf_counter()
            run()
            seconds = perf_counter() - begin
            if repetition:
                count = units if isinstance(units, int) else units[name]
                rates[name].append(count / seconds)
    return rates


def repeated(run: Callable[[], object], seconds: float) -> tuple[Callable[[], object], int]:
    """Run as often in one go as fits into the time, at least once; and how often that is."""
    run()  # compiles
    begin = perf_counter()
    run()
    count = max(1, int(seconds / (perf_counter() - begin)))

    def run_all() -> None:
        for _ in range(count):
            run()

    return run_all, count


def median_ratio(rates: Rates, name: str, base: str) -> float:
    """Return name's rate over base's, the median over the rounds: the machine may drift."""
    return statistics.median(a / b for a, b in zip(rates[name], rates[base], strict=True))


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Lay out a Markdown table; the first column is text, the others are right-aligned."""
    lines = [header, [":---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(*packages: str) -> str:
    """Say on what the figures were made: processor, cores, Python and package versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return (
        f"{model}, {cores} cores usable, {platform.system()}, "
        f"Python {sys.version.split()[0]}, {versions}"
    )
