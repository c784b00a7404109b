"""Runs jobs: compiled, with helper threads if faster (picture: `jit/driver.py`), or in Python."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from weakref import finalize, ref

import numpy as np

from vecenv.core.compiling import cached_njit
from vecenv.core.rows import Outputs, aligned_zeros
from vecenv.jit import driver
from vecenv.jit.binding import Loop
from vecenv.jit.driver import JOB_DTYPE, STEP, STOP, Batch, control_words, first_invalid_row

# Helpers busy-wait after a job, so that they see the next one in less than 1 us.
NUM_SPINS = 3_000  # rounds of busy-waiting: 75 us at 2.6 GHz
CHUNKS_PER_PART = 4
ROWS_PER_LINE = 64  # bools on a cache line; chunks are multiples, so threads share none
MAX_THREADS = 62  # a bit set of threads must fit an int64
# A job that takes less on one thread is never split; each part takes at least half of this.
SPLIT_NS = 20_000
NUM_TRIED = 12  # jobs timed on one thread, then as many split
NUM_KEPT = 1200  # jobs done the faster way until both are timed again
_LOOK_S = 5.0  # between two looks of a sleeping helper whether its runner is still there

_publish = cached_njit(driver.publish)
_settle = cached_njit(driver.settle, nogil=True)
_leave = cached_njit(driver.leave)


class Runner:
    """Does jobs; shares long ones with helper threads.

    Helpers are started when jobs are first long enough. After each job they busy-wait for a moment,
    then sleep. An exception reaches the caller when no helper is inside the job any more.

    Attributes:
        num_threads: Maximum number of threads; 1 without compiled code.
        is_python: Whether jobs run as plain Python.

    Args:
        batch: The states of the vector env, and everything else that all its jobs share.
        note_cut: Called with an exception that leaves a job half done.
    """

    def __init__(
        self,
        loop: Loop,
        batch: Batch,
        bounds: np.ndarray,
        num_threads: int,
        note_cut: Callable[[BaseException], None],
    ) -> None:
        self.is_python = loop.attend is None
        self.num_threads = 1 if self.is_python else min(num_threads, MAX_THREADS)
        self._run: Any = loop.run_rows if self.is_python else loop.attend
        self._note_cut = note_cut
        self._bounds = bounds if bounds.shape[1] else None
        self._jobs = np.zeros(1, dtype=JOB_DTYPE)
        self._job = self._jobs[0]  # a view
        self._job["autoreset_mode"] = batch.autoreset_mode
        self._job["max_episode_steps"] = batch.max_episode_steps
        self._job["num_envs"] = len(batch.states)
        for name in ("states", "runs", "final_obs"):
            self._job[name] = getattr(batch, name).ctypes.data
        self._control = aligned_zeros((control_words(1),), np.int64)  # of jobs that are not shared
        self._described: Batch | None = None  # the job that the record describes
        self._choice = SplitChoice(len(batch.states))
        self._helpers: _Helpers | None = None

    def run(self, batch: Batch, num_rows: int, actions: np.ndarray, outputs: Outputs) -> int:
        """Do a job with R envs.

        `batch` says what is done with which envs; passing the same object again is quicker. Its
        actions, (R, ...) of the space's dtype, C-contiguous, and outputs, R rows, are replaced by
        the arguments. Arrays that the op does not read or write may be empty.

        Returns:
            The number of episodes that ended (for MASK: the number of masks that wrongly allow
            nothing); or -1 - row if the action of that row is out of bounds: then nothing was done.
        """
        try:
            if self.is_python:
                return self._interpret(batch, num_rows, actions, outputs)
            if batch is not self._described:
                self._describe(batch, num_rows)
            if self._num_parts > 1:
                return self._share(batch, actions, outputs)
            bad_row = _publish(self._control, self._jobs, self._bounds, actions, *outputs)
            return bad_row if bad_row < 0 else self._attend(self._control)
        except BaseException as error:
            if isinstance(error, Exception) and not self.is_python:
                error.add_note(
                    "A kernel raised this; some envs may be in the middle of a step. "
                    "An env made with debug=True shows the line in the traceback."
                )
            self._described = None
            self._note_cut(error)
            raise

    def stop(self) -> None:
        """End the helper threads; later jobs are done by the calling thread alone."""
        self.num_threads, self._described, self._helpers = 1, None, None

    def _interpret(self, batch: Batch, num_rows: int, actions: np.ndarray, outputs: Outputs) -> int:
        """Do a job as plain Python."""
        if batch.op == STEP and self._bounds is not None:
            bad_row = first_invalid_row(actions, self._bounds)
            if bad_row >= 0:
                return -1 - bad_row
        arrays = outputs._asdict()
        rewards = arrays.pop("rewards")
        is_float32 = rewards.itemsize == 4
        arrays["rewards32"] = rewards if is_float32 else rewards[:0]
        arrays["rewards64"] = rewards[:0] if is_float32 else rewards
        job = batch._replace(actions=actions, **arrays)
        return self._run(job, 0, num_rows)

    def _describe(self, batch: Batch, num_rows: int) -> None:
        """Fill in the record of a job, except for the addresses that `publish` sets."""
        env_ids, params = batch.env_ids, batch.params
        is_step = batch.op == STEP and len(env_ids) == 0
        self._is_timed = is_step and self._choice.is_timed and self.num_threads > 1
        self._num_parts = parts = min(self._choice.num_parts(num_rows), self.num_threads)
        lines = -(-num_rows // (parts * CHUNKS_PER_PART * ROWS_PER_LINE))  # rounded up
        record = self._job
        record["op"] = batch.op
        record["num_rows"] = num_rows
        record["env_ids"] = env_ids.ctypes.data if len(env_ids) else 0
        record["masks"] = batch.masks.ctypes.data
        if params is not None:  # it is never taken away
            record["num_params"], record["params"] = len(params), params.ctypes.data
        record["num_parts"] = parts
        record["chunk_rows"] = num_rows if parts == 1 else lines * ROWS_PER_LINE
        self._described = batch  # also keeps its arrays alive

    def _share(self, batch: Batch, actions: np.ndarray, outputs: Outputs) -> int:
        """Do the described job with helpers."""
        helpers = self._helpers
        if helpers is None or helpers.pid != os.getpid():  # a forked process has no other threads
            helpers = _Helpers(self._run, self._jobs, self.num_threads)
        self._helpers = None  # if the wait below is interrupted, too, these are not used again
        helpers.kept[0] = batch, actions, outputs  # helpers only have their addresses
        try:
            found = _publish(helpers.control, self._jobs, self._bounds, actions, *outputs)
            if found >= 0:
                helpers.wake(found)
                found = self._attend(helpers.control)
        except BaseException:
            helpers.wait()
            self._helpers = helpers
            raise
        self._helpers = helpers
        if helpers.failures:
            raise helpers.failures.pop()
        return found

    def _attend(self, control: np.ndarray) -> int:
        """Do the published job; use its duration to decide whether later jobs are split."""
        begin_ns = time.perf_counter_ns() if self._is_timed else 0
        num_ended = self._run(control, self._jobs, 0, NUM_SPINS)
        while num_ended < 0:  # helpers work on their last chunks, or joined too late
            time.sleep(0)  # let them run
            num_ended = _settle(control, NUM_SPINS)
        if self._is_timed and self._choice.note(time.perf_counter_ns() - begin_ns):
            self._described = None
        return num_ended


class SplitChoice:
    """Times steps of all envs on one thread and on several, and chooses the faster.

    Splitting is slower if other processes or threads use the processors, or if the caller works so
    long between steps that helpers fall asleep. Both change with time, so they are timed again.
    """

    def __init__(self, num_envs: int) -> None:
        self.is_split = False  # the next step
        self.is_timed = True  # likewise; False once steps are known to be short
        self._num_envs = num_envs
        self._times_ns: list[int] = []  # of the steps in this trial
        self._alone_ns = 0.0  # median of steps on one thread
        self._num_kept = 0  # steps until both are timed again

    def num_parts(self, num_rows: int) -> int:
        """Return the number of parts for a job of `num_rows` rows."""
        work_ns = self._alone_ns * num_rows / self._num_envs
        return int(2 * work_ns / SPLIT_NS) if self.is_split and work_ns >= SPLIT_NS else 1

    def note(self, elapsed_ns: int) -> bool:
        """Add the duration of a step; return whether jobs must now be described anew."""
        before = self.is_split, self.is_timed
        if self._num_kept:
            self._num_kept -= 1
            self.is_split &= self._num_kept > 0
            return before[0] != self.is_split
        self._times_ns.append(elapsed_ns)
        if len(self._times_ns) == NUM_TRIED:
            median_ns = statistics.median(self._times_ns)
            self._times_ns.clear()
            if self.is_split:
                self._num_kept, self.is_split = NUM_KEPT, median_ns < self._alone_ns
            else:
                self._alone_ns = median_ns
                self.is_split = self.is_timed = median_ns >= SPLIT_NS
        return before != (self.is_split, self.is_timed)


class _Helpers:
    """The threads that take part in the jobs of one runner; they end when this is deleted.

    `num_threads` includes the caller.
    """

    def __init__(self, attend: Any, jobs: np.ndarray, num_threads: int) -> None:
        self.pid = os.getpid()  # the process that has these threads
        self.control = aligned_zeros((control_words(num_threads),), np.int64)
        self.failures: list[BaseException] = []  # raised by kernels in helper threads
        self.kept: list[Any] = [None]  # what the current job keeps alive, with its arrays
        self._bells: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(1, num_threads)]
        finalize(self, _release, self.control, self._bells)
        for thread, bell in enumerate(self._bells, start=1):
            work = partial(attend, self.control, jobs, thread, NUM_SPINS)
            args = work, self.control, bell, self.failures, self.kept, ref(self)
            Thread(target=_help, args=args, name=f"vecenv-jit-{thread}", daemon=True).start()

    def wake(self, threads: int) -> None:
        """Wake the sleeping helpers of a bit set; awake ones make one more round."""
        for thread, bell in enumerate(self._bells, start=1):
            if threads >> thread & 1:
                bell.put(None)

    def wait(self) -> None:
        """Close a job that an exception has interrupted; wait until no helper is inside."""
        while _settle(self.control, NUM_SPINS) < 0:
            time.sleep(0)
        self.failures.clear()
        self.wake(-1)  # including helpers that were about to be woken


def _help(
    work: Any, control: np.ndarray, bell: Any, failures: list[BaseException], kept: Any, owner: Any
) -> None:
    """Take part in jobs until told to stop; the target of a helper thread.

    `kept` is not used: it keeps the arrays of a job alive while this thread works on it. Ctrl-C may
    keep the end of the `owner` from being told, so a sleeping thread looks for it sometimes.
    """
    while not control[STOP] and owner() is not None:
        try:
            work()
        except BaseException as error:
            failures.append(error)
            _leave(control)
        else:
            with suppress(Empty):
                bell.get(timeout=_LOOK_S)


def _release(control: np.ndarray, bells: list[SimpleQueue[None]]) -> None:
    """Make the helpers return, sleeping ones included."""
    control[STOP] = 1
    for bell in bells:
        bell.put(None)
