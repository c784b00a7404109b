"""The worker processes of a pool: start, liveness, messages with deadlines, and the end."""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait as wait_for_any
from typing import Any, Protocol

import numpy as np
from gymnasium import Env

from vecenv.core.deadline import Deadline
from vecenv.core.faults import EnvFault, WorkerDiedError, describe_exit
from vecenv.core.interrupts import interrupts_later
from vecenv.core.pickling import dumps, loads
from vecenv.workers.arena import Arena
from vecenv.workers.layout import CURRENT
from vecenv.workers.links import CALLER_SLICE_S, Link
from vecenv.workers.messages import MAY_MAKE, EnvSpaces
from vecenv.workers.process import tell_after_fork
from vecenv.workers.starting import StartMethod, choose_method, make_start
from vecenv.workers.worker import WorkerSetup, run_worker

__all__ = ["StartedProcesses", "WorkerPool"]

_logger = logging.getLogger("vecenv")

_GRACE_S = 0.3  # between SIGTERM and SIGKILL
_JOIN_S = 5.0  # until a process that was killed is gone
_LOOK_S = 0.5  # between two looks after workers that are waited for
_FIRST_NOTE_S, _NEXT_NOTE_S = 30.0, 60.0  # until it is logged which are waited for, and again
_QUIET_S = 30.0  # without a byte of a message that was announced
_PATIENCE_S = 1.0  # with a worker that does not take a message
# How connections of `multiprocessing` say how long a message is: in 4 bytes, or -1 and 8.
_SIZE, _LONG_SIZE, _MOST_SIZE = struct.Struct("!i"), struct.Struct("!Q"), 0x7FFFFFFF
_SMALL = 1 << 14


class WorkerPool:
    """Processes that step chunks of envs.

    Attributes:
        bounds: Worker w has the envs bounds[w], ..., bounds[w + 1] - 1.
        processes: One per worker.
        start_s: Seconds from the start of each worker until its envs were made, without the time
            until it was let.
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
        may_spin: bool,
        restarts: np.ndarray | None,
    ) -> None:
        self.bounds = bounds
        self.processes: list[Any] = [None] * (len(bounds) - 1)  # of `Process`
        self.start_s = [0.0] * (len(bounds) - 1)
        self._pipes: list[_Channel | None] = [None] * (len(bounds) - 1)
        self._method = method
        self.factories = factories
        self._link, self._arena = link, arena
        self._daemon, self._may_spin = daemon, may_spin
        self.restarts = restarts
        self._entropy = _global_entropy()
        self._owner_pid = os.getpid()
        self._end = weakref.finalize(self, _kill, self.processes, self._pipes, self._owner_pid)
        tell_after_fork(self)

    @property
    def is_owner(self) -> bool:
        """Whether this process started the workers; a fork of it must leave them alone."""
        return os.getpid() == self._owner_pid

    @property
    def has_ended(self) -> bool:
        """Whether all processes are gone, and nothing of them is left here."""
        return not self._end.alive

    def leave_to_parent(self, parent_pid: int) -> None:
        """Close this fork's copies of the pipes, by whose end workers know of the caller's."""
        for pipe in self._pipes:
            if pipe is not None:
                pipe.close()

    def start_all(self, method: StartMethod) -> None:
        """Start all worker processes, which make their envs when they are let."""
        for worker in range(len(self.processes)):
            self._start(worker, method, None)
        self._held_since = time.monotonic()

    def let_make(self) -> None:
        """Let all workers make their envs."""
        held_s = time.monotonic() - self._held_since
        for worker in range(len(self.processes)):
            self.start_s[worker] -= held_s
            self.send(worker, MAY_MAKE)

    def restart(self, worker: int, lost_because: str) -> None:
        """Start a worker process anew, in the place of one that is gone for this reason."""
        self._start(worker, choose_method(self._method), lost_because)
        self.send(worker, MAY_MAKE)

    def _start(self, worker: int, method: StartMethod, lost_because: str | None) -> None:
        first, last = self.bounds[worker], self.bounds[worker + 1]
        self.start_s[worker] = -time.monotonic()
        start = make_start(method, self.factories[first:last])
        here, there = _make_pipe()
        setup = WorkerSetup(
            worker=worker,
            first=first,
            child=start.setup,
            link=self._link,
            arena=self._arena,
            pipe=there,
            may_spin=self._may_spin,
            restarts=None if self.restarts is None else self._arena.leaf(self.restarts),
            lost_because=lost_because,
            entropy=self._entropy,
        )
        process = start.process(
            run_worker, setup, name=f"vecenv-worker-{worker}", daemon=self._daemon
        )
        # Known before it is there, so that it is ended, too, if Ctrl-C comes meanwhile.
        self.processes[worker], self._pipes[worker] = process, _Channel(here, process)
        with there:
            process.start()

    def send(self, worker: int, message: bytes) -> None:
        """Send a message to a worker; one that is gone, or does not read, is left to the waits."""
        self._channel(worker).send(message)

    def flush(self) -> None:
        """Send what workers had no room for."""
        for channel in self._pipes:
            if channel is not None and channel.has_unsent:
                channel.flush(0.0)

    def _channel(self, worker: int) -> _Channel:
        channel = self._pipes[worker]
        assert channel is not None
        return channel

    def receive(self, worker: int, deadline: Deadline) -> bytes | None:
        """Return the next message of a worker, or None if the deadline passes first.

        It is the next one until `drop_received`, so that none is lost if Ctrl-C comes meanwhile.

        Raises:
            EOFError: The worker is gone.
        """
        channel = self._channel(worker)
        while True:
            message = channel.receive(min(CALLER_SLICE_S, deadline.left()))
            if message is not None:
                return message
            if deadline.is_over:
                return None

    def drop_received(self, worker: int) -> None:
        """Drop the message that was received last."""
        self._channel(worker).drop_received()

    def receive_announced(self, worker: int) -> bytes:
        """Return a message that has been announced, and is on its way therefore.

        Raises:
            EOFError: The worker is gone; one that goes on with nothing for half a minute is killed.
        """
        begin = time.monotonic()
        while (message := self.receive(worker, Deadline(_LOOK_S))) is None:
            waited_s = time.monotonic() - begin
            if min(waited_s, self._channel(worker).quiet_s()) > _QUIET_S:
                self.end(worker)
        return message

    def receive_openings(
        self, workers: Sequence[int]
    ) -> dict[int, EnvSpaces | EnvFault | WorkerDiedError]:
        """Wait until workers have made their envs, and return what became of it by worker.

        As long as all of them live there is no deadline: making an env may take any time. Which are
        waited for is logged now and then. Once a worker has failed, those after it are waited for
        no longer, and those before it for a moment.
        """
        outcomes: dict[int, EnvSpaces | EnvFault | WorkerDiedError] = {}
        left = list(workers)
        begin, told_s, patience = time.monotonic(), _FIRST_NOTE_S, Deadline(None)
        while left and not patience.is_over:
            wait_for_any([self._channel(worker).file for worker in left], _LOOK_S)
            for worker in list(left):
                try:
                    message = self._channel(worker).receive(0.0)
                except EOFError:
                    self.ensure_end(worker)
                    outcomes[worker] = self.exit_report(worker, "the creation of its envs")
                else:
                    if message is None:
                        continue
                    outcomes[worker] = loads(message)
                    self._channel(worker).drop_received()
                self.start_s[worker] += time.monotonic()
                left.remove(worker)
                if not isinstance(outcomes[worker], EnvSpaces):
                    left = [other for other in left if other < worker]
                    patience = Deadline(_GRACE_S)
                    break
            waited_s = time.monotonic() - begin
            if left and waited_s > told_s:
                told_s = waited_s + _NEXT_NOTE_S
                places = ", ".join(f"worker {w} to make env {self.at_env(w)}" for w in left[:4]) + (
                    ", ..." if len(left) > 4 else ""
                )
                _logger.warning("still waiting for %s (%.0f s)", places, waited_s)
        return outcomes

    def at_env(self, worker: int) -> int:
        """Return the env that a worker has announced to be at."""
        current = int(self._link.words[self._link.layout.completion(worker) + CURRENT])
        return max(current, self.bounds[worker])

    def end(self, worker: int) -> None:
        """Kill a worker's process."""
        process = self.processes[worker]
        process.kill()
        process.join(_JOIN_S)

    def ensure_end(self, worker: int) -> None:
        """Make sure that a worker whose pipe has ended has ended too."""
        self.processes[worker].join(_GRACE_S)
        self.end(worker)

    def dead(self) -> list[int]:
        """Return the workers whose process has ended."""
        return [w for w, process in enumerate(self.processes) if not process.is_alive()]

    def exit_report(self, worker: int, doing: str) -> WorkerDiedError:
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
        self.end(worker)
        self._channel(worker).close()
        self.processes[worker].close()

    def dismiss(self, deadline: Deadline) -> None:
        """Let the workers that have made their envs close them, and end the others."""
        if not self.is_owner:
            return
        waiting = [
            worker
            for worker, channel in enumerate(self._pipes)
            if channel is not None and (self.start_s[worker] >= 0 or channel.has_message())
        ]
        nothing = dumps(None)
        for worker in waiting:
            self.send(worker, nothing)
        for worker, process in enumerate(self.processes):
            if process is not None and worker not in waiting:
                process.kill()
        self.stop(deadline)

    def stop(self, deadline: Deadline) -> None:
        """Wait for the processes' end until the deadline, then end them by signals.

        Envs may have handlers of SIGTERM. It does nothing else, so without time it is left out.
        """
        if not self.is_owner:
            return
        ends = [("terminate", _GRACE_S), ("kill", None)][deadline.is_over :]
        started = [process for process in self.processes if process is not None]
        self._drain_until_end(started, deadline)
        for end, grace_s in ends:
            alive = [process for process in started if process.is_alive()]
            for process in alive:
                getattr(process, end)()
            patience = Deadline(grace_s)
            for process in alive:
                process.join(min(patience.left(), 5.0))
        _let_go(self.processes, self._pipes)
        self._end.detach()

    def kill(self) -> None:
        """Kill the processes that `stop` was kept from ending; again, if this was kept from it."""
        _kill(self.processes, self._pipes, self._owner_pid)
        self._end.detach()

    def _drain_until_end(self, processes: list[Any], deadline: Deadline) -> None:
        """Wait for processes to end, and read what keeps them from it."""
        pipes = {pipe.file: pipe for pipe in self._pipes if pipe is not None}
        alive = [process for process in processes if process.is_alive()]
        while alive and not deadline.is_over:
            endings = [process.ending for process in alive]
            ready: Any
            for ready in wait_for_any([*endings, *pipes], min(deadline.left(), 1.0)):
                if ready in pipes and not pipes[ready].drop():
                    del pipes[ready]
            alive = [process for process in alive if process.is_alive()]


class _HasProcesses(Protocol):
    @property
    def has_ended(self) -> bool:
        """Whether this process has nothing to kill."""
        ...

    def kill(self) -> None:
        """Kill all processes."""


class StartedProcesses(list[_HasProcesses]):
    """What one vector env has started, ended at the latest when nobody has this list any more.

    What a vector env is made of refers to itself in circles. If Ctrl-C comes between the start of
    the workers and the moment in which somebody has the vector env, nothing else would end them
    before the next collection of garbage. A second Ctrl-C waits, see `interrupts_later`; should it
    come in the `__del__` of the vector env, where Python swallows it, this is still to come.
    """

    def end(self) -> None:
        """Kill what has not ended."""
        with interrupts_later():
            for one in self:
                if not one.has_ended:
                    one.kill()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the pools; at the interpreter's end, when names here are gone, others do that."""
        if not is_finalizing():
            self.end()


def _make_pipe() -> tuple[socket.socket, Any]:
    """Return the caller's end of a pipe, and a worker's, which can be sent to a process.

    Both ends are sockets, as those of `multiprocessing` are but in Windows.
    """
    from multiprocess.connection import Connection

    here, there = socket.socketpair()
    there.setblocking(True)  # whatever the program has set by `socket.setdefaulttimeout`
    return here, Connection(there.detach())


class _Channel:
    """The caller's end of the pipe to a worker; no call of it waits for a worker that is gone.

    It never blocks: a worker that is busy sending may have no eye for what it is sent, so both
    directions are served at the same time, and what it does not take within a moment is kept.
    Ctrl-C may come at any time: what has been read or written, and the note of it, are one call.

    Attributes:
        file: The socket.
    """

    def __init__(self, file: socket.socket, process: Any) -> None:
        self.file, self._process = file, process
        file.setblocking(False)
        self._poll: Any = select.poll() if hasattr(select, "poll") else None  # not in Windows
        self._received: list[bytes | memoryview] = []  # from the first message that is not dropped
        self._end = 0  # of that message, once it is whole
        # Each with how many bytes of it were sent at a time.
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._is_over = False  # nothing more comes
        self._heard = time.monotonic()

    @property
    def has_unsent(self) -> bool:
        """Whether the worker has not taken everything."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message, as `Connection.send_bytes` does."""
        size = len(message)
        head = _SIZE.pack(size) if size <= _MOST_SIZE else _SIZE.pack(-1) + _LONG_SIZE.pack(size)
        if size < _SMALL:
            self._unsent.append((memoryview(head + message), []))
        else:
            self._unsent += (memoryview(head), []), (memoryview(message), [])
        self.flush(_PATIENCE_S)

    def flush(self, patience_s: float) -> None:
        """Send what is left, as far as the worker takes it within `patience_s` seconds."""
        patience = Deadline(patience_s)
        while self._unsent:
            part, counts = self._unsent[0]
            if sum(counts) == len(part):
                self._unsent.popleft()
                continue
            try:
                counts.extend(map(self.file.send, (part[sum(counts) :],)))
            except BlockingIOError:
                if patience.is_over or not self._process.is_alive():
                    return
                self._await(min(CALLER_SLICE_S, patience.left()), to_send=True)
                self._read()
                continue
            except OSError:  # the worker is gone, which the next wait will find
                self._unsent.clear()
                return

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next message, until it is dropped; None if it has not come after a wait.

        Raises:
            EOFError: The worker is gone.
        """
        message = self._first()
        if message is None and self._unsent:
            self.flush(0.0)
        if message is None and not self._is_over:
            self._await(timeout_s)
            is_alive = self._process.is_alive()  # before the last look
            while message is None and self._read():
                message = self._first()
            self._is_over |= not is_alive
        if message is None and self._is_over:
            raise EOFError
        return message

    def has_message(self) -> bool:
        """Whether a message has come that was not dropped."""
        self._read()
        return any(map(len, self._received))

    def drop(self) -> bool:
        """Throw away what has been received; return whether more may come."""
        self._received = []
        self._read()
        return not self._is_over

    def drop_received(self) -> None:
        """Drop the message that `receive` has returned."""
        first, *others = self._received
        rest = memoryview(first)[self._end :]
        self._received = [rest, *others] if len(rest) else others

    def close(self) -> None:
        """Close the pipe."""
        self._is_over = True
        self._unsent.clear()
        self.file.close()

    def quiet_s(self) -> float:
        """Return for how many seconds nothing has come."""
        return time.monotonic() - self._heard

    def _await(self, timeout_s: float, *, to_send: bool = False) -> None:
        # No state that Ctrl-C could leave half changed, as a selector of the library's has.
        if self._poll is None:
            select.select([self.file], [self.file] if to_send else [], [], timeout_s)
            return
        self._poll.register(self.file, select.POLLIN | select.POLLOUT * to_send)
        self._poll.poll(timeout_s * 1000)

    def _read(self) -> bool:
        """Read what is there; return whether there was something."""
        if self._is_over:
            return False
        received = self._received
        try:
            received.extend(map(self.file.recv, (1 << 20,)))
        except BlockingIOError:
            return False
        except OSError:
            received.append(b"")
        self._is_over = not received[-1]
        self._heard = time.monotonic()
        return not self._is_over

    def _first(self) -> bytes | None:
        """Return the first message, if it has been received whole."""
        received, begin = self._received, _SIZE.size
        if len(received) > 1 and len(received[0]) < begin + _LONG_SIZE.size:
            received = self._received = [b"".join(received)]
        if not received or len(received[0]) < begin:
            return None
        (size,) = _SIZE.unpack_from(received[0])
        if size < 0:
            if len(received[0]) < begin + _LONG_SIZE.size:
                return None
            (size,) = _LONG_SIZE.unpack_from(received[0], begin)
            begin += _LONG_SIZE.size
        end = begin + size
        if sum(map(len, received)) < end:
            return None
        if len(received[0]) < end:
            received = self._received = [b"".join(received)]
        self._end = end
        return bytes(memoryview(received[0])[begin:end])


def _kill(processes: list[Any], pipes: list[Any], owner_pid: int) -> None:
    """End what a pool that was never closed has left."""
    if os.getpid() != owner_pid:
        return
    for process in processes:
        if process is not None:
            process.kill()
    for process in processes:
        if process is not None:
            process.join(_JOIN_S)
    _let_go(processes, pipes)


def _let_go(processes: list[Any], pipes: list[Any]) -> None:
    """Close what belongs to processes that have ended."""
    for item in (*pipes, *processes):
        if item is not None:
            item.close()


def _global_entropy() -> int:
    """Return a number that depends on NumPy's global generator without advancing it."""
    state: Any = np.random.get_state()  # noqa: NPY002  # the global one
    return int(np.random.SeedSequence([*state[1][:8].tolist(), int(state[2])]).generate_state(1)[0])
