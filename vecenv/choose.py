"""Choosing between stepping here and in workers: by a trial, or a hint after the first steps."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env

from vecenv.machine import usable_cores
from vecenv.probe import Probe, ProbeError, ProbeTimeout, probe_env, run_apart, voluntary_switches
from vecenv.timing.advice import duration

__all__ = ["Choice", "FirstSteps", "choose_backend"]

_logger = logging.getLogger("vecenv")

_PROBE_S = 10.0  # after which a trial is given up
_HANDOVER_S = 100e-6  # what handing a step to workers and back costs a caller that computes between
_CLEARLY = 1.1  # how much faster workers must be: one process is less at the mercy of others
_SHORT_S = 10e-3  # a step of all envs, of which the caller does a share rather than wait for it
_MOST_WAITING = 64  # workers for envs that wait
# A hint is given after so many steps, of steps that take longer and a gain by workers above that.
_HINT_STEPS, _HINT_S, _HINT_GAIN = 100, 200e-6, 1.5


class Choice(NamedTuple):
    """What to use.

    Attributes:
        backend: "sync" or "async".
        options: Arguments for `AsyncVectorEnv`; empty for "sync".
        reason: One line that says why.
    """

    backend: str
    options: dict[str, Any]
    reason: str


def choose_backend(
    env_fns: Sequence[Callable[[], Env]], *, run: Callable[..., Any] = run_apart
) -> Choice:
    """Step an env with random actions for some milliseconds, and choose by what it takes.

    This happens in a process that is thrown away, so hanging and crashing do no harm here. Envs
    that mostly wait (sleep, network, disk) go to workers, which overlap their waiting; others if
    their steps, shared by all cores, are clearly faster with what handing them over costs; of
    short ones the caller does a share. If the trial fails, which is a warning in the log, envs are
    stepped here, unless they end their process: workers keep those out of this one.

    Args:
        env_fns: One factory per env.
        run: Calls a function in such a process, as `run_apart`.
    """
    if len(env_fns) == 1:
        return Choice("sync", {}, "there is only one env")
    _logger.info(
        "backend 'auto' makes envs for a trial and steps them, beside the %d that are asked for; "
        'without "auto" none but those are made',
        len(env_fns),
    )
    try:
        return _judge(run(probe_env, env_fns[-2:], timeout=_PROBE_S), len(env_fns))
    except ProbeError as error:
        if error.has_died:
            _logger.warning("the trial of the envs failed: %s; workers keep them apart", error)
            reason = f"the trial failed: {error}, which must not happen to this one"
            return Choice("async", {}, reason)
        what = f": {error}" if isinstance(error, ProbeTimeout) else f" with {error}"
    except Exception as error:  # no process can be started, or what it needs can't be pickled
        what = f" with {type(error).__name__}: {error}"
    _logger.warning("the trial of the envs failed%s; name a backend to skip it", what)
    return Choice("sync", {}, f"the trial failed{what}")


def _judge(probe: Probe, num_envs: int) -> Choice:
    """Choose by what stepping one env has shown."""
    if probe.is_only:
        reason = "a process can hold only one of the envs"
        return Choice("async", {"num_workers": num_envs}, reason)
    if not probe.is_new:
        return Choice("sync", {}, "a factory returns the same env twice")
    cores = usable_cores()
    if probe.is_waiting:
        most = max(cores, _affordable(probe.memory_bytes))
        reason = "the envs mostly wait, which workers overlap, one for each as memory allows"
        return Choice("async", {"num_workers": min(num_envs, most)}, reason)
    step_s = probe.step_s * num_envs
    reason = f"a step of all {num_envs} envs takes about {duration(step_s * 1e9)} in one process"
    if _gain(step_s, num_envs, min(num_envs, cores)) > _CLEARLY:
        if step_s < _SHORT_S:
            others = f"{cores - 1} worker{'s' * (cores > 2)}"
            return Choice("async", {"caller_steps": True}, f"{reason}; {others} share it with this")
        return Choice("async", {}, f"{reason}, enough to be shared by {cores} workers")
    return Choice("sync", {}, f"{reason}, too little to be handed over")


def _gain(step_s: float, num_envs: int, workers: int) -> float:
    """Return how many times as fast workers make a step that takes `step_s` in one process."""
    return step_s / (step_s * math.ceil(num_envs / workers) / num_envs + _HANDOVER_S)


def _affordable(process_bytes: int | None) -> int:
    """Return how many processes of that size half of the free memory holds."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:") and process_bytes:
                return int(line.split()[1]) * 1024 // 2 // process_bytes
    return _MOST_WAITING


class FirstSteps:
    """Finds out from the first hundred steps that the user makes whether workers would pay.

    If so, the log says it in one line of level INFO. What counts is the median step, as the first
    may compile something. On a machine that is busy with other programs nothing is said.

    Args:
        num_envs: How many envs are stepped in this process.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._steps: list[np.ndarray] = []
        self._begun = _clocks()

    def begin(self) -> None:
        """Note the clocks before a step."""
        self._begun = _clocks()

    def end(self) -> bool:
        """Note the clocks after it; return whether more steps are wanted."""
        self._steps.append(_clocks() - self._begun)
        if len(self._steps) < _HINT_STEPS:
            return True
        step_s, cpu_s, switches = np.median(self._steps, axis=0).tolist()
        is_waiting = cpu_s < 0.5 * step_s and switches >= 1
        is_kept = cpu_s < 0.8 * step_s and not is_waiting  # from its core: others use them
        free_cores = int(usable_cores() / max(1.0, cpu_s / step_s))  # envs may have threads
        workers = min(self._num_envs, _MOST_WAITING if is_waiting else max(1, free_cores))
        gain = _gain(step_s, self._num_envs, workers)
        if step_s > _HINT_S and gain > _HINT_GAIN and not is_kept:
            _logger.info(
                'a step of all %d envs takes %s in this process: backend="async"%s would be %s '
                "as fast here; vecenv compare measures it",
                self._num_envs,
                duration(step_s * 1e9),
                f' with vector_kwargs={{"num_workers": {workers}}}' if is_waiting else "",
                f"up to {gain:.0f} x" if is_waiting else f"about {gain:.1f} x",
            )
        return False


def _clocks() -> np.ndarray:
    """Return seconds by the clock and of this process's computing, and switches as it waited."""
    return np.array([time.perf_counter(), time.process_time(), voluntary_switches()])
