"""The workers of a vector env, as the caller sees them: start, commands, replies, deaths, end."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import Env, Space

from vecenv.core.arguments import Deadline
from vecenv.core.ending import Watcher, interrupts_later
from vecenv.core.errors import (
    EnvCreationError,
    EnvFault,
    StepTimeoutError,
    WorkerDiedError,
    describe_exit,
)
from vecenv.core.pickling import dumps, loads
from vecenv.core.replacing import with_restarts
from vecenv.core.spaces import BatchedSpaces, require_spaces
from vecenv.machine import forked_with_one_openblas_thread, usable_cores
from vecenv.timing.stamps import EnvStamps
from vecenv.workers.channel import HEAD, Kind, ask, frame
from vecenv.workers.chunk import Answer, Chunk, EnvSpaces, close_envs, make_envs
from vecenv.workers.memory import Memory
from vecenv.workers.plan import Plan
from vecenv.workers.rows import Layout, Tables
from vecenv.workers.starting import Process, start_process, why_fresh
from vecenv.workers.worker import run_worker

__all__ = ["Pool", "spaces_of"]

_logger = logging.getLogger("vecenv")

_LOOK_S = 0.5  # between two checks whether awaited workers are alive
_GRACE_S = 5.0  # for workers to answer a ping after a call was interrupted
_END_S = 0.3  # for a process to end after its channel has ended
_KILL_S = 5.0  # for a process to end after it was killed
_FAILED_S = 2.0  # for envs to close after the pool could not be opened
_FIRST_NOTE_S, _NEXT_NOTE_S = 30.0, 60.0  # until the log names awaited workers, and between notes
_CLOSE_NOTE_S = 5.0  # until the log names the workers that `close` waits for
_SILENT_S, _AGAIN_S = 1.0, 5.0  # until a line says how many envs are made, and until the next
_MOST_REPLACEMENTS = 5  # of one worker in one wait
_READ_BYTES = 1 << 16
_Task = Callable[[], Answer | None]
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()

if hasattr(os, "register_at_fork"):  # the pools that a fork finds belong to its parent
    os.register_at_fork(after_in_child=lambda: [pool.leave_to_parent() for pool in list(_pools)])


class _Seat:
    """One worker as the caller sees it: its process, its channel, and what it owes.

    Attributes:
        worker, first, last: Number of the worker; its envs are first, ..., last - 1.
        process, channel: None while there is none.
        inbox: Bytes received that are not yet a whole frame.
        outbox: Bytes that the socket had no room for yet.
        command, awaits: The latest command, and its number until it is answered, then 0.
        answer: The worker's latest `Answer`, if any.
        sent: Ids of its envs that were sent and have not come back.
        place, since: The env at which it was last seen, and since when (`time.monotonic`).
        is_ready: Whether its envs are made and it knows the layout.
        is_cut: Whether bytes are being read or written; stays True if an exception comes then.
        start_s: Seconds from its start until its envs were made; negative until then.
    """

    def __init__(self, worker: int, first: int, last: int) -> None:
        self.worker, self.first, self.last = worker, first, last
        self.process: Process | None = None
        self.channel: socket.socket | None = None
        self.inbox, self.outbox = bytearray(), bytearray()
        self.command, self.awaits = b"", 0
        self.answer: Answer | None = None
        self.sent: set[int] = set()
        self.place, self.since = -1, 0.0
        self.is_ready = self.is_cut = False
        self.start_s = 0.0

    def __str__(self) -> str:
        """Return the name of the worker in messages."""
        envs = f"envs {self.first}-{self.last - 1}" if self.last > self.first + 1 else ""
        pid = f", pid {self.process.pid}" if self.process else ""
        return f"worker {self.worker} ({envs or f'env {self.first}'}{pid})"

    @property
    def is_busy(self) -> bool:
        """Whether the worker owes an answer."""
        return bool(self.awaits or self.sent)

    def is_alive(self) -> bool:
        """Whether there is a process that has not ended."""
        return self.process is not None and self.process.is_alive()


class Pool:
    """Processes that step chunks of envs, and the chunk that the caller steps itself.

    Attributes:
        plan: The checked arguments.
        memory: Memory shared with the workers.
        tables: The rows of all envs in it, from `open` on.
        seats: The workers.
        missing: Ids of envs that could not be made, with `on_error="restart"`.
        own: The chunk that the caller steps itself, or None.
        number, steps: Number of the latest command, and of the latest step.
        ready: Env ids that have come back, in order of arrival, each with its answer.
        timed_out: Whether the latest wait has timed out, so that its call is still pending.
        is_cut: Whether an exception has interrupted a call.
        left_by_fork: Called in a fork, with the process id of the parent.
    """

    tables: Tables

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.missing: set[int] = set()
        self.memory = Memory()
        self.seats = [_Seat(k, *pair) for k, pair in enumerate(pairwise(plan.bounds))]
        self._owners = [seat for seat in self.seats for _ in range(seat.first, seat.last)]
        self.number = self.steps = 0
        self.ready: deque[tuple[int, Answer | None]] = deque()
        self.timed_out = self.is_cut = False
        self.own: Chunk | None = None
        self._own_envs: list[Env] = []
        self._own_tasks: deque[tuple[int, _Task]] = deque()  # (env id, or -1 for all; task)
        self._own_answer: Answer | None = None
        self.left_by_fork: Callable[[int], None] = lambda parent_pid: None
        # 0: number of the last full reset; w + 1: env at which worker w is. A cache line for each.
        self._places = self.memory.allocate((len(self.seats) + 1, 8), np.int64)[:, 0]
        self._layout: Layout | None = None
        self._is_stamped = False
        self._since = 0  # replies to SEND commands with lower numbers are dropped
        self._left = 0  # workers that have not answered the latest command
        self._dead: list[_Seat] = []  # found dead, not yet reported or replaced
        # From the state of NumPy's global generator, which users may seed, without advancing it.
        state: Any = np.random.get_state()  # noqa: NPY002  # the global one
        seeds = np.random.SeedSequence([*state[1][:8].tolist(), int(state[2])])
        self._entropy = int(seeds.generate_state(1)[0])
        self._owner_pid = os.getpid()
        # It is part of a reference cycle, so it gets descriptors, not channels: channels must close
        # at once when the pool is dropped, as their end tells workers that the caller is gone.
        self._selector: Any = selectors.DefaultSelector()
        self._watcher = Watcher()
        _pools.add(self)

    @property
    def is_owner(self) -> bool:
        """Whether this process started the workers; a fork of it must leave them alone."""
        return os.getpid() == self._owner_pid

    def leave_to_parent(self) -> None:
        """Give up the workers, in a fork of their parent."""
        self._selector.close()
        self._watcher.close(is_owner=False)
        for seat in self.seats:
            if seat.channel is not None:
                seat.channel.close()
            if seat.process is not None:
                seat.process.leave_to_parent()
        self.memory.close()
        self.left_by_fork(self._owner_pid)

    # -- start -------------------------------------------------------------------------------

    def open(self) -> tuple[BatchedSpaces, EnvSpaces]:
        """Start the workers, make all envs, and lay out the memory.

        Returns the batched spaces, and the `EnvSpaces` of the first chunk with an env.

        Raises:
            EnvCreationError: A factory raised, or a worker ended while its envs were made.
            RuntimeError: An env has other spaces than those given; names it.
            Exception: `Plan.batch` raised it.
        """
        plan, reports, count = self.plan, list[EnvSpaces](), self.plan.bounds[0]
        factories = self.plan.factories[:count]
        try:
            self._watcher.start()
            fresh = why_fresh(plan.context)
            with forked_with_one_openblas_thread():  # before the caller makes envs: forks get none
                for seat in self.seats:
                    self._start(seat, fresh)
            if count:
                self._own_envs, fault = make_envs(factories, 0, -1, [0], plan.restart_envs)
                if fault is not None:
                    raise self.creation_error(fault)
                reports.append(EnvSpaces.of(self._own_envs))
            reports += self._make(self.seats)
            about, pairs = self._known(reports)
            spaces = plan.batch(pairs)
            self._layout = layout = Layout(
                self.memory.used_bytes,
                len(self.plan.factories),
                spaces.single_observation_space,
                spaces.single_action_space,
                dict(about.published if plan.publish is None else plan.publish),
                plan.autoreset_mode,
                plan.restart_envs,
                len(self.seats) <= usable_cores(),
            )
            if count:
                tables = Tables(self.memory, layout, 0, count)
                if plan.restart_envs:
                    self._own_envs = with_restarts(self._own_envs, factories, tables.restarts)
                self.own = Chunk(self._own_envs, -1, 0, layout, tables, [0])
            self.tables = Tables(self.memory, layout, 0, len(self.plan.factories))
            for seat in self.seats:
                self._tell(seat, "lay_out", layout, None, False)
                seat.is_ready = True
        except BaseException as error:
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                error.add_note(
                    f"{len(self.seats)} workers need three files each: raise the limit (ulimit -n) "
                    "or take fewer workers (num_workers), which step several envs each."
                )
            with interrupts_later():
                self.stop(Deadline(_FAILED_S if isinstance(error, Exception) else 0))
            raise
        return spaces, about

    def _start(self, seat: _Seat, fresh: str | None) -> None:
        seat.is_ready = seat.is_cut = False
        seat.start_s = -time.monotonic()
        seat.inbox, seat.outbox = bytearray(), bytearray()
        variables = self.plan.variables[seat.worker] if self.plan.variables else None
        with interrupts_later():  # else Ctrl-C could leave a process that nothing refers to
            seat.process, seat.channel = start_process(
                fresh,
                run_worker,
                f"vecenv-worker-{seat.worker}",
                self.plan.factories[seat.first : seat.last],
                *(self.memory, seat.worker, seat.first, self._entropy),
                variables=variables,
            )
            self._watcher.tell("+", seat.process.pid)
        self._selector.register(seat.channel.fileno(), _READ, seat.worker)

    def _make(self, seats: Sequence[_Seat]) -> list[EnvSpaces]:
        """Let workers make their envs, `plan.at_once` workers at a time; return their spaces.

        There is no deadline unless one fails: making an env may take any time. From time to time a
        line says how many envs are made and which workers are waited for.

        Raises:
            EnvCreationError: An env could not be made, or a worker has ended meanwhile.
        """
        self.number += 1
        command = ask(self.number, "open", self.plan.restart_envs)
        queue, making = deque(seats), list[_Seat]()
        begin, patience = time.monotonic(), Deadline(None)
        stream = sys.stderr if self.plan.shows_progress and self._layout is None else None
        first_s, next_s = (_SILENT_S, _AGAIN_S) if stream else (_FIRST_NOTE_S, _NEXT_NOTE_S)
        note, count = Deadline(first_s), len(self.plan.factories)
        while (queue or making) and not patience.is_over:
            while queue and len(making) < (self.plan.at_once or len(seats)):
                making.append(queue.popleft())
                self._command(making[-1], self.number, command)
            if not self._serve(min(_LOOK_S, patience.left())):
                self._look()
            making = [seat for seat in making if seat.awaits and seat not in self._dead]
            if any(seat in self._dead or (seat.answer and seat.answer.errors) for seat in seats):
                queue.clear()
                if patience.timeout is None:  # wait: an earlier env may fail too, and is reported
                    patience = Deadline(_END_S)
            took_s, is_end = time.monotonic() - begin, stream and not (queue or making)
            if note.is_over or (is_end and took_s > first_s):
                left = sum(seat.last - self._making(seat) for seat in (*making, *queue))
                told = f"{count - left} of {count} envs are made ({took_s:.0f} s)"
                if making:
                    places = [f"worker {s.worker} to make env {self._making(s)}" for s in making]
                    told += f", still waiting for {_some(places)}"
                if stream:
                    stream.write(f"vecenv: {told}\n")
                    stream.flush()
                else:
                    _logger.warning(told)
                note = Deadline(next_s)
        return [self._made(seat) for seat in seats if seat.answer or seat in self._dead]

    def _making(self, seat: _Seat) -> int:
        return max(int(self._places[seat.worker + 1]), seat.first)  # -1 or 0 before its first env

    def _made(self, seat: _Seat) -> EnvSpaces:
        """Return a worker's report of its envs, or raise the error of an env it could not make."""
        if seat.answer is None:
            died = WorkerDiedError(self._report(seat, "the creation of its envs"))
            fault = EnvFault.of(died, self._making(seat), seat.worker, "creation")
            raise self.creation_error(fault)
        for fault in seat.answer.errors:
            raise self.creation_error(fault)
        report: EnvSpaces = seat.answer.result[0]
        for fault in report.faults if self._layout is not None else ():
            if fault.env_id not in self.missing:  # the former worker could make this env
                raise self.creation_error(fault)
        self.missing.difference_update(range(seat.first, seat.last))
        self.missing.update(fault.env_id for fault in report.faults)
        return report

    def creation_error(self, fault: EnvFault) -> EnvCreationError:
        """Return the error for a fault in the creation of an env; it names the env."""
        env_id, count = fault.env_id, len(self.plan.factories)
        told = f"Making env {env_id} of {count} failed with {fault.text} (raised by"
        told = f"{told} env_fns[{env_id}], {self.plan.factories[env_id]!r})"
        if "argument: 'num_envs'" in fault.text:
            told += "; if this makes a vector env, give module:KERNELS, or register it with "
            told += "`vector_entry_point`"
        error = EnvCreationError(told)
        error.__cause__ = fault.exception(0)
        if env_id not in (0, *self.plan.bounds):
            error.add_note(
                f"If a process can hold only one such env, give each a worker: num_workers={count}"
            )
        vars(error)["env_index"] = env_id
        return error

    def _known(self, reports: Sequence[EnvSpaces]) -> tuple[EnvSpaces, list[tuple[Space, Space]]]:
        """Return the report with the first env that was made, and the spaces of all envs.

        Envs that could not be made get the spaces of the first one, and a warning in the log.
        """
        plan, made = self.plan, [report for report in reports if report.metadata is not None]
        for fault in (fault for report in reports for fault in report.faults):
            error = self.creation_error(fault)
            if not made:  # no env is left to go on with
                raise error
            _logger.warning("%s; its row is empty until it is reopened", error)
        pairs: list[Any] = [pair for report in reports for pair in report.spaces]
        first = plan.spaces or next(pair for pair in pairs if not isinstance(pair, EnvFault))
        pairs = [first if isinstance(pair, EnvFault) else pair for pair in pairs]
        for env_id, pair in enumerate(pairs if plan.spaces else ()):
            require_spaces(env_id, pair, first, plan.observation_mode, "as `spaces` says")
        return made[0], [first] * len(pairs) if plan.spaces else pairs

    # -- commands ----------------------------------------------------------------------------

    def post(self, kind: int, own: _Task | None, payloads: Sequence[bytes] | None = None) -> None:
        """Send every worker a command, with its payload if payloads are given.

        The caller's own chunk gets the task `own`, which runs at the next `do_own`.
        """
        number = self.number = self.number + 1
        self.steps += kind == Kind.STEP
        command = HEAD.pack(kind, 0, number, 0)
        self.timed_out = False
        self._left, self._own_answer = 0, None
        if own is not None:
            self._own_tasks.append((-1, own))
        self._places[1:] = -1  # no worker is at an env yet
        for seat in self.seats:
            if payloads is not None:
                command = frame(kind, 0, number, payloads[seat.worker])
            self._command(seat, number, command)

    def _command(self, seat: _Seat, number: int, command: bytes) -> None:
        seat.command, seat.awaits, seat.answer = command, number, None
        seat.since = time.monotonic()
        self._left += 1
        self._write(seat, command)

    def send(
        self, env_ids: Sequence[int], actions: Sequence[Any] | None, payloads: Sequence[bytes] = ()
    ) -> None:
        """Start stepping some envs.

        Actions are given if they are not in shared memory; payloads are the same actions, each in a
        list and pickled.
        """
        number = self.number = self.number + 1
        self.steps += 1
        self.timed_out = False
        commands: dict[_Seat, bytes] = {}
        first, now = self.plan.bounds[0], time.monotonic()
        for k, env_id in enumerate(env_ids):
            if env_id < first:
                assert self.own is not None
                own = None if actions is None else [actions[k]]
                self._own_tasks.append((env_id, partial(self.own.step_env, env_id, own)))
                continue
            seat = self._owners[env_id - first]
            if not seat.sent:  # it was idle: its time at an env begins now
                seat.since, self._places[seat.worker + 1] = now, -1
            seat.sent.add(env_id)
            command = frame(Kind.SEND, env_id, number, payloads[k] if payloads else b"")
            commands[seat] = commands.get(seat, b"") + command
        for seat, command in commands.items():
            self._write(seat, command)

    def stamp(self, stamps: EnvStamps | None) -> None:
        """Begin to stamp the envs' steps, or stop with None."""
        self._is_stamped = stamps is not None
        for seat in self.seats:
            self._tell(seat, "stamp", self._is_stamped)
        if self.own is not None:
            self.own.group.stamp(None if stamps is None else stamps.part(0, self.own.last))

    def _tell(self, seat: _Seat, name: str, *request: Any) -> None:
        """Send a worker a message that it does not answer."""
        self._write(seat, ask(0, name, *request))

    def _write(self, seat: _Seat, frames: bytes = b"") -> None:
        """Write to a worker; `_serve` writes the rest later, and notes a worker that is gone."""
        assert seat.channel is not None
        seat.is_cut, was_full = True, bool(seat.outbox)
        seat.outbox += frames
        try:
            del seat.outbox[: seat.channel.send(seat.outbox)]
        except BlockingIOError:
            pass
        except OSError:  # the worker is gone
            seat.outbox.clear()
        if was_full != bool(seat.outbox):  # watch for room in the socket only while bytes are left
            events = _READ if was_full else _READ | _WRITE
            self._selector.modify(seat.channel.fileno(), events, seat.worker)
        seat.is_cut = False

    # -- replies -----------------------------------------------------------------------------

    def do_own(self) -> None:
        """Carry out the tasks of the caller's own chunk."""
        while self._own_tasks:
            env_id, task = self._own_tasks.popleft()
            answer = task()
            if env_id < 0:
                self._own_answer = answer
            else:
                self.ready.append((env_id, answer))

    def answers(self) -> list[tuple[int, int, Answer]]:
        """Return the answers of all chunks that gave one, each with its first env and its row."""
        said = [(0, self._own_answer)] + [(seat.first, seat.answer) for seat in self.seats]
        return [(first, first, answer) for first, answer in said if answer]

    def wait(self, deadline: Deadline, doing: str, count: int | None = None) -> None:
        """Wait until all have answered the latest command, or, if given, `count` envs are ready.

        Messages call the command `doing`.

        Raises:
            StepTimeoutError: The deadline has passed; the command stays pending. With
                `on_error="restart"` a limit for steps and resets does not raise: workers that have
                been at one env for longer are replaced.
            WorkerDiedError: A worker is gone and is not replaced: the vector env must be closed.
        """
        if count is not None:
            self._serve(0.0)  # take in all replies that have arrived, even if `count` are ready
        replaced = Counter[_Seat]()
        slice_s, limit_s, timeout = _LOOK_S, None, deadline.timeout
        if self.plan.restart_envs and deadline.is_limit and timeout is not None:
            # Look at least four times per limit, so that a slow env is found soon after it.
            slice_s, limit_s, timeout = min(_LOOK_S, timeout / 4), timeout, None
        while True:
            while self._dead:
                seat = self._dead.pop(0)
                told = self._report(seat, doing)
                if not self.plan.restart_envs:
                    raise WorkerDiedError(told)
                self._replace(seat, told, replaced)
            for seat in () if limit_s is None else self._standing_still(limit_s):
                told = f"{seat} was killed after {doing} had taken more than {limit_s} second(s)."
                self._replace(seat, told + self._where(seat, doing), replaced)
            if not self._left if count is None else len(self.ready) >= count:
                return
            if not self._serve(slice_s if timeout is None else min(slice_s, deadline.left())):
                self._look()
                if timeout is not None and deadline.is_over and not self._dead:
                    self.timed_out = True
                    raise StepTimeoutError(
                        f"{doing} has timed out after {timeout} second(s): waiting for "
                        f"{self._awaited()}. It stays pending: wait (or `recv`) again, or `reset`, "
                        "which ends the workers that are waited for and makes their envs anew"
                    )

    def _serve(self, timeout_s: float) -> bool:
        """Read and write what is possible within `timeout_s`; return whether anything was."""
        found = self._selector.select(timeout_s)
        for key, events in found:
            seat = self.seats[key.data]
            if events & _WRITE and seat not in self._dead:
                self._write(seat)
            seat.is_cut = True  # for as long as a frame may be half read, see `_Seat`
            if events & _READ:
                try:
                    data = seat.channel.recv(_READ_BYTES)
                    self._read_frames(seat, data) if data else self._note_dead(seat)
                except BlockingIOError:
                    pass
                except OSError:
                    self._note_dead(seat)
            seat.is_cut = False
        return bool(found)

    def _read_frames(self, seat: _Seat, data: bytes) -> None:
        """Carry out the frames in the inbox that are complete."""
        inbox, end = seat.inbox, 0
        inbox += data
        while len(inbox) - (begin := end) >= HEAD.size:
            kind, env_id, number, size = HEAD.unpack_from(inbox, begin)
            end = begin + HEAD.size + size
            if len(inbox) < end:
                break
            payload = bytes(inbox[begin + HEAD.size : end])
            if kind == Kind.DONE and number == seat.awaits:  # else its command was given up
                seat.awaits, seat.answer = 0, self._read(payload, seat.first, seat.worker)
                self._left -= 1
                if seat.start_s < 0:  # minus the time of its start: this is its first answer
                    seat.start_s += time.monotonic()
            elif kind == Kind.ROW and number >= self._since and env_id in seat.sent:
                seat.sent.discard(env_id)
                seat.since = time.monotonic()
                self.ready.append((env_id, self._read(payload, env_id, seat.worker)))
        del inbox[:begin]  # what is left is the beginning of a frame

    def _read(self, payload: bytes, env_id: int, worker: int) -> Answer | None:
        try:
            return Answer(*loads(payload)) if payload else None
        except Exception as error:  # users' classes, whose modules may be missing in this process
            return Answer(errors=[EnvFault.of(error, env_id, worker, "unpickling infos of step")])

    # -- what goes wrong ---------------------------------------------------------------------

    def _look(self) -> None:
        """Note workers that have ended while a process of theirs holds their channel open."""
        for seat in self.seats:
            if seat.is_busy and not seat.is_alive():
                self._note_dead(seat)

    def _note_dead(self, seat: _Seat) -> None:
        if seat not in self._dead:
            self._dead.append(seat)
            self._forget(seat)

    def _forget(self, seat: _Seat) -> None:
        """Stop reading from and writing to a worker."""
        seat.outbox.clear()
        if seat.channel is not None:
            with contextlib.suppress(KeyError, ValueError):  # forgotten already
                self._selector.unregister(seat.channel.fileno())

    def _standing_still(self, limit_s: float) -> list[_Seat]:
        """Return the workers that have been at the same env for longer than the limit."""
        now, found = time.monotonic(), []
        for seat in self.seats:
            if seat.is_busy:
                place = int(self._places[seat.worker + 1])
                if place != seat.place:
                    seat.place, seat.since = place, now
                elif now - seat.since > limit_s:
                    found.append(seat)
        return found

    def _awaited(self) -> str:
        """Return the names of the envs or workers that have not answered."""
        if sent := sorted(env_id for seat in self.seats for env_id in seat.sent):
            return f"envs {', '.join(map(str, sent[:8]))}"
        late = [seat for seat in self.seats if seat.awaits]
        return "; ".join(f"worker {seat.worker} at env {self._making(seat)}" for seat in late)

    def _where(self, seat: _Seat, doing: str) -> str:
        """Return a sentence: at which env a worker is, and with which action if it steps."""
        place = int(self._places[seat.worker + 1])
        if not seat.is_ready or place < seat.first or not seat.is_busy:
            return ""
        if self.tables.actions is None or doing in ("reset", "call"):
            return f" It was at env {place}."
        return f" It was at env {place}, action {self.tables.actions.text(place)}."

    def _report(self, seat: _Seat, doing: str) -> str:
        """Return which worker is gone, how, and what it was doing; end what is left of it."""
        name, exit_code = str(seat), self._end(seat)
        told = f"{name} {describe_exit(exit_code)} during {doing}."
        if exit_code == -9:  # SIGKILL, which the kernel sends if memory runs out
            told += " The machine may be out of memory, or somebody killed it."
        return told + self._where(seat, doing)

    def _end(self, seat: _Seat) -> int | None:
        """End a worker, its channel and what its envs have started; return the exit code, if any.

        The exit code is None if the worker had to be killed here.
        """
        process, exit_code = seat.process, None
        if process is not None:
            process.join(_END_S)
            is_ours = process.is_alive()  # then it is killed here, and its code says nothing
            if is_ours:
                process.kill()
                process.join(_KILL_S)
            exit_code = None if is_ours else process.exit_code
            process.close()
            self._watcher.tell("-", process.pid)
            seat.process = None  # last, as Ctrl-C may come before
        if seat.channel is not None:
            self._forget(seat)
            seat.channel.close()
            seat.channel = None
        return exit_code

    def _replace(self, seat: _Seat, reason: str, replaced: Counter[_Seat]) -> None:
        """End a worker if it still runs, and start another in its place; count it in `replaced`.

        The new worker gets all commands that the former one has not answered. With
        `on_error="restart"` it reports each env as truncated at that env's next step.

        Raises:
            WorkerDiedError: It can't be started, or this wait has replaced it too often.
        """
        seat.is_ready = False
        if seat.process is not None:
            seat.process.kill()
        self._end(seat)
        if seat in self._dead:
            self._dead.remove(seat)
        replaced[seat] += 1
        if replaced[seat] > _MOST_REPLACEMENTS:
            raise WorkerDiedError(
                f"{reason} The {_MOST_REPLACEMENTS} workers that took its place ended, too."
            )
        # Last observations without fixed shape are not in shared memory: the new worker gets them.
        objects = [leaf.target[seat.first : seat.last] for leaf in self.tables.objects]
        number, command, sent = seat.awaits, seat.command, sorted(seat.sent)
        self._left -= number > 0  # `_command` below counts it anew
        try:
            with forked_with_one_openblas_thread():
                self._start(seat, why_fresh(self.plan.context))
            self._make([seat])
        except Exception as error:  # such as pickling factories again, unless forked
            told = error if isinstance(error, EnvCreationError) else repr(error)
            raise WorkerDiedError(f"{reason} It could not be replaced: {told}") from error
        restarts = self.plan.restart_envs
        self.tables.restarts[seat.first : seat.last] += restarts
        lost = (reason, objects) if restarts else None
        self._tell(seat, "lay_out", self._layout, lost, self._is_stamped)
        seat.answer, seat.since, seat.is_ready = None, time.monotonic(), True
        if number:
            self._command(seat, number, command)
        for env_id in sent:  # with no action: the episode is lost, so the action is ignored
            self._write(seat, frame(Kind.SEND, env_id, self.number, dumps([None])))

    def forget_rows(self) -> None:
        """Forget the envs that were sent; workers skip these commands, and replies are dropped."""
        self._since = self._places[0] = self.number + 1
        self.ready.clear()
        self._own_tasks.clear()
        for seat in self.seats:
            seat.sent.clear()

    def give_up(self) -> None:
        """Forget all requests, and replace the workers that can't go on.

        A worker can't go on if it is dead, if an exception came while its bytes were read or
        written, or if it is late: busy after a wait that has timed out, or else without an answer
        to a ping within a few seconds, as its env may hang. Replies of the others are dropped.
        """
        for seat in self.seats:
            is_late = self.timed_out and seat.is_busy
            is_broken = seat.is_cut or seat.process is None or seat in self._dead
            seat.is_ready &= not (is_late or is_broken)
            seat.awaits = 0
            if not seat.is_ready:
                self._forget(seat)
        self._dead.clear()
        self.forget_rows()
        asked = [seat for seat in self.seats if seat.is_ready and not self.timed_out]
        self.number, deadline = self.number + 1, Deadline(_GRACE_S)
        for seat in asked:
            self._command(seat, self.number, ask(self.number, "ping"))
        while any(s.awaits and s not in self._dead for s in asked) and not deadline.is_over:
            self._serve(min(_LOOK_S, deadline.left()))
        for seat in asked:
            seat.is_ready = not seat.awaits and seat not in self._dead
            seat.awaits = 0
        why = "had not answered in time" if self.timed_out else "was cut off"
        for seat in self.seats:
            if not seat.is_ready:
                self._replace(seat, f"{seat} was replaced by `reset`, as it {why}.", Counter())
        self.timed_out = self.is_cut = False

    # -- end ---------------------------------------------------------------------------------

    def stop(self, deadline: Deadline) -> None:
        """Let workers close their envs and end; kill those that are left at the deadline."""
        if not self.is_owner:
            return
        note, pause_s = Deadline(_CLOSE_NOTE_S), 0.0005
        try:
            for seat in self.seats:
                if seat.process is not None and seat.is_cut:
                    seat.process.kill()
                elif seat.process is not None and not deadline.is_over:
                    self._write(seat, frame(Kind.CLOSE, 0, 0))
            while (left := [s for s in self.seats if s.is_alive()]) and not deadline.is_over:
                if note.is_over:
                    note, most_s = Deadline(_FIRST_NOTE_S), deadline.timeout or 0
                    told = "close waits for envs, or what they have started, of %s, at most %.0f s"
                    _logger.warning(told, _some(list(map(str, left))), most_s)
                wait = self._serve if self._selector.get_map() else time.sleep
                wait(min(deadline.left(), pause_s))
                pause_s = min(2 * pause_s, 0.02)
        finally:
            self.kill()

    def kill(self) -> None:
        """End all that is left and release the memory; a second call does nothing."""
        if not self.is_owner:
            return
        with interrupts_later():  # else a second Ctrl-C would leave some workers running
            for seat in self.seats:
                if seat.process is not None and seat.is_alive():
                    seat.process.kill()
            for seat in self.seats:
                self._end(seat)
            self._watcher.close()
            self._selector.close()
            _pools.discard(self)
        own, self._own_envs = self._own_envs, []
        close_envs(own)
        if hasattr(self, "memory"):
            self.memory.close()
            vars(self.own or self).pop("group", None)  # a cycle, which would hold the memory
            for name in ("memory", "own", "tables", "_places", "_own_tasks"):
                vars(self).pop(name, None)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def spaces_of(env_id: str, plan: Plan) -> tuple[Space, Space]:
    """Return the spaces of a registered env, which is made in a short-lived process."""
    plan = plan._replace(factories=[partial(gym.make, env_id)], bounds=[0, 1], publish={})
    pool = Pool(plan._replace(restart_envs=False, shows_progress=False))
    try:
        spaces, _ = pool.open()
        return spaces.single_observation_space, spaces.single_action_space
    finally:
        pool.stop(Deadline(_FAILED_S))
