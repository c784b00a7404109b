"""First-ready stepping: `send` and `recv` of single envs."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from vecenv.core.base import GymVecEnv, StepBatch
from vecenv.core.errors import InfoError
from vecenv.core.faults import EnvFault, StepTimeoutError, raise_faults
from vecenv.core.pickling import dumps
from vecenv.core.rows import copy_batch
from vecenv.workers.layout import (
    CLAIMS_LINE,
    HAS_MESSAGE,
    LINE,
    POSTED_LINE,
    ROW_FORM,
    ROW_SEQUENCE,
    ROW_STATUS,
    ROWS,
)
from vecenv.workers.rows import VOID

if TYPE_CHECKING:
    from vecenv.core.deadline import Deadline
    from vecenv.workers.actions import ActionWriter
    from vecenv.workers.exchange import Exchange

__all__ = ["Receiver"]

_MOST_REPLACEMENTS = 2  # of a late worker in one wait
_DOING = "the step that was sent {} sends ago or later"


class Receiver:
    """The caller's part of first-ready stepping.

    Args:
        envs: Whose calls these are.
        exchange: The way to the workers.
        writer: Of the actions; None if they travel by message.
        limit_s: Seconds that an env may take, where one that takes longer is restarted.
    """

    def __init__(
        self,
        envs: GymVecEnv,
        exchange: Exchange,
        writer: ActionWriter | None,
        limit_s: float | None,
    ) -> None:
        # A proxy: a vector env that nobody has any more ends at once, not with the next collection.
        self._envs: GymVecEnv = weakref.proxy(envs)
        self._exchange = exchange
        self._writer = writer
        bounds = exchange.pool.bounds
        self._owners = np.full(bounds[-1], -1, np.int64)
        for worker in range(exchange.num_workers):
            self._owners[bounds[worker] : bounds[worker + 1]] = worker
        self._lanes = exchange.link.layout.env_lanes(bounds)
        # By lane the time of its latest sign of life; the last item is for the envs that have none
        # (lane -1).
        self._limit_s = None if exchange.restarts is None else limit_s
        self._heard = np.zeros(self._lanes.max() + 2)
        self._noted = 0  # rows of the ring that are known to be signs of life
        self._own_queue: list[tuple[int, Any]] = []
        # For Ctrl-C: the envs being queued, the messages with their actions, and how many had been
        # queued before; and the envs whose rows are being handed out, with the position after them.
        self._sending = np.zeros(0, np.int64)
        self._action_messages: list[tuple[int, bytes]] = []
        self._num_sent = 0
        self._taken: tuple[np.ndarray, int] | None = None
        words: Any = exchange.link.words
        self._pushed = memoryview(words[POSTED_LINE * LINE + ROWS :])
        exchange.push = self._push_again
        exchange.before_replacement = self._missing

    def _push(self, env_ids: np.ndarray) -> None:
        if self._limit_s is not None:
            self._heard[self._lanes[env_ids]] = time.monotonic()
        self._exchange.link.push(env_ids, self._lanes)

    def _push_again(self, env_ids: np.ndarray) -> None:
        """Queue envs whose worker was replaced."""
        self._push(env_ids)
        self.note_sent()

    def note_sent(self) -> None:
        """Note that all that was sent before has been noted as in flight."""
        self._num_sent = self._pushed[0]

    def settle_send(self) -> None:
        """Note as in flight what was queued by a `send` that has come to no good end.

        This and `settle_recv` come to the same if they are broken off and called again.
        """
        calls, sending = self._envs._calls, self._sending
        pushed = self._pushed[0] - self._num_sent
        if 0 < pushed < len(sending):  # interrupted, where it is not done at once
            self._push(sending[pushed:])
        if pushed > 0:
            calls.in_flight[sending] = True
        elif not calls.in_flight[sending].any():  # unless this is the second try
            self._action_messages = []
        for env_id, _ in self._own_queue:
            calls.in_flight[env_id] = True
        self.note_sent()
        calls.recount()

    def note_received(self) -> None:
        """Note that all that was received before has been noted as no longer in flight."""
        self._taken = None

    def settle_recv(self) -> None:
        """Note as handed out what a `recv` that has come to no good end has taken."""
        calls = self._envs._calls
        if self._taken is not None:
            ids, self._exchange.ring.head = self._taken
            calls.in_flight[ids] = False
            self._taken = None
        calls.recount()

    def _take(self, ids: np.ndarray, ready: int) -> None:
        """Take the first `ready` rows, those of envs `ids`, out of the ring."""
        ring = self._exchange.ring
        self._taken = ids, ring.head + ready
        ring.head += ready
        if ring.has_status:
            self._exchange.drop_answers()

    def _missing(self) -> np.ndarray:
        """Return the envs in flight whose results are not in the ring."""
        self._envs._own_rows()
        missing = self._envs._calls.in_flight.copy()
        ring = self._exchange.ring
        ids = ring.ids(ring.published() - ring.head)
        missing[ids[ids != VOID]] = False
        return np.flatnonzero(missing)

    def send(self, actions: Any, env_ids: np.ndarray) -> None:
        """Write the actions and queue the envs at their workers."""
        envs, exchange = self._envs, self._exchange
        exchange.steps += 1
        if exchange.own is not None:
            actions, env_ids = self._keep_own(actions, env_ids)
            if len(env_ids) == 0:
                return
        if self._writer is not None:
            self._writer.write(actions, env_ids)
            self._sending = env_ids
            self._push(env_ids)
            return
        each = list(map(dumps, iterate(envs.action_space, actions)))
        owners = self._owners[env_ids]
        messages = []
        for worker in np.unique(owners).tolist():
            chosen = np.flatnonzero(owners == worker).tolist()
            its_actions = {int(env_ids[k]): each[k] for k in chosen}
            messages.append((worker, exchange.pickled_actions(its_actions)))
        self._sending, self._action_messages = env_ids, messages
        self._push(env_ids)
        self.post_actions()

    def post_actions(self) -> None:
        """Send the actions of envs that have been queued, which workers wait for.

        After an interrupt they are sent again; workers drop what comes twice.
        """
        for worker, message in self._action_messages:
            self._exchange.pool.send(worker, message)
        self._action_messages = []

    def _keep_own(self, actions: Any, env_ids: np.ndarray) -> tuple[Any, np.ndarray]:
        """Put aside the envs that the caller steps itself; return what is left."""
        is_own = self._owners[env_ids] < 0
        if not is_own.any():
            return actions, env_ids
        each = self._envs._actions.snapshot(actions)
        self._own_queue += [(int(env_ids[k]), each[k]) for k in np.flatnonzero(is_own).tolist()]
        space = self._envs.single_action_space
        kept = [each[k] for k in np.flatnonzero(~is_own).tolist()]
        if not kept:
            return actions, env_ids[~is_own]
        return concatenate(space, kept, create_empty_array(space, n=len(kept))), env_ids[~is_own]

    def _do_own_part(self) -> None:
        """Do what `send` has left: send actions if it was interrupted, and step the own envs.

        Their rows go into the ring like all others.
        """
        self.post_actions()
        own = self._exchange.own
        while self._own_queue:
            assert own is not None
            env_id, action = self._own_queue[0]
            try:
                status, form, answer = own.step_one(env_id - own.first, action)
                leaves = own.ring_leaves if form else own.bare_leaves
                position = self._exchange.link.publish(
                    (CLAIMS_LINE - 1) * LINE, leaves, env_id, status, form
                )
                if own.is_stamped:
                    own.group.mark_done(env_id - own.first)
                if answer is not None:
                    self._exchange.keep_row_answer(position, answer)
            except BaseException:  # Ctrl-C
                fault = RuntimeError(f"the step of env {env_id} was interrupted")
                self._envs._calls.forget_reset(fault)
                self._envs._calls.in_flight[env_id] = False
                self._own_queue.pop(0)
                raise
            self._own_queue.pop(0)

    def give_up(self) -> None:
        """Forget the envs that were put aside, before a full reset."""
        self._own_queue.clear()
        self._action_messages = []

    def recv(self, count: int, most: int, deadline: Deadline) -> StepBatch:
        """Return the rows that are ready, at most `most`, once there are at least `count`."""
        if self._own_queue or self._action_messages:
            self._do_own_part()
        ring = self._exchange.ring
        while True:
            ready = self._await(count, deadline)
            if ready > most:  # the others stay in the ring, in their order
                ready = self._first(most, ready)
            ids, index = ring.read_ids(ready), ring.index(ready)
            if not ring.has_status or self._are_explained(ids, index):
                break  # otherwise a worker has died before it sent what belongs to a row
        if self._exchange.has_replaced and (ids == VOID).any():
            chosen = np.flatnonzero(ids != VOID)
            ids, index = ids[chosen], (ring.head + chosen) % ring.size
        if self._limit_s is not None:
            self._heard[self._lanes[ids]] = time.monotonic()
        infos: dict[str, Any] = {}
        objects: list[list[Any]] = []
        faults: list[EnvFault] = []
        misfit: InfoError | None = None
        if ring.has_status or ring.has_forms:
            infos, faults, misfit = self._more(ids, index, objects)
        rewards, terminations, truncations = ring.flags(index)
        if self._envs._is_disabled:
            self._envs._note_ended(terminations | truncations, ids)
        if faults or misfit is not None:
            self._take(ids, ready)
            self._envs._calls.mark_received(ids)
            raise_faults(faults, self._exchange.steps)
            assert misfit is not None
            raise misfit
        obs = ring.obs(index, lambda leaf: [parts[leaf] for parts in objects])
        flags = rewards, terminations, truncations
        if self._envs.copy:
            obs = copy_batch(obs) if isinstance(index, slice) else obs
            flags = rewards.copy(), terminations.copy(), truncations.copy()
        self._take(ids, ready)
        if self._exchange.has_pending_updates:
            self._exchange.announce()
        return StepBatch(obs, *flags, infos, ids)

    def _first(self, most: int, ready: int) -> int:
        """Return how many of the rows that are ready hold the first `most` envs."""
        if not self._exchange.has_replaced:
            return most
        living = np.flatnonzero(self._exchange.ring.read_ids(ready) != VOID)
        return ready if len(living) <= most else int(living[most - 1]) + 1

    def _await(self, count: int, deadline: Deadline) -> int:
        """Do what `_await_rows` does, and log that if time is being taken."""
        if self._envs._log is None:
            return self._await_rows(count, deadline)
        with self._envs._waiting():
            return self._await_rows(count, deadline)

    def _await_rows(self, count: int, deadline: Deadline) -> int:
        """Wait until `count` rows that are not void are ready; return how many rows these are."""
        exchange, ring = self._exchange, self._exchange.ring
        wanted = count
        replaced: Counter[int] = Counter()
        while True:
            if self._limit_s is not None:
                self._replace_late(self._limit_s, replaced)
            ready = ring.wait(wanted)
            if ready >= wanted:
                if not exchange.has_replaced:
                    return ready
                voids = int((ring.read_ids(ready) == VOID).sum())
                if ready - voids >= count:
                    return ready
                wanted = count + voids
                continue
            exchange.check_workers(_DOING.format(exchange.steps), replaced)
            if deadline.is_over and ring.wait(wanted) < wanted:
                if deadline.is_limit and self._limit_s is not None:
                    continue  # late workers will be replaced
                late = self._missing().tolist()
                raise StepTimeoutError(
                    f"`recv` has timed out after {deadline.timeout} second(s) with {ready} of "
                    f"{count} results: waiting for envs {', '.join(map(str, late[:8]))}. They stay "
                    "in flight"
                )

    def _replace_late(self, limit_s: float, replaced: Counter[int]) -> None:
        """Replace the workers of envs that have taken too long, twice per wait at most."""
        now, ring = time.monotonic(), self._exchange.ring
        published = ring.published()
        if published > self._noted:  # these need not be what is waited for, nor enough of it
            ids = ring.ids(published - ring.head)[max(self._noted - ring.head, 0) :]
            self._heard[self._lanes[ids[ids != VOID]]] = now
            self._noted = published
        silent = now - self._heard > limit_s
        if not silent.any():
            return
        missing = self._missing()
        missing = missing[self._lanes[missing] >= 0]
        late = missing[silent[self._lanes[missing]]]
        late = self._responsible(late, now)
        for worker in np.unique(self._owners[late]).tolist():
            env_id = int(late[self._owners[late] == worker][0])
            replaced[worker] += 1
            if replaced[worker] > _MOST_REPLACEMENTS:
                raise StepTimeoutError(
                    f"env {env_id} has not come back within {limit_s} second(s), nor has it after "
                    f"{_MOST_REPLACEMENTS} restarts of its worker; it stays in flight"
                )
            self._exchange.replace_late(worker, limit_s, f"the step of env {env_id}")

    def _responsible(self, late: np.ndarray, now: float) -> np.ndarray:
        """Return the late envs of the worker that keeps others from writing; all if none does."""
        holder = self._exchange.link.find_holder()
        for worker, process in enumerate(self._exchange.pool.processes):
            its_envs = late[self._owners[late] == worker]
            if process.pid == holder and len(its_envs):
                self._heard[self._lanes[late]] = now  # the others' time begins anew
                return its_envs
        return late

    def _are_explained(self, ids: np.ndarray, index: slice | np.ndarray) -> bool:
        """Receive what belongs to rows by message; return False if it was lost with a worker."""
        words = self._exchange.ring.words(index)
        positions = words[:, ROW_SEQUENCE] - 1
        return all(
            self._exchange.has_row_answer(int(self._owners[ids[row]]), int(positions[row]))
            for row in np.flatnonzero(words[:, ROW_STATUS] & HAS_MESSAGE).tolist()
        )

    def _more(
        self, ids: np.ndarray, index: slice | np.ndarray, objects: list[list[Any]]
    ) -> tuple[dict[str, Any], list[EnvFault], InfoError | None]:
        """Collect what rows have beyond numbers: infos and faults; put objects there.

        Infos that can't be batched are an error of their own, to be raised when the rows have been
        handed out.
        """
        ring = self._exchange.ring
        words = ring.words(index)
        positions = words[:, ROW_SEQUENCE] - 1
        messages: dict[int, list[Any]] = {}
        with self._envs._taking_infos():
            faults = self._messages(words[:, ROW_STATUS], ids, positions, messages, objects)
            forms = words[:, ROW_FORM].copy()
            if faults or not (messages or forms.any()):
                return {}, faults, None
            try:
                columns, places = self._exchange.columns, positions % ring.size
                return columns.collect_ring(forms, messages, places, ids), faults, None
            except InfoError as error:
                return {}, faults, error

    def _messages(
        self,
        status: np.ndarray,
        ids: np.ndarray,
        positions: np.ndarray,
        messages: dict[int, list[Any]],
        objects: list[list[Any]],
    ) -> list[EnvFault]:
        """Take in what came by message with these rows; infos are left in `messages` by row."""
        faults: list[EnvFault] = []
        for row in np.flatnonzero(status & HAS_MESSAGE).tolist():
            worker = int(self._owners[ids[row]])
            answer = self._exchange.row_answer(worker, int(positions[row]))
            if answer.infos:
                messages[row] = answer.infos
            faults += answer.errors
            objects.append([leaf[0] for leaf in answer.objects])
        return faults
