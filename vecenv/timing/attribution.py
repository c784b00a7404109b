"""From stamps to shares: who had the time, so that the shares add up to the wall time.

Time inside a call of the vector env is cut at the moments at which the caller began and ended to
wait. What the threads that step envs did while it waited says the rest. In a call that waits for
all: the mean, over the threads that had work, of the time for which they had an env at work is *env
compute*; the longest of these times minus the mean is the *straggler wait*. In `recv`, which waits
for whoever is first, the time in which any env was at work is *env compute*. What is left of the
waiting, and posting the commands, is *hand-over*; what comes after the waiting is *copying*. If the
calling process steps the envs itself, all but the env steps is copying: batching results.
"""

from __future__ import annotations

import numpy as np

from vecenv.timing.calls import ENV_CALLS, RECV, SEND, Calls
from vecenv.timing.control import Recording
from vecenv.timing.intervals import Coverage
from vecenv.timing.stamps import Stamps

__all__ = ["ENV_SHARES", "env_durations", "shares_ns", "worker_coverage"]

ENV_COMPUTE, STRAGGLERS, HAND_OVER, COPYING = (
    "env compute",
    "straggler wait",
    "hand-over",
    "copying",
)
ENV_SHARES = (ENV_COMPUTE, STRAGGLERS, HAND_OVER, COPYING)
OTHER = "other"


def ended(recording: Recording) -> Stamps | None:
    """Return the env steps of a recording that have ended."""
    stamps = recording.stamps
    return None if stamps is None else stamps.where(stamps.end_ns > 0)


def worker_coverage(recording: Recording) -> list[Coverage]:
    """Return for each worker when at least one of its envs was at work; empty if not known."""
    stamps = ended(recording)
    if stamps is None:
        return []
    owners = np.searchsorted(recording.chunks, stamps.env_ids, side="right") - 1
    found = [stamps.where(owners == worker) for worker in range(len(recording.chunks) - 1)]
    return [Coverage(chosen.begin_ns, chosen.end_ns) for chosen in found]


def shares_ns(recording: Recording) -> dict[str, int]:
    """Return nanoseconds of wall time by name: the env's shares, the user's phases, the rest."""
    calls, names = recording.calls, recording.names
    own_ns = calls.end_ns - calls.begin_ns - calls.nested_ns
    shares: dict[str, int] = dict(zip(ENV_SHARES, _env_shares(recording), strict=True))
    for kind, name in enumerate(names):
        if kind >= len(ENV_CALLS):
            total = int(own_ns[calls.kinds == kind].sum())
            shares[name] = shares.get(name, 0) + total
    shares[OTHER] = recording.end_ns - recording.begin_ns - sum(shares.values())
    return shares


def _env_shares(recording: Recording) -> tuple[int, int, int, int]:
    """Cut up the time inside calls of the vector env."""
    calls = recording.calls.where(recording.calls.kinds < len(ENV_CALLS))
    total_ns = int((calls.end_ns - calls.begin_ns).sum())
    stamps = ended(recording)
    if stamps is None:  # one compiled call does it all
        return total_ns, 0, 0, 0
    is_local = all(process is None for process in recording.processes)
    wait_begin, wait_end = _waits(calls, is_local=is_local)
    lanes = stamps._replace(threads=thread_numbers(recording._replace(stamps=stamps)))
    mean_ns, most_ns = _work(lanes, wait_begin, wait_end)
    any_ns = Coverage(stamps.begin_ns, stamps.end_ns).between(wait_begin, wait_end)
    is_barrier = calls.kinds != RECV
    compute_ns = round(np.where(is_barrier, mean_ns, any_ns).sum())
    stragglers_ns = round((most_ns - mean_ns)[is_barrier].sum())
    if is_local:
        return compute_ns, 0, 0, total_ns - compute_ns
    copying_ns = int((calls.end_ns - wait_end).sum())
    return compute_ns, stragglers_ns, total_ns - compute_ns - stragglers_ns - copying_ns, copying_ns


def thread_numbers(recording: Recording) -> np.ndarray:
    """Number the threads of all processes from 0; int64 (R,), of each stamped env step."""
    stamps = recording.stamps
    assert stamps is not None
    owners = np.searchsorted(recording.chunks, stamps.env_ids, side="right") - 1
    pairs = np.stack([owners, stamps.threads], axis=1)
    return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)


def _work(stamps: Stamps, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for how long in each interval the threads were at work.

    Args:
        stamps: Env steps that have ended.
        begins: int64 (M,).
        ends: int64 (M,).

    Returns:
        Mean over the threads that were at work at all, float64 (M,), and maximum, int64 (M,).
    """
    total, most, active = (np.zeros(len(begins), dtype=np.int64) for _ in range(3))
    for thread in np.unique(stamps.threads).tolist():
        chosen = stamps.where(stamps.threads == thread)
        busy_ns = Coverage(chosen.begin_ns, chosen.end_ns).between(begins, ends)
        total += busy_ns
        active += busy_ns > 0
        most = np.maximum(most, busy_ns)
    return total / np.maximum(active, 1), most


def _waits(calls: Calls, *, is_local: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 (M,) twice: when each call waited for envs, (end, end) if it did not."""
    if is_local:
        return calls.begin_ns, calls.end_ns
    has_waited = (calls.wait_begin_ns > 0) & (calls.wait_end_ns > 0)
    return (
        np.where(has_waited, calls.wait_begin_ns, calls.end_ns),
        np.where(has_waited, calls.wait_end_ns, calls.end_ns),
    )


def is_first_ready(recording: Recording) -> bool:
    """Return whether envs were sent and received rather than stepped all at once."""
    kinds = recording.calls.kinds
    return bool(((kinds == SEND) | (kinds == RECV)).any())


def env_durations(recording: Recording) -> tuple[np.ndarray, np.ndarray]:
    """Return the envs int64 (R,) and the lengths int64 (R,) in nanoseconds of steps, no resets."""
    stamps = ended(recording)
    if stamps is None:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    steps = stamps.where(~stamps.is_reset)
    return steps.env_ids, steps.end_ns - steps.begin_ns
