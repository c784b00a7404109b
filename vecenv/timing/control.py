"""Timing: the switch, the phases a user names, and the ways to look at the result."""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vecenv.machine import cpu_ns, machine_cpu_ns
from vecenv.timing.attribution import ENVS, KERNEL, NOTHING, CallTotals, Crew, EnvTotals, Work
from vecenv.timing.calls import CAPACITY, ENV_CALLS, STEP, STEP_WAIT, CallLog
from vecenv.timing.recording import Recording, Tally, ThreadCalls, WorkerProcess
from vecenv.timing.stamps import EnvStamps, Stamps

if TYPE_CHECKING:
    from vecenv.timing.report import TimingReport

__all__ = ["TimedEnvs", "Timing"]

_NO_PHASE: AbstractContextManager[None] = nullcontext()
_FEWEST_TICKS_NS = 200_000_000  # the system counts in hundredths of a second
_MOST_FOLDED = 1 << 16  # stamps added up at a time, about; more would not stay in the caches
_MOST_ENDED = 64  # logs of threads that have ended
_MOST_ENDED_ROWS = 2 * CAPACITY  # intervals in them


class TimedEnvs(Protocol):
    """The interface of a vector env that can be timed."""

    num_envs: int
    closed: bool
    _log: CallLog | None

    def _begin_stamps(self) -> EnvStamps | int | None:
        """Begin to stamp env steps.

        Returns:
            The rings of stamps. Or, if compiled calls are stamped in the log of calls, the time of
            a call that does nothing, in nanoseconds. None if only the caller's time is known.
        """

    def _end_stamps(self) -> None:
        """Stop stamping; if that raises, nothing has changed."""

    def _env_chunks(self) -> list[int]:
        """Return W + 1 bounds: envs bounds[w], ..., bounds[w + 1] - 1 are stepped by worker w."""
        ...

    def _worker_processes(self) -> list[WorkerProcess | None]:
        """Return the process of each worker; None where it is the caller."""
        ...


class _ThreadLog(CallLog):
    """The log of a thread, and its totals.

    Attributes:
        name: Name of the thread.
        owner: The thread: its ident may be another one's afterwards.
        folded: Number of intervals that have been added to the totals.
        totals: Totals of the calls among them.
    """

    def __init__(self) -> None:
        self.owner = threading.current_thread()
        self.name = self.owner.name
        self.folded = 0
        self.totals = CallTotals()
        super().__init__()

    def clear(self) -> None:
        super().clear()
        self.folded, self.totals = 0, CallTotals()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return not self.owner.is_alive()

    def by_name(self) -> dict[str, int]:
        """Return the time in each phase and call without what is inside them."""
        found = self.phases_ns()
        for name, own_ns in zip(self.names, self.own_ns, strict=False):
            if own_ns and name not in found:
                found[name] = own_ns
        return found


class _Here(threading.local):
    """What a thread has of a timing: its log, and the calls of each kind, made once for all steps.

    It goes when the thread ends, while the next thread may have the same ident at once.
    """

    log: _ThreadLog | None = None
    calls: list[_Call] | None = None


def _add(totals: dict[str, int], more: dict[str, int]) -> None:
    for name, spent_ns in more.items():
        totals[name] = totals.get(name, 0) + spent_ns


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

    def __init__(self, envs: TimedEnvs) -> None:
        self._envs = weakref.ref(envs)  # a cycle would delay the deletion of the env
        self._backend = type(envs).__name__
        self._logs: list[_ThreadLog] = []  # one per thread, in the order of their first calls
        self._here = _Here()
        # Of threads that have ended and whose logs are gone: by phase and call, by phase with what
        # is inside, and the end of the latest interval.
        self._gone_ns: dict[str, int] = {}
        self._gone_total_ns: dict[str, int] = {}
        self._gone_until_ns = 0
        self._lock = threading.RLock()  # over the totals
        self._stamps: EnvStamps | None = None
        self._stamped, self._kernel_ns = NOTHING, 0
        self._taken = np.zeros(0, np.int64)  # number of each env's stamps in the totals
        self._carried: Stamps | None = None  # stamps of calls that had not ended at the last fold
        self._env_totals: EnvTotals | None = None
        self._since_ns = self._folded_ns = 0
        self._process_cpu_ns = self._workers_cpu_ns = 0
        self._machine_cpu_ns: int | None = None
        self._load: tuple[float | None] | None = None  # of others, in a recording that has ended
        self._kept: tuple[Crew, list[WorkerProcess | None], int] = (
            Crew(NOTHING, [0], True),
            [],
            0,
        )
        self.enabled = False

    @property
    def total_ns(self) -> dict[str, int]:
        """Nanoseconds spent in each phase since the last `clear`, in all threads."""
        with self._lock:
            found = dict(self._gone_total_ns)
            for log in self._logs:
                _add(found, log.total_ns.copy())  # copied at once: its thread may go on
        return found

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
        self._stamped = NOTHING if found is None else ENVS if self._stamps is not None else KERNEL
        self._kernel_ns = found if isinstance(found, int) else 0
        self.keep()
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
        if self._load is None:
            self._load = (self._measure_load(),)

    def clear(self) -> None:
        """Delete the recording; phases that are open begin now."""
        with self._lock:
            self._logs = [log for log in self._logs if not log.has_ended]
            self._gone_ns, self._gone_total_ns, self._gone_until_ns = {}, {}, 0
            for log in self._logs:
                log.clear()
                self._set_next_fold(log)
            self._since_ns = self._folded_ns = perf_counter_ns()
            self._process_cpu_ns = process_time_ns()
            self._machine_cpu_ns = machine_cpu_ns()
            self._workers_cpu_ns = cpu_ns(self._pids())
            self._load = None
            self._carried = self._env_totals = None
            if self._stamps is not None:
                self._taken = self._stamps.counted()
                self._env_totals = EnvTotals(self._kept[0])

    @property
    def log(self) -> CallLog:
        """The log of the calling thread."""
        log = self._here.log
        return self._begin_log() if log is None else log

    def _begin_log(self) -> CallLog:
        with self._lock:
            self._drop_ended()
            log = _ThreadLog()
            log.begin_ns = log.begin_ns if not self._since_ns else self._since_ns
            log.fold = weakref.WeakMethod(self._fold)  # a cycle would delay the rings' release
            self._set_next_fold(log)
            self._logs.append(log)
        self._here.log = log
        return log

    def _drop_ended(self) -> None:
        """Keep of threads that have ended only the latest logs; of the others only the sums.

        A program may start a thread for every step.
        """
        if self._logs:
            self._fold()  # none of many threads may come to make as many calls as a fold is due at
        ended = [log for log in self._logs if log.has_ended]
        for log in ended:
            log.shrink()
        main = max(self._logs, key=lambda log: log.env_ns, default=None)
        num_rows = sum(log.count for log in ended)
        while len(ended) > _MOST_ENDED or num_rows > _MOST_ENDED_ROWS:
            log = ended.pop(0)
            num_rows -= log.count
            if log is not main:
                self._logs.remove(log)
                _add(self._gone_ns, log.by_name())
                _add(self._gone_total_ns, log.total_ns)
                self._gone_until_ns = max(self._gone_until_ns, log.last_ns)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose wall time is added to phase `name` (nothing while disabled)."""
        if not self.enabled:
            return _NO_PHASE
        log = self.log
        return log.interval(log.kind(name))

    def call(self, kind: int) -> AbstractContextManager[CallLog]:
        """Return a context that is logged as a call of the vector env, steps as of all envs.

        Adds the latest steps as a note to an exception that passes through it.
        """
        calls = self._here.calls
        return (self._begin_calls() if calls is None else calls)[kind]

    def _begin_calls(self) -> list[_Call]:
        log, num_envs = self.log, self._kept[2]
        self._here.calls = calls = [
            _Call(self, log, one, num_envs if one in (STEP, STEP_WAIT) else 0)
            for one in range(len(ENV_CALLS))
        ]
        return calls

    def keep(self) -> None:
        """Keep the assignment of envs to workers, for a report after the vector env is closed."""
        envs = self._envs()
        if envs is None or envs.closed:
            return
        processes = envs._worker_processes()
        is_local = all(process is None for process in processes)
        crew = Crew(self._stamped, envs._env_chunks(), is_local, self._kernel_ns)
        self._kept = crew, processes, envs.num_envs

    # -- totals ------------------------------------------------------------------------------

    def _set_next_fold(self, log: CallLog) -> None:
        """Set the count at which to fold the rings; a call makes two steps of an env at most."""
        size = CAPACITY // 2
        if self._stamps is not None:
            num_envs, room = self._stamps.rings.shape[:2]
            size = min(size, room // 4, max(_MOST_FOLDED // num_envs, 1))
        log.fold_at = log.count + size

    def _fold(self) -> None:
        """Add to the totals the intervals and stamps since the last fold."""
        with self._lock:
            now_ns, crew, work = perf_counter_ns(), self._kept[0], None
            found: Stamps | None = None
            inside_ns: tuple[int, int] | None = None
            # Threads that have ended make no more calls, and wait for none of those they began.
            logs = [log for log in self._logs if log.count > log.folded or not log.has_ended]
            if self._stamps is not None and self._env_totals is not None:
                found, self._taken = self._stamps.since(self._taken)
                totals, is_ended = self._env_totals, found.end_ns > 0
                spent_ns = totals.add(found if is_ended.all() else found.where(is_ended))
                if self._carried is not None:
                    found = self._carried.joined(found)
                callers = [log for log in logs if log.env_ns or log.open_since() is not None]
                if crew.is_local and len(callers) == 1 and callers[0].open_since() is None:
                    inside_ns = spent_ns  # only the caller can have stepped them
                    totals.add_local(sum(spent_ns))
                else:
                    work = Work(found, crew, now_ns)
                    totals.add_work(work, self._folded_ns, now_ns)
            self._folded_ns = needed_ns = now_ns
            for log in logs:
                count = log.count
                log.totals.add(log.since(log.folded, count), work, crew, inside_ns)
                log.folded = count
                self._set_next_fold(log)
                if log.has_ended:
                    continue
                open_ns = log.open_since()
                begins = [ns for ns in (log.totals.sent_ns, open_ns) if ns is not None]
                needed_ns = min([needed_ns, *begins])
            if found is not None:
                untils_ns = np.maximum(found.end_ns, found.done_ns)
                is_late = (found.end_ns > 0) & (untils_ns > needed_ns)
                self._carried = found.where(np.flatnonzero(is_late))  # mostly none

    def _main_log(self) -> _ThreadLog:
        """Return the log of the thread that calls the vector env.

        Raises:
            RuntimeError: Nothing was recorded.
        """
        logs = [log for log in list(self._logs) if log.count]
        if not logs:
            raise RuntimeError(
                "nothing has been recorded: call envs.timing.enable() before the steps"
            )
        return max(logs, key=lambda log: log.env_ns)

    def _pause(self) -> AbstractContextManager[None]:
        log = self._here.log
        return nullcontext() if log is None else log.paused()

    def tally(self) -> Tally:
        """Return the running totals.

        Raises:
            RuntimeError: Nothing was recorded.
        """
        main = self._main_log()
        self.keep()  # workers may have been replaced
        with self._lock:
            self._fold()
            others_ns = dict(self._gone_ns)
            for log in self._logs:
                if log is not main:
                    _add(others_ns, log.by_name())
            wall_ns = max(main.wall_ns, 1)
            (load,) = self._load or (self._measure_load(),)
            return Tally(
                wall_ns,
                main.phases_ns(),
                main.totals,
                self._env_totals,
                others_ns,
                self._kept[0].stamped,
                load,
            )

    def _pids(self) -> list[int]:
        """Return the workers on this machine."""
        return [process.pid for process in self._kept[1] if process is not None and process.pid > 0]

    def _measure_load(self) -> float | None:
        """Return the processors that other processes kept busy so far; None if not known."""
        spent_ns, busy_ns = max(perf_counter_ns() - self._since_ns, 1), machine_cpu_ns()
        if busy_ns is None or self._machine_cpu_ns is None or spent_ns < _FEWEST_TICKS_NS:
            return None
        own_ns = process_time_ns() - self._process_cpu_ns
        own_ns += max(cpu_ns(self._pids()) - self._workers_cpu_ns, 0)
        return max((busy_ns - self._machine_cpu_ns - own_ns) / spent_ns, 0.0)

    def recording(self) -> Recording:
        """Return the latest part of the recording since `enable` or `clear`, for a timeline.

        Raises:
            RuntimeError: Nothing was recorded.
        """
        main = self._main_log()
        self.keep()
        with self._pause():
            logs = [log for log in list(self._logs) if log.count]
            callers = [log for log in logs if log is main or log.env_ns]
            since_ns = max(log.complete_since() for log in callers)
            begin_ns = max(self._since_ns, self._gone_until_ns, since_ns)
            stamps = None
            if self._stamps is not None:
                begin_ns = max(begin_ns, self._stamps.complete_since())
                stamps = self._stamps.read()
                stamps = stamps.where(stamps.begin_ns >= begin_ns)
            calls = main.read()
            calls = calls.where(calls.begin_ns >= begin_ns)
            end_ns = int(calls.end_ns.max(initial=begin_ns))
            others = []
            for log in logs:
                if log is not main:
                    found = log.read()
                    found = found.where(found.begin_ns >= begin_ns)
                    others.append(ThreadCalls(log.name, list(log.names), found))
            crew, processes, num_envs = self._kept
            return Recording(
                self._backend,
                begin_ns,
                end_ns,
                list(main.names),
                calls,
                stamps,
                crew,
                processes,
                num_envs,
                others,
            )

    def report(self) -> TimingReport:
        """Return the shares of the time since `enable` or `clear`; see `TimingReport`.

        Raises:
            RuntimeError: Nothing was recorded.
        """
        with self._pause():
            from vecenv.timing.report import make_report

            return make_report(self.tally(), self.recording())

    def write_trace(self, path: str | Path) -> None:
        """Write the latest part of the timeline as Chrome trace JSON, for ui.perfetto.dev.

        Raises:
            RuntimeError: Nothing was recorded.
            OSError: The file can't be written.
        """
        with self._pause():
            from vecenv.timing.trace import write_trace

            write_trace(self.recording(), path)

    def latest(self, env_id: int | None = None) -> str:
        """Describe the latest steps, running ones first; empty if there are none.

        Args:
            env_id: Restricts it to the envs of this env's worker; None for all envs.
        """
        if self._stamps is None:
            return ""
        chunks = self._kept[0].chunks
        first, last = chunks[0], chunks[-1]
        if env_id is not None:
            worker = int(np.searchsorted(chunks, env_id, side="right")) - 1
            first, last = chunks[worker], chunks[worker + 1]
        return self._stamps.describe_latest(np.arange(first, last))


class _Call(AbstractContextManager[CallLog]):
    """Logs a call, and adds the latest steps of the envs to exceptions."""

    __slots__ = ("_kind", "_log", "_num_rows", "_timing")

    def __init__(self, timing: Timing, log: CallLog, kind: int, num_rows: int) -> None:
        # Weak: a cycle would delay the release of the rings.
        self._timing, self._log = weakref.ref(timing), log
        self._kind, self._num_rows = kind, num_rows

    def __enter__(self) -> CallLog:
        self._log.begin(self._kind, self._num_rows)
        return self._log

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._log.end()
        if isinstance(exc, Exception) and (timing := self._timing()) is not None:
            latest = timing.latest(getattr(exc, "env_index", None))
            if latest:
                exc.add_note(latest)
