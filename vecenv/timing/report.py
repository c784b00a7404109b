"""TimingReport: shares of the wall time, per worker and per env, and what to do about them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vecenv.files import write_text
from vecenv.timing import attribution
from vecenv.timing.advice import verdict
from vecenv.timing.control import Recording
from vecenv.timing.memory import pss_bytes

__all__ = ["EnvTimes", "TimingReport", "WorkerTimes", "make_report"]

_NUM_SLOWEST = 5
_PERCENTILES = (50, 90, 99, 100)


@dataclass(frozen=True)
class EnvTimes:
    """How long the steps of one env took, or of all; nanoseconds.

    Attributes:
        name: "env 3", or "all envs".
        num_steps: How many; resets are not among them.
        mean, p50, p90, p99, max: Of their lengths.
    """

    name: str
    num_steps: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class WorkerTimes:
    """A process that steps envs.

    Attributes:
        name: "worker 0", or "caller" for the calling process.
        first_env, last_env: Its envs.
        busy, idle: Shares of the wall time in which at least one of its envs was at work, and none.
        start_s: Seconds from its start until its envs were made; None for the caller.
        memory_bytes: Its proportional share of memory (PSS) at the time of the report; None if the
            system does not say.
    """

    name: str
    first_env: int
    last_env: int
    busy: float
    idle: float
    start_s: float | None
    memory_bytes: int | None


@dataclass(frozen=True)
class TimingReport:
    """Where the time went.

    Attributes:
        backend: Class of the vector env.
        num_envs: Of the vector env.
        wall_s: Seconds that the report is about.
        num_steps: Env steps that ended in that time, resets not counted (for compiled envs, which
            are not stamped one by one, rows that came back).
        steps_per_second: The quotient.
        shares: Share of the wall time by name. "env compute", "straggler wait", "hand-over" and
            "copying" are inside calls of the vector env, see `vecenv.timing.attribution`; the
            phases that the user named follow, and "other". They add up to 1.
        gains: Steps per second, by name, if that share took no time.
        first_ready: Whether envs were sent and received rather than stepped all at once.
        envs: Step times of all envs together; None for compiled envs.
        slowest: The envs whose steps take longest on average.
        workers: One entry per worker.
        durations_ns: int64 (R,), lengths of all steps; not in the JSON.
    """

    backend: str
    num_envs: int
    wall_s: float
    num_steps: int
    steps_per_second: float
    shares: dict[str, float]
    gains: dict[str, float]
    first_ready: bool
    envs: EnvTimes | None
    slowest: list[EnvTimes]
    workers: list[WorkerTimes]
    durations_ns: np.ndarray = field(repr=False)

    @property
    def verdict(self) -> str:
        """One line that says what costs most and what would help."""
        return verdict(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the numbers as JSON, and write them to a file if one is given."""
        numbers = dataclasses.asdict(dataclasses.replace(self, durations_ns=np.zeros(0)))
        del numbers["durations_ns"]
        text = json.dumps({**numbers, "verdict": self.verdict}, indent=1)
        if path is not None:
            write_text(path, text + "\n")
        return text

    def plot(self, path: str | Path) -> None:
        """Draw shares and step times into a file; the ending names the format.

        Raises:
            ImportError: matplotlib is missing (`pip install vecenv[plots]`).
        """
        from vecenv.timing.plot import plot_reports

        plot_reports({self.backend: self}, path)

    def __rich__(self) -> Any:
        """Return what rich prints: tables with bars, and the verdict."""
        from vecenv.timing.tables import report_tables

        return report_tables(self)

    def __str__(self) -> str:
        """Return the tables as plain text, 80 columns wide."""
        from rich.console import Console

        console = Console(width=80, color_system=None, highlight=False, force_jupyter=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def make_report(recording: Recording) -> TimingReport:
    """Compute the report of a recording."""
    wall_ns = max(recording.end_ns - recording.begin_ns, 1)
    shares = {name: spent / wall_ns for name, spent in attribution.shares_ns(recording).items()}
    env_ids, durations_ns = attribution.env_durations(recording)
    is_stamped = recording.stamps is not None
    num_steps = len(env_ids) if is_stamped else int(recording.calls.num_rows.sum())
    per_second = num_steps / wall_ns * 1e9
    gains = {name: per_second / max(1 - share, 1e-9) for name, share in shares.items()}
    return TimingReport(
        backend=recording.backend,
        num_envs=recording.num_envs,
        wall_s=wall_ns / 1e9,
        num_steps=num_steps,
        steps_per_second=per_second,
        shares=shares,
        gains=gains,
        first_ready=attribution.is_first_ready(recording),
        envs=_times("all envs", durations_ns) if len(durations_ns) else None,
        slowest=_slowest(env_ids, durations_ns, recording.num_envs),
        workers=_workers(recording, wall_ns),
        durations_ns=durations_ns,
    )


def _times(name: str, durations_ns: np.ndarray) -> EnvTimes:
    percentiles = map(float, np.percentile(durations_ns, _PERCENTILES))
    return EnvTimes(name, len(durations_ns), float(durations_ns.mean()), *percentiles)


def _slowest(env_ids: np.ndarray, durations_ns: np.ndarray, num_envs: int) -> list[EnvTimes]:
    if num_envs == 1 or len(env_ids) == 0:
        return []
    counts = np.bincount(env_ids, minlength=num_envs)
    means = np.bincount(env_ids, durations_ns, minlength=num_envs) / np.maximum(counts, 1)
    chosen = np.argsort(-means, kind="stable")[:_NUM_SLOWEST].tolist()
    return [_times(f"env {e}", durations_ns[env_ids == e]) for e in chosen if counts[e]]


def _workers(recording: Recording, wall_ns: int) -> list[WorkerTimes]:
    window = np.array([recording.begin_ns]), np.array([recording.end_ns])
    workers, number = [], 0
    for index, covered in enumerate(attribution.worker_coverage(recording)):
        process = recording.processes[index]
        busy = int(covered.between(*window)[0]) / wall_ns
        first, last = recording.chunks[index : index + 2]
        name = "caller" if process is None else f"worker {number}"
        number += process is not None
        start_s = None if process is None else process.start_s
        memory_bytes = pss_bytes(None if process is None else process.pid)
        workers.append(WorkerTimes(name, first, last - 1, busy, 1 - busy, start_s, memory_bytes))
    return workers
