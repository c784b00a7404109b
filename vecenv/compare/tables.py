"""A comparison as rich tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vecenv.compare.result import Case, Comparison
from vecenv.compare.serving import UNAVAILABLE
from vecenv.timing.attribution import ENV_RESET
from vecenv.timing.tables import new_table, shorten

__all__ = ["comparison_tables"]

_NOTE_LENGTH = 144  # two lines; the JSON has all of it
_NOTHING = 0.005  # a share that is shown as 0 %
_STATES = {"unavailable": "skipped", "failed": "failed"}


def comparison_tables(comparison: Comparison) -> Any:
    """Return speeds, shares, diversity and the verdict, to be printed with rich."""
    notes = _notes(comparison.cases)
    parts: list[Any] = [_speeds(comparison, notes)]
    parts += [
        Text(shorten(f"({number}) {reason}", _NOTE_LENGTH)) for reason, number in notes.items()
    ]
    parts.append(Text(comparison.machine, style="dim"))
    if any(case.report is not None for case in comparison.cases):
        parts.append(_shares(comparison))
    if comparison.diversity:
        parts.append(_diversity(comparison))
    elif comparison.diversity_reason:
        reason = f"diversity was not measured: {comparison.diversity_reason}"
        parts.append(Text(shorten(reason, _NOTE_LENGTH)))
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
        f"{comparison.env}: env steps per second in {settings['rounds']} rounds of "
        f"{settings['round_s']:g} s or more"
    )
    table = new_table(title)
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
    factor = (
        "" if case.speed_up is None else f"{case.speed_up:.{2 if case.speed_up < 1000 else 0}f}"
    )
    spread = f"{case.spread:.0%}" if len(case.rates) > 1 else ""
    return [f"{case.steps_per_second:,.0f}", spread, factor, start, memory]


def _shares(comparison: Comparison) -> Table:
    title = "where the time goes (runs of their own, timing on)"
    table = new_table(title, padding=(0, 1, 0, 0))  # for 80 columns
    reports = [(case, case.report) for case in comparison.cases if case.report is not None]
    names = list(dict.fromkeys(name for _, report in reports for name in report.shares))
    if all(report.shares.get(ENV_RESET, 0.0) < _NOTHING for _, report in reports):
        names = [name for name in names if name != ENV_RESET]
    table.add_column("backend", no_wrap=True)
    for column in ("envs", *names):
        header = Text(column.replace(" ", "\n").replace("-", "-\n"))
        if ENV_RESET in names:  # one column more
            header = Text(header.plain.replace("straggler", "strag-\ngler"))
            header = Text(header.plain.replace("compute", "com-\npute"))
        table.add_column(header, justify="right")
    for case, report in reports:
        shares = [f"{report.shares.get(name, 0.0):.0%}" for name in names]
        table.add_row(case.backend, str(case.num_envs), *shares)
    return table


def _diversity(comparison: Comparison) -> Table:
    found = comparison.diversity
    title = (
        f"how different {found[0].num_transitions:,} transitions are, from 1 env and from several"
    )
    table = new_table(title)
    base = found[0].gradient_variance
    columns = ["envs", "distinct\nstates", "distance to\nnearest (sd)", "correlation\nin a batch"]
    columns += ["policy gradient\nvariance", "over that\nof 1 env"]
    for column in columns if base else columns[:-1]:
        table.add_column(column, justify="right", no_wrap=True)
    for entry in found:
        variance = entry.gradient_variance
        cells = [
            str(entry.num_envs),
            f"{entry.distinct:.1%}",
            f"{entry.neighbour_distance:.3g}",
            "" if entry.correlation is None else f"{entry.correlation:.2f}",
            "" if variance is None else f"{variance:.2g} ± {entry.gradient_error:.1g}",
        ]
        if base:
            cells.append("" if variance is None else f"{variance / base:.2f}")
        table.add_row(*cells)
    return table
