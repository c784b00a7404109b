"""Choosing between stepping here and in workers: by a trial, or a hint after the first steps."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from vecenv.core.random_actions import RandomActions
from vecenv.machine import usable_cores
from vecenv.probe import (
    Probe,
    ProbeError,
    ProbeTimeout,
    probe_env,
    run_apart,
    voluntary_switches,
)
from vecenv.sync import SyncVectorEnv
from vecenv.timing.advice import duration
from vecenv.workers.env import AsyncVectorEnv

__all__ = ["Choice", "FirstSteps", "choose_backend"]

_logger = logging.getLogger("vecenv")

# After which a trial is given up. The first one ever compiles what callers and workers talk by, 3 s
# of an idle core, and on a busy machine many more.
_PROBE_S, _MEASURING_S = 10.0, 30.0
_MAKING_S = 0.5  # for the envs that are stepped side by side
_TRIAL_S = 0.04  # of stepping, per candidate and round
_ROUNDS = 3
_THINKING_S = 100e-6  # between two steps, as a policy takes: workers fall asleep meanwhile
_BUDGET_S = 1.2  # after which no further candidate or round is begun
# Seconds that a step of all envs takes in one process. With less than the first, handing it over
# can't pay (for few envs it is not tried with a little more either); with more than the third it
# surely does. The last decides where it can't be tried out.
_CHEAP_S, _CHEAP_AND_FEW_S, _COSTLY_S, _WORTHWHILE_S = 10e-6, 100e-6, 10e-3, 200e-6
_FEW = 4
# How much faster than stepping here it must be: one process is less at the mercy of others.
_CLEARLY = 1.1
_HOPELESS = 2.0  # how much slower than the best with workers one is that is tried no further
_HERE = "one process"
# A hint is given after so many steps, of a gain by workers above that, for so many at most of them.
_HINT_STEPS, _HINT_GAIN, _MOST_WAITING = 100, 1.5, 64

Factories = Sequence[Callable[[], Env]]
Times = Mapping[str, Sequence[float]]


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
    env_fns: Factories, *, observation_mode: Any = "same", run: Callable[..., Any] = run_apart
) -> Choice:
    """Step envs with random actions, for less than two seconds in all; pick what is fastest.

    Everything happens in processes that are thrown away: nothing that envs do there, hanging and
    crashing included, matters here. What counts is the time in `step` when the caller computes for
    a moment between steps, as it does in training: a loop that does nothing else keeps workers
    awake and makes them look better. The envs of the trial are made for it, as the log says, and
    closed again, at most as many as were asked for at a time in each process. Cheap envs are known
    after a few steps of one; envs that mostly wait (sleep, network, disk) go to workers, which
    overlap their waiting. If anything fails, such as making an env twice, which costs a warning in
    the log, or if rounds of the trial disagree, envs are stepped here; but envs that end their
    process are kept out of this one.

    Args:
        env_fns: One factory per env.
        observation_mode: As for the vector env to be made.
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
        return _by_trial(env_fns, observation_mode, run)
    except ProbeTimeout as error:
        _logger.warning("the trial of the envs was given up: %s; name a backend to skip it", error)
        return Choice("sync", {}, f"the trial failed: {error}")
    except ProbeError as error:
        if error.has_died:
            _logger.warning("the trial of the envs failed: %s; workers keep them apart", error)
            return _workers(f"the trial failed: {error}, which must not happen to this one")
        return _failed(str(error))
    except Exception as error:  # no process can be started, or pickled what is to be forked
        return _failed(f"{type(error).__name__}: {error}")


def _failed(what: str) -> Choice:
    _logger.warning("the trial of the envs failed with %s; name a backend to skip it", what)
    return Choice("sync", {}, f"the trial failed with {what}")


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
        share = math.ceil(self._num_envs / workers) / self._num_envs
        gain = step_s / (step_s * share + _CHEAP_AND_FEW_S)
        is_worth = step_s > _WORTHWHILE_S and gain > _HINT_GAIN and not is_kept
        if is_worth:
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


def _workers(reason: str, **options: Any) -> Choice:
    return Choice("async", options, reason)


def _affordable(process_bytes: int | None) -> int:
    """Return how many processes of that size half of the free memory holds."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:") and process_bytes:
                return int(line.split()[1]) * 1024 // 2 // process_bytes
    return _MOST_WAITING


def _by_trial(env_fns: Factories, observation_mode: Any, run: Callable[..., Any]) -> Choice:
    from vecenv.workers.starting import choose_method

    num_envs, cores = len(env_fns), usable_cores()
    probe: Probe = run(probe_env, env_fns[-2:], timeout=_PROBE_S)
    if probe.is_only:
        return _workers("a process can hold only one of the envs", num_workers=num_envs)
    if not probe.is_new:
        return Choice("sync", {}, "a factory returns the same env twice")
    all_s = probe.step_s * num_envs
    told = f"a step of all {num_envs} envs takes about {all_s * 1e6:.0f} us in one process"
    if probe.is_waiting:
        most = _affordable(probe.memory_bytes)
        return _workers(
            "the envs mostly wait, which workers overlap, one for each as memory allows",
            num_workers=max(cores, min(num_envs, most)),
        )
    if cores == 1:
        return Choice("sync", {}, "there is only one core, and the envs do not wait")
    if all_s < (_CHEAP_AND_FEW_S if num_envs <= _FEW else _CHEAP_S):
        return Choice("sync", {}, f"{told}, too little to be handed over")
    if all_s > _COSTLY_S:
        return _workers(f"{told}, enough to be shared by {cores} workers")
    # Each env is made once for one process, and by the workers of each candidate side by side.
    making_s = probe.make_s * (1 + 2 / cores)
    count = min(num_envs, int(_MAKING_S / max(making_s, 1e-9)))
    if count < min(num_envs, 2 * cores) or not choose_method(None).is_fork:
        if all_s > _WORTHWHILE_S:
            return _workers(f"{told}, and {cores} workers can share it")
        return Choice("sync", {}, f"{told}, and trying workers out would take too long")
    times = run(_measure, env_fns[:count], cores, observation_mode, timeout=_MEASURING_S)
    return _judge(times, _candidates(cores), num_envs, num_envs / count)


def _candidates(cores: int) -> dict[str, dict[str, Any]]:
    return {
        f"{cores} workers": {},
        f"this process and {cores - 1} workers": {"caller_steps": True},
    }


def _judge(
    times: Times, candidates: Mapping[str, dict[str, Any]], num_envs: int, scale: float
) -> Choice:
    """Pick what was fastest in all rounds, and one process if none was.

    Args:
        times: Seconds per step, of each round that a candidate took part in, by its name. Who took
            no part in the last was hopeless.
        candidates: Options of those that have workers.
        num_envs: How many envs are asked for.
        scale: Those envs by those of the trial.
    """
    best = {name: min(rounds) for name, rounds in times.items()}
    report = ", ".join(f"{name} {least * scale * 1e6:.0f}" for name, least in best.items())
    reason = f"microseconds per step of all {num_envs} envs: {report}"
    num_rounds = len(times[_HERE])
    verdicts = {_do_workers_pay(times, number) for number in range(num_rounds)}
    if len(verdicts) > 1:
        return Choice("sync", {}, f"too noisy to tell, as rounds disagree; {reason}")
    if verdicts == {True}:
        others = [name for name in times if name != _HERE and len(times[name]) == num_rounds]
        winner = min(others, key=best.__getitem__)
        return _workers(f"{winner}; {reason}", **candidates[winner])
    return Choice("sync", {}, reason)


def _do_workers_pay(times: Times, number: int) -> bool:
    """Whether one of those with workers was clearly faster in a round."""
    others = [
        rounds[number] for name, rounds in times.items() if name != _HERE and number < len(rounds)
    ]
    return bool(others) and min(others) * _CLEARLY < times[_HERE][number]


def _measure(env_fns: Factories, cores: int, observation_mode: Any) -> dict[str, list[float]]:
    """Let the candidates step in turn; return seconds per step, by candidate and round.

    What can change the choice no more ends: all after a round in which workers do not pay, and who
    was hopeless in a round.
    """
    options: dict[str, Any] = {
        "copy": False,
        "observation_mode": observation_mode,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }
    begin = time.perf_counter()
    pools: dict[str, Any] = {}
    try:
        # Workers first: they are forked from a process that has made no env yet.
        for name, choice in _candidates(cores).items():
            if time.perf_counter() - begin < _BUDGET_S / 2:
                pools[name] = AsyncVectorEnv(env_fns, **choice, **options)
        pools[_HERE] = SyncVectorEnv(env_fns, **options)
        times: dict[str, list[float]] = {name: [] for name in pools}
        draws = {name: RandomActions(pool) for name, pool in pools.items()}
        for name, pool in pools.items():
            draws[name].see(*pool.reset())
        running = dict(pools)
        for number in range(_ROUNDS):
            if number > 0 and time.perf_counter() - begin > _BUDGET_S:
                break
            for name, pool in running.items():
                times[name].append(_time_steps(pool, draws[name]))
            if not _do_workers_pay(times, number):
                break
            least = min(times[name][-1] for name in running if name != _HERE)
            running = {
                name: pool
                for name, pool in running.items()
                if name == _HERE or times[name][-1] < _HOPELESS * least
            }
    finally:
        for pool in pools.values():
            pool.close()
    return times


def _time_steps(envs: Any, draw: RandomActions) -> float:
    """Return the median seconds per step, the caller being busy for a moment between steps."""
    actions = [draw() for _ in range(4)]
    obs, *_, infos = envs.step(actions[0])
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < _TRIAL_S:
        now = time.perf_counter()
        while time.perf_counter() - now < _THINKING_S:
            pass
        if draw.are_masked:
            draw.see(obs, infos)
            actions = [draw()] * 4
        now = time.perf_counter()
        obs, *_, infos = envs.step(actions[len(times) % 4])
        times.append(time.perf_counter() - now)
    draw.see(obs, infos)
    return float(np.median(times))
