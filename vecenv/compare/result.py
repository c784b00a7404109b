"""What a comparison found: rates, shares, diversity, and one plain verdict, in several forms."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vecenv.backends import BACKENDS
from vecenv.compare.sampling import Diversity
from vecenv.compare.serving import FAILED, OK, UNAVAILABLE, Round
from vecenv.files import whole_file, write_json
from vecenv.timing import TimingReport
from vecenv.timing.recording import Share
from vecenv.timing.report import draw_shares, new_figure, new_table

__all__ = ["Case", "Comparison", "check_picture"]

# Factors nearer to 1 than this are not worth a word: two processes that run the same code differ by
# as much, for as long as they live.
_HARDLY = 1.1
_NOISY = 1.5  # factors that rounds which overlap can't settle
_BUSY_CORES = 0.25  # that others keep busy, from which it is said
_MOST_NAMED = 4  # of a tie
_FEW_EPISODES = 2
_NOTE_LENGTH = 144  # two lines; the JSON has all of it
_NOTHING = 0.005  # a share that is shown as 0 %
_STATES = {"unavailable": "skipped", "failed": "failed"}
_ROW_INCHES = 0.27
_GAP = 0.5  # rows between numbers of envs
_CERTAIN = 2.0  # standard errors that a difference must have
_UNITS = {
    "steps_per_second, rates": "env steps per second, of all rounds and of each",
    "spread": "highest minus lowest rate / steps_per_second",
    "speed_up": "times as many steps per second as loop in the same rounds",
    "seconds, *_s": "s",
    "policy_ms": "ms",
    "memory_bytes": "bytes",
    "others_busy": "cores",
    "distinct": "share of the transitions",
    "neighbour_distance": "standard deviations",
}


@dataclass
class Case:
    """One backend with one number of envs.

    Attributes:
        backend: One of `vecenv.backends.COMPARED`.
        num_envs: How many; 1 for "loop".
        status: "ok", "unavailable" or "failed".
        reason: Why it is not "ok", in one line.
        details: A traceback.
        rounds: What it did in each.
        beside: What "loop" did in the same rounds; empty without it.
        start_s: Seconds for making and resetting the envs, imports not counted.
        reset_s: Seconds for the first reset of all envs.
        memory_bytes: Proportional set size of its process and workers, Python itself included.
        report: Where the time went in a run of its own; None for backends without timing.
    """

    backend: str
    num_envs: int
    status: str = OK
    reason: str = ""
    details: str = ""
    rounds: list[Round] = field(default_factory=list)
    beside: list[Round] = field(default_factory=list)
    start_s: float | None = None
    reset_s: float | None = None
    memory_bytes: int | None = None
    report: TimingReport | None = None

    @property
    def is_loop(self) -> bool:
        """Whether it steps one env, which others are compared with."""
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
        """Env steps per second of each round."""
        return [one.rate for one in self.rounds]

    @property
    def steps_per_second(self) -> float:
        """All env steps over all seconds."""
        return _rate(self.rounds)

    @property
    def spread(self) -> float:
        """Highest rate of a round minus the lowest, as a share of the rate."""
        return (max(self.rates) - min(self.rates)) / self.steps_per_second

    @property
    def speed_up(self) -> float | None:
        """Rate over that of "loop" in the same rounds; None without it."""
        return self.steps_per_second / _rate(self.beside) if self.beside else None

    @property
    def misses_resets(self) -> bool:
        """Whether resets take long, and rounds may have seen too few of them to say how long."""
        resets_s = (self.reset_s or 0.0) * (
            _FEW_EPISODES - sum(one.episodes for one in self.rounds)
        )
        return self.is_measured and resets_s > (_HARDLY - 1) * sum(
            one.seconds for one in self.rounds
        )

    def is_level_with(self, other: Case) -> bool:
        """Whether it can't be said which of the two is faster: their rounds overlap, or nearly."""
        slow, fast = sorted((self, other), key=lambda case: case.steps_per_second)
        is_near = slow.steps_per_second * _HARDLY > fast.steps_per_second
        return is_near or max(slow.rates) >= min(fast.rates)


@dataclass
class Comparison:
    """Backends side by side on one env.

    Attributes:
        env: As it was asked for.
        settings: The options of the run.
        machine: Processor, cores, versions.
        others_busy: Cores that other programs kept busy meanwhile, where they did most; None if the
            system does not tell.
        cases: One per backend and number of envs, in the order asked for.
        diversity: One entry per number of envs, 1 first; empty if it was not measured.
        diversity_reason: Why it was not.
        agents_per_step: Of games with several agents, how many act in a step on the average; the
            steps are games' then. None for other envs.
    """

    env: str
    settings: dict[str, Any]
    machine: str
    cases: list[Case] = field(default_factory=list)
    others_busy: float | None = None
    diversity: list[Diversity] = field(default_factory=list)
    diversity_reason: str = ""
    agents_per_step: float | None = None

    @property
    def measured(self) -> list[Case]:
        """The cases that ran to the end."""
        return [case for case in self.cases if case.is_measured]

    @property
    def verdict(self) -> str:
        """Say what is fastest and what holds it up, and what several envs are worth."""
        if not self.measured:
            reasons = [case.reason for case in self.cases if case.status == FAILED]
            reasons += [case.reason for case in self.cases if case.status == UNAVAILABLE]
            return ": ".join(["nothing could be run", *reasons[:1]])
        sentences = [self._about_speed(), self._about_others(), self._about_slowness()]
        sentences += [self._about_resets(), self._about_diversity()]
        return " ".join(filter(None, sentences))

    @property
    def fastest(self) -> list[Case]:
        """The fastest case and those that may be as fast, the fastest first."""
        found = sorted(self.measured, key=lambda case: -case.steps_per_second)
        return [case for case in found if case.is_level_with(found[0])]

    def _about_speed(self) -> str:
        best, *level = self.fastest
        if level:
            return self._about_tie(best, level)
        if all(case.is_loop for case in self.measured):
            was_asked = any(not case.is_loop for case in self.cases)
            text = "No vector env could be measured" if was_asked else "No vector env was measured"
            return f"{text}; one env in a loop makes {best.steps_per_second:,.0f} steps/s."
        text = f"Fastest: {best.name}{_envs(best)}, {best.steps_per_second:,.0f} steps/s"
        if best.is_loop:
            return f"{text}: no vector env is faster than one env in a loop."
        if best.speed_up is not None:
            text += f", {best.speed_up:.3g} x one env in a loop"
        return f"{text}." if best.report is None else f"{text}. There, {self._about_time(best)}."

    def _about_time(self, best: Case) -> str:
        """Say where the time goes, and give advice unless it has been followed here already."""
        assert best.report is not None
        advised = best.report.advice.backend
        for case in self.measured:
            if case.backend == advised and case.num_envs == best.num_envs and case is not best:
                name, share = max(best.report.shares.items(), key=lambda item: item[1])
                return f"{share:.0%} of the time goes to {name}; {case.name} is not faster"
        return best.report.verdict

    def _about_tie(self, best: Case, level: list[Case]) -> str:
        """Name those that are level, in the order of the table."""
        chosen = [best, *level]
        named = [case.name for case in self.cases if case in chosen]
        more = len(named) - _MOST_NAMED
        names = "; ".join(named[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
        slowest = level[-1].steps_per_second
        rates = f"{_span(slowest, best.steps_per_second, ',.0f')} steps/s"
        factors = [case.speed_up for case in chosen if case.speed_up is not None]
        if factors and not best.is_loop and all(not one.is_loop for one in level):
            rates += f", {_span(min(factors), max(factors), '.3g')} x one env in a loop"
        if slowest * _NOISY < best.steps_per_second:
            return (
                f"Too noisy to say what is fastest: the rounds of {names} overlap ({rates}). "
                "Measure more and longer rounds, on an idle machine."
            )
        return f"A tie: {names} ({rates})."

    def _about_others(self) -> str:
        if self.others_busy is None or self.others_busy < _BUSY_CORES:
            return ""
        return (
            f"Other programs kept {self.others_busy:.1f} cores busy meanwhile: on an idle machine "
            "it may be otherwise."
        )

    def _about_resets(self) -> str:
        missing = [case for case in self.measured if case.misses_resets]
        if not missing:
            return ""
        worst = max(missing, key=lambda case: case.reset_s or 0.0)
        return (
            f"Resets take long ({worst.name}: {worst.reset_s:.2g} s for all envs) and hardly any "
            "came: in training, which has more of them, rates are lower."
        )

    def _about_slowness(self) -> str:
        """Name the vector envs that certainly are slower than one env in a loop."""
        loop = next((case for case in self.measured if case.is_loop), None)
        if loop is None:
            return ""
        slow = [
            case
            for case in self.measured
            if (case.speed_up or 1.0) * _HARDLY < 1 and not case.is_level_with(loop)
        ]
        if not slow:
            return ""
        worst = min(slow, key=lambda case: case.speed_up or 1.0)
        return (
            f"Slower than one env in a loop: {len(slow)} of {len(self.measured)}, {worst.name} "
            f"the most ({1 / (worst.speed_up or 1.0):.3g} x)."
        )

    def _about_diversity(self) -> str:
        known = [found for found in self.diversity if found.gradient_variance]
        if len(known) < 2 or known[0].num_envs != 1:
            return ""
        first, last = known[0], known[-1]
        assert first.gradient_variance and last.gradient_variance
        ratio = last.gradient_variance / first.gradient_variance
        errors = [(one.gradient_error or 0) / (one.gradient_variance or 1) for one in (first, last)]
        told = f"At equal transitions, policy gradients from {last.num_envs} envs"
        if abs(math.log(ratio)) <= _CERTAIN * math.hypot(*errors):
            return f"{told} vary no differently from those of one env."
        worth = f", so each step is worth {1 / ratio:.2g} of them" if ratio < 1 else ""
        return f"{told} have {ratio:.2g} times the variance of one env's{worth}."

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the numbers as JSON, and write them to a file if one is given.

        Names say the unit (`_s`, `_ms`, `_bytes`), and so does the entry "units".

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
            "diversity": [asdict(found) for found in self.diversity],
            "diversity_reason": self.diversity_reason,
            "agents_per_step": self.agents_per_step,
            "units": _UNITS,
        }
        return write_json(content, path, str)

    def plot(self, path: str | Path) -> None:
        """Draw rates, shares and diversity into a file; the ending names the format.

        Raises:
            ImportError: matplotlib is missing (`pip install vecenv[plots]`).
            OSError: The file can't be written.
        """
        measured = self.measured
        reports = {case.name: case.report for case in measured if case.report is not None}
        heights = [0.9 + _ROW_INCHES * len(measured)]
        heights += [0.9 + 1.5 * _ROW_INCHES * len(reports)] if reports else []
        heights += [1.9] if self.diversity else []
        figure = new_figure(10, sum(heights))
        parts = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
        _draw_rates(next(parts).subplots(), self)
        if reports:
            draw_shares(next(parts).subplots(), reports)
        if self.diversity:
            _draw_diversity(next(parts), self)
        with whole_file(path) as aside:
            figure.savefig(aside, dpi=130)

    def __rich__(self) -> Any:
        """Return speeds, shares, diversity and the verdict, to be printed with rich."""
        notes = _notes(self.cases)
        parts: list[Any] = [_speed_table(self, notes)]
        parts += [_note(f"({number}) {reason}") for reason, number in notes.items()]
        parts.append(Text(self.machine, style="dim"))
        if any(case.report is not None for case in self.cases):
            parts.append(_share_table(self))
        if self.diversity:
            parts.append(_diversity_table(self))
        elif self.diversity_reason:
            parts.append(_note(f"diversity was not measured: {self.diversity_reason}"))
        if self.measured:
            parts.append(Text(self.verdict, style="bold"))
        return Group(*parts)


def _note(text: str) -> Text:
    return Text(textwrap.shorten(text, _NOTE_LENGTH, placeholder="…"))


def _rate(rounds: Sequence[Round]) -> float:
    """Env steps per second of some rounds together."""
    return sum(one.steps for one in rounds) / sum(one.seconds for one in rounds)


def _span(low: float, high: float, form: str) -> str:
    first, last = f"{low:{form}}", f"{high:{form}}"
    return first if first == last else f"{first} to {last}"


def _envs(case: Case) -> str:
    return "" if case.is_loop else " env" if case.num_envs == 1 else " envs"


# -- as tables -----------------------------------------------------------------------------------


def _notes(cases: Iterable[Case]) -> dict[str, int]:
    """Number the reasons why cases were not measured."""
    reasons = dict.fromkeys(case.reason for case in cases if case.reason)
    return {reason: number for number, reason in enumerate(reasons, 1)}


def _speed_table(comparison: Comparison, notes: dict[str, int]) -> Table:
    settings, agents = comparison.settings, comparison.agents_per_step
    what = "env steps" if agents is None else "steps of games"
    title = (
        f"{comparison.env}: {what} per second in {settings['rounds']} rounds of "
        f"{settings['round_s']:g} s or more"
    )
    columns = ["backend", "envs", "steps/s", "spread", "x loop", "start", "memory"]
    if agents is not None:
        columns[1:3] = ["games", "steps/s", "agents' steps/s"]
    table = new_table(title, columns)
    for case, envs in _merged(comparison.cases):
        rate, *rest = _cells(case, notes)
        if agents is not None:
            rest.insert(0, f"{agents * case.steps_per_second:,.0f}" if case.is_measured else "")
        table.add_row(case.backend, envs, rate, *rest)
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


def _share_table(comparison: Comparison) -> Table:
    title = "where the time goes (runs of their own, timing on)"
    table = new_table(title, padding=(0, 1, 0, 0))  # for 80 columns
    reports = [(case, case.report) for case in comparison.cases if case.report is not None]
    names = list(dict.fromkeys(name for _, report in reports for name in report.shares))
    if all(report.shares.get(Share.RESET, 0.0) < _NOTHING for _, report in reports):
        names = [name for name in names if name != Share.RESET]
    table.add_column("backend", no_wrap=True)
    for column in ("envs", *names):
        header = Text(column.replace(" ", "\n").replace("-", "-\n"))
        if Share.RESET in names:  # one column more
            header = Text(header.plain.replace("straggler", "strag-\ngler"))
            header = Text(header.plain.replace("compute", "com-\npute"))
        table.add_column(header, justify="right")
    for case, report in reports:
        shares = [f"{report.shares.get(name, 0.0):.0%}" for name in names]
        table.add_row(case.backend, str(case.num_envs), *shares)
    return table


def _diversity_table(comparison: Comparison) -> Table:
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


# -- as a picture ----------------------------------------------------------------------------------


def check_picture(path: Path) -> None:
    """Refuse a path that no picture can be written to, before the work is done.

    Raises:
        ValueError: The ending names no known format.
        ImportError: matplotlib is missing.
    """
    known = new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"plot is {str(path)!r}, expected an ending of {', '.join(sorted(known))}")


def _draw_rates(axes: Any, comparison: Comparison) -> None:
    measured = comparison.measured
    groups = sorted({case.num_envs for case in measured if not case.is_loop})
    rows = []
    for number, case in enumerate(measured):
        row = number + _GAP * (0 if case.is_loop else 1 + groups.index(case.num_envs))
        rows.append(row)
        rate = case.steps_per_second
        error = [[rate - min(case.rates)], [max(case.rates) - rate]]
        style = {"color": BACKENDS[case.backend].colour, "ecolor": "#00000080", "capsize": 2}
        axes.errorbar(rate, row, xerr=error, fmt="o", **style)
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        place = max(case.rates) * 1.06
        axes.text(place, row, _label(case), va="center", fontsize=8, bbox=behind)
    loop = next((case for case in measured if case.is_loop), None)
    if loop is not None:
        axes.axvline(
            loop.steps_per_second, color=BACKENDS[loop.backend].colour, linestyle="--", linewidth=1
        )
    axes.set_yticks(rows, [case.name for case in measured])
    axes.set_ylim(rows[-1] + 0.6, -0.6)
    axes.set_xscale("log")  # which has no zero for bars to begin at
    axes.grid(axis="x", alpha=0.3)
    left, right = axes.get_xlim()
    axes.set_xlim(left, right * 4)
    axes.set_xlabel("env steps per second (point: all rounds, line: lowest to highest round)")
    axes.set_title(comparison.env, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)


def _label(case: Case) -> str:
    factor = "" if case.speed_up is None else f"   {case.speed_up:.3g} x loop"
    return f"{case.steps_per_second:,.0f}{factor if not case.is_loop else ''}"


def _draw_diversity(figure: Any, comparison: Comparison) -> None:
    found = comparison.diversity
    measures = {
        "distinct states (%)": [100 * entry.distinct for entry in found],
        "distance to the\nnearest state (sd)": [entry.neighbour_distance for entry in found],
        "correlation within\na batch (ICC)": [entry.correlation for entry in found],
        "variance of the\npolicy gradient": [entry.gradient_variance for entry in found],
    }
    names = [str(entry.num_envs) for entry in found]
    for axes, (name, values) in zip(
        figure.subplots(1, len(measures)), measures.items(), strict=True
    ):
        errors = [entry.gradient_error or 0.0 for entry in found] if "variance" in name else None
        heights = [value or 0.0 for value in values]
        axes.bar(names, heights, yerr=errors, color="#8d99ae", width=0.6, ecolor="#00000080")
        for column, value in enumerate(values):
            label = "" if value is None else f"{value:.3g}"
            top = heights[column] + (errors[column] if errors else 0.0)
            axes.text(column, top, label, ha="center", va="bottom", fontsize=8)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("envs", fontsize=8)
        axes.margins(y=0.2)
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
