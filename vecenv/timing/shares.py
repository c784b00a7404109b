"""From stamps to shares of the wall time; the shares add up to it.

A call of the vector env is divided at the start and the end of the caller's wait. The wait is
divided by the work of the workers. In a call that waits for all envs, the work of a worker is its
env steps, its resets, and writing results (copying). The means over the workers that had work are
*env compute*, *env reset* and *copying*; the longest work minus the mean is the *straggler wait*.
In `recv`, which waits for the first envs that are ready, the time in which any env was being
stepped is *env compute*, else reset *env reset*, else written *copying*. The rest of the wait is
*hand-over*; the time after the wait is *copying* too. If the calling process steps the envs itself,
all time but steps and resets is copying: batching results.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from vecenv.timing.calls import (
    NUM_ENV_CALLS,
    RECV,
    RESET,
    STEP,
    STEP_WAIT,
    CallLog,
    Calls,
    OtherPhase,
)
from vecenv.timing.stamps import Stamps, WorkerProcess

__all__ = ["ENV_SHARES", "Crew", "Recording", "Totals", "coverage", "writing_ends"]

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


class Crew(NamedTuple):
    """The workers that step the envs, one after the other in each.

    Attributes:
        stamped: ENVS if env steps are stamped one by one, KERNEL if compiled calls or those of
            Ray's actors are, NOTHING if only the caller's time is known.
        chunks: W + 1 bounds: envs chunks[w], ..., chunks[w + 1] - 1 are stepped by worker w.
        processes: Of each worker; None where it is the caller.
        kernel_ns: Duration of a stamped compiled call that does nothing.
    """

    stamped: str
    chunks: list[int]
    processes: list[WorkerProcess | None]
    kernel_ns: int = 0

    @property
    def is_local(self) -> bool:
        """Whether all workers are the calling process."""
        return all(process is None for process in self.processes)


class Recording(NamedTuple):
    """What was recorded since `enable` or `clear`, and the latest window with all its stamps.

    Attributes:
        backend: Name of the vector env's class.
        crew: The workers.
        totals: Of calls and envs.
        log: Of calls and phases, with the wall time.
        cpu_share, others_load: See `TimingReport`.
        begin_ns, end_ns: The window, by `time.perf_counter_ns`.
        calls: The caller's intervals in it.
        stamps: Env steps in it, env by env; None if they are not stamped one by one.
        others: Phases of other threads in it.
    """

    backend: str
    crew: Crew
    totals: Totals
    log: CallLog
    cpu_share: float | None
    others_load: float | None
    begin_ns: int
    end_ns: int
    calls: Calls
    stamps: Stamps | None
    others: list[OtherPhase]


class Totals:
    """Running totals since `enable` or `clear`; nanoseconds.

    Attributes:
        shares_ns: Of calls of the vector env, by name, see `ENV_SHARES`; COPYING is that of the
            caller and of the workers.
        critical_ns: The envs' own time: the sum over rounds of the time of the busiest worker since
            the command, independent of the caller.
        num_receives: Calls of `recv`.
        num_rows: Rows that were returned.
        counts, spent_ns, longest_ns: int64 (2, N), of the steps (0) and the resets (1) of each env
            that have ended: their number, their total time, the longest.
        worker_ns: int64 (W,), time of work of each worker.
    """

    def __init__(self, crew: Crew) -> None:
        self.shares_ns = dict.fromkeys(ENV_SHARES, 0)
        self.critical_ns = self.num_receives = self.num_rows = 0
        self.counts, self.spent_ns, self.longest_ns = np.zeros((3, 2, crew.chunks[-1]), np.int64)
        self.worker_ns = np.zeros(len(crew.chunks) - 1, np.int64)

    def add(
        self, calls: Calls, stamps: Stamps | None, crew: Crew, since_ns: int, now_ns: int
    ) -> None:
        """Add the calls, and the stamps, since the totals were added to before.

        Args:
            calls: Intervals; phases among them are left out.
            stamps: Env steps, env by env, those running included; None if they are not stamped.
            crew: The workers.
            since_ns, now_ns: The time between.
        """
        calls = calls.where(calls.kinds < NUM_ENV_CALLS)
        self.num_rows += int(calls.num_rows.sum())
        self.num_receives += int((calls.kinds == RECV).sum())
        total_ns = int((calls.end_ns - calls.begin_ns - calls.nested_ns).sum())
        found = dict.fromkeys(ENV_SHARES, 0)
        rest = COPYING if crew.is_local else HAND_OVER
        if stamps is not None:
            steps_ns, resets_ns = self._add_steps(stamps.where(stamps.end_ns > 0))
            if crew.is_local:
                found[ENV_COMPUTE], found[ENV_RESET] = steps_ns, resets_ns
                self.critical_ns += steps_ns + resets_ns
                self.worker_ns += steps_ns + resets_ns
            else:
                ends_ns = np.where(stamps.end_ns > 0, stamps.end_ns, now_ns)
                self._divide(found, calls, stamps._replace(end_ns=ends_ns), crew, since_ns, now_ns)
        elif crew.stamped == KERNEL:
            kernels_ns = np.maximum(calls.wait_end_ns - calls.wait_begin_ns - crew.kernel_ns, 0)
            found[ENV_RESET] = int(kernels_ns[calls.kinds == RESET].sum())
            found[ENV_COMPUTE] = int(kernels_ns.sum()) - found[ENV_RESET]
        else:
            rest = UNSPLIT
        found[rest] = total_ns - sum(found.values())
        for name, spent_ns in found.items():
            self.shares_ns[name] += spent_ns

    def _add_steps(self, stamps: Stamps) -> tuple[int, int]:
        """Add steps and resets that have ended; return the total time of each kind."""
        lengths_ns, shape = stamps.end_ns - stamps.begin_ns, self.counts.shape
        places = stamps.is_reset * shape[1] + stamps.env_ids
        self.counts += np.bincount(places, minlength=self.counts.size).reshape(shape)
        sums_ns = np.bincount(places, lengths_ns, self.counts.size).astype(np.int64)
        self.spent_ns += sums_ns.reshape(shape)
        np.maximum.at(self.longest_ns.reshape(-1), places, lengths_ns)
        return int(sums_ns[: shape[1]].sum()), int(sums_ns[shape[1] :].sum())

    def _divide(
        self,
        found: dict[str, int],
        calls: Calls,
        stamps: Stamps,
        crew: Crew,
        since_ns: int,
        now_ns: int,
    ) -> None:
        """Divide the time of calls that wait for workers, but for the hand-over, into `found`."""
        ready_ns = np.where(calls.wait_end_ns > 0, calls.wait_end_ns, calls.end_ns)
        is_round = np.isin(calls.kinds, (STEP, STEP_WAIT, RESET))
        rounds = calls.begin_ns[is_round], ready_ns[is_round]
        sent_ns = calls.sent_ns[is_round]
        span = np.array([since_ns]), np.array([now_ns])
        until_ns, is_step = writing_ends(stamps, crew), ~stamps.is_reset
        work_ns, steps_ns, resets_ns = np.zeros((3, len(self.worker_ns), len(sent_ns)))
        critical_ns = np.zeros(len(sent_ns))
        for worker, part in enumerate(_parts(stamps, crew)):
            one, steps = stamps.where(part), is_step[part]
            covered = coverage(one.begin_ns, until_ns[part])
            self.worker_ns[worker] += int(covered(*span)[0])
            work_ns[worker] = covered(*rounds)
            critical_ns = np.maximum(critical_ns, covered(sent_ns, rounds[1]))
            steps_ns[worker] = coverage(one.begin_ns[steps], one.end_ns[steps])(*rounds)
            if not steps.all():
                resets_ns[worker] = coverage(one.begin_ns[~steps], one.end_ns[~steps])(*rounds)
        self.critical_ns += int(critical_ns.sum())
        at_work = np.maximum((work_ns > 0).sum(axis=0), 1)
        parts_ns = (steps_ns, resets_ns, work_ns)
        means_ns = [float((part_ns.sum(axis=0) / at_work).sum()) for part_ns in parts_ns]
        longest_ns = float(work_ns.max(axis=0, initial=0).sum())
        # The same of `recv`: when any env was stepped, or else reset, or else written.
        is_recv = calls.kinds == RECV
        received = calls.begin_ns[is_recv], ready_ns[is_recv]
        spans = (
            (stamps.begin_ns[is_step], stamps.end_ns[is_step]),
            (stamps.begin_ns, stamps.end_ns),
            (stamps.begin_ns, until_ns),
        )
        if is_recv.any():
            any_ns = [float(coverage(*one)(*received).sum()) for one in spans]
            any_ns[1] -= any_ns[0]
            means_ns = [mean_ns + ns for mean_ns, ns in zip(means_ns, any_ns, strict=True)]
            longest_ns += any_ns[2]
        found[ENV_COMPUTE], found[ENV_RESET] = round(means_ns[0]), round(means_ns[1])
        found[STRAGGLERS] = round(longest_ns - means_ns[2])
        found[COPYING] = round(means_ns[2] - means_ns[0] - means_ns[1])
        found[COPYING] += int((calls.end_ns - ready_ns).sum())

    def bound_ns(self, crew: Crew) -> float:
        """Return the time that the envs alone would have taken for these steps.

        If calls wait for all envs: the busiest worker of each round. If they receive the first envs
        ready: the time with all workers always at work.
        """
        busy = self.worker_ns > 0
        if not self.num_receives or not busy.any():
            return self.critical_ns
        steps = np.add.reduceat(self.counts[0], crew.chunks[:-1])
        rate = float((steps[busy] / self.worker_ns[busy]).sum())
        return max(self.critical_ns, steps.sum() / rate) if rate else self.critical_ns


def coverage(
    begins: np.ndarray, ends: np.ndarray
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function that measures how much of an interval others cover.

    Args:
        begins: int64 (R,), in any order.
        ends: int64 (R,), not before their begins.

    Returns:
        A function of begins and ends (M,) to the covered length of each interval, float64 (M,).

    Example:
        >>> covered = coverage(np.array([0, 5, 20]), np.array([10, 12, 30]))
        >>> covered(np.array([0, 11, 0]), np.array([30, 25, 100])).tolist()
        [22.0, 6.0, 22.0]
    """
    if len(begins) == 0:
        return lambda from_ns, _until_ns: np.zeros(len(from_ns))
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    begins[1:] = np.maximum(begins[1:], ends[:-1])
    # The covered time before a moment grows while an interval lasts, and stays between two.
    moments = np.stack([begins, ends], axis=1).reshape(-1) - begins[0]
    sums = np.cumsum(np.stack([np.zeros_like(begins), ends - begins], axis=1))

    def until(times: np.ndarray) -> np.ndarray:
        return np.interp(times - begins[0], moments, sums)

    return lambda from_ns, until_ns: until(until_ns) - until(from_ns)


def _parts(stamps: Stamps, crew: Crew) -> list[slice]:
    """Return where the stamps of each worker are."""
    bounds = np.searchsorted(stamps.env_ids, crew.chunks).tolist()
    return [slice(*pair) for pair in pairwise(bounds)]


def writing_ends(stamps: Stamps, crew: Crew) -> np.ndarray:
    """Return when the results of each step had been written, int64 (R,).

    Without a mark of its own, a step's results were written before the worker's next step.
    """
    until_ns = np.maximum(stamps.end_ns, stamps.done_ns)
    for part in [] if crew.is_local else _parts(stamps, crew):
        one = stamps.where(part)
        order = np.argsort(one.begin_ns, kind="stable")[:-1]
        nexts_ns = np.sort(one.begin_ns)[1:]
        nexts_ns[one.done_ns[order] > 0] = 0
        until_ns[part][order] = np.maximum(until_ns[part][order], nexts_ns)
    return until_ns
