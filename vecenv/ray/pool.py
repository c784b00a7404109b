"""The actors of a vector env, as the caller sees them: calls, replies, losses, replacements.

    caller                                              worker w (an actor of Ray, on some node)
    ------                                              ----------------------------------------
    RayVectorEnv   protocol of calls, results           EnvActor      calls of `ActorPool.ask`
      ActorPool ---- method, arguments ------------->     SyncVectorEnv or a compiled vector env
        _Seat w <--- Reply: result, faults, stamps --     the policy of `collect`
      Cluster      the only module that imports Ray

An actor carries out its calls one after the other, so given-up calls (`forget`) need no other
care. *An actor that is gone* fails all of its calls: another one is started in its place, which
gets the same calls again and reports the lost episodes (`Successors`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

import cloudpickle
from gymnasium import Env

from vecenv.core.arguments import Deadline, check_choice, read_count
from vecenv.core.base import VecEnv
from vecenv.core.errors import EnvCreationError, EnvFault, StepTimeoutError, WorkerDiedError
from vecenv.core.pickling import dump_registry
from vecenv.ray.actor import Reply, Start
from vecenv.ray.cluster import ActorGoneError, Cluster, Demand, about_here
from vecenv.workers.chunk import EnvSpaces

__all__ = [
    "ActorPool", "Call", "Makers", "check_makers", "pickled", "read_demand", "start_of_each",
]  # fmt: skip

_logger = logging.getLogger("vecenv")

_MOST_REPLACEMENTS = 3  # actors for one call, and attempts to start one
_CLOSE_S = 5.0
_NO_PLACE_S = 1.0  # without a reply of a new actor, until nodes are checked for room
_PATIENCE_S = 10.0  # for a process to start, if there is room

_pools: weakref.WeakSet[ActorPool] = weakref.WeakSet()
_held: list[Any] = []  # in forks, where even deleting references of Ray hangs


def _leave_to_parent() -> None:
    """Release everything in a forked child, which has no connection to Ray."""
    for pool in list(_pools):
        _held.append(pool)
        pool.left_by_fork(pool.owner_pid)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


class Call(NamedTuple):
    """A pending call of a method of `EnvActor`, for `num_envs` envs.

    Attributes:
        losses: How many actors were lost over it.
    """

    worker: int
    method: str
    args: tuple[Any, ...]
    num_envs: int
    losses: int = 0


class _Seat:
    """The place of one actor.

    Attributes:
        start: What it was started with, and its successor will be.
        actor: Ray's handle; None while there is none.
        node, host, pid: The node, host and process in which it runs.
        spaces: Report of its envs.
        start_s: Seconds from its start until its envs were made; negative until then.
    """

    def __init__(self, start: Start) -> None:
        self.start = start
        self.actor: Any = None
        self.node = self.host = ""
        self.pid, self.start_s = 0, 0.0
        self.spaces: EnvSpaces | None = None

    @property
    def local_pid(self) -> int:
        """The process id if it is on this machine, else its negative."""
        return self.pid if self.host == socket.gethostname() else -self.pid


class ActorPool:
    """Actors that each have a vector env.

    Args:
        cluster: The cluster to start them in.
        starts: Start of each actor.
        demand: Resources of each actor.
        start_timeout: Longest wait in seconds until an actor's envs are made.

    Attributes:
        cluster, start_timeout: As given.
        seats: The actors.
        owner_pid: The process that has started them; a fork of it must leave them alone.
        left_by_fork: Called in a fork with that process id.
        after_loss: Called with the start of a lost actor and the reason; returns that of its
            successor. None raises WorkerDiedError instead of replacing it.

    Raises:
        ValueError: The cluster is too small.
        EnvCreationError: An env can't be made, or an actor can't be started: other programs use the
            cluster, for example.
    """

    def __init__(
        self,
        cluster: Cluster,
        starts: Sequence[Start],
        demand: Demand,
        start_timeout: float,
    ) -> None:
        self.cluster, self.start_timeout = cluster, start_timeout
        self.seats = [_Seat(start) for start in starts]
        self.owner_pid = os.getpid()
        self.left_by_fork: Callable[[int], None] = lambda parent_pid: None
        self.after_loss: Callable[[Start, str], Start] | None = None
        self._demand = demand
        self._pending: dict[Any, Call] = {}  # by reference, in the order of the calls
        self._done: list[tuple[Call, Reply]] = []
        self._here = about_here()["versions"]
        _pools.add(self)
        try:
            cluster.require_places(len(starts), demand)
            self._open(self.seats, Deadline(start_timeout))
        except BaseException:
            self.stop(0.0)
            raise

    # -- start -------------------------------------------------------------------------------

    def _open(self, seats: Sequence[_Seat], deadline: Deadline) -> None:
        """Start an actor for each seat and let all of them make their envs at the same time."""
        asked = [self._start(seat) for seat in seats]
        for seat, reference in zip(seats, asked, strict=True):
            self._await_process(seat, reference, deadline)
        asked = [self.cluster.call(seat.actor, "open", seat.start) for seat in seats]
        for seat, reference in zip(seats, asked, strict=True):
            reply = self._first_reply(seat, reference, deadline, "its envs were made")
            if reply is None:
                raise self._late(seat, "its envs take longer to make")
            if reply.faults:
                raise self._creation_error(reply.faults[0])
            seat.spaces = reply.result
            seat.start_s += time.monotonic()

    def _start(self, seat: _Seat) -> Any:
        """Start an actor; return the reference to its node and versions."""
        seat.start_s = -time.monotonic()
        seat.actor, reference = self.cluster.start(self._demand)
        return reference

    def _first_reply(self, seat: _Seat, reference: Any, deadline: Deadline, doing: str) -> Any:
        """Wait for a new actor; return its reply, None if the deadline has passed."""
        while not (found := self.cluster.arrived([reference], deadline)):
            if deadline.is_over:
                return None
        if isinstance(error := found[reference], ActorGoneError):
            raise EnvCreationError(f"{seat.start} ended while {doing}: {error}") from error
        return found[reference]

    def _late(self, seat: _Seat, why: str) -> EnvCreationError:
        return EnvCreationError(
            f"{seat.start} was not ready after {self.start_timeout:g} seconds (start_timeout): "
            f"{why}"
        )

    def _await_process(self, seat: _Seat, reference: Any, deadline: Deadline) -> None:
        """Wait until an actor has started, and compare the versions on its node with those here.

        Raises:
            EnvCreationError: It does not start, or its node lacks this package or has another
                version.
        """
        begin, is_told, about = time.monotonic(), False, None
        while about is None:
            patience = Deadline(min(_NO_PLACE_S, deadline.left()))
            about = self._first_reply(seat, reference, patience, "it was started")
            waited_s = time.monotonic() - begin
            if about is None and deadline.is_over:
                raise self._late(
                    seat,
                    "Ray found no place for its actor, or its process takes longer to start. Room "
                    f"for actors of {self._demand} now: {self.cluster.free_places(self._demand)}",
                )
            has_room = self.cluster.all_places(self._demand) >= len(self.seats)
            if not (about or is_told) and (not has_room or waited_s >= _PATIENCE_S):
                is_told = True
                told = "waiting for a node for %s, none has started it for %.0f s (start_timeout)"
                _logger.warning(told, seat.start, waited_s)
        seat.node, seat.host, seat.pid = about["node"], about["host"], about["pid"]
        if self._here != about["versions"]:
            raise EnvCreationError(
                f"{seat.start} can't work on node {seat.host} ({seat.node[:12]}), where versions "
                f"differ too much. There: {about['versions']}. Here: {self._here}. Install the "
                "same on all nodes, or send them along with runtime_env={'py_modules': [vecenv]} "
                "when connecting"
            )

    def _creation_error(self, fault: EnvFault) -> EnvCreationError:
        cause, num_envs = fault.exception(0), self.seats[-1].start.envs.stop
        what = f"env {fault.env_id} of {num_envs}" if fault.env_id >= 0 else "the policy"
        advice = ""
        if isinstance(cause, ImportError):
            advice = (
                "; the actor has to find the modules of the factories: install them on all nodes, "
                "or send them when Ray is connected to, by runtime_env={'working_dir': '.'} of "
                "RayVectorEnv, or of ray.init(...) if you call that yourself"
            )
        who = self.seats[fault.worker].start
        error = EnvCreationError(f"Making {what} failed with {fault.text} in {who}{advice}")
        error.__cause__ = cause
        return error

    # -- calls -------------------------------------------------------------------------------

    def ask(self, worker: int, method: str, *args: Any, num_envs: int | None = None) -> None:
        """Start calling a method of an actor, for all of its envs or `num_envs`."""
        count = self.seats[worker].start.num_envs if num_envs is None else num_envs
        self._submit(Call(worker, method, args, count))

    def _submit(self, call: Call) -> None:
        self._require_ray()
        reference = self.cluster.call(self.seats[call.worker].actor, call.method, *call.args)
        self._pending[reference] = call

    def _require_ray(self) -> None:
        if not self.cluster.is_connected:
            raise WorkerDiedError("Ray has been shut down, and all workers with it.")

    def forget(self) -> None:
        """Forget all requests; the actors finish them, and their answers are dropped."""
        self._pending, self._done = {}, []

    def wait(
        self,
        method: str,
        num_envs: int,
        deadline: Deadline,
        doing: str,
        replaces_late: bool = False,
    ) -> list[tuple[Call, Reply]]:
        """Wait for replies to calls of a method for `num_envs` envs; return all there are.

        Replies to other methods are kept. With `replaces_late` actors that have not answered at the
        deadline are replaced, and the wait begins anew.

        Raises:
            StepTimeoutError: The deadline has passed; the calls stay pending.
            WorkerDiedError: An actor is gone and is not replaced.
        """
        while True:
            found = [pair for pair in self._done if pair[0].method == method]
            if sum(call.num_envs for call, _ in found) >= num_envs:
                self._done = [pair for pair in self._done if pair[0].method != method]
                return found
            self._require_ray()
            is_all = sum(call.num_envs for call in self._pending.values()) == num_envs
            has_come = self._take(deadline, doing, all_at_once=is_all)
            if has_come or not deadline.is_over:
                continue
            late = sorted({call.worker for call in self._pending.values()})
            names = ", ".join(str(self.seats[worker].start) for worker in late)
            told = f"{doing} has timed out after {deadline.timeout} second(s): waiting for {names}"
            if not replaces_late:
                raise StepTimeoutError(told)
            for worker in late:
                who = self.seats[worker].start
                self._replace(worker, f"{who} was ended as it did not answer: {told}.")
            deadline = Deadline(deadline.timeout)

    def _take(self, deadline: Deadline, doing: str, *, all_at_once: bool) -> bool:
        """Take in replies for a short time, losses of actors last; return whether any came."""
        found = self.cluster.arrived(list(self._pending), deadline, all_at_once=all_at_once)
        lost: dict[int, ActorGoneError] = {}
        for reference, reply in found.items():
            if isinstance(reply, ActorGoneError):
                lost.setdefault(self._pending[reference].worker, reply)
            else:
                self._done.append((self._pending.pop(reference), reply))
        for worker, error in lost.items():
            who = self.seats[worker].start
            self._replace(worker, f"{who} is gone during {doing}: {error}", error)
        return bool(found)

    def _replace(self, worker: int, reason: str, cause: Exception | None = None) -> None:
        """Replace a lost actor, and repeat the calls that it has not answered.

        Raises:
            WorkerDiedError: The new one can't be started, or a call has lost too many actors.
        """
        if self.after_loss is None:
            raise WorkerDiedError(reason) from cause
        calls = [call for call in self._pending.values() if call.worker == worker]
        if max(call.losses for call in calls) + 1 >= _MOST_REPLACEMENTS:
            told = f"{reason} It was actor number {_MOST_REPLACEMENTS} lost over this."
            raise WorkerDiedError(told) from cause
        self._pending = {k: call for k, call in self._pending.items() if call.worker != worker}
        _logger.warning("%s It is replaced.", reason)
        seat = self.seats[worker]
        seat.start = self.after_loss(seat.start, reason)
        deadline = Deadline(self.start_timeout)
        for tries_left in reversed(range(_MOST_REPLACEMENTS)):
            self.cluster.kill(seat.actor)  # it may be alive but unreachable
            try:
                self._open([seat], deadline)
                break
            except EnvCreationError as error:
                # Ray places actors on lost nodes until it has noticed the loss.
                if not (tries_left and isinstance(error.__cause__, ActorGoneError)):
                    raise WorkerDiedError(f"{reason} It could not be replaced: {error}") from error
        for call in calls:
            self._submit(call._replace(losses=call.losses + 1))

    # -- end ---------------------------------------------------------------------------------

    def stop(self, timeout: float = _CLOSE_S) -> None:
        """Close the envs, waiting for at most `timeout` seconds, then end the actors."""
        if os.getpid() != self.owner_pid:
            return
        self.forget()
        actors, deadline = [seat.actor for seat in self.seats if seat.actor], Deadline(timeout)
        try:
            with contextlib.suppress(Exception):  # they are ended all the same
                asked = [self.cluster.call(actor, "close") for actor in actors if timeout > 0]
                while asked and self.cluster.is_connected and not deadline.is_over:
                    done = self.cluster.arrived(asked, deadline)
                    asked = [reference for reference in asked if reference not in done]
        finally:  # also after Ctrl-C
            self.kill()

    def kill(self) -> None:
        """End all actors that are left, at once."""
        if os.getpid() == self.owner_pid:
            for seat in self.seats:
                if seat.actor is not None:
                    self.cluster.kill(seat.actor)
                    seat.actor = None


Makers = Sequence[Callable[[], Env]] | Callable[..., VecEnv]

_OWN = {"CPU": "cpus_per_worker", "GPU": "gpus_per_worker", "memory": "memory_per_worker"}


def read_demand(amounts: dict[str, float | None], resources: Any, strategy: Any) -> Demand:
    """Read the options about an actor's resources and placement.

    Args:
        amounts: Amounts of "CPU", "GPU" and "memory"; None for none of the latter.
        resources: Further amounts by name, as given to `RayVectorEnv`.
        strategy: As given there.

    Raises:
        ValueError: An amount or a name is invalid.
    """
    if resources is not None and not isinstance(resources, Mapping):
        raise ValueError(f"resources is {resources!r}, expected amounts by name")
    for name in _OWN.keys() & (resources or {}):
        raise ValueError(f"resources has {name!r}, which is {_OWN[name]} here")
    given: dict[str, Any] = {k: x for k, x in amounts.items() if x is not None or k == "CPU"}
    given |= resources or {}
    for name, amount in given.items():
        if not (isinstance(amount, Real) and float(amount) > 0):
            who = _OWN.get(name, f"resources[{name!r}]")
            raise ValueError(f"{who} is {amount!r}, expected more than 0")
    if isinstance(strategy, str):
        check_choice("scheduling_strategy", strategy, ("SPREAD", "DEFAULT"))
    return Demand(given, strategy)


def check_makers(
    env_fns: Makers, num_envs: int | None, num_workers: int | None, demand: Demand
) -> int:
    """Check the factories and the numbers, before Ray is started; return the number of envs.

    Raises:
        ValueError: The numbers don't fit.
        TypeError: A factory can't be pickled; names it.
    """
    if callable(env_fns):
        if num_envs is None:
            raise ValueError("a factory of vector envs needs num_envs: how many to make in all")
        count = num_envs
    else:
        count = len(env_fns)
        if num_envs not in (None, count):
            raise ValueError(f"num_envs is {num_envs}, but there are {count} factories")
    if count < 1:
        raise ValueError("A vector env needs at least one env, got an empty list of factories")
    if num_workers is not None:
        read_count("num_workers", num_workers, 1, count)
    elif not demand.is_counted:
        raise ValueError("scheduling_strategy with an object needs num_workers: how many actors")
    for index, env_fn in enumerate(() if callable(env_fns) else env_fns):
        pickled(env_fn, f"env_fns[{index}]")
    return count


def start_of_each(
    env_fns: Makers, bounds: Sequence[int], options: dict[str, Any], restart_envs: bool
) -> list[Start]:
    """Return what each actor is started with.

    Args:
        env_fns: Factories of single envs, or one of vector envs.
        bounds: Actor w has the envs bounds[w], ..., bounds[w + 1] - 1.
        options: Options of each actor's vector env.
        restart_envs: Whether an env that raises is replaced.
    """
    starts, registry = [], dump_registry()
    for worker, (first, last) in enumerate(pairwise(bounds)):
        made = env_fns if callable(env_fns) else list(env_fns[first:last])
        maker = pickled((made, options, restart_envs), "env_fns")
        starts.append(Start(worker, first, last - first, maker, registry))
    return starts


def pickled(value: Any, name: str) -> bytes:
    """Pickle an argument of an actor; functions and classes of scripts by value.

    Raises:
        TypeError: The value can't be pickled.
    """
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # pickling runs code of users' classes
        raise TypeError(
            f"{name}, {value!r}, can't be pickled, and so can't be sent to an actor: "
            f"{type(error).__name__}: {error}. Make what it holds (an env, a lock, a file) inside "
            "of the factory instead"
        ) from error
