"""RayVectorEnv: vector envs in actors, spread over a Ray cluster."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.core.arguments import (
    Deadline,
    Seed,
    check_choice,
    read_autoreset_mode,
    read_timeout,
    seed_per_env,
)
from vecenv.core.base import GymVecEnv, StepBatch, StepResult, VecEnv
from vecenv.core.errors import InfoError, StepTimeoutError, WorkerDiedError, raise_faults
from vecenv.core.infos import add_info
from vecenv.core.replacing import mixed_seed
from vecenv.core.rows import StepRows, StepSlot, slot_rows
from vecenv.core.spaces import (
    ObservationMode,
    batch_env_spaces,
    chunk_bounds,
    take_rows,
)
from vecenv.ray.actor import Reply, Start, checked_rows
from vecenv.ray.cluster import Cluster
from vecenv.ray.pool import (
    ActorPool,
    Call,
    Makers,
    check_makers,
    pickled,
    read_demand,
    start_of_each,
)
from vecenv.timing.calls import COLLECT
from vecenv.timing.stamps import WorkerProcess

__all__ = ["RayVectorEnv"]

_CLOSE_S = 5.0
_RESERVED = ("reset", "step", "close")


class RayVectorEnv(GymVecEnv):
    """Envs in the actors of a Ray cluster, one vector env in each actor.

    It has the interface of the other vector envs. A round trip to an actor takes about a
    millisecond, so `step` pays for envs whose steps take longer. If the policy is cheap to copy,
    let the actors act themselves, see `set_policy` and `collect`.

    If an exception from elsewhere (Ctrl-C) interrupts a call, only `reset` and `close` are allowed
    afterwards.

    Args:
        env_fns: One factory per env, called without arguments in an actor. Or one factory of vector
            envs of this package, called with `num_envs=` in each actor, such as
            `functools.partial(Cage2VectorEnv, episode_length=50)`.
        copy: Whether returned observations are copies, which the caller may keep. With False they
            views of memory that the next call overwrites.
        observation_mode: As in `SyncVectorEnv`.
        autoreset_mode: "NextStep", "SameStep" or "Disabled".
        num_envs: Number of envs; only with a factory of vector envs.
        num_workers: Number of actors; None for as many as there is room for.
        cpus_per_worker: CPUs that Ray reserves for each actor.
        gpus_per_worker: GPUs, or parts of one, for each actor.
        memory_per_worker: Bytes of memory for each actor; Ray places actors by it, and enforces no
            limit.
        resources: Further resources of Ray for each actor, such as {"second": 1} on nodes started
            with `ray start --resources='{"second": 1}'`.
        scheduling_strategy: "SPREAD" over the nodes, "DEFAULT" (packed), or an object of
            `ray.util.scheduling_strategies`, such as a placement group's; this needs `num_workers`.
        address: Address of the cluster: "host:port", "ray://host:port" or "auto"; None for the one
            that Ray is connected to, that of the environment variable `RAY_ADDRESS`, or else one
            that is started on this machine and ends with this process.
        runtime_env: Runtime environment of the actors, such as {"working_dir": "."}; see Ray. It is
            passed to `ray.init` if that is called here, and refused if you have called it.
        on_error: "raise", or "restart": envs that raise and actors that are gone are replaced,
            their episodes reported as truncated; `reset` also replaces actors that don't answer it
            within `timeout`.
        timeout: Longest wait in seconds of calls without a timeout of their own; None waits for as
            long as the actors live.
        start_timeout: Longest wait in seconds until an actor's envs are made, restarts included,
            and until the actors' policies are made.

    Attributes:
        num_workers: Number of actors.
        restarts: int64 (num_envs,), how often each env has been replaced.
        busy_ns: int64 (num_workers,), nanoseconds that each actor has spent in calls so far; larger
            where envs are slower than those of other actors.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: There is no cluster at the address, or it demands another token.
        ValueError: More actors than the cluster has room for, or an unknown option.
        TypeError: A factory can't be pickled; names the env.
        EnvCreationError: A factory raised; names the env. Or a node lacks this package, or has
            another version; names the node.
        RuntimeError: The envs' spaces differ.
    """

    _steps = 0
    _has_policy = False

    def __init__(
        self,
        env_fns: Makers,
        copy: bool = True,
        observation_mode: ObservationMode = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        *,
        num_envs: int | None = None,
        num_workers: int | None = None,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float = 0.0,
        memory_per_worker: float | None = None,
        resources: Mapping[str, float] | None = None,
        scheduling_strategy: Any = "SPREAD",
        address: str | None = None,
        runtime_env: dict[str, Any] | None = None,
        on_error: str = "raise",
        timeout: float | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        self.closed = True  # until there is something to close
        self.env_fns, self.copy, self.observation_mode = env_fns, copy, observation_mode
        self._timeout = read_timeout("timeout", timeout)
        read_timeout("start_timeout", start_timeout)
        mode = read_autoreset_mode(autoreset_mode)
        check_choice("on_error", on_error, ("raise", "restart"))
        if runtime_env is not None and not isinstance(runtime_env, Mapping):
            raise ValueError(f"runtime_env is {runtime_env!r}, expected a dict; see Ray")
        amounts = {"CPU": cpus_per_worker, "GPU": gpus_per_worker or None}
        amounts["memory"] = memory_per_worker
        demand = read_demand(amounts, resources, scheduling_strategy)
        count = check_makers(env_fns, num_envs, num_workers, demand)
        cluster = Cluster(address, runtime_env)
        bounds = chunk_bounds(count, num_workers or cluster.choose_number(count, demand))
        options: dict[str, Any] = {"autoreset_mode": mode.value}
        if not callable(env_fns):
            options["observation_mode"] = observation_mode
        starts = start_of_each(env_fns, bounds, options, on_error == "restart")
        pool = ActorPool(cluster, starts, demand, start_timeout)
        try:
            found = [seat.spaces for seat in pool.seats if seat.spaces is not None]
            obs_spaces, action_spaces = zip(*(p for one in found for p in one.spaces), strict=True)
            spaces = batch_env_spaces(
                list(obs_spaces), list(action_spaces), observation_mode, type(self).__name__
            )
            self._set_up(bounds[-1], spaces, mode, found[0].metadata, found[0].render_mode)
        except BaseException:
            pool.stop(0.0)
            raise
        self._pool, self.num_workers = pool, len(starts)
        self._bind_rows(StepRows.make(self.single_observation_space, self.num_envs))
        self._seeds: list[int | None] = [None] * self.num_envs  # of the latest resets
        self.restarts = np.zeros(self.num_envs, np.int64)
        self.busy_ns = np.zeros(self.num_workers, np.int64)
        self._ready: deque[tuple[int, Any]] = deque()  # envs that are back, and their infos
        pool.left_by_fork = partial(setattr, self._calls, "parent_pid")
        if on_error == "restart":
            pool.after_loss = self._start_after
        self.closed = False

    # -- reset and step --------------------------------------------------------------------

    @contextlib.contextmanager
    def _call(self, *, keeps_late: bool = False, is_recv: bool = False) -> Iterator[None]:
        """Mark a call that an exception from elsewhere interrupts; the next call gives it up.

        Args:
            keeps_late: Whether late answers can still be waited for.
            is_recv: Whether the call ends when the protocol has noted which envs are back.
        """
        calls = self._calls
        calls.unfinished = self._give_up
        try:
            yield
        except (StepTimeoutError, InfoError) as error:
            if not keeps_late or isinstance(error, InfoError):
                self._give_up(error)
            calls.unfinished = None
            raise
        if not is_recv:
            calls.unfinished = None

    def _give_up(self, error: BaseException | None = None) -> None:
        """Forget all requests; because of this error, refuse all calls but `reset` and `close`."""
        self._pool.forget()
        self._ready.clear()
        told = "a call was broken off by an exception from elsewhere, such as Ctrl-C"
        self._calls.give_up(told if error is None else error)

    def _reset(
        self, seed: Seed, options: dict[str, Any] | None, reset_mask: np.ndarray | None
    ) -> tuple[Any, dict[str, Any]]:
        seeds = seed_per_env(seed, self.num_envs)
        mask = np.ones(self.num_envs, np.bool_) if reset_mask is None else reset_mask
        with self._call():
            if mask.all():  # a full reset gives up what was in flight
                self._pool.forget()
                self._ready.clear()
            asked = [part for part in self._starts() if mask[part.envs].any()]
            for part in asked:
                own_seeds = None if seed is None else seeds[part.rows]
                self._pool.ask(part.worker, "reset", own_seeds, options, mask[part.rows])
            count = sum(part.num_envs for part in asked)
            restarts = self._pool.after_loss is not None
            replies = self._wait("reset", count, self._deadline(None), "`reset`", restarts)
            self._raise_faults(replies)
            pairs = zip(seeds, self._seeds, mask.tolist(), strict=True)
            self._seeds = [new if takes and new is not None else old for new, old, takes in pairs]
            infos: dict[str, Any] = {}
            for envs, reply in self._in_order(replies):
                rows = np.flatnonzero(mask[envs])
                obs = take_rows(self.single_observation_space, reply.result[0], rows.tolist())
                self._rows.obs.put(rows + envs.start, obs)
                reply.result[1].enter(infos, envs, self.num_envs, envs)
            chosen = np.flatnonzero(mask)
            self._note_reset(infos, chosen)
            return self._observations(), infos

    def _step(self, actions: Any, out: Any) -> StepResult:
        self._refuse_ended()
        rows, slot = self._rows, self._slot(out)
        space, deadline = self.single_action_space, self._deadline(None)
        with self._call(keeps_late=True):
            self._steps += 1
            for part in self._starts():
                own_actions = take_rows(space, actions, part.envs)
                self._pool.ask(part.worker, "step", own_actions, None)
            try:
                replies = self._wait("step", self.num_envs, deadline, f"step {self._steps}")
            except StepTimeoutError as error:
                self._calls.mark_sent(np.arange(self.num_envs))
                error.args = (f"{error.args[0]}. All envs are in flight: `recv` them, or `reset`",)
                raise
            self._raise_faults(replies)
            infos: dict[str, Any] = {}
            for envs, reply in self._in_order(replies):
                rows.put(envs, reply.result)
                reply.result[4].enter(infos, envs, self.num_envs, envs)
            return self._results(out, slot, infos)

    # -- send and recv ---------------------------------------------------------------------

    def _send(self, actions: Any, env_ids: np.ndarray) -> None:
        self._refuse_ended(env_ids)
        self._calls.unfinished = self._give_up
        self._steps += 1
        for part in self._starts():
            first = part.envs.start
            chosen = np.flatnonzero((env_ids >= first) & (env_ids < part.envs.stop))
            if len(chosen):
                own_actions = take_rows(self.single_action_space, actions, chosen.tolist())
                ids = env_ids[chosen] - first
                self._pool.ask(part.worker, "step", own_actions, ids, num_envs=len(ids))

    def _recv(self, count: int, most: int, timeout: float | None) -> StepBatch:
        rows, ready = self._rows, self._ready
        with self._call(keeps_late=True, is_recv=True):
            try:
                missing = max(0, count - len(ready))
                replies = self._wait("step", missing, self._deadline(timeout), "`recv`")
            except StepTimeoutError as error:
                error.args = (f"{error.args[0]}. They stay in flight",)
                raise
            self._raise_faults(replies)  # some envs of that actor have been stepped and others not
            for envs, reply in ((self._envs_of(call), reply) for call, reply in replies):
                *results, told, ids = reply.result
                ids = np.array(envs) if ids is None else ids + envs.start
                rows.put(ids, results)
                ready.extend((k, told.get(k - envs.start)) for k in ids.tolist())
            taken = [ready.popleft() for _ in range(min(most, len(ready)))]
            env_ids, infos = np.array([env_id for env_id, _ in taken]), {}
            for row, (env_id, info) in enumerate(taken):
                if info:
                    add_info(infos, info, row, len(taken), env_id)
            return self._batch_of(env_ids, infos)

    # -- fragments -------------------------------------------------------------------------

    def set_policy(self, policy_fn: Callable[[VecEnv], Any]) -> None:
        """Let every actor make a policy, for `collect`.

        Args:
            policy_fn: Called in each actor with its vector env; returns the policy, an object with
                two or three methods. `load(weights)` takes over the `weights` of `collect`; arrays
                in them are read-only. `act(obs, *inputs)` gets observations (n, *obs_shape) of the
                actor's n envs and the step's rows of the inputs, copies which it may keep; it
                returns actions (n, *action_shape), or a pair of actions and a dict of further
                arrays (n, ...) to be recorded. `to_env(actions)`, if there is one, converts the
                policy's actions into the envs', by clipping for example. All may return CPU
                tensors.

        Raises:
            TypeError: The factory can't be pickled.
            StepTimeoutError: The policies were not made within `start_timeout`.
            Exception: The factory raised it in an actor.
        """
        self._calls.require_idle("set_policy")
        policy = pickled(policy_fn, "policy_fn")
        for seat in self._pool.seats:  # for successors
            seat.start = seat.start._replace(policy=policy)
        timeout = self._pool.start_timeout  # making a policy may import a lot
        self._ask_all("set_policy", [(policy,)] * self.num_workers, timeout)
        self._has_policy = True

    def collect(
        self,
        slots: Sequence[Any],
        weights: Any = None,
        *,
        inputs: Sequence[Any] = (),
        fields: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Let the actors' policies step all envs T times, and fill the caller's memory.

        Every actor works independently and sends one message with all its results, which is written
        when it arrives. With `on_error="restart"` the loss of an actor loses only the fragment of
        its envs, and its successor collects another.

        Args:
            slots: T slots such as `StepSlot`, into which the results of each step are written, as
                with `step(out=)`: for a `RolloutBuffer`
                `[rollout.slot(t) for t in range(num_steps)]`.
            weights: Argument of the policies' `load`: any object that can be pickled, put into
                Ray's object store once. None leaves the policies as they are.
            inputs: Arrays (T, num_envs, ...), of which each policy gets its rows at each step, such
                as noise: so the results don't depend on the number of actors.
            fields: Memory for the fields that the policies record: by name arrays, or CPU tensors,
                (T, num_envs, ...). The actions of `act` are recorded as "actions".
            timeout: Longest wait in seconds.

        Returns:
            Batched infos by step, of the steps that had any.

        Raises:
            StepTimeoutError: An actor is not ready. All envs must be reset.
            SlotError: A slot can't be written into. Nothing was stepped.
            ValueError: An input or field has the wrong shape, there is no policy or no slot, or
                autoreset is disabled. Nothing was stepped, unless a field is missing.
            Exception: An env or a policy raised it.
        """
        self._calls.require_ready("collect")
        deadline = self._deadline(read_timeout("timeout", timeout))
        size = len(slots), self.num_envs
        rows = self._checked_slots(slots)
        arrays = [checked_rows(f"inputs[{k}]", given, size) for k, given in enumerate(inputs)]
        targets = {
            k: checked_rows(f"fields[{k!r}]", given, size) for k, given in (fields or {}).items()
        }
        with self._logged(COLLECT) as log, self._call():
            if log is not None:
                log.note_rows(len(slots) * self.num_envs)
            return self._collect(rows, weights, arrays, targets, deadline)

    def _checked_slots(self, slots: Sequence[Any]) -> list[StepSlot]:
        """Return the rows of each step's slot; raise if results can't be collected into one."""
        if not self._has_policy:
            raise ValueError("`collect` came before `set_policy`; actors need a policy to act")
        if self.autoreset_mode is AutoresetMode.DISABLED:
            raise ValueError(
                "`collect` with autoreset 'Disabled' would need a reset between two steps; use "
                "'NextStep' or 'SameStep'"
            )
        if len(slots) == 0:
            raise ValueError("slots is empty, expected one for each step")
        for slot in slots:
            self._check_slot_mode(slot)
        return [slot_rows(slot, self._rows.obs) for slot in slots]

    def _collect(
        self,
        rows: list[StepSlot],
        weights: Any,
        inputs: list[np.ndarray],
        fields: dict[str, np.ndarray],
        deadline: Deadline,
    ) -> dict[int, dict[str, Any]]:
        pool, num_steps = self._pool, len(rows)
        reference = None if weights is None else pool.cluster.put(weights)
        for part in self._starts():
            own_inputs = [array[:, part.rows] for array in inputs]
            pool.ask(part.worker, "collect", num_steps, reference, own_inputs)
        doing = f"the collection of steps {self._steps + 1}-{self._steps + num_steps}"
        found: dict[int, Any] = {}  # infos by worker
        while len(found) < self.num_workers:
            replies = self._wait("collect", 1, deadline, doing)
            self._raise_faults(replies)
            for envs, reply in self._in_order(replies):
                fragment, last = reply.result, num_steps - 1
                fragment.copy_fields(fields, envs)
                for t, step in enumerate(rows):
                    step.put(envs, fragment.slot(t))
                self._rows.put(envs, fragment.slot(last))
                found[envs.start] = envs, fragment.infos
        self._steps += num_steps
        infos: dict[int, dict[str, Any]] = {}
        for _, (envs, by_step) in sorted(found.items()):
            for t, told in by_step.items():
                told.enter(infos.setdefault(t, {}), envs, self.num_envs, envs)
        self._masks.note(infos.get(num_steps - 1, {}))
        return dict(sorted(infos.items()))

    # -- the actors ------------------------------------------------------------------------

    def _starts(self) -> list[Start]:
        return [seat.start for seat in self._pool.seats]

    def _envs_of(self, call: Call) -> range:
        return self._pool.seats[call.worker].start.envs

    def _in_order(self, replies: list[tuple[Call, Reply]]) -> list[tuple[range, Reply]]:
        """Sort replies by env, so that batched infos do not depend on the order of arrival."""
        pairs = sorted(replies, key=lambda pair: pair[0].worker)
        return [(self._envs_of(call), reply) for call, reply in pairs]

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.of_call(timeout, self._timeout)

    def _wait(
        self, method: str, count: int, deadline: Deadline, doing: str, replaces_late: bool = False
    ) -> list[tuple[Call, Reply]]:
        """Wait for replies as `ActorPool.wait` does; close everything if a worker is gone."""
        begin_ns = perf_counter_ns()
        try:
            replies = self._pool.wait(method, count, deadline, doing, replaces_late)
        except WorkerDiedError as error:
            self._calls.note_fault(error)
            self.close(terminate=True)
            error.args = (f"{error.args[0]} The vector env is closed.",)
            raise
        for call, reply in replies:
            self.busy_ns[call.worker] += reply.busy_ns
            if reply.restarts is not None:
                self.restarts[self._envs_of(call)] = reply.restarts
        if self._log is not None:  # the longest call of an actor counts, the rest is hand-over
            end_ns = perf_counter_ns()
            longest_ns = max((reply.busy_ns for _, reply in replies), default=0)
            self.timing.log.note_wait(max(end_ns - longest_ns, begin_ns), end_ns)
        return replies

    def _ask_all(
        self, method: str, arguments: Sequence[tuple[Any, ...]], timeout: float | None = None
    ) -> list[Any]:
        """Call a method of every actor; return the results in order."""
        with self._call(keeps_late=True):
            for worker, args in enumerate(arguments):
                self._pool.ask(worker, method, *args)
            try:
                deadline = self._deadline(timeout)
                replies = self._wait(method, self.num_envs, deadline, f"`{method}`")
            except StepTimeoutError:
                self._pool.forget()
                raise
            self._raise_faults(replies, gives_up=False)
        return [reply.result for _, reply in self._in_order(replies)]

    def _raise_faults(
        self, replies: Sequence[tuple[Call, Reply]], *, gives_up: bool = True
    ) -> None:
        """Raise the faults of the envs, if there are any."""
        faults = [fault for _, reply in replies for fault in reply.faults]
        try:
            raise_faults(faults, self._steps)
        except Exception as error:
            who = self._pool.seats[faults[-1].worker].start
            if who.first and faults[-1].env_id >= 0:
                error.add_note(f"Inside of {who}, env {who.first} may be called env 0.")
            if gives_up:
                self._give_up(error)
            self._calls.unfinished = None
            raise

    def _start_after(self, start: Start, reason: str) -> Start:
        """Count the loss of an actor; return the start of its successor."""
        rows = start.rows
        self.restarts[rows] += 1
        restarts, loss = self.restarts[rows].copy(), None
        if self._calls.has_reset:
            pairs = zip(self._seeds[rows], restarts.tolist(), strict=True)
            seeds = [None if seed is None else mixed_seed(seed, k) for seed, k in pairs]
            loss = reason, self._rows.obs.take(np.array(start.envs)), seeds
        return start._replace(restarts=restarts, loss=loss)

    # -- methods of the envs ---------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute, and return the results."""
        self._calls.require_idle("call")
        if name in _RESERVED:
            raise ValueError(
                f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
            )
        results = self._ask_all("call", [(name, args, kwargs)] * self.num_workers)
        return tuple(result for part in results for result in part)

    def _set_attr(self, name: str, values: Sequence[Any]) -> None:
        parts = [values[part.rows] for part in self._starts()]
        self._ask_all("set_attr", [(name, list(part)) for part in parts])

    # -- timing ----------------------------------------------------------------------------

    def _begin_stamps(self) -> int:
        self._calls.require_idle("timing.enable")
        return 0  # calls of actors are stamped, as compiled calls are

    def _env_chunks(self) -> list[int]:
        return [0, *(start.envs.stop for start in self._starts())]

    def _worker_processes(self) -> list[WorkerProcess | None]:
        return [WorkerProcess(seat.local_pid, seat.start_s) for seat in self._pool.seats]

    # -- the end ---------------------------------------------------------------------------

    def close(self, **kwargs: Any) -> None:
        """Close the envs and end the actors; see `close_extras`. May be called twice.

        If Ctrl-C interrupts it, a further call ends the remaining actors.
        """
        try:
            super().close(**kwargs)
        finally:
            if hasattr(self, "_pool"):
                self._pool.kill()

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the envs and end the actors in any state; Ray itself keeps running.

        Args:
            timeout: Seconds for envs to finish and close, 5 if None; actors that still run then are
                killed.
            terminate: Kill at once.
        """
        if not hasattr(self, "_pool"):
            return
        if terminate:
            self._pool.stop(0.0)
        else:
            self._pool.stop(_CLOSE_S if timeout is None else timeout)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the actors of a vector env that was never closed; `sys` may be gone by then."""
        if not getattr(self, "closed", True) and not is_finalizing():
            self._pool.kill()  # `__del__` may run anywhere, so it waits for nothing
            self.close(terminate=True)
