"""The actors of a vector env: what they have been asked, what has come back, and who is gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vecenv.errors import EnvCreationError
from vecenv.ray.cluster import ActorGoneError, Cluster
from vecenv.ray.revival import Loss
from vecenv.ray.worker import Opening, Reply, Seat
from vecenv.shm.deadline import Deadline
from vecenv.shm.faults import EnvFault, StepTimeoutError, WorkerDiedError

__all__ = ["Fleet", "Task"]

_MOST_TRIES = 3  # of one task, each with another actor
_CLOSE_S = 5.0


class Task(NamedTuple):
    """What an actor has been asked.

    Attributes:
        worker: Which.
        method: Of `RayRolloutWorker`.
        args: Its arguments.
        num_envs: How many envs it is about.
        tries: How many actors have been lost over it.
    """

    worker: int
    method: str
    args: tuple[Any, ...]
    num_envs: int
    tries: int = 0


class Fleet:
    """Actors that each have a vector env.

    Args:
        cluster: Where they live.
        seats: What they are started with, one per actor.
        bounds: W + 1 numbers: actor w has the envs bounds[w], ..., bounds[w + 1] - 1.
        cpus: CPUs that Ray sets aside for each.
        runtime_env: For the actors' processes, see Ray.
        start_timeout: Longest wait in seconds until an actor's envs are made.

    Attributes:
        openings: What the actors have reported at first.
        loss_of: Given a worker that is gone and why, says what its successor has to know; None
            raises WorkerDiedError instead of replacing it.
    """

    loss_of: Callable[[int, str], Loss | None] | None = None

    def __init__(
        self,
        cluster: Cluster,
        seats: Sequence[Seat],
        bounds: Sequence[int],
        *,
        cpus: float,
        runtime_env: dict[str, Any] | None,
        start_timeout: float,
    ) -> None:
        self.cluster, self.bounds, self.seats = cluster, bounds, list(seats)
        self._cpus, self._runtime_env, self._start_timeout = cpus, runtime_env, start_timeout
        self._pending: dict[Any, Task] = {}  # by reference, in the order of asking
        self._done: list[tuple[Task, Reply]] = []
        self._actors: list[Any] = []
        self.start_s = [0.0] * len(seats)  # until an actor's envs were made
        deadline = Deadline(start_timeout)
        try:
            cluster.require_places(len(seats), cpus, deadline)
            opened = [self._start(seat) for seat in seats]
            self.openings = [
                self._await_opening(seat, reference, deadline)
                for seat, reference in zip(seats, opened, strict=True)
            ]
        except BaseException:
            self.stop(0.0)
            raise

    def _start(self, seat: Seat) -> Any:
        """Start an actor; return the reference to its opening."""
        actor = self.cluster.start(self._cpus, self._runtime_env)
        if seat.worker < len(self._actors):
            self._actors[seat.worker] = actor
        else:
            self._actors.append(actor)
        self.start_s[seat.worker] = -time.monotonic()
        return self.cluster.call(actor, "open", seat)

    def _await_opening(self, seat: Seat, reference: Any, deadline: Deadline) -> Opening:
        who = self.name(seat.worker)
        while not self.cluster.wait([reference], deadline):
            if deadline.is_over:
                raise EnvCreationError(
                    f"{who} was not ready after {self._start_timeout:g} seconds (start_timeout): "
                    "Ray found no place for its actor, or its envs take longer to make. "
                    f"Room for actors of {self._cpus:g} CPUs now: "
                    f"{self.cluster.free_places(self._cpus)}"
                )
        try:
            reply = self.cluster.fetch(reference)
        except ActorGoneError as error:
            raise EnvCreationError(f"{who} ended while its envs were made: {error}") from error
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
                "or pass runtime_env={'py_modules': [...]} or {'env_vars': {'PYTHONPATH': ...}}"
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
        if not self.cluster.is_connected:
            raise WorkerDiedError("Ray has been shut down, and all workers with it.")
        reference = self.cluster.call(self._actors[task.worker], task.method, *task.args)
        self._pending[reference] = task

    def forget(self) -> None:
        """Give up what has been asked; the actors finish it, but nobody will look at it."""
        self._pending.clear()
        self._done.clear()

    def take(self, method: str) -> list[tuple[Task, Reply]]:
        """Return the replies that have come to calls of a method, in their order."""
        taken = [pair for pair in self._done if pair[0].method == method]
        if taken:
            self._done = [pair for pair in self._done if pair[0].method != method]
        return taken

    def put_back(self, task: Task, reply: Reply) -> None:
        """Keep a reply for the next `take`, before those that have come since."""
        self._done.insert(0, (task, reply))

    def wait(self, method: str, num_envs: int, deadline: Deadline, doing: str) -> None:
        """Wait until replies to calls of a method are there for so many envs.

        Raises:
            StepTimeoutError: The deadline has passed; what was asked stays pending.
            WorkerDiedError: An actor is gone and is not replaced.
        """
        if not self._done and all(task.method == method for task in self._pending.values()):
            self._fetch_at_once(num_envs, deadline)
        while sum(task.num_envs for task, _ in self._done if task.method == method) < num_envs:
            if not self.cluster.is_connected:
                raise WorkerDiedError("Ray has been shut down, and all workers with it.")
            ready = self.cluster.wait(list(self._pending), deadline)
            for reference in ready:
                if reference in self._pending:  # an actor replaced meanwhile has other references
                    self._finish(reference, doing)
            if not ready and deadline.is_over:
                late = sorted({task.worker for task in self._pending.values()})
                raise StepTimeoutError(
                    f"{doing} has timed out after {deadline.timeout} second(s): waiting for "
                    f"{', '.join(map(self.name, late))}"
                )

    def _fetch_at_once(self, num_envs: int, deadline: Deadline) -> None:
        """Take everything that is pending in one call, if all of it is wanted."""
        tasks = list(self._pending.values())
        if sum(task.num_envs for task in tasks) != num_envs:
            return
        replies = self.cluster.fetch_all(list(self._pending), deadline)
        if replies is not None:
            self._pending.clear()
            self._done += zip(tasks, replies, strict=True)

    def _finish(self, reference: Any, doing: str) -> None:
        """Take in one reply, or replace the actor that did not give it."""
        task = self._pending[reference]
        try:
            reply = self.cluster.fetch(reference)
        except ActorGoneError as error:
            reason = f"{self.name(task.worker)} is gone during {doing}: {error}"
            self._replace(task, reason)
            return
        del self._pending[reference]
        self._done.append((task, reply))

    def _replace(self, failed: Task, reason: str) -> None:
        """Start another actor in the place of one that is gone, and ask it what is still open."""
        worker = failed.worker
        if self.loss_of is None:
            raise WorkerDiedError(reason)
        if failed.tries + 1 >= _MOST_TRIES:
            raise WorkerDiedError(f"{reason} It was actor number {_MOST_TRIES} lost over this.")
        self._restart(worker, reason)
        # What has come back before is as good as ever; the rest is asked again.
        asked = [reference for reference, task in self._pending.items() if task.worker == worker]
        ready = set(self.cluster.wait(asked, Deadline(0.0)))
        for reference in asked:
            task = self._pending.pop(reference)
            try:
                if reference in ready:
                    self._done.append((task, self.cluster.fetch(reference)))
                    continue
            except ActorGoneError:
                pass
            self._submit(task._replace(tries=task.tries + (task is failed)))

    def _restart(self, worker: int, reason: str) -> None:
        """Start an actor in the place of one that is gone."""
        assert self.loss_of is not None
        seat = self.seats[worker]._replace(loss=self.loss_of(worker, reason))
        deadline = Deadline(self._start_timeout)
        for tries_left in reversed(range(_MOST_TRIES)):
            self.cluster.kill(self._actors[worker])  # if it just can't be reached, it lives on
            try:
                self.openings[worker] = self._await_opening(seat, self._start(seat), deadline)
                return
            except EnvCreationError as error:
                # Ray puts actors on nodes that are gone until it has noticed that they are.
                if not (tries_left and isinstance(error.__cause__, ActorGoneError)):
                    raise WorkerDiedError(f"{reason} It could not be replaced: {error}") from error

    # -- end ---------------------------------------------------------------------------------

    def stop(self, timeout: float = _CLOSE_S) -> None:
        """Let the envs be closed for so many seconds at most, then end the actors."""
        self.forget()
        if timeout > 0 and self.cluster.is_connected:
            deadline = Deadline(timeout)
            with contextlib.suppress(Exception):
                asked = [self.cluster.call(actor, "close") for actor in self._actors]
                while asked and not deadline.is_over:
                    done = self.cluster.wait(asked, deadline)
                    asked = [reference for reference in asked if reference not in done]
        for actor in self._actors:
            self.cluster.kill(actor)
        self._actors = []
