"""Threads inside a worker, for envs that wait rather than compute."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from vecenv.workers.chunk import Chunk, Outcome
from vecenv.workers.layout import LANE_CURRENT, LANE_HEAD, LANE_TAIL
from vecenv.workers.links import JOB, Link

__all__ = ["Lanes"]

# A thread's part of a job: its number, and the (place, index) pairs of its calls.
_Share = tuple[int, list[tuple[int, int]]]
_EXIT_CODE = 70  # of a worker one of whose threads has failed: EX_SOFTWARE


class Lanes:
    """The threads of a worker that own its envs: env i of the chunk is thread i % num_lanes's.

    An env is made, called and closed by its own thread and by no other, as many simulators, OpenGL
    contexts and database connections want it. The worker's main thread gives jobs and waits for
    them; ids of envs to be stepped first-ready are taken by each thread from a queue of its own, so
    queueing an id wakes the thread that steps the env.

    Args:
        num_lanes: Number of threads.
    """

    def __init__(self, num_lanes: int) -> None:
        self.num_lanes = num_lanes
        self._lanes = [_Lane(number) for number in range(num_lanes)]
        self._shares: tuple[Sequence[int], list[_Share]] = ((), [])  # of the latest indices
        self._lines = np.zeros(num_lanes, np.int64)  # of the queues
        self._give_jobs: Callable[[np.ndarray], None] | None = None
        for lane in self._lanes:
            lane.start()

    def run_each(self, function: Callable[[int], Any], indices: Sequence[int]) -> list[Any]:
        """Call `function` with each index, in the thread that owns this env; wait for all.

        Returns:
            The results, in the order of `indices`.
        """
        if self._shares[0] != indices:
            self._shares = indices, self._share_out(indices)
        shares = self._shares[1]
        job = _Job(function, len(indices), len(shares))
        for number, pairs in shares:
            self._lanes[number].jobs.put((job, pairs))
        self._call(shares)
        job.wait()
        return job.results

    def _share_out(self, indices: Sequence[int]) -> list[_Share]:
        """Return which thread is to do what: pairs of (place in `indices`, index)."""
        pairs: dict[int, list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            pairs.setdefault(index % self.num_lanes, []).append((place, index))
        return list(pairs.items())

    def _call(self, shares: Sequence[tuple[int, Any]]) -> None:
        """Wake the threads that have been given a job."""
        if self._give_jobs is not None:
            lines = self._lines
            if len(shares) < self.num_lanes:
                lines = lines[[number for number, _ in shares]]
            self._give_jobs(lines)

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
        self._lines[:] = link.layout.lane_queues(worker)
        for lane, line in zip(self._lanes, self._lines.tolist(), strict=True):
            lane.begin(chunk, worker, link, words, line, step, deliver)
        self._give_jobs = link.give_jobs

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
            lane.jobs.put(None)
        self._call([(number, None) for number in range(self.num_lanes)])
        for lane in self._lanes:
            lane.join(1)


class _Job:
    """Calls that several threads share."""

    def __init__(self, function: Callable[[int], Any], count: int, num_shares: int) -> None:
        self.results: list[Any] = [None] * count
        self._function = function
        self._left = num_shares
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_done = threading.Event()

    def run(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make the calls of one thread: (place, index) of each."""
        for place, index in pairs:
            try:
                self.results[place] = self._function(index)
            except BaseException as error:  # goes to the main thread, as if called there
                self._error = self._error or error
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._is_done.set()

    def wait(self) -> None:
        """Wait until all calls are done; raise what one of them has raised."""
        if self.results:
            self._is_done.wait()
        if self._error is not None:
            raise self._error


class _Lane(threading.Thread):
    """A thread that owns envs.

    Attributes:
        jobs: What it is to do: calls of a job; None to end.
    """

    def __init__(self, number: int) -> None:
        super().__init__(daemon=True, name=f"envs-{number}")
        self.jobs: SimpleQueue[Any] = SimpleQueue()
        self._serve: Callable[[], None] | None = None
        self._words: Any = None
        self._line = 0

    def announce(self, env_id: int) -> None:
        self._words[self._line + LANE_CURRENT] = env_id + 1

    def drop(self) -> None:
        self._words[self._line + LANE_HEAD] = self._words[self._line + LANE_TAIL]

    def run(self) -> None:
        try:
            while self._serve is None:
                job, pairs = self.jobs.get()
                job.run(pairs)
                del job
            self._serve()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            os._exit(0)  # the caller is gone
        except BaseException:  # it can't be reported, and the caller would wait for ever
            traceback.print_exc()
            os._exit(_EXIT_CODE)

    def begin(  # noqa: PLR0917  # all from one caller, in this order
        self,
        chunk: Chunk,
        worker: int,
        link: Link,
        words: Any,
        line: int,
        step: Callable[[int], Outcome],
        deliver: Callable[[int, Outcome], None],
    ) -> None:
        """Let the thread wait for ids and jobs on its line of the control words."""
        command = link.layout.command(worker)

        def serve() -> None:
            num_jobs = 0
            env_id = link.take(line, num_jobs)
            while True:
                if env_id == JOB:
                    num_jobs += 1
                    given = self.jobs.get()
                    if given is None:
                        return
                    given[0].run(given[1])
                    del given
                elif env_id >= 0:
                    status, form, answer = step(env_id)
                    if answer is None and not chunk.is_stamped:
                        leaves = chunk.ring_leaves if form else chunk.bare_leaves
                        env_id = link.publish_and_take(
                            command, line, num_jobs, leaves, env_id, status, form
                        )
                        continue
                    deliver(env_id, (status, form, answer))
                env_id = link.take(line, num_jobs)

        def prepare(_: int) -> None:
            self._words, self._line, self._serve = words, line, serve

        self.jobs.put((_Job(prepare, 1, 1), [(0, 0)]))
