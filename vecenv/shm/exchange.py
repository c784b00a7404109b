"""Commands to a pool's workers, their answers, and what happens when a worker is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vecenv.shm import layout as at
from vecenv.shm.chunk import Chunk, Outcome
from vecenv.shm.columns import ChunkInfos, ColumnReader
from vecenv.shm.deadline import Deadline
from vecenv.shm.faults import EnvFault, StepTimeoutError, WorkerDiedError
from vecenv.shm.layout import FLAG_MESSAGE, HAS_MESSAGE, LINE, OP_MESSAGE, OP_STEP, Leaf
from vecenv.shm.messages import Answer, Layout
from vecenv.shm.pool import WorkerPool
from vecenv.shm.ready import ReadyRing
from vecenv.shm.slots import SlotTable, object_rows, reward_bits, unwritten
from vecenv.shm.wait import Link

__all__ = ["Exchange", "Gathered"]

# Batched infos, faults, and for every chunk the result of a call.
Gathered = tuple[dict[str, Any], list[EnvFault], list[Any]]


_NOTHING: Outcome = (0, 0, None)


class Exchange:
    """The caller's end of a pool.

    Attributes:
        steps: Number of the latest step.
        own: The chunk that the caller steps itself, or None.
        revives: Whether workers that die are replaced.
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
        self._sent: list[Any] = [None] * self.num_workers  # message of the latest command
        self._stash: dict[tuple[int, int], Answer] = {}  # rows' answers by (worker, position)
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
        """Tell the workers the news without waiting for them."""
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
        self.wait(at.COMMANDS, range(self.num_workers), Deadline(None), "timing")

    def finish_announcement(self) -> None:
        """Wait until the workers have taken notice, before their next command."""
        if self._announced:
            self.wait(at.COMMANDS, range(self.num_workers), Deadline(None), "an announcement")
            self._announced = False

    def ask(self, worker: int, message: dict[str, Any]) -> None:
        """Give one worker a command that comes by message, with the news it has not been told."""
        self._gather_news()
        message = {**message, **self._untold.pop(worker, {})}
        self._sent[worker] = message
        self.targets[at.COMMANDS] += 1
        self.link.post(worker, worker + 1, OP_MESSAGE, 0, 0, self.steps, at.COMMANDS)
        self.pool.send(worker, message)

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
        if messages is not None or self.has_news:
            flags = FLAG_MESSAGE
            self._gather_news()
            for worker in range(first, last):
                self._sent[worker] = {"kind": "step", **self._untold.pop(worker, {})}
                if messages is not None:
                    self._sent[worker]["actions"] = messages[worker]
        self.targets[line] += last - first
        self.link.post(first, last, OP_STEP, slot, flags, self.steps, line)
        if flags:
            for worker in range(first, last):
                self.pool.send(worker, self._sent[worker])

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
            StepTimeoutError: The deadline has passed; the commands stay pending.
            WorkerDiedError: A worker is gone and is not replaced.
        """
        while True:
            status = self.link.wait_done(line, self.targets[line], workers.start, workers.stop)
            if status >= 0:
                return status
            self.check_workers(doing)
            if deadline.is_over:
                raise StepTimeoutError(self._late(workers, deadline, doing))

    def check_workers(self, doing: str) -> None:
        """Replace workers that are gone, or say which one is."""
        for worker in self.pool.dead():
            error = self.pool.epitaph(worker, doing)
            at_env = self._stuck_at(worker)
            if at_env:
                env_id = at_env[0]
                action = self.last_action(env_id)
                told = f" It was at env {env_id}" + (f", action {action}." if action else ".")
                error.args = (error.args[0] + told,)
            if self.restarts is None:
                raise error
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
        current = self._words[command + LINE + at.CURRENT]
        return [current] if first <= current < last else []

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
            try:
                answer = self.pool.receive(worker, Deadline(None))
            except EOFError:
                return Answer()  # the next wait finds the worker gone
            if answer.position >= 0:
                self._stash[worker, answer.position] = answer
            elif answer.sequence == sequence:
                return answer

    def row_answer(self, worker: int, position: int) -> Answer:
        """Receive the answer that belongs to a row of the ring."""
        while (worker, position) not in self._stash:
            try:
                answer = self.pool.receive(worker, Deadline(None))
            except EOFError:
                return Answer()
            if answer.position >= 0:
                self._stash[worker, answer.position] = answer
        return self._stash.pop((worker, position))

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
        self.pool.reap(worker)
        self._repair(worker)
        lost = self.before_revival()
        first, last = self.pool.bounds[worker], self.pool.bounds[worker + 1]
        try:
            self.pool.start(worker, lost_because=reason)
        except Exception as error:  # factories are pickled again, unless forked
            raise WorkerDiedError(
                f"{reason} It could not be replaced: {type(error).__name__}: {error}. What "
                "env_fns hold, such as pipes, must stay open here."
            ) from error
        self.restarts[first:last] += 1
        try:
            opening = self.pool.receive(worker, Deadline(None))
        except EOFError:
            raise self.pool.epitaph(worker, "its restart") from None
        if isinstance(opening, EnvFault):
            raise opening.exception(self.steps)
        self.pool.send(worker, self.layout)
        message: dict[str, Any] = dict(self._sent[worker] or {"kind": "news"})
        self._gather_news()
        self._untold.pop(worker, None)
        message["slots"] = self.slots.all_sent()
        message["stamps"] = self._stamps
        message["columns"], message["forms"] = self.columns.all_sent()
        message["ring_leaves"] = self.ring.leaves()
        self._words[self._command[worker] + at.FLAGS] |= FLAG_MESSAGE
        if self._is_done(worker):
            self.ask(worker, {**message, "kind": "news"})
            self._announced = True
        else:
            self.pool.send(worker, message)
        mine = lost[(lost >= first) & (lost < last)]
        if len(mine):
            self.push(mine)
            if self.layout.actions is None:
                self.pool.send(worker, {"kind": "actions", "actions": dict.fromkeys(mine.tolist())})

    push: Callable[[np.ndarray], None]

    def _repair(self, worker: int) -> None:
        """Bring the words of a worker that is gone into a state that a new one can begin with."""
        command = self._command[worker]
        self._words[command + LINE + at.WORKER_ASLEEP] = 0
        self._words[command + LINE + at.WRITING] = 0
        queue = self.link.layout.queue(worker)
        for word in (at.THREADS, at.THREADS_ASLEEP, at.THREADS_DONE):
            self._words[queue + word] = 0
        self._words[command + LINE + at.QUEUE_HEAD] = self._words[command + at.QUEUE_TAIL]
        others = [w for w in range(self.num_workers) if w != worker]
        give_up = time.monotonic() + 1.0
        while others and time.monotonic() < give_up:  # until nobody is between claim and count
            writing = LINE + at.WRITING
            others = [w for w in others if self._words[self._command[w] + writing]]
            time.sleep(0.001)
        self.ring.void_unwritten()
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
