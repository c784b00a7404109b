"""Threads inside a worker, for envs that wait rather than compute."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vecenv.infos import take_infos
from vecenv.shm.chunk import Chunk, Outcome
from vecenv.shm.columns import merge_infos
from vecenv.shm.faults import EnvFault

__all__ = ["MOST_THREADS", "EnvThreads", "WaitMeter"]

MOST_THREADS = 256
_MEASURED_STEPS = 64
_WAITING_SHARE = 0.5
_WORTHWHILE_NS = 200_000  # handing a step to a thread costs a tenth of this


class EnvThreads:
    """Threads that step single envs of a chunk as jobs come."""

    def __init__(
        self, chunk: Chunk, num_threads: int, deliver: Callable[[int, Outcome], None]
    ) -> None:
        self._chunk = chunk
        self._deliver = deliver
        self._jobs: queue.SimpleQueue[tuple[int, Any, int, list[Any] | None]] = queue.SimpleQueue()
        self._left = 0
        self._changed = threading.Condition()
        for number in range(num_threads):
            threading.Thread(target=self._work, daemon=True, name=f"env-steps-{number}").start()

    def begin(self, index: int, action: Any) -> None:
        """Let a thread step env `index` and deliver the outcome as a row of the ring."""
        with self._changed:
            self._left += 1
        self._jobs.put((index, action, 0, None))

    def step_all(self, slot: int, actions: Sequence[Any]) -> Outcome:
        """Step every env of the chunk, as many at a time as there are threads."""
        results: list[Any] = [None] * len(actions)
        self._chunk.rows(slot).has_ends = True
        self._chunk.mark_unwritten(slot)
        with self._changed:
            self._left += len(actions)
        for index, action in enumerate(actions):
            self._jobs.put((index, action, slot, results))
        self.settle()
        infos: dict[str, Any] = {}
        faults: list[EnvFault] = []
        for index, (env_infos, env_faults) in enumerate(results):
            faults += env_faults
            if env_infos:
                merge_infos(infos, take_infos(env_infos, np.array([index])), index, len(actions))
        return self._chunk.outcome(infos, faults)

    def settle(self) -> None:
        """Wait until no step is running or queued."""
        with self._changed:
            while self._left:
                self._changed.wait()

    def drop(self) -> None:
        """Give up the jobs that no thread has begun, and wait for the others."""
        while True:
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                break
            self._finish()
        self.settle()

    def _finish(self) -> None:
        with self._changed:
            self._left -= 1
            if not self._left:
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            index, action, slot, results = self._jobs.get()
            try:
                if results is None:
                    self._deliver(index, self._chunk.step_one(index, action))
                else:
                    results[index] = self._chunk.step_env(index, action, slot)
            finally:
                self._finish()


class WaitMeter:
    """Finds out from the first steps whether envs wait (sleep, network) or compute.

    Attributes:
        is_measuring: Whether more steps are wanted.
        found_waiting: The verdict: less than half of the time was spent computing.
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
        if self._steps >= _MEASURED_STEPS or self._wall_ns > 200_000_000:
            self.is_measuring = False
            # A process that is only kept from its core by others gives it up involuntarily.
            self.found_waiting = (
                self._cpu_ns < _WAITING_SHARE * self._wall_ns
                and self._wall_ns > _WORTHWHILE_NS * self._steps
                and 2 * self._switches >= self._steps
            )


def _voluntary_switches() -> int:
    import resource

    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw
