"""Where the time of a training loop goes: stamps, a report, a picture, a timeline.

Off by default. `envs.timing.enable()` stamps every env step where it happens, every call of the
vector env, and the phases that the user names; `envs.timing.report()` sums them up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vecenv.timing.control import Timing

if TYPE_CHECKING:
    from vecenv.timing.report import TimingReport

__all__ = ["Timing", "TimingReport"]


def __getattr__(name: str) -> Any:
    """Load the report classes on first use: most programs enable no timing."""
    if name == "TimingReport":
        from vecenv.timing.report import TimingReport

        return TimingReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
