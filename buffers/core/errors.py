"""Errors of buffers: one for misuse, one for memory that is not there."""

from __future__ import annotations

__all__ = ["BufferMemoryError", "BufferMisuseError", "CheckpointError"]


class BufferMisuseError(ValueError):
    """An argument of wrong shape, dtype or layout, or a call out of order; nothing was changed."""


class BufferMemoryError(MemoryError):
    """The buffer asked for does not fit into free memory; nothing was allocated."""


class CheckpointError(BufferMisuseError):
    """A checkpoint is damaged, cut off, or of another buffer; nothing was changed."""
