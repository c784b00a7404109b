"""The timeline as Chrome trace JSON (Trace Event Format), for Perfetto or chrome://tracing.

One process "caller" with a track for its calls, waits, copies and phases; one process per worker
with a track of its envs' steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vecenv.files import whole_file
from vecenv.timing.calls import NUM_ENV_CALLS
from vecenv.timing.recording import Recording

__all__ = ["MOST_STEPS", "trace_events", "write_events"]

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
