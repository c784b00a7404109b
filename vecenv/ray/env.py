"""RayVectorEnv: vector envs in actors, spread over a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from vecenv.core.autoreset import StepRows, read_autoreset_mode
from vecenv.core.base import StepBatch, StepResult, VecEnv
from vecenv.core.batches import take_range, take_rows
from vecenv.core.faults import StepTimeoutError
from vecenv.core.infos import InfosApart, known_infos, take_infos
from vecenv.core.seeding import Seed, seed_per_env
from vecenv.core.slots import slot_rows
from vecenv.core.spaces import ObservationMode, batch_env_spaces
from vecenv.ray.chunks import place_infos, place_rows
from vecenv.ray.collecting import Collecting

if TYPE_CHECKING:
    from vecenv.ray.fleet import Task
    from vecenv.ray.opening import RayOptions
    from vecenv.ray.worker import Reply

__all__ = ["RayVectorEnv"]


class RayVectorEnv(Collecting):
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
        worker_options: Further arguments of these vector envs, such as {"threads_per_worker": 4};
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
        self.env_fns, self.copy, self._timeout = env_fns, copy, timeout
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

    # -- reset and step ----------------------------------------------------------------------

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
        self._ended.ended.difference_update(np.flatnonzero(mask).tolist())
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

    # -- send and recv -----------------------------------------------------------------------

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


def _by_worker(replies: list[tuple[Task, Reply]]) -> list[tuple[Task, Reply]]:
    """Sort replies by env, so that batched infos do not depend on the order of arrival."""
    return sorted(replies, key=lambda pair: pair[0].worker)
