"""The flight recorder: the latest steps of some envs, in words."""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np

from vecenv.timing.stamps import EnvStamps

__all__ = ["describe_latest"]

_MOST_LINES = 10


def describe_latest(stamps: EnvStamps, env_ids: np.ndarray) -> str:
    """List the latest steps of some envs, running ones first, then the newest.

    Args:
        stamps: Stamps of all envs.
        env_ids: int64 (B,), the envs to list.

    Returns:
        One line per step, empty if there are none.
    """
    records = stamps.read()
    records = records.where(np.isin(records.env_ids, env_ids))
    now_ns = perf_counter_ns()
    order = np.lexsort((-records.begin_ns, records.end_ns > 0))[:_MOST_LINES]
    lines = []
    for k in order.tolist():
        what = "reset" if records.is_reset[k] else "step"
        ago_ms = (now_ns - int(records.begin_ns[k])) / 1e6
        took_ms = (int(records.end_ns[k]) - int(records.begin_ns[k])) / 1e6
        how = f"took {took_ms:.3f} ms" if records.end_ns[k] else "has not ended"
        lines.append(f"  env {records.env_ids[k]}: {what} begun {ago_ms:.3f} ms ago, {how}")
    return "\n".join(["Latest steps, by the stamps of envs.timing:", *lines]) if lines else ""
