"""A report as rich tables with bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vecenv.timing.advice import duration
from vecenv.timing.attribution import KERNEL

if TYPE_CHECKING:
    from vecenv.timing.report import TimingReport

__all__ = ["bar", "new_table", "report_tables", "shorten"]

_BAR_WIDTH = 22
_NAME_WIDTH = 19  # of a share; longer names shorten the bar, then are cut
_LEAST_BAR = 8
_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float, width: int = _BAR_WIDTH) -> str:
    """Draw a share, 0 to 1, as a bar of at most `width` characters.

    Example:
        >>> bar(0.5, 8)
        '████'
    """
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def shorten(text: str, most: int) -> str:
    """Return a text on one line, cut if it is longer than `most`.

    Example:
        >>> shorten("a long reason", 8)
        'a long…'
    """
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1].rstrip()}…"


def new_table(title: str, **options: Any) -> Table:
    """Return a table under a title on the left; names given by users are not read as markup."""
    return Table(
        title=Text(title, "table.title") if title else None, title_justify="left", **options
    )


def report_tables(report: TimingReport) -> Any:
    """Return shares, workers, envs and the verdict, to be printed with rich."""
    parts: list[Any] = [_shares(report)]
    if report.workers:
        parts.append(_workers(report))
    if report.envs is not None or report.resets is not None:
        parts.append(_envs(report))
    found = [_about_kernel(report), _about_window(report), _about_threads(report)]
    notes = list(filter(None, found))
    parts += [Text(note) for note in notes]
    parts.append(Text(report.verdict, style="bold"))
    return Group(*parts)


def _about_kernel(report: TimingReport) -> str:
    """Return the remark on the resets of compiled envs."""
    if report.stamped != KERNEL:
        return ""
    return "How long resets inside of steps take is unknown: compiled calls are stamped as one."


def _about_window(report: TimingReport) -> str:
    """Return the remark on the steps that the percentiles cover, if not all."""
    if report.envs is None or report.latest_s >= 0.99 * report.wall_s:
        return ""
    return (
        f"Percentiles are those of the latest {report.latest_s:.3g} s of {report.wall_s:.3g} s; "
        "all other numbers are about the whole time."
    )


def _about_threads(report: TimingReport) -> str:
    """Name the phases of other threads."""
    if not report.other_threads:
        return ""
    named = ", ".join(f"{name} {share:.1%}" for name, share in report.other_threads.items())
    return f"In other threads, beside these: {named} of the time."


def _shares(report: TimingReport) -> Table:
    title = (
        f"{report.backend}, {report.num_envs} env{'s' if report.num_envs != 1 else ''}: "
        f"{report.steps_per_second:,.0f} steps/s "
        f"({report.num_steps:,} in {report.wall_s:.2f} s)"
    )
    longest = max([_NAME_WIDTH, *map(len, report.shares)])
    width = max(_BAR_WIDTH - (longest - _NAME_WIDTH), _LEAST_BAR)
    table = new_table(title)
    table.add_column("where the time goes")
    table.add_column("share", justify="right")
    table.add_column("", min_width=width)
    table.add_column("steps/s without it", justify="right")
    for name, share in report.shares.items():
        shown = Text(shorten(name, _NAME_WIDTH + _BAR_WIDTH - _LEAST_BAR))
        table.add_row(shown, f"{share:.1%}", bar(share, width), f"{report.gains[name]:,.0f}")
    return table


def _workers(report: TimingReport) -> Table:
    table = new_table("")
    for column in ("process", "envs", "busy", "", "idle", "start", "memory"):
        table.add_column(column, justify="right" if column not in {"process", ""} else "left")
    for worker in report.workers:
        table.add_row(
            Text(worker.name),
            _range(worker.first_env, worker.last_env),
            f"{worker.busy:.1%}",
            bar(worker.busy, 12),
            f"{worker.idle:.1%}",
            "" if worker.start_s is None else f"{worker.start_s:.2f} s",
            "" if worker.memory_bytes is None else f"{worker.memory_bytes / 2**20:.0f} MiB",
        )
    return table


def _range(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _envs(report: TimingReport) -> Table:
    table = new_table("")
    for column in ("times of", "count", "mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="left" if column == "times of" else "right")
    slow = [(times, f"{times.name} (slow)") for times in report.slowest if times.is_slow]
    for times, name in ((report.envs, "steps"), *slow, (report.resets, "resets")):
        if times is not None:
            lengths = (times.mean, times.p50, times.p90, times.p99, times.max)
            table.add_row(Text(name), f"{times.num_steps:,}", *map(duration, lengths))
    return table
