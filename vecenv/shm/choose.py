"""Choosing between stepping here and stepping in workers, by a short trial."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from vecenv.shm.cores import usable_cores
from vecenv.shm.env import AsyncVectorEnv
from vecenv.shm.threads import WaitMeter
from vecenv.sync import SyncVectorEnv

__all__ = ["Choice", "choose_backend"]

_MAKING_S = 0.35  # for the envs of the first trial
_TRIAL_S = 0.06  # of stepping, per candidate and round
_ROUNDS = 3
_BUDGET_S = 1.7
_HANDOVER_S = 15e-6  # a step of all envs that takes less is not worth handing over
_CLEARLY = 1.05  # how much faster than stepping here it must be


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
    env_fns: Sequence[Callable[[], Env]],
    *,
    context: str | None = None,
    observation_mode: Any = "same",
) -> Choice:
    """Step the envs with random actions, for less than two seconds in all; pick what is fastest.

    Envs that mostly wait (sleep, network, disk) get a thread each in workers. The envs of the trial
    are made for it and closed again.

    Args:
        env_fns: One factory per env.
        context: Start method of the workers.
        observation_mode: As for the vector env to be made.
    """
    begin = time.perf_counter()
    cores = usable_cores()
    some = _as_many_as_time_allows(env_fns)
    options: dict[str, Any] = {
        "copy": False,
        "observation_mode": observation_mode,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }
    sync = SyncVectorEnv(some, **options)
    try:
        sync.reset()
        seconds = _time_steps(sync, _Actions(sync), _TRIAL_S)
        is_waiting = _mostly_waits(sync)
    finally:
        sync.close()
    making_s, here_s = time.perf_counter() - begin, seconds * len(env_fns) / len(some)
    if is_waiting and len(env_fns) > 1:
        return Choice(
            "async",
            {"context": context},
            "the envs compute less than half of the time, so workers overlap their waiting",
        )
    if here_s < _HANDOVER_S or len(env_fns) == 1 or cores == 1:
        return Choice(
            "sync",
            {},
            f"a step of all {len(env_fns)} envs takes {here_s * 1e6:.0f} us in one process",
        )
    candidates = _candidates(cores, context)
    if making_s > _BUDGET_S / 3:
        name, chosen = next(iter(candidates.items()))
        why = f"a step of all envs takes {here_s * 1e6:.0f} us here, and making envs takes long"
        return Choice("async", chosen, f"{name}: {why}")
    return _measured(some, candidates, options, len(env_fns))


def _candidates(cores: int, context: str | None) -> dict[str, dict[str, Any]]:
    """Return the ways to use workers that are tried, by name."""
    workers = {"num_workers": cores, "context": context}
    with_caller = {"num_workers": cores - 1, "caller_steps": True, "context": context}
    return {f"{cores} workers": workers, f"this process and {cores - 1} workers": with_caller}


def _measured(
    env_fns: Sequence[Callable[[], Env]],
    candidates: dict[str, dict[str, Any]],
    options: dict[str, Any],
    num_envs: int,
) -> Choice:
    """Let the candidates step in turn, and pick by the best round of each."""
    pools: dict[str, Any] = {"one process": SyncVectorEnv(env_fns, **options)}
    try:
        for name, choice in candidates.items():
            pools[name] = AsyncVectorEnv(env_fns, **choice, **options)
        times: dict[str, float] = dict.fromkeys(pools, float("inf"))
        for pool in pools.values():
            pool.reset()
        begin = time.perf_counter()
        for number in range(_ROUNDS):
            for name, pool in pools.items():
                if number == 0 or time.perf_counter() - begin < _BUDGET_S / 2:
                    actions = _Actions(pool)
                    times[name] = min(times[name], _time_steps(pool, actions, _TRIAL_S))
    finally:
        for pool in pools.values():
            pool.close()
    scale = num_envs / len(env_fns) * 1e6
    report = ", ".join(f"{name} {times[name] * scale:.0f}" for name in pools)
    reason = f"microseconds per step of all {num_envs} envs: {report}"
    best = min(candidates, key=times.__getitem__)
    if times[best] * _CLEARLY < times["one process"]:
        return Choice("async", candidates[best], f"{best}; {reason}")
    return Choice("sync", {}, reason)


class _Actions:
    """Random batches of actions, drawn beforehand."""

    def __init__(self, envs: Any) -> None:
        self._batches = [envs.action_space.sample() for _ in range(8)]
        self._next = 0

    def __call__(self) -> Any:
        self._next = (self._next + 1) % len(self._batches)
        return self._batches[self._next]


def _time_steps(envs: Any, actions: _Actions, seconds: float) -> float:
    """Return the median seconds per step."""
    envs.step(actions())
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < seconds:
        now = time.perf_counter()
        envs.step(actions())
        times.append(time.perf_counter() - now)
    return float(np.median(times))


def _mostly_waits(envs: Any) -> bool:
    """Whether the envs wait (sleep, network) for more than half of their time."""
    meter, actions = WaitMeter(), _Actions(envs)
    while meter.is_measuring:
        meter.begin()
        envs.step(actions())
        meter.end(envs.num_envs)
    return meter.found_waiting


def _as_many_as_time_allows(env_fns: Sequence[Callable[[], Env]]) -> list[Callable[[], Env]]:
    """Return so many of the factories as can be called in the time for making; at least one."""
    begin = time.perf_counter()
    each_s = 0.0
    for count, env_fn in enumerate(env_fns[:16], 1):
        env_fn().close()
        each_s = (time.perf_counter() - begin) / count
        if each_s * (count + 1) > _MAKING_S / 4:
            break
    return list(env_fns[: max(1, int(_MAKING_S / max(each_s, 1e-9)))])
