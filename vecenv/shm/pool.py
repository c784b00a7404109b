"""The worker processes of a pool: start, liveness, messages with deadlines, and the end."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait as wait_for_any
from typing import Any

import numpy as np
from gymnasium import Env

from vecenv.shm.arena import Arena
from vecenv.shm.deadline import Deadline
from vecenv.shm.faults import WorkerDiedError, describe_exit
from vecenv.shm.messages import dumps, loads
from vecenv.shm.standard import authkey
from vecenv.shm.starting import make_start
from vecenv.shm.wait import CALLER_SLICE_S, Link
from vecenv.shm.worker import Seat, run_worker

__all__ = ["WorkerPool"]

_GRACE_S = 0.3  # between SIGTERM and SIGKILL


class WorkerPool:
    """Processes that step chunks of envs.

    Attributes:
        bounds: Worker w has the envs bounds[w], ..., bounds[w + 1] - 1.
        processes: One per worker.
        start_s: Seconds from the start of each worker until its envs were made.
        factories: One per env.
        restarts: int64 (num_envs,), how often each env was replaced; None if faults are raised.
    """

    def __init__(
        self,
        method: str | None,
        factories: Sequence[Callable[[], Env]],
        bounds: Sequence[int],
        link: Link,
        arena: Arena,
        *,
        daemon: bool,
        threads: int,
        may_spin: bool,
        restarts: np.ndarray | None,
    ) -> None:
        self.bounds = bounds
        self.processes: list[Any] = [None] * (len(bounds) - 1)
        self.start_s = [0.0] * (len(bounds) - 1)
        self._pipes: list[Any] = [None] * (len(bounds) - 1)
        self._method = method
        self.factories = factories
        self._link, self._arena = link, arena
        self._daemon, self._threads, self._may_spin = daemon, threads, may_spin
        self.restarts = restarts
        self._entropy = _global_entropy()
        self._owner_pid = os.getpid()
        self._end = weakref.finalize(self, _kill, self.processes, self._pipes, self._owner_pid)

    @property
    def is_owner(self) -> bool:
        """Whether this process started the workers; a fork of it must leave them alone."""
        return os.getpid() == self._owner_pid

    def start(self, worker: int, lost_because: str | None = None) -> None:
        """Start one worker process."""
        first, last = self.bounds[worker], self.bounds[worker + 1]
        self.start_s[worker] = -time.monotonic()
        start = make_start(self._method, self.factories[first:last])
        here, there = start.context.Pipe()
        seat = Seat(
            worker=worker,
            first=first,
            factories=start.factories,
            registry=start.registry,
            link=self._link,
            arena=self._arena,
            pipe=there,
            caller_pid=os.getpid(),
            is_child_of_main_thread=start.is_own_child,
            may_spin=self._may_spin,
            threads=self._threads,
            restarts=None if self.restarts is None else self._arena.leaf(self.restarts),
            lost_because=lost_because,
            entropy=self._entropy,
            authkey=authkey(),
        )
        process = start.process(
            run_worker, seat, name=f"vecenv-worker-{worker}", daemon=self._daemon
        )
        there.close()
        self.processes[worker], self._pipes[worker] = process, here

    def send(self, worker: int, message: Any) -> None:
        """Send a message to a worker that is about to read it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipes[worker].send_bytes(dumps(message))

    def receive(self, worker: int, deadline: Deadline) -> Any:
        """Return the next message of a worker, or None if the deadline passes first.

        Raises:
            EOFError: The worker is gone.
        """
        pipe = self._pipes[worker]
        try:
            while not pipe.poll(min(CALLER_SLICE_S, deadline.left())):
                if deadline.is_over:
                    return None
                if not self.processes[worker].is_alive() and not pipe.poll(0):
                    raise EOFError
            return loads(pipe.recv_bytes())
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError from error

    def dead(self) -> list[int]:
        """Return the workers whose process has ended."""
        sentinels = {process.sentinel: worker for worker, process in enumerate(self.processes)}
        return sorted(sentinels[ended] for ended in wait_for_any(list(sentinels), 0))

    def epitaph(self, worker: int, doing: str) -> WorkerDiedError:
        """Say which worker is gone, how, and what it was doing."""
        process = self.processes[worker]
        process.join(1)
        first, last = self.bounds[worker], self.bounds[worker + 1]
        envs = f"env {first}" if last == first + 1 else f"envs {first}-{last - 1}"
        cause = ""
        if process.exitcode == -9:
            cause = " The machine may be out of memory, or somebody killed it."
        return WorkerDiedError(
            f"worker {worker} ({envs}, pid {process.pid}) {describe_exit(process.exitcode)} "
            f"during {doing}.{cause}"
        )

    def reap(self, worker: int) -> None:
        """Make sure that a worker's process is gone, and close its pipe."""
        process = self.processes[worker]
        if process.is_alive():
            process.kill()
        process.join()
        self._pipes[worker].close()

    def stop(self, deadline: Deadline) -> None:
        """Wait for the processes' end until the deadline, then end them by signals."""
        if not self.is_owner:
            return
        started = [process for process in self.processes if process is not None]
        self._drain_until_end(started, deadline)
        for end, grace_s in (("terminate", _GRACE_S), ("kill", None)):
            alive = [process for process in started if process.is_alive()]
            for process in alive:
                getattr(process, end)()
            patience = Deadline(grace_s)
            for process in alive:
                process.join(min(patience.left(), 5.0))
        self._end.detach()
        for pipe in self._pipes:
            if pipe is not None:
                pipe.close()
        for process in started:
            if not process.is_alive():
                process.close()

    def _drain_until_end(self, processes: list[Any], deadline: Deadline) -> None:
        """Wait for processes to end, and read what keeps them from it."""
        pipes = [pipe for pipe in self._pipes if pipe is not None]
        alive = [process for process in processes if process.is_alive()]
        while alive and not deadline.is_over:
            sentinels = [process.sentinel for process in alive]
            ready: Any
            for ready in wait_for_any([*sentinels, *pipes], min(deadline.left(), 1.0)):
                if ready in pipes:
                    try:
                        ready.recv_bytes()
                    except (EOFError, OSError):
                        pipes.remove(ready)
            alive = [process for process in alive if process.is_alive()]


def _kill(processes: list[Any], pipes: list[Any], owner_pid: int) -> None:
    """End what a pool that was never closed has left."""
    if os.getpid() != owner_pid:
        return
    for process in processes:
        if process is not None and process.is_alive():
            process.kill()
    for process in processes:
        if process is not None:
            process.join(5)
    for pipe in pipes:
        if pipe is not None:
            pipe.close()


def _global_entropy() -> int:
    """Return a number that depends on NumPy's global generator without advancing it."""
    state: Any = np.random.get_state()  # noqa: NPY002
    return int(np.random.SeedSequence([*state[1][:8].tolist(), int(state[2])]).generate_state(1)[0])
