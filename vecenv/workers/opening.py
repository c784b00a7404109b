"""How a pool comes into being: shares, processes, spaces, memory."""

from __future__ import annotations

import errno
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import Env, Space
from gymnasium.spaces import Dict, Graph, OneOf, Text, Tuple
from gymnasium.spaces import Sequence as SequenceSpace
from gymnasium.vector import AutoresetMode

from vecenv.core.arguments import read_count
from vecenv.core.batches import chunk_bounds
from vecenv.core.deadline import Deadline
from vecenv.core.errors import EnvCreationError
from vecenv.core.faults import EnvFault
from vecenv.core.interrupts import interrupts_later
from vecenv.core.restarts import with_restarts
from vecenv.core.rows import is_array_space
from vecenv.core.spaces import BatchedSpaces, require_spaces
from vecenv.machine import usable_cores
from vecenv.workers.chunk import Chunk, EnvSpaces, close_envs, make_envs
from vecenv.workers.pool import Pool
from vecenv.workers.rows import ActionWriter, Layout, Tables

__all__ = ["open_workers", "read_spaces", "refuse_custom", "worker_bounds", "worker_variables"]

_logger = logging.getLogger("vecenv")
_SILENT_S, _AGAIN_S = 1.0, 5.0  # until a line says how many envs there are, and until the next
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
    variables: Sequence[Mapping[str, str]] | None = None,
    at_once: int | None = None,
    given: tuple[Space, Space] | None = None,
    mode: Any = "same",
    shows_progress: bool = False,
) -> tuple[Pool, BatchedSpaces, EnvSpaces]:
    """Start the workers, make all envs, and lay out the memory.

    Returns the pool with the batched spaces, and what else is known of the first envs.

    Args:
        factories: One per env.
        bounds: See `worker_bounds`.
        context: Start method, see `choose_method`.
        restart_envs: Whether faults are survived, also those of envs that can't be made: their rows
            are empty, which the log says.
        autoreset_mode: When ended envs are reset.
        publish: Named spaces of arrays that envs publish; None to ask the first env.
        batch: Batches the observation spaces and the action spaces of all envs.
        variables: See `Pool`.
        at_once: How many workers make envs at the same time; None for all.
        given: Spaces that all envs must have; None for those that they have.
        mode: The observation mode: whether bounds of observation spaces may differ.
        shows_progress: Whether a line says how many envs have been made, if it takes a second.

    Raises:
        EnvCreationError: A factory raised, or a worker ended while its envs were made.
        RuntimeError: An env has other spaces than those given; names it.
        Exception: What `batch` raises.
    """
    pool = Pool(context, factories, bounds, restart_envs, variables)
    own_envs: list[Env] = []
    progress = _Progress(len(factories), shows_progress)
    try:
        pool.start()  # first: forks have no env of the caller's
        reports: list[EnvSpaces] = []
        if bounds[0]:
            own_envs, fault = make_envs(factories[: bounds[0]], 0, -1, [0], restart_envs)
            if fault is not None:
                raise pool.creation_error(fault)
            reports.append(EnvSpaces.of(own_envs))
        reports += pool.open(at_once, lambda count: progress.show(bounds[0] + count))
        about, pairs = _summary(pool, reports, given, mode)
        spaces = batch(*map(list, zip(*pairs, strict=True)))
        layout = Layout(
            pool.memory.used_bytes,
            len(factories),
            spaces.single_observation_space,
            spaces.single_action_space,
            dict(about.published if publish is None else publish),
            autoreset_mode,
            restart_envs,
            bounds[0] > 0,
        )
        if own_envs:
            tables = Tables(pool.memory, layout, 0, len(own_envs))
            if restart_envs:
                own_envs = with_restarts(own_envs, factories[: len(own_envs)], tables.restarts)
            pool.own = Chunk(own_envs, -1, 0, layout, tables, [0])
        tables = Tables(pool.memory, layout, 0, len(factories))
        pool.lay_out(layout, tables, ActionWriter(layout.action_space, tables.actions))
        return pool, spaces, about
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


def _summary(
    pool: Pool, reports: Sequence[EnvSpaces], given: tuple[Space, Space] | None, mode: Any
) -> tuple[EnvSpaces, list[tuple[Space, Space]]]:
    """Return what is known of the first env that was made, and the spaces of all envs.

    Those that could not be made are told of, and have the spaces of the others.
    """
    about = next((report for report in reports if report.metadata is not None), None)
    for fault in (fault for report in reports for fault in report.faults):
        error = pool.creation_error(fault)
        if about is None:  # there is none to go on with
            raise error
        _logger.warning("%s; its row is empty until it is reopened", error)
    assert about is not None
    pairs = [None if isinstance(p, EnvFault) else p for report in reports for p in report.spaces]
    first = given or next(filter(None, pairs))
    for env_id, pair in enumerate(pairs if given else ()):
        require_spaces(env_id, pair or first, first, mode, "as `spaces` says")
    return about, [pair if pair and not given else first for pair in pairs]


class _Progress:
    """Lines on standard error that say how many envs have been made, if that takes long."""

    def __init__(self, num_envs: int, is_shown: bool) -> None:
        self._num_envs, self._is_shown = num_envs, is_shown and sys.stderr is not None
        self._begin_s, self._wait_s = time.monotonic(), _SILENT_S

    def show(self, count: int) -> None:
        """Say that `count` envs have been made, if it is time for it; the last time for all."""
        took_s = time.monotonic() - self._begin_s
        is_end = count == self._num_envs and self._wait_s > _SILENT_S
        if self._is_shown and (is_end or took_s >= self._wait_s):
            text = f"vecenv: {count} of {self._num_envs} envs are made ({took_s:.0f} s)\n"
            sys.stderr.write(text)
            sys.stderr.flush()
            self._wait_s = math.inf if count == self._num_envs else took_s + _AGAIN_S


def worker_variables(
    worker_env: Any, num_workers: int, context: str | None, caller_steps: bool
) -> list[dict[str, str]] | None:
    """Return the environment variables of each worker; None if no `worker_env` is given.

    The arguments are those of `AsyncVectorEnv`.

    Raises:
        TypeError: There is something that is no string, or no dict; names key, value and worker.
        ValueError: A name that no variable can have; or there are processes that would not have
            the variables in time.
    """
    if worker_env is None:
        return None
    if context == "fork":
        raise ValueError(
            "worker_env with context='fork': forks have all that this process has imported, for "
            "which variables come too late; leave context out, and workers are fresh interpreters"
        )
    if caller_steps:
        raise ValueError(
            "worker_env with caller_steps=True: this process, whose environment is not changed, "
            "would step envs, too; leave caller_steps out"
        )
    if not callable(worker_env) and not isinstance(worker_env, Mapping):
        raise TypeError(
            f"worker_env is {worker_env!r}, expected a dict of environment variables, or a "
            "function that returns one for the number of a worker"
        )
    found = []
    for worker in range(num_workers):
        variables = worker_env(worker) if callable(worker_env) else worker_env
        if not isinstance(variables, Mapping):
            raise TypeError(f"worker_env({worker}) is {variables!r}, expected a dict")
        for name, value in variables.items():
            told = f"worker_env of worker {worker} has {name!r}: {value!r}"
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"{told}, expected strings, such as str({value!r})")
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"{told}, which can't be an environment variable")
        found.append(dict(variables))
    return found


def read_spaces(
    spaces: Any, lazy: bool, context: str | None, variables: Sequence[Mapping[str, str]] | None
) -> tuple[Space, Space] | None:
    """Return the spaces of one env that the argument of `AsyncVectorEnv` gives, if it gives some.

    An env of an id is made, and closed, in a process that ends at once.

    Raises:
        ValueError: There is none for a vector env that is lazy.
        TypeError: It is neither a pair of spaces nor an id.
        EnvCreationError: The env of the id could not be made.
    """
    if isinstance(spaces, tuple) and len(spaces) == 2:
        if all(isinstance(space, Space) for space in spaces):
            return spaces
    elif spaces is None:
        if lazy:
            raise ValueError(
                "lazy=True makes no env before the first `reset`: give the spaces of one, as "
                "spaces=(observation_space, action_space), or the id of an env that has these"
            )
        return None
    elif isinstance(spaces, str):
        pool = Pool(context, [partial(gym.make, spaces)], [0, 1], False, variables)
        try:
            pool.start()
            return _summary(pool, pool.open(), None, "same")[1][0]
        except EnvCreationError as error:
            error.add_note(f"It was to say what spaces={spaces!r} are.")
            raise
        finally:
            pool.stop(Deadline(_CLOSE_S))
            pool.memory.close()
    raise TypeError(
        f"spaces is {spaces!r}, expected (observation space, action space) of one env, or the id "
        "of a registered env that has these"
    )


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
