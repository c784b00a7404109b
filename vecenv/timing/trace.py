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
from vecenv.timing.attribution import KERNEL, Work
from vecenv.timing.calls import (
    ENV_CALLS,
    Calls,
)
from vecenv.timing.recording import Recording
from vecenv.timing.stamps import Stamps

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
    stamps = recording.stamps
    if stamps is not None:
        stamps = stamps.where(stamps.end_ns > 0)
        if len(stamps.env_ids) > MOST_STEPS:
            since = stamps.begin_ns[-MOST_STEPS]
            stamps = stamps.where(stamps.begin_ns >= since)
            calls = recording.calls.where(recording.calls.end_ns >= since)
            others = [
                other._replace(calls=other.calls.where(other.calls.end_ns >= since))
                for other in recording.others
            ]
            recording = recording._replace(calls=calls, others=others)
    yield _name("process_name", _CALLER, 0, "caller")
    yield _name("thread_name", _CALLER, 0, "calls and phases")
    yield from _call_events(recording)
    for number, other in enumerate(recording.others):
        track = _other_track(number)
        yield _name("thread_name", *track, f"thread {other.name}")
        for k in range(len(other.calls.kinds)):
            yield _call_event(other.calls, k, other.names, recording.begin_ns, track)
    if stamps is not None:
        yield from _worker_names(recording)
        yield from _step_events(recording, stamps)


def _call_event(
    calls: Calls, k: int, names: list[str], since_ns: int, track: tuple[int, int]
) -> Event:
    kind = int(calls.kinds[k])
    category = "call" if kind < len(ENV_CALLS) else "phase"
    interval = int(calls.begin_ns[k]), int(calls.end_ns[k])
    return _slice(names[kind], category, interval, since_ns, track)


def _call_events(recording: Recording) -> Iterator[Event]:
    """Yield the caller's calls and phases, and inside the calls waits and copies."""
    calls, since_ns = recording.calls, recording.begin_ns
    is_compiled = recording.crew.stamped == KERNEL
    waited = "kernel" if is_compiled else "wait"
    for k in range(len(calls.kinds)):
        yield _call_event(calls, k, recording.names, since_ns, (_CALLER, 0))
        begin_ns, end_ns = int(calls.wait_begin_ns[k]), int(calls.wait_end_ns[k])
        if begin_ns and end_ns:
            yield _slice(waited, waited, (begin_ns, end_ns), since_ns, (_CALLER, 0))
            if not is_compiled:
                copying = end_ns, int(calls.end_ns[k])
                yield _slice("copy", "copy", copying, since_ns, (_CALLER, 0))


def _numbers(recording: Recording) -> list[int]:
    """Return the number of the process of each worker."""
    number, numbers = 0, []
    for process in recording.processes:
        number += process is not None
        numbers.append(_CALLER if process is None else number)
    return numbers


def _worker_names(recording: Recording) -> Iterator[Event]:
    """Yield the names of the workers and their envs."""
    bounds = pairwise(recording.crew.chunks)
    for number, process, (first, last) in zip(
        _numbers(recording), recording.processes, bounds, strict=True
    ):
        if process is not None:
            yield _name("process_name", number, 0, f"worker {number - 1} (pid {process.pid})")
        envs = f"env {first}" if last == first + 1 else f"envs {first}-{last - 1}"
        yield _name("thread_name", number, _ENVS, envs)


def _step_events(recording: Recording, stamps: Stamps) -> Iterator[Event]:
    """Yield steps, resets, and the writing of their results."""
    work = Work(stamps, recording.crew, recording.end_ns)
    stamps, since_ns = work.stamps, recording.begin_ns
    numbers = np.array(_numbers(recording))[recording.crew.workers(stamps.env_ids)].tolist()
    for k, number in enumerate(numbers):
        env_id = int(stamps.env_ids[k])
        what = "reset" if stamps.is_reset[k] else "env"
        interval, track = (int(stamps.begin_ns[k]), int(stamps.end_ns[k])), (number, _ENVS)
        event = _slice(f"{what} {env_id}", what, interval, since_ns, track)
        event["args"] = {"env_id": env_id, "worker": number - 1}
        yield event
        until_ns = int(work.until_ns[k])
        if until_ns > interval[1]:
            yield _slice("copy", "copy", (interval[1], until_ns), since_ns, track)


def _other_track(number: int) -> tuple[int, int]:
    """Return the track of one of the caller's other threads."""
    return _CALLER, _OTHER_THREADS + number


def _slice(
    name: str, category: str, interval: tuple[int, int], since_ns: int, track: tuple[int, int]
) -> Event:
    begin_ns, end_ns = interval
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": (begin_ns - since_ns) / 1e3,
        "dur": (end_ns - begin_ns) / 1e3,
        "pid": track[0],
        "tid": track[1],
    }


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
