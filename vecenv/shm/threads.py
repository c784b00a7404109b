"""Threads inside a worker, for envs that wait rather than compute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vecenv.shm.chunk import Chunk, Outcome
from vecenv.shm.columns import Noted
from vecenv.shm.faults import EnvFault
from vecenv.shm.layout import QUEUE_HEAD, QUEUE_TAIL, THREADS, THREADS_DONE
from vecenv.shm.wait import Link

__all__ = ["MOST_THREADS", "EnvThreads", "WaitMeter"]

MOST_THREADS = 256
_MEASURED_STEPS, _MEASURED_NS = 64, 200_000_000
_WAITING_SHARE = 0.5
_WORTHWHILE_NS = 200_000  # handing a step to a thread costs a tenth of this


class _Barrier:
    """A step of all envs that threads share."""

    def __init__(self, slot: int, actions: Sequence[Any]) -> None:
        self.slot = slot
        self.actions = actions
        self.results: list[Any] = [None] * len(actions)
        self.is_done = threading.Event()
        self._left = len(actions)
        self._lock = threading.Lock()

    def note_done(self) -> None:
        """Count an env; the last one ends the step."""
        with self._lock:
            self._left -= 1
            if not self._left:
                self.is_done.set()


class EnvThreads:
    """Threads that take env ids out of the worker's queue and step these envs.

    Each waits on the queue itself, so whoever queues an id wakes the thread that steps the env, and
    the worker's own loop has no part in it.

    Args:
        chunk: The envs.
        worker: Whose queue.
        num_threads: Envs stepped at a time.
        link: Way to the queue.
        action_of: Returns the action of an env that was queued by the caller.
        deliver: Takes the outcome of a step that has more to say than numbers.
    """

    def __init__(
        self,
        chunk: Chunk,
        worker: int,
        num_threads: int,
        link: Link,
        *,
        action_of: Callable[[int], Any],
        deliver: Callable[[int, Outcome], None],
    ) -> None:
        self._chunk, self._worker, self._link = chunk, worker, link
        self._action_of, self._deliver = action_of, deliver
        self._env_ids = np.arange(chunk.first, chunk.last)
        self._owners = np.full(chunk.last, worker)
        self._barrier: _Barrier | None = None
        self._head = link.layout.completion(worker) + QUEUE_HEAD
        self._given_up = int(link.words[self._head])  # ids that no thread has stepped
        self._queue = link.layout.queue(worker)
        link.words[self._queue + THREADS_DONE] = 0
        link.words[self._queue + THREADS] = num_threads
        for number in range(num_threads):
            threading.Thread(target=self._work, daemon=True, name=f"env-steps-{number}").start()

    def step_all(self, slot: int, actions: Sequence[Any]) -> Outcome:
        """Step every env of the chunk, as many at a time as there are threads."""
        self._chunk.rows(slot).has_ends = True
        self._chunk.mark_unwritten(slot)
        barrier = self._barrier = _Barrier(slot, actions)
        self._link.push(self._env_ids, self._owners)
        barrier.is_done.wait()
        self.settle()
        self._barrier = None
        infos: dict[int, Noted] = {}
        faults: list[EnvFault] = []
        for env_infos, env_faults in barrier.results:
            faults += env_faults
            infos.update(env_infos)
        return self._chunk.outcome(infos, faults)

    def settle(self) -> None:
        """Wait until no step is running or queued."""
        tail = self._link.layout.command(self._worker) + QUEUE_TAIL
        words = self._link.words
        while words[self._queue + THREADS_DONE] + self._given_up < words[tail]:
            time.sleep(1e-4)

    def drop(self) -> None:
        """Give up the steps that no thread has begun, and wait for the others."""
        while self._link.pop(self._worker) >= 0:
            self._given_up += 1
        self.settle()

    def _work(self) -> None:
        link, worker, chunk = self._link, self._worker, self._chunk
        env_id = link.take(worker)
        while True:
            if env_id < 0:
                env_id = link.take(worker)
                continue
            index = env_id - chunk.first
            if (barrier := self._barrier) is not None:
                action = barrier.actions[index]
                barrier.results[index] = chunk.step_env(index, action, barrier.slot)
                link.note_done(worker)
                barrier.note_done()
                env_id = link.take(worker)
                continue
            status, form, answer = chunk.step_one(index, self._action_of(env_id))
            if answer is None:
                leaves = chunk.ring_leaves if form else chunk.bare_leaves
                env_id = link.publish_and_take(worker, leaves, env_id, status, form)
            else:
                self._deliver(index, (status, form, answer))
                link.note_done(worker)
                env_id = link.take(worker)


class WaitMeter:
    """Finds out from the first steps whether envs wait (sleep, network) or compute.

    Attributes:
        is_measuring: Whether more steps are wanted.
        found_waiting: The verdict so far: less than half of the time was spent computing.
    """

    def __init__(self) -> None:
        self.is_measuring = True
        self.found_waiting = False
        self._steps = 0
        self._wall_ns = self._cpu_ns = self._switches = 0
        self._begun = (0, 0, 0)

    def begin(self) -> None:
        """Note the clocks before some steps."""
        self._begun = (time.perf_counter_ns(), time.thread_time_ns(), _voluntary_switches())

    def end(self, num_steps: int) -> None:
        """Note the clocks after `num_steps` env steps."""
        wall_ns, cpu_ns, switches = self._begun
        self._wall_ns += time.perf_counter_ns() - wall_ns
        self._cpu_ns += time.thread_time_ns() - cpu_ns
        self._switches += _voluntary_switches() - switches
        self._steps += num_steps
        self.is_measuring = self._steps < _MEASURED_STEPS and self._wall_ns < _MEASURED_NS
        # A process that is only kept from its core by others gives it up involuntarily.
        self.found_waiting = (
            self._cpu_ns < _WAITING_SHARE * self._wall_ns
            and self._wall_ns > _WORTHWHILE_NS * self._steps
            and 2 * self._switches >= self._steps
        )


def _voluntary_switches() -> int:
    import resource

    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw
