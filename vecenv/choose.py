"""Choosing between stepping here and in workers: by a trial, or a hint after the first steps."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env
from gymnasium.spaces import Discrete

from vecenv.core.faults import EnvStepError, StepTimeoutError, WorkerDiedError
from vecenv.core.random_actions import RandomActions
from vecenv.machine import pss_bytes, usable_cores
from vecenv.timing.advice import duration
from vecenv.workers.env import AsyncVectorEnv

__all__ = ["Choice", "FirstSteps", "Probe", "choose_backend", "try_out"]

_logger = logging.getLogger("vecenv")

_TRIAL_S = 10.0  # after which a trial is given up
_STEPPING_S = 0.015  # to tell how long a step takes
_SLOW_S = 0.5  # after which fewer than three steps must do
_CHEAP_TO_MAKE_S = 0.5  # envs that are made a second time, to see that it is another one
_MEASURED_STEPS, _MEASURED_S = 64, 0.2
_WORTHWHILE_S = 2e-4  # waking a worker costs a tenth of this
_HANDOVER_S = 100e-6  # what handing a step to workers and back costs a caller that computes between
_CLEARLY = 1.1  # how much faster workers must be: one process is less at the mercy of others
_SHORT_S = 10e-3  # a step of all envs, of which the caller does a share rather than wait for it
_MOST_WAITING = 64  # workers for envs that wait
# A hint is given after so many steps, of steps that take longer and a gain by workers above that.
_HINT_STEPS, _HINT_S, _HINT_GAIN = 100, 200e-6, 1.5


class Choice(NamedTuple):
    """What to use: "sync" or "async", arguments for `AsyncVectorEnv`, and why, in one line."""

    backend: str
    options: dict[str, Any]
    reason: str


class Probe(NamedTuple):
    """What stepping a single env has shown.

    Attributes:
        step_s: Seconds per step.
        is_waiting: Whether steps mostly wait, and gain by a process for each env therefore.
        is_new: Whether the factory makes a new env each time.
        is_only: Whether a process can hold one such env only.
        memory_bytes: Of the process; None if the system does not tell.
    """

    step_s: float
    is_waiting: bool
    is_new: bool = True
    is_only: bool = False
    memory_bytes: int | None = None


def choose_backend(env_fns: Sequence[Callable[[], Env]]) -> Choice:
    """Step an env with random actions for some milliseconds, and choose by what it takes.

    This happens in a worker that is thrown away, so hanging and crashing do no harm here. Envs that
    mostly wait (sleep, network, disk) go to workers, which overlap their waiting; others if their
    steps, shared by all cores, are clearly faster with what handing them over costs; of short ones
    the caller does a share. If the trial fails, which is a warning in the log, envs are stepped
    here, unless they end their process: workers keep those out of this one.

    Args:
        env_fns: One factory per env.
    """
    if len(env_fns) == 1:
        return Choice("sync", {}, "there is only one env")
    _logger.info(
        "backend 'auto' makes envs for a trial and steps them, beside the %d that are asked for; "
        'without "auto" none but those are made',
        len(env_fns),
    )
    try:
        return _judge(try_out(env_fns[-2:], _TRIAL_S), len(env_fns))
    except (WorkerDiedError, EnvStepError) as error:  # it ended its process, or wanted to
        _logger.warning("the trial of the envs failed: %s; workers keep them apart", error)
        reason = f"the trial failed: {error}, which must not happen to this process"
        return Choice("async", {}, reason)
    except StepTimeoutError:
        failed = f": it has not ended after {_TRIAL_S:g} s"
    except Exception as error:  # the env's, or that of factories that can't be pickled
        failed = f" with {error}"
    _logger.warning("the trial of the envs failed%s; name a backend to skip it", failed)
    return Choice("sync", {}, f"the trial failed{failed}")


def _judge(probe: Probe, num_envs: int) -> Choice:
    """Choose by what stepping one env has shown."""
    if probe.is_only:
        return Choice("async", {"num_workers": num_envs}, "a process can hold only one of the envs")
    if not probe.is_new:
        return Choice("sync", {}, "a factory returns the same env twice")
    cores = usable_cores()
    if probe.is_waiting:
        most = max(cores, _affordable(probe.memory_bytes))
        reason = "the envs mostly wait, which workers overlap, one for each as memory allows"
        return Choice("async", {"num_workers": min(num_envs, most)}, reason)
    step_s = probe.step_s * num_envs
    reason = f"a step of all {num_envs} envs takes about {duration(step_s * 1e9)} in one process"
    if _gain(step_s, num_envs, min(num_envs, cores)) <= _CLEARLY:
        return Choice("sync", {}, f"{reason}, too little to be handed over")
    if step_s < _SHORT_S:
        others = f"{cores - 1} worker{'s' * (cores > 2)}"
        return Choice("async", {"caller_steps": True}, f"{reason}; {others} share it with this")
    return Choice("async", {}, f"{reason}, enough to be shared by {cores} workers")


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
    """Says in the log (INFO) if the first hundred steps show that workers would pay.

    What counts is the median step, as the first may compile something. On a machine that is busy
    with other programs nothing is said.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._steps: list[np.ndarray] = []
        self._begun = np.zeros(3)

    def begin(self) -> None:
        """Note the clocks before a step."""
        self._begun = _clocks()

    def end(self) -> bool:
        """Note the same after a step; return whether more steps are wanted."""
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


def try_out(factories: Sequence[Callable[[], Env]], timeout: float) -> Probe:
    """Make an env of the last factory in a worker, and step it; what it has started ends there.

    Args:
        factories: Of some envs that are to be made; what the last one makes, the others do.
        timeout: Seconds for the envs.

    Raises:
        StepTimeoutError: They have taken longer.
        WorkerDiedError, EnvStepError: They have ended their process, or left it by `sys.exit`.
        RuntimeError: They have raised.
    """
    envs = AsyncVectorEnv([partial(_Trial, factories)], num_workers=1, timeout=timeout)
    try:
        (found,) = envs.call("probe")
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the call is still pending
            envs.close(terminate=True)
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


class _Trial(Env):
    """Stands for envs in the worker where they are tried out."""

    observation_space = action_space = Discrete(1)

    def __init__(self, factories: Sequence[Callable[[], Env]]) -> None:
        self._factories = factories

    def probe(self) -> Probe | str:
        """Make and step an env; return what that has shown, or the exception as a text."""
        warnings.simplefilter("ignore")  # what is made later for good repeats them
        try:
            return probe_env(self._factories)
        except (Exception, KeyboardInterrupt) as error:  # which the vector env tells better
            return f"{type(error).__name__}: {error}"


def probe_env(factories: Sequence[Callable[[], Env]]) -> Probe:
    """Make and step an env of the last factory, unless that always returns the same one."""
    begin = time.perf_counter()
    env = factories[-1]()
    is_only = False
    if time.perf_counter() - begin < _CHEAP_TO_MAKE_S:
        other = _make_beside(factories[-1], factories[0])
        is_only = other is None
        if other is not None and other.unwrapped is env.unwrapped:
            return Probe(0.0, False, is_new=False)
        if other is not None:
            other.close()
    step_s, is_waiting = _step_alone(env)
    memory_bytes = pss_bytes() if is_waiting else None
    env.close()
    return Probe(step_s, is_waiting, is_only=is_only, memory_bytes=memory_bytes)


def _make_beside(env_fn: Callable[[], Env], neighbour_fn: Callable[[], Env]) -> Env | None:
    """Make an env of a factory again while the first lives; None if no other can be made either."""
    try:
        return env_fn()
    except Exception:
        try:
            neighbour = neighbour_fn()
        except Exception:
            return None
        neighbour.close()
        raise  # each of them may be made once


def _step_alone(env: Env) -> tuple[float, bool]:
    """Return the median seconds per step, with random actions, and whether the env waits.

    It waits if this process computes for less than half of the time, and gives its core up at every
    other step: what is only kept from a core by other programs gives it up involuntarily.
    """
    draw = RandomActions(env)
    seen = env.reset()
    times: list[float] = []
    cpu_s = switches = 0.0
    is_waiting, begin = False, time.perf_counter()
    while (wall_s := time.perf_counter() - begin) < _STEPPING_S or (
        (len(times) < 3 and wall_s < _SLOW_S)
        or (is_waiting and len(times) < _MEASURED_STEPS and wall_s < _MEASURED_S)
    ):
        draw.see(*seen)
        action = draw()
        cpu_before, switches_before = time.process_time(), _voluntary_switches()
        now = time.perf_counter()
        result = env.step(action)
        seen = result[0], result[4]
        if result[2] or result[3]:
            seen = env.reset()
        times.append(time.perf_counter() - now)
        cpu_s += time.process_time() - cpu_before
        switches += _voluntary_switches() - switches_before
        stepped_s = sum(times)
        is_waiting = cpu_s < 0.5 * stepped_s and stepped_s > _WORTHWHILE_S * len(times)
        is_waiting = is_waiting and 2 * switches >= len(times)
    return float(np.median(times)), is_waiting


def _clocks() -> np.ndarray:
    """Return seconds by the clock and of this process's computing, and switches as it waited."""
    return np.array([time.perf_counter(), time.process_time(), _voluntary_switches()])


def _voluntary_switches() -> int:
    """Return how often this thread has given up its core to wait for something."""
    try:
        import resource
    except ImportError:  # Windows, which does not tell: whoever does not compute has waited
        return time.perf_counter_ns()
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw
