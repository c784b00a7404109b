"""Choose between stepping here and in workers: by a trial, or give a hint after the first steps."""

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
_STEPPING_S = 0.015  # of stepping, to measure a step
_SLOW_S = 0.5  # after which fewer than three steps must do
_CHEAP_TO_MAKE_S = 0.5  # cheaper envs are made twice, to see that each is a new one
_MEASURED_STEPS, _MEASURED_S = 64, 0.2
_WORTHWHILE_S = 2e-4  # of a step: waking a worker costs a tenth of this
_HANDOVER_S = 100e-6  # hand-over to workers and back, if the caller computes between steps
_CLEARLY = 1.1  # times as fast workers must be: other programs disturb one process less
_SHORT_S = 10e-3  # a step of all envs, of which the caller does a share rather than wait
_MOST_WAITING = 64  # most workers for envs that wait
# A hint comes after this many steps, if they take longer and workers would gain more than this.
_HINT_STEPS, _HINT_S, _HINT_GAIN = 100, 200e-6, 1.5


class Choice(NamedTuple):
    """The backend, "sync" or "async", arguments for `AsyncVectorEnv`, and the reason in a line."""

    backend: str
    options: dict[str, Any]
    reason: str


class Probe(NamedTuple):
    """Measurements of stepping a single env.

    Attributes:
        step_s: Seconds per step.
        is_waiting: Whether steps mostly wait, so that a process per env pays.
        is_new: Whether the factory makes a new env each time.
        is_only: Whether a process can hold only one such env.
        memory_bytes: Memory of the process; None if the system does not tell.
    """

    step_s: float
    is_waiting: bool
    is_new: bool = True
    is_only: bool = False
    memory_bytes: int | None = None


def choose_backend(env_fns: Sequence[Callable[[], Env]]) -> Choice:
    """Step an env with random actions for some milliseconds, and choose by the measurements.

    This happens in a short-lived worker, so hanging and crashing do no harm here. Envs that mostly
    wait (sleep, network, disk) go to workers, which overlap their waiting. Other envs go to workers
    if steps shared by all cores are clearly faster, including the hand-over; the caller steps a
    share of envs with short steps. If the trial fails, the log has a warning, and envs are stepped
    here; if they end their process, workers keep that away from this one.

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
    except (WorkerDiedError, EnvStepError) as error:  # the env ended its process, or tried to
        _logger.warning("the trial of the envs failed: %s; workers keep them apart", error)
        reason = f"the trial failed: {error}, which must not happen to this process"
        return Choice("async", {}, reason)
    except StepTimeoutError:
        failed = f": it has not ended after {_TRIAL_S:g} s"
    except Exception as error:  # of the env, or as factories can't be pickled
        failed = f" with {error}"
    _logger.warning("the trial of the envs failed%s; name a backend to skip it", failed)
    return Choice("sync", {}, f"the trial failed{failed}")


def _judge(probe: Probe, num_envs: int) -> Choice:
    """Choose by the measurements of one env."""
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
    """Return the speed-up by workers for steps that take `step_s` in one process."""
    return step_s / (step_s * math.ceil(num_envs / workers) / num_envs + _HANDOVER_S)


def _affordable(process_bytes: int | None) -> int:
    """Return the number of processes of this size that half of the free memory holds."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:") and process_bytes:
                return int(line.split()[1]) * 1024 // 2 // process_bytes
    return _MOST_WAITING


class FirstSteps:
    """Says in the log (INFO) if the first hundred steps show that workers would pay.

    The median step counts, as the first may compile something. If the machine is busy with other
    programs, nothing is said.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._steps: list[np.ndarray] = []
        self._begun = np.zeros(3)

    def begin(self) -> None:
        """Read the clocks before a step."""
        self._begun = _clocks()

    def end(self) -> bool:
        """Read the clocks after a step; return whether more steps are wanted."""
        self._steps.append(_clocks() - self._begun)
        if len(self._steps) < _HINT_STEPS:
            return True
        step_s, cpu_s, switches = np.median(self._steps, axis=0).tolist()
        is_waiting = cpu_s < 0.5 * step_s and switches >= 1
        is_kept = cpu_s < 0.8 * step_s and not is_waiting  # other programs keep it from its core
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
    """Make an env of the last factory in a worker and step it; whatever it starts ends there.

    Args:
        factories: Factories of envs to be made; the last one's env is taken as typical.
        timeout: Seconds for the envs.

    Raises:
        StepTimeoutError: The envs have taken longer.
        WorkerDiedError, EnvStepError: The envs have ended their process, or tried `sys.exit`.
        RuntimeError: The envs have raised.
    """
    envs = AsyncVectorEnv([partial(_Trial, factories)], num_workers=1, timeout=timeout)
    try:
        (found,) = envs.call("probe")
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the call that is still pending
            envs.close(terminate=True)
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


class _Trial(Env):
    """Stands for envs in the worker that tries them."""

    observation_space = action_space = Discrete(1)

    def __init__(self, factories: Sequence[Callable[[], Env]]) -> None:
        self._factories = factories

    def probe(self) -> Probe | str:
        """Make and step an env; return the measurements, or the exception as a text."""
        warnings.simplefilter("ignore")  # the envs made later repeat them
        try:
            return probe_env(self._factories)
        except (Exception, KeyboardInterrupt) as error:  # the vector env reports it better
            return f"{type(error).__name__}: {error}"


def probe_env(factories: Sequence[Callable[[], Env]]) -> Probe:
    """Make and step an env of the last factory, unless the factory returns the same one again."""
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
    """Make an env again while the first lives; None if no factory makes another one then."""
    try:
        return env_fn()
    except Exception:
        try:
            neighbour = neighbour_fn()
        except Exception:
            return None
        neighbour.close()
        raise  # each can be made once, but not two


def _step_alone(env: Env) -> tuple[float, bool]:
    """Return the median seconds per step, with random actions, and whether the env waits.

    It waits if this process computes for less than half of the time and gives up its core at least
    every other step: a process that other programs keep from a core gives it up involuntarily.
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
    """Return seconds of the clock and of this process's computing, and its voluntary switches."""
    return np.array([time.perf_counter(), time.process_time(), _voluntary_switches()])


def _voluntary_switches() -> int:
    """Return how often this thread has given up its core to wait for something."""
    try:
        import resource
    except ImportError:  # Windows, which has no such count: without computing it counts as waiting
        return time.perf_counter_ns()
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw
