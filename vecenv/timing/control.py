"""Timing: the switch, the phases a user names, and the ways to look at the result."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from vecenv.machine import OthersLoad
from vecenv.timing.calls import NUM_ENV_CALLS, STEP, STEP_WAIT, CallLog
from vecenv.timing.shares import Crew, Recording, Totals
from vecenv.timing.stamps import COUNT, CPU, CPU_OF, EnvStamps

if TYPE_CHECKING:
    from vecenv.timing.report import TimingReport

__all__ = ["Timing"]

_NO_PHASE: AbstractContextManager[Any] = nullcontext()
_FEWEST_LOAD_NS = 200_000_000  # the system counts in hundredths of a second
_MOST_FOLDED = 1 << 16  # stamps added up at a time, about; more would not stay in the caches
_MOST_CALLS = 1 << 13  # added up at a time


class Timing:
    """Where the time goes; off until `enable` is called, and free while off.

    Shares, rates and mean times cover all the time since `enable` or `clear`. The timeline, and the
    percentiles in a report, cover the latest 65 536 calls and phases, and the latest steps of every
    env (16 384 for up to 16 envs, never fewer than 64). The time of timing itself is excluded.

    Phases may be entered in several threads. Shares are those of the thread that calls the vector
    env; the phases of other threads are reported separately.

    Attributes:
        enabled: Whether timing is on.
        total_ns: Nanoseconds spent in each phase since the last `clear`, in all threads.
        log: The log of calls and phases.

    Example:
        >>> from vecenv import make_vec
        >>> envs = make_vec("CartPole-v1", num_envs=2)
        >>> envs.timing.enable()
        >>> obs, infos = envs.reset(seed=1)
        >>> with envs.timing.phase("policy"):
        ...     actions = [0, 1]
        >>> results = envs.step(actions)
        >>> report = envs.timing.report()
        >>> report.num_steps, sorted(envs.timing.total_ns)
        (2, ['policy'])
        >>> envs.close()
    """

    def __init__(self, envs: Any) -> None:
        self._envs = weakref.ref(envs)  # a cycle would delay the deletion of the env
        self._backend = type(envs).__name__
        self.log = CallLog()
        self._crew = Crew("nothing", [0, 1], [None])
        self._stamps: EnvStamps | None = None
        self._load: OthersLoad | None = None
        self.enabled = False
        self.clear()

    @property
    def total_ns(self) -> dict[str, int]:
        """Nanoseconds spent in each phase since the last `clear`, in all threads."""
        return self.log.total_ns

    def enable(self) -> None:
        """Start timing; deletes earlier recordings.

        Raises:
            ClosedEnvironmentError: The vector env is closed.
            AlreadyPendingCallError: Envs are in flight, or an asynchronous call is pending.
        """
        envs = self._envs()
        if self.enabled or envs is None:
            return
        found = envs._begin_stamps()
        self._stamps = found if isinstance(found, EnvStamps) else None
        if isinstance(found, int):
            self._crew = Crew("kernel", [], [], found)
        else:
            self._crew = Crew("nothing" if found is None else "envs", [], [])
        self._keep_crew()
        self.enabled = True
        envs._log = self.log
        self.clear()

    def disable(self) -> None:
        """Stop timing; keeps the recording.

        Raises:
            AlreadyPendingCallError: Envs are in flight, or an asynchronous call is pending; timing
                stays on.
        """
        envs = self._envs()
        if self.enabled and envs is not None:
            envs._end_stamps()
            envs._log = None
            self.note_end()
        self.enabled = False

    def note_end(self) -> None:
        """Measure the load of others so far: timing ends here, or workers are about to end."""
        self._others_load, self._load = self._measured_load(), None

    def _measured_load(self) -> float | None:
        if self._load is None or perf_counter_ns() - self.log.since_ns < _FEWEST_LOAD_NS:
            return self._others_load
        return self._load.cores()

    def clear(self) -> None:
        """Delete the recording; phases that are open begin now."""
        self._totals, self._others_load = Totals(self._crew), None
        self._load = OthersLoad() if self.enabled else None
        self._most_pending = _MOST_CALLS
        if self._stamps is not None:
            self._first_tallies = self._stamps.tallies.copy()
            self._taken = self._first_tallies[:, COUNT]
            num_envs, room = self._stamps.rings.shape[:2]
            # A call makes two steps of an env at most.
            self._most_pending = min(_MOST_CALLS, room // 4, max(_MOST_FOLDED // num_envs, 1))
        self.log.clear()
        self._folded_ns = self.log.since_ns

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Return a context whose wall time is added to phase `name` (nothing while disabled)."""
        return _Interval(self, self.log.kind(name)) if self.enabled else _NO_PHASE

    def call(self, kind: int) -> AbstractContextManager[CallLog]:
        """Return a context that is logged as a call of the vector env, steps as of all envs.

        Adds the latest steps as a note to an exception that passes through it.
        """
        return _Interval(self, kind, self._crew.chunks[-1] if kind in (STEP, STEP_WAIT) else 0)

    def _keep_crew(self) -> None:
        """Keep who steps which envs: workers may be replaced, and are gone after `close`."""
        envs = self._envs()
        if envs is not None and not envs.closed:
            processes = envs._worker_processes()
            self._crew = self._crew._replace(chunks=envs._env_chunks(), processes=processes)

    def _fold(self) -> None:
        """Add to the totals the intervals and stamps since the last time."""
        calls, stamps, now_ns = self.log.take(), None, perf_counter_ns()
        if self._stamps is not None:
            stamps, self._taken = self._stamps.since(self._taken)
        self._totals.add(calls, stamps, self._crew, self._folded_ns, now_ns)
        self._folded_ns = now_ns

    def recording(self) -> Recording:
        """Return the totals, and the latest stamps, since `enable` or `clear`.

        Raises:
            RuntimeError: Nothing was recorded.
        """
        with self.log.paused():
            self._keep_crew()
            self._fold()
            calls, begin_ns = self.log.latest()
            if len(calls) == 0:
                raise RuntimeError(
                    "nothing has been recorded: call envs.timing.enable() before the steps"
                )
            stamps = cpu_share = None
            if self._stamps is not None:
                stamps, counts = self._stamps.since(0)
                wrapped = np.flatnonzero(counts >= self._stamps.rings.shape[1])
                oldest = np.searchsorted(stamps["env_id"], wrapped)
                begin_ns = max(begin_ns, int(stamps["begin_ns"][oldest].max(initial=0)))
                stamps = stamps[stamps["begin_ns"] >= begin_ns]
                spent_ns = (self._stamps.tallies - self._first_tallies).sum(axis=0)
                cpu_share = int(spent_ns[CPU]) / int(spent_ns[CPU_OF]) if spent_ns[CPU_OF] else None
            calls = calls[calls["begin_ns"] >= begin_ns]
            return Recording(
                backend=self._backend,
                crew=self._crew,
                totals=self._totals,
                log=self.log,
                cpu_share=cpu_share,
                others_load=self._measured_load(),
                begin_ns=begin_ns,
                end_ns=int(calls["end_ns"].max(initial=begin_ns)),
                calls=calls,
                stamps=stamps,
                others=[one for one in self.log.others.copy() if one[2] >= begin_ns],
            )

    def report(self) -> TimingReport:
        """Return the shares of the time since `enable` or `clear`; see `TimingReport`.

        Raises:
            RuntimeError: Nothing was recorded.
        """
        found = self.recording()
        with self.log.paused():
            from vecenv.timing.report import make_report

            return make_report(found)

    def write_trace(self, path: str | Path) -> None:
        """Write the latest part of the timeline as Chrome trace JSON, for ui.perfetto.dev.

        Raises:
            RuntimeError: Nothing was recorded.
            OSError: The file can't be written.
        """
        found = self.recording()
        with self.log.paused():
            from vecenv.timing.trace import write_trace

            write_trace(found, path)

    def _add_latest(self, error: Exception) -> None:
        """Note the latest steps: those of the worker of the env that an error names, or of all."""
        chunks, env_id = self._crew.chunks, getattr(error, "env_index", None)
        worker = 0 if env_id is None else bisect_right(chunks, env_id) - 1
        first, last = chunks[worker], chunks[-1 if env_id is None else worker + 1]
        if self._stamps is not None:
            if latest := self._stamps.part(first, last).describe_latest(first):
                error.add_note(latest)


class _Interval(AbstractContextManager[CallLog]):
    """Logs a call or a phase; adds the latest steps of the envs to exceptions of calls."""

    __slots__ = ("_kind", "_num_rows", "_timing")

    def __init__(self, timing: Timing, kind: int, num_rows: int = 0) -> None:
        self._timing, self._kind, self._num_rows = timing, kind, num_rows

    def __enter__(self) -> CallLog:
        timing = self._timing
        # Not where a step may be pending, as its work would be added without the call's time.
        most_pending = timing._most_pending if self._kind < STEP_WAIT else _MOST_CALLS
        if timing.log.num_pending >= most_pending:
            with timing.log.paused():
                timing._fold()
        timing.log.begin(self._kind, self._num_rows)
        return timing.log

    def __exit__(self, exc_type: object, error: BaseException | None, traceback: object) -> None:
        self._timing.log.end()
        if isinstance(error, Exception) and self._kind < NUM_ENV_CALLS:
            self._timing._add_latest(error)
