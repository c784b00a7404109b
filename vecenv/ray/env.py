"""RayVectorEnv: vector envs in actors, spread over a Ray cluster."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from vecenv.core.arguments import read_autoreset_mode, read_timeout
from vecenv.core.autoreset import StepRows
from vecenv.core.base import GymVecEnv, StepBatch, StepResult, VecEnv
from vecenv.core.batches import take_range, take_rows
from vecenv.core.deadline import Deadline
from vecenv.core.errors import InfoError
from vecenv.core.faults import StepTimeoutError, WorkerDiedError, raise_faults
from vecenv.core.infos import InfosApart, known_infos, take_infos
from vecenv.core.masks import MASK_KEY
from vecenv.core.seeding import Seed, seed_per_env
from vecenv.core.slots import slot_rows
from vecenv.core.spaces import ObservationMode, batch_env_spaces
from vecenv.ray.chunks import Where, place_infos, place_rows
from vecenv.ray.fragments import checked_rows, obs_bytes
from vecenv.ray.revival import Loss
from vecenv.ray.stamping import StampMirror
from vecenv.timing.calls import COLLECT
from vecenv.timing.recording import WorkerProcess
from vecenv.timing.stamps import EnvStamps

if TYPE_CHECKING:
    from vecenv.ray.fleet import Task
    from vecenv.ray.opening import RayOptions
    from vecenv.ray.worker import ActorPolicy, Reply, Seat

__all__ = ["RayVectorEnv"]

_logger = logging.getLogger("vecenv")
_STORE_SHARE = 0.8  # of an object store that is full before Ray writes to disk
_CLOSE_S = 5.0
_RELEASE_AT_ONCE_S = 2.0  # after a fault a node may be lost, and never give its CPUs back
_RESERVED = ("reset", "step", "close")


class RayVectorEnv(GymVecEnv):
    """Envs in the actors of a Ray cluster, one vector env in each actor.

    It has the interface of the other vector envs. As a round trip to an actor takes about a
    millisecond, `step` pays for envs whose steps take longer; where the policy is cheap to copy,
    let the actors act themselves, see `set_policy` and `collect`.

    Args:
        env_fns: One factory per env, called without arguments in an actor. Or one factory of vector
            envs of this package, called with `num_envs=` in each actor, such as
            `functools.partial(Cage2VectorEnv, episode_length=50)`.
        copy: Whether observations returned are copies, the caller's to keep. With False they are
            views of memory that the next call overwrites.
        observation_mode: As in `SyncVectorEnv`.
        autoreset_mode: "NextStep", "SameStep" or "Disabled".
        num_envs: Number of envs; only with a factory of vector envs.
        num_workers: Number of actors; None for as many as there is room for.
        worker_backend: "sync" or "async" vector envs in the actors; only with a list of factories.
        worker_options: Further arguments of these vector envs, such as {"num_workers": 4};
            "async" has one worker process for each of `cpus_per_worker`.
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
        runtime_env: Runtime environment of the actors, such as {"working_dir": "."}; see Ray. Ray
            accepts folders and modules of this machine only while connecting: they are passed to
            `ray.init` if it is called here, and refused if you have called it.
        on_error: "raise", or "restart": envs that raise and actors that are gone are replaced,
            their episodes reported as truncated; `reset` also replaces actors that don't answer it
            within `timeout`.
        shares_cpus: Whether an actor that replaces another shares the CPUs of the others if no node
            has free ones; else it waits for a node, until `start_timeout`.
        timeout: Longest wait in seconds of calls without a timeout of their own; None waits for as
            long as the actors live.
        start_timeout: Longest wait in seconds until an actor's envs are made, restarts included,
            and until the actors' policies are made.

    Attributes:
        num_workers: Number of actors.
        restarts: int64 (num_envs,), how often each env has been replaced.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: There is no cluster at the address, or it demands another token.
        ValueError: More actors than the cluster has room for, or an unknown option.
        TypeError: A factory can't be pickled; names the env.
        EnvCreationError: A factory raised; names the env. Or a node lacks this package, or has
            another version; names the node.
        RuntimeError: The envs' spaces differ.
    """

    _seeds: list[int | None]  # of the latest resets
    _steps = 0
    _has_policy = False
    _sized_steps = 0  # steps of fragments whose size is known to fit, or has been told
    _mirror: StampMirror | None = None  # while timing is enabled
    _stamped_lanes: np.ndarray | None = None

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env]] | Callable[..., VecEnv],
        copy: bool = True,
        observation_mode: ObservationMode = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        *,
        num_envs: int | None = None,
        num_workers: int | None = None,
        worker_backend: str | None = None,
        worker_options: Mapping[str, Any] | None = None,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float = 0.0,
        memory_per_worker: float | None = None,
        resources: Mapping[str, float] | None = None,
        scheduling_strategy: Any = "SPREAD",
        address: str | None = None,
        runtime_env: dict[str, Any] | None = None,
        on_error: str = "raise",
        shares_cpus: bool = False,
        timeout: float | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        from vecenv.ray.opening import RayOptions, open_fleet, read_demand

        self.closed = True  # until there is something to close
        self.env_fns, self.copy = env_fns, copy
        self._timeout = read_timeout("timeout", timeout)
        read_timeout("start_timeout", start_timeout)
        self.observation_mode = observation_mode
        options = RayOptions(
            observation_mode,
            read_autoreset_mode(autoreset_mode),
            num_envs,
            num_workers,
            worker_backend,
            dict(worker_options or {}),
            read_demand(
                cpus_per_worker,
                gpus_per_worker,
                memory_per_worker,
                resources,
                scheduling_strategy,
                runtime_env,
            ),
            address,
            on_error,
            start_timeout,
            shares_cpus,
        )
        self._fleet = open_fleet(env_fns, options)
        self._prepare(options)

    def _prepare(self, options: RayOptions) -> None:
        """Batch the spaces and bind what the calls need; end the actors if the spaces differ."""
        mode = options.autoreset_mode
        openings = self._fleet.openings
        pairs = [pair for opening in openings for pair in opening.spaces]
        obs_spaces, action_spaces = map(list, zip(*pairs, strict=True))
        about_spaces = obs_spaces, action_spaces, self.observation_mode, type(self).__name__
        try:
            spaces = batch_env_spaces(*about_spaces)
        except Exception:
            self._fleet.stop(0.0)
            raise
        about = openings[0]
        self._set_up(len(pairs), spaces, mode, about.metadata, about.render_mode)
        self.num_workers = len(openings)
        num_envs = self.num_envs
        self._bind_rows(StepRows.make(self.single_observation_space, num_envs))
        self._seeds = [None] * num_envs
        self.restarts = np.zeros(num_envs, np.int64)
        if options.on_error == "restart":
            self._fleet.seat_after = self._seat_after
        self.closed = False

    # -- reset and step --------------------------------------------------------------------

    def _reset(
        self, seed: Seed, options: dict[str, Any] | None, reset_mask: np.ndarray | None
    ) -> tuple[Any, dict[str, Any]]:
        seeds = seed_per_env(seed, self.num_envs)
        self._own_rows()
        is_full = reset_mask is None or bool(reset_mask.all())
        if is_full:
            self._fleet.forget()  # calls in flight are dropped
        else:
            self._require_known("reset")
        mask = np.ones(self.num_envs, np.bool_) if reset_mask is None else reset_mask
        count = 0
        try:
            for worker in range(self.num_workers):
                rows = self._rows_of(worker)
                if mask[rows].any():
                    seeds_part = None if seed is None else seeds[rows]
                    self._fleet.ask(worker, "reset", seeds_part, options, mask[rows])
                    count += len(self._chunk(worker))
            replies = self._wait_reset(count)
            self._raise_faults(replies)
        except BaseException:
            self._give_up()
            raise
        for env_id in np.flatnonzero(mask).tolist():
            if seeds[env_id] is not None:
                self._seeds[env_id] = seeds[env_id]
        return self._take_reset(replies, mask)

    def _wait_reset(self, count: int) -> list[tuple[Task, Reply]]:
        """Wait for the envs' first observations; with "restart", replace actors that hang."""
        while True:
            try:
                return self._wait("reset", count, self._deadline(None), "`reset`")
            except StepTimeoutError as error:
                if self._fleet.seat_after is None:
                    raise
                self._replace_late(str(error))

    def _take_reset(
        self, replies: list[tuple[Task, Reply]], mask: np.ndarray
    ) -> tuple[Any, dict[str, Any]]:
        """Write the observations of the envs that were reset into their rows."""
        infos: dict[str, Any] = {}
        space = self.single_observation_space
        for task, reply in _by_worker(replies):
            rows = self._rows_of(task.worker)
            obs, chunk_infos = reply.result
            chosen = np.flatnonzero(mask[rows])
            obs = take_rows(space, obs, chosen.tolist())
            place_rows(self._rows.obs, space, obs, chosen + rows.start)
            self._enter_infos(infos, chunk_infos, rows)
        chosen = np.flatnonzero(mask)
        self._ended.ended.difference_update(chosen.tolist())
        self._note_reset(infos, chosen)
        return self._observations(), infos

    def _step(self, actions: Any, out: Any) -> StepResult:
        if self._is_disabled:
            self._ended.require_reset_ended(range(self.num_envs))
        rows = self._rows if out is None else slot_rows(out, self._rows.obs, self.num_envs)
        self._require_known("step")
        self._steps += 1
        space, fleet = self.single_action_space, self._fleet
        try:
            for worker, (first, last) in enumerate(pairwise(fleet.bounds)):
                fleet.ask(worker, "step", take_range(space, actions, first, last), None)
            deadline, doing = self._deadline(None), f"step {self._steps}"
            replies = self._wait("step", self.num_envs, deadline, doing)
            return self._take_step(replies, rows, out)
        except BaseException as error:  # Ctrl-C too
            if not self.closed:
                self._own_rows()
                if fleet.count("step") == self.num_envs:
                    self._calls.mark_sent(np.arange(self.num_envs))
                else:  # it was raised while actors were asked, or after they had answered
                    self._give_up()
            if isinstance(error, StepTimeoutError):
                error.args = (f"{error.args[0]}. All envs are in flight: `recv` them, or close",)
            raise

    def _take_step(self, replies: list[tuple[Task, Reply]], rows: StepRows, out: Any) -> StepResult:
        """Write the results of a step of all envs into their rows."""
        if any(reply.faults for _, reply in replies):
            self._own_rows()
            self._calls.forget_reset()
            self._raise_faults(replies)
        infos: dict[str, Any] = {}
        for task, reply in _by_worker(replies):
            self._place(rows, self._chunk(task.worker), reply.result)
            if reply.result[4]:
                self._enter_infos(infos, reply.result[4], self._rows_of(task.worker))
        if self._is_disabled:
            self._note_ended(rows.terminations | rows.truncations)
        return self._results(rows, out, infos)

    def _place(self, rows: StepRows, env_ids: range | np.ndarray, result: Any) -> None:
        """Write the results of some envs into their rows."""
        where = slice(env_ids.start, env_ids.stop) if isinstance(env_ids, range) else env_ids
        place_rows(rows.obs, self.single_observation_space, result[0], env_ids)
        rows.rewards[where], rows.terminations[where], rows.truncations[where] = result[1:4]

    # -- send and recv ---------------------------------------------------------------------

    def _send(self, actions: Any, env_ids: np.ndarray) -> None:
        self._ended.require_reset_ended(env_ids.tolist())
        self._require_known("send")
        self._own_rows()
        self._steps += 1
        try:
            for worker, (first, last) in enumerate(pairwise(self._fleet.bounds)):
                chosen = np.flatnonzero((env_ids >= first) & (env_ids < last))
                if len(chosen):
                    part = take_rows(self.single_action_space, actions, chosen.tolist())
                    ids = env_ids[chosen] - first
                    self._fleet.ask(worker, "step", part, ids, num_envs=len(ids))
        except BaseException:  # Ctrl-C: some have been asked
            self._give_up()
            raise

    def _recv(self, count: int, most: int, timeout: float | None) -> StepBatch:
        self._require_known("recv")
        try:
            replies = self._wait("step", count, self._deadline(timeout), "`recv`")
        except StepTimeoutError as error:
            error.args = (f"{error.args[0]}. They stay in flight",)
            raise
        try:
            return self._take_batch(most, replies)
        except BaseException:
            self._give_up()
            raise

    def _take_batch(self, most: int, replies: list[tuple[Task, Reply]]) -> StepBatch:
        """Write the results of some envs into their rows, and return them."""
        self._raise_faults(replies)  # some envs of that actor have been stepped and some not
        replies = self._first(most, replies)
        rows, found = self._rows, []
        for task, reply in replies:
            ids, first = reply.result[5], self._fleet.bounds[task.worker]
            found.append(np.array(self._chunk(task.worker)) if ids is None else ids + first)
            self._place(rows, found[-1], reply.result)
        env_ids = np.concatenate(found)
        infos: dict[str, Any] = {}
        first_row, num_rows = 0, len(env_ids)
        for (_, reply), ids in zip(replies, found, strict=True):
            where = slice(first_row, first_row := first_row + len(ids))
            place_infos(infos, reply.result[4], where, num_rows, ids)
        if self._is_disabled:
            is_over = rows.terminations[env_ids] | rows.truncations[env_ids]
            self._note_ended(is_over, env_ids)
        return self._batch_of(env_ids, infos)

    def _first(self, most: int, replies: list[tuple[Task, Reply]]) -> list[tuple[Task, Reply]]:
        """Return the replies about the first `most` envs; the rest is put back."""
        kept, left = [], most
        for number, (task, reply) in enumerate(replies):
            if task.num_envs > left:
                for pair in reversed(replies[number + 1 :]):
                    self._fleet.put_back(*pair)
                self._fleet.put_back(*self._part(task, reply, left, task.num_envs))
                if left:
                    kept.append(self._part(task, reply, 0, left))
                break
            kept.append((task, reply))
            left -= task.num_envs
        return kept

    def _part(self, task: Task, reply: Reply, first: int, last: int) -> tuple[Task, Reply]:
        """Return the part of a reply about its envs `first` to `last` - 1."""
        obs, rewards, terminations, truncations, infos, ids = reply.result
        ids = np.arange(task.num_envs) if ids is None else ids
        if isinstance(infos, InfosApart):
            infos = infos.part(first, last)
        else:
            infos = known_infos(take_infos(infos, np.arange(first, last)))
        part = (
            take_range(self.single_observation_space, obs, first, last),
            *(array[first:last] for array in (rewards, terminations, truncations)),
            infos,
            ids[first:last],
        )
        return task._replace(num_envs=last - first), reply._replace(result=part)

    # -- fragments -------------------------------------------------------------------------

    def set_policy(self, policy_fn: Callable[[VecEnv], ActorPolicy]) -> None:
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
        from vecenv.ray.opening import pickled

        self._calls.require_idle("set_policy")
        policy = pickled(policy_fn, "policy_fn")
        self._fleet.seats = [seat._replace(policy=policy) for seat in self._fleet.seats]
        timeout = self._fleet.start_timeout  # making a policy may import much
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
            StepTimeoutError: An actor is not ready. All envs have to be reset.
            SlotError: A slot can't be written into. Nothing was stepped.
            ValueError: An input or field has the wrong shape, there is no policy or no slot, or
                autoreset is disabled. Nothing was stepped, unless a field is missing.
            Exception: An env or a policy raised it.
        """
        self._calls.require_ready("collect")
        timeout = read_timeout("timeout", timeout)
        size = len(slots), self.num_envs
        self._check_collect(slots)
        arrays = [checked_rows(f"inputs[{k}]", rows, size) for k, rows in enumerate(inputs)]
        targets = {
            k: checked_rows(f"fields[{k!r}]", rows, size) for k, rows in (fields or {}).items()
        }
        if len(slots) != self._sized_steps:
            self._sized_steps = len(slots)
            self._warn_of_size(slots[0], targets)
        with self._logged(COLLECT) as log:
            if log is not None:
                log.note_rows(len(slots) * self.num_envs)
            return self._collect(slots, weights, arrays, targets, timeout)

    def _check_collect(self, slots: Sequence[Any]) -> None:
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
            slot_rows(slot, self._rows.obs, self.num_envs)

    def _warn_of_size(self, slot: Any, fields: dict[str, np.ndarray]) -> None:
        """Log which nodes' object stores can't hold the fragments, as Ray slows down silently."""
        fleet, num_steps = self._fleet, self._sized_steps
        rows = self._rows.rewards, self._rows.terminations, self._rows.truncations
        step_bytes = obs_bytes(slot.obs) + sum(array.nbytes for array in rows)
        total = num_steps * step_bytes + sum(array.nbytes for array in fields.values())
        needed = Counter[str]()
        for worker, node in enumerate(fleet.nodes):
            needed[node] += total * len(self._chunk(worker)) // self.num_envs
        needed[fleet.cluster.own_node()] = total  # all of them arrive here
        stores = fleet.cluster.store_bytes()
        small = [
            f"{node[:12]} has {stores[node] / 2**20:.0f} MiB for {size / 2**20:.0f} MiB"
            for node, size in needed.items()
            if size > _STORE_SHARE * stores.get(node, size)
        ]
        if small:
            _logger.warning(
                "fragments of %d steps x %d envs don't fit into Ray's object store, which writes "
                "to disk then and is many times slower: %s. Collect fewer steps at a time, or give "
                "Ray more (ray start --object-store-memory=BYTES, ray.init(object_store_memory=))",
                num_steps,
                self.num_envs,
                "; ".join(f"node {text}" for text in small),
            )

    def _collect(
        self,
        slots: Sequence[Any],
        weights: Any,
        inputs: list[np.ndarray],
        fields: dict[str, np.ndarray],
        timeout: float | None,
    ) -> dict[int, dict[str, Any]]:
        fleet, deadline = self._fleet, self._deadline(timeout)
        self._require_known("collect")
        self._own_rows()
        reference = None if weights is None else fleet.cluster.put(weights)
        found: dict[int, dict[int, dict[str, Any]]] = {}  # infos by worker and step
        try:
            for worker, (first, last) in enumerate(pairwise(fleet.bounds)):
                rows = [array[:, first:last] for array in inputs]
                fleet.ask(worker, "collect", len(slots), reference, rows)
            while len(found) < self.num_workers:
                doing = f"the collection of steps {self._steps + 1}-{self._steps + len(slots)}"
                replies = self._wait("collect", 1, deadline, doing)
                self._raise_faults(replies)
                for task, reply in replies:
                    fragment, worker = reply.result, task.worker
                    fragment.copy_into(slots, fields, self._rows_of(worker))
                    last, envs = fragment.obs_of(len(slots) - 1), self._chunk(worker)
                    place_rows(self._rows.obs, self.single_observation_space, last, envs)
                    found[worker] = fragment.infos
        except BaseException:
            fleet.forget()
            self._calls.forget_reset()
            raise
        self._steps += len(slots)
        infos: dict[int, dict[str, Any]] = {}
        for worker in range(self.num_workers):
            for t, part in found[worker].items():
                self._enter_infos(infos.setdefault(t, {}), part, self._rows_of(worker))
        last_infos = infos.get(len(slots) - 1, {})
        if self._masks.is_used or MASK_KEY in last_infos:
            self._masks.note(last_infos, slots[-1].terminations | slots[-1].truncations)
        return dict(sorted(infos.items()))

    def _enter_infos(self, infos: dict[str, Any], part: dict[str, Any], where: Where) -> None:
        """Merge infos of an actor's envs; if they can't be batched, all envs need a reset."""
        try:
            place_infos(infos, part, where, self.num_envs)
        except InfoError:
            self._calls.forget_reset()
            raise

    # -- the actors ------------------------------------------------------------------------

    def _chunk(self, worker: int) -> range:
        """Return the envs of a worker."""
        return range(*self._fleet.bounds[worker : worker + 2])

    def _rows_of(self, worker: int) -> slice:
        return slice(*self._fleet.bounds[worker : worker + 2])

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.of_call(timeout, self._timeout)

    def _wait(
        self, method: str, num_envs: int, deadline: Deadline, doing: str
    ) -> list[tuple[Task, Reply]]:
        """Wait for replies to calls of a method for `num_envs` envs; return all that have come."""
        try:
            with self._waiting():
                self._fleet.wait(method, num_envs, deadline, doing)
        except WorkerDiedError as error:
            self._end_with(error)
        replies = self._fleet.take(method)
        for task, reply in replies:
            if reply.restarts is not None:
                self.restarts[self._rows_of(task.worker)] = reply.restarts
        if self._mirror is not None:
            replies = [(task, self._take_stamps(task, reply)) for task, reply in replies]
        return replies

    def _ask_all(
        self, method: str, arguments: Sequence[tuple[Any, ...]], timeout: float | None = None
    ) -> list[Any]:
        """Call a method of every actor; return the results in order."""
        for worker, args in enumerate(arguments):
            self._fleet.ask(worker, method, *args)
        try:
            replies = self._wait(method, self.num_envs, self._deadline(timeout), f"`{method}`")
        except BaseException:
            self._fleet.forget()
            raise
        self._raise_faults(replies)
        return [reply.result for _, reply in sorted(replies, key=lambda pair: pair[0].worker)]

    def _raise_faults(self, replies: Sequence[tuple[Task, Reply]]) -> None:
        """Raise the faults of the envs, if there are any."""
        faults = [fault for _, reply in replies for fault in reply.faults]
        if not faults:
            return
        try:
            raise_faults(faults, self._steps)
        except WorkerDiedError as error:
            self._end_with(error)
        except Exception as error:
            first = self._fleet.bounds[faults[-1].worker]
            if first and faults[-1].env_id >= 0:
                name = self._fleet.name(faults[-1].worker)
                error.add_note(f"Inside of {name}, env {first} may be called env 0.")
            raise

    def _end_with(self, error: WorkerDiedError) -> None:
        """Close everything, as a worker is gone, and raise the error."""
        self.close(terminate=True)
        error.args = (f"{error.args[0]} The vector env is closed.",)
        raise error

    def _give_up(self) -> None:
        """Drop the calls in flight, so that a `reset` is needed."""
        self._fleet.forget()
        self._calls.give_up()

    def _require_known(self, call: str) -> None:
        """Require a `reset` if Ctrl-C interrupted the bookkeeping after a call of the actors."""
        if self._fleet.count("step") != self._calls.num_in_flight:
            self._fleet.forget()
            self._calls.give_up(RuntimeError("Ctrl-C interrupted the bookkeeping after a step"))
            self._calls.require_ready(call)

    def _replace_late(self, reason: str) -> None:
        """Replace the actors that have not answered."""
        try:
            self._fleet.replace_late(reason)
        except WorkerDiedError as error:
            self._end_with(error)

    def _seat_after(self, seat: Seat, reason: str) -> Seat:
        """Count the loss of an actor; return the seat of its successor."""
        worker = seat.worker
        rows = self._rows_of(worker)
        self.restarts[rows] += 1
        restarts = self.restarts[rows].copy()
        if not self._calls.has_reset:
            return seat._replace(restarts=restarts)
        seeds = [
            None if seed is None else int(np.random.SeedSequence([seed, k]).generate_state(1)[0])
            for seed, k in zip(self._seeds[rows], restarts.tolist(), strict=True)
        ]
        last_obs = self._latest.take(np.array(self._chunk(worker)))
        return seat._replace(restarts=restarts, loss=Loss(reason, last_obs, seeds, restarts))

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
        bounds = self._fleet.bounds
        self._ask_all("set_attr", [(name, list(values[a:b])) for a, b in pairwise(bounds)])

    def _find_mask_method(self) -> str | None:
        if self._mask_method is None:
            names = self._ask_all("mask_method", [()] * self.num_workers)
            self._mask_method = names[0] if len(set(names)) == 1 else None
        return self._mask_method

    def _call_for_masks(self, name: str) -> Sequence[Any]:
        parts = self._ask_all("action_masks", [(name,)] * self.num_workers)
        return [mask for part in parts for mask in part]

    # -- timing ----------------------------------------------------------------------------

    def _begin_stamps(self) -> EnvStamps | None:
        self._calls.require_idle("timing.enable")
        self._stamped_lanes = self._stamp_actors(is_on=True)
        if self._stamped_lanes is None:  # of compiled envs there is but one call to be seen
            self._stamp_actors(is_on=False)
            return None
        self._mirror = StampMirror(self.num_envs, self.timing.count_stamps)
        return self._mirror.stamps

    def _end_stamps(self) -> None:
        if not self.closed and self._mirror is not None:
            self._calls.require_idle("timing.disable")
            self._stamp_actors(is_on=False)
        self._mirror = None

    def _stamp_actors(self, *, is_on: bool) -> np.ndarray | None:
        """Let all actors stamp their envs' steps or not; return the envs' threads if they do."""
        parts = self._ask_all("stamp", [(is_on,)] * self.num_workers)
        self._fleet.seats = [seat._replace(is_stamped=is_on) for seat in self._fleet.seats]
        if any(part is None for part in parts):
            return None
        firsts = np.cumsum([0, *(int(part.max()) + 1 for part in parts[:-1])])
        return np.concatenate([first + part for first, part in zip(firsts, parts, strict=True)])

    def _take_stamps(self, task: Task, reply: Reply) -> Reply:
        """Keep the stamps that came with a reply; return the rest."""
        if reply.stamps is None:
            return reply
        assert self._mirror is not None
        worker = task.worker
        actor = worker, self._fleet.openings[worker].local_pid
        self._mirror.enter(reply.stamps, self._fleet.bounds[worker], actor, perf_counter_ns())
        return reply._replace(stamps=None)

    def _env_lanes(self) -> np.ndarray:
        lanes = self._stamped_lanes
        return super()._env_lanes() if lanes is None else lanes

    def _env_chunks(self) -> list[int]:
        return list(self._fleet.bounds)

    def _worker_processes(self) -> list[WorkerProcess | None]:
        return [
            WorkerProcess(opening.local_pid, start_s)
            for opening, start_s in zip(self._fleet.openings, self._fleet.start_s, strict=True)
        ]

    # -- the end ---------------------------------------------------------------------------

    def close(self, **kwargs: Any) -> None:
        """Close the envs and end the actors; see `close_extras`. May be called twice.

        If Ctrl-C interrupts it, a further call ends the remaining actors.
        """
        try:
            super().close(**kwargs)
        finally:
            if hasattr(self, "_fleet") and not self._fleet.has_ended:
                self._fleet.stop(0.0, 0.0)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the envs and end the actors in any state; Ray itself keeps running.

        Returns when Ray has released the actors' resources (after 5 seconds at the latest, 2 with
        `terminate`, as other programs may take them at once).

        Args:
            timeout: Seconds for envs to finish and close, 5 if None; actors that still run then are
                killed.
            terminate: Kill at once.
        """
        if not hasattr(self, "_fleet"):
            return
        if terminate:
            self._fleet.stop(0.0, _RELEASE_AT_ONCE_S)
        else:
            self._fleet.stop(_CLOSE_S if timeout is None else timeout)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the actors of a vector env that was never closed; `sys` may be gone by then."""
        if not getattr(self, "closed", True) and not is_finalizing():
            self._fleet.stop(0.0, 0.0)  # `__del__` may run anywhere, so it waits for nothing
            self.close(terminate=True)


def _by_worker(replies: list[tuple[Task, Reply]]) -> list[tuple[Task, Reply]]:
    """Sort replies by env, so that batched infos do not depend on the order of arrival."""
    return sorted(replies, key=lambda pair: pair[0].worker)
