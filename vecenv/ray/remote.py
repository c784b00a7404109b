"""The calls of `RayVectorEnv` to its actors: waiting, faults, losses, closing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from vecenv.core.base import GymVecEnv
from vecenv.core.deadline import Deadline
from vecenv.core.faults import WorkerDiedError, raise_faults
from vecenv.ray.revival import Loss
from vecenv.ray.stamping import StampMirror
from vecenv.timing.recording import WorkerProcess
from vecenv.timing.stamps import EnvStamps

if TYPE_CHECKING:
    from vecenv.ray.fleet import Fleet, Task
    from vecenv.ray.worker import Reply, Seat

__all__ = ["RemoteEnvs"]

_CLOSE_S = 5.0
_RELEASE_AT_ONCE_S = 2.0  # after a fault a node may be lost, and never give its CPUs back
_RESERVED = ("reset", "step", "close")


class RemoteEnvs(GymVecEnv):
    """Envs in a fleet of actors.

    Attributes:
        num_workers: Number of actors.
        restarts: int64 (num_envs,), how often each env has been replaced.
    """

    num_workers: int
    restarts: np.ndarray
    _fleet: Fleet
    _seeds: list[int | None]  # of the latest resets
    _timeout: float | None
    _steps = 0
    _mirror: StampMirror | None = None  # while timing is enabled
    _stamped_lanes: np.ndarray | None = None

    def _chunk(self, worker: int) -> range:
        """Return the envs of a worker."""
        return range(*self._fleet.bounds[worker : worker + 2])

    def _rows_of(self, worker: int) -> slice:
        return slice(*self._fleet.bounds[worker : worker + 2])

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.of_call(timeout, self._timeout)

    def _give_up(self) -> None:
        """Drop the calls in flight, so that a `reset` is needed."""
        self._fleet.forget()
        self._calls.give_up()

    def _require_known(self, call: str) -> None:
        """Require a `reset` if Ctrl-C interrupted the bookkeeping after a call of the actors."""
        if self._fleet.count("step") != self._calls.num_in_flight:
            self._fleet.forget()
            self._calls.give_up(RuntimeError("Ctrl-C came between a step and its being noted"))
            self._calls.require_ready(call)

    # -- replies -----------------------------------------------------------------------------

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

    def _take_stamps(self, task: Task, reply: Reply) -> Reply:
        """Keep the stamps that came with a reply; return the rest."""
        if reply.stamps is None:
            return reply
        assert self._mirror is not None
        worker = task.worker
        actor = worker, self._fleet.openings[worker].local_pid
        self._mirror.enter(reply.stamps, self._fleet.bounds[worker], actor, perf_counter_ns())
        return reply._replace(stamps=None)

    def _replace_late(self, reason: str) -> None:
        """Replace the actors that have not answered."""
        try:
            self._fleet.replace_late(reason)
        except WorkerDiedError as error:
            self._end_with(error)

    def _end_with(self, error: WorkerDiedError) -> None:
        """Close everything, as a worker is gone, and raise the error."""
        self.close(terminate=True)
        error.args = (f"{error.args[0]} The vector env is closed.",)
        raise error

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

    # -- calls -------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute, and return the results."""
        self._calls.require_idle("call")
        if name in _RESERVED:
            raise ValueError(
                f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
            )
        results = self._ask_all("call", [(name, args, kwargs)] * self.num_workers)
        return tuple(result for part in results for result in part)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env, to one value or to one per env (a list or tuple).

        Raises:
            ValueError: The list has the wrong length.
        """
        self._calls.require_idle("set_attr")
        values = self._value_per_env(values)
        bounds = self._fleet.bounds
        self._ask_all("set_attr", [(name, list(values[a:b])) for a, b in pairwise(bounds)])

    # -- timing and end ----------------------------------------------------------------------

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

    def __del__(self) -> None:
        """End the actors of a vector env that was never closed."""
        if not getattr(self, "closed", True) and not sys.is_finalizing():
            self._fleet.stop(0.0, 0.0)  # `__del__` may run anywhere, so it waits for nothing
            self.close(terminate=True)
