"""Commands to a pool's workers, their answers, and what happens when a worker is gone."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from vecenv.shm import layout as at
from vecenv.shm.chunk import Chunk, Outcome
from vecenv.shm.columns import ChunkInfos, ColumnReader
from vecenv.shm.deadline import Deadline
from vecenv.shm.faults import EnvFault, StepTimeoutError, WorkerDiedError
from vecenv.shm.layout import FLAG_MESSAGE, HAS_MESSAGE, LINE, OP_MESSAGE, OP_STEP, Leaf
from vecenv.shm.messages import Answer, EnvSpaces, Layout, dumps, loads, split_message
from vecenv.shm.pool import WorkerPool
from vecenv.shm.ready import ReadyRing
from vecenv.shm.slots import SlotTable, object_rows, reward_bits, unwritten
from vecenv.shm.wait import Link

__all__ = ["Exchange", "Gathered"]

# Batched infos, faults, and for every chunk the result of a call.
Gathered = tuple[dict[str, Any], list[EnvFault], list[Any]]


_NOTHING: Outcome = (0, 0, None)
_MOST_REPLACEMENTS = 5  # of one worker in one wait


class Exchange:
    """The caller's end of a pool.

    Attributes:
        steps: Number of the latest step.
        own: The chunk that the caller steps itself, or None.
        timeout: Longest wait in seconds for what is not a step: an announcement; None waits for
            as long as all workers live.
        break_down: Called with an error that can't be survived before it is raised; closes all.
    """

    def __init__(  # noqa: PLR0917 - the parts of a pool, put together in one place
        self,
        pool: WorkerPool,
        link: Link,
        layout: Layout,
        slots: SlotTable,
        columns: ColumnReader,
        ring: ReadyRing,
        own: Chunk | None,
    ) -> None:
        self.pool, self.link, self.layout = pool, link, layout
        self.slots, self.columns, self.ring, self.own = slots, columns, ring, own
        self.num_workers = len(pool.processes)
        self.num_envs = pool.bounds[-1]
        self.steps = 0
        self.targets = [0, 0]
        self.restarts = pool.restarts
        self.before_revival: Callable[[], np.ndarray] = lambda: np.zeros(0, np.int64)
        self.last_action: Callable[[int], str] = lambda env_id: ""
        self._words = memoryview(link.words)  # type: ignore[arg-type]  # typeshed before 3.12
        self._command = [link.layout.command(worker) for worker in range(self.num_workers)]
        self.timeout: float | None = None
        self.break_down: Callable[[Exception], None] = lambda error: None
        self._sent: list[Any] = [None] * self.num_workers  # message of the latest command
        self._stash: dict[tuple[int, int], Answer] = {}  # rows' answers by (worker, position)
        self._replies: dict[int, tuple[int, Answer]] = {}  # by worker: latest sequence and answer
        self._untold: dict[int, dict[str, Any]] = {}  # news by worker
        self._announced = False
        self._stamps: tuple[Leaf, Leaf] | None = None
        self.has_revived = False  # then rows of the ring may be void

    # -- commands ----------------------------------------------------------------------------

    def _gather_news(self) -> None:
        """Put down for every worker what it has not been told: slots, columns, forms, leaves."""
        news: dict[str, Any] = {}
        if self.slots.unsent:
            news["slots"], self.slots.unsent = self.slots.unsent, []
        if self.columns.has_unsent:
            news["columns"], news["forms"] = self.columns.take_unsent()
            for column in news["columns"]:
                arrays = self.columns.ring_arrays(column)
                for leaf, array in zip(column.values, arrays, strict=True):
                    self.ring.add_leaf(leaf, array)
            news["ring_leaves"] = self.ring.leaves()
        if not news:
            return
        if self.own is not None:
            self.own.learn(news)
        for worker in range(self.num_workers):
            untold = self._untold.setdefault(worker, {})
            for name, items in news.items():
                is_list = isinstance(items, list)
                untold[name] = [*untold.get(name, []), *items] if is_list else items

    @property
    def is_settled(self) -> bool:
        """Whether workers have been told everything."""
        return not (self._announced or self._untold or self.slots.unsent or self.columns.has_unsent)

    @property
    def has_news(self) -> bool:
        """Whether there is something that workers have not been told."""
        return bool(self._untold or self.slots.unsent) or self.columns.has_unsent

    def announce(self) -> None:
        """Tell the workers the news without waiting for them; later, if they are busy with some."""
        if self._announced and not all(map(self._is_done, range(self.num_workers))):
            return
        self.finish_announcement()
        for worker in range(self.num_workers):
            self.ask(worker, {"kind": "news"})
        self._announced = True

    def stamp(self, leaves: tuple[Leaf, Leaf] | None) -> None:
        """Let the envs' steps be stamped into these rings and counts; None ends it."""
        self._stamps = leaves
        self.finish_announcement()
        for worker in range(self.num_workers):
            self.ask(worker, {"kind": "news", "stamps": leaves})
        if self.own is not None:
            self.own.learn({"stamps": leaves})
        self.wait(at.COMMANDS, range(self.num_workers), Deadline(self.timeout), "timing")

    def finish_announcement(self) -> None:
        """Wait until the workers have taken notice, before their next command."""
        if self._announced:
            deadline = Deadline(self.timeout, is_limit=True)
            self.wait(at.COMMANDS, range(self.num_workers), deadline, "an announcement")
            self._announced = False

    def ask(self, worker: int, message: dict[str, Any]) -> None:
        """Give one worker a command that comes by message, with the news it has not been told."""
        self._gather_news()
        message = {**message, **self._untold.pop(worker, {})}
        pickled = dumps(message)
        self._sent[worker] = message
        self.targets[at.COMMANDS] += 1
        self.link.post(worker, worker + 1, OP_MESSAGE, 0, 0, self.steps, at.COMMANDS)
        self.pool.send(worker, pickled)

    def ask_all(self, kind: str, requests: Sequence[Any]) -> None:
        """Give every worker its request; if one can't be pickled, none has been given any."""
        pickled = [dumps(request) for request in requests]
        for worker in range(self.num_workers):
            self.ask(worker, {"kind": kind, "request": pickled[worker]})

    def post_step(
        self, slot: int, first: int, last: int, line: int, messages: Sequence[Any] | None = None
    ) -> None:
        """Let workers first, ..., last - 1 step their envs into a slot.

        Args:
            slot: Number of the slot.
            first: Which worker is the first.
            last: Which is the first that isn't meant.
            line: Line on which they report.
            messages: Per worker the actions, if these travel by message.
        """
        self.finish_announcement()
        flags = 0
        # What users' objects need is pickled first: an error here leaves nothing half done.
        pickled = None if messages is None else [dumps(part) for part in messages]
        if messages is not None or self.has_news:
            flags = FLAG_MESSAGE
            self._gather_news()
            for worker in range(first, last):
                self._sent[worker] = {"kind": "step", **self._untold.pop(worker, {})}
                if pickled is not None:
                    self._sent[worker]["actions"] = pickled[worker]
        self.targets[line] += last - first
        self.link.post(first, last, OP_STEP, slot, flags, self.steps, line)
        if flags:
            for worker in range(first, last):
                self.pool.send(worker, dumps(self._sent[worker]))

    def step_at_once(self, slot: int) -> tuple[int, Outcome | None]:
        """Let all step into a slot, with shared actions and no news to tell.

        Returns:
            The workers' status bits, or -1 if they take longer than one short wait; and the outcome
            of the caller's own chunk, None if it has nothing to say.
        """
        self.steps += 1
        target = self.targets[0] = self.targets[0] + self.num_workers
        if self.own is None:
            link = self.link.post_and_wait
            return link(target, self.num_workers, slot, 0, self.steps, OP_STEP), None
        self.link.post(0, self.num_workers, OP_STEP, slot, 0, self.steps, 0)
        outcome = self.own.step_all(slot)
        status = self.link.wait_done(0, target, 0, self.num_workers)
        return status, None if outcome == _NOTHING else outcome

    def ask_to_close(self, deadline: Deadline) -> None:
        """Ask every worker to close its envs and end, as soon as it has finished what it does."""
        left = set(range(self.num_workers))
        while left and not deadline.is_over:
            gone = self.pool.dead()
            for worker in list(left):
                if worker in gone:
                    left.discard(worker)
                elif self._is_done(worker):
                    self.ask(worker, {"kind": "close"})
                    left.discard(worker)
            if left:
                time.sleep(0.001)

    # -- waiting -----------------------------------------------------------------------------

    def wait(self, line: int, workers: range, deadline: Deadline, doing: str) -> int:
        """Wait until all commands of a line are done; return the status bits of `workers`.

        Raises:
            StepTimeoutError: The deadline has passed; the commands stay pending. Not where faults
                are survived and the deadline is the limit of a step or reset: workers that are late
                are replaced then, once each.
            WorkerDiedError: A worker is gone and is not replaced.
        """
        replaced: Counter[int] = Counter()
        late: set[int] = set()
        while True:
            status = self.link.wait_done(line, self.targets[line], workers.start, workers.stop)
            if status >= 0:
                return status
            self.check_workers(doing, replaced)
            if deadline.is_over:
                again = {w for w in workers if not self._is_done(w)}
                if self.restarts is None or not deadline.is_limit or not again or again & late:
                    raise StepTimeoutError(self._late(workers, deadline, doing))
                for worker in sorted(again):
                    self.replace_late(worker, deadline.timeout, doing)
                late |= again
                deadline = Deadline(deadline.timeout, is_limit=True)

    def check_workers(self, doing: str, replaced: Counter[int] | None = None) -> None:
        """Replace workers that are gone, or say which one is.

        Args:
            doing: What is being waited for.
            replaced: How often workers have been replaced in this wait; changed in place.
        """
        self.pool.flush()
        for worker in self.pool.dead():
            error = self.pool.epitaph(worker, doing)
            self._tell_env(error, worker)
            if self.restarts is None:
                self.break_down(error)
                raise error
            if replaced is not None:
                replaced[worker] += 1
                if replaced[worker] > _MOST_REPLACEMENTS:
                    error.args = (f"{error.args[0]} So have its last {_MOST_REPLACEMENTS}.",)
                    self.break_down(error)
                    raise error
            self._revive(worker, str(error))

    def _tell_env(self, error: Exception, worker: int) -> None:
        """Add to an error at which env a worker was."""
        stuck = self._stuck_at(worker)
        if len(stuck) == 1 or (stuck and self.link.layout.lanes == 1):
            action = self.last_action(stuck[0])
            told = f" It was at env {stuck[0]}" + (f", action {action}." if action else ".")
        elif stuck:
            told = f" It was at envs {', '.join(map(str, stuck[:8]))}."
        else:
            return
        error.args = (error.args[0] + told,)

    def replace_late(self, worker: int, timeout: float | None, doing: str) -> None:
        """End a worker that has not answered in time, and start another in its place."""
        process = self.pool.processes[worker]
        first, last = self.pool.bounds[worker], self.pool.bounds[worker + 1]
        error = WorkerDiedError(
            f"worker {worker} (envs {first}-{last - 1}, pid {process.pid}) was killed after "
            f"{doing} had taken more than {timeout} second(s)."
        )
        self._tell_env(error, worker)
        self._revive(worker, str(error))

    def _late(self, workers: range, deadline: Deadline, doing: str) -> str:
        late = [w for w in workers if not self._is_done(w)]
        parts = []
        for worker in late:
            first, last = self.pool.bounds[worker], self.pool.bounds[worker + 1]
            stuck = self._stuck_at(worker)
            at_envs = ", ".join(map(str, stuck[:8])) or f"one of {first}-{last - 1}"
            parts.append(f"worker {worker} at env {at_envs}")
        return (
            f"{doing} has timed out after {deadline.timeout} second(s): waiting for "
            f"{'; '.join(parts) or 'nobody'}. It stays pending: wait again, or close"
        )

    def _is_done(self, worker: int) -> bool:
        command = self._command[worker]
        return self._words[command + at.SEQUENCE] == self._words[command + LINE + at.DONE_SEQUENCE]

    def _stuck_at(self, worker: int) -> list[int]:
        """Return the envs at which a worker is, as far as shared memory shows."""
        first, last = self.pool.bounds[worker], self.pool.bounds[worker + 1]
        command = self._command[worker]
        if not self._is_done(worker) and self._words[command + at.OPCODE] == OP_STEP:
            rows = self.slots.rows(self._words[command + at.SLOT])
            bits = reward_bits(rows.rewards)[first:last]
            missing = np.flatnonzero(bits == unwritten(bits))
            return (first + missing).tolist()
        if self.link.layout.lanes > 1:
            lines = self.link.layout.lane_queues(worker)
            found = {self._words[line + at.LANE_CURRENT] - 1 for line in lines}
        else:
            found = {self._words[command + LINE + at.CURRENT]}
        return sorted(env_id for env_id in found if first <= env_id < last)

    # -- answers -----------------------------------------------------------------------------

    def gather(self, workers: range | list[int], own: Outcome | None) -> Gathered:
        """Collect what workers (and the caller's own chunk) had to say beyond numbers.

        Raises:
            InfoError: The infos can't be batched; the rest has been collected.
        """
        faults: list[EnvFault] = []
        results: list[Any] = []
        chunks: list[ChunkInfos] = []
        parts: list[tuple[int, Answer | None, slice]] = []  # form, answer, rows
        if own is not None:
            assert self.own is not None
            parts.append((own[1], own[2], slice(self.own.first, self.own.last)))
        for worker in workers:
            status = self._words[self._command[worker] + LINE + at.STATUS]
            rows = slice(self.pool.bounds[worker], self.pool.bounds[worker + 1])
            answer = self._answer(worker) if status & HAS_MESSAGE else None
            parts.append((status >> at.STATUS_BITS, answer, rows))
        for form, answer, rows in parts:
            if form:
                chunks.append(ChunkInfos(form, (answer and answer.infos) or {}, rows))
            if answer is not None:
                faults += answer.errors
                results.append(answer.result)
                for leaf, items in zip(self.objects, answer.objects, strict=False):
                    leaf.target[rows] = items
        if faults or not chunks:
            return {}, faults, results
        first = 0 if self.own is not None else self.pool.bounds[workers[0]]  # halves have no own
        last = self.pool.bounds[workers[-1] + 1] if workers else self.pool.bounds[0]
        return self.columns.collect(chunks, first, last), faults, results

    objects: Sequence[Any] = ()

    def bind_objects(self, rows: Any) -> None:
        """Set the rows of which the leaves without fixed shape come by message."""
        self.objects = list(object_rows(rows))

    def _answer(self, worker: int) -> Answer:
        """Receive the answer to a worker's latest command."""
        sequence = self._words[self._command[worker] + at.SEQUENCE]
        while True:
            if worker in self._replies:
                found, answer = self._replies.pop(worker)
                if found == sequence:
                    return answer
            if not self._receive(worker):
                return Answer()  # it is gone, and has been replaced

    def has_row_answer(self, worker: int, position: int) -> bool:
        """Receive the answer that belongs to a row of the ring; return whether there is one.

        There is none if the worker has died before it could send it; the row is void then.
        """
        while (worker, position) not in self._stash:
            if not self._receive(worker):
                return False
        return True

    def row_answer(self, worker: int, position: int) -> Answer:
        """Return the answer that belongs to a row of the ring, which must have been received."""
        return self._stash.pop((worker, position))

    def _receive(self, worker: int) -> bool:
        """Receive a message that a worker has announced; return False if it has been replaced.

        What has been announced has been pickled, and has only to be written into the pipe.

        Raises:
            WorkerDiedError: It is gone, or does not go on, and is not replaced.
        """
        try:
            message = self.pool.receive_announced(worker)
        except EOFError:
            self.pool.ensure_end(worker)
            self.check_workers("its answer")
            return False
        self._take_in(worker, message)
        return True

    def _take_in(self, worker: int, message: bytes) -> None:
        position, sequence, pickled = split_message(message)
        try:
            answer: Answer = loads(pickled)
        except Exception as error:  # users' classes, which may be unknown here
            env_id = self.pool.bounds[worker]
            if position >= 0:
                env_id = int(self.ring.words(slice(position % self.ring.size, None))[0, at.ROW_ENV])
            answer = Answer(errors=[EnvFault.of(error, env_id, worker, "the answer of")])
        if position >= 0:
            self._stash[worker, position] = answer
        else:
            self._replies[worker] = sequence, answer

    def keep_row_answer(self, position: int, answer: Answer) -> None:
        """Keep what the caller's own chunk has to say about a row."""
        self._stash[-1, position] = answer

    def drop_rows(self) -> None:
        """Give up the ring's rows and the answers that belong to them."""
        self.ring.skip()
        self._stash.clear()

    # -- replacement -------------------------------------------------------------------------

    def _revive(self, worker: int, reason: str) -> None:
        """Start a new worker in the place of one that is gone.

        It finds the command that was not carried out in its line, and reports every env of the
        chunk as truncated at that env's next step.
        """
        assert self.restarts is not None
        self.has_revived = True
        self.pool.end(worker)
        with contextlib.suppress(EOFError):  # take in what it has sent
            while (sent := self.pool.receive(worker, Deadline(0))) is not None:
                self._take_in(worker, sent)
        self.pool.reap(worker)
        self._repair(worker)
        lost = self.before_revival()
        first, last = self.pool.bounds[worker], self.pool.bounds[worker + 1]
        self.restarts[first:last] += 1
        self._start_anew(worker, reason)
        message: dict[str, Any] = dict(self._sent[worker] or {"kind": "news"})
        self._gather_news()
        self._untold.pop(worker, None)
        message["slots"] = self.slots.all_sent()
        message["stamps"] = self._stamps
        message["columns"], message["forms"] = self.columns.all_sent()
        message["ring_leaves"] = self.ring.leaves()
        # With the layout it begins to look for commands, so it must be clear by then what it finds.
        is_done = self._is_done(worker)
        self._words[self._command[worker] + at.FLAGS] |= FLAG_MESSAGE
        self.pool.send(worker, dumps(self.layout))
        if is_done:
            self.ask(worker, {**message, "kind": "news"})
            self._announced = True
        else:
            self.pool.send(worker, dumps(message))
        mine = lost[(lost >= first) & (lost < last)]
        if len(mine):
            self.push(mine)
            if self.layout.actions is None:
                self.send_actions(worker, dict.fromkeys(mine.tolist(), dumps(None)))

    def _start_anew(self, worker: int, reason: str) -> None:
        """Start a process in a worker's place and wait until it has made its envs."""
        try:
            self.pool.start(worker, lost_because=reason)
        except Exception as cause:  # factories are pickled again, unless forked
            error = WorkerDiedError(
                f"{reason} It could not be replaced: {type(cause).__name__}: {cause}. What "
                "env_fns hold, such as pipes, must stay open here."
            )
            self.break_down(error)
            raise error from cause
        opening = self.pool.receive_openings([worker])[worker]
        if not isinstance(opening, EnvSpaces):
            self._fail_to_replace(reason, opening)

    def _fail_to_replace(self, reason: str, found: EnvFault | WorkerDiedError) -> NoReturn:
        if isinstance(found, EnvFault):
            error = WorkerDiedError(
                f"{reason} It could not be replaced: making env {found.env_id} anew failed with "
                f"{found.text}."
            )
            error.__cause__ = found.exception(self.steps)
        else:
            error = WorkerDiedError(f"{reason} It could not be replaced: {found}")
        self.break_down(error)
        raise error

    def send_actions(self, worker: int, actions: dict[int, bytes]) -> None:
        """Send the pickled actions of envs that have been queued, by env."""
        self.pool.send(worker, dumps({"kind": "actions", "actions": actions}))

    push: Callable[[np.ndarray], None]

    def _repair(self, worker: int) -> None:
        """Bring the words of a worker that is gone into a state that a new one can begin with."""
        command = self._command[worker]
        self._words[command + LINE + at.WORKER_ASLEEP] = 0
        self._words[command + LINE + at.WRITING] = 0
        self._words[command + LINE + at.QUEUE_HEAD] = self._words[command + at.QUEUE_TAIL]
        for queue in self.link.layout.lane_queues(worker):
            self._words[queue + at.LANE_HEAD] = self._words[queue + at.LANE_TAIL]
            for word in (at.LANE_ASLEEP, at.LANE_JOBS, at.LANE_CURRENT):
                self._words[queue + word] = 0
        if self._is_done(worker):  # what it had to say beyond numbers, it has said or never will
            self._words[command + LINE + at.STATUS] = 0
        others = [w for w in range(self.num_workers) if w != worker]
        give_up = time.monotonic() + 1.0
        while others and time.monotonic() < give_up:  # until nobody is between claim and count
            writing = LINE + at.WRITING
            others = [w for w in others if self._words[self._command[w] + writing]]
            time.sleep(0.001)
        self.ring.void_unwritten()
        first, last = self.pool.bounds[worker], self.pool.bounds[worker + 1]
        self.ring.void_unexplained(first, last, lambda position: (worker, position) in self._stash)
        self._repair_counts()

    def _repair_counts(self) -> None:
        """Count a completion whose worker died after reporting it and before counting it."""
        lines = (at.COMMANDS * LINE + at.COUNT, at.OTHER_HALF * LINE + at.COUNT)
        done = counted = 0
        for _ in range(5):
            done = sum(self._words[c + LINE + at.DONE_SEQUENCE] for c in self._command)
            counted = sum(self._words[line] for line in lines)
            if done == counted:
                return
            time.sleep(0.002)
        short = [k for k in (0, 1) if self._words[lines[k]] < self.targets[k]]
        if short and done > counted:
            self._words[lines[short[0]]] += done - counted
