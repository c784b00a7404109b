"""How a pool comes into being: processes, spaces, and the places of everything in shared memory."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env, Space
from gymnasium.spaces import Dict, Graph, OneOf, Text, Tuple
from gymnasium.spaces import Sequence as SequenceSpace
from gymnasium.vector import AutoresetMode

from vecenv.core.arguments import read_count
from vecenv.core.autoreset import StepRows
from vecenv.core.batches import chunk_bounds
from vecenv.core.deadline import Deadline
from vecenv.core.errors import EnvCreationError
from vecenv.core.faults import EnvFault, WorkerDiedError
from vecenv.core.interrupts import interrupts_later
from vecenv.core.pickling import dumps
from vecenv.core.restarts import with_restarts
from vecenv.core.rows import is_array_space
from vecenv.core.spaces import BatchedSpaces, ObservationMode, batch_env_spaces
from vecenv.machine import usable_cores
from vecenv.workers.actions import action_leaves
from vecenv.workers.arena import Arena
from vecenv.workers.chunk import Chunk, run_here
from vecenv.workers.exchange import Exchange
from vecenv.workers.info_columns import ColumnReader
from vecenv.workers.layout import ControlLayout
from vecenv.workers.links import Link, PortableLink, has_futex
from vecenv.workers.messages import EnvSpaces, Layout
from vecenv.workers.pool import StartedProcesses, WorkerPool
from vecenv.workers.probe import MOST_THREADS, Apart, ProbeTimeout, can_share, tells_queues
from vecenv.workers.rows import ReadyRing, SlotTable, make_slot, ring_size
from vecenv.workers.starting import StartMethod, prepare_start
from vecenv.workers.worker import close_envs, env_spaces, make_chunk_envs

__all__ = ["Opened", "PoolOptions", "checked_threads", "open_workers", "worker_shares"]

Factories = Sequence[Callable[[], Env]]
_logger = logging.getLogger("vecenv")
_CLOSE_S = 2.0  # for envs to close that others have kept from being used
_PROBE_S = 10.0  # for making and stepping one env, after which it counts as computing


class PoolOptions(NamedTuple):
    """How a pool is to be set up; the options of `AsyncVectorEnv` after their checks.

    Attributes:
        bounds: Chunks of envs; worker w has bounds[w], ..., bounds[w + 1] - 1.
        context: Start method, or None to choose one, see `choose_method`.
        daemon: Flag of the processes.
        threads: Per worker; 0 if it depends on whether envs wait.
        most_threads: Per worker, so that no more envs are stepped at a time than are allowed.
        may_spin: Whether there is a core for every process.
        restart_envs: Whether faults are survived.
        refuse_custom: Whether custom observation spaces are refused.
        publish: Named spaces of arrays that envs publish, or None to ask the first env.
        most_workers: As many as there may be, if envs need a process each.
        owner: Class name, for messages.
    """

    bounds: list[int]
    context: str | None
    daemon: bool
    threads: int
    most_threads: int
    may_spin: bool
    restart_envs: bool
    refuse_custom: bool
    publish: dict[str, Space] | None
    most_workers: int
    observation_mode: ObservationMode
    autoreset_mode: AutoresetMode
    owner: str

    @staticmethod
    def checked(
        num_envs: int,
        *,
        num_workers: int | None,
        threads_per_worker: int | str,
        max_concurrency: int | None,
        caller_steps: bool,
        on_error: str,
        **others: Any,
    ) -> PoolOptions:
        """Check options of `AsyncVectorEnv` and decide on shares; `others` are kept as given."""
        if on_error not in ("raise", "restart"):
            raise ValueError(f"on_error is {on_error!r}, expected 'raise' or 'restart'")
        if num_envs == 0:
            raise ValueError("A vector env needs at least one env, got an empty list of factories")
        threads = checked_threads(threads_per_worker)
        num_workers, most_threads = worker_shares(
            num_envs, num_workers, caller_steps, max_concurrency
        )
        has_own = caller_steps and num_envs > 1
        return PoolOptions(
            bounds=chunk_bounds(num_envs, num_workers + has_own)[has_own:],
            threads=min(threads, most_threads),
            most_threads=most_threads,
            may_spin=usable_cores() >= num_workers + 1,
            restart_envs=on_error == "restart",
            most_workers=num_envs if max_concurrency is None else int(max_concurrency),
            **others,
        )


class Opened(NamedTuple):
    """A pool that is ready."""

    exchange: Exchange
    arena: Arena
    spaces: BatchedSpaces
    rows: StepRows
    published: dict[str, np.ndarray]
    metadata: dict[str, Any]
    render_mode: str | None


def checked_threads(threads_per_worker: int | str) -> int:
    """Return the number of threads; 0 for "auto", if it depends on the envs."""
    if isinstance(threads_per_worker, str) and threads_per_worker == "auto":
        return 0
    try:
        return read_count("threads_per_worker", threads_per_worker)
    except ValueError as error:
        raise ValueError(f"{error}, or 'auto'") from None


def worker_shares(
    num_envs: int,
    num_workers: int | None,
    caller_steps: bool,
    max_concurrency: int | None,
) -> tuple[int, int]:
    """Return how many workers to use, and how many threads each may have at most."""
    most_threads = num_envs
    if num_workers is None:
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
        most_threads = int(max_concurrency) // num_workers
    most = num_envs - 1 if caller_steps and num_envs > 1 else num_envs
    return max(1, min(num_workers, most)), most_threads


def open_workers(factories: Factories, options: PoolOptions, started: StartedProcesses) -> Opened:
    """Open a pool; if no process can hold two of the envs, one with a worker for each.

    That is so if an env can't be made where another was, and can where there is none.

    Args:
        factories: One per env.
        options: How the pool is to be.
        started: Takes everything that is to have processes before it has one, for who has to end
            them if Ctrl-C comes; what has been ended here is taken out again.

    Raises:
        EnvCreationError: A factory raised, or a worker ended while its envs were made.
        RuntimeError: The envs' spaces differ.
        ValueError: A custom observation space is refused.
    """
    try:
        if options.threads:
            return open_pool(factories, options, started)
        return _open_by_trial(factories, options, started)
    except EnvCreationError as error:
        failed = error
    env_id: int = vars(failed).get("env_index", 0)
    has_own = options.bounds[0] > 0
    singly = list(range(int(has_own), len(factories) + 1))
    if env_id in (0, *options.bounds) or not _can_be_made_alone(
        factories[env_id], options, started
    ):
        raise failed
    if len(singly) - 1 > options.most_workers:
        failed.add_note(
            f"In a process of its own env {env_id} can be made; max_concurrency="
            f"{options.most_workers} does not allow {len(factories)} workers."
        )
        raise failed
    try:
        opened = open_pool(factories, options._replace(bounds=singly, threads=1), started)
    except Exception:  # the first error is the one to report
        raise failed from failed.__cause__
    _logger.warning(
        "%s. A process of its own can hold it, so every env gets one: %d workers",
        failed,
        len(singly) - 1,
    )
    return opened


def _can_be_made_alone(
    factory: Callable[[], Env], options: PoolOptions, started: StartedProcesses
) -> bool:
    """Whether an env can be made in a process that has no other."""
    try:
        opened = open_pool([factory], options._replace(bounds=[0, 1], threads=1), started)
    except Exception:  # the error that led here says what is wrong
        return False
    deadline = Deadline(_CLOSE_S)
    opened.exchange.ask_to_close(deadline)
    opened.exchange.pool.stop(deadline)
    opened.arena.close()
    started.remove(opened.exchange.pool)
    return True


class _Trial:
    """Finding out whether envs gain by threads, in a process of its own.

    An env that is made for it shows that, and is gone when there is a verdict: later is too late,
    as envs can't change their thread. A context, at whose end the trial is over.

    Args:
        factories: One per env; the last one's is tried out.
        started: As of `open_workers`.
    """

    def __init__(self, factories: Factories, started: StartedProcesses) -> None:
        self._apart = Apart(can_share, factories[-1:], is_worker=True)
        started.append(self._apart)
        self._started = started
        self._gains: bool | None = None

    def __enter__(self) -> _Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self._apart.kill()
        self._started.remove(self._apart)

    def start(self, method: StartMethod) -> None:
        """Start the process; that it can't be makes a verdict, too."""
        try:
            self._apart.start(method)
        except Exception as error:  # starting the workers will say so, if it lasts
            self._give_up(error)

    def gains(self) -> bool:
        """Wait for the verdict: whether envs gain by threads."""
        if self._gains is None:
            try:
                self._gains = self._apart.result(_PROBE_S)
                self._apart.kill()
            except Exception as error:  # if it is the envs' fault, making them will say so
                self._give_up(error)
        return bool(self._gains)

    def _give_up(self, error: Exception) -> None:
        self._apart.kill()
        self._gains = False
        _logger.log(
            logging.WARNING if isinstance(error, ProbeTimeout) else logging.DEBUG,
            "each worker steps one env at a time, as it is unknown whether envs wait (the probe "
            "failed with %s: %s); threads_per_worker=n steps n at a time",
            type(error).__name__,
            error,
        )


def _open_by_trial(factories: Factories, options: PoolOptions, started: StartedProcesses) -> Opened:
    """Open a pool with a thread per env if these gain by it, else with one thread per worker.

    Few workers are started while an env is tried out, for envs that compute, and make theirs when
    it is gone; others take their place if it waits. Many would take each other's cores, and so
    would any where the time that an env waits for a core would count as its own.
    """
    largest = max(last - first for first, last in itertools.pairwise(options.bounds))
    most = min(largest, options.most_threads, MOST_THREADS)
    alone = options._replace(threads=1)
    if most < 2:
        return open_pool(factories, alone, started)
    method = prepare_start(options.context)
    with _Trial(factories, started) as trial:
        # The server's children are as clean as spawned ones, and sooner there.
        is_spawn = options.context == "spawn"
        trial.start(StartMethod("forkserver", None) if is_spawn else method)
        if len(options.bounds) - 1 <= usable_cores() and tells_queues():
            with contextlib.suppress(OSError):  # there may be no room for workers and the trial
                opened = _open_unless(trial.gains, factories, alone, method, started)
                if opened is not None:
                    return opened
        threads = most if trial.gains() else 1
    return open_pool(factories, options._replace(threads=threads), started)


def open_pool(factories: Factories, options: PoolOptions, started: StartedProcesses) -> Opened:
    """Start the workers, make all envs, and lay out the shared memory; see `open_workers`.

    Args:
        factories: One per env.
        options: How the pool is to be; it says how many threads.
        started: As of `open_workers`.

    Raises:
        EnvCreationError: A factory raised, or a worker ended while its envs were made.
        RuntimeError: The envs' spaces differ.
        ValueError: A custom observation space is refused.
    """
    method = prepare_start(options.context)
    opened = _open_unless(lambda: False, factories, options, method, started)
    assert opened is not None
    return opened


def _open_unless(
    is_wrong: Callable[[], bool],
    factories: Factories,
    options: PoolOptions,
    method: StartMethod,
    started: StartedProcesses,
) -> Opened | None:
    """Open a pool as `open_pool` does.

    Args:
        is_wrong: Called when workers have been started and have made no env: whether it is not the
            pool that is wanted. Then it is ended, and None returned.
        factories: One per env.
        options: As of `open_pool`.
        method: How workers are started.
        started: As of `open_workers`.
    """
    num_envs = len(factories)
    layout = ControlLayout.of(options.bounds, options.threads, ring_size(num_envs))
    link = _make_link(layout, options)
    arena = Arena()
    words = arena.allocate((link.layout.num_words,), np.int64)
    link.attach(words, is_caller=True, may_spin=options.may_spin, file=arena.file)
    pool = WorkerPool(
        options.context,
        factories,
        options.bounds,
        link,
        arena,
        daemon=options.daemon,
        may_spin=options.may_spin,
        restarts=arena.allocate((num_envs,), np.int64) if options.restart_envs else None,
    )
    started.append(pool)
    own_envs: list[Env] = []

    def give_up(seconds: float) -> None:
        pool.dismiss(Deadline(seconds))
        close_envs(own_envs, run_here)
        arena.close()
        started.remove(pool)

    try:
        pool.start_all(method)
        if not is_wrong():
            pool.let_make()
            reports = _make_all(pool, factories, own_envs)
            return _lay_out(pool, link, arena, reports, own_envs, options)
    except BaseException as error:
        give_up(_CLOSE_S if isinstance(error, Exception) else 0)
        raise
    give_up(0)
    return None


def _make_link(layout: ControlLayout, options: PoolOptions) -> Link:
    if has_futex():
        with interrupts_later():
            from vecenv.workers.futex_link import FutexLink

        return FutexLink(layout)
    import multiprocess

    # Its semaphores need names, which reach workers however these are started.
    method = "fork" if options.context == "fork" else "spawn"
    return PortableLink(layout, multiprocess.get_context(method))  # type: ignore[attr-defined]  # multiprocess has no types


def _make_all(pool: WorkerPool, factories: Factories, own_envs: list[Env]) -> list[EnvSpaces]:
    """Make the caller's own envs and wait for the workers'; return the reports in env order."""
    reports: list[EnvSpaces] = []
    own_factories = list(factories[: pool.bounds[0]])
    if own_factories:
        envs, fault = make_chunk_envs(own_factories, 0, -1, run_here)
        own_envs += envs
        if fault is not None:
            raise _creation_error(fault, factories)
        reports.append(env_spaces(envs))
    outcomes = pool.receive_openings(range(len(pool.processes)))
    for _, outcome in sorted(outcomes.items()):
        if isinstance(outcome, EnvFault):
            raise _creation_error(outcome, factories)
    for worker, outcome in sorted(outcomes.items()):
        if isinstance(outcome, WorkerDiedError):
            env_id = pool.at_env(worker)
            error = EnvCreationError(
                f"{outcome} It was making env {env_id} of {len(factories)} "
                f"(env_fns[{env_id}], {factories[env_id]!r})"
            )
            vars(error)["env_index"] = env_id
            raise error from outcome
        assert isinstance(outcome, EnvSpaces)
        reports.append(outcome)
    return reports


def _creation_error(fault: EnvFault, factories: Factories) -> EnvCreationError:
    env_id = fault.env_id
    error = EnvCreationError(
        f"Making env {env_id} of {len(factories)} failed with {fault.text} "
        f"(raised by env_fns[{env_id}], {factories[env_id]!r})"
    )
    error.__cause__ = fault.exception(0)
    vars(error)["env_index"] = env_id
    return error


def _lay_out(
    pool: WorkerPool,
    link: Link,
    arena: Arena,
    reports: list[EnvSpaces],
    own_envs: list[Env],
    options: PoolOptions,
) -> Opened:
    """Batch the spaces, reserve the memory, and tell the workers where everything is."""
    pairs = [report.spaces[k] for report in reports for k in report.which]
    obs_spaces, action_spaces = map(list, zip(*pairs, strict=True))
    spaces = batch_env_spaces(obs_spaces, action_spaces, options.observation_mode, options.owner)
    single, num_envs = spaces.single_observation_space, len(pairs)
    if options.refuse_custom:
        _refuse_custom(single)
    rows, own_leaves = make_slot(arena, single, num_envs)
    ring = ReadyRing(arena, link, single, own_leaves)
    publish = reports[0].published if options.publish is None else options.publish
    published = _published(arena, publish, num_envs)
    layout = Layout(
        observation_space=single,
        action_space=spaces.single_action_space,
        own=own_leaves,
        actions=action_leaves(spaces.single_action_space, num_envs, arena.allocate, arena.leaf),
        ring_leaves=ring.leaves(),
        published={name: arena.leaf(array) for name, array in published.items()},
        autoreset_mode=options.autoreset_mode,
        row_forms=arena.leaf(arena.allocate((num_envs,), np.int64)),
    )
    pickled = dumps(layout)
    for worker in range(len(pool.processes)):
        pool.send(worker, pickled)
    if own_envs and pool.restarts is not None:
        own_envs = with_restarts(own_envs, pool.factories[: len(own_envs)], pool.restarts)
    own = Chunk(own_envs, -1, 0, layout, arena) if own_envs else None
    slots = SlotTable(arena, single, rows, num_envs)
    columns = ColumnReader(arena, num_envs, link.layout.ring_rows, layout.row_forms)
    exchange = Exchange(pool, link, layout, slots, columns, ring, own)
    exchange.bind_objects(rows.obs)
    about = reports[0].metadata, reports[0].render_mode
    return Opened(exchange, arena, spaces, rows, published, *about)


def _published(arena: Arena, publish: dict[str, Space], num_envs: int) -> dict[str, np.ndarray]:
    """Allocate a row per env for every array that envs publish."""
    return {
        name: arena.allocate((num_envs, *(space.shape or ())), space.dtype)
        for name, space in publish.items()
    }


def _refuse_custom(space: Space) -> None:
    """Refuse leaves of custom spaces, as Gymnasium does with `shared_memory=True`."""
    if isinstance(space, Dict | Tuple):
        parts = space.spaces.values() if isinstance(space, Dict) else space.spaces
        for part in parts:
            _refuse_custom(part)
    elif not is_array_space(space) and not isinstance(space, Text | Graph | SequenceSpace | OneOf):
        raise ValueError(
            f"shared_memory=True can't hold observations of the custom space {space}; leave the "
            "argument out, and they travel by message while the others stay in shared memory"
        )
