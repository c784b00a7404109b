"""A worker process: it makes its envs, then carries out commands from its channel."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Env

from vecenv.core.errors import EnvFault
from vecenv.core.pickling import loads
from vecenv.core.replacing import with_restarts
from vecenv.timing.stamps import EnvStamps
from vecenv.workers.channel import HEAD, Kind, frame, patient
from vecenv.workers.chunk import Answer, Chunk, EnvSpaces, close_envs, make_envs
from vecenv.workers.memory import Memory
from vecenv.workers.rows import Layout, Tables
from vecenv.workers.starting import ChildSetup, set_up_child

__all__ = ["run_worker"]


def run_worker(
    channel: socket.socket, child: ChildSetup, memory: Memory, worker: int, first: int, entropy: int
) -> None:
    """Run a worker, whose first env is `first`, from the start of its process to the end."""
    set_up_child(child, channel)
    # A fork inherits the global generators: give them another state in each worker.
    random.seed(entropy + worker)
    np.random.seed((entropy + worker) % 2**32)  # noqa: NPY002 - envs may use it
    try:
        with channel:
            _Worker(channel, child, memory, worker, first).run()
    except OSError:
        pass  # the caller is gone, or an env has forked this process, whose channel is closed


class _Worker:
    """The loop of a worker process; see `run_worker` for the arguments."""

    def __init__(
        self, channel: socket.socket, child: ChildSetup, memory: Memory, worker: int, first: int
    ) -> None:
        self._channel, self._child, self._memory = channel, child, memory
        self._recv = channel.recv
        self._worker, self._first = worker, first
        memory.used_bytes = 0  # every process allocates the same arrays from here on
        # First: number of the latest full reset; SEND commands with lower numbers are void.
        # Last: id of the env that is at work.
        self._places: Any = memoryview(memory.allocate((worker + 2, 8), np.int64)[:, 0])  # type: ignore[arg-type]  # typeshed before 3.12
        self._place = self._places[-1:]
        self._factories: list[Callable[[], Env]] = []
        self._envs: list[Env] = []  # kept to close them where no chunk follows, as others failed
        self._chunk: Any = None  # a `Chunk`, once the layout is known
        self._stamps: EnvStamps | None = None

    def run(self) -> None:
        """Carry out commands until told to stop or the caller is gone, then close the envs."""
        while head := self._read(HEAD.size):
            kind, env_id, number, size = HEAD.unpack(head)
            payload = self._read(size) if size else b""
            if kind == Kind.STEP:
                self._step(Kind.DONE, self._first, number, payload)
            elif kind == Kind.SEND:
                if number >= self._places[0]:  # else a full reset has voided it
                    self._step(Kind.ROW, env_id, number, payload)
            elif kind == Kind.CLOSE:
                break
            else:
                self._carry_out(number, payload)
        close_envs(self._envs)

    def _read(self, size: int) -> bytes:
        """Return the next `size` bytes; b"" if the caller is gone."""
        found = self._recv(size)
        while 0 < len(found) < size:
            part = self._recv(size - len(found))
            found = found + part if part else b""
        return found

    def _step(self, kind: int, env_id: int, number: int, payload: bytes) -> None:
        """Step env `env_id` (ROW) or all envs of this worker (DONE), and answer."""
        try:
            actions = loads(payload) if payload else None
        except BaseException as error:  # unpickling runs code of users' classes
            answer: Answer | None = self._failed(error, env_id, "step")
        else:
            if kind == Kind.ROW:
                answer = self._chunk.step_env(env_id - self._first, actions)
            else:
                answer = self._chunk.step(actions)
        pickled = b"" if answer is None else answer.pickled(env_id, self._worker)
        self._channel.sendall(HEAD.pack(kind, env_id, number, len(pickled)) + pickled)

    def _carry_out(self, number: int, payload: bytes) -> None:
        """Call a method of this worker or its chunk; answer if the method returns an `Answer`."""
        name, pickled = loads(payload)
        try:
            request = loads(pickled)
        except BaseException as error:  # unpickling runs code of users' classes
            answer: Answer | None = self._failed(error, self._first, name)
        else:
            answer = getattr(self if hasattr(self, name) else self._chunk, name)(*request)
        if answer is not None:
            pickled = answer.pickled(self._first, self._worker)
            self._channel.sendall(frame(Kind.DONE, self._first, number, pickled))

    def _failed(self, error: BaseException, env_id: int, call: str) -> Answer:
        """Return the fault of something that failed before an env was called."""
        return Answer(errors=[EnvFault.of(error, env_id, self._worker, call)])

    # -- messages: methods that the caller names ---------------------------------------------

    def ping(self) -> Answer:
        """Answer, which shows that no env keeps this worker busy."""
        return Answer()

    def open(self, goes_on: bool) -> Answer:
        """Make the envs; the result is a list of one `EnvSpaces`.

        With `goes_on`, an env that can't be made does not keep the others from being made.
        """
        try:
            self._factories = self._child.load()
            made = make_envs(self._factories, self._first, self._worker, self._place, goes_on)
            self._envs, fault = made
            return Answer(
                [] if fault else [EnvSpaces.of(self._envs)], errors=[fault] if fault else []
            )
        except BaseException as error:  # factories and spaces run code of users' classes
            return self._failed(error, self._first + getattr(error, "env_index", 0), "creation")

    def lay_out(self, layout: Layout, lost: tuple[str, list[Any]] | None, is_stamped: bool) -> None:
        """Allocate the tables and set up the chunk; `lost` says what a former worker has left."""
        if layout.is_patient:
            self._recv = patient(self._channel)
        first, last = self._first, self._first + len(self._envs)
        tables = Tables(self._memory, layout, first, last)
        if layout.restart_envs:
            counts = tables.restarts
            self._envs = with_restarts(self._envs, self._factories, counts)
        self._chunk = Chunk(self._envs, self._worker, first, layout, tables, self._place)
        if lost is not None:
            self._chunk.lose_episodes(*lost)
        self.stamp(is_stamped)

    def stamp(self, is_on: bool) -> None:
        """Begin or stop stamping the envs' steps."""
        chunk = self._chunk
        if is_on and self._stamps is None:
            stamps = EnvStamps.make(chunk.num_envs, self._memory.allocate)
            self._stamps = stamps.part(chunk.first, chunk.last)
        chunk.group.stamp(self._stamps if is_on else None)
