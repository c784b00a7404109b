"""From stamps to shares of the wall time, which add up to it.

A call of the vector env is divided at the start and the end of the caller's wait. The wait is
divided by the work of the workers. In a call that waits for all envs, the work of a worker is its
env steps, its resets, and writing results (copying). The means over the workers that had work are
*env compute*, *env reset* and *copying*; the longest work minus the mean is the *straggler wait*.
In `recv`, which waits for the first envs that are ready, the time in which any env was being
stepped is *env compute*; of the other time, that in which one was reset is *env reset*, and that in
which results were written is *copying*. The rest of the wait is *hand-over*; the time after the
wait is *copying* too. If the caller steps the envs, all but steps and resets is *copying*.

The timeline is written as Chrome trace JSON (Trace Event Format), for Perfetto or chrome://tracing:
one process "caller" with a track for its calls, waits, copies and phases; one process per worker
with a track of its envs' steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from vecenv.files import whole_file
from vecenv.machine import OthersLoad
from vecenv.timing.calls import NUM_ENV_CALLS, RECV, RESET, STEP, STEP_WAIT, CallLog
from vecenv.timing.stamps import COUNT, CPU, CPU_OF, EnvStamps, WorkerProcess

__all__ = ["MOST_STEPS", "Recording", "Share", "coverage", "trace_events", "write_events"]


_FEWEST_LOAD_NS = 200_000_000  # the system counts in hundredths of a second
_MOST_STAMPS = 1 << 16  # about as many are added up at a time; more would not fit the caches
_MOST_CALLS = 1 << 13  # added up at a time


class Share(StrEnum):
    """Names of the shares of a call of the vector env."""

    COMPUTE = "env compute"
    RESET = "env reset"
    STRAGGLERS = "straggler wait"
    HAND_OVER = "hand-over"
    COPYING = "copying"
    UNSPLIT = "env calls"


class Recording:
    """Running totals since `enable` or `clear`; times in nanoseconds.

    Args:
        backend: Name of the vector env's class.

    Attributes:
        backend, log: As given; `log` has calls and phases.
        rings: Rings of stamps; None if envs are not stamped one by one.
        stamped: See `TimingReport`.
        kernel_ns: Duration of a stamped compiled call that does nothing.
        chunks: W + 1 bounds: envs chunks[w], ..., chunks[w + 1] - 1 are stepped by worker w, one
            after the other.
        processes: Process of each worker; None where it is the caller.
        shares_ns: Shares of calls of the vector env; COPYING is the caller's and the workers'.
        critical_ns: The envs' own time: the sum over rounds of the time of the busiest worker since
            the command, independent of the caller.
        num_receives, num_rows: Number of calls of `recv`; number of rows that all calls returned.
        counts, spent_ns, longest_ns: int64 (2, N), for ended steps (0) and resets (1) of each env:
            their number, total time and longest time.
        squares: float64 (N,), the sum of the squares of the times of steps.
        worker_ns: int64 (W,), total work of each worker.
        most_pending: Number of intervals in the log at which to `fold`.
    """

    def __init__(self, backend: str) -> None:
        self.backend, self.log = backend, CallLog()
        self.rings: EnvStamps | None = None
        self.stamped, self.kernel_ns = "nothing", 0
        self.chunks, self.processes = [0], list[WorkerProcess | None]()
        self.clear()

    def clear(self) -> None:
        """Set all totals to zero."""
        self.log.clear()
        self._folded_ns = self.log.since_ns
        self.shares_ns = dict.fromkeys(Share, 0)
        self.critical_ns = self.num_receives = self.num_rows = 0
        self.counts, self.spent_ns, self.longest_ns = np.zeros((3, 2, self.chunks[-1]), np.int64)
        self.squares = np.zeros(self.chunks[-1])
        self.worker_ns = np.zeros(len(self.processes), np.int64)
        self._load, self._others_load = OthersLoad() if self.processes else None, None
        self.most_pending = _MOST_CALLS
        if self.rings is not None:
            self._first_tallies = self.rings.tallies.copy()
            self._taken = self._first_tallies[:, COUNT]
            num_envs, room = self.rings.rings.shape[:2]
            # A call makes at most two steps of an env.
            self.most_pending = min(_MOST_CALLS, room // 4, max(_MOST_STAMPS // num_envs, 1))

    @property
    def is_local(self) -> bool:
        """Whether the caller is the only worker."""
        return all(process is None for process in self.processes)

    def fold(self) -> None:
        """Add to the totals what was recorded since the last `fold`."""
        calls, stamps, now_ns = self.log.take(), None, perf_counter_ns()
        if self.rings is not None:
            stamps, self._taken = self.rings.since(self._taken)
        self.add(calls, stamps, now_ns)

    def window(self) -> tuple[int, np.ndarray, np.ndarray | None]:
        """Return the latest part whose stamps are complete; call `fold` before.

        Returns:
            Its begin; the caller's intervals in it, CALL (M,); the stamps, STAMP (R,), env by env,
            or None.
        """
        calls, begin_ns = self.log.latest()
        stamps = None
        if self.rings is not None:
            stamps, counts = self.rings.since(0)
            wrapped = np.flatnonzero(counts >= self.rings.rings.shape[1])
            oldest = np.searchsorted(stamps["env_id"], wrapped)
            begin_ns = max(begin_ns, int(stamps["begin_ns"][oldest].max(initial=0)))
            stamps = stamps[(stamps["begin_ns"] >= begin_ns) & (stamps["end_ns"] > 0)]
        return begin_ns, calls[calls["begin_ns"] >= begin_ns], stamps

    @property
    def cpu_share(self) -> float | None:
        """Processor time of the measured env steps over their duration; None if unknown."""
        if self.rings is None:
            return None
        spent_ns = (self.rings.tallies - self._first_tallies).sum(axis=0).tolist()
        return spent_ns[CPU] / spent_ns[CPU_OF] if spent_ns[CPU_OF] else None

    def others_load(self, is_end: bool = False) -> float | None:
        """Return how many processors other processes kept busy; None if unknown.

        Args:
            is_end: Whether timing ends now, or workers are about to end.
        """
        if self._load is not None and perf_counter_ns() - self.log.since_ns > _FEWEST_LOAD_NS:
            self._others_load = self._load.cores()
        if is_end:
            self._load = None
        return self._others_load

    def add(self, calls: np.ndarray, stamps: np.ndarray | None, now_ns: int) -> None:
        """Add what was recorded until now.

        Args:
            calls: CALL (M,); phases among them are ignored.
            stamps: STAMP (R,), env by env, with running ones; None if steps are not stamped.
            now_ns: The time.
        """
        calls = calls[calls["kind"] < NUM_ENV_CALLS]
        self.num_rows += int(calls["num_rows"].sum())
        self.num_receives += int((calls["kind"] == RECV).sum())
        found, rest = dict.fromkeys(Share, 0), Share.COPYING if self.is_local else Share.HAND_OVER
        if stamps is not None:
            steps_ns, resets_ns = self._add_steps(stamps[stamps["end_ns"] > 0])
            if self.is_local:
                found[Share.COMPUTE], found[Share.RESET] = steps_ns, resets_ns
                self.critical_ns += steps_ns + resets_ns
                self.worker_ns += steps_ns + resets_ns
            else:
                self._divide(found, calls, stamps, now_ns)
        elif self.stamped == "kernel":
            kernels_ns = calls["wait_end_ns"] - calls["wait_begin_ns"] - self.kernel_ns
            kernels_ns, is_reset = np.maximum(kernels_ns, 0), calls["kind"] == RESET
            found[Share.RESET] = int(kernels_ns[is_reset].sum())
            found[Share.COMPUTE] = int(kernels_ns[~is_reset].sum())
        else:
            rest = Share.UNSPLIT
        total_ns = int((calls["end_ns"] - calls["begin_ns"] - calls["nested_ns"]).sum())
        found[rest] = total_ns - sum(found.values())
        for share, spent_ns in found.items():
            self.shares_ns[share] += spent_ns
        self._folded_ns = now_ns

    def _add_steps(self, stamps: np.ndarray) -> tuple[int, int]:
        """Add the steps and resets that have ended; return the total time of each kind."""
        lengths_ns, shape = stamps["end_ns"] - stamps["begin_ns"], self.counts.shape
        places = stamps["is_reset"] * shape[1] + stamps["env_id"]
        self.counts += np.bincount(places, minlength=self.counts.size).reshape(shape)
        sums_ns = np.bincount(places, lengths_ns, self.counts.size).reshape(shape).astype(np.int64)
        self.spent_ns += sums_ns
        squares = np.bincount(places, lengths_ns.astype(np.float64) ** 2, self.counts.size)
        self.squares += squares[: shape[1]]
        np.maximum.at(self.longest_ns.reshape(-1), places, lengths_ns)
        return int(sums_ns[0].sum()), int(sums_ns[1].sum())

    def _divide(
        self, found: dict[Share, int], calls: np.ndarray, stamps: np.ndarray, now_ns: int
    ) -> None:
        """Add the work of the workers, and divide the calls into all shares but the hand-over."""
        stamps["end_ns"][stamps["end_ns"] == 0] = now_ns
        workers = self.by_worker(stamps)
        for worker, (own, until_ns) in enumerate(workers):
            spent_ns = until_ns - np.maximum(own["begin_ns"], self._folded_ns)
            self.worker_ns[worker] += int(np.maximum(spent_ns, 0).sum())
        ready_ns = np.where(calls["wait_end_ns"] > 0, calls["wait_end_ns"], calls["end_ns"])
        found[Share.COPYING] += int((calls["end_ns"] - ready_ns).sum())
        for kinds in ((STEP, STEP_WAIT, RESET), (RECV,)):
            chosen = np.isin(calls["kind"], kinds)
            if not chosen.any():
                continue
            if RECV in kinds:  # waits for the first ready envs of all workers
                owns, untils_ns = zip(*workers, strict=True)
                workers = [(np.concatenate(owns), np.concatenate(untils_ns))]
            span, sent_ns = (calls["begin_ns"][chosen], ready_ns[chosen]), calls["sent_ns"][chosen]
            spent_ns = np.zeros((3, len(workers), len(sent_ns)))  # steps; with resets; with writing
            critical_ns = np.zeros(len(sent_ns))
            for worker, (own, until_ns) in enumerate(workers):
                steps = own[~own["is_reset"]]
                spent_ns[0, worker] = coverage(steps["begin_ns"], steps["end_ns"])(*span)
                spent_ns[1, worker] = spent_ns[0, worker]
                if len(steps) < len(own):
                    spent_ns[1, worker] = coverage(own["begin_ns"], own["end_ns"])(*span)
                at_work = coverage(own["begin_ns"], until_ns)
                spent_ns[2, worker] = at_work(*span)
                critical_ns = np.maximum(critical_ns, at_work(sent_ns, span[1]))
            self.critical_ns += 0 if RECV in kinds else int(critical_ns.sum())
            num_active = np.maximum((spent_ns[2] > 0).sum(axis=0), 1)
            steps_ns, envs_ns, work_ns = map(round, (spent_ns.sum(axis=1) / num_active).sum(axis=1))
            found[Share.COMPUTE] += steps_ns
            found[Share.RESET] += envs_ns - steps_ns
            found[Share.COPYING] += work_ns - envs_ns
            found[Share.STRAGGLERS] += round(spent_ns[2].max(axis=0).sum()) - work_ns

    def by_worker(self, stamps: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each worker's stamps in order, and the times at which results had been written.

        If a step has no such time, its results were written before the worker's next step.
        """
        found = []
        for part in pairwise(np.searchsorted(stamps["env_id"], self.chunks).tolist()):
            own = stamps[slice(*part)]
            own = own[np.argsort(own["begin_ns"], kind="stable")]
            until_ns = np.maximum(own["end_ns"], own["done_ns"])
            if not self.is_local:
                nexts_ns = np.where(own["done_ns"][:-1] > 0, 0, own["begin_ns"][1:])
                until_ns[:-1] = np.maximum(until_ns[:-1], nexts_ns)
            found.append((own, until_ns))
        return found

    def bound_ns(self) -> float:
        """Return the time that the envs alone would have needed for these steps.

        If calls wait for all envs, this is the time of the busiest worker of each round. If calls
        receive the first ready envs, it is the time with all workers always at work.
        """
        steps = np.add.reduceat(self.counts[0], self.chunks[:-1])
        busy = (self.worker_ns > 0) & (steps > 0)
        if not self.num_receives or not busy.any():
            return self.critical_ns
        rate = float((steps[busy] / self.worker_ns[busy]).sum())
        return max(self.critical_ns, steps.sum() / rate)


def coverage(
    begins: np.ndarray, ends: np.ndarray
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function that measures how much of other intervals these, int64 (R,), cover.

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
    # The covered time before a moment grows during an interval, and stays constant between two.
    moments = np.stack([begins, ends], axis=1).reshape(-1) - begins[0]
    sums = np.cumsum(np.stack([np.zeros_like(begins), ends - begins], axis=1))

    def until(times: np.ndarray) -> np.ndarray:
        return np.interp(times - begins[0], moments, sums)

    return lambda from_ns, until_ns: until(until_ns) - until(from_ns)


MOST_STEPS = 50_000  # latest env steps in a trace; Perfetto opens that many quickly
_CALLER = 0  # process number; worker w is w + 1
_ENVS = 1  # track of a process's env steps

Event = dict[str, Any]


def write_events(events: Iterable[Event], path: str | Path) -> None:
    """Write a trace; raises OSError if the file can't be written."""
    with whole_file(path) as aside, aside.open("w") as file:
        known = {"displayTimeUnit": "ms", "traceEvents": list(events)}
        file.write(json.dumps(known, separators=(",", ":")) + "\n")


def trace_events(recording: Recording) -> Iterator[Event]:
    """Yield the events of a trace; times are in microseconds since the window began."""
    since_ns, calls, stamps = recording.window()
    if stamps is not None and len(stamps) > MOST_STEPS:
        since_ns = int(np.sort(stamps["begin_ns"])[-MOST_STEPS])
        stamps = stamps[stamps["begin_ns"] >= since_ns]
        calls = calls[calls["begin_ns"] >= since_ns]
    yield _name("process_name", _CALLER, 0, "caller")
    yield _name("thread_name", _CALLER, 0, "calls and phases")
    yield from _caller_events(recording, calls, since_ns)
    if stamps is not None:
        yield from _env_events(recording, stamps, since_ns)


def _caller_events(recording: Recording, calls: np.ndarray, since_ns: int) -> Iterator[Event]:
    """Yield calls and phases, and waits and copies inside them."""
    is_compiled = recording.stamped == "kernel"
    waited = "kernel" if is_compiled else "wait"
    for kind, begin_ns, end_ns, wait_begin_ns, wait_end_ns, *_ in calls.tolist():
        what = "call" if kind < NUM_ENV_CALLS else "phase"
        yield _slice(recording.log.names[kind], what, begin_ns - since_ns, end_ns - begin_ns)
        if wait_end_ns:
            yield _slice(waited, waited, wait_begin_ns - since_ns, wait_end_ns - wait_begin_ns)
            if not is_compiled:
                yield _slice("copy", "copy", wait_end_ns - since_ns, end_ns - wait_end_ns)


def _env_events(recording: Recording, stamps: np.ndarray, since_ns: int) -> Iterator[Event]:
    """Yield the workers' names, the envs' steps and resets, and the writing of their results."""
    number = _CALLER
    for process, (first, last), (own, untils_ns) in zip(
        recording.processes, pairwise(recording.chunks), recording.by_worker(stamps), strict=True
    ):
        track = _CALLER, _ENVS
        if process is not None:
            number += 1
            track = number, _ENVS
            yield _name("process_name", number, 0, f"worker {number - 1} (pid {process.pid})")
        envs = f"env {first}" if last == first + 1 else f"envs {first}-{last - 1}"
        yield _name("thread_name", *track, envs)
        for stamp, until_ns in zip(own.tolist(), untils_ns.tolist(), strict=True):
            env_id, begin_ns, end_ns, _, is_reset = stamp
            what = "reset" if is_reset else "env"
            event = _slice(f"{what} {env_id}", what, begin_ns - since_ns, end_ns - begin_ns, track)
            yield {**event, "args": {"env_id": env_id, "worker": track[0] - 1}}
            if until_ns > end_ns:
                yield _slice("copy", "copy", end_ns - since_ns, until_ns - end_ns, track)


def _slice(
    name: str, what: str, begin_ns: int, length_ns: int, track: tuple[int, int] = (_CALLER, 0)
) -> Event:
    times = {"ts": begin_ns / 1e3, "dur": length_ns / 1e3}
    return {"name": name, "cat": what, "ph": "X", **times, "pid": track[0], "tid": track[1]}


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
