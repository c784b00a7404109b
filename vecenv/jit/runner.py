"""Runs jobs in compiled code, with helper threads if that is faster; without the JIT in Python."""

from __future__ import annotations

import contextlib
import inspect
import statistics
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from vecenv.core.compiling import cached_njit
from vecenv.core.rows import Outputs, aligned_zeros
from vecenv.jit import driver
from vecenv.jit.arrays import first_invalid_row
from vecenv.jit.driver import ACTIVE, CALLER, JOB_DTYPE, OPEN, STOP, control_words
from vecenv.jit.episodes import STEP, Batch

__all__ = ["CompiledRunner", "Fixed", "Job", "PythonRunner", "SplitChoice", "num_parts"]

# After a job, helpers wait awake for the next one, which they then get in less than 1 us.
NUM_SPINS = 3_000  # rounds that they wait: 75 us at 2.6 GHz
# Waking them takes longer than a short job, so they are woken only for jobs of at least this
# length, or if jobs follow each other so closely that they will stay awake.
WAKE_NS = 200_000
CLOSE_NS = 100_000
CHUNKS_PER_PART = 4
ROWS_PER_LINE = 64  # bools on a cache line; chunks are multiples, so threads don't share lines
MAX_THREADS = 62  # bits of an int64
NUM_TIMED = 5  # jobs done on one thread to see how long they take
# A job that takes less than this on one thread is never split; parts take at least half of it.
SPLIT_NS = 20_000
NUM_TRIED = 12  # jobs timed split, then as many not split
NUM_KEPT = 1200  # jobs done the faster way until both are timed again

_publish = cached_njit(driver.publish)
_settle = cached_njit(driver.settle, nogil=True)
_leave = cached_njit(driver.leave)


class Fixed(NamedTuple):
    """The settings and arrays that all jobs of a vector env with N envs share."""

    autoreset_mode: int
    max_episode_steps: int
    states: np.ndarray  # (N,) state records
    runs: np.ndarray  # (N,) RUN_DTYPE
    params: np.ndarray | None  # (1,) parameter record, or (N,), of each env
    action_bounds: np.ndarray  # int64 (2, K), lowest and highest of each element; K = 0: any
    final_obs: np.ndarray  # (N, *obs_shape), or (0, *obs_shape) where it is not needed
    no_actions: np.ndarray  # (0, *action_shape) of the action space's dtype


class Job(NamedTuple):
    """What to do with which envs.

    Attributes:
        op: STEP, RESET, OBSERVE or MASK.
        num_rows: Number of envs, R.
        env_ids: int64 (R,), the env of each row; empty for all envs in order.
        masks: bool (R, num_actions), written by MASK.
    """

    op: int
    num_rows: int
    env_ids: np.ndarray = np.zeros(0, dtype=np.int64)
    masks: np.ndarray = np.zeros((0, 0), dtype=np.bool_)


_OTHER_JOB = -1  # of `_step_parts`


class PythonRunner:
    """Does jobs without compiled code; slow, for debugging and for coverage.

    Attributes:
        is_cut: Whether Ctrl-C has left a job partly done.
        is_python: Whether jobs run as plain Python.
    """

    num_threads = 1
    is_cut = False
    is_python = True

    def __init__(self, run_rows: Any, fixed: Fixed) -> None:
        self._run_rows = self._unstamped = run_rows
        self._fixed = fixed
        self._step_job = Job(STEP, len(fixed.states))

    def stamp(self, note: Callable[[int, int], None] | None) -> None:
        """Call `note` with the start and end of every job from now on; None ends it."""
        self._run_rows = self._unstamped if note is None else _stamped(self._unstamped, note)

    def step(self, actions: np.ndarray, outputs: Outputs) -> int:
        """Step all envs; see `CompiledRunner.step`."""
        return self.run(self._step_job, actions, outputs)

    def run(self, job: Job, actions: np.ndarray, outputs: Outputs) -> int:
        """Do one job; see `CompiledRunner.run`."""
        fixed = self._fixed
        actions = actions.copy()  # another thread may change the caller's after the check
        bad_row = first_invalid_row(actions, fixed.action_bounds) if job.op == STEP else -1
        if bad_row >= 0:
            return -1 - bad_row
        rewards = outputs.rewards
        unused = rewards[:0]
        is_float32 = rewards.itemsize == 4
        batch = Batch(
            job.op,
            fixed.autoreset_mode,
            fixed.max_episode_steps,
            fixed.states,
            fixed.runs,
            fixed.params,
            job.env_ids,
            actions,
            outputs.obs,
            rewards if is_float32 else unused,
            unused if is_float32 else rewards,
            outputs.terminations,
            outputs.truncations,
            fixed.final_obs,
            job.masks,
        )
        self.is_cut = False
        try:
            return self._run_rows(batch, 0, job.num_rows)
        except BaseException as error:
            self.is_cut = not isinstance(error, Exception)
            raise

    def set_params(self, params: np.ndarray) -> None:
        """From now on use other parameter records."""
        self._fixed = self._fixed._replace(params=params)

    def end_cut_job(self) -> None:
        """Do nothing: no thread continues the job."""

    def stop(self) -> None:
        """Do nothing: there are no threads."""

    def note_fork(self) -> bool:
        """Return whether a job was cut short in this forked process: not known here."""
        return False


class CompiledRunner:
    """Does jobs in compiled code; long ones are shared with helper threads.

    Helpers are started when jobs are first found to be long enough. They inherit the processors
    that the starting thread may use, wait awake for a moment after each job, and then sleep.

    A signal handler may raise at any instant, in Python code as after any call. The state is
    therefore changed by single assignments, between which no handler runs: they mark that a job is
    open, or that the next call has to tidy up the record. A job that was opened to helpers is
    completed before the exception propagates; its arrays are kept until then.

    Attributes:
        is_cut: Whether a second exception interrupted that; the next call completes the job.
    """

    is_python = False

    def __init__(self, attend: Any, fixed: Fixed, num_threads: int) -> None:
        self.num_threads = min(num_threads, MAX_THREADS)
        self._attend = self._unstamped = attend
        self._fixed = fixed  # keeps the arrays alive whose addresses are in the job
        self._step_job = Job(STEP, len(fixed.states))
        self._bounds = fixed.action_bounds if fixed.action_bounds.shape[1] else None
        self._control_words = control_words(self.num_threads)
        self._control = aligned_zeros((self._control_words,), np.int64)
        self._own_actions = aligned_zeros(
            (0 if self._bounds is None else len(fixed.states), *fixed.no_actions.shape[1:]),
            fixed.no_actions.dtype,
        )
        self._jobs = np.zeros(1, dtype=JOB_DTYPE)
        self._job = self._jobs[0]  # a view
        self._job["autoreset_mode"] = fixed.autoreset_mode
        self._job["max_episode_steps"] = fixed.max_episode_steps
        self._job["num_envs"] = len(fixed.states)
        self._job["num_params"] = 0 if fixed.params is None else len(fixed.params)
        self._job["own_actions"] = self._own_actions.ctypes.data
        for name in ("states", "runs", "params", "final_obs"):
            array = getattr(fixed, name)
            self._job[name] = 0 if array is None else array.ctypes.data
        self._row_ns = np.inf  # duration of the step of one env
        self._num_to_time = NUM_TIMED
        self._helpers: _Helpers | None = None
        # Empty during a call. No lock: a handler may run between `acquire` and `try`.
        self._free: dict[int, None] = {0: None}
        self._choice = SplitChoice()
        self._end_ns = 0  # end of the last job that was split
        self._may_wake = False
        self.is_cut = False
        # Parts of the next step; 0 if the record of the job has to be tidied up before, _OTHER_JOB
        # if it is whole and of another job.
        self._step_parts = 0
        self._describe_step()

    def step(self, actions: np.ndarray, outputs: Outputs) -> int:
        """Step all envs.

        Args:
            actions: (N, *action_shape) of the action space's dtype, C-contiguous.
            outputs: Of N rows, written.

        Returns:
            The number of episodes that ended; or -1 - row if the action of that row is out of
            bounds, and then nothing was done.

        Raises:
            RuntimeError: Another call has not returned yet.
        """
        try:
            del self._free[0]
        except KeyError:
            _refuse()
        try:
            parts = self._step_parts
            if parts == 1:
                return self._do_alone(actions, outputs)
            if parts == 0:  # after an exception
                self._tidy_up()
            elif parts == _OTHER_JOB:
                self._describe_step()
            return self._do(self._step_job, actions, outputs)
        finally:
            self._free[0] = None

    def run(self, job: Job, actions: np.ndarray, outputs: Outputs) -> int:
        """Do any job.

        Args:
            job: See `Job`.
            actions: As for `step`, one per row; empty for other ops.
            outputs: Rewards and flags are written by STEP only, obs by all but MASK; arrays that
                are not written may be empty.

        Returns:
            As `step`.
        """
        try:
            del self._free[0]
        except KeyError:
            _refuse()
        try:
            if self._step_parts == 0:
                self._tidy_up()
            self._step_parts = 0  # until the record is that of a step again
            self._describe(job)
            num_ended = self._do(job, actions, outputs)
            self._step_parts = _OTHER_JOB  # another such job may follow, of `recv`
            return num_ended
        finally:
            self._free[0] = None

    def set_params(self, params: np.ndarray) -> None:
        """From now on use other parameter records, between two jobs."""
        self.end_cut_job()
        self._fixed = self._fixed._replace(params=params)
        self._job["params"], self._job["num_params"] = params.ctypes.data, len(params)

    def end_cut_job(self) -> None:
        """Complete a job that was cut short, before anything else touches the envs."""
        if not self.is_cut:
            return
        try:
            del self._free[0]
        except KeyError:
            _refuse()
        try:
            self._tidy_up()
        finally:
            self._free[0] = None

    def stop(self) -> None:
        """End the helper threads; later jobs are done by the calling thread alone."""
        self.num_threads = 1
        self._step_parts = 0  # the record is described anew before it is used
        if (helpers := self._helpers) is not None:
            helpers.stop()
            self._helpers = None

    def note_fork(self) -> bool:
        """Adapt to a forked process, in which there are no other threads.

        Returns:
            Whether another thread was in a job, which no thread will complete here.
        """
        self._control[OPEN] = self._control[ACTIVE] = 0  # helpers that were inside are gone
        if self._helpers is not None:
            self._helpers.forget()
            self._helpers = None
        if 0 in self._free:
            return False
        frame: Any = inspect.currentframe()
        while frame is not None:
            if frame.f_code in _CALLS and frame.f_locals["self"] is self:
                return self._step_parts != 1  # this thread is, and a signal handler forked
            frame = frame.f_back
        self._step_parts = 0
        self._free = {0: None}
        return True

    def stamp(self, note: Callable[[int, int], None] | None) -> None:
        """Call `note` with the start and end of every job from now on; None ends it."""
        self._attend = self._unstamped if note is None else _stamped(self._unstamped, note)

    def _describe_step(self) -> None:
        self._step_parts = 0
        parts = self._describe(self._step_job)
        self._step_parts = parts  # from here on, the record may be used

    def _describe(self, job: Job) -> int:
        """Fill in the record of a job, except addresses that `publish` sets; return its parts."""
        op, num_rows, env_ids, masks = job
        self._work_ns = work_ns = 0.0 if self._num_to_time else num_rows * self._row_ns
        self._could_split = num_parts(work_ns, self.num_threads) > 1
        self._is_timed = self._num_to_time > 0 or self._could_split
        parts = num_parts(work_ns, self.num_threads) if self._choice.is_split else 1
        lines = -(-num_rows // (parts * CHUNKS_PER_PART * ROWS_PER_LINE))
        self._is_step = op == STEP and len(env_ids) == 0
        record = self._job
        record["op"] = op
        record["num_rows"] = num_rows
        record["num_ids"] = len(env_ids)
        record["env_ids"] = env_ids.ctypes.data
        record["masks"] = masks.ctypes.data
        record["num_parts"] = self._num_parts = parts
        record["chunk_rows"] = num_rows if parts == 1 else lines * ROWS_PER_LINE
        return parts

    def _do(self, job: Job, actions: np.ndarray, outputs: Outputs) -> int:
        """Do the job that has been described."""
        if self._num_parts == 1:
            return self._do_alone(actions, outputs)
        helpers = self._call_helpers()
        helpers.arrays = (job, actions, outputs)
        try:
            to_wake = _publish(self._control, self._jobs, self._bounds, actions, *outputs)
            if to_wake < 0:
                return to_wake
            if to_wake > 0:
                helpers.wake(to_wake)
            begin_ns = time.perf_counter_ns() if self._is_timed else 0
            num_ended = self._attend(self._control, self._jobs, 0, NUM_SPINS)
            if num_ended < 0:
                num_ended = self._settle()
            if self._is_timed:
                self._note_times(begin_ns, time.perf_counter_ns())
        except BaseException as error:
            self.is_cut, self._step_parts = True, 0
            is_kernels = self._control[CALLER] != 0  # else it came from a signal handler
            self._tidy_up()
            if is_kernels:
                _add_kernel_note(error)
            raise
        helpers.arrays = ()
        if helpers.failures:
            self._raise_failure(helpers)
        if self._helpers is None and self.num_threads > 1:
            raise RuntimeError(
                "this process was forked during a step, while helper threads had some of the envs: "
                "call `reset`, or make a new vector env"
            )
        return num_ended

    def _do_alone(self, actions: np.ndarray, outputs: Outputs) -> int:
        """Do a job in one part, on this thread only."""
        bad_row = _publish(self._control, self._jobs, self._bounds, actions, *outputs)
        if bad_row < 0:
            return bad_row
        begin_ns = time.perf_counter_ns() if self._is_timed else 0
        try:
            num_ended = self._attend(self._control, self._jobs, 0, NUM_SPINS)
            if num_ended < 0:
                num_ended = self._settle()
        except BaseException as error:
            if self._control[CALLER]:
                self._control[CALLER] = 0
                _add_kernel_note(error)
            raise
        if self._is_timed:
            self._note_times(begin_ns, time.perf_counter_ns())
        return num_ended

    def _call_helpers(self) -> _Helpers:
        """Return the helpers, and decide whether the next job wakes those that sleep."""
        helpers = self._helpers
        if helpers is None:
            # New words: earlier threads may still be about to return by the old ones.
            control = aligned_zeros((self._control_words,), np.int64)
            kept = self._fixed, self._own_actions
            helpers = _Helpers(self._unstamped, control, self._jobs, kept, self.num_threads)
            self._control, self._helpers = control, helpers
        is_close = time.perf_counter_ns() - self._end_ns < CLOSE_NS
        may_wake = is_close or self._work_ns >= WAKE_NS
        if may_wake != self._may_wake:
            self._job["may_wake"] = self._may_wake = may_wake
        return helpers

    def _settle(self) -> int:
        """Wait until the last helper has left the job; each is in its last chunk of rows."""
        while (num_ended := _settle(self._control, NUM_SPINS)) < 0:
            time.sleep(0)
        return num_ended

    def _tidy_up(self) -> None:
        """Complete a job that an exception cut short, and restore the record of a step."""
        control, interrupt = self._control, None
        is_over = self._helpers is None
        while not is_over:
            try:
                if control[OPEN]:
                    is_over = self._attend(control, self._jobs, 0, NUM_SPINS) >= 0
                else:
                    is_over = _settle(control, NUM_SPINS) >= 0
                time.sleep(0)
            except BaseException as error:  # the arrays are in use until the job is done
                interrupt = interrupt if control[CALLER] else error
        if (helpers := self._helpers) is not None:
            helpers.failures.clear()
            helpers.wake(-1)  # including those that were about to be woken
            helpers.arrays = ()
        self.is_cut = False
        self._describe_step()
        if interrupt is not None:
            raise interrupt

    def _raise_failure(self, helpers: _Helpers) -> NoReturn:
        """Raise the exception of a kernel in a helper."""
        failure = helpers.failures[0]
        helpers.failures.clear()
        _add_kernel_note(failure)
        raise failure

    def _note_times(self, begin_ns: int, end_ns: int) -> None:
        """Update the time per env from a job, and the choice whether to split."""
        if self._num_parts > 1:
            self._end_ns = end_ns
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


def num_parts(work_ns: float, num_threads: int) -> int:
    """Return the number of parts of a job that takes one thread `work_ns`."""
    return min(num_threads, int(2 * work_ns / SPLIT_NS)) if work_ns >= SPLIT_NS else 1


class SplitChoice:
    """Times jobs of one size on several threads and on one, and chooses the faster.

    Splitting is slower where other processes or threads use the processors too, or where the caller
    works so long between jobs that helpers have fallen asleep; both change with time.

    Attributes:
        is_split: Whether the next job is split.
    """

    def __init__(self) -> None:
        self.is_split = True
        self._times_ns: list[int] = []  # of the jobs timed now
        self._split_ns: float | None = None  # median of the split jobs, once they are timed
        self._num_kept = 0  # jobs until both are timed again

    def note(self, elapsed_ns: int) -> bool:
        """Add the duration of a job; return whether `is_split` has changed."""
        if self._num_kept:
            self._num_kept -= 1
            return self._num_kept == 0 and self._turn_to(True)
        self._times_ns.append(elapsed_ns)
        if len(self._times_ns) < NUM_TRIED:
            return False
        median_ns = statistics.median(self._times_ns)
        self._times_ns.clear()
        if self._split_ns is None:
            self._split_ns = median_ns
            return self._turn_to(False)
        is_better = self._split_ns < median_ns
        self._split_ns = None
        self._num_kept = NUM_KEPT
        return self._turn_to(is_better)

    def _turn_to(self, is_split: bool) -> bool:
        is_new = is_split != self.is_split
        self.is_split = is_split
        return is_new


def _stamped(job: Any, note: Callable[[int, int], None]) -> Callable[..., Any]:
    """Return a function that does a job and notes its start and end, also if it raises."""

    def run(*args: Any) -> Any:
        begin_ns = time.perf_counter_ns()
        try:
            return job(*args)
        finally:
            note(begin_ns, time.perf_counter_ns())

    return run


# A call has not returned if one of these is on the stack, see `note_fork`.
_CALLS = (
    CompiledRunner.step.__code__,
    CompiledRunner.run.__code__,
    CompiledRunner.end_cut_job.__code__,
)


def _refuse() -> NoReturn:
    raise RuntimeError(
        "this vector env is being used by another thread, or by the call that a signal handler "
        "has interrupted; wait for the end of that call"
    ) from None


def _add_kernel_note(error: BaseException) -> None:
    error.add_note(
        "A kernel raised this; some envs may be in the middle of a step. "
        "An env made with debug=True shows the line in the traceback."
    )


class _Helpers:
    """Threads that take part in the jobs of one runner.

    Attributes:
        failures: Exceptions of kernels in them.
        arrays: The arrays of the current job; threads inside the job keep them alive.
    """

    def __init__(
        self, attend: Any, control: np.ndarray, jobs: np.ndarray, kept: Any, num_threads: int
    ) -> None:
        self.failures: list[BaseException] = []
        self._kept: list[Any] = [(), kept]
        self._locks = [threading.Lock() for _ in range(num_threads)]
        self._threads: list[threading.Thread] = []
        self._control = control
        self._end = weakref.finalize(self, _release_helpers, control, self._locks)
        try:
            for thread, lock in enumerate(self._locks[1:], start=1):
                lock.acquire()
                args = (attend, control, jobs, thread, lock, self.failures, self._kept)
                name = f"vecenv-jit-{thread}"
                self._threads.append(
                    threading.Thread(target=_help, args=args, name=name, daemon=True)
                )
                self._threads[-1].start()
        except BaseException:
            _release_helpers(control, self._locks)
            raise

    @property
    def arrays(self) -> tuple[Any, ...]:
        """See above."""
        return self._kept[0]

    @arrays.setter
    def arrays(self, arrays: tuple[Any, ...]) -> None:
        self._kept[0] = arrays

    def wake(self, threads: int) -> None:
        """Wake the sleeping helpers of a bit set; those that are awake come once more."""
        for thread in range(1, len(self._locks)):
            if threads >> thread & 1 and self._locks[thread].locked():
                self._locks[thread].release()

    def stop(self) -> None:
        """End the threads; to be called again if interrupted."""
        _release_helpers(self._control, self._locks)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=1.0)

    def forget(self) -> None:
        """Drop threads that a forked child does not have."""
        self._end.detach()


def _help(
    attend: Any,
    control: np.ndarray,
    jobs: np.ndarray,
    thread: int,
    lock: threading.Lock,
    failures: list[BaseException],
    kept: list[Any],
) -> None:
    """Take part in jobs until told to stop; the target of a helper thread.

    `kept` is not used: it keeps the arrays of a job alive while this thread works on it.
    """
    while not control[STOP]:
        try:
            attend(control, jobs, thread, NUM_SPINS)
        except BaseException as error:
            failures.append(error)
            _leave(control)
        else:
            lock.acquire()


def _release_helpers(control: np.ndarray, locks: list[threading.Lock]) -> None:
    """Make the helpers return, sleeping ones included, without waiting for them."""
    control[STOP] = 1
    for lock in locks[1:]:
        if lock.locked():
            with contextlib.suppress(RuntimeError):  # the caller has just released it
                lock.release()
