"""The actors of a vector env: pending calls, replies, and the replacement of lost actors."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vecenv.core.deadline import Deadline
from vecenv.core.errors import EnvCreationError
from vecenv.core.faults import EnvFault, StepTimeoutError, WorkerDiedError
from vecenv.ray.cluster import ActorGoneError, Cluster, Demand, NotThereError, about_here
from vecenv.ray.worker import Opening, Reply, Seat

__all__ = ["Fleet", "Task"]

_logger = logging.getLogger("vecenv")

_MOST_TRIES = 3  # for one task, each with another actor
_CLOSE_S = 5.0
_RELEASE_S = 5.0  # until Ray has released the resources of actors that have ended
_NO_PLACE_S = 1.0  # without a reply of a new actor, until Ray is asked whether it has a place
_PATIENCE_S = 10.0  # for a process to start, where the nodes have room for all actors
_NEXT_NOTE_S = 30.0

_held_in_forks: list[Any] = []  # see `Fleet._is_forked`


class Task(NamedTuple):
    """A pending call of an actor.

    Attributes:
        worker: Number of the actor.
        method: Method of `RayRolloutWorker`.
        args: Its arguments.
        num_envs: Number of envs that the call concerns.
        tries: Number of actors that were lost during the call.
    """

    worker: int
    method: str
    args: tuple[Any, ...]
    num_envs: int
    tries: int = 0


class Fleet:
    """Actors that each have a vector env.

    Args:
        cluster: The cluster to start them in.
        seats: Start arguments, one per actor.
        bounds: W + 1 numbers: actor w has the envs bounds[w], ..., bounds[w + 1] - 1.
        demand: Resources of each actor.
        start_timeout: Longest wait in seconds until an actor's envs are made.
        shares_cpus: Whether an actor that replaces another shares the CPUs of the others if there
            are no free ones, instead of waiting for a node.

    Attributes:
        openings: The first report of each actor.
        nodes: Id of each actor's node.
        seat_after: Called with the seat of a lost worker and the reason; returns the seat of its
            successor. None raises WorkerDiedError instead of replacing it.
    """

    seat_after: Callable[[Seat, str], Seat] | None = None

    def __init__(
        self,
        cluster: Cluster,
        seats: Sequence[Seat],
        bounds: Sequence[int],
        *,
        demand: Demand,
        start_timeout: float,
        shares_cpus: bool = False,
    ) -> None:
        self._pid = os.getpid()  # a forked copy of the fleet has no connection to Ray
        self.cluster, self.bounds, self.seats = cluster, bounds, list(seats)
        self.start_timeout = start_timeout
        self._demand, self._shares_cpus = demand, shares_cpus
        self._demands = [demand] * len(seats)  # of each actor, as it was started
        self._pending: dict[Any, Task] = {}  # by reference, in the order of the calls
        self._done: list[tuple[Task, Reply]] = []
        self._actors: list[Any] = []
        self.start_s = [0.0] * len(seats)  # until an actor's envs were made
        self.nodes = [""] * len(seats)
        self._here = about_here()["versions"]
        self._logged: set[str] = set()  # differences between nodes that have been logged
        deadline = Deadline(start_timeout)
        try:
            cluster.require_places(len(seats), demand, deadline)
            self.openings = self._open(seats, deadline)
        except BaseException:
            self.stop(0.0)
            raise

    def _open(self, seats: Sequence[Seat], deadline: Deadline) -> list[Opening]:
        """Start an actor for each seat; return their reports once their envs are made."""
        asked = [self._start(seat, self._demand) for seat in seats]
        for seat, reference in zip(seats, asked, strict=True):
            self._take_about(seat, reference, deadline)
        asked = [
            self.cluster.call(self._actors[seat.worker], "open", seat)  # all at the same time
            for seat in seats
        ]
        pairs = zip(seats, asked, strict=True)
        return [self._await_opening(seat, reference, deadline) for seat, reference in pairs]

    def _start(self, seat: Seat, demand: Demand) -> Any:
        """Start an actor; return the reference to its node and versions."""
        actor = self.cluster.start(demand)
        if seat.worker < len(self._actors):
            self._actors[seat.worker] = actor
        else:
            self._actors.append(actor)
        self._demands[seat.worker] = demand
        self.start_s[seat.worker] = -time.monotonic()
        return self.cluster.ask_about(actor)

    def _take_about(self, seat: Seat, reference: Any, deadline: Deadline) -> None:
        """Wait until an actor has started, and compare the versions on its node with those here.

        Raises:
            EnvCreationError: It does not start, or its node lacks this package or has another
                version.
        """
        begin, told_s, may_share = time.monotonic(), 0.0, self._shares_cpus and self._is_open
        who = self.name(seat.worker)
        while not self.cluster.wait([reference], deadline):
            waited_s = time.monotonic() - begin
            if waited_s < _NO_PLACE_S and not deadline.is_over:
                continue
            if deadline.is_over:
                raise EnvCreationError(
                    f"{who} was not ready after {self.start_timeout:g} seconds (start_timeout): "
                    "Ray found no place for its actor, or its process takes longer to start. "
                    f"Room for actors of {self._demand} now: "
                    f"{self.cluster.free_places(self._demand)}"
                )
            node = self.cluster.node_of(self._actors[seat.worker], self._demand)
            if node and node != self.nodes[seat.worker]:  # not on its lost predecessor's node
                continue
            has_room = node or self.cluster.all_places(self._demand) >= len(self.seats)
            if has_room and waited_s < _PATIENCE_S:
                continue
            if may_share:
                may_share, told_s = False, waited_s
                self.cluster.kill(self._actors[seat.worker])
                node = self._node_beside(seat.worker)
                reference = self._start(seat, self.cluster.beside(self._demand, node))
                _logger.warning(
                    "%s shares the CPUs of other actors, as no node has started it for %.0f s",
                    who,
                    waited_s,
                )
            elif not told_s or waited_s - told_s > _NEXT_NOTE_S:
                told_s = waited_s
                _logger.warning(
                    "waiting for a node for %s: after %.0f s none has started its actor of %s; it "
                    "is given up after %g s (start_timeout)",
                    who,
                    waited_s,
                    self._demand,
                    self.start_timeout,
                )
        about = self._fetch(who, "was started", reference, deadline)
        self.nodes[seat.worker] = about["node"]
        self._compare(who, about)

    @property
    def _is_open(self) -> bool:
        """Whether all actors have been started once."""
        return hasattr(self, "openings")

    def _node_beside(self, worker: int) -> str | None:
        """Return the node with the fewest of the other actors; not that of this one."""
        counts = Counter(node for w, node in enumerate(self.nodes) if w != worker)
        del counts[self.nodes[worker]]
        return min(counts, key=counts.__getitem__, default=None)

    def _compare(self, who: str, about: dict[str, Any]) -> None:
        """Compare the versions on a node with those here.

        Raises:
            EnvCreationError: Messages between them would not be understood.
        """
        here, there = self._here, about["versions"]
        where = f"node {about['host']} ({about['node'][:12]})"
        texts = [", ".join(f"{k} {v}" for k, v in found.items()) for found in (there, here)]
        told = f"There: {texts[0]}. Here: {texts[1]}"
        if about["missing"]:
            missing = "; ".join(f"{name} ({why})" for name, why in about["missing"].items())
            raise EnvCreationError(
                f"{who} can't work on {where}, where Python can't import {missing}. {told}. "
                f"Install the same on all nodes (pip install vecenv=={here['vecenv']}), or send "
                "it along with runtime_env={'py_modules': [vecenv]} when connecting"
            )
        differing = [name for name, version in here.items() if there.get(name) != version]
        if any(
            _series(name, here[name]) != _series(name, there.get(name, "")) for name in differing
        ):
            raise EnvCreationError(
                f"{who} can't work on {where}, where {', '.join(differing)} differ too much. "
                f"{told}. Install the same versions on all nodes"
            )
        text = f"{where} has other versions ({', '.join(differing)}). {told}"
        if differing and text not in self._logged:
            self._logged.add(text)
            _logger.warning("%s", text)

    def _fetch(self, who: str, doing: str, reference: Any, deadline: Deadline) -> Any:
        try:
            return self.cluster.fetch(reference, deadline)
        except NotThereError:
            raise EnvCreationError(
                f"{who} was not ready after {self.start_timeout:g} seconds (start_timeout): its "
                "node does not send what it has to say"
            ) from None
        except ActorGoneError as error:
            raise EnvCreationError(f"{who} ended while {doing}: {error}") from error

    def _await_opening(self, seat: Seat, reference: Any, deadline: Deadline) -> Opening:
        who = self.name(seat.worker)
        while not self.cluster.wait([reference], deadline):
            if deadline.is_over:
                raise EnvCreationError(
                    f"{who} was not ready after {self.start_timeout:g} seconds (start_timeout): "
                    "its envs take longer to make"
                )
        reply = self._fetch(who, "its envs were made", reference, deadline)
        if reply.faults:
            raise self._creation_error(reply.faults[0])
        self.start_s[seat.worker] += time.monotonic()
        return reply.result

    def _creation_error(self, fault: EnvFault) -> Exception:
        cause = fault.exception(0)
        what = f"env {fault.env_id} of {self.bounds[-1]}" if fault.env_id >= 0 else "the policy"
        advice = ""
        if isinstance(cause, ImportError):
            advice = (
                "; the actor has to find the modules of the factories: install them on all nodes, "
                "or send them when Ray is connected to, by RayVectorEnv(..., "
                "runtime_env={'working_dir': '.'}), or by ray.init(..., runtime_env=...) if you "
                "call that yourself"
            )
        error = EnvCreationError(
            f"Making {what} failed with {fault.text} in {self.name(fault.worker)}{advice}"
        )
        error.__cause__ = cause
        return error

    def name(self, worker: int) -> str:
        """Name a worker and its envs, for messages."""
        first, last = self.bounds[worker], self.bounds[worker + 1] - 1
        return f"worker {worker} ({f'env {first}' if first == last else f'envs {first}-{last}'})"

    # -- tasks -------------------------------------------------------------------------------

    def ask(self, worker: int, method: str, *args: Any, num_envs: int | None = None) -> None:
        """Start calling a method of an actor."""
        if num_envs is None:
            num_envs = self.bounds[worker + 1] - self.bounds[worker]
        self._submit(Task(worker, method, args, num_envs))

    def _submit(self, task: Task) -> None:
        if self._is_forked:
            raise RuntimeError(
                f"a vector env on Ray was called in process {os.getpid()}, a fork of process "
                f"{self._pid}, which it belongs to; make one of its own in the fork, or call it "
                "there"
            )
        if not self.cluster.is_connected:
            raise WorkerDiedError("Ray has been shut down, and all workers with it.")
        reference = self.cluster.call(self._actors[task.worker], task.method, *task.args)
        self._pending[reference] = task

    def count(self, method: str) -> int:
        """Return the number of envs in calls of a method that have not been taken."""
        tasks = (*self._pending.values(), *(task for task, _ in self._done))
        return sum(task.num_envs for task in tasks if task.method == method)

    def forget(self) -> None:
        """Drop the pending calls; the actors finish them, and the replies are ignored."""
        if self._is_forked:
            _held_in_forks.append((self._pending, self._done))
        self._pending, self._done = {}, []

    @property
    def has_ended(self) -> bool:
        """Whether all actors have been ended by `stop`."""
        return not self._actors

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked copy, in which even deleting references of Ray hangs."""
        return os.getpid() != self._pid

    def take(self, method: str) -> list[tuple[Task, Reply]]:
        """Return the replies to calls of a method so far, in the order of arrival."""
        taken = [pair for pair in self._done if pair[0].method == method]
        if taken:
            self._done = [pair for pair in self._done if pair[0].method != method]
        return taken

    def put_back(self, task: Task, reply: Reply) -> None:
        """Keep a reply for the next `take`, before those that have arrived since."""
        self._done.insert(0, (task, reply))

    def wait(self, method: str, num_envs: int, deadline: Deadline, doing: str) -> None:
        """Wait until there are replies to calls of a method for `num_envs` envs.

        Raises:
            StepTimeoutError: The deadline has passed; the calls stay pending.
            WorkerDiedError: An actor is gone and is not replaced.
        """
        if not self._done and all(task.method == method for task in self._pending.values()):
            self._fetch_at_once(num_envs, deadline)
        while sum(task.num_envs for task, _ in self._done if task.method == method) < num_envs:
            if not self.cluster.is_connected:
                raise WorkerDiedError("Ray has been shut down, and all workers with it.")
            has_come = False
            for reference in self.cluster.wait(list(self._pending), deadline):
                if reference in self._pending:  # replacing an actor changes the references
                    has_come |= self._finish(reference, doing, deadline)
            if not has_come and deadline.is_over:
                late = sorted({task.worker for task in self._pending.values()})
                raise StepTimeoutError(
                    f"{doing} has timed out after {deadline.timeout} second(s): waiting for "
                    f"{', '.join(map(self.name, late))}"
                )

    def _fetch_at_once(self, num_envs: int, deadline: Deadline) -> None:
        """Fetch all pending replies in one call, if the caller waits for all."""
        tasks = list(self._pending.values())
        if sum(task.num_envs for task in tasks) != num_envs:
            return
        replies = self.cluster.fetch_all(list(self._pending), deadline)
        if replies is not None:
            done = [*self._done, *zip(tasks, replies, strict=True)]
            self._pending, self._done = {}, done  # in one statement, so that Ctrl-C can't split it

    def _finish(self, reference: Any, doing: str, deadline: Deadline) -> bool:
        """Fetch one reply, or replace the actor that was lost.

        Returns:
            False if the reply is on a node that does not send it.
        """
        task = self._pending[reference]
        try:
            reply = self.cluster.fetch(reference, deadline)
        except NotThereError:
            return False
        except ActorGoneError as error:
            reason = f"{self.name(task.worker)} is gone during {doing}: {error}"
            self._replace(task, reason, error)
            return True
        done = [*self._done, (task, reply)]
        pending = {other: task for other, task in self._pending.items() if other != reference}
        self._pending, self._done = pending, done  # in one statement, so that Ctrl-C can't split it
        return True

    def replace_late(self, reason: str) -> None:
        """Replace the actors that have not answered, and repeat their calls.

        Raises:
            WorkerDiedError: An actor has been replaced too often during one call, or there is no
                place for another.
        """
        for worker in sorted({task.worker for task in self._pending.values()}):
            first = next(task for task in self._pending.values() if task.worker == worker)
            self._replace(first, f"{self.name(worker)} was ended as it did not answer: {reason}.")

    def _replace(self, failed: Task, reason: str, cause: Exception | None = None) -> None:
        """Replace a lost actor, and repeat its pending calls."""
        worker = failed.worker
        if self.seat_after is None:
            raise WorkerDiedError(reason) from cause
        if failed.tries + 1 >= _MOST_TRIES:
            told = f"{reason} It was actor number {_MOST_TRIES} lost over this."
            raise WorkerDiedError(told) from cause
        self._restart(worker, reason)
        # Replies that have arrived stay valid; the other calls are repeated.
        asked = [reference for reference, task in self._pending.items() if task.worker == worker]
        ready = set(self.cluster.wait(asked, Deadline(0.0)))
        for reference in asked:
            task = self._pending.pop(reference)
            try:
                if reference in ready:
                    reply = self.cluster.fetch(reference, Deadline(_CLOSE_S))
                    self._done.append((task, reply))
                    continue
            except (ActorGoneError, NotThereError):
                pass
            self._submit(task._replace(tries=task.tries + (task is failed)))

    def _restart(self, worker: int, reason: str) -> None:
        """Start an actor in the place of a lost one."""
        assert self.seat_after is not None
        _logger.warning("%s It is replaced.", reason)
        seat = self.seat_after(self.seats[worker], reason)
        deadline = Deadline(self.start_timeout)
        for tries_left in reversed(range(_MOST_TRIES)):
            self.cluster.kill(self._actors[worker])  # it may be alive but unreachable
            try:
                [self.openings[worker]] = self._open([seat], deadline)
                return
            except EnvCreationError as error:
                # Ray places actors on lost nodes until it has noticed the loss.
                if not (tries_left and isinstance(error.__cause__, ActorGoneError)):
                    raise WorkerDiedError(f"{reason} It could not be replaced: {error}") from error
            except BaseException:  # Ctrl-C: an actor without envs must not count as started
                self.cluster.kill(self._actors[worker])
                raise

    # -- end ---------------------------------------------------------------------------------

    def stop(self, timeout: float = _CLOSE_S, release_timeout: float = _RELEASE_S) -> None:
        """Close the envs, then end the actors.

        Args:
            timeout: Longest wait in seconds for the envs to close.
            release_timeout: Longest wait in seconds until Ray has released the actors' resources,
                so that other programs (or the next vector env) find them free.
        """
        self.forget()
        if self._is_forked:
            _held_in_forks.append(self._actors)
            self._actors = []
            return
        try:
            if timeout > 0 and self.cluster.is_connected:
                self._close_envs(Deadline(timeout))
        finally:  # also after Ctrl-C
            wanted = self._amounts_then() if release_timeout > 0 else None
            for actor in self._actors:
                self.cluster.kill(actor)
            self._actors = []
        if wanted:
            self.cluster.await_free(wanted, Deadline(release_timeout))

    def _close_envs(self, deadline: Deadline) -> None:
        with contextlib.suppress(Exception):
            asked = [self.cluster.call(actor, "close") for actor in self._actors]
            while asked and not deadline.is_over:
                done = self.cluster.wait(asked, deadline)
                asked = [reference for reference in asked if reference not in done]

    def _amounts_then(self) -> dict[str, float] | None:
        """Return the resources that will be free when the actors have ended, if known."""
        if not (self._actors and self._demand.is_counted and self.cluster.is_connected):
            return None
        with contextlib.suppress(Exception):
            free = self.cluster.free()
            amounts = {name: free.get(name, 0.0) for name in self._demand.resources}
            for demand in self._demands[: len(self._actors)]:
                for name, amount in demand.resources.items():
                    amounts[name] += amount
            return amounts
        return None


def _series(name: str, version: str) -> list[str]:
    """Return the part of a version that must be equal for two processes to exchange pickles."""
    count = {"vecenv": 9, "Python": 2, "source of vecenv": 0}.get(name, 1)
    return version.split(".")[:count]
