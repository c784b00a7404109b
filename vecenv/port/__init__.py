"""Prove that kernels do what a Python env does; see docs/port.md."""

from vecenv.port.proof import Difference, Proof, prove

__all__ = ["Difference", "Proof", "prove"]
