"""Run backends in turn, on the same env with the same random policy."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from vecenv.backends import COMPARED
from vecenv.compare.result import Case, Comparison
from vecenv.compare.serving import FAILED, UNAVAILABLE, Options, RunnerError, RunnerProcess
from vecenv.machine import OthersLoad, usable_cores
from vecenv.source import read_source

__all__ = ["Options", "run_comparison"]

Progress = Callable[[str, float], None]


def run_comparison(
    options: Options, *, on_progress: Progress = lambda what, done: None
) -> Comparison:
    """Compare backends on an env; see docs/compare.md for what is measured.

    Args:
        options: What to compare, and how.
        on_progress: Called with the current work, and the share of all work done, 0 to 1.

    Raises:
        ValueError: There is no such env.
        ImportError: Its module can't be imported.
    """
    read_source(options.env, options.env_kwargs)
    result = Comparison(options.env, asdict(options), _machine())
    numbers = sorted(set(options.num_envs))
    names = [name for name in COMPARED if name in options.backends]
    result.cases = [Case("loop", 1)] if "loop" in names else []
    result.cases += [Case(name, count) for count in numbers for name in names if name != "loop"]
    busy: list[float | None] = []
    with _Session(options, result.cases, on_progress) as session:
        loop = result.cases[:1] if "loop" in names else []
        session.open(loop)
        groups = [list(g) for _, g in groupby(result.cases[len(loop) :], lambda c: c.num_envs)]
        for cases in groups or [[]]:
            session.open(cases)
            busy.append(session.alternate(loop, cases))
            for case in cases:
                session.note(f"{case.name}: where the time goes")
                case.report = session.ask(case, "take_time", options.timed_s)
            session.close(cases)
        session.close(loop)
        result.others_busy = max((cores for cores in busy if cores is not None), default=None)
    return result


class _Session:
    """The processes of a comparison; leaving it ends all of them."""

    def __init__(self, options: Options, cases: Sequence[Case], on_progress: Progress) -> None:
        self._options, self._on_progress = options, on_progress
        self._processes: dict[int, RunnerProcess] = {}
        num_groups = len({case.num_envs for case in cases if not case.is_loop})
        num_loops = sum(case.is_loop for case in cases)
        # Notes of each case: making, warming up, the rounds, timing.
        self._total = (options.rounds + 3) * len(cases)
        self._total += options.rounds * num_loops * max(0, num_groups - 1)
        self._done = 0

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes.values():
            process.close(is_now=exc_info[0] is not None)  # Ctrl-C must not wait for envs

    def open(self, cases: Sequence[Case]) -> None:
        """Start the processes side by side, then make their envs one after the other."""
        for case in cases:
            self._processes[id(case)] = RunnerProcess()
        o = self._options
        for case in cases:
            self.note(f"{case.name}: making envs")
            opened = self.ask(case, "open", o, case.backend, case.num_envs)
            if opened is not None:
                made_s, case.reset_s, case.num_workers = opened
                case.start_s = made_s + case.reset_s
            self.note(f"{case.name}: warming up")
            case.memory_bytes = self.ask(case, "warm_up", o.warm_up_s)

    def alternate(self, loop: Sequence[Case], cases: Sequence[Case]) -> float | None:
        """Run all cases in turn, round by round; return how many cores other programs used."""
        load = OthersLoad()
        for number in range(self._options.rounds):
            base = None
            for case in [*loop, *cases]:
                self.note(f"{case.name}: round {number + 1} of {self._options.rounds}")
                found = self.ask(case, "measure", self._options.round_s)
                if found is None:
                    continue
                case.rounds.append(found)
                if case.is_loop:
                    base = found
                if base is not None:
                    case.beside.append(base)
        return load.cores()

    def close(self, cases: Iterable[Case]) -> None:
        """End the processes of some cases."""
        for case in cases:
            self._processes.pop(id(case)).close()

    def ask(self, case: Case, name: str, *args: Any) -> Any:
        """Call a method of the case's runner; None if the case has failed, now or before."""
        if case.status in (FAILED, UNAVAILABLE):
            return None
        try:
            return self._processes[id(case)].call(name, *args, timeout=self._options.timeout)
        except RunnerError as error:
            case.status = UNAVAILABLE if error.is_unavailable else FAILED
            case.reason = str(error)
            return None

    def note(self, what: str) -> None:
        """Report the work that begins."""
        self._on_progress(what, min(self._done / self._total, 1.0))
        self._done += 1


def _machine() -> str:
    model, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    packages = ", ".join(f"{name} {version(name)}" for name in ("gymnasium", "numpy"))
    return (
        f"{model}, {usable_cores()} of {os.cpu_count()} cores usable, {platform.system()}, "
        f"Python {platform.python_version()}, {packages}"
    )
