"""Choose by a trial between stepping here and in workers: what `backend="auto"` means."""

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

from vecenv.core.errors import EnvStepError, StepTimeoutError, WorkerDiedError
from vecenv.core.masks import RandomActions
from vecenv.machine import pss_bytes, usable_cores
from vecenv.timing.advice import duration
from vecenv.workers.env import AsyncVectorEnv

__all__ = ["Choice", "Probe", "choose_backend", "try_out"]

_logger = logging.getLogger("vecenv")

_TRIAL_S = 10.0  # after which a trial is given up
_STEPPING_S = 0.015  # of stepping, to measure a step
_SLOW_S = 0.5  # after which fewer than three steps must do
_WORTHWHILE_S = 2e-4  # of a step: waking a worker costs a tenth of this
_HANDOVER_S = 100e-6  # hand-over to workers and back, if the caller computes between steps
_CLEARLY = 1.1  # times as fast workers must be: other programs disturb one process less
_SHORT_S = 10e-3  # a step of all envs, of which the caller does a share rather than wait
_MOST_WAITING = 64  # most workers for envs that wait


class Choice(NamedTuple):
    """The backend, arguments for it, the reason in a line, and whether an env was tried out."""

    backend: str
    options: dict[str, Any]
    reason: str
    is_tried: bool = False


class Probe(NamedTuple):
    """Measurements of stepping a single env."""

    step_s: float  # seconds per step
    is_waiting: bool  # whether steps mostly wait, so that a process per env pays
    memory_bytes: int | None = None  # of the process; None if the system does not tell


def choose_backend(env_fns: Sequence[Callable[[], Env]]) -> Choice:
    """Step an env with random actions for some milliseconds, and choose by the measurements.

    This happens in a short-lived worker, so hanging and crashing do no harm here. Envs that mostly
    wait (sleep, network, disk) go to workers, which overlap their waiting. Other envs go to workers
    if steps shared by all cores are clearly faster, including the hand-over; the caller steps a
    share of envs with short steps. If the trial fails, the log has a warning, and envs are stepped
    here; if they end their process, workers keep that away from this one.
    """
    num_envs = len(env_fns)
    if num_envs == 1:
        return Choice("sync", {}, "there is only one env")
    _logger.info(
        "backend 'auto' makes an env for a trial and steps it, beside the %d that are asked for; "
        'without "auto" none but those are made',
        num_envs,
    )
    try:
        return _judge(try_out(env_fns[-1], _TRIAL_S), num_envs)
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
    cores = usable_cores()
    if probe.is_waiting:
        workers = min(num_envs, max(cores, _affordable(probe.memory_bytes)))
        reason = "the envs mostly wait, which workers overlap, one for each as memory allows"
        return Choice("async", {"num_workers": workers}, reason, is_tried=True)
    step_s, share = probe.step_s * num_envs, math.ceil(num_envs / min(num_envs, cores))
    reason = f"a step of all {num_envs} envs takes about {duration(step_s * 1e9)} in one process"
    if step_s <= _CLEARLY * (probe.step_s * share + _HANDOVER_S):
        return Choice("sync", {}, f"{reason}, too little to be handed over", is_tried=True)
    if step_s < _SHORT_S:
        others = f"{cores - 1} worker{'s' * (cores > 2)}"
        reason = f"{reason}; {others} share it with this"
        return Choice("async", {"caller_steps": True}, reason, is_tried=True)
    return Choice("async", {}, f"{reason}, enough to be shared by {cores} workers", is_tried=True)


def _affordable(process_bytes: int | None) -> int:
    """Return the number of processes of this size that half of the free memory holds."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:") and process_bytes:
                return int(line.split()[1]) * 1024 // 2 // process_bytes
    return _MOST_WAITING


def try_out(env_fn: Callable[[], Env], timeout: float) -> Probe:
    """Make an env in a worker and step it; whatever it starts ends there.

    Raises:
        StepTimeoutError: The env has taken longer.
        WorkerDiedError, EnvStepError: The env has ended its process, or tried `sys.exit`.
        RuntimeError: The env has raised.
    """
    envs = AsyncVectorEnv([partial(_Trial, env_fn)], num_workers=1, timeout=timeout)
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
    """Stands for the env in the worker that tries it."""

    observation_space = action_space = Discrete(1)

    def __init__(self, env_fn: Callable[[], Env]) -> None:
        self._env_fn = env_fn

    def probe(self) -> Probe | str:
        """Make and step an env; return the measurements, or the exception as a text."""
        warnings.simplefilter("ignore")  # the envs made later repeat them
        try:
            return probe_env(self._env_fn())
        except (Exception, KeyboardInterrupt) as error:  # the vector env reports it better
            return f"{type(error).__name__}: {error}"


def probe_env(env: Env) -> Probe:
    """Step an env with random actions, and close it.

    It waits if this process computes for less than half of the time and gives up its core at least
    every other step: a process that other programs keep from a core gives it up involuntarily.
    """
    draw = RandomActions(env)
    draw.see(*env.reset())
    times: list[float] = []
    begin, cpu_begin, switches_begin = time.perf_counter(), time.process_time(), _switches()
    while (wall_s := time.perf_counter() - begin) < _STEPPING_S or (
        len(times) < 3 and wall_s < _SLOW_S
    ):
        action = draw()
        now = time.perf_counter()
        obs, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            obs, info = env.reset()
        times.append(time.perf_counter() - now)
        draw.see(obs, info)
    cpu_s, switches = time.process_time() - cpu_begin, _switches() - switches_begin
    is_waiting = cpu_s < 0.5 * sum(times) and 2 * switches >= len(times)
    is_waiting = is_waiting and sum(times) > _WORTHWHILE_S * len(times)
    memory_bytes = pss_bytes() if is_waiting else None
    env.close()
    return Probe(float(np.median(times)), is_waiting, memory_bytes)


def _switches() -> int:
    """Return how often this thread has given up its core to wait for something."""
    try:
        import resource
    except ImportError:  # Windows, which has no such count: without computing it counts as waiting
        return time.perf_counter_ns()
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw
