"""The rows of a replay buffer as a file in a folder, and what is left of them after a crash.

    header      version, fields and settings; written last when a folder is made (see checkpoint)
    rows        the packed rows, one behind the other, as in memory
    journal     mapped memory: the counts of the buffer, its generator, and the rows of one add
    priorities  mapped memory: the tree of a prioritized buffer
    durable     counts that a power loss leaves; replaced as a whole
    lock        locked by the process that writes

**A process that dies.** Files keep what was written when a process ends, in the order in which it
was. An add goes into the journal first: its rows, where they go, and the counts after it. Then one
word counts it as done (SEQUENCE), the rows are written to their places, and another word says so
(APPLIED). Whoever opens the folder between the two writes the rows again. So a row in its place is
never torn, and what is lost is an add that was not in the journal yet.

**A power loss** leaves files in any mixture of old and new. So rows are synchronised on a thread
before too many are waiting, and `durable` then says up to which number of each ring they are safe,
and up to which (the horizon) others may be written before it is replaced. A number beyond the
horizon is never written, thus after a power loss only the places of numbers between the two are in
doubt. They hold the oldest rows, and are filled with copies of those that follow them in age.

**Readers** in other processes map the same files. They take the counts from the journal (twice
there, so that one is whole while the other is written), draw and copy, and look afterwards whether
one of the rows drawn may have been overwritten meanwhile; then they draw again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import overload

from buffers.core.checkpoint import open_checkpoint, save_checkpoint
from buffers.core.compiling import njit
from buffers.core.errors import BufferMemoryError, BufferMisuseError, CheckpointError
from buffers.core.memory import format_bytes
from buffers.replay import layout as at

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

__all__ = ["Place", "RowFolder", "plan_place"]

SEQUENCE, APPLIED, NUM_LOGGED, BOOT_A, BOOT_B, PID, INSERTED, NUM_WORDS = 0, 1, 2, 3, 4, 5, 6, 8

_KIND = "ReplayFolder"
_OWN_FILES = frozenset(("header", "rows", "journal", "priorities", "durable", "lock"))
_LOG_BYTES = 1 << 22  # rows of an add that are written at once
_DIRTY_BYTES = 1 << 26  # rows written before they are synchronised; at most twice as many wait
_SMALL_BYTES = 1 << 20
_SYNC_TIMEOUT = 600.0  # seconds; a disk that takes longer for what may wait is no disk
_READ_TIMEOUT = 60.0  # seconds in which a reader has to find counts that are whole
_WILL_NEED = 3  # MADV_WILLNEED
_PAGE = mmap.PAGESIZE
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_LEFT_TIMEOUT = 1.0  # seconds in which a thread lets go of a buffer that nobody has
_written: weakref.WeakValueDictionary[tuple[int, int], RowFolder] = weakref.WeakValueDictionary()
_locking = threading.RLock()  # files are locked by processes, which keeps no threads apart
if hasattr(os, "register_at_fork"):  # no child begins with it held by a thread it does not have
    os.register_at_fork(
        before=_locking.acquire, after_in_parent=_locking.release, after_in_child=_locking.release
    )
# Linux: of the open file, so that it lasts until that is closed. A lock of the process is gone as
# soon as any of its threads closes the file, as one does that copies the folder.
_IS_LINUX = sys.platform == "linux" and sys.maxsize > 1 << 32
_OFD_SETLK = getattr(fcntl, "F_OFD_SETLK", None) if _IS_LINUX else None
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid
# Python has it from 3.13 on. A private mapping is else refused if it is larger than memory.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class Place(NamedTuple):
    """Where the rows are, if not in memory."""

    folder: Path
    read_only: bool


def plan_place(
    storage: Any, folder: Any, read_only: Any, device: torch.device, *, staged: bool
) -> Place | None:
    """Check the arguments of a constructor; None for memory.

    Raises:
        BufferMisuseError: They do not go together, or not with the device.
    """
    if storage not in ("memory", "memmap"):
        raise BufferMisuseError(f"storage is {storage!r:.99}, expected 'memory' or 'memmap'")
    if storage == "memory":
        if folder is not None or read_only:
            raise BufferMisuseError("folder and read_only need storage='memmap'")
        return None
    if fcntl is None or not hasattr(os, "pwrite") or not hasattr(os, "posix_fallocate"):
        raise BufferMisuseError("storage='memmap' needs a system with mapped files as Linux has")
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise BufferMisuseError(f"storage='memmap' needs folder, a path; it is {folder!r:.99}")
    if device.type != "cpu" or staged:
        raise BufferMisuseError(
            f"storage='memmap' makes batches on the CPU, but device is {device}"
            f"{' and staged' if staged else ''}; use device='cpu' and move the tensors of batches "
            "with .to()"
        )
    # The thread that synchronises finds it also after the program has changed its directory.
    return Place(Path(os.path.abspath(path)), bool(read_only))


class RowFolder:
    """The files of one buffer, made or opened.

    Args:
        place: The folder.
        described: What the buffer says of itself, see `state.describe`.
        state: int64, that of an empty buffer; changed into that of the folder.
        stride: Bytes of a row.
        num_sums: float64 of a tree of priorities; 0 for none.
        check: Raises BufferMisuseError unless a description is that of the same buffer.
        amend: Makes counts anew from those that do not follow from others; raises
            BufferMisuseError if they contradict one another.

    Attributes:
        table: uint8 (rows, stride), the file; of readers a private view that sees what is written.
        generator: uint64 (2,), the words of the generator.
        exponents: float64 (3,), largest priority, alpha and beta.
        sums: float64 (num_sums,), or None.
        inserted: int64 (1,), rows the tree knows of.
        is_new: Whether the folder was made just now.
        is_restarted: Whether the machine was started again since others wrote.
        read_only: Whether this is a reader.
        log_rows: The most rows of one add.

    Raises:
        BufferMisuseError: Another process writes to the folder, or it holds something else, or a
            buffer made otherwise, or a reader finds nothing. Nothing was changed.
        BufferMemoryError: There is no room on the disk. Nothing was changed.
        OSError: It cannot be written or read.
    """

    def __init__(
        self,
        place: Place,
        described: Mapping[str, Any],
        state: np.ndarray,
        stride: int,
        num_sums: int,
        *,
        check: Callable[[Mapping[str, Any]], None],
        amend: Callable[[np.ndarray], np.ndarray],
    ):
        self._path, self.read_only = place
        self._stride, self._num_sums, self._amend = stride, num_sums, amend
        self._capacity, self._num_rings = int(state[at.CAPACITY]), int(state[at.NUM_RINGS])
        self._num_rows = self._capacity * self._num_rings
        self.log_rows = max(1, min(_LOG_BYTES // stride, self._num_rows))
        self._link_word = int(state[at.LINK_AT]) // 4
        self._plan_journal(len(state))
        self._empty, self._num_written = state.copy(), 0
        self._boot = _boot_words()
        self._files: list[int] = []
        self._lock_number = -1
        self._release = weakref.finalize(self, _close_all, self._files)
        self._is_closed, self._pid = False, os.getpid()
        self.is_restarted = False
        self._syncing: Future[None] | None = None
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._ahead: Future[None] | None = None
        try:
            self._open(described, state, check)
        except BaseException:
            self._let_others()  # now: who keeps the error keeps this object, too
            raise

    def _let_others(self) -> None:
        """Close the files, and let others write."""
        with _locking:
            for key, folder in list(_written.items()):
                if folder is self:
                    del _written[key]
            self._release()

    def _plan_journal(self, num_state_words: int) -> None:
        parts = {
            "words": (NUM_WORDS, np.int64),
            "states": (2 * num_state_words, np.int64),
            "generator": (2, np.uint64),
            "exponents": (3, np.float64),
            "where": (self.log_rows, np.int64),
            "befores": (self.log_rows, np.int64),
            "codes": (self.log_rows, np.int32),
            "packed": (self.log_rows * self._stride, np.uint8),
        }
        end, self._parts = 0, {}
        for name, (count, dtype) in parts.items():
            self._parts[name] = end, count, dtype
            end += count * np.dtype(dtype).itemsize
            end += -end % 64
        self._journal_bytes = end

    # ---- Opening

    def _open(self, described: Mapping[str, Any], state: np.ndarray, check: Any) -> None:
        path = self._path
        header = path / "header"
        if not self.read_only:
            self._make_folder()
            self._lock()
        self.is_new = not header.exists()
        if self.is_new:
            if self.read_only:
                raise BufferMisuseError(f"folder {str(path)!r} holds no buffer that could be read")
            self._refuse_lost_header()
            self._make_files()
        else:
            with open_checkpoint(header, _KIND) as reader:
                check(reader.meta)
        self._map()
        if self.is_new:
            self.states[:] = state
            self._words[[BOOT_A, BOOT_B]] = self._boot
            save_checkpoint(header, _KIND, described, {})
        if self.read_only:
            self.refresh(state)
            return
        state[:] = self._recovered()
        state[state[at.STOPPED] :][: state[at.NUM_ENVS]] = 1  # nobody goes on with its episodes
        self._words[PID] = self._pid
        self._horizon = np.zeros(self._num_rings, np.int64)
        self._horizon[:] = self._capacity  # before, nothing is overwritten
        rows = max(self._capacity // 8, _SMALL_BYTES // self._stride // self._num_rings, 1)
        self._step = min(rows, self._capacity)  # of the horizon
        self._num_dirty = 0
        if not self.is_new:  # what others may have left to be written
            self._horizon[:] = 0

    def _make_folder(self) -> None:
        path = self._path
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(
                errno.EACCES, "may not be written to; open it with read_only=True", str(path)
            )
        names = set(os.listdir(path))
        others = sorted(name for name in names - _OWN_FILES if not name.endswith(".part"))
        if "header" not in names and others:
            raise BufferMisuseError(
                f"folder {str(path)!r} holds other files ({', '.join(others[:3])}); give an empty "
                "one, or one that is not there"
            )

    def _lock(self) -> None:
        # A buffer that was left without `close` may be held by its thread for a moment.
        deadline = time.monotonic() + _LEFT_TIMEOUT
        while self._is_written_here() and time.monotonic() < deadline:
            time.sleep(0.01)
        with _locking:
            # Before it is opened, as closing it would unlock the file for the other.
            if self._is_written_here():
                raise self._in_use("this process")
            number = self._open_file("lock", os.O_RDWR | os.O_CREAT)
            try:
                _lock_file(number)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise self._in_use("another process") from None
            self._lock_number = number
            _close_locks_in_children()
            _written[_key(os.fstat(number))] = self

    def leave_lock(self) -> None:
        """In a forked child: close the file that is locked, which would hold the lock on."""
        if self._lock_number in self._files:
            self._files.remove(self._lock_number)
            os.close(self._lock_number)

    def _is_written_here(self) -> bool:
        try:
            return _key(os.stat(self._path / "lock")) in _written
        except FileNotFoundError:
            return False

    def _in_use(self, by: str) -> BufferMisuseError:
        return BufferMisuseError(
            f"folder {str(self._path)!r} is written to by {by}; one buffer at a time may: close "
            "that, or open this one with read_only=True"
        )

    def _refuse_lost_header(self) -> None:
        """Raise CheckpointError if there are rows, so that it is no folder that was never made."""
        begin, count, _ = self._parts["words"]
        try:
            with open(self._path / "journal", "rb") as file:
                file.seek(begin)
                words = np.frombuffer(file.read(8 * count), np.int64)
        except FileNotFoundError:
            return
        if len(words) == count and words[SEQUENCE]:
            raise CheckpointError(
                f"file {str(self._path / 'header')!r} is missing, beside the rows of a buffer; "
                "bring it back from a copy, or give another folder"
            )

    def _make_files(self) -> None:
        sizes = self._sizes()
        for name in sizes:  # left by a process that died while it made them
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path / name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path / "durable")
        disk = os.statvfs(self._path)
        needed, free = sum(sizes.values()), disk.f_bavail * disk.f_frsize
        if needed > free:
            fits = max(0, free - self._journal_bytes) * self._num_rows // max(1, needed)
            raise BufferMemoryError(
                f"folder {str(self._path)!r} would take {format_bytes(needed)}, but the disk has "
                f"only {format_bytes(free)} left; a capacity of about "
                f"{fits // self._num_rings} would fit"
            )
        try:
            for name, size in sizes.items():
                number = os.open(self._path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                try:
                    # All blocks now: no disk is full in the middle of a training.
                    os.posix_fallocate(number, 0, size)
                finally:
                    os.close(number)
        except OSError as error:
            for name in sizes:
                with contextlib.suppress(OSError):
                    os.unlink(self._path / name)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise BufferMemoryError(
                    f"folder {str(self._path)!r} would take {format_bytes(needed)}, which the "
                    f"system refused: {error.strerror}; use a smaller capacity, or raise the quota"
                ) from error
            raise

    def _sizes(self) -> dict[str, int]:
        sizes = {"rows": self._num_rows * self._stride, "journal": self._journal_bytes}
        return {**sizes, "priorities": 8 * self._num_sums} if self._num_sums else sizes

    def _open_file(self, name: str, flags: int) -> int:
        flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        number = os.open(self._path / name, flags, 0o666)
        self._files.append(number)
        return number

    def _map(self) -> None:
        flags = os.O_RDONLY if self.read_only else os.O_RDWR
        areas: dict[str, np.ndarray] = {}
        self._maps: dict[str, mmap.mmap] = {}
        for name, size in self._sizes().items():
            if name == "priorities" and self.read_only:
                continue
            number = self._open_file(name, flags)
            if (found := os.fstat(number).st_size) != size:
                raise CheckpointError(
                    f"file {str(self._path / name)!r} is damaged: it has {found} bytes, expected "
                    f"{size}; the buffer in this folder cannot be opened"
                )
            area = self._maps[name] = self._map_file(name, number, size)
            areas[name] = np.frombuffer(area, np.uint8)
            if name == "rows":
                self._rows_file = number
        with contextlib.suppress(OSError, AttributeError):
            self._maps["rows"].madvise(mmap.MADV_RANDOM)  # what is beside a row is of no use
        self.table = areas["rows"].reshape(self._num_rows, self._stride)
        self.sums = areas["priorities"].view(np.float64) if "priorities" in areas else None
        found = {
            name: areas["journal"][begin:][: count * np.dtype(dtype).itemsize].view(dtype)
            for name, (begin, count, dtype) in self._parts.items()
        }
        self._words, self.generator = found["words"], found["generator"]
        self.exponents = found["exponents"]
        self.inserted = self._words[INSERTED : INSERTED + 1]
        self.states = found["states"].reshape(2, -1)
        self._where, self._befores, self._codes = (found[n] for n in ("where", "befores", "codes"))
        self._packed = found["packed"].reshape(self.log_rows, self._stride)

    def _map_file(self, name: str, number: int, size: int) -> mmap.mmap:
        if not self.read_only:
            return mmap.mmap(number, size, access=mmap.ACCESS_WRITE)
        if name == "journal":
            return mmap.mmap(number, size, access=mmap.ACCESS_READ)
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        return mmap.mmap(number, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    # ---- What a crash has left

    def _recovered(self) -> np.ndarray:
        """The counts, after bringing the rows into accordance with them."""
        words = self._words
        if (words[[BOOT_A, BOOT_B]] != self._boot).any():
            return self._after_power_loss()
        sequence, applied = int(words[SEQUENCE]), int(words[APPLIED])
        if not 0 <= applied <= sequence <= applied + 1:
            raise self._damaged("its journal counts adds that cannot be")
        state = self._amended(self.states[sequence % 2])
        if applied != sequence:
            self._check_log()
            self.apply()
        return state

    def _amended(self, state: np.ndarray) -> np.ndarray:
        try:
            return self._amend(state)
        except CheckpointError:
            raise
        except BufferMisuseError as error:
            raise self._damaged(str(error)) from None

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"folder {str(self._path)!r} is damaged: {reason}")

    def _check_log(self) -> None:
        count = int(self._words[NUM_LOGGED])
        fits = 0 <= count <= self.log_rows
        if fits and count:
            lists = self._where[:count], self._befores[:count], self._codes[:count]
            fits = all(int(found.max()) <= self._num_rows for found in lists)
            fits = fits and max(int(found.max()) for found in lists[:2]) < self._num_rows
            fits = fits and int(lists[0].min()) >= 0 and int(lists[2].min()) >= 0
        if not fits:
            raise self._damaged("its journal has rows that cannot be")

    def _after_power_loss(self) -> np.ndarray:
        """What `durable` says is safe; places that are in doubt get copies of other rows."""
        self.is_restarted = True
        state, horizon, words = self._read_durable()
        if horizon is not None:
            totals = state[state[at.TOTALS] :][: self._num_rings]
            for ring in range(self._num_rings):
                if not self._replace_doubtful(ring, int(totals[ring]), int(horizon[ring])):
                    totals[ring] = state[state[at.POINTERS] + ring] = 0
            state[at.ADDED], state[at.COUNT] = (
                totals.sum(),
                np.minimum(totals, self._capacity).sum(),
            )
            state = self._amended(state)
        os.fsync(self._rows_file)
        self.generator[:] = words
        self.states[:] = state
        self._words[APPLIED] = self._words[SEQUENCE] = 0
        self._words[[BOOT_A, BOOT_B]] = self._boot
        return state

    def _read_durable(self) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """Counts, horizon and generator that `flush` has written; those of an empty buffer."""
        path, state = self._path / "durable", self._amended(self._empty)
        if not path.exists():
            return state, None, np.zeros(2, np.uint64)
        with open_checkpoint(path, _KIND) as reader:
            reader.require({
                "state": (np.dtype(np.int64), state.shape),
                "horizon": (np.dtype(np.int64), (self._num_rings,)),
                "generator": (np.dtype(np.uint64), (2,)),
                "exponents": (np.dtype(np.float64), (3,)),
            })  # fmt: skip
            if not self.read_only:
                self.exponents[:] = reader.array("exponents")
            state = self._amended(reader.array("state"))
            return state, reader.array("horizon"), reader.array("generator")

    def _replace_doubtful(self, ring: int, total: int, horizon: int) -> bool:
        """Fill the places of live rows that may be torn; False if no row of the ring is safe."""
        capacity, first = self._capacity, max(total, self._capacity)
        doubtful = min(max(0, horizon - first), capacity)
        count = min(total, capacity)
        oldest = first - capacity  # number of the first row in doubt
        doubtful = min(doubtful, total - oldest) if total > oldest else 0
        safe = count - doubtful
        if safe <= 0:
            return total == 0
        begin = ring * capacity
        for number in range(oldest, oldest + doubtful):
            source = oldest + doubtful + (number - oldest) % safe
            place = begin + number % capacity
            self.table[place] = self.table[begin + source % capacity]
            if self._link_word >= 0:  # it leads to no other row
                self.table[place].view(np.int32)[self._link_word] = 0
        return True

    # ---- Writing

    def check_usable(self) -> None:
        """Raise unless rows may be read and written; write what an add has left in the journal."""
        if self._is_closed:
            raise BufferMisuseError(f"folder {str(self._path)!r} was closed; open it again")
        if self.read_only:
            return
        if self._pid != os.getpid():
            raise BufferMisuseError(
                "this process was forked from the one that writes to the folder "
                f"{str(self._path)!r}; open it here with read_only=True"
            )
        if self._words[APPLIED] != self._words[SEQUENCE]:
            self.apply()

    def check_writable(self) -> None:
        """Raise BufferMisuseError if this is a reader, or as `check_usable`."""
        self.check_usable()
        if self.read_only:
            raise BufferMisuseError(
                f"folder {str(self._path)!r} was opened with read_only=True and can't be changed"
            )

    def log(self, rows: np.ndarray, befores: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Note where rows will go; see `place_rows`.

        Args:
            rows: int64 (K,), at most `log_rows`; all of them are places.
            befores: int64 (K,).
            codes: int32 (K,).

        Returns:
            uint8 (K, stride), to be filled with the rows before `commit`; bytes that are in no
            field, and links, are 0 and have to stay so.
        """
        count = len(rows)
        self._where[:count], self._befores[:count], self._codes[:count] = rows, befores, codes
        return self._packed[:count]

    def commit(self, before: np.ndarray, state: np.ndarray, count: int) -> None:
        """Write what was logged; from here on it is part of the buffer.

        Args:
            before: int64, the counts before the rows were placed.
            state: int64, the counts with them.
            count: Rows in the log.

        Raises:
            OSError: The disk refuses to take them. If the oldest rows were not touched yet, the add
                is taken back; else the rows wait in the journal, and every call tries again.
        """
        words = self._words
        self._reserve(before, state, count)
        following = int(words[SEQUENCE]) + 1
        self.states[following % 2] = state
        words[NUM_LOGGED] = count
        words[SEQUENCE] = following
        is_fresh = (self._totals(state) <= self._capacity).all()  # nothing is overwritten
        try:
            self.apply()
        except OSError as error:
            if is_fresh or not self._num_written:
                words[SEQUENCE] = following - 1
                raise
            raise OSError(
                error.errno,
                "has refused a part of an add, whose rows wait in the journal: every call tries to "
                f"write them again, and so does opening the folder ({error.strerror})",
                str(self._path),
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes of memory held; what the system keeps of the files besides is its own choice."""
        return self._journal_bytes

    @property
    def sequence(self) -> int:
        """Adds written so far."""
        return int(self._words[SEQUENCE])

    def _totals(self, state: np.ndarray) -> np.ndarray:
        return state[state[at.TOTALS] :][: self._num_rings]

    def apply(self) -> None:
        """Write the rows in the journal to their places, again if need be."""
        count = int(self._words[NUM_LOGGED])
        where = self._where[:count]
        self._num_written = 0
        begin = 0
        for end in self._ends_of_runs(where):
            self._write(self._packed[begin:end], int(where[begin]) * self._stride)
            begin = end
        if self._link_word >= 0 and count:
            set_links(
                self.table, where, self._befores[:count], self._codes[:count], self._link_word
            )
        self._words[APPLIED] = self._words[SEQUENCE]

    def _ends_of_runs(self, where: np.ndarray) -> list[int]:
        """Where in a list of rows int64 (K,) those end that lie one behind the other."""
        count = len(where)
        if count and int(where[-1]) - int(where[0]) == count - 1 and self._num_rings == 1:
            return [count]
        return [*(np.flatnonzero(np.diff(where) != 1) + 1).tolist(), count] if count else []

    def _write(self, rows: np.ndarray, position: int) -> None:
        rest = memoryview(rows).cast("B")  # pyright: ignore[reportArgumentType]
        while rest:
            count = os.pwrite(self._rows_file, rest, position)
            self._num_written += count
            rest, position = rest[count:], position + count

    # ---- Power loss, and pages that wait to be written

    def _reserve(self, before: np.ndarray, state: np.ndarray, count: int) -> None:
        """See to it that rows may be written up to the counts of `state`."""
        ends = self._totals(state)
        self._num_dirty += count * self._stride
        if self._num_dirty >= _DIRTY_BYTES or (ends > self._horizon - self._step // 2).any():
            self._begin_sync(before)
        if (ends > self._horizon).any():
            self._wait_for_sync()
        if (ends > self._horizon).any():
            self._sync(before.copy(), np.maximum(ends, self._totals(before) + self._step))

    def _begin_sync(self, state: np.ndarray) -> None:
        is_busy = self._syncing is not None and not self._syncing.done()
        if is_busy and self._num_dirty < _DIRTY_BYTES:
            return
        self._wait_for_sync()
        self._num_dirty = 0
        horizon = np.maximum(self._totals(state) + 2 * self._step, self._capacity)
        self._syncing = self._thread("sync").submit(self._sync, state.copy(), horizon)

    def _wait_for_sync(self) -> None:
        waiting = self._syncing
        if waiting is None:
            return
        try:
            waiting.result(_SYNC_TIMEOUT)
        except TimeoutError:
            if waiting.done():
                raise
            raise OSError(
                errno.ETIMEDOUT,
                f"has not taken {format_bytes(2 * _DIRTY_BYTES)} within {_SYNC_TIMEOUT:.0f} s; "
                "look at the disk, and try again",
                str(self._path),
            ) from None
        finally:
            if waiting.done():
                self._syncing = None

    def _sync(self, state: np.ndarray, horizon: np.ndarray) -> None:
        """Make the rows up to the counts of `state` durable, and then that they are."""
        os.fdatasync(self._rows_file)
        arrays: Any = {"state": [state], "horizon": [horizon]}
        arrays |= {"generator": [self.generator.copy()], "exponents": [self.exponents.copy()]}
        save_checkpoint(self._path / "durable", _KIND, {}, arrays)
        self._horizon = horizon.copy()

    def _thread(self, name: str) -> ThreadPoolExecutor:
        if name not in self._threads:
            self._threads[name] = ThreadPoolExecutor(1, f"replay-{name}")
        return self._threads[name]

    def flush(self, state: np.ndarray) -> None:
        """Wait until all is on the disk; a power loss then leaves it as it is."""
        self.check_usable()
        if self.read_only:
            return
        self._wait_for_sync()
        for name in self._maps.keys() - {"rows"}:
            self._maps[name].flush()
        self._sync(state.copy(), np.maximum(self._totals(state), self._capacity))
        self._num_dirty = 0

    def close(self, state: np.ndarray) -> None:
        """Flush, and let others write."""
        if self._is_closed:
            return
        if not self.read_only and self._pid == os.getpid():
            self.flush(state)
        self._is_closed = True
        for thread in self._threads.values():
            thread.shutdown()
        self._let_others()

    # ---- Reading

    def refresh(self, state: np.ndarray) -> None:
        """Of readers: take over the counts that are whole now.

        Raises:
            BufferMisuseError: It does not work for a minute, as the journal is damaged.
        """
        if (self._words[[BOOT_A, BOOT_B]] != self._boot).any():  # nobody writes since it started
            if not state[at.ADDED]:
                state[:] = self._safe_state()
            return
        deadline = time.monotonic() + _READ_TIMEOUT
        while True:
            applied = int(self._words[APPLIED])
            found = self.states[applied % 2].copy()
            if int(self._words[APPLIED]) == applied:
                break
            self.check_deadline(deadline)
        if found[at.ADDED] != state[at.ADDED] or not state[at.ADDED]:
            state[:] = self._amended(found)

    def check_deadline(self, deadline: float) -> None:
        """Raise BufferMisuseError if `deadline`, a time of `time.monotonic`, has passed."""
        if time.monotonic() > deadline:
            raise BufferMisuseError(
                f"folder {str(self._path)!r} is written to faster than this reader can read a "
                "batch; draw fewer rows, or give the buffer more capacity"
            )

    def _safe_state(self) -> np.ndarray:
        """Of readers, after the machine was started again: what was flushed, if that was all."""
        state, horizon, _ = self._read_durable()
        totals = self._totals(state)
        if horizon is not None and (horizon > np.maximum(totals, self._capacity)).any():
            raise BufferMisuseError(
                f"the machine of folder {str(self._path)!r} was stopped while it was written to; "
                "open it once without read_only, which puts its rows in order"
            )
        return state

    def are_there(self, rows: np.ndarray, state: np.ndarray) -> bool:
        """Of readers: whether rows int64 (B,) still hold what they did at the counts of `state`."""
        sequence = int(self._words[SEQUENCE])
        now = self._totals(self.states[sequence % 2]).copy()
        if int(self._words[SEQUENCE]) != sequence:
            return False
        then = self._totals(state)
        if (now == then).all():
            return True
        rings, places = rows // self._capacity, rows % self._capacity
        totals = then[rings]
        # The number of the row that was in each place.
        numbers = totals - 1 - (totals - 1 - places) % self._capacity
        return bool((numbers >= now[rings] - self._capacity).all())

    def load(self, state: np.ndarray, rows: np.ndarray, num_steps: int) -> None:
        """Read rows int64 (B,), and what follows them, into memory: all at once, not in turn."""
        load_windows(self.table, state, np.sort(rows), num_steps)

    def load_ahead(self, state: np.ndarray, rows: np.ndarray, num_steps: int) -> None:
        """The same on a thread, unless that is still busy."""
        if self._ahead is None or self._ahead.done():
            with contextlib.suppress(RuntimeError):  # no threads any more: the program ends
                self._ahead = self._thread("ahead").submit(self.load, state, rows, num_steps)


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _lock_file(number: int) -> None:
    """Lock an open file for writing, or raise OSError at once if another one has it locked."""
    assert fcntl is not None
    if _OFD_SETLK is None:
        fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(number, _OFD_SETLK, lock)


@functools.cache  # once, and only in programs that write to a folder
def _close_locks_in_children() -> None:
    def leave_locks() -> None:
        for folder in list(_written.values()):
            folder.leave_lock()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=leave_locks)


def _close_all(files: list[int]) -> None:
    while files:
        with contextlib.suppress(OSError):
            os.close(files.pop())


def _boot_words() -> list[int]:
    """What differs after the machine was started again; the same for ever where that's unknown."""
    try:
        text = _BOOT_ID.read_text().strip().replace("-", "")
        return [int(text[:15], 16), int(text[15:30], 16)]
    except (OSError, ValueError):
        return [1, 1]


def advise(table, begin, stop):
    """Ask for bytes begin .. stop - 1 of mapped memory; a hint without effect on results."""


_madvise = types.ExternalFunction("madvise", types.int32(types.uintp, types.uintp, types.int32))


@overload(advise, inline="always")
def _compile_advise(table, begin, stop):
    def compiled(table, begin, stop):
        first = begin // _PAGE * _PAGE  # mapped memory begins with a page
        _madvise(table.ctypes.data + first, stop - first, _WILL_NEED)

    return compiled


@njit(nogil=True, cache=True)
def load_rows(table, rows, skip):
    """Read bytes skip .. stride - 1 of rows int64 (K,): all are asked for before one is awaited."""
    stride, total = table.shape[1], 0
    flat = table.reshape(-1)
    for i in range(rows.shape[0]):
        advise(table, rows[i] * stride + skip, (rows[i] + 1) * stride)
    for i in range(rows.shape[0]):
        begin, stop = rows[i] * stride + skip, (rows[i] + 1) * stride
        for place in range(begin, stop, _PAGE):
            total += np.int64(flat[place])
        total += np.int64(flat[stop - 1])
    return total


@njit(nogil=True, cache=True)
def load_windows(table, state, rows, num_steps):
    """Read rows int64 (B,), sorted, and those their windows of `num_steps` lead to."""
    load_rows(table, rows, 0)
    link_at, over_at = state[at.LINK_AT], state[at.OVER_AT]
    if num_steps < 2 or link_at < 0:
        return
    words, num_rows = table.view(np.int32), table.shape[0]
    current, count = rows.copy(), rows.shape[0]
    for _ in range(1, num_steps):
        kept = 0
        for i in range(count):
            row = current[i]
            link = np.int64(words[row, link_at // 4])
            is_over = table[row, over_at] | table[row, over_at + 1]
            if not is_over and 0 < link <= num_rows:
                current[kept] = link - 1
                kept += 1
        count = kept
        if count == 0:
            break
        load_rows(table, current[:count], 0)


@njit(cache=True)
def set_links(table, rows, befores, codes, word):
    """As `storage.write_links`, of the journal's arrays."""
    words = table.view(np.int32)
    for i in range(rows.shape[0]):
        words[rows[i], word] = 0
        if befores[i] >= 0:
            words[befores[i], word] = codes[i]
