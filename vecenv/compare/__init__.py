"""Backends compared on one env: what `vecenv compare` runs; see docs/compare.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vecenv.compare.comparison import Options, run_comparison
    from vecenv.compare.result import Comparison

__all__ = ["Comparison", "Options", "run_comparison"]


def __getattr__(name: str) -> Any:
    """Load the comparison at its first use; the processes that it starts don't need it."""
    if name in __all__:
        from vecenv.compare import comparison

        return getattr(comparison, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
