"""Timing: the switch, the phases that a user names, and the ways to see the result."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vecenv.timing.calls import STEP, STEP_WAIT, CallLog
from vecenv.timing.recording import Recording
from vecenv.timing.stamps import EnvStamps

if TYPE_CHECKING:
    from vecenv.timing.report import TimingReport

__all__ = ["Timing"]

_NO_PHASE: AbstractContextManager[Any] = nullcontext()


class Timing:
    """Where the time goes; off until `enable` is called, and free of cost while off.

    A report covers all the time since `enable` or `clear`. The timeline has the latest 65 536 calls
    and phases, and the latest steps of every env (16 384 for up to 16 envs, never fewer than 64).
    Timing's own time is excluded.

    Phases may be entered in several threads. Shares are those of the thread that calls the vector
    env; the phases of other threads are reported separately.

    Attributes:
        enabled: Whether timing is on.
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
        >>> report.num_steps, report.shares["policy"] > 0
        (2, True)
        >>> envs.close()
    """

    def __init__(self, envs: Any) -> None:
        self._envs = weakref.ref(envs)  # a cycle would delay the deletion of the env
        self._recording = Recording(type(envs).__name__)
        self.log = self._recording.log
        self.enabled = False

    def enable(self) -> None:
        """Start timing; delete earlier recordings.

        Raises:
            ClosedEnvironmentError: The vector env is closed.
            AlreadyPendingCallError: Envs are in flight, or an asynchronous call is pending.
        """
        envs = self._envs()
        if self.enabled or envs is None:
            return
        known, found = self._recording, envs._begin_stamps()
        known.rings = found if isinstance(found, EnvStamps) else None
        known.stamped = "nothing" if found is None else "envs" if known.rings else "kernel"
        known.kernel_ns = found if isinstance(found, int) else 0
        known.chunks, known.processes = envs._env_chunks(), envs._worker_processes()
        known.clear()
        envs._log, self.enabled = self.log, True

    def disable(self) -> None:
        """Stop timing; keep the recording.

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
        """Measure the load of others so far: timing ends now, or workers are about to end."""
        self._recording.others_load(is_end=True)

    def clear(self) -> None:
        """Delete the recording; open phases begin now."""
        self._recording.clear()

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Return a context whose wall time is added to phase `name` (nothing while disabled)."""
        return _Interval(self, self.log.kind(name)) if self.enabled else _NO_PHASE

    def call(self, kind: int) -> AbstractContextManager[CallLog]:
        """Return a context that is logged as a call of the vector env; steps count all envs."""
        return _Interval(self, kind, self._recording.chunks[-1] if kind in (STEP, STEP_WAIT) else 0)

    def recording(self) -> Recording:
        """Return the totals since `enable` or `clear`, brought up to date.

        Raises:
            RuntimeError: Nothing was recorded.
        """
        envs = self._envs()
        with self.log.paused():
            self._recording.fold()
            if envs is not None and not envs.closed:  # workers may have been replaced
                self._recording.processes = envs._worker_processes()
        if len(self.log.latest()[0]) == 0:
            raise RuntimeError(
                "nothing has been recorded: call envs.timing.enable() before the steps"
            )
        return self._recording

    def report(self) -> TimingReport:
        """Return the shares of the time since `enable` or `clear`; see `TimingReport`.

        Raises:
            RuntimeError: Nothing was recorded.
        """
        recording = self.recording()
        with self.log.paused():
            from vecenv.timing.report import make_report  # here: most programs don't need it

            return make_report(recording)

    def write_trace(self, path: str | Path) -> None:
        """Write the latest part of the timeline as Chrome trace JSON, for ui.perfetto.dev.

        Raises:
            RuntimeError: Nothing was recorded.
            OSError: The file can't be written.
        """
        recording = self.recording()
        with self.log.paused():
            from vecenv.timing.recording import trace_events, write_events

            write_events(trace_events(recording), path)


class _Interval(AbstractContextManager[CallLog]):
    """Logs a call or a phase."""

    __slots__ = ("_kind", "_num_rows", "_timing")

    def __init__(self, timing: Timing, kind: int, num_rows: int = 0) -> None:
        self._timing, self._kind, self._num_rows = timing, kind, num_rows

    def __enter__(self) -> CallLog:
        log, recording = self._timing.log, self._timing._recording
        # Later if a step may be pending: the bound on gains would not know its work before that.
        most = recording.most_pending if self._kind < STEP_WAIT else 8 * recording.most_pending
        if len(log.rows) >= most and log.is_callers:
            with log.paused():
                recording.fold()
        log.begin(self._kind, self._num_rows)
        return log

    def __exit__(self, *_: object) -> None:
        self._timing.log.end()
