"""How a pool comes into being: shares, processes, spaces, memory."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Env, Space
from gymnasium.spaces import Dict, Graph, OneOf, Text, Tuple
from gymnasium.spaces import Sequence as SequenceSpace
from gymnasium.vector import AutoresetMode

from vecenv.core.arguments import read_count
from vecenv.core.batches import chunk_bounds
from vecenv.core.deadline import Deadline
from vecenv.core.interrupts import interrupts_later
from vecenv.core.restarts import with_restarts
from vecenv.core.rows import is_array_space
from vecenv.core.spaces import BatchedSpaces
from vecenv.machine import usable_cores
from vecenv.workers.chunk import Chunk, EnvSpaces, close_envs, make_envs
from vecenv.workers.pool import Pool
from vecenv.workers.rows import ActionWriter, Layout, Tables

__all__ = ["open_workers", "refuse_custom", "worker_bounds"]

_CLOSE_S = 2.0  # for envs to close that others have kept from being used


def worker_bounds(
    num_envs: int, num_workers: Any, max_concurrency: Any, caller_steps: bool
) -> list[int]:
    """Return which envs each worker has: worker w has bounds[w], ..., bounds[w + 1] - 1.

    Those before bounds[0] are the caller's. The arguments are those of `AsyncVectorEnv`.

    Raises:
        ValueError: There are no envs, or an argument is not what it should be; names it.
    """
    if num_envs == 0:
        raise ValueError("A vector env needs at least one env, got an empty list of factories")
    if num_workers is None or num_workers == "auto":
        num_workers = max(1, usable_cores() - caller_steps)
    else:
        num_workers = read_count("num_workers", num_workers)
    if max_concurrency is not None:
        is_integer = isinstance(max_concurrency, int | np.integer)
        if not is_integer or isinstance(max_concurrency, bool):
            raise ValueError(
                f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}."
            )
        if max_concurrency < 1:
            raise ValueError(
                f"`max_concurrency` must be a positive or None, got {max_concurrency}."
            )
        num_workers = min(num_workers, int(max_concurrency))
    has_own = caller_steps and num_envs > 1
    num_workers = max(1, min(num_workers, num_envs - has_own))
    return chunk_bounds(num_envs, num_workers + has_own)[has_own:]


def open_workers(
    factories: Sequence[Callable[[], Env]],
    bounds: Sequence[int],
    *,
    context: str | None,
    restart_envs: bool,
    autoreset_mode: AutoresetMode,
    publish: Mapping[str, Space] | None,
    batch: Callable[[list[Any], list[Any]], BatchedSpaces],
) -> tuple[Pool, BatchedSpaces, EnvSpaces]:
    """Start the workers, make all envs, and lay out the memory.

    Returns the pool with the batched spaces, and what else is known of the first envs.

    Args:
        factories: One per env.
        bounds: See `worker_bounds`.
        context: Start method, see `choose_method`.
        restart_envs: Whether faults are survived.
        autoreset_mode: When ended envs are reset.
        publish: Named spaces of arrays that envs publish; None to ask the first env.
        batch: Batches the observation spaces and the action spaces of all envs.

    Raises:
        EnvCreationError: A factory raised, or a worker ended while its envs were made.
        Exception: What `batch` raises.
    """
    pool = Pool(context, factories, bounds, restart_envs)
    own_envs: list[Env] = []
    try:
        pool.start()  # first: forks have no env of the caller's
        reports: list[EnvSpaces] = []
        if bounds[0]:
            own_envs, fault = make_envs(factories[: bounds[0]], 0, -1, [0])
            if fault is not None:
                raise pool.creation_error(fault)
            reports.append(EnvSpaces.of(own_envs))
        reports += pool.open()
        obs_spaces, action_spaces = zip(*(p for r in reports for p in r.spaces), strict=True)
        spaces = batch(list(obs_spaces), list(action_spaces))
        layout = Layout(
            pool.memory.used_bytes,
            len(factories),
            spaces.single_observation_space,
            spaces.single_action_space,
            dict(reports[0].published if publish is None else publish),
            autoreset_mode,
            restart_envs,
        )
        if own_envs:
            tables = Tables(pool.memory, layout, 0, len(own_envs))
            if restart_envs:
                own_envs = with_restarts(own_envs, factories[: len(own_envs)], tables.restarts)
            pool.own = Chunk(own_envs, -1, 0, layout, tables, [0])
        tables = Tables(pool.memory, layout, 0, len(factories))
        pool.lay_out(layout, tables, ActionWriter(layout.action_space, tables.actions))
        return pool, spaces, reports[0]
    except BaseException as error:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            error.add_note(
                f"{len(pool.seats)} workers need four files each: raise the limit (ulimit -n), or "
                "take fewer workers, which step several envs each (num_workers)."
            )
        with interrupts_later():
            pool.stop(Deadline(_CLOSE_S if isinstance(error, Exception) else 0))
            close_envs(own_envs)
            pool.memory.close()
        raise


def refuse_custom(space: Space) -> None:
    """Refuse leaves of custom spaces, as Gymnasium does with `shared_memory=True`.

    Raises:
        ValueError: There is one.
    """
    if isinstance(space, Dict | Tuple):
        parts = space.spaces.values() if isinstance(space, Dict) else space.spaces
        for part in parts:
            refuse_custom(part)
    elif not is_array_space(space) and not isinstance(space, Text | Graph | SequenceSpace | OneOf):
        raise ValueError(
            f"shared_memory=True can't hold observations of the custom space {space}; leave the "
            "argument out, and they travel by message while the others stay in shared memory"
        )
