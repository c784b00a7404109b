"""From stamps to shares of the wall time; the shares add up to it.

A call of the vector env is divided at the start and the end of the caller's wait. The wait is
divided by the work of the workers. In a call that waits for all envs, the work of a worker is its
env steps, its resets, and writing results (copying). The means over the workers that had work are
*env compute*, *env reset* and *copying*; the longest work minus the mean is the *straggler wait*.
In `recv`, which waits for the first envs that are ready, the time in which any env was being
stepped is *env compute*, else reset *env reset*, else written *copying*. The rest of the wait is
*hand-over*; the time after the wait is *copying* too. If the calling process steps the envs itself,
all time but steps and resets is copying: batching results.

The totals are running: intervals are read from the rings before they are overwritten.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from vecenv.timing.calls import (
    ENV_CALLS,
    RECV,
    RESET,
    STEP,
    STEP_ASYNC,
    STEP_WAIT,
    Calls,
)
from vecenv.timing.stamps import Stamps

__all__ = ["ENV_SHARES", "CallTotals", "Coverage", "Crew", "EnvTotals", "Work"]

ENV_COMPUTE, ENV_RESET, STRAGGLERS, HAND_OVER, COPYING, UNSPLIT = (
    "env compute",
    "env reset",
    "straggler wait",
    "hand-over",
    "copying",
    "env calls",
)
ENV_SHARES = (ENV_COMPUTE, ENV_RESET, STRAGGLERS, HAND_OVER, COPYING, UNSPLIT)
OTHER = "other"
ENVS, KERNEL, NOTHING = "envs", "kernel", "nothing"


class Coverage:
    """The union of intervals of time, and the part of any other interval that it covers.

    Args:
        begins: int64 (R,), in any order.
        ends: int64 (R,), not before their begins.

    Example:
        >>> busy = Coverage(np.array([0, 5, 20]), np.array([10, 12, 30]))
        >>> busy.between(np.array([0, 11, 0]), np.array([30, 25, 100]))
        array([22,  6, 22])
    """

    def __init__(self, begins: np.ndarray, ends: np.ndarray) -> None:
        # The steps of one worker are in order, and apart: nothing is to be joined.
        if not (begins[1:] > ends[:-1]).all():
            order = np.argsort(begins, kind="stable")
            begins, ends = begins[order], np.maximum.accumulate(ends[order])
            # An interval that begins after all before it have ended begins a new block.
            is_first = np.ones(len(begins), dtype=np.bool_)
            is_first[1:] = begins[1:] > ends[:-1]
            is_last = np.ones(len(begins), dtype=np.bool_)
            is_last[:-1] = is_first[1:]
            begins, ends = begins[is_first], ends[is_last]
        self.begins, self.ends = begins, ends
        self._sums = np.zeros(len(begins) + 1, np.int64)
        np.cumsum(ends - begins, out=self._sums[1:])

    def between(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return the covered length of each interval, int64 (M,)."""
        return self._until(ends) - self._until(begins)

    def _until(self, times: np.ndarray) -> np.ndarray:
        """Return the covered length before each time, int64 (M,)."""
        block = np.searchsorted(self.begins, times, side="right")  # blocks that have begun
        if len(self.begins) == 0:
            return np.zeros(len(times), dtype=np.int64)
        overhang = np.maximum(self.ends[block - 1] - times, 0)
        return np.where(block > 0, self._sums[block] - overhang, 0)


class Crew(NamedTuple):
    """The workers that step the envs, one after the other in each.

    Attributes:
        stamped: ENVS if env steps are stamped one by one, KERNEL if compiled calls or those of
            Ray's actors are, NOTHING if only the caller's time is known.
        chunks: W + 1 bounds: envs chunks[w], ..., chunks[w + 1] - 1 are stepped by worker w.
        is_local: Whether all workers are the calling process.
        kernel_ns: Duration of a stamped compiled call that does nothing.
    """

    stamped: str
    chunks: list[int]
    is_local: bool
    kernel_ns: int = 0

    @property
    def num_workers(self) -> int:
        """Workers, the caller included if it steps envs."""
        return len(self.chunks) - 1

    def workers(self, env_ids: np.ndarray) -> np.ndarray:
        """Return the worker of each env, int64 (R,)."""
        return np.searchsorted(self.chunks, env_ids, side="right") - 1


class WorkerWork(NamedTuple):
    """What a worker did, and when; work includes steps, resets and copying."""

    worker: int
    steps: Coverage
    resets: Coverage | None
    work: Coverage


class Work:
    """The work of all workers in a span of time.

    Args:
        stamps: Env steps, running ones included.
        crew: The workers.
        now_ns: End of the span: running steps count until then.

    Attributes:
        stamps: Sorted by worker, then by start; running steps end with the span.
        until_ns: int64 (R,), when a step's results had been written.
        workers: Those that had work.
    """

    def __init__(self, stamps: Stamps, crew: Crew, now_ns: int) -> None:
        is_running = stamps.end_ns == 0
        if is_running.any():
            stamps = stamps._replace(end_ns=np.where(is_running, now_ns, stamps.end_ns))
        # Sorting is fast for data that is sorted in parts, and for small integers.
        order = np.argsort(stamps.begin_ns, kind="stable")
        workers = crew.workers(stamps.env_ids[order]).astype(np.uint16)
        self.stamps = stamps = stamps.where(order[np.argsort(workers, kind="stable")])
        workers.sort()
        bounds = np.append(_firsts(workers), len(workers))
        self.until_ns = stamps.end_ns if crew.is_local else self._until(stamps, bounds[1:] - 1)
        self.workers: list[WorkerWork] = []
        for begin, end in pairwise(bounds.tolist()):
            part = slice(begin, end)
            of_one, resets = stamps.where(part), None
            work = Coverage(of_one.begin_ns, self.until_ns[part])
            if of_one.is_reset.any():
                of_resets = of_one.where(of_one.is_reset)
                resets = Coverage(of_resets.begin_ns, of_resets.end_ns)
                of_one = of_one.where(~of_one.is_reset)
            steps = Coverage(of_one.begin_ns, of_one.end_ns)
            self.workers.append(WorkerWork(int(workers[begin]), steps, resets, work))

    @staticmethod
    def _until(stamps: Stamps, lasts: np.ndarray) -> np.ndarray:
        """Return when the results of each step had been written; `lasts` are those of a worker."""
        # Without its own mark, a step's results were written before the worker's next step.
        until_ns = np.empty_like(stamps.begin_ns)
        until_ns[:-1] = stamps.begin_ns[1:]
        until_ns[lasts] = 0
        np.copyto(until_ns, stamps.done_ns, where=stamps.done_ns > 0)
        return np.maximum(until_ns, stamps.end_ns, out=until_ns)


def _firsts(values: np.ndarray) -> np.ndarray:
    """Return where a value differs from the one before it, the first included; int64."""
    places = np.flatnonzero(values[1:] != values[:-1]) + 1
    return np.concatenate([np.zeros(min(len(values), 1), np.int64), places])


class CallTotals:
    """Running totals of one thread's calls; nanoseconds.

    Attributes:
        shares_ns: By name, see `ENV_SHARES`; COPYING is that of the caller and of the workers.
        critical_ns: The envs' own time: the sum over rounds of the time of the busiest worker since
            the command, independent of the caller.
        num_receives: Calls of `recv`.
        num_rows: Rows that were returned.
        sent_ns: When the pending step began; None if there is none.
    """

    def __init__(self) -> None:
        self.shares_ns = dict.fromkeys(ENV_SHARES, 0)
        self.critical_ns = self.num_receives = self.num_rows = 0
        self.sent_ns: int | None = None

    def add(
        self,
        calls: Calls,
        work: Work | None,
        crew: Crew,
        inside_ns: tuple[int, int] | None = None,
    ) -> None:
        """Add calls that have ended.

        Args:
            calls: The intervals; phases among them are left out.
            work: Work of the workers, at least since the first of these calls began, or the first
                `step_async` that one of them waited for; None if it was not stamped.
            crew: The workers.
            inside_ns: Total time of steps and resets inside these calls, if known without the
                single stamps; `work` is not needed then.
        """
        calls = calls.where(calls.kinds < len(ENV_CALLS))
        if len(calls.kinds) == 0:
            return
        self.num_rows += int(calls.num_rows.sum())
        total_ns = int((calls.end_ns - calls.begin_ns - calls.nested_ns).sum())
        if crew.stamped == NOTHING:
            self.shares_ns[UNSPLIT] += total_ns
            return
        if crew.stamped == KERNEL:
            self._add_kernels(calls, total_ns, crew)
            return
        if inside_ns is not None:
            self._add_local(calls, total_ns, inside_ns)
            return
        assert work is not None
        has_waited = calls.wait_end_ns > 0
        ready_ns = np.where(has_waited, calls.wait_end_ns, calls.end_ns)
        sent_ns = self._sent(calls)
        is_round = (calls.kinds == STEP) | (calls.kinds == STEP_WAIT) | (calls.kinds == RESET)
        is_recv = calls.kinds == RECV
        found = np.zeros(5, np.int64)  # as ENV_SHARES
        found += self._rounds(calls.where(is_round), sent_ns[is_round], ready_ns[is_round], work)
        found += self._receives(calls.where(is_recv), ready_ns[is_recv], work)
        if crew.is_local:
            found[4] = total_ns - found[0] - found[1]
            found[2] = found[3] = 0
        else:
            after_ns = int((calls.end_ns - ready_ns).sum())
            found[4] += after_ns
            found[3] = total_ns - found.sum() + found[3]
        for name, spent_ns in zip(ENV_SHARES, found.tolist(), strict=False):
            self.shares_ns[name] += spent_ns

    def _add_local(self, calls: Calls, total_ns: int, inside_ns: tuple[int, int]) -> None:
        steps_ns, resets_ns = inside_ns
        self.shares_ns[ENV_COMPUTE] += steps_ns
        self.shares_ns[ENV_RESET] += resets_ns
        self.shares_ns[COPYING] += total_ns - steps_ns - resets_ns
        self.critical_ns += steps_ns + resets_ns
        self.num_receives += int((calls.kinds == RECV).sum())

    def _add_kernels(self, calls: Calls, total_ns: int, crew: Crew) -> None:
        lengths_ns = np.maximum(calls.wait_end_ns - calls.wait_begin_ns - crew.kernel_ns, 0)
        is_reset = calls.kinds == RESET
        reset_ns, step_ns = int(lengths_ns[is_reset].sum()), int(lengths_ns[~is_reset].sum())
        self.shares_ns[ENV_COMPUTE] += step_ns
        self.shares_ns[ENV_RESET] += reset_ns
        self.shares_ns[COPYING if crew.is_local else HAND_OVER] += total_ns - step_ns - reset_ns

    def _rounds(
        self, calls: Calls, sent_ns: np.ndarray, ready_ns: np.ndarray, work: Work
    ) -> np.ndarray:
        """Divide calls that waited for all into shares; return int64 (5,), as ENV_SHARES."""
        found = np.zeros(5, np.int64)
        if len(calls.kinds) == 0:
            return found
        totals = np.zeros((3, len(ready_ns)), np.int64)  # work, steps, resets over the workers
        active, most_ns = np.zeros((2, len(ready_ns)), np.int64)
        is_early = (sent_ns < calls.begin_ns).any()
        critical_ns = np.zeros(len(ready_ns), np.int64)
        for worker in work.workers:
            work_ns = worker.work.between(calls.begin_ns, ready_ns)
            totals[0] += work_ns
            totals[1] += worker.steps.between(calls.begin_ns, ready_ns)
            if worker.resets is not None:
                totals[2] += worker.resets.between(calls.begin_ns, ready_ns)
            active += work_ns > 0
            most_ns = np.maximum(most_ns, work_ns)
            alone_ns = worker.work.between(sent_ns, ready_ns) if is_early else work_ns
            critical_ns = np.maximum(critical_ns, alone_ns)
        mean_ns, steps_ns, resets_ns = totals / np.maximum(active, 1)
        found[0] = round(steps_ns.sum())
        found[1] = round(resets_ns.sum())
        found[2] = round((most_ns - mean_ns).sum())
        found[4] = round(mean_ns.sum()) - found[0] - found[1]
        self.critical_ns += int(critical_ns.sum())
        return found

    def _receives(self, calls: Calls, ready_ns: np.ndarray, work: Work) -> np.ndarray:
        """Divide calls that waited for the first envs ready; return int64 (5,), as ENV_SHARES."""
        found = np.zeros(5, np.int64)
        if len(calls.kinds) == 0:
            return found
        self.num_receives += len(calls.kinds)
        stamps, is_step = work.stamps, ~work.stamps.is_reset
        whens = (
            Coverage(stamps.begin_ns[is_step], stamps.end_ns[is_step]),
            Coverage(stamps.begin_ns, stamps.end_ns),
            Coverage(stamps.begin_ns, work.until_ns),
        )
        steps_ns, envs_ns, work_ns = (
            int(when.between(calls.begin_ns, ready_ns).sum()) for when in whens
        )
        found[0], found[1], found[4] = steps_ns, envs_ns - steps_ns, work_ns - envs_ns
        return found

    def _sent(self, calls: Calls) -> np.ndarray:
        """Return when the round of each call began, by `step_async` or the call; int64 (M,)."""
        found = calls.begin_ns.copy()
        waits = np.flatnonzero(calls.kinds == STEP_WAIT)
        sent_ns = calls.begin_ns[calls.kinds == STEP_ASYNC]
        if self.sent_ns is not None:
            sent_ns, self.sent_ns = np.append(self.sent_ns, sent_ns), None
        if len(sent_ns):
            places = np.searchsorted(sent_ns, calls.begin_ns[waits], side="right") - 1
            found[waits] = np.where(places >= 0, sent_ns[places], found[waits])
            if len(waits) == 0 or sent_ns[-1] > calls.begin_ns[waits[-1]]:
                self.sent_ns = int(sent_ns[-1])
        return found


class EnvTotals:
    """Running totals of the envs.

    Attributes:
        steps, resets: int64 (N,), number that have ended.
        step_ns, reset_ns: int64 (N,), their total time.
        longest_step_ns, longest_reset_ns: int64 (N,).
        cpu_ns, cpu_of_ns: int64 (2, N), for steps and for resets: processor time of those for which
            it was taken, and their total time.
        worker_ns: int64 (W,), time of work of each worker.
    """

    def __init__(self, crew: Crew) -> None:
        num_envs = crew.chunks[-1]
        self.crew = crew
        self.steps, self.resets, self.step_ns, self.reset_ns = np.zeros((4, num_envs), np.int64)
        self.longest_step_ns, self.longest_reset_ns = np.zeros((2, num_envs), np.int64)
        self.cpu_ns, self.cpu_of_ns = np.zeros((2, 2, num_envs), np.int64)
        self.worker_ns = np.zeros(crew.num_workers, np.int64)

    def add(self, stamps: Stamps) -> tuple[int, int]:
        """Add steps and resets that have ended, env by env; return the total time of each kind."""
        env_ids = stamps.env_ids
        if len(env_ids) == 0:
            return 0, 0
        lengths_ns = stamps.end_ns - stamps.begin_ns
        starts = _firsts(env_ids)
        found = env_ids[starts]
        taken = np.flatnonzero(stamps.cpu_ns >= 0)  # of few if steps are short
        kinds = stamps.is_reset[taken].astype(np.int64)
        for total, taken_ns in ((self.cpu_ns, stamps.cpu_ns), (self.cpu_of_ns, lengths_ns)):
            np.add.at(total, (kinds, env_ids[taken]), taken_ns[taken])
        resets = np.flatnonzero(stamps.is_reset)
        resets_ns = lengths_ns[resets]
        np.add.at(self.resets, env_ids[resets], 1)
        np.add.at(self.reset_ns, env_ids[resets], resets_ns)
        np.maximum.at(self.longest_reset_ns, env_ids[resets], resets_ns)
        lengths_ns[resets] = 0
        np.subtract.at(self.steps, env_ids[resets], 1)
        self.steps[found] += np.diff(starts, append=len(env_ids))
        self.step_ns[found] += np.add.reduceat(lengths_ns, starts)
        longest_ns = np.maximum.reduceat(lengths_ns, starts)
        self.longest_step_ns[found] = np.maximum(self.longest_step_ns[found], longest_ns)
        return int(lengths_ns.sum()), int(resets_ns.sum())

    def add_local(self, spent_ns: int) -> None:
        """Add time in which the calling process was at work."""
        self.worker_ns += spent_ns

    def add_work(self, work: Work, begin_ns: int, end_ns: int) -> None:
        """Add the work between two times."""
        window = np.array([begin_ns]), np.array([end_ns])
        for one in work.workers:
            self.worker_ns[one.worker] += int(one.work.between(*window)[0])

    def cpu_share(self, kind: int) -> float | None:
        """Return the share of processor time in steps (0) or resets (1); None if not known."""
        of_ns = int(self.cpu_of_ns[kind].sum())
        return int(self.cpu_ns[kind].sum()) / of_ns if of_ns else None

    def free_rate(self) -> float:
        """Return the steps per second that all workers would make without pauses."""
        steps = np.add.reduceat(self.steps, self.crew.chunks[:-1])
        busy = self.worker_ns > 0
        return float((steps[busy] / self.worker_ns[busy]).sum() * 1e9)
