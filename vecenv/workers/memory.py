"""One block of memory that the caller and all workers share."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from vecenv.core.rows import checked_layout
from vecenv.machine import is_portable

__all__ = ["Memory"]

_IS_WINDOWS = sys.platform == "win32"
# Bytes of address space to reserve; only pages that are written to take memory. `_MOST_BYTES` is
# halved until the limits of the process (file size) allow it. `_LIMITED_BYTES` where address space
# is limited, as there may be more pools, and in Windows, which commits all of it at once.
_MOST_BYTES, _LIMITED_BYTES, _FEWEST_BYTES = 1 << 38, 1 << 28, 1 << 26
_CACHE_LINE = 64


class Memory:
    """Memory shared by the caller and its workers, in one mapping that never moves or grows.

    The file behind it has no name (memfd, or an unlinked file where there is none; in Windows named
    memory that ends with its last process), so nothing can be left behind. Forks inherit the
    mapping; for other processes the memory is pickled as its `handle`. Processes that begin at the
    same `used_bytes` and allocate the same shapes share these arrays, which keep the mapping alive.

    Attributes:
        handle: Argument for `Memory` in another process: the file's descriptor, which that process
            must inherit, the size in bytes, and the name in Windows.
        used_bytes: Bytes in use; the next array begins there or, aligned, just after.
    """

    def __init__(self, handle: tuple[int, int, str] | None = None) -> None:
        self.handle = (-1, 0, "")  # for `__del__`, should what follows raise
        self.used_bytes, is_new = 0, handle is None
        file, size_bytes, name = self.handle = handle or _new_handle()
        mapped: Any = mmap.mmap  # takes a name in Windows only
        while True:
            try:
                if is_new and not name:
                    os.ftruncate(file, size_bytes)
                options = {"tagname": name} if name else {}
                self._mapping = mapped(file, size_bytes, **options)
                break
            except (OSError, ValueError, OverflowError):
                if not is_new or size_bytes <= _FEWEST_BYTES:
                    raise
                size_bytes //= 2
        self.handle = file, size_bytes, name

    def allocate(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return the next array (shape, dtype): zeros, unless a process has written there.

        Raises:
            ValueError, TypeError: See `checked_layout`.
            MemoryError: The reservation is used up.
        """
        shape, dtype, size_bytes = checked_layout(shape, dtype)
        alignment = mmap.PAGESIZE if size_bytes >= mmap.PAGESIZE else _CACHE_LINE
        offset = -(-self.used_bytes // alignment) * alignment  # rounded up
        if offset + size_bytes > self.handle[1]:
            raise MemoryError(
                f"shape {shape} of {dtype} needs {size_bytes} bytes, but {self.used_bytes} of the "
                f"{self.handle[1]} reserved for this vector env are used; raise the limits of "
                "address space and file size (ulimit -v, -f)"
            )
        self.used_bytes = offset + size_bytes
        return np.ndarray(shape, dtype, self._mapping, offset)

    def __reduce__(self) -> Any:
        """Pickle the handle, for a process that inherits the file."""
        return Memory, (self.handle,)

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Close the file; the mapping stays as long as arrays refer to it."""
        file, *rest = self.handle
        if file >= 0:
            self.handle = -1, *rest  # type: ignore[assignment]  # a tuple of three
            close(file)

    __del__ = close


def _new_handle() -> tuple[int, int, str]:
    if _IS_WINDOWS:
        return -1, _LIMITED_BYTES, f"vecenv-{uuid.uuid4().hex}"
    import resource

    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    size_bytes = _LIMITED_BYTES if is_limited else _MOST_BYTES
    if hasattr(os, "memfd_create") and not is_portable():
        return os.memfd_create("vecenv", os.MFD_CLOEXEC), size_bytes, ""
    file, path = tempfile.mkstemp(prefix="vecenv-")
    os.unlink(path)
    return file, size_bytes, ""
