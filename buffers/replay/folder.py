"""Rows in files: a folder of memory-mapped `.npy` files, and a header, written after them.

    header.json      settings of the buffer, and which rows are on the disk for certain
    rows.npy         uint8 (num_rows, stride)        rings.npy, envs.npy   counts, environments
    lock             held by the process that writes

If a process dies, the system still writes its pages, so all committed rows are there. After a power
loss, any of the pages written since the last `flush` may be missing. So the header has the counts
at that flush, and at most `limit` transitions are added before the next flush, which is automatic.
Opening the folder drops the rows that may have been overwritten since.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from buffers.core.errors import BufferMemoryError, BufferMisuseError, CheckpointError
from buffers.core.memory import format_bytes
from buffers.core.state import check_settings
from buffers.replay.plan import Plan
from vecenv.files import whole_file

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

__all__ = ["Files", "Folder", "plan_place"]

Files = dict[str, tuple[np.dtype, tuple[int, ...]]]  # dtype and shape by name
_HEADER, _LOCK = "header.json", "lock"
_UNSAFE_BYTES = 1 << 26  # rows written between two flushes, at most
_FEW_BYTES = 1 << 20  # but at least this, in a small ring
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def plan_place(given: Mapping[str, Any], plan: Plan, *, is_staged: bool) -> Path | None:
    """Check the arguments of a constructor, and return the folder; None for memory.

    Raises:
        BufferMisuseError: The arguments contradict one another, or a folder can't hold such rows.
    """
    storage, folder = given["storage"], given["folder"]
    if storage == "memory" and folder is None:
        return None
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else ""
    is_path = isinstance(path, str) and path and "\0" not in path
    has_files = fcntl is not None and hasattr(os, "posix_fallocate")
    is_kept = not (is_staged or plan.is_once or plan.has_sequences)
    if storage != "memmap" or not is_path or not is_kept or not has_files:
        raise BufferMisuseError(
            f"storage is {storage!r:.99} and folder {folder!r:.99}, expected 'memory', or 'memmap' "
            "and a path, on Linux; a folder needs storage='memmap', which needs device='cpu' (move "
            "the tensors of batches with .to()), staged=False, store_next=True, no priorities, "
            "track_episodes=False and no frame_stack: files keep whole rows, and these alone"
        )
    return Path(os.path.abspath(path))


class Folder:
    """The files of one buffer, made or opened.

    `described` are settings of the buffer, for JSON; `files` has `rows`, `rings` and `envs`.

    Attributes:
        arrays: The mapped files by name.
        is_new: The folder was made by this object.
        was_cut: A power loss has removed the newest transitions.
        limit: Largest number of transitions added between two flushes.
    """

    def __init__(self, path: Path, described: Mapping[str, Any], plan: Plan, files: Files):
        self._path, self._described, self._plan, self._pid = path, described, plan, os.getpid()
        self._is_closed, self._lock, self.was_cut = False, -1, False
        stride = plan.layout.stride
        most = min(_UNSAFE_BYTES // stride, max(_FEW_BYTES // stride, plan.capacity // 8))
        self.limit, self._num_unsafe = max(most, 1), 0
        self._lock_folder()
        try:
            self.is_new = not (self._path / _HEADER).is_file()
            if self.is_new:
                self._make(files)
            header = self._read_header()
            self.arrays = {name: self._map(name, *like) for name, like in files.items()}
            self._settle(header)
        except BaseException:
            self._unlock()
            raise

    # Making and opening.

    def _lock_folder(self) -> None:
        """Make the folder if needed, and lock it; raise if it holds files of others."""
        path = self._path
        path.mkdir(parents=True, exist_ok=True)
        found = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
        if _HEADER not in found and found - {_LOCK}:
            raise CheckpointError(
                f"folder {str(path)!r} holds other files, or rows without {_HEADER}; give an empty "
                "one, or one that is not there"
            )
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        weakref.finalize(self, os.close, self._lock)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[union-attr]
        except OSError:
            raise BufferMisuseError(
                f"folder {str(path)!r} is written to by another buffer, of this process or "
                "another; one at a time may: close that"
            ) from None

    def _unlock(self) -> None:
        if self._lock >= 0:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # type: ignore[union-attr]

    def _make(self, files: Files) -> None:
        path = self._path
        needed = sum(int(np.prod(shape)) * dtype.itemsize for dtype, shape in files.values())
        try:
            if needed > shutil.disk_usage(path).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for name, (dtype, shape) in files.items():
                np.lib.format.open_memmap(self._file(name), "w+", dtype, shape).flush()
                with self._file(name).open("r+b") as file:
                    # Reserve the blocks: the disk must not be full in the middle of training.
                    os.posix_fallocate(file.fileno(), 0, self._file(name).stat().st_size)
        except OSError as error:
            for name in files:
                self._file(name).unlink(missing_ok=True)
            raise BufferMemoryError(
                f"folder {str(path)!r} would take {format_bytes(needed)}, which the system "
                f"refused: {error.strerror}; use a smaller capacity, or make room"
            ) from error
        self._write_header(np.zeros(self._plan.num_rings, np.int64))

    def _file(self, name: str) -> Path:
        return self._path / f"{name}.npy"

    def _write_header(self, safe: np.ndarray) -> None:
        """Write the header; `safe` int64 (R,) are the counts of transitions on the disk."""
        more = {"safe": safe.tolist(), "limit": self.limit, "boot": _boot_id()}
        with whole_file(self._path / _HEADER) as aside, aside.open("w") as file:
            json.dump({**self._described, **more}, file)
            file.flush()
            os.fsync(file.fileno())

    def _read_header(self) -> dict[str, Any]:
        path, num_rings = self._path / _HEADER, self._plan.num_rings
        try:
            header = json.loads(path.read_text())
            numbers, _ = [header["limit"] - 1, *header["safe"]], header["boot"]
            check_settings(header, self._described)
            are_counts = all(type(n) is int and 0 <= n < 2**62 for n in numbers)
            if not are_counts or len(numbers) != num_rings + 1:
                raise ValueError("its counts cannot be")
        except BufferMisuseError:  # of another buffer
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._damaged(path, str(error)) from None
        return header

    def _damaged(self, path: Path, reason: str) -> CheckpointError:
        return CheckpointError(
            f"file {str(path)!r} is damaged: {reason:.200}; the buffer in this folder cannot be "
            "opened"
        )

    def _map(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        path = self._file(name)
        try:
            found = np.lib.format.open_memmap(path, "r")  # "r+" extends a cut file
            size = path.stat().st_size
            if (found.dtype, found.shape, found.offset + found.nbytes) != (dtype, shape, size):
                raise ValueError(
                    f"it has {found.dtype} {found.shape} and {size} bytes, expected {dtype} {shape}"
                )
            return np.lib.format.open_memmap(path, "r+").view(np.ndarray)
        except (FileNotFoundError, ValueError) as error:
            raise self._damaged(path, str(error)) from None

    def _settle(self, header: Mapping[str, Any]) -> None:
        """Set the counts to what is surely there; a reboot since counts as a power loss."""
        rings, envs, plan = self.arrays["rings"], self.arrays["envs"], self._plan
        if header["boot"] != _boot_id():
            safe = np.array(header["safe"], np.int64)
            if (rings["begun"] != safe).any() or (rings["committed"] != safe).any():
                ends = safe + min(header["limit"], plan.span)
                lost = np.clip(ends - plan.capacity, 0, safe) - (safe - plan.capacity).clip(0)
                warnings.warn(
                    f"the machine of folder {str(self._path)!r} was stopped: what was added after "
                    f"the last flush is lost, and {int(lost.sum())} of the oldest transitions, "
                    "which may have been overwritten since",
                    stacklevel=6,
                )
                rings["begun"], rings["committed"] = ends, safe
                self.was_cut = True
            envs["last"] = 0
        begun, committed, last = rings["begun"], rings["committed"], envs["last"]
        envs["is_open"] = False
        of_envs = committed[np.arange(len(last)) * plan.num_rings // max(len(last), 1)]
        is_wrong = (committed < 0).any() or (begun < committed).any() or begun.max() >= 2**62
        if is_wrong or ((last < 0) | (last > of_envs)).any():
            raise self._damaged(self._file("rings"), "its counts, or those of envs, cannot be")
        self.flush()

    # Use.

    def require_open(self) -> None:
        """Raise BufferMisuseError if the folder was closed."""
        if self._is_closed:
            raise BufferMisuseError(f"folder {str(self._path)!r} was closed; open it again")

    def require_writable(self) -> None:
        """Raise BufferMisuseError if this buffer may not write to the folder."""
        self.require_open()
        if self._pid != os.getpid():
            raise BufferMisuseError(
                f"folder {str(self._path)!r} was opened by the process that this one was forked "
                "from, and can't be changed here; give the buffer's batches to this process instead"
            )

    def make_room(self, count: int) -> None:
        """Flush if needed, so that `count` transitions, at most `limit`, may be added."""
        if self._num_unsafe + count > self.limit:
            self.flush()
        self._num_unsafe += count

    def flush(self) -> None:
        """Wait until all data is on the disk.

        Raises:
            OSError: Writing failed; make room on the disk, or call again.
        """
        self.require_writable()
        for array in self.arrays.values():
            array.base.flush()  # type: ignore[union-attr]
        self._write_header(self.arrays["rings"]["committed"])
        self._num_unsafe = 0

    def close(self) -> None:
        """Flush and unlock the folder, so that another buffer may write to it."""
        if not self._is_closed:
            if self._pid == os.getpid():
                self.flush()
                self._unlock()
            self._is_closed = True


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not on Linux
        return ""
