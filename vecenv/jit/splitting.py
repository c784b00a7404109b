"""Whether a job is shared among threads, decided by measuring."""

from __future__ import annotations

import statistics

__all__ = ["SPLIT_NS", "SplitChoice", "num_parts"]

# A job that takes less than this on one thread is never split; parts take at least half of it.
SPLIT_NS = 20_000
NUM_TRIED = 12  # jobs done in one way before it is judged
NUM_KEPT = 1200  # jobs done in the better way before both are tried again


def num_parts(work_ns: float, num_threads: int) -> int:
    """Return into how many parts to split a job that takes one thread `work_ns`."""
    return min(num_threads, int(2 * work_ns / SPLIT_NS)) if work_ns >= SPLIT_NS else 1


class SplitChoice:
    """Tries jobs of one size on several threads and on one, and keeps to what is faster.

    Splitting does not pay where other processes or threads want the processors too, or where the
    caller does so much between jobs that helpers have fallen asleep; and that changes with time.

    Attributes:
        is_split: How to do the next job.
    """

    def __init__(self) -> None:
        self.is_split = True
        self._times_ns: list[int] = []  # of the jobs of this trial
        self._split_ns: float | None = None  # median of the trial of splitting, if it is over
        self._num_kept = 0  # jobs for which the choice still stands

    def note(self, elapsed_ns: int) -> bool:
        """Note how long a job took; return whether `is_split` has changed."""
        if self._num_kept:
            self._num_kept -= 1
            return self._num_kept == 0 and self._turn_to(True)
        self._times_ns.append(elapsed_ns)
        if len(self._times_ns) < NUM_TRIED:
            return False
        median_ns = statistics.median(self._times_ns)
        self._times_ns.clear()
        if self._split_ns is None:
            self._split_ns = median_ns
            return self._turn_to(False)
        is_better = self._split_ns < median_ns
        self._split_ns = None
        self._num_kept = NUM_KEPT
        return self._turn_to(is_better)

    def _turn_to(self, is_split: bool) -> bool:
        is_new = is_split != self.is_split
        self.is_split = is_split
        return is_new
