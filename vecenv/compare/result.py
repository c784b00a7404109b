"""Results of a comparison: rates, shares, and one plain verdict, in several forms."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vecenv.backends import BACKENDS
from vecenv.compare.serving import FAILED, OK, UNAVAILABLE, Round
from vecenv.files import whole_file, write_json
from vecenv.timing.report import TimingReport, draw_shares, new_figure, new_table

__all__ = ["Case", "Comparison", "check_picture"]

# Factors nearer to 1 than this are not reported: two processes with the same code differ by as
# much, and keep this difference as long as they live.
_HARDLY = 1.1
_NOISY = 1.5  # factors up to this are unsettled if rounds overlap
_BUSY_CORES = 0.25  # cores used by other programs, from which it is reported
_NOTE_LENGTH = 144  # two lines; the JSON has the whole text
_STATES = {"unavailable": "skipped", "failed": "failed"}
_ROW_INCHES = 0.27


@dataclass
class Case:
    """One backend with one number of envs.

    Attributes:
        backend: One of `vecenv.backends.COMPARED`.
        num_envs: Number of envs; 1 for "loop".
        status: "ok", "unavailable" or "failed".
        reason: Why it is not "ok", in one line.
        rounds: Its results in each round.
        beside: Results of "loop" in the same rounds; empty without "loop".
        start_s: Seconds to make and reset the envs, without imports.
        reset_s: Seconds of the first reset of all envs.
        memory_bytes: Proportional set size of its process and workers, Python included.
        num_workers: Number of processes that step the envs; None without workers.
        report: Shares of the time in a separate run; None for backends without timing.
    """

    backend: str
    num_envs: int
    status: str = OK
    reason: str = ""
    rounds: list[Round] = field(default_factory=list)
    beside: list[Round] = field(default_factory=list)
    start_s: float | None = None
    reset_s: float | None = None
    memory_bytes: int | None = None
    num_workers: int | None = None
    report: TimingReport | None = None

    @property
    def is_loop(self) -> bool:
        """Whether it steps a single env, the baseline of the others."""
        return BACKENDS[self.backend].stepping == "loop"

    @property
    def name(self) -> str:
        """Backend and number of envs."""
        return self.backend if self.is_loop else f"{self.backend}, {self.num_envs}"

    @property
    def is_measured(self) -> bool:
        """Whether it ran to the end."""
        return self.status == OK and bool(self.rounds)

    @property
    def rates(self) -> list[float]:
        """Env steps per second in each round."""
        return [one.rate for one in self.rounds]

    @property
    def steps_per_second(self) -> float:
        """All env steps divided by all seconds."""
        return _rate(self.rounds)

    @property
    def spread(self) -> float:
        """Difference between the highest and lowest rate of a round, divided by the rate."""
        return (max(self.rates) - min(self.rates)) / self.steps_per_second

    @property
    def speed_up(self) -> float | None:
        """Its rate divided by that of "loop" in the same rounds; None without "loop"."""
        return self.steps_per_second / _rate(self.beside) if self.beside else None

    def is_level_with(self, other: Case) -> bool:
        """Return whether neither is clearly faster: their rounds overlap, or nearly."""
        slow, fast = sorted((self, other), key=lambda case: case.steps_per_second)
        is_near = slow.steps_per_second * _HARDLY > fast.steps_per_second
        return is_near or max(slow.rates) >= min(fast.rates)


@dataclass
class Comparison:
    """Backends side by side on one env.

    Attributes:
        env: The env's name, as the user gave it.
        settings: The options of the run.
        machine: Processor, cores, versions.
        others_busy: Most cores that other programs used during the run; None if the system does not
            tell.
        cases: One per backend and number of envs, in the order of the options.
    """

    env: str
    settings: dict[str, Any]
    machine: str
    cases: list[Case] = field(default_factory=list)
    others_busy: float | None = None

    @property
    def measured(self) -> list[Case]:
        """The cases that ran to the end."""
        return [case for case in self.cases if case.is_measured]

    @property
    def verdict(self) -> str:
        """The fastest backend and its bottleneck, as sentences."""
        if not self.measured:
            reasons = [case.reason for case in self.cases if case.status == FAILED]
            reasons += [case.reason for case in self.cases if case.status == UNAVAILABLE]
            return ": ".join(["nothing could be run", *reasons[:1]])
        return " ".join(filter(None, (self._about_speed(), self._about_measuring())))

    def _about_speed(self) -> str:
        best, *rest = sorted(self.measured, key=lambda case: -case.steps_per_second)
        if level := [case for case in rest if case.is_level_with(best)]:
            return self._about_tie(best, level)
        if all(case.is_loop for case in self.measured):
            was_asked = any(not case.is_loop for case in self.cases)
            text = "No vector env could be measured" if was_asked else "No vector env was measured"
            return f"{text}; one env in a loop makes {best.steps_per_second:,.0f} steps/s."
        envs = "" if best.is_loop else " env" if best.num_envs == 1 else " envs"
        text = f"Fastest: {best.name}{envs}, {best.steps_per_second:,.0f} steps/s"
        if best.is_loop:
            return f"{text}: no vector env is faster than one env in a loop."
        if best.speed_up is not None:
            text += f", {best.speed_up:.3g} x one env in a loop"
        return f"{text}." if best.report is None else f"{text}. There, {self._about_time(best)}."

    def _about_time(self, best: Case) -> str:
        """Return where the time goes; add advice unless it is followed already."""
        assert best.report is not None
        advised = best.report.advice.backend
        for case in self.measured:
            if case.backend == advised and case.num_envs == best.num_envs and case is not best:
                name, share = max(best.report.shares.items(), key=lambda item: item[1])
                return f"{share:.0%} of the time goes to {name}; {case.name} is not faster"
        return best.report.verdict

    def _about_tie(self, best: Case, level: list[Case]) -> str:
        """Return the names of the level cases, in the order of the table."""
        names = "; ".join(case.name for case in self.cases if case in [best, *level])
        least, most = level[-1].steps_per_second, best.steps_per_second
        rates = f"{most:,.0f} steps/s"
        if f"{least:,.0f} steps/s" != rates:
            rates = f"{least:,.0f} to {rates}"
        if least * _NOISY < most:
            return (
                f"Too noisy to say what is fastest: the rounds of {names} overlap ({rates}). "
                "Measure more and longer rounds, on an idle machine."
            )
        return f"A tie: {names} ({rates})."

    def _about_measuring(self) -> str:
        """Return what else may have changed the rates."""
        if (self.others_busy or 0.0) < _BUSY_CORES:
            return ""
        return (
            f"Other programs kept {self.others_busy:.1f} cores busy meanwhile: on an idle machine "
            "it may be otherwise."
        )

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the numbers as JSON, and write them to a file if one is given.

        Names contain the unit (`_s`, `_bytes`); rates are env steps per second.

        Raises:
            OSError: The file can't be written.
        """
        cases = []
        for case in self.cases:
            numbers = {k: v for k, v in vars(case).items() if k not in ("report", "beside")}
            numbers["rounds"] = [one._asdict() for one in case.rounds]
            numbers["rates"] = case.rates
            if case.is_measured:
                numbers["steps_per_second"] = case.steps_per_second
                numbers["spread"], numbers["speed_up"] = case.spread, case.speed_up
            report = None if case.report is None else json.loads(case.report.to_json())
            cases.append({**numbers, "report": report})
        content = {
            "env": self.env,
            "settings": self.settings,
            "machine": self.machine,
            "others_busy": self.others_busy,
            "verdict": self.verdict,
            "cases": cases,
        }
        return write_json(content, path, str)

    def plot(self, path: str | Path) -> None:
        """Draw rates and shares into a file; the ending names the format.

        Raises:
            ImportError: matplotlib is missing (`pip install vecenv[plots]`).
            OSError: The file can't be written.
        """
        reports = {case.name: case.report for case in self.measured if case.report is not None}
        heights = [0.9 + _ROW_INCHES * len(self.measured)]
        heights += [0.9 + 1.5 * _ROW_INCHES * len(reports)] if reports else []
        figure = new_figure(10, sum(heights))
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        _draw_rates(parts[0].subplots(), self)
        if reports:
            draw_shares(parts[1].subplots(), reports)
        with whole_file(path) as aside:
            figure.savefig(aside, dpi=130)

    def __rich__(self) -> Any:
        """Return speeds, shares and the verdict, for `rich` to print."""
        reasons = dict.fromkeys(case.reason for case in self.cases if case.reason)
        notes = {reason: number for number, reason in enumerate(reasons, 1)}
        parts: list[Any] = [_speed_table(self, notes)]
        parts += [_note(f"({number}) {reason}") for reason, number in notes.items()]
        parts.append(Text(self.machine, style="dim"))
        if any(case.report is not None for case in self.cases):
            parts.append(_share_table(self))
        if self.measured:
            parts.append(Text(self.verdict, style="bold"))
        return Group(*parts)


def _note(text: str) -> Text:
    return Text(textwrap.shorten(text, _NOTE_LENGTH, placeholder="…"))


def _rate(rounds: Sequence[Round]) -> float:
    """Return env steps per second of several rounds together."""
    return sum(one.steps for one in rounds) / sum(one.seconds for one in rounds)


# -- as tables -----------------------------------------------------------------------------------


def _speed_table(comparison: Comparison, notes: dict[str, int]) -> Table:
    settings = comparison.settings
    title = (
        f"{comparison.env}: env steps per second in {settings['rounds']} rounds of "
        f"{settings['round_s']:g} s or more"
    )
    columns = ["backend", "envs", "steps/s", "spread", "x loop", "start", "memory"]
    table = new_table(title, columns)
    for case in comparison.cases:
        start = "" if case.start_s is None else f"{case.start_s:.2f} s"
        memory = "" if case.memory_bytes is None else f"{case.memory_bytes / 2**20:,.0f} MiB"
        rate, spread, factor = "", "", ""
        if not case.is_measured:
            rate = f"{_STATES[case.status]} ({notes[case.reason]})"
        else:
            rate = f"{case.steps_per_second:,.0f}"
            spread = f"{case.spread:.0%}" if len(case.rates) > 1 else ""
        if case.is_measured and case.speed_up is not None:
            factor = f"{case.speed_up:.{2 if case.speed_up < 1000 else 0}f}"
        table.add_row(case.backend, str(case.num_envs), rate, spread, factor, start, memory)
    return table


def _share_table(comparison: Comparison) -> Table:
    title = "where the time goes (runs of their own, timing on)"
    table = new_table(title, padding=(0, 1, 0, 0))  # for 80 columns
    reports = [(case, case.report) for case in comparison.cases if case.report is not None]
    names = list(dict.fromkeys(name for _, report in reports for name in report.shares))
    table.add_column("backend", no_wrap=True)
    for column in ("envs", *names):
        header = column.replace(" ", "\n").replace("-", "-\n")
        header = header.replace("straggler", "strag-\ngler").replace("compute", "com-\npute")
        table.add_column(Text(header), justify="right")
    for case, report in reports:
        shares = [f"{report.shares.get(name, 0.0):.0%}" for name in names]
        table.add_row(case.backend, str(case.num_envs), *shares)
    return table


# -- as a picture ----------------------------------------------------------------------------------


def check_picture(path: Path) -> None:
    """Raise for a path that no picture can be written to, before the work is done.

    Raises:
        ValueError: The ending names no known format.
        ImportError: matplotlib is missing.
    """
    known = new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"plot is {str(path)!r}, expected an ending of {', '.join(sorted(known))}")


def _draw_rates(axes: Any, comparison: Comparison) -> None:
    """Draw a point for each case, and a line from its lowest to its highest round."""
    measured = comparison.measured
    for row, case in enumerate(measured):
        rate, most = case.steps_per_second, max(case.rates)
        error = [[rate - min(case.rates)], [most - rate]]
        colour = BACKENDS[case.backend].colour
        axes.errorbar(rate, row, xerr=error, fmt="o", color=colour, capsize=2)
        label = f"{rate:,.0f}"
        if case.speed_up is not None and not case.is_loop:
            label += f"   {case.speed_up:.3g} x loop"
        axes.text(most * 1.06, row, label, va="center", fontsize=8)
    axes.set_yticks(range(len(measured)), [case.name for case in measured])
    axes.invert_yaxis()
    axes.set_xscale("log")  # bars can't begin at zero on this scale, so points are drawn
    axes.grid(axis="x", alpha=0.3)
    left, right = axes.get_xlim()
    axes.set_xlim(left, right * 4)
    axes.set_xlabel("env steps per second (point: all rounds, line: lowest to highest round)")
    axes.set_title(comparison.env, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
