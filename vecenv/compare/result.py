"""What a comparison found: rates, shares, diversity, and one plain verdict."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vecenv.compare.sampling import Diversity
from vecenv.compare.serving import FAILED, OK, UNAVAILABLE
from vecenv.files import write_text
from vecenv.timing import TimingReport

__all__ = ["Case", "Comparison"]

_HARDLY = 1.1  # factors nearer to 1 than this are not worth a word
_CERTAIN = 2.0  # standard errors that a difference must have


@dataclass
class Case:
    """One backend with one number of envs.

    Attributes:
        backend: One of BACKENDS.
        num_envs: How many; 1 for "loop".
        status: "ok", "unavailable" or "failed".
        reason: Why it is not "ok", in one line.
        details: A traceback.
        rates: Env steps per second of each round.
        speed_ups: These over those of "loop" in the same round; empty without it.
        start_s: Seconds for making and resetting the envs, imports not counted.
        memory_bytes: Proportional set size of its process and workers, Python itself included.
        report: Where the time went in a run of its own; None for backends without timing.
    """

    backend: str
    num_envs: int
    status: str = OK
    reason: str = ""
    details: str = ""
    rates: list[float] = field(default_factory=list)
    speed_ups: list[float] = field(default_factory=list)
    start_s: float | None = None
    memory_bytes: int | None = None
    report: TimingReport | None = None

    @property
    def name(self) -> str:
        """Backend and number of envs."""
        return self.backend if self.backend == "loop" else f"{self.backend}, {self.num_envs}"

    @property
    def is_measured(self) -> bool:
        """Whether it ran to the end."""
        return self.status == OK and bool(self.rates)

    @property
    def steps_per_second(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Highest rate minus the lowest, as a share of the median."""
        return (max(self.rates) - min(self.rates)) / self.steps_per_second

    @property
    def speed_up(self) -> float | None:
        """Over "loop", the median over the rounds; None without it."""
        return statistics.median(self.speed_ups) if self.speed_ups else None


@dataclass
class Comparison:
    """Backends side by side on one env.

    Attributes:
        env: As it was asked for.
        settings: The options of the run.
        machine: Processor, cores, versions.
        cases: One per backend and number of envs, in the order asked for.
        diversity: One entry per number of envs, 1 first; empty if it was not measured.
        diversity_reason: Why it was not.
    """

    env: str
    settings: dict[str, Any]
    machine: str
    cases: list[Case] = field(default_factory=list)
    diversity: list[Diversity] = field(default_factory=list)
    diversity_reason: str = ""

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
        sentences = [self._about_speed(), self._about_slowness(), self._about_diversity()]
        return " ".join(filter(None, sentences))

    def _about_speed(self) -> str:
        best = max(self.measured, key=lambda case: case.steps_per_second)
        text = f"Fastest: {best.name}{_envs(best)}, {best.steps_per_second:,.0f} steps/s"
        if best.backend == "loop":
            return f"{text}: no vector env is faster than one env in a loop."
        if best.speed_up is not None:
            text += f", {best.speed_up:.3g} x one env in a loop"
        return f"{text}." if best.report is None else f"{text}. There, {best.report.verdict}."

    def _about_slowness(self) -> str:
        """Name the vector envs that are slower than one env in a loop."""
        slow = [c for c in self.measured if c.speed_up is not None and c.speed_up * _HARDLY < 1]
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

        Raises:
            OSError: The file can't be written.
        """
        cases = []
        for case in self.cases:
            numbers = {k: v for k, v in vars(case).items() if k != "report"}
            if case.is_measured:
                numbers["steps_per_second"] = case.steps_per_second
                numbers["spread"], numbers["speed_up"] = case.spread, case.speed_up
            report = None if case.report is None else json.loads(case.report.to_json())
            cases.append({**numbers, "report": report})
        content = {
            "env": self.env,
            "settings": self.settings,
            "machine": self.machine,
            "verdict": self.verdict,
            "cases": cases,
            "diversity": [asdict(found) for found in self.diversity],
            "diversity_reason": self.diversity_reason,
        }
        text = json.dumps(content, indent=1, default=str)
        if path is not None:
            write_text(path, text + "\n")
        return text

    def plot(self, path: str | Path) -> None:
        """Draw rates, shares and diversity into a file; the ending names the format.

        Raises:
            ImportError: matplotlib is missing (`pip install vecenv[plots]`).
            OSError: The file can't be written.
        """
        from vecenv.compare.plot import plot_comparison

        plot_comparison(self, path)

    def __rich__(self) -> Any:
        """Return what rich prints."""
        from vecenv.compare.tables import comparison_tables

        return comparison_tables(self)


def _envs(case: Case) -> str:
    return "" if case.backend == "loop" else " env" if case.num_envs == 1 else " envs"
