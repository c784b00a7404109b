"""A worker process: makes its envs, then carries out commands until it is told to stop."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env

from vecenv.core.faults import EnvFault, leave_if_copied, leave_when_copied
from vecenv.core.orphans import Family
from vecenv.core.pickling import dumps, loads
from vecenv.core.restarts import with_restarts
from vecenv.core.spaces import require_new_env
from vecenv.workers.arena import Arena
from vecenv.workers.child import ChildSetup, end_child, limit_threads, set_up_child
from vecenv.workers.chunk import Chunk, Outcome, run_here
from vecenv.workers.layout import (
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
from vecenv.workers.links import Link
from vecenv.workers.messages import (
    EnvSpaces,
    Layout,
    ResetRequest,
    answer_bytes,
    message_head,
)
from vecenv.workers.threads import Lanes

__all__ = ["WorkerSetup", "env_spaces", "make_chunk_envs", "run_worker"]

_PR_SET_TIMERSLACK = 29
_REPORTS = ("complete", "publish", "publish_and_take", "take")  # of `Link`

Factories = list[Callable[[], Env]]
# Calls a function with indices of envs and returns the results, each in the env's own thread.
RunEach = Callable[[Callable[[int], Any], Sequence[int]], list[Any]]


class WorkerSetup(NamedTuple):
    """Everything a worker process is started with.

    Attributes:
        worker: Number of the worker.
        first: Its first env.
        child: What every process for envs is given; it has one factory per env of the chunk.
        link, arena, pipe: Ways to the caller.
        may_spin: Whether there is a core for every process.
        restarts: Counts of all envs in shared memory; None if faults are raised.
        lost_because: Why the former worker is gone, for a worker that replaces one.
        entropy: For the global random generators.
    """

    worker: int
    first: int
    child: ChildSetup
    link: Link
    arena: Arena
    pipe: Any
    may_spin: bool
    restarts: Leaf | None
    lost_because: str | None
    entropy: int


def run_worker(setup: WorkerSetup) -> None:
    """Be a worker: the target of the process."""
    family = set_up_child(setup.child, f"vecenv-worker-{setup.worker}")
    leave_when_copied()
    _sharpen_timers()
    limit_threads()
    _reseed(setup.entropy + setup.worker)
    words = setup.arena.view(_words_leaf(setup.link))
    lanes = Lanes(setup.link.layout.lanes) if setup.link.layout.lanes > 1 else None
    run_each = run_here if lanes is None else lanes.run_each
    try:
        setup.pipe.recv_bytes()  # `MAY_MAKE`: an env that is tried out is gone
        made = _make_envs(setup, words, run_each)
        family.look()
        if made is None:
            return
        envs, factories = made
        layout: Layout | None = loads(setup.pipe.recv_bytes())
        if layout is None:  # the envs of another worker could not be made
            close_envs(envs, run_each)
            return
        if setup.restarts is not None:
            counts = setup.arena.view(setup.restarts)[setup.first : setup.first + len(envs)]
            envs = with_restarts(envs, factories, counts, is_callers=False)
        _Worker(setup, envs, lanes, words, layout, family).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the caller is gone
    finally:
        end_child()
        family.look()


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


def _make_envs(
    setup: WorkerSetup, words: np.ndarray, run_each: RunEach
) -> tuple[list[Env], Factories] | None:
    """Make the envs and report their spaces, or what went wrong (then close them, return None)."""
    factories: Factories = []
    current = setup.link.layout.completion(setup.worker) + CURRENT

    def announce(env_id: int) -> None:
        words[current] = env_id

    envs: list[Env] = []
    try:
        factories = setup.child.load()
        envs, fault = make_chunk_envs(factories, setup.first, setup.worker, run_each, announce)
        report = dumps(fault or env_spaces(envs, run_each))
    except BaseException as error:  # reading factories and spaces runs code of users' classes
        env_id = setup.first + getattr(error, "env_index", 0)
        fault = EnvFault.of(error, env_id, setup.worker, "creation")
        report = dumps(fault)
    leave_if_copied()
    setup.pipe.send_bytes(report)
    if fault is None:
        return envs, factories
    close_envs(envs, run_each)
    return None


def make_chunk_envs(
    factories: Factories,
    first: int,
    worker: int,
    run_each: RunEach,
    announce: Callable[[int], None] = lambda env_id: None,
) -> tuple[list[Env], EnvFault | None]:
    """Call the factories one after the other, each in the thread that is to own its env.

    Returns:
        The envs made, and what stopped it, if something did.
    """
    envs: list[Env] = []
    known: dict[int, int] = {}

    def make(index: int) -> Env | EnvFault:
        try:
            env = factories[index]()
            if isinstance(env, Env):
                require_new_env(env, known)
            return env
        except BaseException as error:
            if worker < 0 and isinstance(error, KeyboardInterrupt):
                raise
            return EnvFault.of(error, first + index, worker, "creation")

    for index in range(len(factories)):
        announce(first + index)
        (made,) = run_each(make, (index,))
        if isinstance(made, EnvFault):
            return envs, made
        envs.append(made)
    return envs, None


def close_envs(envs: list[Env], run_each: RunEach) -> None:
    """Close envs that won't be used, each in its own thread, whatever they raise."""

    def close(index: int) -> None:
        with contextlib.suppress(BaseException):
            envs[index].close()

    run_each(close, range(len(envs)))


def env_spaces(envs: list[Env], run_each: RunEach = run_here) -> EnvSpaces:
    """Describe the spaces of a chunk, equal ones once; errors have an `env_index`."""

    def describe(index: int) -> tuple[Any, Any, Any] | BaseException:
        env, about = envs[index], None
        try:
            if index == 0:
                published = getattr(env.unwrapped, "publish", None) or {}
                about = dict(env.metadata), env.render_mode, dict(published)
            return env.observation_space, env.action_space, about
        except BaseException as error:  # attributes may be code of the env's
            vars(error)["env_index"] = index
            return error

    spaces: list[Any] = []
    which: list[int] = []
    abouts: list[Any] = []
    for found in run_each(describe, range(len(envs))):
        if isinstance(found, BaseException):
            raise found
        pair = found[:2]
        abouts.append(found[2])
        known = next((k for k, other in enumerate(spaces) if other == pair), None)
        if known is None:
            known = len(spaces)
            spaces.append(pair)
        which.append(known)
    return EnvSpaces(spaces, which, *abouts[0])


class _Worker:
    """The loop of a worker process."""

    def __init__(
        self,
        setup: WorkerSetup,
        envs: list[Env],
        lanes: Lanes | None,
        words: np.ndarray,
        layout: Layout,
        family: Family,
    ) -> None:
        self._family = family
        self._pipe = setup.pipe
        self._pipe_lock = threading.Lock()
        self._link = setup.link
        self._index = setup.worker
        setup.link.attach(words, is_caller=False, may_spin=setup.may_spin, file=setup.arena.file)
        _cut_in_forks(setup.link)
        # Reading and writing one word takes half the time of the array's.
        self._words = memoryview(words)  # type: ignore[arg-type]  # typeshed before 3.12
        self._command = setup.link.layout.command(setup.worker)
        self._done = int(self._words[self._command + LINE + DONE_SEQUENCE])
        self._chunk = Chunk(envs, setup.worker, setup.first, layout, setup.arena, lanes)
        self._lanes = lanes
        self._inbox = _Inbox(setup.pipe)
        if lanes is None:
            self._chunk.announce = self._announce
        if setup.lost_because is not None:  # before threads step what has been queued meanwhile
            self._chunk.lose_episodes(setup.lost_because)
        if lanes is not None:
            lanes.begin(
                self._chunk,
                setup.worker,
                setup.link,
                self._words,
                step=self._step_one,
                deliver=self._deliver,
            )
            self._chunk.announce = lanes.announce

    def _announce(self, env_id: int) -> None:
        self._words[self._command + LINE + CURRENT] = env_id

    def run(self) -> None:
        """Carry out commands and queued steps until a message says to stop."""
        wait, words, command = self._link.wait_command, self._words, self._command
        while True:
            found = wait(command, self._done, self._lanes is None)
            if found == 1:
                self._done += 1
                if words[command + OPCODE] == OP_STEP:
                    self._step()
                elif not self._carry_out(self._inbox.message(self._done)):
                    return
            elif found == 2:
                self._step_queued()

    def _step(self) -> None:
        begin_ns = perf_counter_ns()
        words, command = self._words, self._command
        actions = None
        slot = words[command + SLOT]
        if words[command + FLAGS] & FLAG_MESSAGE:
            updates = self._inbox.message(self._done)
            self._chunk.learn(updates)
            if "actions" in updates:
                try:
                    actions = loads(updates["actions"])
                except BaseException as error:  # users' classes
                    self._complete(self._chunk.failed(error, 0, "step"), begin_ns)
                    return
        self._complete(self._chunk.step_all(slot, actions), begin_ns)

    def _complete(self, outcome: Outcome, begin_ns: int) -> None:
        """Report that a command is done, then send what it has to say beyond numbers."""
        status, form, answer = outcome
        # Pickled before: what has been announced must come at once.
        pickled = answer and answer_bytes(answer, self._chunk.first, self._index)
        if self._chunk.is_stamped:
            self._chunk.group.mark_done(-1)
        if pickled is None:
            self._link.complete(self._command, status, form, begin_ns, perf_counter_ns())
            return
        status |= HAS_MESSAGE
        self._link.complete(self._command, status, form, begin_ns, perf_counter_ns())
        with self._pipe_lock:
            self._pipe.send_bytes(message_head(-1, self._done) + pickled)

    def _step_one(self, env_id: int) -> Outcome:
        """Step an env that was queued."""
        chunk = self._chunk
        index = env_id - chunk.first
        if chunk.actions is not None:
            return chunk.step_one(index, chunk.actions.one(index))
        pickled = self._inbox.action(env_id)
        try:
            action = loads(pickled)
        except BaseException as error:  # users' classes
            return chunk.failed(error, index, "step")
        return chunk.step_one(index, action)

    def _step_queued(self) -> None:
        """Step the env that was queued first."""
        env_id = self._link.pop(self._index)
        self._announce(env_id)
        self._deliver(env_id, self._step_one(env_id))

    def _deliver(self, env_id: int, outcome: Outcome) -> None:
        """Put the results of one env into the ring."""
        status, form, answer = outcome
        leaves = self._chunk.ring_leaves if form else self._chunk.bare_leaves
        row = self._command, leaves, env_id, status, form
        if answer is None:
            self._link.publish(*row)
        else:
            pickled = answer_bytes(answer, env_id, self._index)
            with self._pipe_lock:
                position = self._link.publish(*row)
                self._pipe.send_bytes(message_head(position, -1) + pickled)
        if self._chunk.is_stamped:
            self._chunk.group.mark_done(env_id - self._chunk.first)

    def _carry_out(self, message: dict[str, Any]) -> bool:
        """Carry out a command that came by message; return False to stop."""
        begin_ns = perf_counter_ns()
        chunk, kind = self._chunk, message["kind"]
        chunk.learn(message)
        if kind == "close":
            chunk.close()
            if self._lanes is not None:
                self._lanes.end()
            self._link.complete(self._command, 0, 0, begin_ns, perf_counter_ns())
            return False
        if kind == "updates":
            outcome = 0, 0, None
        else:
            try:
                request = loads(message["request"])
            except BaseException as error:  # users' classes
                self._complete(chunk.failed(error, 0, kind), begin_ns)
                return True
            # Methods of the chunk: call, set_attr, save_envs and load_envs.
            outcome = self._reset(request) if kind == "reset" else getattr(chunk, kind)(*request)
            self._family.look()
        self._complete(outcome, begin_ns)
        return True

    def _reset(self, request: ResetRequest) -> Outcome:
        if request.drop and self._lanes is None:
            while self._link.pop(self._index) >= 0:
                pass
        outcome = self._chunk.reset(request)
        if request.drop:  # after threads that had taken an id have taken its action
            self._inbox.drop_actions()
        return outcome


class _Inbox:
    """A worker's end of the pipe: messages of commands for the loop, actions for threads.

    A wait for one kind keeps what comes of the other. Everything waited for has been
    announced in shared memory, so it is on its way.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._messages: deque[dict[str, Any]] = deque()
        self._actions: dict[int, Any] = {}
        self._latest = -1  # number of the actions that came last

    def message(self, sequence: int) -> dict[str, Any]:
        """Return the message of a command; others are ones that came twice."""
        with self._lock:
            while True:
                while not self._messages:
                    self._receive()
                message = self._messages.popleft()
                if message["sequence"] == sequence:
                    return message

    def action(self, env_id: int) -> Any:
        """Return the action of an env that was queued."""
        with self._lock:
            while env_id not in self._actions:
                self._receive()
            return self._actions.pop(env_id)

    def drop_actions(self) -> None:
        """Forget the actions that have not been asked for."""
        with self._lock:
            self._actions.clear()

    def _receive(self) -> None:
        message = loads(self._pipe.recv_bytes())
        if message["kind"] == "actions":
            if message["number"] > self._latest:  # otherwise it came before
                self._latest = message["number"]
                self._actions.update(message["actions"])
        else:
            self._messages.append(message)


def _cut_in_forks(link: Link) -> None:
    """Keep processes that envs fork from reporting anything in the worker's name."""

    def leave(*_: Any) -> None:
        leave_if_copied()

    reports: dict[str, Any] = dict.fromkeys(_REPORTS, leave)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: vars(link).update(reports))


def _words_leaf(link: Link) -> Any:
    return Leaf(0, (link.layout.num_words,), np.dtype(np.int64).str)
