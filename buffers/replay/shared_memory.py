"""Rows in memory that several processes have mapped: who may write where, and which rows are whole.

    words   int64: what the memory is (MAGIC ...), limits, then 16 words for each writer
    rows    the packed rows; each writer has a ring of its own, so that writers never meet

A row is known by its number in the ring of its writer, counted from the first ever added. Each
writer has two words that only grow:

    BEGUN       rows below this number may have been written to
    COMMITTED   rows below this number are whole

Before a writer touches rows it raises BEGUN, and when they are whole COMMITTED. So with rings of C
rows the numbers from BEGUN - C to COMMITTED are whole, whatever a writer is doing, and wherever it
was killed: who takes its place goes on behind COMMITTED and leaves BEGUN as it is until it gets
there. A learner draws among these numbers, copies, and looks at BEGUN again: if a row that it drew
was begun to be overwritten meanwhile, it draws anew. Nobody ever waits for a lock to draw or add.

Links between rows (for windows of several steps) are the only bytes that are written after a row
was committed: a link is set when the row it leads to is committed, so it leads to whole rows only.

The memory has no name (memfd), so it is gone with the last process that has it, however these
end. Others find it as /proc/PID/fd/N of the process that made it. A process that writes has its
number and the time of its start in its words, by which others see whether it is still there.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import mmap
import os
import secrets
import time
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic, overload

from buffers.core.compiling import njit
from buffers.core.errors import BufferClosedError, BufferMemoryError, BufferMisuseError
from buffers.core.kernels import bounded, random_word
from buffers.replay.layout import ReplayOptions

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

__all__ = [
    "MAX_WRITERS",
    "Address",
    "SharedMemory",
    "begin_rows",
    "commit_rows",
    "count_rows",
    "draw_whole",
    "find_overwritten",
    "shared_bytes",
]

MAGIC, VERSION, TOKEN, DIGEST, CAPACITY, NUM_WRITERS = 0, 1, 2, 3, 4, 5
OWNER_PID, OWNER_START, IS_CLOSED, IS_LIMITED, MIN_SIZE = 6, 7, 8, 9, 10
LIMITS = 11  # float64: samples per insert, least and most of the difference
SAMPLED = 16  # written by the learner, in a cache line of its own
SLOTS, SLOT = 32, 16  # where the words of writers begin, and how many each has
BEGUN, COMMITTED, PID, START = 0, 1, 2, 3  # of these

WAIT, DONE, CLOSED, LOST = 0, 1, 2, 3  # what kernels answer, and draws

_MAGIC, _VERSION = 0x5245504C41595348, 1
_PAGE = mmap.PAGESIZE
_HUGE_PAGE = 1 << 21
_MIN_HUGE_BYTES = 2 * _HUGE_PAGE
# Of Linux, which Python's `mmap` does not know, or not of all versions.
_MAP_FIXED, _MAP_NORESERVE, _COLLAPSE, _POPULATE = 0x10, 0x4000, 25, 23
_LOCK_TIMEOUT = 10.0  # seconds for what takes microseconds
MAX_WRITERS = 4096


class Address(NamedTuple):
    """Where other processes find the memory, and how they know that it is the one."""

    pid: int
    start: int  # of the process, see `process_start`
    file: int
    token: int


class SharedMemory:
    """The memory, made or mapped.

    Args:
        options: Of the rings: one for each writer.
        address: Of the memory that another has made; None makes it.

    Attributes:
        address: See above.
        words: int64.
        limits: float64 (3,), view of the words.
        rows: uint8 (writers * capacity, stride) tensor.

    Raises:
        BufferMisuseError: The system has no such memory, or it is another's.
        BufferMemoryError: It does not fit.
        BufferClosedError: The process that made it has ended or closed it.
    """

    def __init__(self, options: ReplayOptions, address: Address | None = None):
        if fcntl is None or not hasattr(os, "memfd_create") or not process_start(os.getpid()):
            raise BufferMisuseError("memory is shared between processes on Linux only")
        self._capacity, self._num_writers = options.capacity, options.num_rings
        self._stride = options.layout.stride
        self._digest = _digest(options)
        begin, size = _places(options)
        file = self._make(size) if address is None else self._open(address, size)
        self._file, self._pid = file, os.getpid()
        try:
            pages = _map(file, size)
        except BaseException:
            os.close(file)
            raise
        if address is None:
            pages.fill(0)  # takes the memory now rather than in the middle of training
            _advise(pages, _COLLAPSE)
        self.words = pages[:begin].view(np.int64)
        self.limits = self.words[LIMITS : LIMITS + 3].view(np.float64)
        self.rows = torch.from_numpy(pages[begin:].reshape(-1, self._stride))
        self._release = weakref.finalize(
            self, _let_go, file, self.words, address is None, self._pid
        )
        if address is None:
            token = secrets.randbits(63)
            self.address = Address(self._pid, process_start(self._pid), file, token)
            header = [0, _VERSION, token, self._digest, self._capacity, self._num_writers]
            self.words[:IS_LIMITED] = [*header, self._pid, self.address.start, 0]
            self.words[MAGIC] = _MAGIC
        else:
            self.address = address
            self._check()

    def _make(self, size: int) -> int:
        file = os.memfd_create("replay", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size)
        except OSError as error:
            os.close(file)
            if error.errno not in (errno.EFBIG, errno.ENOMEM, errno.ENOSPC):
                raise
            raise BufferMemoryError(
                f"the system refused {size} bytes of shared memory: {error.strerror}; use a "
                "smaller capacity, or raise the limits of the process (ulimit -f)"
            ) from error
        return file

    def _open(self, address: Address, size: int) -> int:
        """The file, opened anew, so that a lock of it is nobody else's."""
        if process_start(address.pid) != address.start:
            raise self._ended(address)
        try:
            file = os.open(f"/proc/{address.pid}/fd/{address.file}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._ended(address) from None
        except PermissionError as error:
            raise BufferMisuseError(
                f"the memory of process {address.pid} may not be opened ({error.strerror}); "
                "writers have to run as the same user as the learner"
            ) from None
        except OSError as error:  # the number has become that of something else
            raise self._ended(address) from error
        magic, version, token = np.frombuffer(os.pread(file, 24, 0).ljust(24, b"\0"), np.int64)
        if (magic, token) != (_MAGIC, address.token):
            error = self._ended(address)
        elif version != _VERSION:
            error = _other(f"version {version}", f"version {_VERSION}")
        elif (found := os.fstat(file).st_size) != size:
            error = _other(f"{found} bytes", f"{size} bytes")
        else:
            return file
        os.close(file)
        raise error

    def _ended(self, address: Address) -> BufferClosedError:
        return BufferClosedError(
            f"the buffer of process {address.pid} is gone: that process has ended, closed the "
            "buffer, or runs on another machine or in another container; writers write where the "
            "learner is"
        )

    def _check(self) -> None:
        own = [self._digest, self._capacity, self._num_writers]
        if self.words[DIGEST : NUM_WRITERS + 1].tolist() != own:
            raise _other("another layout of rows", "that of this process")
        self.check_open()

    def close(self) -> None:
        """Close the file; of the process that made it: let writers know, and no other open it.

        The memory stays for as long as there are views of it.
        """
        self._release()

    # ---- Writers

    def slot(self, index: int) -> np.ndarray:
        """The words of a writer."""
        begin = SLOTS + SLOT * index
        return self.words[begin : begin + SLOT]

    def ring(self, index: int) -> torch.Tensor:
        """The rows of a writer, uint8 (capacity, stride), for it to write."""
        rows = self.rows[index * self._capacity :][: self._capacity]
        _advise(rows.numpy(), _POPULATE)  # now, rather than page by page
        return rows

    def writer_pid(self, index: int) -> int:
        """The process that is this writer; 0 if there is none, or none any more."""
        pid, start = self.slot(index)[[PID, START]].tolist()
        return pid if pid and process_start(pid) == start else 0

    def take_slot(self, index: int | None) -> int:
        """Become a writer that no process is: that one, or any; return which.

        Raises:
            BufferMisuseError: There is none.
        """
        chosen = range(self._num_writers) if index is None else [index]
        self._lock()
        assert fcntl is not None
        try:
            pids = {}
            for each in chosen:
                if pid := self.writer_pid(each):
                    pids[each] = pid
                    continue
                own = os.getpid()
                self.slot(each)[[START, PID]] = process_start(own), own
                return each
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        taken = ", ".join(f"{each} by process {pid}" for each, pid in pids.items())
        raise BufferMisuseError(
            f"writer{'s' if index is None else ''} {taken} in use; close one, or make the buffer "
            "with more num_writers"
        )

    def give_back_slot(self, index: int) -> None:
        """Be that writer no longer."""
        self.slot(index)[PID] = 0

    def _lock(self) -> None:
        deadline = time.monotonic() + _LOCK_TIMEOUT
        assert fcntl is not None
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has been joining the buffer of process "
                        f"{self.address.pid} for {_LOCK_TIMEOUT:.0f} s; end it and try again"
                    ) from None
            time.sleep(0.001)

    def check_open(self) -> None:
        """Raise BufferClosedError if the buffer was closed, or its process has ended."""
        if self.words[IS_CLOSED] or process_start(self.address.pid) != self.address.start:
            raise self._ended(self.address)


def _let_go(file: int, words: np.ndarray, is_owner: bool, pid: int) -> None:
    if os.getpid() == pid:  # not a fork of it
        if is_owner:
            words[IS_CLOSED] = 1
        os.close(file)


def _other(found: str, expected: str) -> BufferMisuseError:
    return BufferMisuseError(
        f"the shared memory has {found}, expected {expected}: it was made by another version of "
        "this package, or for other spaces; let all processes use the same"
    )


def _digest(options: ReplayOptions) -> int:
    described = options.layout.describe(), options.layout.stride, options.num_envs
    text = repr((described, options.num_steps)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")


def _places(options: ReplayOptions) -> tuple[int, int]:
    """Where rows begin, and the size of all."""
    begin, size = 8 * (SLOTS + SLOT * options.num_rings), shared_bytes(options)
    page = _PAGE if size < _MIN_HUGE_BYTES else _HUGE_PAGE
    begin += -begin % page
    return begin, begin + options.capacity * options.num_rings * options.layout.stride


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _map(file: int, size: int) -> np.ndarray:
    """The file as uint8 (size,), from where a large page may begin.

    Rows drawn at random are found sooner on large pages (see `zeroed_bytes`), which need that.
    """
    area = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)
    pages = np.frombuffer(area, np.uint8)  # keeps the area alive, whatever is mapped there
    pages = pages[-pages.ctypes.data % _HUGE_PAGE :][:size]
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    start = pages.ctypes.data
    if _libc().mmap(start, size, protection, mmap.MAP_SHARED | _MAP_FIXED, file, 0) != start:
        raise OSError(ctypes.get_errno(), f"{size} bytes of shared memory can't be mapped")
    return pages


def _advise(pages: np.ndarray, advice: int) -> None:
    """Give the system a hint that it may refuse, also as it does not know it."""
    begin = pages.ctypes.data // _PAGE * _PAGE
    _libc().madvise(begin, pages.ctypes.data + pages.nbytes - begin, advice)


def shared_bytes(options: ReplayOptions) -> int:
    """Bytes of the memory that are used."""
    rows = options.capacity * options.num_rings * options.layout.stride
    return rows + 8 * (SLOTS + SLOT * options.num_rings)


def process_start(pid: int) -> int:
    """When a process was started, in ticks since the machine was; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
        # One that nobody has waited for yet may have threads that still run.
        if words[0] in (b"Z", b"X") and len(os.listdir(f"/proc/{pid}/task")) < 2:
            return 0
        return int(words[19])
    except (OSError, IndexError, ValueError):
        return 0


# ---- Order of memory


def fence():
    """What is before it is read and written before what is behind it, as other cores see it."""


@intrinsic
def _fence(typing_context):
    def generate(context, builder, signature, args):
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), generate


@overload(fence, inline="always")
def _compile_fence():
    def compiled():
        _fence()  # pyright: ignore[reportCallIssue]

    return compiled


@njit(cache=True)
def count_rows(words):
    """Rows that all writers have committed, ever."""
    total = 0
    for writer in range(words[NUM_WRITERS]):
        total += words[SLOTS + SLOT * writer + COMMITTED]
    return total


@njit(cache=True)
def begin_rows(words, limits, slot, count, is_limited):
    """Say that the writer whose words begin at `slot` is going to write its next `count` rows.

    Returns:
        DONE if it may; CLOSED; or, where `is_limited`, WAIT, as the learner has drawn too few.
        Nothing was said then.
    """
    if words[IS_CLOSED]:
        return CLOSED
    if (
        is_limited
        and words[IS_LIMITED]
        and count_rows(words) * limits[0] - words[SAMPLED] > limits[2]
    ):
        return WAIT
    words[slot + BEGUN] = max(words[slot + BEGUN], words[slot + COMMITTED] + count)
    fence()
    return DONE


@njit(cache=True)
def commit_rows(words, slot, count):
    """Say that they are whole."""
    fence()
    words[slot + COMMITTED] += count


@njit(cache=True)
def draw_whole(words, limits, generator, margin, spans, rows):
    """Fill rows int64 (B,) with rows that are whole, drawn with replacement, each equally likely.

    Args:
        words: See `SharedMemory`, like the next.
        limits: See above.
        generator: uint64 (2,), see `core.kernels`; written.
        margin: The oldest rows of each full ring to leave out, as they will be overwritten; at most
            half of what it has.
        spans: int64 (writers, 3), written: the first number that is whole, the first drawn among,
            and how many these are up to this ring.
        rows: Written.

    Returns:
        DONE, or WAIT if there is no row, or fewer than the limits ask for.
    """
    capacity, num_writers, total = words[CAPACITY], words[NUM_WRITERS], 0
    for writer in range(num_writers):
        slot = SLOTS + SLOT * writer
        committed = words[slot + COMMITTED]
        fence()
        first = words[slot + BEGUN] - capacity
        begin = max(0, min(first + margin, committed - min(capacity, committed) // 2))
        spans[writer, 0], spans[writer, 1] = first, max(first, begin)
        total += max(0, committed - spans[writer, 1])
        spans[writer, 2] = total
    if total == 0 or not _may_draw(words, limits):
        return WAIT
    fence()
    key, counter = generator[0], generator[1]
    for i in range(rows.shape[0]):
        drawn = bounded(random_word(key, np.add(counter, np.uint64(i))), total)
        low, high = 0, num_writers - 1  # the first ring whose total exceeds it
        while low < high:
            middle = (low + high) // 2
            if spans[middle, 2] > drawn:
                high = middle
            else:
                low = middle + 1
        number = spans[low, 1] + drawn - (spans[low - 1, 2] if low else 0)
        rows[i] = low * capacity + number % capacity
    generator[1] = np.add(counter, np.uint64(rows.shape[0]))
    return DONE


@njit(cache=True)
def _may_draw(words, limits):
    added = count_rows(words)
    if added < words[MIN_SIZE]:
        return False
    return not words[IS_LIMITED] or added * limits[0] - words[SAMPLED] >= limits[1]


@njit(cache=True)
def find_overwritten(words, spans, rows):
    """Count the rows int64 (B,) that were drawn, if none was overwritten since `draw_whole`.

    Returns:
        How many rows were begun meanwhile, in the ring where it was most; -1 - that number if one
        that was drawn is among those overwritten.
    """
    fence()
    capacity, most, is_lost = words[CAPACITY], 0, False
    for writer in range(words[NUM_WRITERS]):
        first = words[SLOTS + SLOT * writer + BEGUN] - capacity
        most = max(most, first - spans[writer, 0])
        is_lost = is_lost or first > spans[writer, 1]
    if is_lost:  # perhaps
        is_lost = False
        for i in range(rows.shape[0]):
            writer, place = rows[i] // capacity, rows[i] % capacity
            oldest = spans[writer, 1]
            number = oldest + (place - oldest) % capacity
            if number < words[SLOTS + SLOT * writer + BEGUN] - capacity:
                is_lost = True
    if is_lost:
        return -1 - most
    words[SAMPLED] += rows.shape[0]
    return most
