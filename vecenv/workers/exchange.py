"""Commands to a pool's workers, their answers, and what happens when a worker is gone."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from vecenv.core.deadline import Deadline
from vecenv.core.errors import ForkedEnvError
from vecenv.core.faults import EnvFault, StepTimeoutError, WorkerDiedError
from vecenv.core.pickling import dumps, loads
from vecenv.workers import layout as at
from vecenv.workers.chunk import Chunk, Outcome
from vecenv.workers.info_columns import ChunkInfos, ColumnReader
from vecenv.workers.layout import FLAG_MESSAGE, HAS_MESSAGE, LINE, OP_MESSAGE, OP_STEP, Leaf
from vecenv.workers.links import Link
from vecenv.workers.messages import (
    INTERRUPTED,
    NOTHING,
    Answer,
    EnvSpaces,
    Layout,
    split_message,
)
from vecenv.workers.pool import WorkerPool
from vecenv.workers.rows import ReadyRing, SlotTable, object_rows, reward_bits, unwritten

__all__ = ["Exchange", "Gathered"]

# Batched infos, faults, and for every chunk the result of a call.
Gathered = tuple[dict[str, Any], list[EnvFault], list[Any]]


_MOST_REPLACEMENTS = 5  # of one worker in one wait
_RECOUNT_S = 0.0001


class _Commands(NamedTuple):
    """Commands that are being given.

    Attributes:
        workers: To whom.
        sequences: Of each command.
        what: Opcode, slot, flags, step and line on which the caller waits.
        messages: For each worker, if there are some.
        pickled: The messages.
    """

    workers: range
    sequences: list[int]
    what: tuple[int, int, int, int, int]
    messages: list[dict[str, Any]]
    pickled: list[bytes]


class _Updates(NamedTuple):
    """What the workers must know before they go on: slots, columns and forms of infos.

    Attributes:
        counts: How many slots, columns and forms are in messages.
        pending: By worker, the messages' parts that have not been sent.
    """

    counts: tuple[int, int, int]
    pending: dict[int, dict[str, Any]]


class Exchange:
    """The caller's end of a pool.

    Attributes:
        steps: Number of the latest step.
        own_outcome: Of the caller's own chunk, in the call under way; None if it has none.
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
        self.own_outcome: Outcome | None = None
        self._unfinished: _Commands | None = None
        self.restarts = pool.restarts
        self.before_replacement: Callable[[], np.ndarray] = lambda: np.zeros(0, np.int64)
        self.last_action: Callable[[int], str] = lambda env_id: ""
        self._words = memoryview(link.words)  # type: ignore[arg-type]  # typeshed before 3.12
        self._command_lines = [link.layout.command(worker) for worker in range(self.num_workers)]
        self.timeout: float | None = None
        self.break_down: Callable[[Exception], None] = lambda error: None
        self._sent: list[Any] = [None] * self.num_workers  # message of the latest command
        self._row_answers: dict[tuple[int, int], Answer] = {}  # rows' answers by (worker, position)
        self._answers: dict[int, tuple[int, Answer]] = {}  # by worker: latest sequence and answer
        self._updates = _Updates((0, 0, 0), {})
        self._announced = False  # a command under way that only carries updates
        self._num_actions = 0  # messages with some
        self._stamps: tuple[Leaf, Leaf] | None = None
        self.has_replaced = False  # then rows of the ring may be void

    # -- commands ----------------------------------------------------------------------------
    #
    # Ctrl-C may come between any two operations here. So the control words, which one call writes,
    # say which commands have been given; messages are complete before a word is written, and are
    # sent again if they may not have been; and a command is noted before workers can begin it.

    def _gather_updates(self) -> None:
        """Collect for every worker the slots, columns, forms and leaves that it does not know."""
        if not (self.slots.has_unsent or self.columns.has_unsent):
            return
        known, pending = self._updates
        now = (self.slots.count, len(self.columns.columns), len(self.columns.forms))
        if now == known:
            self.slots.has_unsent = self.columns.has_unsent = False
            return
        updates: dict[str, Any] = {
            "slots": self.slots.all_since(known[0]),
            "columns": self.columns.columns[known[1] :],
            "forms": self.columns.forms[known[2] :],
            "first_form": known[2],
        }
        for column in updates["columns"]:
            arrays = self.columns.ring_arrays(column)
            for leaf, array in zip(column.values, arrays, strict=False):
                self.ring.add_leaf(leaf, array)
        if updates["columns"]:
            updates["ring_leaves"] = self.ring.leaves()
        if self.own is not None:
            self.own.learn(updates)
        for worker in range(self.num_workers):
            old = pending.get(worker, {})
            both = {
                name: [*old.get(name, []), *items] if isinstance(items, list) else items
                for name, items in updates.items()
            }
            both["first_form"] = old.get("first_form", known[2])
            pending = {**pending, worker: {**old, **both}}
        self._updates = _Updates(now, pending)
        self.slots.has_unsent = self.columns.has_unsent = False

    @property
    def is_settled(self) -> bool:
        """Whether workers know everything, so that a step needs no message."""
        return not (
            self._announced
            or self._updates.pending
            or self.slots.has_unsent
            or self.columns.has_unsent
        )

    @property
    def has_pending_updates(self) -> bool:
        """Whether there are updates that workers have not been sent."""
        return bool(self._updates.pending) or self.slots.has_unsent or self.columns.has_unsent

    def announce(self) -> None:
        """Tell the workers the pending updates without waiting; later, if they are busy."""
        if self._announced and not all(map(self._is_done, range(self.num_workers))):
            return
        self.finish_announcement()
        self._announce({"kind": "updates"})

    def _announce(self, message: dict[str, Any]) -> None:
        self._announced = True
        self._command_workers(
            0, self.num_workers, OP_MESSAGE, 0, at.COMMANDS, [message] * self.num_workers
        )

    def stamp(self, leaves: tuple[Leaf, Leaf] | None) -> None:
        """Let the envs' steps be stamped into these rings and counts; None ends it."""
        self.finish_announcement()
        self._stamps = leaves
        self._announce({"kind": "updates", "stamps": leaves})
        if self.own is not None:
            self.own.learn({"stamps": leaves})
        self.wait(at.COMMANDS, range(self.num_workers), Deadline(self.timeout), "timing")
        self._announced = False

    def finish_announcement(self) -> None:
        """Wait until the workers have taken notice, before their next command."""
        if self._announced:
            deadline = Deadline(self.timeout, is_limit=True)
            self.wait(at.COMMANDS, range(self.num_workers), deadline, "an announcement")
            self._announced = False

    def ask(self, worker: int, message: dict[str, Any]) -> None:
        """Give one worker a command that comes by message, with the updates pending for it."""
        self._command_workers(worker, worker + 1, OP_MESSAGE, 0, at.COMMANDS, [message])

    def ask_all(self, kind: str, requests: Sequence[Any]) -> None:
        """Give every worker its request; if one can't be pickled, none has been given any."""
        messages = [{"kind": kind, "request": dumps(request)} for request in requests]
        self._command_workers(0, self.num_workers, OP_MESSAGE, 0, at.COMMANDS, messages)

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
        parts: list[dict[str, Any]] | None = None
        if messages is not None:
            parts = [{"kind": "step", "actions": dumps(part)} for part in messages]
        elif self.has_pending_updates:
            parts = [{"kind": "step"}] * (last - first)
        self._command_step(slot, first, last, line, parts)

    def _command_step(
        self, slot: int, first: int, last: int, line: int, messages: list[dict[str, Any]] | None
    ) -> None:
        if messages is None and self.link.posts_at_once:
            self.link.post(first, last, OP_STEP, slot, 0, self.steps, line)
        else:
            self._command_workers(first, last, OP_STEP, slot, line, messages)

    def _command_workers(
        self,
        first: int,
        last: int,
        opcode: int,
        slot: int,
        line: int,
        messages: list[dict[str, Any]] | None,
    ) -> None:
        """Give workers first, ..., last - 1 a command each, and its message if it has one."""
        self._gather_updates()
        pending = self._updates.pending
        sequences = [self._words[c + at.SEQUENCE] + 1 for c in self._command_lines[first:last]]
        flags, parts, pickled = 0, [], []
        if messages is not None:
            flags = FLAG_MESSAGE
            for worker, message, sequence in zip(
                range(first, last), messages, sequences, strict=True
            ):
                parts.append({**message, **pending.get(worker, {}), "sequence": sequence})
            # What users' objects need is pickled first: an error here leaves nothing half done.
            pickled = [dumps(message) for message in parts]
        what = opcode, slot, flags, self.steps, line
        self._unfinished = _Commands(range(first, last), sequences, what, parts, pickled)
        self._finish_commands()

    def _finish_commands(self) -> None:
        """Give what was to be given; workers drop a message that comes twice."""
        given = self._unfinished
        if given is None:
            return
        missing = [
            worker
            for worker, sequence in zip(given.workers, given.sequences, strict=True)
            if self._words[self._command_lines[worker] + at.SEQUENCE] != sequence
        ]
        if len(missing) == len(given.workers):
            self.link.post(given.workers.start, given.workers.stop, *given.what)
        else:  # interrupted, where it is not done at once
            for worker in missing:
                self.link.post(worker, worker + 1, *given.what)
        for worker, message, pickled in zip(
            given.workers, given.messages, given.pickled, strict=False
        ):
            self._sent[worker] = message
            self._updates.pending.pop(worker, None)
            self.pool.send(worker, pickled)
        self._unfinished = None

    def num_commands(self) -> int:
        """Return how many commands workers have been given, those under way included."""
        given = sum(self._words[command + at.SEQUENCE] for command in self._command_lines)
        return given + (self._unfinished is not None)

    def has_posted(self, step: int) -> bool:
        """Whether the latest command is step number `step`."""
        if self._unfinished is not None:  # the wait for it finishes that
            return self._unfinished.what[3] == step
        command = self._command_lines[0]
        words = self._words
        return words[command + at.STEP] == step and words[command + at.OPCODE] == OP_STEP

    def step_at_once(self, slot: int) -> tuple[int, Outcome | None]:
        """Let all step into a slot, with shared actions and no updates to tell.

        Returns:
            The workers' status bits, or -1 if `wait` is to say whether they are done, as they take
            longer than one short wait or have been replaced; and the outcome of the caller's own
            chunk, None if it has nothing to say.
        """
        self.steps += 1
        outcome = None
        if self.own is not None:
            self.own_outcome = INTERRUPTED
            self._command_step(slot, 0, self.num_workers, at.COMMANDS, None)
            self.own_outcome = outcome = self.own.step_all(slot)
        elif self.link.posts_at_once:
            status = self.link.post_and_wait(self.num_workers, slot, 0, self.steps, OP_STEP)
            return -1 if self.has_replaced else status, None
        else:
            self._command_step(slot, 0, self.num_workers, at.COMMANDS, None)
        status = self.link.wait_done(0, 0, self.num_workers)
        return -1 if self.has_replaced else status, None if outcome == NOTHING else outcome

    def ask_to_close(self, deadline: Deadline) -> None:
        """Ask every worker to close its envs and end, as soon as it has finished what it does."""
        self._finish_commands()
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
                are survived and the deadline is the limit of a step or reset: workers that have
                been at an env for longer are replaced then, once each.
            WorkerDiedError: A worker is gone and is not replaced.
        """
        replaced: Counter[int] = Counter()
        late: set[int] = set()
        seen: dict[int, tuple[float, list[int]]] = {}
        is_limit = self.restarts is not None and deadline.is_limit and deadline.timeout is not None
        self._finish_commands()
        while True:
            status = self.link.wait_done(line, workers.start, workers.stop)
            if self.has_replaced:
                status = self._recounted_status(line, workers)
            if status >= 0:
                return status
            self.check_workers(doing, replaced)
            if not is_limit:
                if deadline.is_over:
                    raise StepTimeoutError(self._late(workers, deadline, doing))
                continue
            for worker in self._standing_still(workers, deadline.timeout, seen):
                if worker in late:
                    raise StepTimeoutError(self._late(workers, deadline, doing))
                self.replace_late(worker, deadline.timeout, doing)
                late.add(worker)

    def _recounted_status(self, line: int, workers: range) -> int:
        """Return the status bits of workers that are done, or -1, by the commands they have done.

        A worker that has died may not have counted the last one, and one that is between reporting
        and counting when another is replaced counts it later: the count can't be trusted.
        """
        if not all(map(self._is_done, workers)):
            time.sleep(_RECOUNT_S)  # as the link may not have waited
            return -1
        self._words[line * LINE + at.COUNT] = self._words[at.POSTED_LINE * LINE + line]
        status = 0
        for command in self._command_lines[workers.start : workers.stop]:
            status |= self._words[command + LINE + at.STATUS]
        return status

    def _standing_still(
        self, workers: range, limit_s: float | None, seen: dict[int, tuple[float, list[int]]]
    ) -> list[int]:
        """Return the workers that have been at the same envs for longer than the limit.

        Args:
            workers: Of which to tell.
            limit_s: Seconds that an env may take.
            seen: At which envs each was, and since when; changed in place.
        """
        assert limit_s is not None
        now, found = time.monotonic(), []
        for worker in workers:
            if self._is_done(worker):
                continue
            stuck = self._stuck_at(worker)
            since, before = seen.get(worker, (now, None))
            if stuck != before:
                seen[worker] = now, stuck
            elif now - since > limit_s:
                found.append(worker)
                del seen[worker]
        return found

    def check_workers(self, doing: str, replaced: Counter[int] | None = None) -> None:
        """Replace workers that are gone, or say which one is.

        Args:
            doing: What is being waited for.
            replaced: How often workers have been replaced in this wait; changed in place.
        """
        if not self.pool.is_owner:
            raise ForkedEnvError(f"a fork can't wait for {doing}, which its parent has asked for")
        self.pool.flush()
        for worker in self.pool.dead():
            error = self.pool.exit_report(worker, doing)
            self._name_env(error, worker, doing)
            if self.restarts is None:
                self.break_down(error)
                raise error
            if replaced is not None:
                replaced[worker] += 1
                if replaced[worker] > _MOST_REPLACEMENTS:
                    error.args = (f"{error.args[0]} So have its last {_MOST_REPLACEMENTS}.",)
                    self.break_down(error)
                    raise error
            self._replace_worker(worker, str(error))

    def _name_env(self, error: Exception, worker: int, doing: str) -> None:
        """Add to an error at which env a worker was, and with which action, but in a reset."""
        stuck = self._stuck_at(worker)
        if len(stuck) == 1 or (stuck and self.link.layout.lanes == 1):
            action = "" if doing == "reset" else self.last_action(stuck[0])
            place = f" It was at env {stuck[0]}" + (f", action {action}." if action else ".")
        elif stuck:
            place = f" It was at envs {', '.join(map(str, stuck[:8]))}."
        else:
            return
        error.args = (error.args[0] + place,)

    def replace_late(self, worker: int, timeout: float | None, doing: str) -> None:
        """End a worker that has not answered in time, and start another in its place."""
        process = self.pool.processes[worker]
        first, last = self.pool.bounds[worker], self.pool.bounds[worker + 1]
        error = WorkerDiedError(
            f"worker {worker} (envs {first}-{last - 1}, pid {process.pid}) was killed after "
            f"{doing} had taken more than {timeout} second(s)."
        )
        self._name_env(error, worker, doing)
        self._replace_worker(worker, str(error))

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
        command = self._command_lines[worker]
        return self._words[command + at.SEQUENCE] == self._words[command + LINE + at.DONE_SEQUENCE]

    def _stuck_at(self, worker: int) -> list[int]:
        """Return the envs at which a worker is, as far as shared memory shows."""
        first, last = self.pool.bounds[worker], self.pool.bounds[worker + 1]
        command = self._command_lines[worker]
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
            status = self._words[self._command_lines[worker] + LINE + at.STATUS]
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
        """Return the answer to a worker's latest command; it stays until there is another."""
        sequence = self._words[self._command_lines[worker] + at.SEQUENCE]
        while True:
            if worker in self._answers:
                found, answer = self._answers[worker]
                if found == sequence:
                    return answer
                del self._answers[worker]
            if not self._receive(worker):
                return Answer()  # it is gone, and has been replaced

    def has_row_answer(self, worker: int, position: int) -> bool:
        """Receive the answer that belongs to a row of the ring; return whether there is one.

        There is none if the worker has died before it could send it; the row is void then.
        """
        while (worker, position) not in self._row_answers:
            if not self._receive(worker):
                return False
        return True

    def row_answer(self, worker: int, position: int) -> Answer:
        """Return the answer that belongs to a row of the ring, which must have been received."""
        return self._row_answers[worker, position]

    def drop_answers(self) -> None:
        """Drop what has been used: answers to commands, and those of rows that are handed out."""
        self._answers.clear()
        for key in [key for key in self._row_answers if key[1] < self.ring.head]:
            del self._row_answers[key]

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
        self.pool.drop_received(worker)
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
            self._row_answers[worker, position] = answer
        else:
            self._answers[worker] = sequence, answer

    def keep_row_answer(self, position: int, answer: Answer) -> None:
        """Keep what the caller's own chunk has to say about a row."""
        self._row_answers[-1, position] = answer

    def drop_rows(self) -> None:
        """Give up the ring's rows and the answers that belong to them."""
        self.ring.skip()
        self._row_answers.clear()

    # -- replacement -------------------------------------------------------------------------

    def _replace_worker(self, worker: int, reason: str) -> None:
        """Start a new worker in the place of one that is gone.

        It finds the command that was not carried out in its line, and reports every env of the
        chunk as truncated at that env's next step.
        """
        assert self.restarts is not None
        self.has_replaced = True
        try:
            self._replace(worker, reason)
        except BaseException:  # with Ctrl-C in between it is neither: the next look begins anew
            if not self.pool.has_ended:
                self.pool.end(worker)
            raise

    def _replace(self, worker: int, reason: str) -> None:
        assert self.restarts is not None
        self.pool.end(worker)
        with contextlib.suppress(EOFError):  # take in what it has sent
            while (sent := self.pool.receive(worker, Deadline(0))) is not None:
                self._take_in(worker, sent)
                self.pool.drop_received(worker)
        self.pool.reap(worker)
        self._repair(worker)
        lost = self.before_replacement()
        first, last = self.pool.bounds[worker], self.pool.bounds[worker + 1]
        self.restarts[first:last] += 1
        self._start_anew(worker, reason)
        message: dict[str, Any] = dict(self._sent[worker] or {"kind": "updates"})
        self._gather_updates()
        (_, num_columns, num_forms), pending = self._updates
        pending.pop(worker, None)
        message["sequence"] = self._words[self._command_lines[worker] + at.SEQUENCE]
        message["slots"] = self.slots.all_since(0)
        message["stamps"] = self._stamps
        message["columns"] = self.columns.columns[:num_columns]
        message["forms"], message["first_form"] = self.columns.forms[:num_forms], 0
        message["ring_leaves"] = self.ring.leaves()
        # With the layout it begins to look for commands, so it must be clear by then what it finds.
        is_done = self._is_done(worker)
        self._words[self._command_lines[worker] + at.FLAGS] |= FLAG_MESSAGE
        self.pool.send(worker, dumps(self.layout))
        if is_done:
            self._announced = True
            self.ask(worker, {**message, "kind": "updates"})
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
            self.pool.restart(worker, reason)
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
        self.pool.send(worker, self.pickled_actions(actions))

    def pickled_actions(self, actions: dict[int, bytes]) -> bytes:
        """Return the message for `send_actions`; it may be sent twice."""
        self._num_actions += 1
        return dumps({"kind": "actions", "actions": actions, "number": self._num_actions})

    push: Callable[[np.ndarray], None]

    def _repair(self, worker: int) -> None:
        """Bring the words of a worker that is gone into a state that a new one can begin with."""
        command = self._command_lines[worker]
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
        claimed = self.ring.claimed()
        give_up = time.monotonic() + 1.0
        while others and time.monotonic() < give_up:  # until the living ones have written theirs
            writing = LINE + at.WRITING
            others = [w for w in others if self._words[self._command_lines[w] + writing]]
            time.sleep(0.001)
        self.ring.void_unwritten(claimed)
        first, last = self.pool.bounds[worker], self.pool.bounds[worker + 1]
        self.ring.void_unexplained(
            first, last, lambda position: (worker, position) in self._row_answers
        )
