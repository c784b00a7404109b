"""A replay buffer that other processes fill, and a learner draws from, in memory that all map.

    header    which memory it is, limits, who owns it (HEADER)
    slots     of each writer: what it has begun and committed, and its process (SLOT)
    envs      of each writer: its environments (ENVS)
    rows      the packed rows; each writer has a ring of its own, so that writers never meet

`begun` and `committed` of a writer only grow, see `table`: so the numbers from begun - C to
committed are whole, whatever a writer is doing, and wherever it was killed: the writer that takes
its place goes on behind `committed` and leaves `begun` as it is until it gets there. A learner
draws among these numbers, copies, and looks at `begun` again: if a row that it drew was begun to be
overwritten meanwhile, it draws anew. Nobody ever waits for a lock to draw or add, and no link leads
to a row that is not committed.

The memory has no name (memfd), so it is gone with the last process that has it, however these
end. Others find it as /proc/PID/fd/N of the process that made it. A process that writes has its
number and the time of its start in its slot, by which others see whether it is still there.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import secrets
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, Self, Unpack

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import (
    MAX_COUNT,
    ColumnReader,
    check_count,
    read_distinct_ids,
    read_number,
)
from buffers.core.errors import BufferClosedError, BufferMemoryError, BufferMisuseError
from buffers.core.generator import DeviceGenerator
from buffers.core.guard import Guard
from buffers.core.memory import allocation, check_room
from buffers.core.prefetch import Prefetch
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
_TRIES = 16  # before a draw whose rows are overwritten looks at the time
_LOOK_EVERY = 1.0  # seconds, whether the learner's process is still there


_LINE = 128  # bytes, so that nobody waits for the cache line of another
_LOCK_TIMEOUT = 10.0  # seconds for what takes microseconds

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


class _Options(RowOptions, total=False):
    min_size_to_sample: int
    error_buffer: float | None


_DEFAULTS = {**PLAIN_DEFAULTS, "min_size_to_sample": 1, "error_buffer": None}


class MultiprocessReplayBuffer:
    """The newest transitions of several processes, in memory that they share with a learner.

    The process that makes the buffer draws from it. Others add to it by a `ReplayWriter`, which
    `writer()` makes and which is handed to them: by fork or spawn, or to actors of Ray on the same
    machine. Each writer has a ring of `capacity / num_writers` rows, so that writers never wait for
    one another, nor the learner for them, unless a limit on samples per insert says so.

    *What is drawn.* Whole rows, all equally likely: of each writer the newest that are committed.
    An `add` is committed when it returns, all of its rows at once (in pieces of an eighth of the
    writer's ring, if it has more). A draw is of what is committed when it begins. If one of its
    rows is overwritten while they are copied, it is drawn anew, from the newer half of each ring.
    A writer that is killed in an `add` leaves what it has committed; another may take its place,
    and goes on behind that.

    Args:
        capacity: Number of transitions held by all writers together; a multiple of `num_writers`.
        observation_space: As in `SharedReplayBuffer`, like the next.
        action_space: See above.
        num_writers: Number of writers there may be at a time.
        num_envs: Number of environments of each writer; needed by the next and by `track_env`.
        n_step: As in `SharedReplayBuffer`, like the three that follow.
        gamma: Discount per step.
        track_env: Batches have `env_ids`: writer * num_envs + environment.
        extra_columns: Names and spaces of further values per transition.
        seed: Of the generator.
        samples_per_insert: How many transitions are drawn for each that is added; None for no
            limit. The learner waits when it has drawn more, writers wait when it has drawn fewer.
        min_size_to_sample: Transitions added before the first draw.
        error_buffer: Transitions that may be drawn too many or too few before one of the two waits
            (at most one draw, or one `add` of each writer, goes beyond it); None takes a tenth of
            `samples_per_insert * min_size_to_sample`, and what 100 inserts ask for at least.
        timeout: Seconds that `sample` waits for transitions, and writers for draws.

    Raises:
        BufferMisuseError: An argument that does not fit, or a system other than Linux.
        BufferMemoryError: More memory is needed than is free. Nothing was allocated.

    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> buffer = MultiprocessReplayBuffer(1000, Box(-1, 1, (4,)), Discrete(2), num_writers=2)
    >>> writer = buffer.writer()  # handed to another process
    >>> obs, flags = np.zeros((3, 4), np.float32), np.zeros(3, bool)
    >>> step = {"obs": obs, "next_obs": obs, "actions": np.ones(3, int), "rewards": np.ones(3)}
    >>> writer.add(**step, terminations=flags, truncations=flags)
    >>> len(buffer), tuple(buffer.sample(256).obs.shape)
    (3, (256, 4))
    >>> buffer.close()
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
        samples_per_insert: float | None = None,
        timeout: float = 60.0,
        **options: Unpack[_Options],
    ):
        name = type(self).__name__
        given = read_options(name, options, _DEFAULTS)
        rows = {option: given[option] for option in PLAIN_DEFAULTS}
        spaces = observation_space, action_space
        self._arguments = capacity, spaces, num_writers, num_envs, rows
        plan = self._plan = _plan(*self._arguments)
        self.capacity, self.num_writers = int(capacity), plan.num_rings
        self.num_envs, self.n_step, self.gamma = num_envs, plan.n_step, plan.gamma
        self.observation_space, self.action_space = spaces
        self.device, self.timeout = _CPU, read_number("timeout", timeout, math.inf)
        least = check_count("min_size_to_sample", given["min_size_to_sample"], self.capacity)
        limits = _read_limits(samples_per_insert, least, given["error_buffer"])
        needed = shared_bytes(plan)
        check_room(name, self.capacity, lambda rows: needed * rows // self.capacity, _CPU)
        with allocation(name, needed, _CPU, "use a smaller capacity", is_checked=True):
            self._memory = SharedMemory(plan)
        header = self._header = self._memory.header
        header["min_size"], (header["ratio"], header["least"], header["most"]) = least, limits
        self._guard, self._pid = Guard(), os.getpid()
        with torch.inference_mode(False):
            parts = Memory(self._memory.rows, self._memory.slots, self._memory.envs)
            self._table = Table(plan, _CPU, memory=parts, order=fence)
        self._reader, self._random = Reader(self._table), DeviceGenerator(seed, _CPU)

    @staticmethod
    def nbytes_for(
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        num_writers: int,
        num_envs: int | None = None,
        **options: Unpack[RowOptions],
    ) -> int:
        """Bytes the constructor would allocate with these arguments; allocates nothing."""
        spaces = observation_space, action_space
        return shared_bytes(_plan(capacity, spaces, num_writers, num_envs, options))

    # What there is

    def __len__(self) -> int:
        """Number of transitions that can be drawn."""
        return int(self.counts.sum())

    @property
    def counts(self) -> np.ndarray:
        """int64 (num_writers,), transitions of each writer that can be drawn; a copy."""
        begin, end = self._table.live()
        return end - begin

    @property
    def num_added(self) -> int:
        """Number of transitions ever added."""
        return self._table.num_added

    @property
    def num_sampled(self) -> int:
        """Number of transitions ever drawn."""
        return int(self._header["num_sampled"])

    @property
    def writer_pids(self) -> list[int]:
        """The process that each writer is in; 0 where there is none, or none any more."""
        return [self._memory.writer_pid(index) for index in range(self.num_writers)]

    def memory(self) -> dict[str, int]:
        """Bytes held now, by what they are for; batches not included."""
        rows = self._memory.rows.nbytes
        return {"rows": rows, "state": self.nbytes - rows}

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return shared_bytes(self._plan)

    # Writers

    def writer(self, index: int | None = None, *, timeout: float | None = None) -> ReplayWriter:
        """A writer for another process, or for this one.

        Args:
            index: Which of the writers, 0 to `num_writers - 1`; None for one that no process is.
            timeout: Seconds that its `add` waits for draws; None takes that of the buffer.

        Raises:
            BufferMisuseError: The index is out of range, or the buffer is closed.
        """
        self._check_open()
        if index is not None and index not in range(self.num_writers):
            raise BufferMisuseError(
                f"index is {index!r:.99}, expected 0 to {self.num_writers - 1}, or None for any"
            )
        seconds = self._seconds(timeout)
        return ReplayWriter(self._memory.address, self._arguments, index, seconds)

    def add(self, **columns: Any) -> NoReturn:
        """Refused: rows come from writers."""
        raise BufferMisuseError(
            "this buffer is filled by writers, each with rows of its own: hand another process "
            "buffer.writer(), and add(...) there"
        )

    # Drawing

    def new_batch(self, batch_size: int, columns: Iterable[str] | None = None) -> ReplayBatch:
        """Memory for `sample(batch_size, out=...)`, not initialised.

        Args:
            batch_size: B.
            columns: What it is to have, as of `sample`.
        """
        return self._reader.batch(batch_size, None, columns)

    def sample(
        self,
        batch_size: int,
        out: ReplayBatch | None = None,
        *,
        columns: Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> ReplayBatch:
        """Draw transitions, all equally likely, with replacement.

        Waits until `min_size_to_sample` were added, and until the limit on samples per insert
        allows another draw.

        Args:
            batch_size: B.
            out: A batch that `new_batch` or `sample` returned, to be overwritten; else a new one.
            columns: As in `SharedReplayBuffer.sample`.
            timeout: Seconds to wait; None takes that of the buffer.

        Raises:
            TimeoutError: There were too few transitions for so long, or so few in all that writers
                overwrote them faster than they could be copied.
            BufferMisuseError: An argument does not fit, the buffer is closed, or this is a fork of
                the process that made it.
        """
        self._check_usable()
        batch, is_again = self._reader.batch(batch_size, out, columns), False
        seconds = self._seconds(timeout)

        def is_drawn() -> bool:
            nonlocal is_again
            for _ in range(_TRIES if self._may_draw() else 0):
                if self._is_drawn(batch, is_again=is_again):
                    return True
                is_again = True
            return False

        wait_for(is_drawn, seconds, lambda: self._missing(seconds))
        return batch

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else read_number("timeout", timeout, math.inf)

    def _is_drawn(self, batch: ReplayBatch, *, is_again: bool) -> bool:
        """Draw rows and gather them; return whether they were whole all the while.

        A draw that is made again leaves out the older half, which is overwritten first.
        """
        self._check_open()
        (begin, end), rows = self._table.live(), batch.memory.indices
        begin = end - (end - begin + 1) // 2 if is_again else begin
        if (begin == end).all():
            return False
        spans = torch.from_numpy(begin), torch.from_numpy(end)
        draw_uniform(*spans, self._plan.span, self._random.torch, rows)
        self._reader.fill(batch)
        if is_whole := self._table.were_whole(rows.numpy(), end):
            self._header["num_sampled"] += batch.size
        return is_whole

    def prefetch(
        self,
        batch_size: int,
        *,
        depth: int = 2,
        device: torch.device | str | None = None,
        columns: Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> Prefetch[ReplayBatch]:
        """Draw batches ahead of the learner; close it when done.

        A batch is of what was committed `depth` batches before it is returned. Batches that are
        drawn and not taken count for `samples_per_insert`.

        Args:
            batch_size: B.
            depth: Batches drawn ahead, 1 to 64.
            device: Where batches are copied to; None leaves them.
            columns: As in `sample`, like the next.
            timeout: Seconds that each draw waits for transitions; None takes that of the buffer.

        Raises:
            BufferMisuseError: An argument does not fit.
        """
        self._check_usable()
        size = check_count("batch_size", batch_size, MAX_COUNT)
        self._reader.read_columns(columns)
        draw = partial(self.sample, size, columns=columns, timeout=timeout)
        return Prefetch(draw, lambda: self._random, self._guard, depth, device)

    def _may_draw(self) -> bool:
        header, added = self._header, self.num_added
        ahead = added * header["ratio"] - header["num_sampled"]
        return added >= header["min_size"] and bool(ahead >= header["least"])

    def _missing(self, seconds: float) -> str:
        header, added = self._header, self.num_added
        ratio, least = float(header["ratio"]), float(header["least"])
        if self._may_draw():
            what = (
                f"rows were overwritten while they were copied, each time: {self.capacity} "
                "transitions are too few for how fast writers add; make the capacity larger, or "
                "set samples_per_insert"
            )
        elif added < header["min_size"]:
            what = f"{added} of min_size_to_sample={header['min_size']} transitions were added"
        else:
            what = (
                f"{self.num_sampled} transitions were drawn of {added} added, and "
                f"samples_per_insert={ratio:g} allows no more: "
                f"{math.ceil((least + self.num_sampled) / ratio)} have to be added"
            )
        there = ", ".join(f"{index}: {pid or 'none'}" for index, pid in enumerate(self.writer_pids))
        return f"sample has waited {seconds:g} s: {what}; processes of the writers: {there}"

    def _check_open(self) -> None:
        if self._header["is_closed"]:
            raise BufferMisuseError("the buffer was closed; make another one")

    def _check_usable(self) -> None:
        self._check_open()
        if self._pid != os.getpid():
            raise BufferMisuseError(
                "this process was forked from the one that draws from the buffer; hand it "
                "buffer.writer() to add transitions here"
            )

    def close(self) -> None:
        """Let writers end: their next `add` raises BufferClosedError. Twice does no harm.

        A buffer that is no longer referred to, or whose process ends, is closed, too.
        """
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise BufferMisuseError(
            "a buffer that processes share is not copied, pickled or saved; hand other processes "
            "buffer.writer()"
        )


class ReplayWriter(Added):
    """Adds transitions to a `MultiprocessReplayBuffer`, in whatever process of the same machine.

    It is made by `buffer.writer()`, and can be handed to processes and pickled. With its first
    `add`, or `open`, it becomes one of the buffer's writers, until it is closed, or its process
    ends. Several writers may be in one process; a fork of that is another process. A
    `TransitionWriter` takes it for a buffer.

    Attributes:
        index: Which of the buffer's writers it is; None before.
    """

    def __init__(
        self, address: Address, arguments: tuple[Any, ...], index: int | None, timeout: float
    ):
        self._given = address, arguments, index, timeout
        self.index, self._pid = index, 0
        self._release: Any = None
        self._table: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayWriter, self._given

    def open(self) -> None:
        """Become one of the buffer's writers now.

        Raises:
            BufferMisuseError: All of them are in use, or the one that was asked for.
            BufferClosedError: The buffer was closed, or its process has ended.
        """
        if self._pid == os.getpid():
            return
        address, arguments, asked, _ = self._given
        whole = _plan(*arguments)
        memory = self._memory = SharedMemory(whole, address)
        index = memory.take_slot(asked)
        self._release = weakref.finalize(self, _give_back, memory, index, os.getpid())
        num_envs = whole.num_envs // whole.num_rings
        plan = replace(whole, num_rings=1, num_envs=num_envs)
        row, env = index * plan.span, index * num_envs
        with torch.inference_mode(False):
            rows, envs = memory.rows[row : row + plan.span], memory.envs[env : env + num_envs]
            parts = Memory(rows, memory.slots[index : index + 1], envs)
            table = Table(plan, _CPU, memory=parts, first_row=row, first_env=env, order=fence)
        table.envs["is_open"][...] = False
        self._table, self._columns = table, ColumnReader(plan.layout)
        self._next_look = time.monotonic() + _LOOK_EVERY
        self.index, self._pid = index, os.getpid()

    @property
    def num_added(self) -> int:
        """Number of transitions ever added by this writer and those whose place it took."""
        return 0 if self._table is None else self._table.num_added

    def _add(self, columns: dict[str, Any], env_ids: Any, valid: Any) -> None:
        self.open()
        table = self._table
        read = self._columns.read_transitions(columns, env_ids, valid, table.plan.num_envs, _CPU)
        if len(read[0]["rewards"]):
            wait_for(self._may_add, self._given[-1], self._missing)
        for piece in table.pieces(read, max(1, table.plan.capacity // 8)):
            table.add(*piece)

    def _may_add(self) -> bool:
        header, now = self._memory.header, time.monotonic()
        if header["is_closed"] or now > self._next_look:
            self._next_look = now + _LOOK_EVERY
            self._memory.check_open()
        ahead = self._memory.slots["committed"].sum() * header["ratio"] - header["num_sampled"]
        return bool(ahead <= header["most"])

    def _missing(self) -> str:
        header, added = self._memory.header, int(self._memory.slots["committed"].sum())
        return (
            f"add has waited {self._given[-1]:g} s: the learner (process {self._given[0].pid}) "
            f"has drawn {header['num_sampled']} transitions of {added} added, and "
            f"samples_per_insert={header['ratio']:g} asks for more before others are added"
        )

    def cut_episodes(self, env_ids: Any = None) -> None:
        """As `SharedReplayBuffer.cut_episodes`, of the environments of this writer."""
        self.open()
        if num_envs := self._table.plan.num_envs:
            self._table.cut(read_distinct_ids(env_ids, num_envs, _CPU))

    def close(self) -> None:
        """Let another be this writer; what was added stays. Twice does no harm.

        The next `add` becomes one of the buffer's writers again.
        """
        if self._release is not None:
            self._release()
        self._pid, self._release = 0, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _give_back(memory: SharedMemory, index: int, pid: int) -> None:
    if os.getpid() == pid:  # not a fork of it
        memory.slots["pid"][index] = 0


def _plan(
    capacity: Any,
    spaces: tuple[Space, Space],
    num_writers: Any,
    num_envs: int | None,
    rows: Mapping[str, Any],
) -> Plan:
    """Check arguments; the plan is that of rings, of which each writer has one."""
    rows = read_options("MultiprocessReplayBuffer", rows, PLAIN_DEFAULTS)
    whole, rings = check_count("capacity", capacity), check_count("num_writers", num_writers)
    if whole % rings or whole < 2 * rings or rings > _MAX_WRITERS:
        raise BufferMisuseError(
            f"capacity is {whole}, expected a multiple of num_writers = {rings}, at most "
            f"{_MAX_WRITERS}, and two transitions for each at least"
        )
    return plan_replay(whole // rings, *spaces, rows, num_envs=num_envs, num_writers=rings)


def _read_limits(ratio: Any, least: int, error_buffer: Any) -> tuple[float, float, float]:
    """Samples per insert, and between which differences of the two none has to wait.

    The difference is that of `ratio` times the transitions added, and the transitions drawn.
    """
    if ratio is None and error_buffer is None:
        return 0.0, -math.inf, math.inf
    ratio = 0.0 if ratio is None else read_number("samples_per_insert", ratio, math.inf)
    offset, smallest = ratio * least, max(1.0, ratio)
    if error_buffer is None:
        error_buffer = max(0.1 * offset, 100.0 * smallest)
    error_buffer = read_number("error_buffer", error_buffer, math.inf)
    if not ratio or error_buffer < smallest:
        raise BufferMisuseError(
            f"samples_per_insert is {ratio:g} and error_buffer {error_buffer:g}, expected more "
            f"than 0, and at least {smallest:g}, so that either the learner or a writer can go on"
        )
    return ratio, offset - error_buffer, offset + error_buffer


class Address(NamedTuple):
    """Where other processes find the memory, and how they know that it is the one."""

    pid: int
    start: int  # of the process, see `process_start`
    file: int
    token: int


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
