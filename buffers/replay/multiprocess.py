"""A replay buffer that other processes fill and a learner draws from, in memory that all map.

    slots    of each writer: counts begun and committed, and its process (SLOT)
    envs     of each writer: its environments (ENVS)
    rows     the packed rows; each writer has a ring of its own, so writers never share a row

`begun` and `committed` of a writer only grow, see `table`. So the numbers from begun - C to
committed are whole at any time, also after a writer was killed: its successor continues at
`committed`, and leaves `begun` unchanged until it gets there. A learner draws among these numbers,
copies, and reads `begun` again. If a writer has begun to overwrite a drawn row, the learner draws
again. No link leads to a row that is not committed.

The memory is a memfd without a path, so the system frees it when the last process that maps it has
ended, in whatever way. Other processes open /proc/PID/fd/N of the process that made it. A writer's
slot has its process id and start time: by these, others see whether the process is still alive.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import ColumnReader, check_count, read_distinct_ids, read_number
from buffers.core.errors import BufferClosedError, BufferMisuseError
from buffers.core.generator import DeviceGenerator
from buffers.core.memory import allocation
from buffers.replay.batches import Reader, ReplayBatch
from buffers.replay.buffer import Added
from buffers.replay.draws import draw_uniform
from buffers.replay.plan import PLAIN_DEFAULTS, Plan, RowOptions, plan_replay, read_options
from buffers.replay.table import ENVS, Memory, Table, fence, wait_for

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

__all__ = ["MultiprocessReplayBuffer", "ReplayWriter"]

_CPU = torch.device("cpu")
_MAX_WRITERS = 4096
_TRIES = 16  # draws between two looks at the clock, if rows are overwritten
_LOCK_TIMEOUT = 10.0  # seconds; the lock is held for microseconds
_LINE = 128  # bytes, so that no two writers share a cache line
SLOT = np.dtype({
    "names": ["begun", "committed", "pid", "start"], "formats": ["<i8"] * 4, "itemsize": _LINE,
})  # fmt: skip


class MultiprocessReplayBuffer(contextlib.AbstractContextManager):
    """The newest transitions of several processes, in memory shared with a learner.

    The process that makes the buffer draws from it. The buffer can be passed to other processes,
    which draw with random streams of their own. Processes add through a `ReplayWriter`: call
    `writer()` and pass the result to them by fork or spawn, or to Ray actors on the same machine.
    Each writer has a ring of `capacity / num_writers` rows. Writers wait neither for one another
    nor for a learner; a learner that must not draw too often can compare `num_added`.

    *What is drawn.* Whole rows, all equally likely: the newest committed rows of each writer. The
    rows of an `add` are committed together, before it returns (in pieces, if they are more than an
    eighth of the writer's ring). If a drawn row is overwritten while the batch is copied, the whole
    batch is drawn again, from the newer half of each ring.

    Args:
        capacity: Number of transitions held by all writers together; a multiple of `num_writers`.
        observation_space, action_space: As in `SharedReplayBuffer`.
        num_writers: Largest number of writers at a time.
        num_envs: Number of environments of each writer; needed by `n_step` above 1 and `track_env`.
        seed: Seed of the generator.
        min_size_to_sample: Transitions that must be added before the first draw.
        timeout: Seconds that `sample` waits for transitions.
        options: As in `SharedReplayBuffer`: n_step, gamma, extra_columns and track_env. The
            `env_ids` of batches are writer * num_envs + environment.

    Raises:
        BufferMisuseError: An argument does not fit, or a system other than Linux.
        BufferMemoryError: More memory is needed than is free. Nothing was allocated.
    """

    def __init__(
        self,
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        num_writers: int,
        num_envs: int | None = None,
        seed: int | None = None,
        min_size_to_sample: int = 1,
        timeout: float = 60.0,
        **options: Unpack[RowOptions],
    ):
        arguments = capacity, (observation_space, action_space), num_writers, num_envs, options
        self._set_up(None, arguments, seed, min_size_to_sample, timeout)

    def _set_up(
        self, address: Address | None, arguments: Any, seed: Any, min_size: Any, timeout: Any
    ) -> None:
        """Make the memory, or map the memory at an address."""
        capacity, spaces, _, num_envs, _ = self._arguments = arguments
        plan = self._plan = _plan(*arguments)
        self.capacity, self.num_writers = int(capacity), plan.num_rings
        self.num_envs, self.n_step, self.gamma = num_envs, plan.n_step, plan.gamma
        self.observation_space, self.action_space = spaces
        self.device, self.timeout = _CPU, read_number("timeout", timeout, math.inf)
        self._min_size = check_count("min_size_to_sample", min_size, self.capacity)
        needed = shared_bytes(plan) if address is None else 0
        what, advice = f"buffer with capacity {self.capacity}", "use a smaller capacity"
        with allocation(what, needed, _CPU, advice), torch.inference_mode(False):
            self._memory = memory = SharedMemory(plan, address)
            parts = Memory(memory.rows, memory.slots, memory.envs)
            self._table = Table(plan, _CPU, is_staged=False, memory=parts, order=fence)
        self._reader, self._random = Reader(self._table), DeviceGenerator(seed, _CPU)
        self._pid = os.getpid()

    def __len__(self) -> int:
        """Number of transitions that can be drawn."""
        return int(self.counts.sum())

    @property
    def counts(self) -> np.ndarray:
        """Transitions of each writer that can be drawn, int64 (num_writers,); a copy."""
        begin, end = self._table.live()
        return end - begin

    @property
    def num_added(self) -> int:
        """Number of transitions ever added."""
        return self._table.num_added

    @property
    def writer_pids(self) -> list[int]:
        """Process ids of the writers; 0 where no living process is the writer."""
        return [self._memory.writer_pid(index) for index in range(self.num_writers)]

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return shared_bytes(self._plan)

    def writer(self, index: int | None = None) -> ReplayWriter:
        """Make a writer for any process, number `index`, 0 to num_writers - 1; None: a free one."""
        self._check_open()
        if index is not None and index not in range(self.num_writers):
            raise BufferMisuseError(
                f"index is {index!r:.99}, expected 0 to {self.num_writers - 1}, or None for any"
            )
        return ReplayWriter(self._memory.address, self._arguments, index)

    def sample(
        self,
        batch_size: int,
        out: ReplayBatch | None = None,
        *,
        columns: Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> ReplayBatch:
        """Draw transitions uniformly, with replacement; wait for `min_size_to_sample`.

        Args:
            batch_size: B.
            out: A batch from `sample`, to be overwritten; None makes a new one.
            columns: As in `SharedReplayBuffer.sample`.
            timeout: Seconds to wait; None takes the buffer's.

        Raises:
            TimeoutError: Too few transitions were added in that time, or the rings are so small
                that writers overwrote rows faster than they could be copied.
            BufferMisuseError: An argument does not fit, or the buffer is closed.
            BufferClosedError: The process that made the buffer has ended or closed it.
        """
        self._check_open()
        if self._pid != os.getpid():  # in a fork, which must not draw the same rows
            self._random, self._pid = DeviceGenerator(None, _CPU), os.getpid()
        seconds = self.timeout if timeout is None else read_number("timeout", timeout, math.inf)
        batch, is_again = self._reader.batch(batch_size, out, columns), False
        rows = batch.memory.indices

        def is_drawn() -> bool:
            nonlocal is_again
            begin, end = self._table.live()
            if self.num_added < self._min_size or (begin == end).all():
                return False
            if is_again:  # the older half is overwritten first
                begin = end - (end - begin + 1) // 2
            spans = torch.from_numpy(begin), torch.from_numpy(end)
            draw_uniform(*spans, self._plan.span, self._random.torch, rows)
            self._reader.fill(batch)
            is_again = True
            return self._table.were_whole(rows.numpy(), end)

        several = range(_TRIES)
        wait_for(lambda: any(is_drawn() for _ in several), seconds, lambda: self._missing(seconds))
        return batch

    def _missing(self, seconds: float) -> str:
        what = (
            f"{self.num_added} of min_size_to_sample={self._min_size} transitions were added"
            if self.num_added < self._min_size
            else f"rows were overwritten while they were copied, each time: {self.capacity} "
            "transitions are too few for how fast writers add; make the capacity larger"
        )
        there = ", ".join(f"{index}: {pid or 'none'}" for index, pid in enumerate(self.writer_pids))
        return f"sample has waited {seconds:g} s: {what}; processes of the writers: {there}"

    def _check_open(self) -> None:
        if not self._memory.close.alive:
            raise BufferMisuseError("the buffer was closed; make another one")
        self._memory.address.check()

    def close(self) -> None:
        """Close the buffer: the next `add` of each writer raises BufferClosedError.

        Deleting the last reference to the buffer, or the end of its process, closes it too.
        """
        self._memory.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the address, so that other processes of this machine draw from the same memory."""
        given = self._arguments, None, self._min_size, self.timeout
        return _mapped, (type(self), self._memory.address, *given)


class ReplayWriter(Added, contextlib.AbstractContextManager):
    """Adds transitions to a `MultiprocessReplayBuffer` from any process of the same machine.

    `buffer.writer()` makes it; it can be pickled and passed to processes. The first `add`, or
    `open`, makes it one of the buffer's writers, until it is closed or its process ends. A process
    may have several writers; a fork counts as another process. A `TransitionWriter` accepts it as
    its buffer.

    Attributes:
        index: Number of the writer; None before the first `add` or `open`, unless it was asked for.
    """

    def __init__(self, address: Address, arguments: tuple[Any, ...], index: int | None):
        self._given = address, arguments, index
        self.index, self._pid, self._release = index, 0, lambda: None

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayWriter, self._given

    def open(self) -> None:
        """Become one of the buffer's writers now.

        Raises:
            BufferMisuseError: All writers are in use, or the one that was asked for is.
            BufferClosedError: The buffer was closed, or its process has ended.
        """
        if self._pid == os.getpid():
            return
        address, arguments, asked = self._given
        whole = _plan(*arguments)
        memory = SharedMemory(whole, address)
        index = memory.take_slot(asked)
        self._release = weakref.finalize(self, _give_back, memory, index, os.getpid())
        num_envs = whole.num_envs // whole.num_rings
        plan = replace(whole, num_rings=1, num_envs=num_envs)
        row, env = index * plan.span, index * num_envs
        with torch.inference_mode(False):
            rows, envs = memory.rows[row : row + plan.span], memory.envs[env : env + num_envs]
            parts = Memory(rows, memory.slots[index : index + 1], envs)
            table = Table(
                plan, _CPU, is_staged=False, memory=parts, first_row=row, first_env=env, order=fence
            )
        table.envs["is_open"][...] = False
        self._table, self._columns = table, ColumnReader(plan.layout)
        self.index, self._pid = index, os.getpid()

    def _add(self, columns: dict[str, Any], env_ids: Any, valid: Any) -> None:
        self.open()
        self._given[0].check()
        table = self._table
        read = self._columns.read_transitions(columns, env_ids, valid, table.plan.num_envs, _CPU)
        for piece in table.pieces(read, max(1, table.plan.capacity // 8)):
            table.add(*piece)

    def cut_episodes(self, env_ids: Any = None) -> None:
        """As `SharedReplayBuffer.cut_episodes`, for the environments of this writer."""
        self.open()
        if num_envs := self._table.plan.num_envs:
            self._table.cut(read_distinct_ids(env_ids, num_envs, _CPU))

    def close(self) -> None:
        """Release the writer's number until the next `add`; added transitions stay."""
        self._release()
        self._pid = 0

    def __exit__(self, *error: object) -> None:
        self.close()


def _mapped(kind: type[MultiprocessReplayBuffer], *given: Any) -> MultiprocessReplayBuffer:
    """Return a buffer over the memory of another process; see `_set_up`."""
    buffer = kind.__new__(kind)
    buffer._set_up(*given)
    return buffer


def _give_back(memory: SharedMemory, index: int, pid: int) -> None:
    if os.getpid() == pid:  # a fork must not release it
        memory.slots["pid"][index] = 0


def _plan(
    capacity: Any,
    spaces: tuple[Space, Space],
    num_writers: Any,
    num_envs: int | None,
    rows: Mapping[str, Any],
) -> Plan:
    """Check arguments; return a plan with one ring per writer."""
    own = "num_writers", *(MultiprocessReplayBuffer.__init__.__kwdefaults__ or ())
    rows = read_options("MultiprocessReplayBuffer", rows, PLAIN_DEFAULTS, own)
    whole, rings = check_count("capacity", capacity), check_count("num_writers", num_writers)
    if whole % rings or whole < 2 * rings or rings > _MAX_WRITERS:
        raise BufferMisuseError(
            f"capacity is {whole}, expected a multiple of num_writers = {rings}, at most "
            f"{_MAX_WRITERS}, and two transitions for each at least"
        )
    return plan_replay(whole // rings, *spaces, rows, num_envs=num_envs, num_writers=rings)


class Address(NamedTuple):
    """Where other processes find the memory: a file of the process that made it."""

    pid: int
    path: str
    name: str  # unique

    def check(self) -> None:
        """Raise BufferClosedError if the process at the address has ended or closed the buffer."""
        with contextlib.suppress(OSError):
            if os.readlink(self.path) == f"/memfd:{self.name} (deleted)":
                return
        raise BufferClosedError(
            f"the buffer of process {self.pid} is gone: that process has ended, closed the buffer, "
            "or is another user's, on another machine or in another container; writers write where "
            "the learner is, as the same user and by the same version of this package"
        )


class SharedMemory:
    """The shared memory: made here, or mapped from the address of another process.

    Attributes:
        address: Where other processes find the memory.
        slots, envs, rows: SLOT (writers,), ENVS (N,), and a tensor uint8 (writers * capacity,
            stride), of all writers.
        close: Closes the file, which other processes notice; views stay valid.
    """

    def __init__(self, plan: Plan, address: Address | None = None):
        if fcntl is None or not hasattr(os, "memfd_create") or not process_start(os.getpid()):
            raise BufferMisuseError("memory is shared between processes on Linux only")
        size, own = shared_bytes(plan), os.getpid()
        if address is None:
            name = f"replay-{secrets.token_hex(8)}"
            self._file = os.memfd_create(name, os.MFD_CLOEXEC)
            self.address = Address(own, f"/proc/{own}/fd/{self._file}", name)
        else:
            address.check()
            self._file, self.address = os.open(address.path, os.O_RDWR | os.O_CLOEXEC), address
        self.close = weakref.finalize(self, _let_go, self._file, own)
        if address is None:
            os.ftruncate(self._file, size)
        elif os.fstat(self._file).st_size != size:
            address._replace(name="").check()  # made with other spaces: raises
        pages = np.frombuffer(mmap.mmap(self._file, size), np.uint8)
        if address is None:
            pages.fill(0)  # commits the memory now, not in the middle of training
        envs, rows = _places(plan)
        self.slots = pages[:envs].view(SLOT)
        self.envs = pages[envs:][: plan.num_envs * ENVS.itemsize].view(ENVS)
        self.rows = torch.from_numpy(pages[rows:].reshape(-1, plan.layout.stride))

    def writer_pid(self, index: int) -> int:
        """Process id of a writer; 0 if no living process is the writer."""
        pid, start = self.slots[["pid", "start"]][index].tolist()
        return pid if pid and process_start(pid) == start else 0

    def take_slot(self, index: int | None) -> int:
        """Take the free writer `index`, or any; return its number."""
        wait_for(self._lock, _LOCK_TIMEOUT, lambda: (
            f"another process has been joining the buffer of process {self.address.pid} for "
            f"{_LOCK_TIMEOUT:.0f} s; end it and try again"
        ))  # fmt: skip
        try:
            chosen = range(len(self.slots)) if index is None else [index]
            pids = {each: self.writer_pid(each) for each in chosen}
            for each, pid in pids.items():
                if not pid:
                    self.slots["start"][each] = process_start(os.getpid())
                    self.slots["pid"][each] = os.getpid()
                    return each
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # type: ignore[union-attr]
        taken = ", ".join(f"{each} by process {pid}" for each, pid in pids.items())
        raise BufferMisuseError(
            f"writer{'s' if index is None else ''} {taken} in use; close one, or make the buffer "
            "with more num_writers"
        )

    def _lock(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[union-attr]
            return True
        return False


def _let_go(file: int, pid: int) -> None:
    if os.getpid() == pid:  # a fork must not close it
        os.close(file)


def _places(plan: Plan) -> tuple[int, int]:
    """Bytes where environments and rows begin, behind the slots."""
    envs = SLOT.itemsize * plan.num_rings
    rows = envs + ENVS.itemsize * plan.num_envs
    return envs, rows + -rows % mmap.PAGESIZE


def shared_bytes(plan: Plan) -> int:
    """Size of the memory in bytes."""
    return _places(plan)[1] + plan.num_rows * plan.layout.stride


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
        return 0 if words[0] in (b"Z", b"X") else int(words[19])
    except (OSError, IndexError, ValueError):
        return 0
