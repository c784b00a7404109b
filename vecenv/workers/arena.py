"""One shared mapping per pool, reserved at once and filled page by page."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from vecenv.core.rows import checked_layout
from vecenv.workers.layout import Leaf

__all__ = ["Arena"]

# Reserved address space; memory is taken only by pages that have been written to. Halved until the
# limits of the process (address space, file size) allow it.
_MOST_BYTES = 1 << 38
_FEWEST_BYTES = 1 << 26
_PARTS = 8  # of what is left of a limited address space, one is for a pool: others are to come
_CACHE_LINE = 64
_PAGE = mmap.PAGESIZE


class Arena:
    """Memory shared by the caller and all workers, in one mapping that never moves or grows.

    The file behind it has no name (memfd, or an unlinked file where there is none), so nothing can
    be left behind, and is sparse: workers have all of it mapped from the start, and what the caller
    allocates later is there for them without a message. Arrays keep the mapping alive, so they stay
    valid after the pool is closed. Memory is not given back before the last array is gone.

    Attributes:
        address: Of the first byte, in this process.
        size_bytes: Reserved.
    """

    def __init__(self, file: int | None = None, size_bytes: int = _MOST_BYTES) -> None:
        self.file = _make_file() if file is None else file
        self._mapping, self.size_bytes = _map(self.file, size_bytes, is_new=file is None)
        self._bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self.address: int = self._bytes.ctypes.data
        self._used_bytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return zeros (shape, dtype) in the mapping; only the process that made the arena may.

        Raises:
            ValueError, TypeError: See `checked_layout`.
            MemoryError: The reservation is used up.
        """
        shape, dtype, size_bytes = checked_layout(shape, dtype)
        alignment = _PAGE if size_bytes >= _PAGE else _CACHE_LINE
        offset = -(-self._used_bytes // alignment) * alignment
        if offset + size_bytes > self.size_bytes:
            raise MemoryError(
                f"allocate({shape}, {dtype}) needs {size_bytes} bytes, but {self._used_bytes} of "
                f"the {self.size_bytes} reserved for this vector env are used; raise the limits "
                "of address space and file size (ulimit -v, -f) or allocate less"
            )
        array = np.ndarray(shape, dtype, self._bytes, offset)
        self._used_bytes = offset + max(size_bytes, 1)
        return array

    def view(self, leaf: Leaf) -> np.ndarray:
        """Return the array of a leaf, shared with all processes that have this arena."""
        return np.ndarray(leaf.shape, np.dtype(leaf.dtype), self._bytes, leaf.offset)

    def offset(self, array: np.ndarray) -> int | None:
        """Return where a C-contiguous array begins in the mapping; None if it is not in it."""
        offset = array.__array_interface__["data"][0] - self.address
        return offset if 0 <= offset < self.size_bytes and array.size else None

    def leaf(self, array: np.ndarray) -> Leaf:
        """Describe an array that was allocated here, for another process."""
        offset = self.offset(array)
        assert offset is not None
        return Leaf(offset, array.shape, array.dtype.str)

    def close(self) -> None:
        """Close the file; the mapping stays for as long as there are arrays in it."""
        if self.file >= 0:
            file, self.file = self.file, -1
            os.close(file)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pass the file's descriptor on when a worker is spawned."""
        from multiprocess.reduction import DupFd

        return _attach, (DupFd(self.file), self.size_bytes)


def _attach(file: Any, size_bytes: int) -> Arena:
    return Arena(file.detach(), size_bytes)


def _make_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("vecenv", os.MFD_CLOEXEC)
    file, path = tempfile.mkstemp(prefix="vecenv-")
    os.unlink(path)
    return file


def _map(file: int, size_bytes: int, *, is_new: bool) -> tuple[mmap.mmap, int]:
    """Map the file; a new one with the largest size up to `size_bytes` that can be had."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if is_new and limit != resource.RLIM_INFINITY:
        part = (limit - _mapped_bytes()) // _PARTS & -_PAGE
        size_bytes = max(_FEWEST_BYTES, min(size_bytes, part))
    while True:
        try:
            if is_new:
                os.ftruncate(file, size_bytes)
            return mmap.mmap(file, size_bytes), size_bytes
        except (OSError, ValueError, OverflowError):
            if not is_new or size_bytes <= _FEWEST_BYTES:
                raise
            size_bytes //= 2


def _mapped_bytes() -> int:
    """Return how much of its address space this process uses; 0 if the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    except OSError:
        return 0
