"""One shared mapping per pool, reserved at once and filled page by page."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vecenv.core.rows import checked_layout
from vecenv.machine import is_portable
from vecenv.workers.layout import Leaf

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # Windows has none

__all__ = ["Arena"]

_IS_WINDOWS = sys.platform == "win32"

# Reserved address space; memory is taken only by pages that have been written to. Halved until the
# limits of the process (address space, file size) allow it. Windows sets aside all of it at once.
_MOST_BYTES = 1 << 30 if _IS_WINDOWS else 1 << 38
_FEWEST_BYTES = 1 << 26
_PARTS = 8  # of what is left of a limited address space, one is for a pool: others are to come
_CACHE_LINE = 64
_PAGE = mmap.PAGESIZE


class Arena:
    """Memory shared by the caller and all workers, in one mapping that never moves or grows.

    The file behind it has no name (memfd, or an unlinked file where there is none; in Windows named
    memory that ends with its last process), so nothing can be left behind, and is sparse: workers
    have all of it mapped from the start, and what the caller allocates later is there for them
    without a message. Arrays keep the mapping alive, so they stay valid after the pool is closed.
    Memory is not given back before the last array is gone.

    Attributes:
        address: Of the first byte, in this process.
        size_bytes: Reserved.
        file: Descriptor of the file; -1 after `close`, and in Windows.
    """

    def __init__(
        self, file: int | None = None, size_bytes: int = _MOST_BYTES, name: str = ""
    ) -> None:
        self.file = -1  # in case this does not come to its end
        is_new = file is None
        self._name = name or f"vecenv-{uuid.uuid4().hex}" if _IS_WINDOWS else ""
        self.file = (-1 if _IS_WINDOWS else _make_file()) if file is None else file
        self._mapping, self.size_bytes = _map(self.file, size_bytes, self._name, is_new=is_new)
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

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Close the file of one that was never closed."""
        if self.file >= 0:
            close(self.file)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pass the file's descriptor on when a worker is spawned, or the name where it has one."""
        if _IS_WINDOWS:
            return Arena, (-1, self.size_bytes, self._name)
        from multiprocess.reduction import DupFd

        return _attach, (DupFd(self.file), self.size_bytes)


def _attach(file: Any, size_bytes: int) -> Arena:
    return Arena(file.detach(), size_bytes)


def _make_file() -> int:
    if hasattr(os, "memfd_create") and not is_portable():
        return os.memfd_create("vecenv", os.MFD_CLOEXEC)
    file, path = tempfile.mkstemp(prefix="vecenv-")
    os.unlink(path)
    return file


def _map(file: int, size_bytes: int, name: str, *, is_new: bool) -> tuple[mmap.mmap, int]:
    """Map the file; a new one with the largest size up to `size_bytes` that can be had."""
    if is_new and resource is not None:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            part = (limit - _mapped_bytes()) // _PARTS & -_PAGE
            size_bytes = max(_FEWEST_BYTES, min(size_bytes, part))
    while True:
        try:
            if name:
                named: Any = mmap.mmap  # of Windows, where it takes a name
                return named(-1, size_bytes, tagname=name), size_bytes
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
