"""TimingReport: shares of the wall time, per worker and per env, with advice, tables, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from vecenv.files import whole_file, write_json
from vecenv.machine import pss_bytes
from vecenv.timing.advice import Advice, advise, duration
from vecenv.timing.recording import Recording, Share

__all__ = ["EnvTimes", "TimingReport", "WorkerTimes", "draw_shares", "new_figure", "new_table"]

_NUM_SLOWEST = 5
_SLOW = 1.25  # times the median env's mean time
_UNITS = {
    "wall_s, latest_s, start_s": "s",
    "steps_per_second": "env steps per second",
    "shares": "share of wall_s",
    "busy": "share of wall_s",
    "gains": "env steps per second if that share took no time",
    "other_threads": "share of wall_s, beside the shares",
    "*_ns": "ns",
    "memory_bytes": "bytes",
    "others_load": "processors",
    "cpu_share": "processor time / time of env steps",
}
_BAR_WIDTH, _LEAST_BAR = 22, 8
_NAME_WIDTH = 19  # of a share; longer names shorten the bar, then are cut
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class EnvTimes:
    """Durations of the steps, or the resets, of one env or of all envs.

    Attributes:
        name: "env 3", or "all envs".
        num_steps: Number of steps, or of resets; resets are not among steps.
        mean_ns, max_ns: Over all steps.
        p50_ns, p90_ns, p99_ns: Over the latest, see `TimingReport.latest_s`; None without any.
        is_slow: Whether an env takes much longer than most others.
    """

    name: str
    num_steps: int
    mean_ns: float
    p50_ns: float | None
    p90_ns: float | None
    p99_ns: float | None
    max_ns: float
    is_slow: bool = False


@dataclass(frozen=True)
class WorkerTimes:
    """A process that steps envs.

    Attributes:
        name: "worker 0", or "caller" for the calling process.
        first_env, last_env: Its envs.
        busy: Share of the wall time in which at least one of its envs was at work.
        start_s: Seconds from its start until its envs were made; None before, and of the caller.
        memory_bytes: Its proportional share of memory (PSS) now; None if the system does not say.
    """

    name: str
    first_env: int
    last_env: int
    busy: float
    start_s: float | None
    memory_bytes: int | None


@dataclass(frozen=True)
class TimingReport:
    """Where the time went.

    Attributes:
        backend: Class of the vector env.
        num_envs: Of the vector env.
        stamped: "envs" if steps and resets of envs are stamped one by one; "kernel" if calls of
            compiled code or of Ray's actors are, which may include resets; "nothing" if only the
            caller's time is known.
        wall_s: Seconds that the report covers, without the time of timing itself.
        latest_s: Seconds at their end that the percentiles cover.
        num_steps: Env steps that ended, without resets; of envs that are not stamped one by one,
            rows that were returned.
        steps_per_second: `num_steps` over `wall_s`.
        shares: Shares of the wall time by name, which add up to 1: those of `Share` inside calls of
            the vector env, if it is not stamped only "env calls"; phases that the user named, with
            one of these names as "other (phase)"; and "other".
        gains: Steps per second, by name, if that share took no time; limited by the envs' own time.
        other_threads: Shares of the wall time of phases in other threads, not part of `shares`.
        first_ready: Whether envs were sent and received rather than stepped all at once.
        cpu_share: Processor time of env steps over their duration: 1 if they only compute, 0 if
            they only wait; None if not known.
        others_load: Processors that other processes kept busy; None if not known.
        envs: Step times of all envs together; None for envs that are not stamped.
        resets: Reset times of all envs together; None if there were none, or it is not known.
        slowest: The envs whose steps take longest on average.
        workers: One entry per worker.
        advice: A change that may shorten the largest share.
    """

    backend: str
    num_envs: int
    stamped: str
    wall_s: float
    latest_s: float
    num_steps: int
    steps_per_second: float
    shares: dict[str, float]
    gains: dict[str, float]
    other_threads: dict[str, float]
    first_ready: bool
    cpu_share: float | None
    others_load: float | None
    envs: EnvTimes | None
    resets: EnvTimes | None
    slowest: list[EnvTimes]
    workers: list[WorkerTimes]
    advice: Advice

    @property
    def verdict(self) -> str:
        """One line: the largest cost and the advice on it."""
        name, share = max(self.shares.items(), key=lambda item: item[1])
        return f"{share:.0%} of the time goes to {name}: {self.advice.text}"

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the numbers as JSON, and write them to `path` if given.

        Names end in the unit (`_s`, `_ns`, `_bytes`), as the entry "units" explains.
        """
        return write_json({**asdict(self), "verdict": self.verdict, "units": _UNITS}, path)

    def plot(self, path: str | Path) -> None:
        """Draw the shares into a file; its suffix selects the format.

        Raises:
            ImportError: matplotlib is missing (`pip install vecenv[plots]`).
            OSError: The file can't be written.
        """
        figure = new_figure(10, 2.2)
        draw_shares(figure.subplots(), {self.backend: self})
        with whole_file(path) as aside:
            figure.savefig(aside, dpi=130)

    def __rich__(self) -> Any:
        """Return tables with bars and the verdict, for rich to print."""
        return _tables(self)

    def __str__(self) -> str:
        """Return the tables as plain text, 80 columns wide."""
        console = Console(
            width=80, color_system=None, highlight=False, force_jupyter=False, emoji=False
        )
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def make_report(found: Recording) -> TimingReport:
    """Compute a report from running totals and the recording of their latest part."""
    wall_ns = found.log.wall_ns
    begin_ns, calls, stamps = found.window()
    own_ns = found.shares_ns.items()
    is_split = found.stamped != "nothing"
    spent_ns = {name.value: ns for name, ns in own_ns if ns or (name != Share.UNSPLIT) == is_split}
    for name, ns in found.log.phases_ns.items():
        spent_ns[f"{name} (phase)" if name in (*Share, "other") else name] = ns
    spent_ns["other"] = wall_ns - sum(spent_ns.values())
    steps, resets, slowest = _env_times(found, stamps)
    num_steps = int(found.counts[0].sum()) if found.rings else found.num_rows
    bound_ns = min(found.bound_ns(), wall_ns)
    gains = {}
    for name, ns in spent_ns.items():
        is_of_envs = name in (Share.COMPUTE, Share.RESET, Share.STRAGGLERS, Share.UNSPLIT)
        gains[name] = num_steps / max(wall_ns - ns, 0 if is_of_envs else bound_ns, 1) * 1e9
    largest = max(spent_ns, key=lambda name: spent_ns[name])
    return TimingReport(
        backend=found.backend,
        num_envs=found.chunks[-1],
        stamped=found.stamped,
        wall_s=wall_ns / 1e9,
        latest_s=min(int(calls["end_ns"].max(initial=begin_ns)) - begin_ns, wall_ns) / 1e9,
        num_steps=num_steps,
        steps_per_second=num_steps / wall_ns * 1e9,
        shares={name: ns / wall_ns for name, ns in spent_ns.items()},
        gains=gains,
        other_threads={name: ns / wall_ns for name, ns in found.log.others_ns.items()},
        first_ready=found.num_receives > 0,
        cpu_share=found.cpu_share,
        others_load=found.others_load(),
        envs=steps,
        resets=resets,
        slowest=slowest,
        workers=_workers(found) if found.rings else [],
        advice=advise(largest, found, num_steps, steps and steps.mean_ns),
    )


def _env_times(
    found: Recording, stamps: np.ndarray | None
) -> tuple[EnvTimes | None, EnvTimes | None, list[EnvTimes]]:
    """Return the times of all steps, of all resets, and of the envs whose steps take longest."""
    if stamps is None or not found.counts.any():
        return None, None, []
    counts, means_ns = found.counts[0], found.spent_ns[0] / np.maximum(found.counts[0], 1)
    limit_ns = _SLOW * float(np.median(means_ns[counts > 0])) if counts.any() else 0.0

    def times(name: str, kind: int, env: int | slice) -> EnvTimes | None:
        count = int(found.counts[kind, env].sum())
        if count == 0:
            return None
        chosen = stamps["is_reset"] == bool(kind)
        if isinstance(env, int):
            chosen &= stamps["env_id"] == env
        latest_ns = (stamps["end_ns"] - stamps["begin_ns"])[chosen]
        mean_ns = float(found.spent_ns[kind, env].sum()) / count
        p50, p90, p99, is_slow = None, None, None, False
        if len(latest_ns) > 0:
            p50, p90, p99 = np.percentile(latest_ns, (50, 90, 99)).tolist()
            # Reliably above the limit, and not because of single long steps.
            error_ns = 2 * float(latest_ns.std()) / max(len(latest_ns) - 1, 1) ** 0.5
            is_slow = len(latest_ns) > 1 and mean_ns - error_ns > limit_ns
        longest_ns = float(found.longest_ns[kind, env].max())
        return EnvTimes(name, count, mean_ns, p50, p90, p99, longest_ns, is_slow)

    every = slice(None)
    ranked = np.argsort(-means_ns, kind="stable")[:_NUM_SLOWEST].tolist() if len(counts) > 1 else []
    slowest = [one for env in ranked if (one := times(f"env {env}", 0, env)) is not None]
    return times("all envs", 0, every), times("all envs", 1, every), slowest


def _workers(found: Recording) -> list[WorkerTimes]:
    workers = list[WorkerTimes]()
    number = 0
    for process, chunk, busy_ns in zip(
        found.processes, pairwise(found.chunks), found.worker_ns.tolist(), strict=True
    ):
        name, pid, start_s = "caller", None, None
        if process is not None:
            name, pid, start_s = f"worker {number}", process.pid, process.start_s
            number += 1
        if start_s is not None and start_s < 0:  # it is being replaced
            start_s = None
        busy = min(busy_ns / found.log.wall_ns, 1.0)
        workers.append(WorkerTimes(name, chunk[0], chunk[1] - 1, busy, start_s, pss_bytes(pid)))
    return workers


# -- as tables -------------------------------------------------------------------------------------


def new_table(title: str, columns: Sequence[str] = (), **options: Any) -> Table:
    """Return a table under a title, with columns of numbers but for the first and nameless ones."""
    heading = Text(title, "table.title") if title else None
    table = Table(title=heading, title_justify="left", **options)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number and column else "left")
    return table


def _bar(share: float, width: int) -> str:
    """Draw a share, 0 to 1, as a bar of at most `width` characters.

    Example:
        >>> _bar(0.5, 8)
        '████'
    """
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _tables(report: TimingReport) -> Group:
    """Return shares, workers, envs, notes and the verdict, to be printed with rich."""
    title = (
        f"{report.backend}, {report.num_envs} env{'s' if report.num_envs != 1 else ''}: "
        f"{report.steps_per_second:,.0f} steps/s "
        f"({report.num_steps:,} in {report.wall_s:.2f} s)"
    )
    spare = _NAME_WIDTH + _BAR_WIDTH - max(_NAME_WIDTH, *map(len, report.shares))
    width = max(spare, _LEAST_BAR)
    shares = new_table(title, ("where the time goes", "share", "", "steps/s without it"))
    shares.columns[0].no_wrap = True  # but cut
    shares.columns[2].min_width = width
    for name, share in report.shares.items():
        shares.add_row(Text(name), f"{share:.1%}", _bar(share, width), f"{report.gains[name]:,.0f}")
    workers = new_table("", ("process", "envs", "busy", "", "idle", "start", "memory"))
    for one in report.workers:
        first, last, memory_bytes = one.first_env, one.last_env, one.memory_bytes
        workers.add_row(
            one.name,
            f"{first}" if first == last else f"{first}-{last}",
            f"{one.busy:.1%}",
            _bar(one.busy, 12),
            f"{1 - one.busy:.1%}",
            "" if one.start_s is None else f"{one.start_s:.2f} s",
            "" if memory_bytes is None else f"{memory_bytes / 2**20:.0f} MiB",
        )
    envs = new_table("", ("times of", "count", "mean", "p50", "p90", "p99", "max"))
    slow = [(times, f"{times.name} (slow)") for times in report.slowest if times.is_slow]
    for times, name in ((report.envs, "steps"), *slow, (report.resets, "resets")):
        if times is not None:
            lengths = (times.mean_ns, times.p50_ns, times.p90_ns, times.p99_ns, times.max_ns)
            envs.add_row(name, f"{times.num_steps:,}", *map(duration, lengths))
    parts: list[Any] = [table for table in (shares, workers, envs) if table.row_count]
    if report.stamped == "kernel":
        parts.append("How long resets inside of steps take is unknown: whole calls are stamped.")
    if report.envs is not None and report.latest_s < 0.99 * report.wall_s:
        parts.append(
            f"Percentiles are those of the latest {report.latest_s:.3g} s of {report.wall_s:.3g} s;"
            " all other numbers are about the whole time."
        )
    if report.other_threads:
        named = ", ".join(f"{name} {share:.1%}" for name, share in report.other_threads.items())
        parts.append(Text(f"In other threads, beside these: {named} of the time."))
    return Group(*parts, Text(report.verdict, style="bold"))


# -- as a picture ----------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure; sizes in inches.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install vecenv[plots]") from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_shares(axes: Any, reports: Mapping[str, TimingReport]) -> None:
    """Draw one stacked bar per report into matplotlib axes."""
    shares = [report.shares for report in reports.values()]
    names = list(dict.fromkeys(name for one in shares for name, share in one.items() if share))
    labels = [f"{title}\n{one.steps_per_second:,.0f} steps/s" for title, one in reports.items()]
    left = np.zeros(len(reports))
    for name in names:
        widths = np.array([100 * one.get(name, 0.0) for one in shares])
        bars = axes.barh(labels, widths, left=left, label=name)
        told = [f"{width:.0f} %" if width >= 6 else "" for width in widths]
        axes.bar_label(bars, told, label_type="center", fontsize=9)
        left += widths
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of wall time (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
