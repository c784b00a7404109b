"""A replay buffer that other processes fill, and a learner draws from; see `shared_memory`."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Unpack

import numpy as np
import torch
from gymnasium import Space

from buffers.core.arguments import (
    MAX_COUNT,
    check_count,
    read_distinct_ids,
    read_number,
    read_transitions,
)
from buffers.core.errors import BufferMisuseError
from buffers.core.guard import Guard, exclusive
from buffers.core.kernels import scatter_fields
from buffers.core.memory import allocation, check_room
from buffers.core.prefetch import Prefetch, end_prefetch
from buffers.replay import layout as at
from buffers.replay.batches import BatchOptions, BatchSource, ReplayBatch, column_names
from buffers.replay.compiled_reader import CompiledReader
from buffers.replay.layout import PlainOptions, ReplayOptions, plan_replay
from buffers.replay.shared_memory import (
    BEGUN,
    CLOSED,
    COMMITTED,
    DONE,
    IS_CLOSED,
    IS_LIMITED,
    LOST,
    MAX_WRITERS,
    MIN_SIZE,
    SAMPLED,
    SLOT,
    SLOTS,
    WAIT,
    Address,
    SharedMemory,
    begin_rows,
    commit_rows,
    count_rows,
    draw_whole,
    find_overwritten,
    shared_bytes,
)
from buffers.replay.storage import ReplayStorage, add_arrays, mark_cut, place_rows, write_links

__all__ = ["MultiprocessReplayBuffer", "ReplayWriter"]

_CPU = torch.device("cpu")
_TRIES = 16  # before a draw whose rows are overwritten looks at the time
_PAUSE = 0.001  # seconds between looks at what is waited for
_DRAW_TIME = 60.0  # seconds that a draw may take besides waiting
_LOOK_EVERY = 1.0  # seconds, whether the learner's process is still there
_NO_IDS = np.zeros(0, np.int64)
_ONLY_ARRAYS = {np.ndarray}
_PLAIN = ("obs", "next_obs", "actions", "rewards", "terminations", "truncations")


class MultiprocessReplayBuffer(BatchSource):
    """The newest transitions of several processes, in memory that they share with a learner.

    The process that makes the buffer draws from it. Others add to it by a `ReplayWriter`, which
    `writer()` makes and which is handed to them: by fork or spawn, or to actors of Ray on the same
    machine. Each writer has a ring of `capacity / num_writers` rows, so that writers never wait for
    one another, nor the learner for them, unless a limit on samples per insert says so.

    *What is drawn.* Whole rows, all equally likely: of each writer the newest that are committed.
    An `add` is committed when it returns, all of its rows at once (in pieces of an eighth of the
    writer's ring, if it has more). A draw is of what is committed when it begins. If one of its
    rows is overwritten while they are copied, it is drawn anew; so that this is rare, the oldest
    rows are left out, twice as many as were added during the draw before. A writer that is killed
    in an `add` leaves what it has committed; another may take its place, and goes on behind that.

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
        n_step: int = 1,
        gamma: float | None = None,
        track_env: bool = False,
        extra_columns: Mapping[str, Space] | None = None,
        seed: int | None = None,
        samples_per_insert: float | None = None,
        min_size_to_sample: int = 1,
        error_buffer: float | None = None,
        timeout: float = 60.0,
    ):
        rows: PlainOptions = {
            "n_step": n_step,
            "gamma": gamma,
            "track_env": track_env,
            "extra_columns": dict(extra_columns or {}),
        }
        spaces = observation_space, action_space
        self._arguments = capacity, spaces, num_writers, num_envs, rows
        options = self._options = _plan(*self._arguments)
        self.capacity, self.num_writers = int(capacity), options.num_rings
        self.num_envs = options.num_envs or None
        self.n_step, self.gamma = options.num_steps, options.gamma
        self.observation_space, self.action_space = observation_space, action_space
        self.device, self.timeout = _CPU, read_number("timeout", timeout, math.inf)
        least = check_count("min_size_to_sample", min_size_to_sample)
        if least > self.capacity:
            raise BufferMisuseError(
                f"min_size_to_sample is {least}, expected at most the capacity, {self.capacity}"
            )
        limits = _read_limits(samples_per_insert, least, error_buffer)
        name = type(self).__name__
        needed = shared_bytes(options)
        check_room(
            name, self.capacity, lambda rows: needed * rows // max(1, self.capacity), self.device
        )
        with allocation(name, needed, self.device, "use a smaller capacity", is_checked=True):
            self._memory = SharedMemory(options)
        words = self._words = self._memory.words
        words[MIN_SIZE], words[IS_LIMITED] = least, samples_per_insert is not None
        self._limits = self._memory.limits
        self._limits[:] = limits
        self._guard, self._pid = Guard(), os.getpid()
        with torch.inference_mode(False):
            storage = ReplayStorage(
                options, self.device, staged=False, rows=self._memory.rows, busy=self._guard.flag
            )
        batches = BatchOptions(min(self.n_step, options.capacity), self.gamma, has_weights=False)
        self._reader = CompiledReader(storage, batches, seed)
        self._column_names = column_names(options.layout, has_weights=False)
        self._spans = np.zeros((self.num_writers, 3), np.int64)
        self._margin = 0  # oldest rows of each ring that are not drawn, as writers come closer

    @staticmethod
    def nbytes_for(
        capacity: int,
        observation_space: Space,
        action_space: Space,
        *,
        num_writers: int,
        num_envs: int | None = None,
        **options: Unpack[PlainOptions],
    ) -> int:
        """Bytes the constructor would allocate with these arguments; allocates nothing."""
        spaces = observation_space, action_space
        return shared_bytes(_plan(capacity, spaces, num_writers, num_envs, options))

    # ---- What there is

    def __len__(self) -> int:
        """Number of transitions that can be drawn."""
        return int(self.counts.sum())

    @property
    def counts(self) -> np.ndarray:
        """int64 (num_writers,), transitions of each writer that can be drawn; a copy."""
        slots = self._slots()
        committed = slots[:, COMMITTED].copy()
        firsts = np.maximum(slots[:, BEGUN] - self._options.capacity, 0)
        return np.maximum(committed - firsts, 0)

    def _slots(self) -> np.ndarray:
        """int64 (num_writers, SLOT), the words of the writers; a view."""
        return self._words[SLOTS:][: SLOT * self.num_writers].reshape(-1, SLOT)

    @property
    def num_added(self) -> int:
        """Number of transitions ever added."""
        return int(count_rows(self._words))

    @property
    def num_sampled(self) -> int:
        """Number of transitions ever drawn."""
        return int(self._words[SAMPLED])

    @property
    def writer_pids(self) -> list[int]:
        """The process that each writer is in; 0 where there is none, or none any more."""
        return [self._memory.writer_pid(index) for index in range(self.num_writers)]

    def memory(self) -> dict[str, int]:
        """Bytes held now, by what they are for; batches not included."""
        return {
            "rows": self._memory.rows.nbytes,
            "state": shared_bytes(self._options) - self._memory.rows.nbytes,
        }

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(self.memory().values())

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} of {self.capacity} transitions, "
            f"{sum(map(bool, self.writer_pids))} of {self.num_writers} writers)"
        )

    # ---- Writers

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
        seconds = self.timeout if timeout is None else read_number("timeout", timeout, math.inf)
        return ReplayWriter(self._memory.address, self._arguments, index, seconds)

    def add(self, **columns: Any) -> NoReturn:
        """Refused: rows come from writers."""
        raise BufferMisuseError(
            "this buffer is filled by writers, each with rows of its own: hand another process "
            "buffer.writer(), and add(...) there"
        )

    # ---- Drawing

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
        return self._sample(batch_size, out, columns, timeout, lambda: False)

    def _sample(
        self,
        batch_size: int,
        out: ReplayBatch | None,
        columns: Iterable[str] | None,
        timeout: float | None,
        is_ending: Callable[[], bool],
    ) -> ReplayBatch:
        """Draw as `sample` does, but for no longer than until `is_ending`."""
        self._check_usable()  # also before the lock, which a fork may have left taken
        batch = self._read_batch(batch_size, out, columns)
        answer = self._fill(batch)
        if answer == DONE:
            return batch
        seconds = self.timeout if timeout is None else read_number("timeout", timeout, math.inf)
        deadline = time.monotonic() + seconds
        while (answer := self._fill(batch)) != DONE:
            if time.monotonic() >= deadline:
                raise TimeoutError(self._missing(seconds, answer))
            if is_ending():
                raise BufferMisuseError("this prefetch was closed")
            if answer == WAIT:
                time.sleep(_PAUSE)
        return batch

    def prefetch(
        self,
        batch_size: int,
        *,
        depth: int = 2,
        device: torch.device | str | None = None,
        columns: Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> Prefetch[ReplayBatch]:
        """Draw batches on a thread, ahead of the learner; close it, or the buffer, when done.

        A batch is of what was committed when it was asked for, or later: `depth` batches before it
        is returned, at the earliest. Batches that are drawn and not taken count for
        `samples_per_insert`.

        Args:
            batch_size: B.
            depth: Batches drawn ahead, 1 to 64.
            device: Where batches are copied to; None leaves them.
            columns: As in `sample`, like the next.
            timeout: Seconds that `next` waits for transitions before it raises TimeoutError, up to
                twice as long if the thread began to wait before it; None takes that of the buffer.

        Raises:
            BufferMisuseError: An argument does not fit, or another prefetch of the buffer is open.
        """
        self._check_usable()
        size = check_count("batch_size", batch_size, MAX_COUNT)
        chosen = self._read_columns(columns)
        names = None if chosen is None else (*chosen, "indices")
        seconds = self.timeout if timeout is None else read_number("timeout", timeout, math.inf)
        return Prefetch(
            lambda is_ending: self._sample(size, None, names, seconds, is_ending),
            lambda: self._reader.generator,
            self._guard,
            depth,
            device,
            timeout=2 * seconds + _DRAW_TIME,
            patience=seconds,
            is_ordered=False,
        )

    @exclusive
    def _fill(self, batch: ReplayBatch) -> int:
        """Draw whole rows and gather them.

        Returns:
            DONE; WAIT if there are too few; LOST if some were overwritten meanwhile, each time.
        """
        self._check_usable()
        words, spans, rows = self._words, self._spans, batch.memory.rows
        for _ in range(_TRIES):
            margin = self._margin
            if draw_whole(words, self._limits, self._reader.words, margin, spans, rows) != DONE:
                return WAIT
            self._reader.gather(batch)
            num_begun = find_overwritten(words, spans, rows)
            is_whole = num_begun >= 0
            # Leave out what the next draw would lose: as much again as was begun in this one.
            most = 2 * (num_begun if is_whole else max(-1 - num_begun, margin))
            self._margin = max(most, margin - 1 - margin // 8, 0)
            if is_whole:
                return DONE
        return LOST

    def _missing(self, seconds: float, answer: int) -> str:
        words, (ratio, least, _) = self._words, self._limits.tolist()
        added, sampled = self.num_added, self.num_sampled
        if answer == LOST:
            what = (
                f"rows were overwritten while they were copied, each time: {self.capacity} "
                "transitions are too few for how fast writers add; make the capacity larger, or "
                "set samples_per_insert"
            )
        elif not len(self) or added < words[MIN_SIZE]:
            what = f"{added} of min_size_to_sample={words[MIN_SIZE]} transitions were added"
        else:
            what = (
                f"{sampled} transitions were drawn of {added} added, and samples_per_insert="
                f"{ratio:g} allows no more: {math.ceil((least + sampled) / ratio)} have to be added"
            )
        pids = self.writer_pids
        there = ", ".join(f"{index}: {pid or 'none'}" for index, pid in enumerate(pids))
        return f"sample has waited {seconds:g} s: {what}; processes of the writers: {there}"

    def _check_open(self) -> None:
        if self._words[IS_CLOSED]:
            raise BufferMisuseError("the buffer was closed; make another one")

    def _check_usable(self) -> None:
        self._check_open()
        if self._pid != os.getpid():
            raise BufferMisuseError(
                "this process was forked from the one that draws from the buffer; hand it "
                "buffer.writer() to add transitions here"
            )

    # ---- The end

    def close(self) -> None:
        """Let writers end: their next `add` raises BufferClosedError. Twice does no harm.

        A buffer that is no longer referred to, or whose process ends, is closed, too; and so is its
        prefetch.
        """
        if self._pid != os.getpid():  # a fork, which may have been made in the middle of a draw
            self._memory.close()
            return
        ahead = self._guard.ahead
        try:
            if ahead is not None:
                end_prefetch(ahead, self._guard)
        finally:
            self._close()

    @exclusive
    def _close(self) -> None:
        self._memory.close()

    def __enter__(self) -> MultiprocessReplayBuffer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise BufferMisuseError(
            "a buffer that processes share is not copied, pickled or saved; hand other processes "
            "buffer.writer()"
        )

    def save(self, path: Any) -> NoReturn:
        """Refused: writers don't stop for it."""
        self.__reduce__()


class ReplayWriter:
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
        self._timeout, self._asked, self.index = timeout, index, index
        self._options: ReplayOptions | None = None
        self._guard, self._pid = Guard(), 0
        self._release: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayWriter, self._given

    def open(self) -> None:
        """Become one of the buffer's writers now.

        Raises:
            BufferMisuseError: All of them are in use, or the one that was asked for; or the memory
                was made by another version of this package.
            BufferClosedError: The buffer was closed, or its process has ended.
        """
        if self._pid == os.getpid():
            return
        address, arguments, *_ = self._given
        options = self._options = _plan(*arguments)
        memory = SharedMemory(options, address)
        index = memory.take_slot(self._asked)
        self._release = weakref.finalize(self, _give_back, memory, index, os.getpid())
        self._memory, self._words, self._limits = memory, memory.words, memory.limits
        self._slot, self._first = SLOTS + SLOT * index, index * options.capacity
        own = options._replace(num_rings=1)
        with torch.inference_mode(False):
            self._storage = ReplayStorage(own, _CPU, staged=False, rows=memory.ring(index))
        self._table, self._state = self._storage.table, self._storage.state
        self._piece = max(1, options.capacity // 8)
        fields = options.layout.fields
        self._link_at = fields["link"].offset if "link" in fields else -1
        is_plain = self._link_at < 0 and "env_ids" not in fields
        self._takes_arrays = is_plain and self._storage.takes_arrays
        self._go_on()
        self._first_env, self._next_look = index * own.num_envs, time.monotonic() + _LOOK_EVERY
        self.index, self._pid = index, os.getpid()

    def _go_on(self) -> None:
        """Continue behind what is committed; no episode goes on."""
        assert self._options is not None
        capacity, num_envs = self._options.capacity, self._options.num_envs
        total = int(self._words[self._slot + COMMITTED])
        state = self._state
        state[:] = at.new_state(self._options.layout, capacity, 1, num_envs)
        state[state[at.POINTERS]], state[state[at.TOTALS]] = total % capacity, total
        state[at.COUNT], state[at.ADDED] = min(total, capacity), total
        state[state[at.STOPPED] :][:num_envs] = 1

    @property
    def num_added(self) -> int:
        """Number of transitions ever added by this writer and those whose place it took."""
        return 0 if self._options is None else int(self._words[self._slot + COMMITTED])

    def add(
        self,
        *,
        obs: Any = None,
        next_obs: Any = None,
        actions: Any = None,
        rewards: Any = None,
        terminations: Any = None,
        truncations: Any = None,
        env_ids: Any = None,
        valid: Any = None,
        **extras: Any,
    ) -> None:
        """Add K transitions; all are copied. The arguments are those of `SharedReplayBuffer.add`.

        Waits while the learner has drawn too few of those that were added, if the buffer has a
        limit on samples per insert.

        Raises:
            BufferMisuseError: An argument does not fit, or there is no writer left. Nothing was
                added.
            BufferClosedError: The buffer was closed, or its process has ended.
            TimeoutError: The learner has drawn too little for so long. Nothing was added.
        """
        plain = obs, next_obs, actions, rewards, terminations, truncations
        self._add(plain, extras, env_ids, valid)

    @exclusive
    def _add(
        self, plain: tuple[Any, ...], extras: dict[str, Any], env_ids: Any, valid: Any
    ) -> None:
        self.open()
        if self._takes_arrays and valid is None and not extras:
            kinds = {array.__class__ for array in plain}
            are_ids = env_ids is None or (env_ids.__class__ is np.ndarray and env_ids.size)
            if kinds == _ONLY_ARRAYS and are_ids:
                shape = plain[3].shape  # of rewards
                is_small = len(shape) == 1 and 0 < shape[0] <= self._piece
                if is_small and self._add_at_once(shape[0], env_ids, plain):
                    return
        columns = {**dict(zip(_PLAIN, plain, strict=True)), **extras}
        given = {name: column for name, column in columns.items() if column is not None}
        self._add_checked(given, env_ids, valid)

    def _add_at_once(self, count: int, env_ids: Any, arrays: tuple[np.ndarray, ...]) -> bool:
        """The compiled way; whether the columns were for it."""
        words, slot, before = self._words, self._slot, int(self._words[self._slot + BEGUN])
        ids = _NO_IDS if env_ids is None else env_ids
        self._wait(count)
        try:
            if add_arrays(self._storage.addresses.words, id(ids), *map(id, arrays)):
                commit_rows(words, slot, count)
                return True
        except BaseException:  # an interrupt: the rows are written again
            self._go_on()
            raise
        words[slot + BEGUN] = before  # nothing was written
        return False

    def _wait(self, count: int) -> None:
        """Wait until rows may be added, and say that `count` will be written."""
        deadline = 0.0
        while True:
            now = time.monotonic()
            answer = begin_rows(self._words, self._limits, self._slot, count, True)
            if answer == CLOSED or now > self._next_look:
                self._next_look = now + _LOOK_EVERY
                self._memory.check_open()
            if answer == DONE:
                return
            deadline = deadline or now + self._timeout
            if now >= deadline:
                raise TimeoutError(
                    f"add has waited {self._timeout:g} s: the learner (process "
                    f"{self._memory.address.pid}) has drawn {int(self._words[SAMPLED])} "
                    f"transitions of {count_rows(self._words)} added, and samples_per_insert="
                    f"{self._limits[0]:g} asks for more before others are added"
                )
            time.sleep(min(_PAUSE, max(0.0, deadline - now)))

    def _add_checked(self, columns: Mapping[str, Any], env_ids: Any, valid: Any) -> None:
        assert self._options is not None
        layout, num_envs = self._options.layout, self._options.num_envs
        arrays, ids, gaps, cuts = read_transitions(columns, layout, env_ids, valid, num_envs, _CPU)
        stops = arrays["terminations"] | arrays["truncations"]
        stops = stops if gaps is None else stops | gaps
        if not len(ids):
            ids = np.arange(len(stops)) % max(1, num_envs)
        if len(stops):
            self._wait(0)
        if cuts is not None:
            mark_cut(self._state, cuts)
        for begin in range(0, len(stops), self._piece):
            piece = slice(begin, begin + self._piece)
            part = {path: array[piece] for path, array in arrays.items()}
            try:
                self._write(part, ids[piece], stops[piece])
            except BaseException:  # an interrupt: the rows are written again
                self._go_on()
                raise

    def _write(self, arrays: dict[str, np.ndarray], ids: np.ndarray, is_over: np.ndarray) -> None:
        """Write rows field by field, and commit them."""
        assert self._options is not None
        layout, count, link_at = self._options.layout, len(is_over), self._link_at
        begin_rows(self._words, self._limits, self._slot, count, False)
        rows, befores, envs = np.empty((3, count), np.int64)
        place_rows(self._state, ids, is_over, rows, befores, envs)
        if "env_ids" in layout.fields:
            arrays["env_ids"] = (envs + self._first_env).astype(np.int32)
        scatter_fields(self._table, rows, layout.places(), arrays)
        codes = (rows + 1 + self._first).astype(np.int32)
        if link_at >= 0:  # of the rows that were here before
            write_links(self._table, rows, np.full(count, -1), codes, link_at)
        commit_rows(self._words, self._slot, count)
        if link_at >= 0:
            write_links(self._table, rows, befores, codes, link_at)

    @exclusive
    def cut_episodes(self, env_ids: Any = None) -> None:
        """As `SharedReplayBuffer.cut_episodes`, of the environments of this writer."""
        self.open()
        assert self._options is not None
        num_envs = self._options.num_envs
        if num_envs:
            mark_cut(self._state, read_distinct_ids(env_ids, num_envs, _CPU))

    @exclusive
    def close(self) -> None:
        """Let another be this writer; what was added stays. Twice does no harm.

        The next `add` becomes one of the buffer's writers again.
        """
        if self._release is not None:
            self._release()
        self._pid, self._release = 0, None

    def __enter__(self) -> ReplayWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _give_back(memory: SharedMemory, index: int, pid: int) -> None:
    if os.getpid() == pid:  # not a fork of it
        memory.give_back_slot(index)


def _plan(
    capacity: Any,
    spaces: tuple[Space, Space],
    num_writers: Any,
    num_envs: int | None,
    rows: PlainOptions,
) -> ReplayOptions:
    """Check arguments; the options are those of rings, of which each writer has one."""
    if unknown := sorted(rows.keys() - PlainOptions.__annotations__):
        raise TypeError(f"a MultiprocessReplayBuffer takes no {unknown[0]!r}")
    whole = plan_replay(capacity, *spaces, num_envs=num_envs, **rows)
    rings = check_count("num_writers", num_writers, MAX_WRITERS)
    if whole.capacity % rings or whole.capacity < 2 * rings:
        fits = max(2, -(-whole.capacity // rings)) * rings
        raise BufferMisuseError(
            f"capacity is {whole.capacity}, expected a multiple of num_writers = {rings}, two "
            f"transitions for each at least; take {fits}"
        )
    return whole._replace(capacity=whole.capacity // rings, num_rings=rings)


def _read_limits(ratio: Any, least: int, error_buffer: Any) -> tuple[float, float, float]:
    """Samples per insert, and between which differences of the two none has to wait.

    The difference is that of `ratio` times the transitions added, and the transitions drawn.
    """
    if ratio is None:
        if error_buffer is not None:
            raise BufferMisuseError("error_buffer needs samples_per_insert, which it belongs to")
        return 0.0, -math.inf, math.inf
    ratio = read_number("samples_per_insert", ratio, math.inf)
    if not ratio:
        raise BufferMisuseError("samples_per_insert is 0, expected more, or None for no limit")
    offset = ratio * least
    if error_buffer is None:
        error_buffer = max(0.1 * offset, 100.0 * max(1.0, ratio))
    error_buffer = read_number("error_buffer", error_buffer, math.inf)
    if error_buffer < max(1.0, ratio):
        raise BufferMisuseError(
            f"error_buffer is {error_buffer:g}, expected at least {max(1.0, ratio):g}, so that "
            "either the learner or a writer can go on"
        )
    return ratio, offset - error_buffer, offset + error_buffer
