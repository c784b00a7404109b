"""The timeline as Chrome trace JSON (Trace Event Format), for Perfetto or chrome://tracing.

One process "caller" with its calls, waits and phases; one process per worker with a track per
thread. Arrows (flow events) lead from the call that sent an env on its way to its step, and from
there to the call that received it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vecenv.files import whole_file
from vecenv.timing.attribution import ended, thread_numbers
from vecenv.timing.calls import ENV_CALLS, RECV, RESET, SEND, STEP
from vecenv.timing.control import Recording

__all__ = ["MOST_STEPS", "trace_events", "write_trace"]

MOST_STEPS = 50_000  # env steps in a trace, the latest; Perfetto opens that in a moment
_CALLER = 0  # number of the process; worker w is w + 1

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
    stamps = ended(recording)
    if stamps is not None and len(stamps.env_ids) > MOST_STEPS:
        since = stamps.begin_ns[-MOST_STEPS]
        stamps = stamps.where(stamps.begin_ns >= since)
        calls = recording.calls.where(recording.calls.end_ns >= since)
        recording = recording._replace(calls=calls)
    recording = recording._replace(stamps=stamps)
    yield _name("process_name", _CALLER, 0, "caller")
    yield from _call_events(recording)
    if stamps is not None:
        yield from _step_events(recording)
        yield from _flow_events(recording)


def _call_events(recording: Recording) -> Iterator[Event]:
    calls, begin_ns = recording.calls, recording.begin_ns
    for k in range(len(calls.kinds)):
        kind = int(calls.kinds[k])
        category = "call" if kind < len(ENV_CALLS) else "phase"
        interval = int(calls.begin_ns[k]), int(calls.end_ns[k])
        yield _slice(recording.names[kind], category, interval, begin_ns, (_CALLER, 0))
        if calls.wait_begin_ns[k] and calls.wait_end_ns[k]:
            waiting = int(calls.wait_begin_ns[k]), int(calls.wait_end_ns[k])
            yield _slice("wait", "wait", waiting, begin_ns, (_CALLER, 0))


def _owners(recording: Recording) -> tuple[np.ndarray, np.ndarray]:
    """Return for each env step the number of its process and of its track, int64 (R,) each."""
    stamps = recording.stamps
    assert stamps is not None
    workers = np.searchsorted(recording.chunks, stamps.env_ids, side="right") - 1
    numbers = np.array([_CALLER if p is None else w for w, p in _numbered(recording)])
    return numbers[workers], thread_numbers(recording) + 1  # track 0 of the caller is its calls


def _numbered(recording: Recording) -> Iterator[tuple[int, Any]]:
    number = 0
    for process in recording.processes:
        number += process is not None
        yield number, process


def _step_events(recording: Recording) -> Iterator[Event]:
    stamps, begin_ns = recording.stamps, recording.begin_ns
    assert stamps is not None
    processes, threads = _owners(recording)
    for number, process in _numbered(recording):
        if process is not None:
            yield _name("process_name", number, 0, f"worker {number - 1} (pid {process.pid})")
    for process, thread in np.unique(np.stack([processes, threads], 1), axis=0).tolist():
        yield _name("thread_name", process, thread, "envs")
    for k in range(len(stamps.env_ids)):
        env_id = int(stamps.env_ids[k])
        what = "reset" if stamps.is_reset[k] else "env"
        interval = int(stamps.begin_ns[k]), int(stamps.end_ns[k])
        track = int(processes[k]), int(threads[k])
        event = _slice(f"{what} {env_id}", what, interval, begin_ns, track)
        event["args"] = {"env_id": env_id}
        yield event


def _flow_events(recording: Recording) -> Iterator[Event]:
    """Yield arrows: call -> env step -> call; at most one pair per step."""
    stamps, calls, begin_ns = recording.stamps, recording.calls, recording.begin_ns
    assert stamps is not None
    senders = calls.where(np.isin(calls.kinds, (STEP, SEND, RESET)))
    receivers = calls.where(np.isin(calls.kinds, (STEP, RECV, RESET)))
    if len(senders.kinds) == 0 or len(receivers.kinds) == 0:
        return
    processes, threads = _owners(recording)
    sent = np.searchsorted(senders.begin_ns, stamps.begin_ns, side="right") - 1
    taken = np.searchsorted(receivers.end_ns, stamps.end_ns, side="left")
    for k in np.flatnonzero((sent >= 0) & (taken < len(receivers.kinds))).tolist():
        if processes[k] == _CALLER:
            continue  # the caller steps these envs itself
        track = int(processes[k]), int(threads[k])
        yield _flow("s", k, int(senders.begin_ns[sent[k]]), begin_ns, (_CALLER, 0))
        yield _flow("t", k, int(stamps.begin_ns[k]), begin_ns, track)
        yield _flow("f", k, int(receivers.end_ns[taken[k]]) - 1, begin_ns, (_CALLER, 0))


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


def _flow(phase: str, number: int, time_ns: int, since_ns: int, track: tuple[int, int]) -> Event:
    event = {
        "name": "step",
        "cat": "flow",
        "ph": phase,
        "id": number,
        "ts": (time_ns - since_ns) / 1e3,
        "pid": track[0],
        "tid": track[1],
    }
    return {**event, "bp": "e"} if phase == "f" else event


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
