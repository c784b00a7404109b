"""Errors of buffers: misuse, missing memory, damaged checkpoints and closed buffers."""

from __future__ import annotations

__all__ = ["BufferClosedError", "BufferMemoryError", "BufferMisuseError", "CheckpointError"]


class BufferMisuseError(ValueError):
    """An argument is wrong, or a call out of order; nothing was changed."""


class BufferMemoryError(MemoryError):
    """The requested memory is not free; nothing was allocated."""


class CheckpointError(BufferMisuseError):
    """A checkpoint is damaged, truncated, or of another buffer; nothing was changed."""


class BufferClosedError(BufferMisuseError):
    """The learner has closed the buffer, or its process has ended; the writer can stop."""
