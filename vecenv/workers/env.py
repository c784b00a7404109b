"""AsyncVectorEnv: Gymnasium envs in worker processes, over shared memory.

    caller                      shared memory                     worker process w
    ------                      -------------                     ----------------
    AsyncVectorEnv --writes-->  actions: one row per env          --reads-->   Chunk, its envs are
    AsyncVectorEnv <--reads---  obs, rewards, flags: likewise     <--writes--    bounds[w] ...
    Pool           <--reads---  the env at work, per worker       <--writes--    bounds[w + 1] - 1

                                socket pair of worker w
    Pool, _Seat w  ------------ STEP, SEND, ASK: wakes worker --> _Worker, calls its Chunk
    Pool, _Seat w  <----------- DONE, ROW: wakes the caller ----- _Worker

The memory (`Memory`) is one anonymous file. Every process maps it, and allocates the same `Tables`
in the same order. There are no locks: frames on the sockets hand the rows over. The caller writes
rows of actions before it sends a frame; a worker writes rows of results before it replies. The
memory also holds the number of the last full reset. The caller waits for all sockets at once.

*A step* writes all actions, sends STEP to every worker and waits for a DONE from each. Infos,
faults and observations without fixed shape are the payload of the reply, a pickled `Answer`.
*send / recv*: SEND for each env, ROW for each env that is done; `ready` keeps the order of arrival.
*An env that raises* becomes an `EnvFault` in the reply. The worker steps its other envs all the
same, and the caller raises the exception.
*A worker that dies* closes its socket, which the wait sees at once. `Pool` reports how the worker
ended, or starts another one and sends it what is unanswered. A late worker is killed first.
*A caller that dies* closes its sockets, which ends workers; a `Watcher` kills those at work, and
ends what envs have started.
*An exception in the midst of a call* (Ctrl-C) leaves everything as it is: all calls but `reset` and
`close` are refused. `reset` drops outstanding replies, and replaces a worker if its bytes were
being read or written just then (`Pool.give_up`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import Env, Space, logger
from gymnasium.error import NoAsyncCallError
from gymnasium.vector import AutoresetMode

from vecenv.core.arguments import (
    Deadline,
    Seed,
    checked_seed,
    read_autoreset_mode,
    read_count,
    read_timeout,
    seed_per_env,
    split_reset_mask,
)
from vecenv.core.base import GymVecEnv, StepBatch, StepResult
from vecenv.core.ending import close_at_exit
from vecenv.core.errors import EnvStateError, StepTimeoutError, WorkerDiedError, raise_faults
from vecenv.core.infos import add_info
from vecenv.core.pickling import dump_factories, dump_registry, dumps
from vecenv.core.protocol import CallProtocol
from vecenv.core.replacing import pack_envs, raise_creation_errors, unpack_envs
from vecenv.core.rows import StepRows
from vecenv.core.spaces import ObservationMode
from vecenv.timing.calls import STEP_ASYNC, STEP_WAIT
from vecenv.timing.stamps import EnvStamps, WorkerProcess
from vecenv.workers.channel import Kind, message
from vecenv.workers.plan import Plan, read_spaces, worker_bounds, worker_variables

if TYPE_CHECKING:
    from vecenv.workers.chunk import Answer
    from vecenv.workers.pool import Pool

__all__ = ["AsyncVectorEnv"]

WorkerEnv = Mapping[str, str] | Callable[[int], Mapping[str, str]]
_Request = Callable[[int, int], tuple[Any, ...]]  # arguments for the chunk of envs i, ..., j - 1

_CLOSE_TIMEOUT_S = 30.0
_NEVER = Deadline.of_call(None, None)
_NUMBERS = (float, int, bool, np.float64, np.float32, np.int64)


class AsyncVectorEnv(GymVecEnv):
    """Gymnasium envs stepped in chunks by worker processes over shared memory.

    A drop-in replacement for `gymnasium.vector.AsyncVectorEnv`: same arguments, attributes,
    methods, results and errors, without a message per env, and with the additions of `VecEnv`.
    Workers write observations, rewards and flags into memory that the caller reads. Envs that wait
    (for a network, a disk, another process) need a worker each: `num_workers=len(env_fns)`.

    If an exception from elsewhere (Ctrl-C) interrupts a call, only `reset` and `close` are allowed
    afterwards. A vector env is closed when nothing refers to it any more, and when the program
    ends.

    Args:
        env_fns: One factory per env, called without arguments in the worker.
        shared_memory: Kept for compatibility: arrays are always in shared memory, other parts of
            observations travel by message. True refuses custom spaces, as Gymnasium does.
        copy: Whether `step` returns copies of observations, which the caller may keep. With False
            it returns views, valid until the next call; `recv` returns copies in either case.
        context: "fork"; "forkserver" or "spawn", which both start a fresh interpreter for each
            worker; None for the method set by `set_start_method` of `multiprocess` or
            `multiprocessing`. If none is set, None is "fork" where that is harmless (this process
            has one thread and uses no GPU). Workers never run the main script again.
        daemon: Kept for compatibility: workers end with this process, and envs may start processes
            of their own, which end with their worker.
        worker: Must be None: only Gymnasium's class can run another worker function.
        observation_mode, autoreset_mode: As in `SyncVectorEnv`.
        max_concurrency: Largest number of workers.
        num_workers: Processes, at most one per env; None or "auto" for one per usable core
            (affinity and cgroup quota).
        caller_steps: Whether the calling process steps a share of the envs itself, in `step`.
        on_error: "raise" an env's exception, or "restart": make a new env, report the episode as
            truncated, and go on. "restart" also replaces a worker that is gone, with its envs.
        timeout: Longest wait in seconds of calls without a timeout of their own; None waits for as
            long as the workers live. With `on_error="restart"` it limits each env's step or reset:
            if an env takes longer, its worker is killed and replaced, with all envs of that worker.
            A timeout given to a call only ends that wait.
        publish: Named spaces of arrays. After every step the envs' attributes of these names are
            copied to `published`; None for the envs' own class attribute `publish`.
        worker_env: Environment variables of the workers: a dict, or a function that returns one for
            the number of a worker (0, 1, ...), such as `lambda worker: {"MUJOCO_EGL_DEVICE_ID":
            str(worker % 2)}`, called here once per worker. Workers are fresh interpreters then, and
            have the variables before any import. Workers that replace them get the same variables.
        lazy: Whether workers and envs start at the first `reset`. Before it, only `reset`, `reopen`
            and `close` are allowed, and `metadata`, `render_mode`, `published` and `restarts` are
            not yet those of the envs. If making the envs takes longer than a second, a line on
            standard error says how many have been made.
        spaces: (observation space, action space) that every env must have, or the id of a
            registered env with these spaces, which is made and closed in a short-lived process;
            None for the envs' own spaces.
        start_concurrency: How many workers make envs at the same time; None for all.
        threads_per_worker: Removed: for envs that wait, use a process each, by `num_workers`.

    Attributes:
        published: Array (num_envs, *shape) per published name, in shared memory: always the latest.
        restarts: int64 (num_envs,), how often each env has been replaced.

    Raises:
        EnvCreationError: A factory raised; names the env.
        RuntimeError: The envs' spaces differ, or are not the given ones.
        TypeError, ValueError: An argument is invalid; names it.
    """

    def __init__(  # noqa: PLR0917 - Gymnasium's arguments in Gymnasium's order
        self,
        env_fns: Sequence[Callable[[], Env]],
        shared_memory: bool | None = None,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Callable[..., Any] | None = None,
        observation_mode: ObservationMode = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        num_workers: int | str | None = None,
        caller_steps: bool = False,
        on_error: str = "raise",
        timeout: float | None = None,
        publish: dict[str, Space] | None = None,
        worker_env: WorkerEnv | None = None,
        lazy: bool = False,
        spaces: tuple[Space, Space] | str | None = None,
        start_concurrency: int | None = None,
        threads_per_worker: None = None,
    ) -> None:
        self.closed = True  # until there is something to close
        if worker is not None:
            raise ValueError(
                "worker is given, but workers here step several envs each: leave it out, or use "
                "gymnasium.vector.AsyncVectorEnv, which runs that function in a process per env"
            )
        if threads_per_worker is not None:
            raise ValueError(
                f"threads_per_worker is {threads_per_worker!r}, but workers have one thread: for "
                "envs that wait give each a process, by num_workers=num_envs, and leave it out"
            )
        self.env_fns, self.shared_memory, self.copy = env_fns, shared_memory, copy
        self.context, self.daemon, self.max_concurrency = context, daemon, max_concurrency
        self.observation_mode, self._timeout = observation_mode, read_timeout("timeout", timeout)
        self.autoreset_mode = read_autoreset_mode(autoreset_mode)
        if on_error not in ("raise", "restart"):
            raise ValueError(f"on_error is {on_error!r}, expected 'raise' or 'restart'")
        if on_error == "restart" and self._timeout == 0:
            raise ValueError("timeout is 0: no env can do a step in that time, give it seconds")
        bounds = worker_bounds(len(env_fns), num_workers, max_concurrency, caller_steps)
        self.num_workers = len(bounds) - 1
        variables = worker_variables(worker_env, self.num_workers, context, caller_steps)
        at_once, given = start_concurrency, read_spaces(spaces, lazy)
        self._plan = Plan(
            factories=list(env_fns),
            bounds=bounds,
            context=context if variables is None else "spawn",
            restart_envs=on_error == "restart",
            autoreset_mode=self.autoreset_mode,
            publish=publish,
            variables=variables,
            at_once=None if at_once is None else read_count("start_concurrency", at_once),
            spaces=None if isinstance(given, str) else given,
            observation_mode=observation_mode,
            shared_memory=shared_memory,
            owner=type(self).__name__,
            shows_progress=lazy,
        )
        if isinstance(given, str):
            from vecenv.workers.pool import spaces_of

            self._plan = self._plan._replace(spaces=spaces_of(given, self._plan))
        self.published: dict[str, np.ndarray] = {}
        self.restarts = np.zeros(len(env_fns), np.int64)
        if lazy:
            batched = self._plan.batch([self._plan.spaces] * len(env_fns))  # type: ignore[list-item]  # given
            self._set_up(len(env_fns), batched, self.autoreset_mode)
            self._bind_rows(StepRows.make(self.single_observation_space, self.num_envs))
            self._calls.is_started = self.closed = False
        else:
            self._start()

    def _start(self) -> None:
        """Start the workers and let them make the envs."""
        from vecenv.workers.pool import Pool

        pool = Pool(self._plan)
        try:
            spaces, about = pool.open()
            if not hasattr(self, "_calls"):  # lazy envs have been set up by `__init__`
                self._set_up(len(self.env_fns), spaces, self.autoreset_mode)
            self.metadata = {**(about.metadata or {}), "autoreset_mode": self.autoreset_mode}
            self.render_mode = about.render_mode
            self._bind_rows(pool.tables.rows)
            self._pool, pool.left_by_fork = pool, partial(setattr, self._calls, "parent_pid")
            self.published, self.restarts = pool.tables.published, pool.tables.restarts
            self._out: Any = (None, None)  # `out` of the pending step, and its rows
            self._resetting: Any = slice(None)  # the envs of the pending reset
            self._shared_stamps: EnvStamps | None = None
            self._on_cut = partial(_note_cut, self._calls, pool)
            self._calls.is_started = True
            self.closed = False
            close_at_exit(self)
        except BaseException:  # Ctrl-C
            self.closed = True
            pool.kill()
            raise

    # -- reset -------------------------------------------------------------------------------

    def reset(
        self, *, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset envs, see `VecEnv.reset`.

        If the last wait has timed out, a full reset kills the workers that have not answered, and
        makes their envs anew.
        """
        calls = self._calls
        if calls.is_started and self._pool.timed_out and not calls.is_closed:
            checked_seed(seed, self.num_envs)
            mask, _ = split_reset_mask(options, self.num_envs)
            if mask is None or mask.all():
                calls.pending = None
                calls.give_up("a call had timed out and was given up by `reset`")
        return super().reset(seed=seed, options=options)

    def reset_async(self, seed: Seed = None, options: dict[str, Any] | None = None) -> None:
        """Start resetting all envs, or those of `options["reset_mask"]`; see `reset`."""
        mask, rest = split_reset_mask(options, self.num_envs)
        self._calls.begin_reset(mask, "reset_async")
        self._begin_reset(seed, rest, mask)
        self._calls.unfinished = None

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for `reset_async` and return its results; raises as `step_wait` does."""
        self._require_pending("reset")
        result = self._finish_reset(self._deadline(timeout))
        self._calls.mark_reset()
        return result

    def _reset(
        self, seed: Seed, options: dict[str, Any] | None, reset_mask: np.ndarray | None
    ) -> tuple[Any, dict[str, Any]]:
        self._begin_reset(seed, options, reset_mask)
        return self._finish_reset(self._deadline(None))

    def _begin_reset(self, seed: Seed, options: Any, mask: np.ndarray | None) -> None:
        seeds = seed_per_env(seed, self.num_envs)
        if not self._calls.is_started:
            self._start()
        is_full = mask is None or bool(mask.all())
        self._resetting = slice(None) if mask is None else np.flatnonzero(mask)

        def request(i: int, j: int) -> tuple[Any, ...]:
            return seeds[i:j], options, None if mask is None else mask[i:j]

        self._begin("reset", "reset", request, is_full=is_full)

    def _finish_reset(self, deadline: Deadline) -> tuple[Any, dict[str, Any]]:
        infos, _ = self._finish("reset", deadline)
        obs = self._observations()
        self._note_reset(infos, self._resetting)
        return obs, infos

    # -- step --------------------------------------------------------------------------------

    def step_async(self, actions: Any, *, out: Any = None) -> None:
        """Start stepping every env once; see `step`."""
        self._calls.require_ready("step_async")
        with self._logged(STEP_ASYNC):
            self._begin_step(self._actions.check(actions), out)
            self._calls.unfinished = None

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Wait for `step_async` and return its results.

        Raises:
            NoAsyncCallError: No `step_async` is pending.
            StepTimeoutError: Some env has not answered; the step stays pending.
        """
        self._require_pending("step")
        deadline = self._deadline(timeout)
        with self._logged(STEP_WAIT):
            return self._finish_step(self._finish("step", deadline)[0])

    def _step(self, actions: Any, out: Any) -> StepResult:
        self._begin_step(actions, out)
        deadline = _NEVER if self._timeout is None else self._deadline(None)
        return self._finish_step(self._finish("step", deadline)[0])

    def _begin_step(self, actions: Any, out: Any) -> None:
        """Give all workers the actions; then the step is pending."""
        pool, calls = self._pool, self._calls
        self._refuse_ended()
        slot = self._slot(out)
        payloads, own = None, None if pool.own is None else pool.own.step
        shared = pool.tables.actions
        # Actions without fixed shape, or of another dtype than the rows, travel as payloads.
        if shared is None or not shared.write(actions):
            each = list(self._actions.each(actions))
            parts = [each[i:j] for i, j in self._plan.chunks]
            own = None if own is None else partial(own, parts.pop(0))
            payloads = list(map(dumps, parts))
        calls.unfinished, calls.pending = self._on_cut, "step"
        self._out = out, slot
        pool.post(Kind.STEP, own, payloads)

    def _finish_step(self, infos: dict[str, Any]) -> StepResult:
        out, slot = self._out
        return self._results(out, slot, infos)

    # -- first-ready -------------------------------------------------------------------------

    def _send(self, actions: Any, env_ids: np.ndarray) -> None:
        pool, ids = self._pool, env_ids.tolist()
        self._refuse_ended(env_ids)
        shared, each, payloads = pool.tables.actions, None, []
        if shared is None or not shared.write(actions, env_ids):
            each = self._actions.snapshot(actions)
            payloads = [dumps([action]) for action in each]
        self._calls.unfinished = self._on_cut
        pool.send(ids, each, payloads)

    def _recv(self, count: int, most: int, timeout: float | None) -> StepBatch:
        pool, calls = self._pool, self._calls
        calls.unfinished = self._on_cut
        pool.do_own()  # while the workers step theirs
        deadline = Deadline.of_call(timeout, self._timeout)
        self._guarded(pool.wait, deadline, "a step that was sent", count)
        taken = [pool.ready.popleft() for _ in range(min(most, len(pool.ready)))]
        env_ids = np.array([env_id for env_id, _ in taken], np.int64)
        found = [(env_id, row, answer) for row, (env_id, answer) in enumerate(taken) if answer]
        try:
            infos = self._gather(found, env_ids.tolist())
        except Exception:
            calls.mark_received(env_ids)
            raise
        return self._batch_of(env_ids, infos)

    def _gather(
        self, found: Sequence[tuple[int, int, Answer]], env_ids: Sequence[int]
    ) -> dict[Any, Any]:
        """Store observations without fixed shape, raise faults, and return the batched infos.

        Args:
            found: The first env, its row in the batch, and the answer.
            env_ids: The env of each row.

        Raises:
            Exception: The last exception that an env has raised.
            InfoError: The infos can't be batched; observations have been stored.
        """
        pool, entries, infos = self._pool, {}, {}
        for first, _, answer in found:
            # Not strict: an answer that consists of faults has no objects.
            for leaf, items in zip(pool.tables.objects, answer.objects, strict=False):
                leaf.target[first : first + len(items)] = items
        if faults := [fault for *_, answer in found for fault in answer.errors]:
            raise_faults(faults, pool.steps)
        for *_, row, answer in found:
            entries.update((row + index, info) for index, info in answer.infos.items())
        if len(entries) == len(env_ids) and (batch := _columns(list(entries.values()))):
            return batch
        for row in sorted(entries):  # in order: the first env that has a key decides its dtype
            add_info(infos, entries[row], row, len(env_ids), env_ids[row])
        return infos

    def _guarded(self, wait: Callable[..., None], *args: Any) -> None:
        """Wait for workers; close everything if one is gone for good."""
        try:
            with self._waiting():
                wait(*args)
        except StepTimeoutError:
            self._calls.unfinished = None  # not cut off: the call stays pending
            raise
        except WorkerDiedError as error:
            self._calls.note_fault(error)
            self._calls.unfinished = self._calls.pending = None
            self.close(terminate=True)
            told = f"{error.args[0]} The vector env is closed: make a new one"
            if not self._plan.restart_envs:
                told += ", with on_error='restart' if workers are to be replaced"
            error.args = (f"{told}.",)
            raise

    # -- envs' methods and attributes --------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute, and return the results."""
        self._calls.require_idle("call")
        return self._ask("call", lambda i, j: (name, args, kwargs))

    def _set_attr(self, name: str, values: Sequence[Any]) -> None:
        self._ask("set_attr", lambda i, j: (name, values[i:j]))

    def _ask(self, method: str, request: _Request) -> tuple[Any, ...]:
        """Call a method of every chunk, see `_begin`; return one result per env."""
        self._begin("call", method, request)
        return self._finish_call(self._deadline(None))

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Start calling a method of every env, or reading an attribute."""
        self._calls.require_idle("call_async")
        self._begin("call", "call", lambda i, j: (name, args, kwargs))
        self._calls.unfinished = None

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for `call_async` and return one result per env; raises as `step_wait` does."""
        self._require_pending("call")
        return self._finish_call(self._deadline(timeout))

    def _finish_call(self, deadline: Deadline) -> tuple[Any, ...]:
        # The vector env's timeout limits steps and resets; here it only ends the wait.
        deadline = Deadline(deadline.timeout)
        return tuple(chain.from_iterable(self._finish("call", deadline)[1]))

    def _begin(self, call: str, method: str, request: _Request, *, is_full: bool = False) -> None:
        """Start calling a method of every chunk; then the call is pending.

        Args:
            call: "reset" or "call".
            method: Name of a method of `Chunk`.
            request: Returns its arguments for the chunk of envs i, ..., j - 1.
            is_full: Whether it resets all envs, and so gives up all earlier requests.
        """
        pool, calls, own = self._pool, self._calls, None
        if pool.is_cut and not is_full:
            calls.require_ready(method)
        requests = [request(i, j) for i, j in self._plan.chunks]
        if pool.own is not None:
            own = partial(getattr(pool.own, method), *requests.pop(0))
        payloads = [message(method, *arguments) for arguments in requests]
        calls.unfinished = self._on_cut
        if is_full:
            if pool.is_cut or pool.timed_out:
                self._guarded(pool.give_up)
            pool.forget_rows()
        calls.pending = call
        pool.post(Kind.ASK, own, payloads)

    def _reopen(self, factories: dict[int, Callable[[], Env]]) -> None:
        def request(first: int, last: int) -> tuple[Any, ...]:
            ids = [env_id for env_id in factories if first <= env_id < last]
            new: Any = [factories[env_id] for env_id in ids]
            if first >= self._plan.bounds[0]:  # a worker's chunk; the caller's own needs no pickle
                new = dump_registry(), dump_factories(new)
            return ids, new, self.observation_mode

        is_started, chunks = self._calls.is_started, self._plan.chunks
        # Before any change, as pickling may raise.
        requests = {chunk: request(*chunk) for chunk in chunks if is_started}
        self._calls.unreset.update(factories)
        self.env_fns = [factories.get(env_id, made) for env_id, made in enumerate(self.env_fns)]
        self._plan.factories[:] = self.env_fns
        if not is_started:
            return
        pool = self._pool
        faults = self._ask("reopen", lambda i, j: requests[i, j])
        if pool.plan.restart_envs:
            pool.missing.difference_update(factories)
            pool.missing.update(fault.env_id for fault in faults)
        raise_creation_errors([pool.creation_error(fault) for fault in faults])

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the envs, each pickled by its worker; see `VecEnv.state_dict`."""
        self._calls.require_ready("state_dict")
        found = self._ask("save_envs", lambda i, j: ())
        if problem := next((state for state in found if isinstance(state, str)), None):
            raise EnvStateError(problem)
        return pack_envs(found, self._notes())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the envs by those of a state, and close the former ones: this runs code.

        See `VecEnv.load_state_dict`.
        """
        self._calls.require_idle("load_state_dict")
        pickles, notes = unpack_envs(state, self.num_envs)
        self._calls.forget_reset()  # until all are loaded
        found = self._ask("load_envs", lambda i, j: (pickles[i:j],))
        if problem := next((over for over in found if isinstance(over, str)), None):
            error = EnvStateError(f"{problem}; others have been loaded: call `reset`")
            self._calls.forget_reset(error)
            raise error
        self._take_notes(*notes)
        self._calls.mark_reset()

    # -- pending calls -----------------------------------------------------------------------

    def _deadline(self, timeout: Any) -> Deadline:
        """Check the timeout given to a call, and return the call's deadline."""
        return Deadline.of_call(read_timeout("timeout", timeout), self._timeout)

    def _require_pending(self, call: str) -> None:
        self._calls.require_open(f"{call}_wait")
        if self._calls.pending != call:
            if self._calls.fault:
                self._calls.require_ready(f"{call}_wait")
            raise NoAsyncCallError(
                f"Calling `{call}_wait` without any prior call to `{call}_async`.", call
            )

    def _finish(self, call: str, deadline: Deadline) -> tuple[dict[Any, Any], list[Any]]:
        """Do the caller's own share of a pending call, wait for the workers, and gather.

        Returns:
            Batched infos, and the results of each chunk. Afterwards the call is no longer pending,
            also if an error is raised, except a timeout.
        """
        pool, calls = self._pool, self._calls
        calls.unfinished = self._on_cut
        pool.do_own()  # while the workers do theirs
        self._guarded(pool.wait, deadline, f"step {pool.steps}" if call == "step" else call)
        found = pool.answers()
        try:
            infos = self._gather(found, range(self.num_envs))
        except Exception as error:
            if call != "call":
                calls.forget_reset(error)
            raise
        finally:
            calls.unfinished = calls.pending = None
        return infos, [answer.result for *_, answer in found if answer.result is not None]

    # -- timing ------------------------------------------------------------------------------

    def _begin_stamps(self) -> EnvStamps | None:
        self._calls.require_idle("timing.enable")
        if self._shared_stamps is None:
            self._shared_stamps = EnvStamps.make(self.num_envs, self._pool.memory.allocate)
        self._stamp(self._shared_stamps)
        return self._shared_stamps

    def _end_stamps(self) -> None:
        if not self.closed:
            self._calls.require_idle("timing.disable")
            self._stamp(None)

    def _stamp(self, stamps: EnvStamps | None) -> None:
        if self._pool.is_cut:
            self._calls.require_ready("timing")
        self._pool.stamp(stamps)

    def _env_chunks(self) -> list[int]:
        return [0, *(last for _, last in self._plan.chunks)]

    def _worker_processes(self) -> list[WorkerProcess | None]:
        workers: list[WorkerProcess | None] = [None] if self._plan.bounds[0] else []
        for seat in self._pool.seats:
            pid = seat.process.pid if seat.process else 0
            workers.append(WorkerProcess(pid, seat.start_s))
        return workers

    # -- end ---------------------------------------------------------------------------------

    def close(self, **kwargs: Any) -> None:
        """Close the envs and end the workers; see `close_extras`. May be called twice.

        Ctrl-C meanwhile kills the workers; a further call ends whatever is left of them.
        """
        try:
            super().close(**kwargs)
        finally:
            if hasattr(self, "_pool"):
                self._pool.kill()

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the envs and end the workers, whatever state they are in.

        Args:
            timeout: Seconds that envs have to finish and close, 30 if None; workers that still run
                then are killed. After 5 seconds the log names the workers that still run.
            terminate: Kill at once.
        """
        if not self._calls.is_started or not self._pool.is_owner:
            return
        pool, pending = self._pool, self._calls.pending
        timeout_s = read_timeout("timeout", timeout)
        deadline = Deadline(0 if terminate else _CLOSE_TIMEOUT_S if timeout is None else timeout_s)
        if pending is not None and self._calls.unfinished is None:  # not if Ctrl-C cut the call off
            told = f"Calling `close` while waiting for a pending call to `{pending}` to complete."
            with contextlib.suppress(Warning):
                logger.warn(told)
        try:
            pool.stop(deadline)
        finally:
            # Release the shared memory; users may still read these attributes, so copy them.
            self.published = {name: array.copy() for name, array in self.published.items()}
            self.restarts = self.restarts.copy()
            for name in ("_out", "_rows", "_shared_stamps"):
                setattr(self, name, None)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Close a vector env that nothing refers to any more; `sys` may be gone by then."""
        if hasattr(self, "_on_cut") and not self.closed and not is_finalizing():
            self.close()


def _note_cut(calls: CallProtocol, pool: Pool) -> None:
    """Refuse all calls but `reset` and `close`, after an exception in the midst of a call."""
    pool.is_cut = True
    calls.pending, calls.fault = None, ""
    calls.give_up("a call was broken off by an exception from elsewhere, such as Ctrl-C")


def _columns(infos: Sequence[Any]) -> dict[str, Any] | None:
    """Batch infos if each row has one with the same keys, all numbers of the same types, else None.

    The result equals that of `add_info`, in a third of the time. Batching infos is most of what the
    caller does in a step.
    """
    keys, batch = infos[0], dict[str, Any]()
    if {*map(type, infos)} != {dict} or {*map(len, infos)} != {len(keys)}:
        return None
    for key, kind in zip(keys, map(type, keys.values()), strict=True):
        values = [info.get(key) for info in infos]
        # `add_info` alone knows other types, final observations, and masks of the env's own.
        is_else = kind not in _NUMBERS or key == "final_obs" or f"_{key}" in keys
        if is_else or {*map(type, values)} != {kind}:
            return None
        with contextlib.suppress(OverflowError):  # an int beyond int64: left to `add_info`, too
            batch[key], batch[f"_{key}"] = np.array(values, kind), np.ones(len(infos), np.bool_)
    return batch if len(batch) == 2 * len(keys) else None
