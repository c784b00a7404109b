"""The timeline as Chrome trace JSON (Trace Event Format), for Perfetto or chrome://tracing.

One process "caller" with a track for its calls, waits, copies and phases, and one for each other
thread that has phases; one process per worker with a track of its envs' steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vecenv.files import whole_file
from vecenv.timing.calls import NUM_ENV_CALLS
from vecenv.timing.shares import KERNEL, Recording, writing_ends

__all__ = ["MOST_STEPS", "trace_events", "write_trace"]

MOST_STEPS = 50_000  # latest env steps in a trace; Perfetto opens that many quickly
_CALLER = 0  # number of the process; worker w is w + 1
_OTHER_THREADS = 1_000_000  # first track of the caller's other threads
_ENVS = 1  # track of a process's env steps

Event = dict[str, Any]


def write_trace(recording: Recording, path: str | Path) -> None:
    """Write the trace of a recording.

    Raises:
        OSError: The file can't be written.
    """
    with whole_file(path) as aside, aside.open("w") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(trace_events(recording)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def trace_events(recording: Recording) -> Iterator[Event]:
    """Yield the events of a trace; times in microseconds since the window began."""
    stamps, since_ns = recording.stamps, recording.begin_ns
    if stamps is not None:
        stamps = stamps.where(stamps.end_ns > 0)
        if len(stamps.env_ids) > MOST_STEPS:
            since_ns = int(np.sort(stamps.begin_ns)[-MOST_STEPS])
            stamps = stamps.where(stamps.begin_ns >= since_ns)

    def event(name: str, what: str, begin_ns: int, end_ns: int, process: int, track: int) -> Event:
        times = {"ts": (begin_ns - since_ns) / 1e3, "dur": (end_ns - begin_ns) / 1e3}
        return {"name": name, "cat": what, "ph": "X", **times, "pid": process, "tid": track}

    yield _name("process_name", _CALLER, 0, "caller")
    yield _name("thread_name", _CALLER, 0, "calls and phases")
    is_compiled = recording.crew.stamped == KERNEL
    waited = "kernel" if is_compiled else "wait"
    calls = recording.calls.where(recording.calls.begin_ns >= since_ns)
    columns = (calls.kinds, calls.begin_ns, calls.end_ns, calls.wait_begin_ns, calls.wait_end_ns)
    for kind, begin, end, wait_begin, wait_end in zip(*(c.tolist() for c in columns), strict=True):
        what = "call" if kind < NUM_ENV_CALLS else "phase"
        yield event(recording.log.names[kind], what, begin, end, _CALLER, 0)
        if wait_end:
            yield event(waited, waited, wait_begin, wait_end, _CALLER, 0)
            if not is_compiled:
                yield event("copy", "copy", wait_end, end, _CALLER, 0)
    tracks: dict[str, int] = {}
    for other in recording.others:
        if other.thread not in tracks:
            tracks[other.thread] = _OTHER_THREADS + len(tracks)
            yield _name("thread_name", _CALLER, tracks[other.thread], f"thread {other.thread}")
        if other.begin_ns >= since_ns:
            track = tracks[other.thread]
            yield event(other.name, "phase", other.begin_ns, other.end_ns, _CALLER, track)
    if stamps is None:
        return
    until_ns = writing_ends(stamps, recording.crew)
    number = _CALLER
    for process, (first, last) in zip(
        recording.crew.processes, pairwise(recording.crew.chunks), strict=True
    ):
        its_number = _CALLER
        if process is not None:
            its_number = number = number + 1
            yield _name("process_name", number, 0, f"worker {number - 1} (pid {process.pid})")
        envs = f"env {first}" if last == first + 1 else f"envs {first}-{last - 1}"
        yield _name("thread_name", its_number, _ENVS, envs)
        for k in range(*np.searchsorted(stamps.env_ids, [first, last]).tolist()):
            env_id, begin, end = (int(column[k]) for column in stamps[:3])
            what = "reset" if stamps.is_reset[k] else "env"
            found = event(f"{what} {env_id}", what, begin, end, its_number, _ENVS)
            yield {**found, "args": {"env_id": env_id, "worker": its_number - 1}}
            if until_ns[k] > end:
                yield event("copy", "copy", end, int(until_ns[k]), its_number, _ENVS)


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
