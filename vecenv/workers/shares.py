"""How many workers and threads a pool gets."""

from __future__ import annotations

import numpy as np

from vecenv.machine import usable_cores

__all__ = ["checked_threads", "worker_shares"]


def checked_threads(threads_per_worker: int | str) -> int:
    """Return the number of threads; 0 for "auto", if it depends on the envs."""
    if threads_per_worker == "auto":
        return 0
    if isinstance(threads_per_worker, int) and threads_per_worker >= 1:
        return threads_per_worker
    raise ValueError(f"threads_per_worker is {threads_per_worker!r}, expected 'auto' or at least 1")


def worker_shares(
    num_envs: int,
    num_workers: int | None,
    caller_steps: bool,
    max_concurrency: int | None,
) -> tuple[int, int]:
    """Return how many workers to use, and how many threads each may have at most."""
    most_threads = num_envs
    if num_workers is None:
        num_workers = max(1, usable_cores() - caller_steps)
    elif num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}, expected at least 1")
    if max_concurrency is not None:
        if not isinstance(max_concurrency, int | np.integer):
            raise ValueError(
                f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}."
            )
        if max_concurrency < 1:
            raise ValueError(
                f"`max_concurrency` must be a positive or None, got {max_concurrency}."
            )
        num_workers = min(num_workers, int(max_concurrency))
        most_threads = int(max_concurrency) // num_workers
    most = num_envs - 1 if caller_steps and num_envs > 1 else num_envs
    return max(1, min(num_workers, most)), most_threads
