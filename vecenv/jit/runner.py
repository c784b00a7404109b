"""Runs jobs in compiled code, with helper threads where that pays; without the JIT, in Python."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from vecenv.fingerprint import cached_njit
from vecenv.jit import handover
from vecenv.jit.job import JOB_DTYPE, STEP, STOP, Batch, control_words
from vecenv.jit.results import Outputs
from vecenv.jit.splitting import SplitChoice, num_parts
from vecenv.rows import aligned_zeros

__all__ = ["CompiledRunner", "Fixed", "PythonRunner"]

# After a job, helpers wait awake for the next one, which they then get in less than 1 us.
NUM_SPINS = 3_000  # rounds that they wait: 75 us at 2.6 GHz
# To wake them takes longer than short jobs do, so they are woken for jobs from this length on, or
# if jobs follow each other so closely that they will stay awake.
WAKE_NS = 200_000
CLOSE_NS = 100_000
CHUNKS_PER_PART = 4
ROWS_PER_LINE = 64  # bools on a cache line; chunks are multiples, so threads don't share lines
MAX_THREADS = 62  # bits of an int64
NUM_TIMED = 5  # jobs done on one thread to see how long they take

_publish = cached_njit(handover.publish)
_settle = cached_njit(handover.settle, nogil=True)
_leave = cached_njit(handover.leave)
_first_invalid_row: Any = getattr(handover.first_invalid_row, "py_func", handover.first_invalid_row)


class Fixed(NamedTuple):
    """What stays the same over all jobs of a vector env with N envs."""

    autoreset_mode: int
    max_episode_steps: int
    states: np.ndarray  # (N,) state records
    runs: np.ndarray  # (N,) RUN_DTYPE
    params: np.ndarray | None  # (1,) parameter record
    action_bounds: np.ndarray  # int64 (2, K), lowest and highest of each element; K = 0: any
    final_obs: np.ndarray  # (N, *obs_shape), or (0, *obs_shape) where it is not needed


_NO_IDS = np.zeros(0, dtype=np.int64)
_NO_MASKS = np.zeros((0, 0), dtype=np.bool_)


class PythonRunner:
    """Does jobs without compiled code; slow, for debugging and for coverage."""

    num_threads = 1

    def __init__(self, run_rows: Any, fixed: Fixed) -> None:
        self._run_rows = self._unstamped = run_rows
        self._fixed = fixed

    def stamp(self, note: Callable[[int, int], None] | None) -> None:
        """Call `note` with beginning and end of every job from now on; None ends it."""
        self._run_rows = self._unstamped if note is None else _stamped(self._unstamped, note)

    def step(self, actions: np.ndarray, *outputs: np.ndarray) -> int:
        """Step all envs; see `CompiledRunner.step`."""
        return self.run(STEP, len(actions), actions, Outputs(*outputs))

    def run(
        self,
        op: int,
        num_rows: int,
        actions: np.ndarray,
        outputs: Outputs,
        *,
        env_ids: np.ndarray = _NO_IDS,
        masks: np.ndarray = _NO_MASKS,
    ) -> int:
        """Do one job; see `CompiledRunner.run`."""
        fixed = self._fixed
        bad_row = _first_invalid_row(actions, fixed.action_bounds) if op == STEP else -1
        if bad_row >= 0:
            return -1 - bad_row
        rewards = outputs.rewards
        unused = rewards[:0]
        is_float32 = rewards.itemsize == 4
        batch = Batch(
            op,
            fixed.autoreset_mode,
            fixed.max_episode_steps,
            fixed.states,
            fixed.runs,
            fixed.params,
            env_ids,
            actions,
            outputs.obs,
            rewards if is_float32 else unused,
            unused if is_float32 else rewards,
            outputs.terminations,
            outputs.truncations,
            fixed.final_obs,
            masks,
        )
        return self._run_rows(batch, 0, num_rows)

    def stop(self) -> None:
        """Do nothing: there are no threads."""


class CompiledRunner:
    """Does jobs in compiled code; long ones are shared with helper threads.

    Helpers are started when jobs are first found to be long enough. They inherit the processors
    that the starting thread may use, wait awake for a moment after each job, and then sleep.
    """

    def __init__(self, attend: Any, fixed: Fixed, num_threads: int) -> None:
        self.num_threads = min(num_threads, MAX_THREADS)
        self._attend = self._unstamped = attend
        self._fixed = fixed  # keeps alive what the job has addresses of
        self._bounds = fixed.action_bounds
        self._control = aligned_zeros((control_words(self.num_threads),), np.int64)
        self._jobs = np.zeros(1, dtype=JOB_DTYPE)
        self._job = self._jobs[0]  # a view
        self._job["autoreset_mode"] = fixed.autoreset_mode
        self._job["max_episode_steps"] = fixed.max_episode_steps
        self._job["num_envs"] = len(fixed.states)
        for name in ("states", "runs", "params", "final_obs"):
            array = getattr(fixed, name)
            self._job[name] = 0 if array is None else array.ctypes.data
        self._row_ns = np.inf  # how long a step of one env takes
        self._num_to_time = NUM_TIMED
        self._helpers: _Helpers | None = None
        self._in_use = threading.Lock()
        self._choice = SplitChoice()
        self._end_ns = 0  # when the last job ended that was split
        self._may_wake = False
        self._describe_step()

    def step(
        self,
        actions: np.ndarray,
        obs: np.ndarray,
        rewards: np.ndarray,
        terminations: np.ndarray,
        truncations: np.ndarray,
    ) -> int:
        """Step all envs.

        Args:
            actions: (N, *action_shape) of the action space's dtype, C-contiguous.
            obs: Where to write, as the next three; see `Outputs`.
            rewards: (N,).
            terminations: (N,).
            truncations: (N,).

        Returns:
            The number of episodes that ended; or -1 - row if the action of that row is out of
            bounds, and then nothing was done.
        """
        if not self._in_use.acquire(False):
            raise RuntimeError("this vector env is being used by another thread")
        try:
            return self._do(actions, obs, rewards, terminations, truncations)
        finally:
            self._in_use.release()

    def run(
        self,
        op: int,
        num_rows: int,
        actions: np.ndarray,
        outputs: Outputs,
        *,
        env_ids: np.ndarray = _NO_IDS,
        masks: np.ndarray = _NO_MASKS,
    ) -> int:
        """Do any job.

        Args:
            op: STEP, RESET, OBSERVE or MASK.
            num_rows: How many envs it is about, R.
            actions: As for `step`, one per row; empty for other ops.
            outputs: Rewards and flags are written by STEP only, obs by all but MASK; what is not
                written may be empty.
            env_ids: int64 (R,), the env of each row; empty for all envs in order.
            masks: bool (R, num_actions), written by MASK.

        Returns:
            As `step`.
        """
        if not self._in_use.acquire(False):
            raise RuntimeError("this vector env is being used by another thread")
        try:
            self._describe(op, num_rows, env_ids, masks)
            return self._do(actions, *outputs)
        finally:
            self._describe_step()
            self._in_use.release()

    def stop(self) -> None:
        """End the helper threads; later jobs are done by the calling thread alone."""
        if self._helpers is not None:
            self._helpers.stop()
            self._helpers = None
        self.num_threads = 1
        self._describe_step()

    def stamp(self, note: Callable[[int, int], None] | None) -> None:
        """Call `note` with beginning and end of every job from now on; None ends it."""
        self._attend = self._unstamped if note is None else _stamped(self._unstamped, note)

    def _describe_step(self) -> None:
        self._describe(STEP, len(self._fixed.states), _NO_IDS, _NO_MASKS)

    def _describe(self, op: int, num_rows: int, env_ids: np.ndarray, masks: np.ndarray) -> None:
        """Fill in the job but for the addresses that `publish` knows."""
        self._work_ns = work_ns = 0.0 if self._num_to_time else num_rows * self._row_ns
        self._could_split = num_parts(work_ns, self.num_threads) > 1
        parts = num_parts(work_ns, self.num_threads) if self._choice.is_split else 1
        lines = -(-num_rows // (parts * CHUNKS_PER_PART * ROWS_PER_LINE))
        self._is_step = op == STEP and len(env_ids) == 0
        job = self._job
        job["op"] = op
        job["num_rows"] = num_rows
        job["num_ids"] = len(env_ids)
        job["env_ids"] = env_ids.ctypes.data
        job["masks"] = masks.ctypes.data
        job["num_parts"] = self._num_parts = parts
        job["chunk_rows"] = num_rows if parts == 1 else lines * ROWS_PER_LINE

    def _do(self, actions: np.ndarray, *outputs: np.ndarray) -> int:
        if self._num_parts > 1:
            self._call_helpers()
        to_wake = _publish(self._control, self._jobs, actions, self._bounds, *outputs)
        if to_wake < 0:
            return to_wake
        if to_wake > 0:
            assert self._helpers is not None
            self._helpers.wake(to_wake)
        is_timed = self._num_to_time > 0 or self._could_split
        begin_ns = time.perf_counter_ns() if is_timed else 0
        try:
            num_ended = self._attend(self._control, self._jobs, 0, NUM_SPINS)
        except BaseException as error:
            self._wait()
            self._raise_failure(error)
        if num_ended < 0:
            num_ended = self._wait()
        if is_timed:
            self._note_times(begin_ns, time.perf_counter_ns())
        return num_ended

    def _call_helpers(self) -> None:
        """Have helpers, and decide whether to wake those who sleep for the job to come."""
        if self._helpers is None or self._helpers.pid != os.getpid():
            if self._helpers is not None:
                self._helpers.forget()
            self._helpers = _Helpers(self._unstamped, self._control, self._jobs, self.num_threads)
        is_close = time.perf_counter_ns() - self._end_ns < CLOSE_NS
        may_wake = is_close or self._work_ns >= WAKE_NS
        if may_wake != self._may_wake:
            self._job["may_wake"] = self._may_wake = may_wake

    def _wait(self) -> int:
        """Wait until the last helper has left the job; they are within a chunk of rows."""
        while (num_ended := _settle(self._control, NUM_SPINS)) < 0:
            time.sleep(0)
        return num_ended

    def _raise_failure(self, error: BaseException) -> NoReturn:
        """Raise what a kernel raised, in this thread or in a helper."""
        if self._helpers is not None:
            self._helpers.failures.clear()
        error.add_note(
            "This came from a kernel; some envs may have been left in the midst of a step. "
            "An env made with debug=True shows the line in the traceback."
        )
        raise error

    def _note_times(self, begin_ns: int, end_ns: int) -> None:
        """Learn from a job how long envs take, and whether to split; see that it went well."""
        if self._num_parts > 1:
            self._end_ns = end_ns
            if self._helpers is not None and self._helpers.failures:
                self._raise_failure(self._helpers.failures[0])
        if not self._is_step:
            return
        elapsed_ns = end_ns - begin_ns
        if self._num_to_time:
            self._row_ns = min(self._row_ns, elapsed_ns / len(self._fixed.states))
            self._num_to_time -= 1
            if self._num_to_time == 0:
                self._describe_step()
        elif self._choice.note(elapsed_ns):
            self._describe_step()


def _stamped(job: Any, note: Callable[[int, int], None]) -> Callable[..., Any]:
    """Return a function that does a job and notes when, also if it raises."""

    def run(*args: Any) -> Any:
        begin_ns = time.perf_counter_ns()
        try:
            return job(*args)
        finally:
            note(begin_ns, time.perf_counter_ns())

    return run


class _Helpers:
    """Threads that take part in the jobs of one runner.

    Attributes:
        pid: The process they live in; a forked child has none of them.
        failures: What kernels have raised in them.
    """

    def __init__(
        self, attend: Any, control: np.ndarray, jobs: np.ndarray, num_threads: int
    ) -> None:
        self.pid = os.getpid()
        self.failures: list[BaseException] = []
        control[:] = 0  # after a fork it is as it was in the parent
        self._locks = [threading.Lock() for _ in range(num_threads)]
        self._threads: list[threading.Thread] = []
        self._let_go = weakref.finalize(self, _let_go, control, self._locks)
        for thread, lock in enumerate(self._locks[1:], start=1):
            lock.acquire()
            args = (attend, control, jobs, thread, lock, self.failures)
            name = f"vecenv-jit-{thread}"
            self._threads.append(threading.Thread(target=_help, args=args, name=name, daemon=True))
            self._threads[-1].start()

    def wake(self, threads: int) -> None:
        """Wake the sleeping helpers of a bit set."""
        for thread in range(1, len(self._locks)):
            if threads >> thread & 1:
                self._locks[thread].release()

    def stop(self) -> None:
        """End the threads."""
        self._let_go()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def forget(self) -> None:
        """Give up threads that a forked child does not have."""
        self._let_go.detach()


def _help(
    attend: Any,
    control: np.ndarray,
    jobs: np.ndarray,
    thread: int,
    lock: threading.Lock,
    failures: list[BaseException],
) -> None:
    """Take part in jobs until told to stop; what a helper thread does."""
    while not control[STOP]:
        try:
            attend(control, jobs, thread, NUM_SPINS)
        except BaseException as error:
            failures.append(error)
            _leave(control)
        else:
            lock.acquire()


def _let_go(control: np.ndarray, locks: list[threading.Lock]) -> None:
    """Make the helpers return, also those asleep; they are not waited for."""
    control[STOP] = 1
    for lock in locks[1:]:
        if lock.locked():
            lock.release()
