"""Choosing between stepping here and stepping in workers, by a short trial."""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from vecenv.shm.cores import usable_cores
from vecenv.shm.env import AsyncVectorEnv
from vecenv.shm.threads import WaitMeter
from vecenv.sync import SyncVectorEnv

__all__ = ["Choice", "choose_backend"]

_PROBE_S = 0.015  # of stepping a single env
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

Factories = Sequence[Callable[[], Env]]


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


class _Probe(NamedTuple):
    """What stepping a single env has shown."""

    make_s: float
    step_s: float
    is_waiting: bool


def choose_backend(env_fns: Factories, *, observation_mode: Any = "same") -> Choice:
    """Step envs with random actions, for less than two seconds in all; pick what is fastest.

    What counts is the time in `step` when the caller computes for a moment between steps, as it
    does in training: a loop that does nothing else keeps workers awake and makes them look better.
    The envs of the trial are made for it and closed again, at most as many as were asked for at a
    time in this process. Cheap envs are known after a few steps of one; envs that mostly wait
    (sleep, network, disk) go to workers, which overlap their waiting. If anything fails, such as
    making an env twice, envs are stepped here. The global random generators of Python and NumPy are
    left as they were.

    Args:
        env_fns: One factory per env.
        observation_mode: As for the vector env to be made.
    """
    if len(env_fns) == 1:
        return Choice("sync", {}, "there is only one env")
    if _is_daemon():
        return Choice("sync", {}, "this process is a daemon and can't have workers")
    try:
        with _undisturbed():
            return _by_trial(env_fns, observation_mode)
    except Exception as error:  # whatever users' envs raise: the vector env will say it better
        return Choice("sync", {}, f"the trial failed with {type(error).__name__}: {error}")


def _is_daemon() -> bool:
    import multiprocess

    return multiprocess.current_process().daemon  # type: ignore[attr-defined]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hide the trial from the global generators and from the filters of warnings."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - envs may use it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def _by_trial(env_fns: Factories, observation_mode: Any) -> Choice:
    num_envs, cores = len(env_fns), usable_cores()
    probe = _probe(env_fns[-1])
    if probe is None:
        return Choice("sync", {}, "a factory returns the same env twice")
    all_s = probe.step_s * num_envs
    told = f"a step of all {num_envs} envs takes about {all_s * 1e6:.0f} us in one process"
    if probe.is_waiting:
        return Choice("async", {}, "the envs mostly wait, which workers overlap")
    if cores == 1:
        return Choice("sync", {}, "there is only one core, and the envs do not wait")
    if all_s < (_CHEAP_AND_FEW_S if num_envs <= _FEW else _CHEAP_S):
        return Choice("sync", {}, f"{told}, too little to be handed over")
    if all_s > _COSTLY_S:
        return Choice("async", {}, f"{told}, enough to be shared by {cores} workers")
    # Each env is made once for this process, and by the workers of each candidate side by side.
    making_s = probe.make_s * (1 + 2 / cores)
    count = min(num_envs, int(_MAKING_S / max(making_s, 1e-9)))
    if count < min(num_envs, 2 * cores) or not _can_fork():
        if all_s > _WORTHWHILE_S:
            return Choice("async", {}, f"{told}, and {cores} workers can share it")
        return Choice("sync", {}, f"{told}, and trying workers out would take too long")
    return _measured(env_fns[:count], cores, observation_mode, num_envs)


def _can_fork() -> bool:
    """Whether workers start in milliseconds."""
    import multiprocess

    return multiprocess.get_start_method() == "fork"  # type: ignore[attr-defined]


def _probe(env_fn: Callable[[], Env]) -> _Probe | None:
    """Make and step one env; None if the factory always returns the same one."""
    begin = time.perf_counter()
    env = env_fn()
    make_s = time.perf_counter() - begin
    is_own = True
    try:
        if make_s < _MAKING_S:
            other = env_fn()
            is_own = other.unwrapped is not env.unwrapped
            if not is_own:
                return None  # it is the caller's, so it is neither stepped nor closed
            other.close()
        env.reset()
        return _Probe(make_s, *_step_alone(env))
    finally:
        if is_own:
            env.close()


def _step_alone(env: Env) -> tuple[float, bool]:
    """Return seconds per step, of the fastest of some blocks of steps, and whether it waits."""
    actions = [env.action_space.sample() for _ in range(64)]
    meter, fastest, steps, block = WaitMeter(), float("inf"), 0, 1
    begin = time.perf_counter()
    while (
        steps < 3
        or time.perf_counter() - begin < _PROBE_S
        or (meter.found_waiting and meter.is_measuring)
    ):
        meter.begin()
        now = time.perf_counter()
        for number in range(block):
            result = env.step(actions[(steps + number) % len(actions)])
            if result[2] or result[3]:
                env.reset()
        block_s = time.perf_counter() - now
        meter.end(block)
        steps += block
        fastest = min(fastest, block_s / block)
        block = 2 * block if block_s < 5e-4 else block
    return fastest, meter.found_waiting


def _measured(env_fns: Factories, cores: int, observation_mode: Any, num_envs: int) -> Choice:
    """Let the candidates step in turn, and pick by the best round of each."""
    candidates = {
        f"this process and {cores - 1} workers": {"caller_steps": True},
        f"{cores} workers": {},
    }
    options: dict[str, Any] = {
        "copy": False,
        "observation_mode": observation_mode,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }
    here = "one process"
    begin = time.perf_counter()
    pools: dict[str, Any] = {here: SyncVectorEnv(env_fns, **options)}
    try:
        for name, choice in candidates.items():
            if time.perf_counter() - begin < _BUDGET_S / 2:
                pools[name] = AsyncVectorEnv(env_fns, **choice, **options)
        times: dict[str, float] = dict.fromkeys(pools, float("inf"))
        for pool in pools.values():
            pool.reset()
        for number in range(_ROUNDS):
            for name, pool in pools.items():
                if number == 0 or time.perf_counter() - begin < _BUDGET_S:
                    times[name] = min(times[name], _time_steps(pool))
    finally:
        for pool in pools.values():
            pool.close()
    scale = num_envs / len(env_fns) * 1e6
    report = ", ".join(f"{name} {seconds * scale:.0f}" for name, seconds in times.items())
    reason = f"microseconds per step of all {num_envs} envs: {report}"
    best = min(times, key=times.__getitem__)
    if times[best] * _CLEARLY < times[here]:
        return Choice("async", candidates[best], f"{best}; {reason}")
    return Choice("sync", {}, reason)


def _time_steps(envs: Any) -> float:
    """Return the median seconds per step, the caller being busy for a moment between steps."""
    actions = [envs.action_space.sample() for _ in range(4)]
    envs.step(actions[0])
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < _TRIAL_S:
        now = time.perf_counter()
        while time.perf_counter() - now < _THINKING_S:
            pass
        now = time.perf_counter()
        envs.step(actions[len(times) % 4])
        times.append(time.perf_counter() - now)
    return float(np.median(times))
