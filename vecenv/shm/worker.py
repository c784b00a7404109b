"""A worker process: makes its envs, then carries out commands until it is told to stop."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env

from vecenv.shm.arena import Arena
from vecenv.shm.chunk import Chunk, Outcome
from vecenv.shm.cores import CoreChoice
from vecenv.shm.faults import EnvFault
from vecenv.shm.guard import GuardedEnv, guard_envs
from vecenv.shm.inbox import Inbox
from vecenv.shm.layout import (
    CORE_SHIFT,
    CURRENT,
    DONE_SEQUENCE,
    FLAG_MESSAGE,
    FLAGS,
    HAS_MESSAGE,
    LINE,
    OP_STEP,
    OPCODE,
    SLOT,
    Leaf,
)
from vecenv.shm.messages import Answer, EnvSpaces, Layout, ResetRequest, dumps, loads
from vecenv.shm.orphans import end_with_caller
from vecenv.shm.standard import end_own, settle, unpickled
from vecenv.shm.starting import limit_threads, register_ids
from vecenv.shm.threads import MOST_THREADS, EnvThreads, WaitMeter
from vecenv.shm.wait import Link

__all__ = ["Seat", "env_spaces", "make_chunk_envs", "run_worker"]

_PR_SET_TIMERSLACK = 29

Factories = list[Callable[[], Env]]


class Seat(NamedTuple):
    """Everything a worker process is started with.

    Attributes:
        worker: Number of the worker.
        first: Its first env.
        factories: One per env of the chunk: a list, or that list pickled.
        registry: Pickled specs of envs registered by the caller; None if forked.
        link, arena, pipe: Ways to the caller.
        caller_pid: Whom to follow into the end.
        is_child_of_main_thread: See `end_with_caller`.
        may_spin: Whether there is a core for every process.
        threads: Threads per worker, at least 1.
        restarts: Counts of all envs in shared memory; None if faults are raised.
        lost_because: Why the former worker is gone, for a worker that replaces one.
        entropy: For the global random generators.
        authkey: The caller's, for the managers of `multiprocessing` that envs talk to.
    """

    worker: int
    first: int
    factories: Factories | bytes
    registry: bytes | None
    link: Link
    arena: Arena
    pipe: Any
    caller_pid: int
    is_child_of_main_thread: bool
    may_spin: bool
    threads: int
    restarts: Leaf | None
    lost_because: str | None
    entropy: int
    authkey: bytes


def run_worker(seat: Seat) -> None:
    """Be a worker: the target of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C and then closes us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_caller(seat.caller_pid, is_child_of_main_thread=seat.is_child_of_main_thread)
    _sharpen_timers()
    settle(seat.worker, seat.authkey)
    limit_threads()
    _reseed(seat.entropy + seat.worker)
    try:
        envs = _make_envs(seat)
        if envs is None:
            return
        layout: Layout = loads(seat.pipe.recv_bytes())
        _Worker(seat, envs, layout).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the caller is gone
    finally:
        end_own()


def _sharpen_timers() -> None:
    """Let sleeps in envs end on time, where Linux would add 50 us to each."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def _reseed(entropy: int) -> None:
    """Give the global generators, which a fork inherits, a state of their own."""
    import random

    random.seed(entropy)
    np.random.seed(entropy % 2**32)  # noqa: NPY002 - envs may use it


def _make_envs(seat: Seat) -> list[Env] | None:
    """Make the envs and report their spaces, or what went wrong (and return None)."""
    factories = seat.factories
    if isinstance(factories, bytes):
        register_ids(seat.registry)
        try:
            factories = unpickled(factories)
        except Exception as error:
            fault = EnvFault.of(error, seat.first, seat.worker, "creation")
            seat.pipe.send_bytes(dumps(fault))
            return None
    envs, fault = make_chunk_envs(factories, seat.first, seat.worker)
    if fault is None:
        try:
            seat.pipe.send_bytes(dumps(env_spaces(envs)))
            if seat.restarts is None:
                return envs
            counts = seat.arena.view(seat.restarts)[seat.first : seat.first + len(envs)]
            return guard_envs(envs, factories, counts)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            fault = EnvFault.of(error, seat.first, seat.worker, "creation")
    for env in envs:
        env.close()
    seat.pipe.send_bytes(dumps(fault))
    return None


def make_chunk_envs(
    factories: Factories, first: int, worker: int
) -> tuple[list[Env], EnvFault | None]:
    """Call the factories; return the envs made and what stopped it, if something did."""
    envs: list[Env] = []
    for index, factory in enumerate(factories):
        try:
            envs.append(factory())
        except Exception as error:
            return envs, EnvFault.of(error, first + index, worker, "creation")
    return envs, None


def env_spaces(envs: list[Env]) -> EnvSpaces:
    """Describe the spaces of a chunk, equal ones once."""
    spaces: list[Any] = []
    which: list[int] = []
    for env in envs:
        pair = (env.observation_space, env.action_space)
        known = next((k for k, other in enumerate(spaces) if other == pair), None)
        if known is None:
            known = len(spaces)
            spaces.append(pair)
        which.append(known)
    first = envs[0]
    published = getattr(first.unwrapped, "publish", None) or {}
    return EnvSpaces(spaces, which, dict(first.metadata), first.render_mode, dict(published))


class _Worker:
    """The loop of a worker process."""

    def __init__(self, seat: Seat, envs: list[Env], layout: Layout) -> None:
        self._pipe = seat.pipe
        self._pipe_lock = threading.Lock()
        self._link = seat.link
        self._index = seat.worker
        seat.link.attach(
            seat.arena.view(_words_leaf(seat.link)), is_caller=False, may_spin=seat.may_spin
        )
        # Reading and writing one word takes half the time of the array's.
        self._words = memoryview(seat.link.words)  # type: ignore[arg-type]  # typeshed before 3.12
        self._command = seat.link.layout.command(seat.worker)
        self._done = int(self._words[self._command + LINE + DONE_SEQUENCE])
        self._chunk = Chunk(envs, seat.worker, seat.first, layout, seat.arena)
        self._chunk.announce = self._announce
        if seat.lost_because is not None:  # before threads step what has been queued meanwhile
            self._lose_episodes(seat.lost_because)
        self._inbox = Inbox(seat.pipe)
        self._threads: EnvThreads | None = None
        self._meter = WaitMeter()
        self._num_threads = seat.threads
        if seat.threads != 0:
            self._meter.is_measuring = False
            if seat.threads > 1:
                self._start_threads(seat.threads)

    def _announce(self, env_id: int) -> None:
        self._words[self._command + LINE + CURRENT] = env_id

    def _lose_episodes(self, reason: str) -> None:
        """Take over from a worker that is gone: every episode of its envs is over."""
        for index, guard in enumerate(self._chunk.group.envs):
            assert isinstance(guard, GuardedEnv)
            obs, _ = guard.env.reset()
            last_obs = obs if self._chunk.has_objects else self._chunk.own_row(index)
            guard.lose(last_obs, reason)

    def run(self) -> None:
        """Carry out commands and queued steps until a message says to stop."""
        wait, words, command = self._link.wait_command, self._words, self._command
        times_on_callers_core = self._link.times_on_callers_core
        core = CoreChoice(times_on_callers_core)
        while True:
            found = wait(command, self._done, self._threads is None)
            if found == 1:
                self._done += 1
                if times_on_callers_core[0] >= core.patience or core.is_watching:
                    core.note_command(self._done, words[command + FLAGS] >> CORE_SHIFT)
                if words[command + OPCODE] == OP_STEP:
                    self._step()
                elif not self._carry_out(self._inbox.message()):
                    return
            elif found == 2:
                self._step_queued()

    def _action(self, env_id: int) -> Any:
        """Return the action of a queued env."""
        if self._chunk.actions is not None:
            return self._chunk.actions.one(env_id - self._chunk.first)
        return self._inbox.action(env_id)

    def _step(self) -> None:
        begin_ns = perf_counter_ns()
        words, command = self._words, self._command
        actions = None
        if words[command + FLAGS] & FLAG_MESSAGE:
            news = self._inbox.message()
            self._chunk.learn(news)
            actions = news.get("actions")
        slot = words[command + SLOT]
        if self._threads is not None:
            if actions is None:
                assert self._chunk.actions is not None
                actions = list(self._chunk.actions.all())
            outcome = self._threads.step_all(slot, actions)
        elif self._meter.is_measuring:
            outcome = self._measured(
                lambda: self._chunk.step_all(slot, actions), len(self._chunk.group.envs)
            )
        else:
            outcome = self._chunk.step_all(slot, actions)
        status, form, answer = outcome
        self._link.complete(command, status, form, begin_ns, perf_counter_ns())
        if answer is not None:
            self._send(answer._replace(sequence=self._done))

    def _measured(self, step: Callable[[], Outcome], num_steps: int) -> Outcome:
        """Step, and start threads if the envs turn out to wait rather than compute."""
        self._meter.begin()
        outcome = step()
        self._meter.end(num_steps)
        if self._meter.found_waiting and not self._meter.is_measuring:
            self._start_threads(MOST_THREADS)
        return outcome

    def _start_threads(self, most: int) -> None:
        num_threads = min(most, len(self._chunk.group.envs))
        if num_threads > 1:
            self._threads = EnvThreads(
                self._chunk,
                self._index,
                num_threads,
                self._link,
                action_of=self._action,
                deliver=self._deliver,
            )

    def _step_queued(self) -> None:
        """Step the env that was queued first."""
        env_id = self._link.pop(self._index)
        index, action = env_id - self._chunk.first, self._action(env_id)
        self._announce(env_id)
        if self._meter.is_measuring:
            outcome = self._measured(partial(self._chunk.step_one, index, action), 1)
        else:
            outcome = self._chunk.step_one(index, action)
        self._deliver(index, outcome)

    def _deliver(self, index: int, outcome: Outcome) -> None:
        """Put the results of one env into the ring."""
        status, form, answer = outcome
        env_id = self._chunk.first + index
        if answer is None:
            self._publish(env_id, status, form)
            return
        with self._pipe_lock:
            position = self._publish(env_id, status, form)
            self._pipe.send_bytes(dumps(answer._replace(position=position)))

    def _publish(self, env_id: int, status: int, form: int) -> int:
        leaves = self._chunk.ring_leaves if form else self._chunk.bare_leaves
        return self._link.publish(self._command, leaves, env_id, status, form)

    def _send(self, answer: Answer) -> None:
        try:
            pickled = dumps(answer)
        except Exception as error:
            fault = EnvFault.of(error, self._chunk.first, self._index, "answer")
            pickled = dumps(Answer(errors=[fault], sequence=answer.sequence))
        with self._pipe_lock:
            self._pipe.send_bytes(pickled)

    def _carry_out(self, message: dict[str, Any]) -> bool:
        """Carry out a command that came by message; return False to stop."""
        begin_ns = perf_counter_ns()
        request: Any = message.get("request")
        self._chunk.learn(message)
        if message["kind"] == "close":
            if self._threads is not None:
                self._threads.drop()
            self._chunk.close()
            self._link.complete(self._command, 0, 0, begin_ns, perf_counter_ns())
            return False
        status, form, answer = 0, 0, None
        if message["kind"] == "reset":
            status, form, answer = self._reset(request)
        elif message["kind"] == "call":
            status, form, answer = self._chunk.call(*request)
        elif message["kind"] == "set_attr":
            status, form, answer = self._chunk.set_attr(*request)
        if answer is not None:
            status |= HAS_MESSAGE
        self._link.complete(self._command, status, form, begin_ns, perf_counter_ns())
        if answer is not None:
            self._send(answer._replace(sequence=self._done))
        return True

    def _reset(self, request: ResetRequest) -> Outcome:
        if request.drop:
            if self._threads is not None:
                self._threads.drop()
            while self._link.pop(self._index) >= 0:
                pass
            self._inbox.drop_actions()
        return self._chunk.reset(request)


def _words_leaf(link: Link) -> Any:
    return Leaf(0, (link.layout.num_words,), np.dtype(np.int64).str)
