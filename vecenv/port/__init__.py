"""Prove that kernels behave like a Python env; see docs/port.md."""

from vecenv.port.deadline import StuckError
from vecenv.port.lockstep import Difference
from vecenv.port.proof import Proof, prove

__all__ = ["Difference", "Proof", "StuckError", "prove"]
