"""TimingReport: shares of the wall time, advice, times of workers and envs, as table and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from vecenv.files import write_json
from vecenv.timing.advice import Advice, advise, duration
from vecenv.timing.recording import Recording, Share

__all__ = ["EnvTimes", "TimingReport", "as_number", "draw_shares", "new_figure", "new_table"]

_NUM_SLOWEST = 5
_SLOW = 1.25  # times the median env's mean time
_UNITS = {
    "wall_s": "s",
    "steps_per_second": "env steps per second",
    "shares": "share of wall_s",
    "busy": "share of wall_s",
    "gains": "env steps per second if that share took no time",
    "other_threads": "share of wall_s, beside the shares",
    "*_ns": "ns",
    "others_load": "processors",
    "cpu_share": "processor time / time of env steps",
}
_BAR_WIDTH, _LEAST_BAR = 22, 8
_NAME_WIDTH = 19  # of a share; longer names first shorten the bars, then are cut


@dataclass(frozen=True)
class EnvTimes:
    """Durations of the steps, or the resets, of one env or of all envs.

    Attributes:
        name: "env 3", or "all envs".
        num_steps: Number of steps, or of resets; resets are not among steps.
        mean_ns, max_ns: Mean and maximum over all of them.
        is_slow: Whether an env takes much longer than most others.
    """

    name: str
    num_steps: int
    mean_ns: float
    max_ns: float
    is_slow: bool = False


@dataclass(frozen=True)
class TimingReport:
    """Where the time went.

    Attributes:
        backend: Class of the vector env.
        num_envs: Number of envs of the vector env.
        stamped: "envs" if steps and resets of envs are stamped one by one; "kernel" if calls of
            compiled code or Ray's actors are stamped, which may include resets; "nothing" if only
            the caller's time is known.
        wall_s: Seconds that the report covers, without timing's own time.
        num_steps: Env steps that ended, without resets; if envs are not stamped one by one, the
            number of returned rows.
        steps_per_second: `num_steps` over `wall_s`.
        shares: Shares of the wall time by name, which add up to 1: those of `Share` inside calls of
            the vector env, or only "env calls" if it is not stamped; phases that the user named (as
            "other (phase)" if the name is taken); and "other".
        gains: By share, the steps per second if it took no time, limited by the envs' own time.
        other_threads: Shares of the wall time of phases in other threads, not part of `shares`.
        first_ready: Whether envs were sent and received, rather than all stepped together.
        cpu_share: Processor time of env steps over their duration: 1 if they only compute, 0 if
            they only wait; None if unknown.
        others_load: Number of processors that other processes kept busy; None if unknown.
        envs: Step times of all envs together; None if envs are not stamped.
        resets: Reset times of all envs together; None if there were none, or if unknown.
        slowest: The envs whose steps take longest on average.
        busy: For each worker, "worker 0" or "caller", the share of the wall time in which at least
            one of its envs was at work; empty if envs are not stamped one by one.
        advice: A change that may shorten the largest share.
    """

    backend: str
    num_envs: int
    stamped: str
    wall_s: float
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
    busy: dict[str, float]
    advice: Advice

    @property
    def verdict(self) -> str:
        """One line: the largest cost and advice on it."""
        name, share = max(self.shares.items(), key=lambda item: item[1])
        return f"{share:.0%} of the time goes to {name}: {self.advice.text}"

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the numbers as JSON; also write them to `path` if given.

        Names end in their unit (`_s`, `_ns`, `_bytes`), as the entry "units" explains.
        """
        return write_json({**asdict(self), "verdict": self.verdict, "units": _UNITS}, path)

    def __rich__(self) -> Any:
        """Return a table of the shares, notes and the verdict, which rich prints."""
        title = (
            f"{self.backend}, {self.num_envs} env{'s' if self.num_envs != 1 else ''}: "
            f"{self.steps_per_second:,.0f} steps/s "
            f"({self.num_steps:,} in {self.wall_s:.2f} s)"
        )
        width = _BAR_WIDTH if max(map(len, self.shares)) <= _NAME_WIDTH else _LEAST_BAR
        shares = new_table(title, ("where the time goes", "share", "", "steps/s without it"))
        shares.columns[0].no_wrap = True  # cut instead
        shares.columns[2].min_width = width
        for name, share in self.shares.items():
            shares.add_row(
                Text(name), f"{share:.1%}", "█" * round(share * width), f"{self.gains[name]:,.0f}"
            )
        times = {"a step": self.envs, "a reset": self.resets}
        times |= {f"{one.name} (slow)": one for one in self.slowest if one.is_slow}
        told = [
            f"{name} {duration(one.mean_ns)}, at most {duration(one.max_ns)}"
            for name, one in times.items()
            if one is not None
        ]
        parts: list[Any] = [shares, "; ".join(told)] if told else [shares]
        if self.stamped == "kernel":
            parts.append("How long resets inside steps take is unknown: whole calls are stamped.")
        if self.other_threads:
            named = ", ".join(f"{name} {share:.1%}" for name, share in self.other_threads.items())
            parts.append(Text(f"In other threads, beside these: {named} of the time."))
        return Group(*parts, Text(self.verdict, style="bold"))

    def __str__(self) -> str:
        """Return the table as plain text, 80 columns wide."""
        console = Console(
            width=80, color_system=None, highlight=False, force_jupyter=False, emoji=False
        )
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def make_report(found: Recording) -> TimingReport:
    """Compute a report from running totals and the recording of their latest part."""
    wall_ns = found.log.wall_ns
    own_ns = found.shares_ns.items()
    is_split = found.stamped != "nothing"
    spent_ns = {name.value: ns for name, ns in own_ns if ns or (name != Share.UNSPLIT) == is_split}
    for name, ns in found.log.phases_ns.items():
        spent_ns[f"{name} (phase)" if name in (*Share, "other") else name] = ns
    spent_ns["other"] = wall_ns - sum(spent_ns.values())
    steps, resets, slowest = _env_times(found)
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
        busy=_busy(found) if found.rings else {},
        advice=advise(largest, found, num_steps, steps and steps.mean_ns),
    )


def _env_times(found: Recording) -> tuple[EnvTimes | None, EnvTimes | None, list[EnvTimes]]:
    """Return the times of all steps, of all resets, and of the envs with the longest steps."""
    counts, means_ns = found.counts[0], found.spent_ns[0] / np.maximum(found.counts[0], 1)
    limit_ns = _SLOW * float(np.median(means_ns[counts > 0])) if counts.any() else 0.0
    # An env is slow if it is reliably above the limit, and not because of single long steps.
    variances = np.maximum(found.squares / np.maximum(counts, 1) - means_ns**2, 0.0)
    errors_ns = 2 * np.sqrt(variances / np.maximum(counts - 1, 1))
    is_slow = (counts > 1) & (means_ns - errors_ns > limit_ns)

    def times(name: str, kind: int, env: int | slice, is_slow: bool = False) -> EnvTimes | None:
        if (count := int(found.counts[kind, env].sum())) == 0:
            return None
        mean_ns = float(found.spent_ns[kind, env].sum()) / count
        return EnvTimes(name, count, mean_ns, float(found.longest_ns[kind, env].max()), is_slow)

    every = slice(None)
    ranked = np.argsort(-means_ns, kind="stable")[:_NUM_SLOWEST].tolist() if len(counts) > 1 else []
    slowest = [times(f"env {env}", 0, env, bool(is_slow[env])) for env in ranked]
    known = [one for one in slowest if one is not None]
    return times("all envs", 0, every), times("all envs", 1, every), known


def _busy(found: Recording) -> dict[str, float]:
    """Return the share of the wall time in which each worker was at work."""
    names = [f"worker {k}" for k in range(len(found.processes))]
    if found.processes[0] is None:
        names = ["caller", *names[:-1]]
    shares = np.minimum(found.worker_ns / found.log.wall_ns, 1.0)
    return dict(zip(names, shares.tolist(), strict=True))


# -- as a table ------------------------------------------------------------------------------------


def new_table(title: str, columns: Sequence[str] = (), **options: Any) -> Table:
    """Return a table with a title; columns hold numbers, except the first and unnamed ones."""
    heading = Text(title, "table.title") if title else None
    table = Table(title=heading, title_justify="left", **options)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number and column else "left")
    return table


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
        shown = [f"{width:.0f} %" if width >= 6 else "" for width in widths]
        axes.bar_label(bars, shown, label_type="center")
        left += widths
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of wall time (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def as_number(value: float) -> str:
    """Return a number with one decimal, or with two significant digits if it is below 1."""
    return f"{value:.1f}" if value == 0 or abs(value) >= 1 else f"{value:.2g}"
