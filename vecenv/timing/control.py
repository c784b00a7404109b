"""Wall time by named phase of a training loop."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from types import TracebackType

__all__ = ["Timing"]

_NO_PHASE: AbstractContextManager[None] = nullcontext()


class _Phase(AbstractContextManager[None]):
    """Adds the time between enter and exit to one phase of its timing."""

    def __init__(self, timing: Timing, name: str) -> None:
        self._timing = timing
        self._name = name
        self._begin_ns = 0

    def __enter__(self) -> None:
        self._begin_ns = perf_counter_ns()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        elapsed_ns = perf_counter_ns() - self._begin_ns
        totals = self._timing.total_ns
        totals[self._name] = totals.get(self._name, 0) + elapsed_ns


class Timing:
    """Totals of wall time per phase; off until `enable` is called, and then costs nothing.

    Attributes:
        enabled: Whether phases are being timed.
        total_ns: Nanoseconds spent in each phase since the last `clear`.

    Example:
        >>> timing = Timing()
        >>> timing.enable()
        >>> with timing.phase("policy"):
        ...     _ = sum(range(10))
        >>> list(timing.total_ns)
        ['policy']
    """

    def __init__(self) -> None:
        self.enabled = False
        self.total_ns: dict[str, int] = {}

    def enable(self) -> None:
        """Time the phases from now on."""
        self.enabled = True

    def disable(self) -> None:
        """Stop timing; the totals stay."""
        self.enabled = False

    def clear(self) -> None:
        """Forget the totals."""
        self.total_ns.clear()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose wall time is added to phase `name` (nothing while disabled)."""
        return _Phase(self, name) if self.enabled else _NO_PHASE
