"""Threads inside a worker, for envs that wait rather than compute, and how to find these out."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from vecenv.shm.chunk import Chunk, Outcome
from vecenv.shm.layout import LANE_CURRENT, LANE_HEAD, LANE_TAIL
from vecenv.shm.wait import JOB, Link

__all__ = ["MOST_THREADS", "Lanes", "WaitMeter"]

MOST_THREADS = 256
_MEASURED_STEPS, _MEASURED_NS = 64, 200_000_000
_WAITING_SHARE = 0.5
_WORTHWHILE_NS = 200_000  # handing a step to a thread costs a tenth of this
_EXIT_CODE = 70  # of a worker one of whose threads has failed: EX_SOFTWARE


class Lanes:
    """The threads of a worker that own its envs: env i of the chunk is thread i % num_lanes's.

    An env is made, called and closed by its own thread and by no other, as many simulators, OpenGL
    contexts and database connections want it. The worker's main thread gives jobs and waits for
    them; ids of envs to be stepped first-ready are taken by each thread from a queue of its own, so
    whoever queues an id wakes the thread that steps the env.

    Args:
        num_lanes: Number of threads.
    """

    def __init__(self, num_lanes: int) -> None:
        self.num_lanes = num_lanes
        self._lanes = [_Lane(number) for number in range(num_lanes)]
        for lane in self._lanes:
            lane.start()

    def run_each(self, function: Callable[[int], Any], indices: Sequence[int]) -> list[Any]:
        """Call `function` with each index, in the thread that owns this env; wait for all.

        Returns:
            The results, in the order of `indices`.
        """
        job = _Job(function, len(indices))
        shares: dict[int, list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            shares.setdefault(index % self.num_lanes, []).append((place, index))
        for number, share in shares.items():
            self._lanes[number].give(job.part(share))
        job.wait()
        return job.results

    def begin(
        self,
        chunk: Chunk,
        worker: int,
        link: Link,
        words: Any,
        *,
        step: Callable[[int], Outcome],
        deliver: Callable[[int, Outcome], None],
    ) -> None:
        """Let the threads take ids from their queues from now on.

        Args:
            chunk: The envs.
            worker: Number of this worker.
            link: Way to the queues.
            words: The control words.
            step: Steps an env that was queued by the caller.
            deliver: Takes the outcome of a step that has more to say than numbers.
        """
        for lane, queue in zip(self._lanes, link.layout.lane_queues(worker), strict=True):
            lane.begin(chunk, worker, link, words, queue, step, deliver)

    def drop(self, index: int) -> None:
        """Give up what is queued for an env's thread; to be called in that thread."""
        self._lanes[index % self.num_lanes].drop()

    def announce(self, env_id: int) -> None:
        """Say at which env the calling thread is."""
        lane = threading.current_thread()
        assert isinstance(lane, _Lane)
        lane.announce(env_id)

    def end(self) -> None:
        """End the threads, which must have closed their envs."""
        for lane in self._lanes:
            lane.give(None)
        for lane in self._lanes:
            lane.join(1)


class _Job:
    """Calls that several threads share."""

    def __init__(self, function: Callable[[int], Any], count: int) -> None:
        self.results: list[Any] = [None] * count
        self._function = function
        self._left = count
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_done = threading.Event()
        if not count:
            self._is_done.set()

    def part(self, share: list[tuple[int, int]]) -> Callable[[], None]:
        """Return what one thread is to do: the calls for its (place, index) pairs."""

        def run() -> None:
            for place, index in share:
                try:
                    self.results[place] = self._function(index)
                except BaseException as error:  # goes to the main thread, as if called there
                    self._error = self._error or error
            with self._lock:
                self._left -= len(share)
                if not self._left:
                    self._is_done.set()

        return run

    def wait(self) -> None:
        """Wait until all calls are done; raise what one of them has raised."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error


class _Lane(threading.Thread):
    """A thread that owns envs."""

    def __init__(self, number: int) -> None:
        super().__init__(daemon=True, name=f"envs-{number}")
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._give: Callable[[], None] = lambda: None
        self._step: Callable[[], None] | None = None
        self._words: Any = None
        self._queue = 0

    def give(self, job: Callable[[], None] | None) -> None:
        """Let the thread do this next; None ends it."""
        self._jobs.put(job)
        self._give()

    def announce(self, env_id: int) -> None:
        self._words[self._queue + LANE_CURRENT] = env_id + 1

    def drop(self) -> None:
        self._words[self._queue + LANE_HEAD] = self._words[self._queue + LANE_TAIL]

    def run(self) -> None:
        try:
            while self._step is None:
                job = self._jobs.get()
                if job is None:
                    return
                job()
            self._step()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            os._exit(0)  # the caller is gone
        except BaseException:  # nobody could be told, and the caller would wait for ever
            traceback.print_exc()
            os._exit(_EXIT_CODE)

    def begin(  # noqa: PLR0917
        self,
        chunk: Chunk,
        worker: int,
        link: Link,
        words: Any,
        queue: int,
        step: Callable[[int], Outcome],
        deliver: Callable[[int, Outcome], None],
    ) -> None:
        command = link.layout.command(worker)

        def serve() -> None:
            jobs = 0
            env_id = link.take(queue, jobs)
            while True:
                if env_id == JOB:
                    jobs += 1
                    job = self._jobs.get()
                    if job is None:
                        return
                    job()
                    del job
                elif env_id >= 0:
                    status, form, answer = step(env_id)
                    if answer is None:
                        leaves = chunk.ring_leaves if form else chunk.bare_leaves
                        env_id = link.publish_and_take(
                            command, queue, jobs, leaves, env_id, status, form
                        )
                        continue
                    deliver(env_id, (status, form, answer))
                env_id = link.take(queue, jobs)

        def prepare() -> None:
            self._words, self._queue, self._step = words, queue, serve

        self._jobs.put(prepare)
        self._give = lambda: link.give_job(queue)


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
