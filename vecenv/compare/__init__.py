"""Backends side by side on one env: what `vecenv compare` runs; see docs/compare.md."""

from __future__ import annotations

from vecenv.compare.comparison import Options, run_comparison
from vecenv.compare.result import Comparison

__all__ = ["Comparison", "Options", "run_comparison"]
