"""A comparison as rich tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vecenv.compare.result import Case, Comparison
from vecenv.compare.serving import UNAVAILABLE

__all__ = ["comparison_tables"]

_STATES = {"unavailable": "skipped", "failed": "failed"}


def comparison_tables(comparison: Comparison) -> Any:
    """Return speeds, shares, diversity and the verdict, to be printed with rich."""
    notes = _notes(comparison.cases)
    parts: list[Any] = [_speeds(comparison, notes)]
    parts += [Text(f"({number}) {reason}") for reason, number in notes.items()]
    parts.append(Text(comparison.machine, style="dim"))
    if any(case.report is not None for case in comparison.cases):
        parts.append(_shares(comparison))
    if comparison.diversity:
        parts.append(_diversity(comparison))
    elif comparison.diversity_reason:
        parts.append(Text(f"diversity was not measured: {comparison.diversity_reason}"))
    if comparison.measured:
        parts.append(Text(comparison.verdict, style="bold"))
    return Group(*parts)


def _notes(cases: Iterable[Case]) -> dict[str, int]:
    """Number the reasons why cases were not measured."""
    reasons = dict.fromkeys(case.reason for case in cases if case.reason)
    return {reason: number for number, reason in enumerate(reasons, 1)}


def _speeds(comparison: Comparison, notes: dict[str, int]) -> Table:
    settings = comparison.settings
    title = (
        f"{comparison.env}: env steps per second, median of {settings['rounds']} rounds of "
        f"{settings['round_s']:g} s"
    )
    table = Table(title=title, title_justify="left")
    columns = ("backend", "envs", "steps/s", "spread", "x loop", "start", "memory")
    for column in columns:
        table.add_column(column, justify="left" if column == "backend" else "right")
    for case, envs in _merged(comparison.cases):
        table.add_row(case.backend, envs, *_cells(case, notes))
    return table


def _merged(cases: Iterable[Case]) -> Iterable[tuple[Case, str]]:
    """Yield what gets a row, and its envs; what is skipped for the same reason gets one."""
    skipped: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        if case.status == UNAVAILABLE:
            skipped.setdefault((case.backend, case.reason), []).append(case)
        else:
            yield case, str(case.num_envs)
    for found in skipped.values():
        yield found[0], ", ".join(str(case.num_envs) for case in found)


def _cells(case: Case, notes: dict[str, int]) -> list[str]:
    start = "" if case.start_s is None else f"{case.start_s:.2f} s"
    memory = "" if case.memory_bytes is None else f"{case.memory_bytes / 2**20:,.0f} MiB"
    if not case.is_measured:
        return [f"{_STATES[case.status]} ({notes[case.reason]})", "", "", start, memory]
    factor = "" if case.speed_up is None else f"{case.speed_up:.2f}"
    spread = f"{case.spread:.0%}" if len(case.rates) > 1 else ""
    return [f"{case.steps_per_second:,.0f}", spread, factor, start, memory]


def _shares(comparison: Comparison) -> Table:
    title = "where the time goes (runs of their own, timing on)"
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0))  # for 80 columns
    reports = [(case, case.report) for case in comparison.cases if case.report is not None]
    names = list(dict.fromkeys(name for _, report in reports for name in report.shares))
    table.add_column("backend", no_wrap=True)
    for column in ("envs", *names):
        table.add_column(column.replace(" ", "\n").replace("-", "-\n"), justify="right")
    for case, report in reports:
        shares = [f"{report.shares.get(name, 0.0):.0%}" for name in names]
        table.add_row(case.backend, str(case.num_envs), *shares)
    return table


def _diversity(comparison: Comparison) -> Table:
    found = comparison.diversity
    title = (
        f"how different {found[0].num_transitions:,} transitions are, from 1 env and from several"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for entry in found:
        table.add_column(
            f"{entry.num_envs} env{'s' if entry.num_envs > 1 else ''}", justify="right"
        )
    rows = {
        "distinct states": [f"{entry.distinct:.1%}" for entry in found],
        "distance to the nearest (sd)": [f"{entry.neighbour_distance:.3g}" for entry in found],
        "correlation in a batch (ICC)": [
            "" if entry.correlation is None else f"{entry.correlation:.2f}" for entry in found
        ],
        "policy gradient variance": [
            ""
            if entry.gradient_variance is None
            else f"{entry.gradient_variance:.2g} ± {entry.gradient_error:.1g}"
            for entry in found
        ],
    }
    base = found[0].gradient_variance
    if base:
        rows["... over that of 1 env"] = [
            "" if entry.gradient_variance is None else f"{entry.gradient_variance / base:.2f}"
            for entry in found
        ]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table
