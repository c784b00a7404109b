"""Timing: the switch, the phases a user names, and the ways to look at the result."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from vecenv.timing.calls import CallLog, Calls
from vecenv.timing.stamps import EnvStamps, Stamps

if TYPE_CHECKING:
    from vecenv.timing.report import TimingReport

__all__ = ["Recording", "TimedEnvs", "Timing", "WorkerProcess"]

_NO_PHASE: AbstractContextManager[None] = nullcontext()


class WorkerProcess(NamedTuple):
    """A process that steps envs.

    Attributes:
        pid: Its number.
        start_s: Seconds from its start until its envs were made.
    """

    pid: int
    start_s: float


class TimedEnvs(Protocol):
    """What a vector env offers to be timed."""

    num_envs: int
    closed: bool
    _log: CallLog | None

    def _begin_stamps(self) -> EnvStamps | None:
        """Begin to stamp env steps; return where, or None if single steps can't be told apart."""

    def _end_stamps(self) -> None:
        """Stop stamping."""

    def _env_chunks(self) -> list[int]:
        """Return W + 1 bounds: envs bounds[w], ..., bounds[w + 1] - 1 are stepped by worker w."""
        ...

    def _worker_processes(self) -> list[WorkerProcess | None]:
        """Return the process of each worker; None where it is the caller."""
        ...


class Recording(NamedTuple):
    """What was stamped in a window of time.

    Attributes:
        backend: Name of the vector env's class.
        begin_ns, end_ns: The window, by `time.perf_counter_ns`.
        names: Of the kinds of calls.
        calls: The caller's intervals inside the window.
        stamps: Env steps that began inside the window; None if they are not stamped one by one.
        chunks: Bounds of the workers' envs.
        processes: Of the workers, None for the caller.
        num_envs: Of the vector env.
    """

    backend: str
    begin_ns: int
    end_ns: int
    names: list[str]
    calls: Calls
    stamps: Stamps | None
    chunks: list[int]
    processes: list[WorkerProcess | None]
    num_envs: int


class Timing:
    """Where the time goes; off until `enable` is called, and then costs nothing.

    Stamps are kept of the latest 65 536 calls and phases, and of the latest steps of every env
    (16 384 for up to 16 envs, never fewer than 64); a report is about what is complete in these.

    Attributes:
        enabled: Whether time is being taken.
        total_ns: Nanoseconds spent in each phase since the last `clear`.

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
        self._envs = weakref.ref(envs)  # a cycle would delay the end of a forgotten env
        self._backend = type(envs).__name__
        self._log: CallLog | None = None
        self._stamps: EnvStamps | None = None
        self._since_ns = 0
        self._kept: tuple[list[int], list[WorkerProcess | None], int] = ([0], [], 0)
        self.enabled = False

    @property
    def total_ns(self) -> dict[str, int]:
        """Nanoseconds spent in each phase since the last `clear`."""
        return {} if self._log is None else self._log.total_ns

    def enable(self) -> None:
        """Take the time from now on.

        Raises:
            ClosedEnvironmentError: The vector env is closed.
            AlreadyPendingCallError: Envs are in flight, or an asynchronous call is pending.
        """
        envs = self._envs()
        if self.enabled or envs is None:
            return
        self._stamps = envs._begin_stamps()
        if self._log is None:
            self._log = CallLog()
        self._since_ns = perf_counter_ns()
        self.enabled = True
        envs._log = self._log
        self.keep()

    def disable(self) -> None:
        """Stop taking the time; what has been recorded stays."""
        envs = self._envs()
        if self.enabled and envs is not None:
            envs._log = None
            envs._end_stamps()
        self.enabled = False

    def clear(self) -> None:
        """Forget what has been recorded."""
        if self._log is not None:
            self._log.clear()
        self._since_ns = perf_counter_ns()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose wall time is added to phase `name` (nothing while disabled)."""
        log = self._log
        return log.interval(log.kind(name)) if self.enabled and log is not None else _NO_PHASE

    def call(self, kind: int) -> AbstractContextManager[None]:
        """Return a context that is logged as a call of the vector env.

        An exception that passes through it is given the latest steps as a note.
        """
        assert self._log is not None
        return _Call(self, self._log, kind)

    def keep(self) -> None:
        """Note who steps which envs, for a report after the vector env is closed."""
        envs = self._envs()
        if envs is not None and not envs.closed:
            self._kept = envs._env_chunks(), envs._worker_processes(), envs.num_envs

    def recording(self) -> Recording:
        """Return what was recorded since `enable` or `clear`, as far back as it is complete.

        Raises:
            RuntimeError: Nothing was recorded.
        """
        if self._log is None or self._log.count == 0:
            raise RuntimeError(
                "nothing has been recorded: call envs.timing.enable() before the steps"
            )
        begin_ns = max(self._since_ns, self._log.complete_since())
        stamps = None
        if self._stamps is not None:
            begin_ns = max(begin_ns, self._stamps.complete_since())
            stamps = self._stamps.read()
            stamps = stamps.where(stamps.begin_ns >= begin_ns)
        calls = self._log.read()
        calls = calls.where(calls.begin_ns >= begin_ns)
        end_ns = int(calls.end_ns.max(initial=begin_ns))
        self.keep()  # workers may have been replaced
        chunks, processes, num_envs = self._kept
        names = list(self._log.names)
        return Recording(
            self._backend, begin_ns, end_ns, names, calls, stamps, chunks, processes, num_envs
        )

    def report(self) -> TimingReport:
        """Say where the time went since `enable` or `clear`; see `TimingReport`.

        Raises:
            RuntimeError: Nothing was recorded.
        """
        from vecenv.timing.report import make_report

        return make_report(self.recording())

    def write_trace(self, path: str | Path) -> None:
        """Write the timeline as Chrome trace JSON, which Perfetto (ui.perfetto.dev) opens.

        Raises:
            RuntimeError: Nothing was recorded.
            OSError: The file can't be written.
        """
        from vecenv.timing.trace import write_trace

        write_trace(self.recording(), path)

    def latest(self, env_id: int | None = None) -> str:
        """Describe the latest steps, those that have not ended first; empty if there are none.

        Args:
            env_id: Only of this env and the others of its worker; None for all envs.
        """
        if self._stamps is None:
            return ""
        from vecenv.timing.recorder import describe_latest

        chunks = self._kept[0]
        first, last = chunks[0], chunks[-1]
        if env_id is not None:
            worker = int(np.searchsorted(chunks, env_id, side="right")) - 1
            first, last = chunks[worker], chunks[worker + 1]
        return describe_latest(self._stamps, np.arange(first, last))


class _Call(AbstractContextManager[None]):
    """Logs a call, and says in exceptions what the envs did last."""

    __slots__ = ("_kind", "_log", "_timing")

    def __init__(self, timing: Timing, log: CallLog, kind: int) -> None:
        self._timing, self._log, self._kind = timing, log, kind

    def __enter__(self) -> None:
        self._log.begin(self._kind)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._log.end()
        if isinstance(exc, Exception):
            latest = self._timing.latest(getattr(exc, "env_index", None))
            if latest:
                exc.add_note(latest)
