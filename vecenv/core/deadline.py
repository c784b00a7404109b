"""Points in time at which a wait ends."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """A point in time; with timeout None it never comes.

    Attributes:
        timeout: Seconds from now.
        is_limit: Whether an env that takes longer is at fault. Else only the wait is over.
    """

    def __init__(self, timeout: float | None, *, is_limit: bool = False) -> None:
        self.timeout = timeout
        self.is_limit = is_limit
        self._end = None if timeout is None else time.monotonic() + timeout

    @staticmethod
    def of_call(timeout: float | None, limit: float | None) -> Deadline:
        """Return the deadline of a call: its own timeout, which only ends the wait, or a limit."""
        if timeout is not None:
            return Deadline(timeout)
        return _NEVER if limit is None else Deadline(limit, is_limit=True)

    def left(self) -> float:
        """Return the seconds left, at least 0; infinity if it never comes."""
        return float("inf") if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return self._end is not None and time.monotonic() >= self._end


_NEVER = Deadline(None, is_limit=True)
