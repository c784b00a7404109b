"""Starting the actors of a vector env: checks of options, pickled factories, shares of the envs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import cloudpickle
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from vecenv.core.base import VecEnv
from vecenv.core.batches import chunk_bounds
from vecenv.core.pickling import dump_registry
from vecenv.core.spaces import ObservationMode
from vecenv.ray.cluster import Cluster, Demand
from vecenv.ray.fleet import Fleet
from vecenv.ray.worker import EnvChunk, Seat

__all__ = ["RayOptions", "open_fleet", "pickled", "read_demand"]

_logger = logging.getLogger("vecenv")

Makers = Sequence[Callable[[], Env]] | Callable[..., VecEnv]


class RayOptions(NamedTuple):
    """The options of `RayVectorEnv`, see there."""

    observation_mode: ObservationMode
    autoreset_mode: AutoresetMode
    num_envs: int | None
    num_workers: int | None
    worker_backend: str | None
    worker_options: dict[str, Any]
    demand: Demand
    address: str | None
    on_error: str
    start_timeout: float
    shares_cpus: bool


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
    if isinstance(strategy, str) and strategy not in ("SPREAD", "DEFAULT"):
        raise ValueError(
            f"scheduling_strategy is {strategy!r}, expected 'SPREAD', 'DEFAULT' or an object of "
            "ray.util.scheduling_strategies"
        )
    if runtime_env is not None and not isinstance(runtime_env, Mapping):
        raise ValueError(f"runtime_env is {runtime_env!r}, expected a dict; see Ray")
    amounts = {"CPU": cpus, "GPU": gpus, "memory": memory or 0, **(resources or {})}
    amounts = {name: amount for name, amount in amounts.items() if amount}
    return Demand(amounts, strategy, runtime_env)


def open_fleet(env_fns: Makers, options: RayOptions) -> Fleet:
    """Check the options, connect to the cluster, and start the actors.

    Raises:
        See `RayVectorEnv`.
    """
    num_envs = _checked(env_fns, options)
    if not callable(env_fns):  # before Ray is started: it may take a while
        _pickled_factories(env_fns, 0)
    cluster = Cluster(options.address, options.demand.runtime_env)
    demand = options.demand._replace(runtime_env=cluster.runtime_env)
    num_workers = options.num_workers
    if num_workers is None:
        num_workers = _places(cluster, demand, num_envs)
    bounds = list(chunk_bounds(num_envs, num_workers))
    registry = dump_registry()
    seats = [
        Seat(worker, first, _pickled_maker(env_fns, first, last, options), registry)
        for worker, (first, last) in enumerate(pairwise(bounds))
    ]
    return Fleet(
        cluster,
        seats,
        bounds,
        demand=demand,
        start_timeout=options.start_timeout,
        shares_cpus=options.shares_cpus,
    )


def _places(cluster: Cluster, demand: Demand, num_envs: int) -> int:
    """Return the number of actors that there is room for, and log it."""
    free = cluster.free_places(demand)
    num_workers = min(num_envs, max(1, free))
    possible = min(num_envs, cluster.all_places(demand))
    is_short = num_workers < possible
    _logger.log(
        logging.WARNING if is_short else logging.INFO,
        "%d envs in %d actors of %s each%s; num_workers says how many, and waits for them",
        num_envs,
        num_workers,
        demand,
        f", though there would be room for {possible} if others did not use it" if is_short else "",
    )
    return num_workers


def _checked(env_fns: Makers, options: RayOptions) -> int:
    """Check the options; return the number of envs."""
    if options.on_error not in ("raise", "restart"):
        raise ValueError(f"on_error is {options.on_error!r}, expected 'raise' or 'restart'")
    if options.worker_backend not in (None, "sync", "async"):
        raise ValueError(
            f"worker_backend is {options.worker_backend!r}, expected 'sync' or 'async'; for "
            "compiled envs pass a factory of vector envs instead of a list"
        )
    if callable(env_fns):
        if options.num_envs is None:
            raise ValueError("a factory of vector envs needs num_envs: how many to make in all")
        if options.worker_backend is not None or options.worker_options:
            raise ValueError(
                "worker_backend and worker_options are for lists of factories of single envs; "
                "bind arguments to a factory of vector envs with functools.partial"
            )
        num_envs = options.num_envs
    else:
        num_envs = len(env_fns)
        if options.num_envs not in (None, num_envs):
            raise ValueError(f"num_envs is {options.num_envs}, but there are {num_envs} factories")
    if num_envs < 1:
        raise ValueError("A vector env needs at least one env, got an empty list of factories")
    num_workers = options.num_workers
    if num_workers is None and not options.demand.is_counted:
        raise ValueError("scheduling_strategy with an object needs num_workers: how many actors")
    if num_workers is not None and not 1 <= num_workers <= num_envs:
        raise ValueError(f"num_workers is {num_workers!r}, expected 1 to {num_envs}, the envs")
    return num_envs


def _pickled_maker(env_fns: Makers, first: int, last: int, options: RayOptions) -> bytes:
    """Return the pickled factory of the vector env with these envs."""
    mode = options.autoreset_mode.value
    if callable(env_fns):
        return pickled(
            functools.partial(env_fns, num_envs=last - first, autoreset_mode=mode), "env_fns"
        )
    backend = options.worker_backend or "sync"
    own = (
        {"num_workers": max(1, int(options.demand.resources["CPU"]))} if backend == "async" else {}
    )
    shared = {"observation_mode": options.observation_mode, "autoreset_mode": mode}
    chunk = EnvChunk(
        list(env_fns[first:last]),
        first,
        backend,
        {**own, **options.worker_options, **shared},
        options.on_error == "restart",
    )
    try:
        return pickled(chunk, "the factories")
    except TypeError:
        _pickled_factories(env_fns[first:last], first)
        raise


def _pickled_factories(env_fns: Sequence[Callable[[], Env]], first: int) -> None:
    """Raise TypeError naming the first factory that can't be pickled; equal ones are tried once."""
    tried = set()
    for index, env_fn in enumerate(env_fns):
        if id(env_fn) not in tried:
            tried.add(id(env_fn))
            pickled(env_fn, f"env_fns[{first + index}]")


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
