"""What the actors of a vector env are started with: checked options, pickled factories, shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import cloudpickle
from gymnasium import Env

from vecenv.core.arguments import check_choice, read_count
from vecenv.core.base import VecEnv
from vecenv.core.pickling import dump_registry
from vecenv.ray.actor import Start
from vecenv.ray.cluster import Demand

__all__ = ["Makers", "check_makers", "pickled", "read_demand", "start_of_each"]

Makers = Sequence[Callable[[], Env]] | Callable[..., VecEnv]

_OWN = {"CPU": "cpus_per_worker", "GPU": "gpus_per_worker", "memory": "memory_per_worker"}


def read_demand(amounts: dict[str, float | None], resources: Any, strategy: Any) -> Demand:
    """Read the options about an actor's resources and placement.

    Args:
        amounts: Amounts of "CPU", "GPU" and "memory"; None for none of the latter.
        resources: Further amounts by name, as given to `RayVectorEnv`.
        strategy: As given there.

    Raises:
        ValueError: An amount or a name is invalid.
    """
    if resources is not None and not isinstance(resources, Mapping):
        raise ValueError(f"resources is {resources!r}, expected amounts by name")
    for name in _OWN.keys() & (resources or {}):
        raise ValueError(f"resources has {name!r}, which is {_OWN[name]} here")
    given: dict[str, Any] = {k: x for k, x in amounts.items() if x is not None or k == "CPU"}
    given |= resources or {}
    for name, amount in given.items():
        if not (isinstance(amount, Real) and float(amount) > 0):
            who = _OWN.get(name, f"resources[{name!r}]")
            raise ValueError(f"{who} is {amount!r}, expected more than 0")
    if isinstance(strategy, str):
        check_choice("scheduling_strategy", strategy, ("SPREAD", "DEFAULT"))
    return Demand(given, strategy)


def check_makers(
    env_fns: Makers, num_envs: int | None, num_workers: int | None, demand: Demand
) -> int:
    """Check the factories and the numbers, before Ray is started; return the number of envs.

    Raises:
        ValueError: The numbers don't fit.
        TypeError: A factory can't be pickled; names it.
    """
    if callable(env_fns):
        if num_envs is None:
            raise ValueError("a factory of vector envs needs num_envs: how many to make in all")
        count = num_envs
    else:
        count = len(env_fns)
        if num_envs not in (None, count):
            raise ValueError(f"num_envs is {num_envs}, but there are {count} factories")
    if count < 1:
        raise ValueError("A vector env needs at least one env, got an empty list of factories")
    if num_workers is not None:
        read_count("num_workers", num_workers, 1, count)
    elif not demand.is_counted:
        raise ValueError("scheduling_strategy with an object needs num_workers: how many actors")
    for index, env_fn in enumerate(() if callable(env_fns) else env_fns):
        pickled(env_fn, f"env_fns[{index}]")
    return count


def start_of_each(
    env_fns: Makers, bounds: Sequence[int], options: dict[str, Any], restart_envs: bool
) -> list[Start]:
    """Return what each actor is started with.

    Args:
        env_fns: Factories of single envs, or one of vector envs.
        bounds: Actor w has the envs bounds[w], ..., bounds[w + 1] - 1.
        options: Options of each actor's vector env.
        restart_envs: Whether an env that raises is replaced.
    """
    starts, registry = [], dump_registry()
    for worker, (first, last) in enumerate(pairwise(bounds)):
        made = env_fns if callable(env_fns) else list(env_fns[first:last])
        maker = pickled((made, options, restart_envs), "env_fns")
        starts.append(Start(worker, first, last - first, maker, registry))
    return starts


def pickled(value: Any, name: str) -> bytes:
    """Pickle an argument of an actor; functions and classes of scripts by value.

    Raises:
        TypeError: The value can't be pickled.
    """
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # pickling runs code of users' classes
        raise TypeError(
            f"{name}, {value!r}, can't be pickled, and so can't be sent to an actor: "
            f"{type(error).__name__}: {error}. Make what it holds (an env, a lock, a file) inside "
            "of the factory instead"
        ) from error
