"""AsyncVectorEnv: Gymnasium envs in worker processes, over shared memory."""

from __future__ import annotations

import contextlib
import importlib
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from gymnasium import Env, Space, logger
from gymnasium.error import NoAsyncCallError, ResetNeeded
from gymnasium.vector import AsyncVectorEnv as OneProcessPerEnv
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from vecenv.core.arguments import read_timeout
from vecenv.core.autoreset import StepRows, read_autoreset_mode
from vecenv.core.base import GymVecEnv, StepBatch, StepResult
from vecenv.core.deadline import Deadline
from vecenv.core.env_state import pack_envs, unpack_envs
from vecenv.core.errors import EnvStateError
from vecenv.core.faults import WorkerDiedError, raise_faults, reset_needed_as, retold
from vecenv.core.interrupts import interrupts_later
from vecenv.core.seeding import Seed, seed_per_env, split_reset_mask
from vecenv.core.spaces import ObservationMode
from vecenv.timing.calls import STEP_ASYNC, STEP_WAIT
from vecenv.timing.recording import WorkerProcess
from vecenv.timing.stamps import EnvStamps
from vecenv.workers.layout import COMMANDS
from vecenv.workers.messages import INTERRUPTED, NOTHING, ResetRequest
from vecenv.workers.process import tell_after_fork

if TYPE_CHECKING:
    from vecenv.workers.actions import ActionWriter
    from vecenv.workers.halves import Half
    from vecenv.workers.opening import Opened

__all__ = ["AsyncVectorEnv"]

_CLOSE_TIMEOUT_S = 5.0
_WORKER = 5  # place of the argument
_NEEDED = (
    "multiprocess.connection",
    "vecenv.workers.actions",
    "vecenv.workers.first_ready",
    "vecenv.workers.opening",
)


class AsyncVectorEnv(GymVecEnv):
    """Gymnasium envs stepped in chunks by worker processes over shared memory.

    A drop-in replacement for `gymnasium.vector.AsyncVectorEnv`: same arguments, attributes,
    methods, results and errors, no message per env, and the additions of `VecEnv`. Workers write
    observations, rewards, flags and numeric infos into memory that the caller reads; `out=` slots
    made of `allocate`d arrays are written by the workers themselves.

    Args:
        env_fns: One factory per env, called without arguments in the worker.
        shared_memory: Kept for compatibility: arrays always are in shared memory, other parts of
            observations (Text, Graph, Sequence, custom spaces) travel by message. True refuses
            custom spaces, as Gymnasium does.
        copy: Whether observations returned are copies, the caller's to keep. With False they are
            views: of `step` until the next call, of `recv` until three times as many results as
            there are envs have come back.
        context: "fork", "forkserver" or "spawn"; None for the one set by `set_start_method` of
            `multiprocess` or `multiprocessing`, else for "fork" where that is harmless (this
            process has one thread, and uses no GPU) and "forkserver" elsewhere. Workers never run
            the main script again.
        daemon: Flag of the processes; False lets envs start processes of their own.
        worker: A function for Gymnasium's class to run in a process per env. Envs with one are made
            by, and are, `gymnasium.vector.AsyncVectorEnv`, which has none of the arguments from
            `num_workers` on.
        observation_mode: As in `SyncVectorEnv`.
        autoreset_mode: As in `SyncVectorEnv`.
        max_concurrency: Most envs that are stepped at any one time.
        num_workers: Processes; None for one per usable core (affinity and cgroup quota).
        threads_per_worker: Envs that one worker steps at a time, each in the one thread that makes
            it, calls it and closes it. "auto" takes one thread per env if envs mostly wait, as one
            shows that is made by the last factory and stepped in a process that is thrown away; a
            number if envs must not be made once more.
        caller_steps: Whether the calling process steps a share of the envs itself, in `step`.
        on_error: "raise" an env's exception, or "restart": make a new env, report the episode as
            truncated, and go on; the same for the envs of a worker that is gone.
        timeout: Longest wait in seconds of calls that are not given one; None waits for as long as
            the workers live. With `on_error="restart"` it is what an env may take for a step or a
            reset: if it takes longer, its worker is killed and replaced like one that is gone,
            however many envs that has. A timeout given to a call only ends that wait.
        publish: Named spaces of arrays that are read from the attributes of these names after every
            step; None for the envs' own class attribute `publish`.

    Attributes:
        published: Array (num_envs, *shape) per published name; shared memory, always the latest.
        restarts: int64 (num_envs,), how often each env has been replaced.

    Raises:
        EnvCreationError: A factory raised; names the env.
        RuntimeError: The envs' spaces differ.
        TypeError, ValueError: An argument is not what it should be; names it.
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
        num_workers: int | None = None,
        threads_per_worker: int | str = "auto",
        caller_steps: bool = False,
        on_error: str = "raise",
        timeout: float | None = None,
        publish: dict[str, Space] | None = None,
    ) -> None:
        self.closed = True  # until there is something to close
        _import_all()
        from vecenv.workers.opening import PoolOptions, open_workers
        from vecenv.workers.pool import StartedProcesses

        if worker is not None:
            raise ValueError("worker is for AsyncVectorEnv itself, subclasses can't have one")
        self.env_fns, self.shared_memory, self.copy = env_fns, shared_memory, copy
        self.context, self.daemon = context, daemon
        self._timeout = read_timeout("timeout", timeout)
        self.observation_mode, self.max_concurrency = observation_mode, max_concurrency
        self.autoreset_mode = read_autoreset_mode(autoreset_mode)
        options = PoolOptions.checked(
            len(env_fns),
            num_workers=num_workers,
            threads_per_worker=threads_per_worker,
            max_concurrency=max_concurrency,
            caller_steps=caller_steps,
            on_error=on_error,
            context=context,
            daemon=daemon,
            refuse_custom=shared_memory is True,
            publish=publish,
            observation_mode=observation_mode,
            autoreset_mode=self.autoreset_mode,
            owner=type(self).__name__,
        )
        self._started = StartedProcesses()
        try:
            opened = open_workers(env_fns, options, self._started)
            self._exchange = opened.exchange
            self._bind(opened)
        except BaseException:  # Ctrl-C
            self.closed = True
            self._started.end()
            if hasattr(self, "_exchange") and self._exchange.own is not None:
                self._exchange.own.close()
            raise

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Leave envs with a worker function, which speaks Gymnasium's protocol, to its class."""
        worker = args[_WORKER] if len(args) > _WORKER else kwargs.get("worker")
        if worker is None or cls is not AsyncVectorEnv:
            return super().__new__(cls)
        if "autoreset_mode" in kwargs:
            kwargs["autoreset_mode"] = read_autoreset_mode(kwargs["autoreset_mode"])
        return OneProcessPerEnv(*args, **kwargs)

    def _bind(self, opened: Opened) -> None:
        """Bind what the calls need."""
        from vecenv.workers.actions import ActionWriter
        from vecenv.workers.first_ready import Receiver

        exchange, mode = opened.exchange, self.autoreset_mode
        num_envs = len(self.env_fns)
        self._set_up(num_envs, opened.spaces, mode, opened.metadata, opened.render_mode)
        self._bind_rows(opened.rows)
        self.num_workers = exchange.num_workers
        self.published = opened.published
        counted = exchange.restarts
        self.restarts = np.zeros(num_envs, np.int64) if counted is None else counted
        self._arena = opened.arena
        self._workers = range(self.num_workers)
        # Of the step under way: `out`, the rows that are written, and the rows of an `out` that
        # workers can't write into.
        self._out: tuple[Any, StepRows, StepRows | None] = (None, self._rows, None)
        self._begun_at = 0  # commands given before the pending call
        self._pending_own: Callable[[], Any] | None = None  # the caller's share of that call
        self._resetting: Sequence[int] = ()  # the envs of the pending reset
        self._drops_rows = False  # whether these are all
        self._writer: ActionWriter | None = None
        if exchange.layout.actions is not None:
            self._writer = ActionWriter(
                self.single_action_space, exchange.layout.actions, self._arena.view
            )
            exchange.last_action = self._writer.text
        self._is_new = True  # never reset
        self._receiver = Receiver(self, exchange, self._writer, self._timeout)
        self._shared_stamps: EnvStamps | None = None
        exchange.timeout = self._timeout
        exchange.break_down = _Breakdown(self)
        tell_after_fork(self._calls)
        self.closed = False

    def allocate(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return zeroed shared memory that workers write into; it outlives this vector env.

        A process that is forked from this one has these arrays, too, and not copies of them: what
        either writes, the other reads.

        Raises:
            ValueError, TypeError: A negative dimension, or items that are no plain memory.
            MemoryError: The address space reserved for this vector env is used up.
            ForkedEnvError: In a fork of the process that has made this vector env.
        """
        self._calls.require_owner("allocate")
        return self._arena.allocate(shape, dtype)

    # -- reset -------------------------------------------------------------------------------

    def reset_async(self, seed: Seed = None, options: dict[str, Any] | None = None) -> None:
        """Start resetting all envs, or those of `options["reset_mask"]`; see `reset`."""
        self._calls.require_open("reset_async")
        if self._calls.pending is not None:
            self._calls.require_idle("reset_async")
        mask, rest = split_reset_mask(options, self.num_envs)
        try:
            self._calls.begin_reset(mask)
            self._begin_reset(seed, rest, mask)
        except Exception:
            self._calls.keep_reset()
            raise

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for `reset_async` and return its results.

        Raises:
            NoAsyncCallError: No `reset_async` is pending.
            StepTimeoutError: Some env has not answered; the reset stays pending.
        """
        self._require_pending("reset")
        result = self._finish_reset(self._deadline(timeout))
        self._calls.mark_reset()
        return result

    def _reset(
        self, seed: Seed, options: dict[str, Any] | None, reset_mask: np.ndarray | None
    ) -> tuple[Any, dict[str, Any]]:
        self._begin_reset(seed, options, reset_mask)
        return self._finish_reset(Deadline.of_call(None, self._timeout))

    def _begin_reset(
        self, seed: Seed, options: dict[str, Any] | None, reset_mask: np.ndarray | None
    ) -> None:
        seeds = seed_per_env(seed, self.num_envs)
        self._is_new = False
        self._own_rows()
        exchange = self._exchange
        exchange.finish_announcement()
        is_full = reset_mask is None or bool(reset_mask.all())
        self._drops_rows = is_full
        chosen = range(self.num_envs) if reset_mask is None else np.flatnonzero(reset_mask).tolist()
        self._resetting = chosen
        bounds = exchange.pool.bounds
        requests = [
            ResetRequest(
                seeds[first:last],
                options,
                None if reset_mask is None else reset_mask[first:last],
                is_full,
            )
            for first, last in zip([0, *bounds[:-1]], bounds, strict=True)
        ]
        own = exchange.own
        self._pending_own = None if own is None else lambda: own.reset(requests[0])
        self._begin("reset", lambda: exchange.ask_all("reset", requests[1:]))

    def _finish_reset(self, deadline: Deadline) -> tuple[Any, dict[str, Any]]:
        infos = self._finish("reset", deadline)[0]
        self._ended.ended.difference_update(self._resetting)
        if self._drops_rows:
            self._exchange.drop_rows()
            self._receiver.give_up()
        self._out = (None, self._rows, None)
        obs = self._observations()
        self._note_reset(infos, self._resetting)
        self._calls.end_async()
        self._exchange.drop_answers()
        return obs, infos

    # -- step --------------------------------------------------------------------------------

    def step(self, actions: Any, *, out: Any = None) -> StepResult:
        """Step every env once, see `VecEnv.step`.

        Before the very first reset the envs are asked all the same, with actions unchecked: the
        ResetNeeded that is raised then is also of the class of what an env raised, as Gymnasium's
        tests want it.
        """
        if self._is_new and not self._calls.is_ready:
            self._calls.require_idle("step")
            self._begin_step(actions, None, is_checked=False)
            self.step_wait()
        return super().step(actions, out=out)

    def _refuse_unreset(self, deadline: Deadline) -> NoReturn:
        """Raise ResetNeeded for a step before the very first reset; see `step`."""
        message = "`step` was called before the first `reset`; call `reset` first"
        try:
            self._end_step(deadline)
        except Exception as error:
            env_id = vars(error).get("env_index")
            if env_id is None:  # a timeout, or a worker that is gone
                raise
            self._calls.fault = None  # what is missing is a reset
            message = f"{message} (env {env_id} raised {type(error).__name__}: {error})"
            kind = reset_needed_as(type(error))
            raise kind(message) from error
        raise ResetNeeded(message)

    def step_async(self, actions: Any, *, out: Any = None) -> None:
        """Start stepping every env once; see `step`."""
        self._calls.require_ready("step_async")
        self._ended.require_reset_ended(range(self.num_envs))
        with self._logged(STEP_ASYNC):
            self._begin_step(self._actions.check(actions), out)

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Wait for `step_async` and return its results.

        Raises:
            NoAsyncCallError: No `step_async` is pending.
            StepTimeoutError: Some env has not answered; the step stays pending.
        """
        self._require_pending("step")
        deadline = self._deadline(timeout)
        if self._is_new:
            self._refuse_unreset(deadline)
        with self._logged(STEP_WAIT):
            return self._end_step(deadline)

    def _step(self, actions: Any, out: Any) -> StepResult:
        if self._is_disabled:
            self._ended.require_reset_ended(range(self.num_envs))
        exchange, rows, slot = self._exchange, self._rows, 0
        if out is not None:
            slot, rows = exchange.slots.find(out)
        if self._writer is None or (out is not None and not slot) or not exchange.is_settled:
            self._begin_step(actions, out)
            return self._end_step(Deadline.of_call(None, self._timeout))
        self._writer.write(actions)
        before = exchange.steps
        try:
            self._out = (out, rows, None)
            with self._waiting():
                status, outcome = exchange.step_at_once(slot)
            if not status and outcome is None:
                return self._finish_step({})
        except BaseException:  # Ctrl-C: the step is pending, or has never begun
            self._hold_step(before)
            raise
        self._hold_step(before)
        return self._end_step(Deadline.of_call(None, self._timeout))

    def _hold_step(self, before: int) -> None:
        """Note that the step after step number `before` is pending, if workers know of it."""
        steps = self._exchange.steps
        if steps != before and self._exchange.has_posted(steps):
            self._calls.begin_async("step")
            self._begun_at = -1

    def _end_step(self, deadline: Deadline) -> StepResult:
        """Wait for the pending step, and end it."""
        result = self._finish_step(self._finish("step", deadline)[0])
        self._calls.end_async()
        return result

    def _begin_step(self, actions: Any, out: Any, *, is_checked: bool = True) -> None:
        exchange = self._exchange
        slot, rows = (0, self._rows) if out is None else exchange.slots.find(out)
        messages = None
        own_actions = None
        if self._writer is not None and is_checked:
            self._writer.write(actions)
        else:
            each = list(iterate(self.action_space, actions))
            bounds = exchange.pool.bounds
            messages = [each[bounds[w] : bounds[w + 1]] for w in self._workers]
            own_actions = each[: bounds[0]]
        exchange.steps += 1
        if out is not None and slot == 0:
            self._out = (out, self._rows, rows)
        else:
            self._out = (out, rows, None)
        self._pending_own = None
        if (own := exchange.own) is not None:
            self._pending_own = lambda: own.step_all(slot, own_actions)
        self._begin(
            "step", lambda: exchange.post_step(slot, 0, self.num_workers, COMMANDS, messages)
        )

    def _finish_step(self, infos: dict[str, Any]) -> StepResult:
        out, rows, copies = self._out
        if self._is_disabled:
            self._note_ended(rows.terminations | rows.truncations)
        if copies is not None:
            copies.obs.load(rows.obs)
            copies.rewards[...] = rows.rewards
            copies.terminations[...] = rows.terminations
            copies.truncations[...] = rows.truncations
        return self._results(rows, out, infos)

    # -- first-ready -------------------------------------------------------------------------

    def _send(self, actions: Any, env_ids: np.ndarray) -> None:
        if self._is_disabled:
            self._ended.require_reset_ended(env_ids.tolist())
        self._own_rows()
        self._receiver.note_sent()
        self._calls.unfinished = self._receiver.settle_send
        self._calls.is_ready = False  # so that every call asks for what is unfinished
        self._receiver.send(actions, env_ids)

    def _recv(self, count: int, most: int, timeout: float | None) -> StepBatch:
        self._receiver.note_received()
        self._calls.unfinished = self._receiver.settle_recv
        return self._noted(
            self._receiver.recv(count, most, Deadline.of_call(timeout, self._timeout))
        )

    def halves(self) -> tuple[Half, Half]:
        """Return the two halves of the envs, to step one while the policy thinks about the other.

        Raises:
            ValueError: There is only one worker, or the caller steps a share itself; actions or
                observations have no fixed shape, or actions have another machine's byte order.
        """
        from vecenv.workers.halves import make_halves

        self._calls.require_open("halves")
        return make_halves(self, self._exchange, self._writer, self._timeout)

    # -- envs' methods and attributes --------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute, and return the results."""
        self._calls.require_idle("call")
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def _set_attr(self, name: str, values: Sequence[Any]) -> None:
        bounds = [0, *self._exchange.pool.bounds]
        self._begin_call(
            "set_attr", [(name, values[first:last]) for first, last in pairwise(bounds)]
        )
        self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Start calling a method of every env, or reading an attribute."""
        self._calls.require_idle("call_async")
        self._begin_call("call", [(name, args, kwargs)] * (self.num_workers + 1))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for `call_async` and return one result per env.

        Raises:
            NoAsyncCallError: No `call_async` is pending.
            StepTimeoutError: Some env has not answered; the call stays pending.
        """
        self._require_pending("call")
        _, _, results = self._finish("call", self._deadline(timeout))
        found = tuple(result for part in results for result in part)
        self._calls.end_async()
        self._exchange.drop_answers()
        return found

    def _begin_call(self, kind: str, requests: list[Any]) -> None:
        exchange = self._exchange
        self._pending_own = None
        if exchange.own is not None:
            method = getattr(exchange.own, kind)
            self._pending_own = lambda: method(*requests[0])
        self._begin("call", lambda: exchange.ask_all(kind, requests[1:]))

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the envs, each pickled by its worker; see `VecEnv.state_dict`."""
        self._calls.require_ready("state_dict")
        self._own_rows()
        self._begin_call("save_envs", [()] * (self.num_workers + 1))
        found = self.call_wait()
        if problem := next((state for state in found if isinstance(state, str)), None):
            raise EnvStateError(problem)
        return pack_envs(found, self._notes())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the envs of a state in the place of these, which are closed: this runs code.

        See `VecEnv.load_state_dict`.
        """
        self._calls.require_idle("load_state_dict")
        pickles, notes = unpack_envs(state, self.num_envs)
        self._own_rows()
        bounds = [0, *self._exchange.pool.bounds]
        parts = [(pickles[first:last],) for first, last in pairwise(bounds)]
        self._calls.forget_reset()  # until all are loaded
        self._begin_call("load_envs", parts)
        found = self.call_wait()
        if problem := next((over for over in found if isinstance(over, str)), None):
            error = EnvStateError(f"{problem}; others have been loaded: call `reset`")
            self._calls.forget_reset(error)
            raise error
        self._is_new = False
        self._take_notes(*notes)
        self._ended.ended.clear()
        if self._is_disabled:
            self._ended.ended.update(index for index, is_over in enumerate(found) if is_over)
        self._exchange.drop_rows()
        self._receiver.give_up()
        self._out = (None, self._rows, None)
        self._calls.mark_reset()

    # -- pending calls -----------------------------------------------------------------------

    def _begin(self, call: str, give: Callable[[], None]) -> None:
        """Have `give` ask the workers for an asynchronous call, which is pending from then on.

        It is pending also if Ctrl-C comes when only some have been asked: the wait for the call
        asks the others.
        """
        self._receiver.post_actions()
        self._exchange.finish_announcement()
        self._begun_at = self._exchange.num_commands()
        try:
            self._calls.begin_async(call)
            give()
        except BaseException:
            self._drop_unbegun()
            raise

    def _drop_unbegun(self) -> bool:
        """Forget the pending call if no worker has been given it; return whether that is so."""
        if self._exchange.num_commands() != self._begun_at:
            return False
        self._pending_own = None
        self._calls.end_async()
        return True

    def _require_begun(self, call: str) -> None:
        if self._drop_unbegun():
            raise NoAsyncCallError(
                f"`{call}_wait` after `{call}_async` was interrupted, before the envs were asked "
                f"for anything; call `{call}_async` again",
                call,
            )

    def _deadline(self, timeout: Any) -> Deadline:
        """Return the deadline of a call that was given a timeout, which is looked at here."""
        return Deadline.of_call(read_timeout("timeout", timeout), self._timeout)

    def _require_pending(self, call: str) -> None:
        self._calls.require_open(f"{call}_wait")
        if self._calls.pending != call:
            raise NoAsyncCallError(
                f"Calling `{call}_wait` without any prior call to `{call}_async`.", call
            )

    def _finish(self, call: str, deadline: Deadline) -> Any:
        """Do the caller's own share of a pending call, wait for the workers, and gather.

        The call stays pending, so that it can be waited for again should Ctrl-C come before its
        results are there; but it has ended if an error is raised.
        """
        exchange = self._exchange
        self._require_begun(call)
        if self._pending_own is not None:
            own = self._pending_own
            exchange.own_outcome = INTERRUPTED  # it is not repeated
            self._pending_own = None
            exchange.own_outcome = own()
        doing = f"{call} {exchange.steps}" if call == "step" else call
        if call == "call" and deadline.is_limit:  # of steps, not of what users call
            deadline = Deadline(deadline.timeout)
        with self._waiting():
            status = exchange.wait(COMMANDS, self._workers, deadline, doing)
        own_outcome = exchange.own_outcome
        if not status and own_outcome in (None, NOTHING):
            return {}, [], []
        try:
            if own_outcome is INTERRUPTED:
                self._refuse_interrupted(call)
            with self._taking_infos():
                gathered = exchange.gather(self._workers, own_outcome)
            raise_faults(gathered[1], exchange.steps)
        except Exception as error:
            if call != "call":
                self._calls.forget_reset(retold(error))
            exchange.own_outcome = None
            self._calls.end_async()
            raise
        return gathered

    def _refuse_interrupted(self, call: str) -> NoReturn:
        """Raise what says that the caller's own envs were interrupted."""
        message = f"`{call}` was interrupted while the caller's own envs were in it"
        if call == "call":
            raise NoAsyncCallError(
                f"{message}, so there are no results; call it again, or `reset`", call
            )
        raise ResetNeeded(f"{message}, in what state they are is not known; call `reset` first")

    # -- timing ------------------------------------------------------------------------------

    def _begin_stamps(self) -> EnvStamps | None:
        self._calls.require_idle("timing.enable")
        if self._shared_stamps is None:
            self._shared_stamps = EnvStamps.make(self.num_envs, self._arena.allocate)
        stamps, leaf = self._shared_stamps, self._arena.leaf
        self._exchange.stamp((leaf(stamps.rings), leaf(stamps.counts)))
        return stamps

    def _end_stamps(self) -> None:
        if not self.closed:
            self._calls.require_idle("timing.disable")
            self._exchange.stamp(None)

    def _env_lanes(self) -> np.ndarray:
        exchange = self._exchange
        lanes = exchange.link.layout.env_lanes(exchange.pool.bounds)  # -1 for the caller's
        return lanes if exchange.own is None else lanes + 1

    def _env_chunks(self) -> list[int]:
        bounds = list(self._exchange.pool.bounds)
        return bounds if self._exchange.own is None else [0, *bounds]

    def _worker_processes(self) -> list[WorkerProcess | None]:
        pool = self._exchange.pool
        workers: list[WorkerProcess | None] = [
            WorkerProcess(process.pid, start_s)
            for process, start_s in zip(pool.processes, pool.start_s, strict=True)
        ]
        return workers if self._exchange.own is None else [None, *workers]

    def _keep_infos_apart(self) -> bool:
        self._exchange.columns.keeps_apart = True
        self._masks.is_apart = self._masks.is_used = True
        return True

    # -- end ---------------------------------------------------------------------------------

    def close(self, **kwargs: Any) -> None:
        """Close the envs and end the workers; see `close_extras`. May be called twice.

        If Ctrl-C comes meanwhile, the workers are killed; a further call ends what is left of them.
        """
        try:
            super().close(**kwargs)
        finally:
            if hasattr(self, "_started"):
                self._started.end()

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the envs and end the workers, whatever state they are in.

        Args:
            timeout: Seconds that envs have to finish and close, 5 if None; what still runs then is
                killed, also a worker whose envs have put more into a queue than was read from it.
            terminate: Kill at once.
        """
        exchange = self._exchange
        if not exchange.pool.is_owner:
            self._arena.close()
            return
        pending = self._calls.pending
        deadline = Deadline(0 if terminate else _CLOSE_TIMEOUT_S if timeout is None else timeout)
        if pending is not None:
            with contextlib.suppress(Warning):
                logger.warn(
                    f"Calling `close` while waiting for a pending call to `{pending}` to complete."
                )
        try:
            if not terminate:
                self._receiver.post_actions()
                exchange.ask_to_close(deadline)
            exchange.pool.stop(deadline)
        finally:
            if exchange.own is not None:
                exchange.own.close()
            self._arena.close()

    def _break_down(self, error: Exception) -> None:
        """Close everything after an error that can't be survived, and remember that error."""
        fault = WorkerDiedError(*error.args)
        fault.__cause__ = error.__cause__
        self._calls.note_fault(fault)
        self._calls.end_async()
        self.close(terminate=True)
        error.args = (f"{error.args[0]} The vector env is closed.",)

    def __del__(self) -> None:
        """Kill the workers of a vector env that was never closed."""
        if hasattr(self, "_exchange") and not self.closed and not sys.is_finalizing():
            self.close(terminate=True)


# Or `inspect.signature` of the class would be that of `__new__`.
vars(AsyncVectorEnv.__new__)["__wrapped__"] = AsyncVectorEnv.__init__


def _import_all() -> None:
    """Import what a pool needs, at the first use and as a whole."""
    if _NEEDED[-1] in sys.modules:
        return
    with interrupts_later():
        for name in _NEEDED:
            importlib.import_module(name)


class _Breakdown:
    """Closes a vector env; does not keep it alive."""

    def __init__(self, envs: AsyncVectorEnv) -> None:
        self._envs = weakref.ref(envs)

    def __call__(self, error: Exception) -> None:
        envs = self._envs()
        if envs is not None:
            envs._break_down(error)
