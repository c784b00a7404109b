"""Rows in memory that several processes have mapped: who may write where, and which rows are whole.

    header    which memory it is, limits, who owns it (HEADER)
    slots     of each writer: what it has begun and committed, and its process (SLOT)
    envs      of each writer: its environments (ENVS)
    rows      the packed rows; each writer has a ring of its own, so that writers never meet

`begun` and `committed` of a writer only grow, see `table`: so the numbers from begun - C to
committed are whole, whatever a writer is doing, and wherever it was killed: the writer that takes
its place goes on behind `committed` and leaves `begun` as it is until it gets there. A learner
draws among these numbers, copies, and looks at `begun` again: if a row that it drew was begun to be
overwritten meanwhile, it draws anew. Nobody ever waits for a lock to draw or add. A link to a row
that is not committed yet is not followed; one that a killed writer left is mended by the writer
that takes its place.

The memory has no name (memfd), so it is gone with the last process that has it, however these
end. Others find it as /proc/PID/fd/N of the process that made it. A process that writes has its
number and the time of its start in its slot, by which others see whether it is still there.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.errors import BufferClosedError, BufferMemoryError, BufferMisuseError
from buffers.replay.plan import Plan
from buffers.replay.table import ENVS

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

__all__ = ["Address", "SharedMemory", "fence", "shared_bytes", "wait_for"]

_LINE = 128  # bytes, so that nobody waits for the cache line of another
_LOCK_TIMEOUT = 10.0  # seconds for what takes microseconds
_PAUSE = 0.001  # seconds between looks at what is waited for

# Limits: samples per insert, and between which differences of the two none has to wait.
HEADER = np.dtype({
    "names": ["token", "is_closed", "min_size", "ratio", "least", "most", "num_sampled"],
    "formats": ["<i8"] * 3 + ["<f8"] * 3 + ["<i8"],
    "offsets": [*range(0, 48, 8), _LINE],
    "itemsize": 2 * _LINE,
})  # fmt: skip
SLOT = np.dtype({
    "names": ["begun", "committed", "pid", "start"],
    "formats": ["<i8"] * 4,
    "offsets": [0, 8, 16, 24],
    "itemsize": _LINE,
})  # fmt: skip
_order = threading.Lock()


def fence() -> None:
    """Let what is before it be read and written before what is behind it, as other cores see it."""
    with _order:  # to let go of a lock, and then to take it, orders both
        pass
    with _order:
        pass


class Address(NamedTuple):
    """Where other processes find the memory, and how they know that it is the one."""

    pid: int
    start: int  # of the process, see `process_start`
    file: int
    token: int


def wait_for(is_ready: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    """Ask again and again, at least once.

    Raises:
        TimeoutError: It was not ready for so long; `why` says why.
    """
    deadline = time.monotonic() + seconds
    while not is_ready():
        if time.monotonic() >= deadline:
            raise TimeoutError(why())
        time.sleep(_PAUSE)


class SharedMemory:
    """The memory, made, or mapped if another process has made it at an address.

    Attributes:
        address: See above.
        header, slots: HEADER (), and SLOT (writers,).
        envs, rows: ENVS (N,), and a tensor uint8 (writers * capacity, stride), of all writers.

    Raises:
        BufferMisuseError: The system has no such memory.
        BufferMemoryError: It does not fit.
        BufferClosedError: The process that made it has ended or closed it.
    """

    def __init__(self, plan: Plan, address: Address | None = None):
        if fcntl is None or not hasattr(os, "memfd_create") or not process_start(os.getpid()):
            raise BufferMisuseError("memory is shared between processes on Linux only")
        self._plan, size, own = plan, shared_bytes(plan), os.getpid()
        self._file = file = _make(size) if address is None else _open(address, size)
        # Closes the file; of the process that made it, it lets writers know. Views stay.
        header = np.zeros(1, HEADER)[0]
        try:
            pages = np.frombuffer(mmap.mmap(file, size), np.uint8)
            header = pages[: HEADER.itemsize].view(HEADER)[0]
        finally:
            self.close = weakref.finalize(self, _let_go, file, header, address is None, own)
        if address is None:
            pages.fill(0)  # takes the memory now rather than in the middle of training
        slots, envs, rows = _places(plan)
        self.header, self.slots = header, pages[slots:envs].view(SLOT)
        self.envs = pages[envs:][: plan.num_envs * ENVS.itemsize].view(ENVS)
        self.rows = torch.from_numpy(pages[rows:].reshape(-1, plan.layout.stride))
        self.address = address or Address(own, process_start(own), file, secrets.randbits(63))
        if address is None:
            header["token"] = self.address.token
        else:
            self.check_open()

    # Writers

    def writer_pid(self, index: int) -> int:
        """The process that is this writer; 0 if there is none, or none any more."""
        pid, start = self.slots[["pid", "start"]][index].tolist()
        return pid if pid and process_start(pid) == start else 0

    def take_slot(self, index: int | None) -> int:
        """Become a writer that no process is: that one, or any; return which.

        Raises:
            BufferMisuseError: There is none.
        """
        assert fcntl is not None
        wait_for(self._lock, _LOCK_TIMEOUT, lambda: (
            f"another process has been joining the buffer of process {self.address.pid} for "
            f"{_LOCK_TIMEOUT:.0f} s; end it and try again"
        ))  # fmt: skip
        try:
            chosen = range(self._plan.num_rings) if index is None else [index]
            pids = {each: self.writer_pid(each) for each in chosen}
            for each, pid in pids.items():
                if not pid:
                    self.slots["start"][each] = process_start(os.getpid())
                    self.slots["pid"][each] = os.getpid()
                    return each
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        taken = ", ".join(f"{each} by process {pid}" for each, pid in pids.items())
        raise BufferMisuseError(
            f"writer{'s' if index is None else ''} {taken} in use; close one, or make the buffer "
            "with more num_writers"
        )

    def _lock(self) -> bool:
        assert fcntl is not None
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def check_open(self) -> None:
        """Raise BufferClosedError if the buffer was closed, or its process has ended."""
        if self.header["is_closed"] or process_start(self.address.pid) != self.address.start:
            raise _ended(self.address)


def _make(size: int) -> int:
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


def _open(address: Address, size: int) -> int:
    """The file, opened anew, so that a lock of it is nobody else's."""
    try:
        if process_start(address.pid) != address.start:
            raise FileNotFoundError
        file = os.open(f"/proc/{address.pid}/fd/{address.file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _ended(address) from error
    token = np.frombuffer(os.pread(file, 8, 0).ljust(8, b"\0"), np.int64)[0]
    if token == address.token and os.fstat(file).st_size == size:
        return file
    os.close(file)
    raise _ended(address)  # the number has become that of another file


def _ended(address: Address) -> BufferClosedError:
    return BufferClosedError(
        f"the buffer of process {address.pid} is gone: that process has ended, closed the buffer, "
        "or is another user's, on another machine or in another container; writers write where "
        "the learner is, as the same user and by the same version of this package"
    )


def _let_go(file: int, header: Any, is_owner: bool, pid: int) -> None:
    if os.getpid() == pid:  # not a fork of it
        if is_owner:
            header["is_closed"] = 1
        os.close(file)


def _places(plan: Plan) -> tuple[int, int, int]:
    """Where slots, environments and rows begin."""
    slots = HEADER.itemsize
    envs = slots + SLOT.itemsize * plan.num_rings
    rows = envs + ENVS.itemsize * plan.num_envs
    return slots, envs, rows + -rows % mmap.PAGESIZE


def shared_bytes(plan: Plan) -> int:
    """Bytes of the memory."""
    return _places(plan)[2] + plan.num_rows * plan.layout.stride


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
