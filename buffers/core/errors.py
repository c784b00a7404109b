"""Errors of buffers: misuse, memory that is not there, and a learner that is not."""

from __future__ import annotations

__all__ = ["BufferClosedError", "BufferMemoryError", "BufferMisuseError", "CheckpointError"]


class BufferMisuseError(ValueError):
    """An argument of wrong shape, dtype or layout, or a call out of order; nothing was changed."""


class BufferMemoryError(MemoryError):
    """The buffer asked for does not fit into free memory; nothing was allocated."""


class CheckpointError(BufferMisuseError):
    """A checkpoint is damaged, cut off, or of another buffer; nothing was changed."""


class BufferClosedError(BufferMisuseError):
    """The learner has closed the buffer, or its process has ended: writers can end, too."""
