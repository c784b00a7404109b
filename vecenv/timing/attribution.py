"""From stamps to shares of the wall time; the shares add up to it.

A call of the vector env is divided at the start and the end of the caller's wait. The wait is
divided by the work of the threads that step envs. In a call that waits for all envs, the work of a
thread is its env steps, its resets, and writing results (copying). The means over the threads that
had work are *env compute*, *env reset* and *copying*; the longest work minus the mean is the
*straggler wait*. In `recv`, which waits for the first envs that are ready, the time in which any
env was being stepped is *env compute*, else reset *env reset*, else written *copying*. The rest of
the wait is *hand-over*; the time after the wait is *copying* too. If the calling process steps the
envs itself, all time but steps and resets is copying: batching results.

Threads of one process whose envs compute in Python take turns, and count as one thread.

The totals are running: intervals are read from the rings before they are overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
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

_COMPUTES = 0.5  # work with at least this share of processor time counts as computing
_ONE_PROCESSOR = 1.2  # threads that take turns use at most this many processors


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
        # The steps of one thread are in order, and apart: nothing is to be joined.
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

    @property
    def length_ns(self) -> int:
        """Length of the union."""
        return int(self._sums[-1])

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
    """The workers and threads that step the envs.

    Attributes:
        stamped: ENVS if env steps are stamped one by one, KERNEL if compiled calls or those of
            Ray's actors are, NOTHING if only the caller's time is known.
        chunks: W + 1 bounds: envs chunks[w], ..., chunks[w + 1] - 1 are stepped by worker w.
        lanes: int64 (num_envs,), number of the thread that steps each env, over all workers.
        is_local: Whether all workers are the calling process.
        kernel_ns: Duration of a stamped compiled call that does nothing.
    """

    stamped: str
    chunks: list[int]
    lanes: np.ndarray
    is_local: bool
    kernel_ns: int = 0

    @property
    def num_lanes(self) -> int:
        """Threads that step envs."""
        return len(np.unique(self.lanes))

    def workers(self, env_ids: np.ndarray) -> np.ndarray:
        """Return the worker of each env, int64 (R,)."""
        return np.searchsorted(self.chunks, env_ids, side="right") - 1


class Unit(NamedTuple):
    """A thread, or threads that take turns: it does one thing at a time.

    Attributes:
        first_env: The lowest of its envs.
        worker: The worker that it belongs to.
        lanes: The threads.
        steps, resets, work: Intervals of each; work includes copying.
    """

    first_env: int
    worker: int
    lanes: list[int]
    steps: Coverage
    resets: Coverage | None
    work: Coverage


class Work:
    """The work of all threads in a span of time.

    Args:
        stamps: Env steps, running ones included.
        crew: The threads.
        cpu_shares: Share of processor time in each worker's steps, float64 (W,), NaN if not known.
        now_ns: End of the span: running steps count until then.

    Attributes:
        stamps: Sorted by thread, then by start; running steps end with the span.
        until_ns: int64 (R,), when a step's results had been written.
        units: The units that had work.
    """

    def __init__(self, stamps: Stamps, crew: Crew, cpu_shares: np.ndarray, now_ns: int) -> None:
        is_running = stamps.end_ns == 0
        if is_running.any():
            stamps = stamps._replace(end_ns=np.where(is_running, now_ns, stamps.end_ns))
        self.crew = crew
        self.stamps = stamps = _by_lane(stamps, crew.lanes)
        self.lanes = crew.lanes[stamps.env_ids]
        # Threads of a worker have consecutive numbers, so its steps are in one place.
        begins = np.append(_firsts(self.lanes), len(self.lanes))
        self.until_ns = self._until(stamps, begins[1:] - 1)
        self.units: list[Unit] = []
        lanes_of: dict[int, list[tuple[int, slice]]] = {}
        for begin, end in pairwise(begins.tolist()):
            worker = int(crew.workers(stamps.env_ids[begin : begin + 1])[0])
            lane = int(self.lanes[begin])
            lanes_of.setdefault(worker, []).append((lane, slice(begin, end)))
        self._parts: dict[int, slice] = {}  # of each worker
        self._num_lanes = {worker: len(found) for worker, found in lanes_of.items()}
        for worker, lanes_found in lanes_of.items():
            self._parts[worker] = slice(lanes_found[0][1].start, lanes_found[-1][1].stop)
            self._add(worker, lanes_found, float(cpu_shares[worker]))

    def by_worker(self) -> Iterator[tuple[int, Coverage]]:
        """Yield the workers that were at work, and when any of their envs was."""
        found = {unit.worker: unit for unit in self.units}
        for worker, part in self._parts.items():
            unit = found[worker]  # one of the worker's
            is_all = len(unit.lanes) == self._num_lanes[worker] and unit.resets is None
            begins, ends = self.stamps.begin_ns[part], self.stamps.end_ns[part]
            yield worker, unit.steps if is_all else Coverage(begins, ends)

    def _until(self, stamps: Stamps, lasts: np.ndarray) -> np.ndarray:
        """Return when the results of each step had been written; `lasts` are those of a thread."""
        if self.crew.is_local:
            return stamps.end_ns
        # Without its own mark, a step's results were written before the thread's next step.
        until_ns = np.empty_like(stamps.begin_ns)
        until_ns[:-1] = stamps.begin_ns[1:]
        until_ns[lasts] = 0
        np.copyto(until_ns, stamps.done_ns, where=stamps.done_ns > 0)
        return np.maximum(until_ns, stamps.end_ns, out=until_ns)

    def _add(self, worker: int, lanes: list[tuple[int, slice]], cpu_share: float) -> None:
        """Add a worker's units: each thread, or all as one if they take turns."""
        if len(lanes) > 1 and cpu_share > _COMPUTES:
            chosen = self._parts[worker]
            begins, untils = self.stamps.begin_ns[chosen], self.until_ns[chosen]
            union_ns = Coverage(begins, untils).length_ns
            stepped_ns = int((self.stamps.end_ns - self.stamps.begin_ns)[chosen].sum())
            if stepped_ns * cpu_share <= _ONE_PROCESSOR * union_ns:
                self.units.append(self._unit(worker, chosen, [lane for lane, _ in lanes]))
                return
        for lane, chosen in lanes:
            self.units.append(self._unit(worker, chosen, [lane]))

    def _unit(self, worker: int, chosen: slice, lanes: list[int]) -> Unit:
        stamps, untils = self.stamps.where(chosen), self.until_ns[chosen]
        resets, steps = None, stamps
        if stamps.is_reset.any():
            steps, its_resets = stamps.where(~stamps.is_reset), stamps.where(stamps.is_reset)
            resets = Coverage(its_resets.begin_ns, its_resets.end_ns)
        first_env = int(stamps.env_ids.min(initial=np.iinfo(np.int64).max))
        covered = Coverage(steps.begin_ns, steps.end_ns)
        return Unit(first_env, worker, lanes, covered, resets, Coverage(stamps.begin_ns, untils))


def _firsts(values: np.ndarray) -> np.ndarray:
    """Return where a value differs from the one before it, the first included; int64."""
    places = np.flatnonzero(values[1:] != values[:-1]) + 1
    return np.concatenate([np.zeros(min(len(values), 1), np.int64), places])


def _by_lane(stamps: Stamps, lanes: np.ndarray) -> Stamps:
    """Sort stamps by thread, then by start; `lanes` says which thread steps an env."""
    # Sorting is fast for data that is sorted in parts, and for small integers.
    order = np.argsort(stamps.begin_ns, kind="stable")
    small = np.uint16 if lanes.max(initial=0) < 1 << 16 else np.int64
    its_lanes = lanes[stamps.env_ids[order]].astype(small)
    return stamps.where(order[np.argsort(its_lanes, kind="stable")])


class CallTotals:
    """Running totals of one thread's calls; nanoseconds.

    Attributes:
        shares_ns: By name, see `ENV_SHARES`; COPYING is that of the caller and of the workers.
        critical_ns: The envs' own time, by the first env of a half (0 for whole steps): the sum
            over rounds of the time of the busiest thread since the command, independent of the
            caller.
        num_receives: Calls of `recv`.
        num_rows: Rows that were returned.
    """

    def __init__(self) -> None:
        self.shares_ns = dict.fromkeys(ENV_SHARES, 0)
        self.critical_ns: dict[int, int] = {}
        self.num_receives = self.num_rows = 0
        self.sent_ns: dict[int, int] = {}  # when the pending step began, by the first env

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
            work: Work of the threads, at least since the first of these calls began, or the first
                `step_async` that one of them waited for; None if it was not stamped.
            crew: The threads that step the envs.
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
        self.critical_ns[0] = self.critical_ns.get(0, 0) + steps_ns + resets_ns
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
        totals = np.zeros((3, len(ready_ns)), np.int64)  # work, steps, resets over the units
        active, most_ns = np.zeros((2, len(ready_ns)), np.int64)
        is_early = sent_ns < calls.begin_ns
        critical_ns = np.zeros(len(ready_ns), np.int64)
        for unit in work.units:
            is_meant = (calls.last_env == 0) | (
                (unit.first_env >= calls.first_env) & (unit.first_env < calls.last_env)
            )
            work_ns = unit.work.between(calls.begin_ns, ready_ns) * is_meant
            steps_ns = unit.steps.between(calls.begin_ns, ready_ns) * is_meant
            resets_ns = np.zeros(len(ready_ns), np.int64)
            if unit.resets is not None:
                resets_ns = unit.resets.between(calls.begin_ns, ready_ns) * is_meant
            totals += work_ns, steps_ns, resets_ns
            active += work_ns > 0
            most_ns = np.maximum(most_ns, work_ns)
            alone_ns = work_ns
            if is_early.any():
                alone_ns = unit.work.between(sent_ns, ready_ns) * is_meant
            critical_ns = np.maximum(critical_ns, alone_ns)
        mean_ns, steps_ns, resets_ns = totals / np.maximum(active, 1)
        found[0] = round(steps_ns.sum())
        found[1] = round(resets_ns.sum())
        found[2] = round((most_ns - mean_ns).sum())
        found[4] = round(mean_ns.sum()) - found[0] - found[1]
        for first in np.flatnonzero(np.bincount(calls.first_env)).tolist():
            chosen = calls.first_env == first
            self.critical_ns[first] = self.critical_ns.get(first, 0) + int(
                critical_ns[chosen].sum()
            )
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
        is_async, is_wait = calls.kinds == STEP_ASYNC, calls.kinds == STEP_WAIT
        halves = calls.first_env[is_async | is_wait]
        for first in np.flatnonzero(np.bincount(halves)).tolist():
            is_its = calls.first_env == first
            waits = np.flatnonzero(is_wait & is_its)
            sent_ns = calls.begin_ns[is_async & is_its]
            if first in self.sent_ns:
                sent_ns = np.concatenate([[self.sent_ns.pop(first)], sent_ns])
            if len(sent_ns) == 0:
                continue
            places = np.searchsorted(sent_ns, calls.begin_ns[waits], side="right") - 1
            found[waits] = np.where(places >= 0, sent_ns[places], found[waits])
            if len(waits) == 0 or sent_ns[-1] > calls.begin_ns[waits[-1]]:
                self.sent_ns[first] = int(sent_ns[-1])
        return found


class EnvTotals:
    """Running totals of the envs.

    Attributes:
        steps, resets: int64 (N,), number that have ended.
        step_ns, reset_ns: int64 (N,), their total time.
        longest_step_ns, longest_reset_ns: int64 (N,).
        cpu_ns, cpu_of_ns: int64 (2, N), for steps and for resets: processor time of those for which
            it was taken, and their total time.
        lane_ns: int64 (L,), time of work of each thread; threads that take turns share one sum.
        worker_ns: int64 (W,), time in which any of a worker's envs was at work.
    """

    def __init__(self, crew: Crew) -> None:
        num_envs = crew.chunks[-1]
        self.crew = crew
        self.steps, self.resets, self.step_ns, self.reset_ns = np.zeros((4, num_envs), np.int64)
        self.longest_step_ns, self.longest_reset_ns = np.zeros((2, num_envs), np.int64)
        self.cpu_ns, self.cpu_of_ns = np.zeros((2, 2, num_envs), np.int64)
        self.lane_ns = np.zeros(int(crew.lanes.max(initial=0)) + 1, np.int64)
        self.worker_ns = np.zeros(len(crew.chunks) - 1, np.int64)

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
        self.lane_ns += spent_ns
        self.worker_ns += spent_ns

    def add_work(self, work: Work, begin_ns: int, end_ns: int) -> None:
        """Add the work of threads between two times."""
        window = np.array([begin_ns]), np.array([end_ns])
        for unit in work.units:
            self.lane_ns[unit.lanes] += int(unit.work.between(*window)[0])
        for worker, when in work.by_worker():
            self.worker_ns[worker] += int(when.between(*window)[0])

    def cpu_shares(self) -> np.ndarray:
        """Return the share of processor time in each worker's work, float64 (W,), NaN if unknown.

        Steps and resets are weighted by their time.
        """
        bounds = self.crew.chunks[:-1]
        spent, of = (
            np.add.reduceat(rows.sum(axis=0), bounds) for rows in (self.cpu_ns, self.cpu_of_ns)
        )
        return np.where(of > 0, spent / np.maximum(of, 1), np.nan)

    def cpu_share(self, kind: int) -> float | None:
        """Return the share of processor time in steps (0) or resets (1); None if not known."""
        of_ns = int(self.cpu_of_ns[kind].sum())
        return int(self.cpu_ns[kind].sum()) / of_ns if of_ns else None

    def free_rate(self) -> float:
        """Return the steps per second that all threads would make without pauses."""
        lanes = np.bincount(self.crew.lanes, self.steps, minlength=len(self.lane_ns))
        busy = self.lane_ns > 0
        return float((lanes[busy] / self.lane_ns[busy]).sum() * 1e9)
