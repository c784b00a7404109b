"""The results of timing, for reports and timelines: running totals, and the latest intervals."""

from __future__ import annotations

from typing import NamedTuple

from vecenv.timing.attribution import CallTotals, Crew, EnvTotals
from vecenv.timing.calls import Calls
from vecenv.timing.stamps import Stamps

__all__ = ["Recording", "Tally", "ThreadCalls", "WorkerProcess"]


class WorkerProcess(NamedTuple):
    """A process that steps envs.

    Attributes:
        pid: Process id.
        start_s: Seconds from its start until its envs were made; None or negative while they are
            being made.
    """

    pid: int
    start_s: float | None


class ThreadCalls(NamedTuple):
    """The latest intervals of a thread.

    Attributes:
        name: Name of the thread.
        names: Names of the kinds of intervals.
        calls: The intervals.
    """

    name: str
    names: list[str]
    calls: Calls


class Recording(NamedTuple):
    """The stamps of a window of time: the latest one in which they are complete.

    Attributes:
        backend: Name of the vector env's class.
        begin_ns, end_ns: The window, by `time.perf_counter_ns`.
        names: Names of the kinds of calls.
        calls: The intervals inside the window, of the thread that calls the vector env.
        stamps: Env steps that began inside the window; None if they are not stamped one by one.
        crew: The threads that step the envs.
        processes: The workers' processes, None for the caller.
        num_envs: Number of envs.
        others: Intervals of other threads.
    """

    backend: str
    begin_ns: int
    end_ns: int
    names: list[str]
    calls: Calls
    stamps: Stamps | None
    crew: Crew
    processes: list[WorkerProcess | None]
    num_envs: int
    others: list[ThreadCalls]


class Tally(NamedTuple):
    """Running totals since `enable` or `clear`.

    Attributes:
        wall_ns: Wall time of the thread that calls the vector env, until its latest call or phase.
        phases_ns: Time in its phases, without nested intervals.
        calls: Totals of its calls.
        envs: Totals of the envs; None if they are not stamped one by one.
        others_ns: Time in phases and calls of other threads, by name.
        stamped: ENVS, KERNEL or NOTHING, see `Crew`.
        others_load: Processors that other processes kept busy, on average; None if not known.
    """

    wall_ns: int
    phases_ns: dict[str, int]
    calls: CallTotals
    envs: EnvTotals | None
    others_ns: dict[str, int]
    stamped: str
    others_load: float | None
