"""Prove that kernels do what a Python env does; see docs/port.md."""

from vecenv.port.lockstep import Difference
from vecenv.port.proof import Proof, prove

__all__ = ["Difference", "Proof", "prove"]
