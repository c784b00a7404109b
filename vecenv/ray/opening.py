"""Starting the actors of a vector env: checks of options, pickled factories, shares of the envs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import cloudpickle
from gymnasium import Env

from vecenv.core.arguments import check_choice
from vecenv.core.base import VecEnv
from vecenv.core.batches import chunk_bounds
from vecenv.core.pickling import dump_registry
from vecenv.ray.actor import Start
from vecenv.ray.cluster import Cluster, Demand

__all__ = ["choose_bounds", "pickled", "read_demand", "refuse_options", "start_of_each"]

_logger = logging.getLogger("vecenv")

Makers = Sequence[Callable[[], Env]] | Callable[..., VecEnv]


def read_demand(
    cpus: float,
    gpus: float,
    memory: float | None,
    resources: Mapping[str, float] | None,
    strategy: Any,
    runtime_env: dict[str, Any] | None,
) -> Demand:
    """Read the options about an actor's resources and placement.

    Raises:
        ValueError: An amount or a name is invalid.
    """
    if not cpus > 0:
        raise ValueError(f"cpus_per_worker is {cpus!r}, expected more than 0")
    if not gpus >= 0:
        raise ValueError(f"gpus_per_worker is {gpus!r}, expected 0 or more")
    if memory is not None and not memory > 0:
        raise ValueError(f"memory_per_worker is {memory!r}, expected bytes, more than 0")
    if resources is not None and not isinstance(resources, Mapping):
        raise ValueError(f"resources is {resources!r}, expected amounts by name")
    for name, amount in (resources or {}).items():
        if name in ("CPU", "GPU", "memory"):
            own = {"CPU": "cpus", "GPU": "gpus"}.get(name, name)
            raise ValueError(f"resources has {name!r}, which is {own}_per_worker here")
        if not (isinstance(amount, int | float) and amount > 0):
            raise ValueError(f"resources[{name!r}] is {amount!r}, expected more than 0")
    if isinstance(strategy, str):
        check_choice("scheduling_strategy", strategy, ("SPREAD", "DEFAULT"))
    if runtime_env is not None and not isinstance(runtime_env, Mapping):
        raise ValueError(f"runtime_env is {runtime_env!r}, expected a dict; see Ray")
    amounts = {"CPU": cpus, "GPU": gpus, "memory": memory or 0, **(resources or {})}
    amounts = {name: amount for name, amount in amounts.items() if amount}
    return Demand(amounts, strategy, runtime_env)


def refuse_options(env_fns: Makers, worker_backend: Any, worker_options: Any) -> None:
    """Refuse what these options were for, and say what to do instead.

    Raises:
        ValueError: One of them is given, but for "sync" with a list of factories.
    """
    if worker_backend not in (None, "sync") or worker_options:
        raise ValueError(
            f"worker_backend is {worker_backend!r} and worker_options {worker_options!r}, but an "
            "actor has one process, in which a SyncVectorEnv steps its envs: take an actor per "
            "core (num_workers=..., cpus_per_worker=1), and leave them out; for compiled envs pass "
            "a factory of vector envs instead of a list, bound by functools.partial"
        )
    if callable(env_fns) and worker_backend is not None:
        raise ValueError(
            "worker_backend is for lists of factories of single envs; bind arguments to a factory "
            "of vector envs with functools.partial"
        )


def choose_bounds(
    env_fns: Makers,
    num_envs: int | None,
    num_workers: int | None,
    demand: Demand,
    connect: Callable[[], Cluster],
) -> tuple[Cluster, list[int]]:
    """Check the numbers, connect to the cluster, and return which envs each actor has.

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
    if num_workers is None and not demand.is_counted:
        raise ValueError("scheduling_strategy with an object needs num_workers: how many actors")
    if num_workers is not None and not 1 <= num_workers <= count:
        raise ValueError(f"num_workers is {num_workers!r}, expected 1 to {count}, the envs")
    tried: set[int] = set()
    for index, env_fn in enumerate(() if callable(env_fns) else env_fns):
        if id(env_fn) not in tried:  # before Ray is started: it may take a while
            tried.add(id(env_fn))
            pickled(env_fn, f"env_fns[{index}]")
    cluster = connect()
    if num_workers is None:
        num_workers = _places(cluster, demand, count)
    return cluster, chunk_bounds(count, num_workers)


def _places(cluster: Cluster, demand: Demand, num_envs: int) -> int:
    """Return the number of actors that there is room for, and log it."""
    num_workers = min(num_envs, max(1, cluster.free_places(demand)))
    possible = min(num_envs, cluster.all_places(demand))
    others = f", though there would be room for {possible} if others did not use it"
    _logger.log(
        logging.WARNING if num_workers < possible else logging.INFO,
        "%d envs in %d actors of %s each%s; num_workers says how many, and waits for them",
        num_envs,
        num_workers,
        demand,
        others if num_workers < possible else "",
    )
    return num_workers


def start_of_each(
    env_fns: Makers, bounds: Sequence[int], options: dict[str, Any], restart_envs: bool
) -> list[Start]:
    """Return what each actor is started with.

    Args:
        env_fns: Factories of single envs, or one of vector envs.
        bounds: Actor w has the envs bounds[w], ..., bounds[w + 1] - 1.
        options: Of each actor's vector env.
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
