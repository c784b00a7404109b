"""Links between caller and workers: post, wait, complete.

There are two that do the same. `futex_link.FutexLink` calls compiled kernels; `PortableLink` is for
systems without futex (see `vecenv.machine.is_portable`) and for runs with the JIT switched off, and
pays a semaphore per command and per completion.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import sys
import tempfile
import threading
import time
import uuid
from typing import Any

import numpy as np

from vecenv.machine import is_portable
from vecenv.workers import layout as at
from vecenv.workers.layout import LINE, ControlLayout

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # Windows has none

__all__ = [
    "CALLER_SLICE_S",
    "FUTEX",
    "JOB",
    "THREAD_SLICE_S",
    "WORKER_SLICE_S",
    "Link",
    "PortableLink",
    "has_futex",
]

JOB = -2  # in place of an env id: the worker's main thread has given the lane a job

# Longest sleep before the caller looks after its workers, and before a worker looks around.
CALLER_SLICE_S = 0.05
WORKER_SLICE_S = 0.5
_LOCK_POLL_S = 0.0002
THREAD_SLICE_S = 60
# Number of the system call.
FUTEX = {"x86_64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98}.get(platform.machine(), -1)


class Link:
    """What caller and workers do with the control words; one object per process.

    Attributes:
        words: The control words, int64.
        layout: Where they are.
        posts_at_once: Whether `post` and `push` are done or not, even if an interrupt comes.
    """

    words: np.ndarray
    layout: ControlLayout
    posts_at_once: bool
    post: Any  # (first, last, opcode, slot, flags, step, wait_line)
    wait_count: Any  # (line, target) -> bool, after one sleep at the latest
    wait_done: Any  # (line, first, last) -> status bits or -1
    post_and_wait: Any  # (last, slot, flags, step, opcode) -> status bits or -1
    wait_command: Any  # (command line, sequence seen, takes ids) -> 0, 1 (command) or 2 (queue)
    complete: Any  # (command line, status, form, begin ns, end ns)
    push: Any  # (env ids, lanes by env id)
    pop: Any  # (worker) -> env id or -1, for a worker of one lane
    give_jobs: Any  # (lanes' lines, int64): wakes their threads for one more job
    # For the thread of a lane, after one sleep at the latest: env id, -1 (nothing) or JOB.
    take: Any  # (lane's line, jobs seen)
    publish_and_take: Any  # (command line, lane's line, jobs seen, leaves, env id, status, form)
    publish: Any  # (command line, leaves, env id, status, form) -> position
    read_ready: Any  # (head, env ids to fill) -> 4 rows + 1 (status bits) + 2 (infos)
    find_holder: Any  # () -> pid of the process that others wait for to write a row, or -1

    def attach(self, words: np.ndarray, *, is_caller: bool, may_spin: bool, file: int = -1) -> None:
        """Bind this process's end to the control words, which are mapped from `file`."""
        raise NotImplementedError


def has_futex() -> bool:
    """Whether waits can be compiled: Linux, a known processor, Numba's compiler not off."""
    jit_is_off = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
    return not is_portable() and FUTEX >= 0 and sys.byteorder == "little" and not jit_is_off


def _lock_file(file: int) -> None:
    """Take the system's lock on a file for this process, or raise OSError: another one has it."""
    if fcntl is not None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        import msvcrt

        os.lseek(file, 0, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)


def _unlock_file(file: int) -> None:
    """Let go of the lock, if this process has it."""
    if fcntl is not None:
        fcntl.lockf(file, fcntl.LOCK_UN)
        return
    import msvcrt

    with contextlib.suppress(OSError):  # it was not held
        os.lseek(file, 0, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)


class _FileLock:
    """A lock between processes on claims and queues, which have several writers.

    The system lets go of it when the process that holds it ends, however that ends: a worker that
    is killed while it holds the lock blocks no other. One that is stopped does, so the control
    words name the holder.

    Attributes:
        may_be_held: Whether this process may hold it: Ctrl-C may come just before it lets go.
    """

    def __init__(self, file: int, words: np.ndarray, *, has_threads: bool) -> None:
        self._file, self._words, self._pid = file, words, os.getpid()
        self.may_be_held = False
        self._threads = threading.Lock() if has_threads else contextlib.nullcontext()

    def __enter__(self) -> None:
        self._threads.__enter__()
        try:
            self.may_be_held = True
            self._wait()
            self._words[at.CLAIMS_LINE * LINE + at.LOCK_HOLDER] = self._pid
        except BaseException:  # Ctrl-C, perhaps when it had just been taken
            self.__exit__()
            raise

    def _wait(self) -> None:
        if fcntl is not None:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            return
        while True:
            with contextlib.suppress(OSError):
                _lock_file(self._file)
                return
            time.sleep(_LOCK_POLL_S)

    def __exit__(self, *_: object) -> None:
        _unlock_file(self._file)
        self._threads.__exit__(None, None, None)

    def acquire(self, timeout: float) -> bool:
        """Take it within some seconds; return whether that was possible."""
        deadline = time.monotonic() + timeout
        self.may_be_held = True
        while True:
            try:
                _lock_file(self._file)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if time.monotonic() > deadline:
                    return False
                time.sleep(_LOCK_POLL_S)
            else:
                return True

    def release(self) -> None:
        """Let go of it if it is held, in a process that has no threads that take it."""
        _unlock_file(self._file)
        self.may_be_held = False


class PortableLink(Link):
    """Semaphores and plain Python: correct anywhere, slower.

    A semaphore orders memory, so words written before a release are seen after the acquire.
    """

    posts_at_once = False

    def __init__(self, layout: ControlLayout, context: Any) -> None:
        self.layout = layout
        self._bells = [context.Semaphore(0) for _ in range(layout.num_workers)]
        self._caller_bell = context.Semaphore(0)
        num_threads = layout.num_workers * layout.lanes if layout.lanes > 1 else 0
        self._lane_bells = [context.Semaphore(0) for _ in range(num_threads)]
        # Where the arena has no file: each process opens this one, the last one's end deletes it.
        name = f"vecenv-{uuid.uuid4().hex}.lock"
        self._lock_path = os.path.join(tempfile.gettempdir(), name) if fcntl is None else ""

    def attach(self, words: np.ndarray, *, is_caller: bool, may_spin: bool, file: int = -1) -> None:
        """See `Link`."""
        self.words = words
        self._commands = [self.layout.command(k) for k in range(self.layout.num_workers)]
        if self._lock_path:
            temporary: int = os.O_TEMPORARY  # type: ignore[attr-defined]  # in Windows
            file = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | temporary)
        self._lock = _FileLock(file, words, has_threads=not is_caller)
        self.post, self.wait_count, self.wait_done = self._post, self._wait_count, self._wait_done
        self.post_and_wait, self.wait_command = self._post_and_wait, self._wait_command
        self.complete, self.push = self._complete, self._push
        self.pop, self.take, self.give_jobs = self._pop, self._take, self._give_jobs
        self.publish_and_take = self._publish_and_take
        self.publish, self.read_ready = self._publish, self._read_ready
        self.find_holder = self._find_holder

    def __getstate__(self) -> dict[str, Any]:
        kept = ("layout", "_bells", "_caller_bell", "_lane_bells", "_lock_path")
        return {name: vars(self)[name] for name in kept}

    def _unlock(self) -> None:
        """Let go of the lock, at the beginning of the caller's calls."""
        if self._lock.may_be_held:
            self._lock.release()

    def _post(self, first, last, opcode, slot, flags, step, wait_line):  # noqa: PLR0917  # all from one caller, in this order
        self._unlock()
        for worker in range(first, last):
            command = self._commands[worker]
            self.words[command + at.OPCODE : command + at.WAIT_LINE + 1] = (
                opcode,
                slot,
                flags,
                step,
                wait_line,
            )
            self.words[command + at.SEQUENCE] += 1
            self._bells[worker].release()

    def _wait_count(self, line: int, target: int) -> bool:
        self._unlock()
        while self._caller_bell.acquire(block=False):
            pass
        count = line * LINE + at.COUNT
        if self.words[count] < target:
            self._caller_bell.acquire(timeout=CALLER_SLICE_S)
        return bool(self.words[count] >= target)

    def _wait_done(self, line: int, first: int, last: int) -> int:
        self._unlock()
        while self._caller_bell.acquire(block=False):
            pass
        if not self._are_done(first, last):
            self._caller_bell.acquire(timeout=CALLER_SLICE_S)
            if not self._are_done(first, last):
                return -1
        found = 0
        for command in self._commands[first:last]:
            found |= int(self.words[command + LINE + at.STATUS])
        return found

    def _are_done(self, first: int, last: int) -> bool:
        return all(
            self.words[command + at.SEQUENCE] == self.words[command + LINE + at.DONE_SEQUENCE]
            for command in self._commands[first:last]
        )

    def _post_and_wait(self, last, slot, flags, step, opcode):
        self._post(0, last, opcode, slot, flags, step, at.COMMANDS)
        return self._wait_done(at.COMMANDS, 0, last)

    def _look(self, command: int, done: int, takes_ids: bool) -> int:
        if self.words[command + at.SEQUENCE] != done:
            return 1
        has_ids = self.words[command + at.QUEUE_TAIL] != self.words[command + LINE + at.QUEUE_HEAD]
        return 2 if takes_ids and has_ids else 0

    def _wait_command(self, command: int, done: int, takes_ids: bool) -> int:
        found = self._look(command, done, takes_ids)
        if not found:
            worker = (command // LINE - at.FIRST_WORKER_LINE) // 2
            self._bells[worker].acquire(timeout=WORKER_SLICE_S)
            found = self._look(command, done, takes_ids)
        return found

    def _complete(self, command, status, form, begin_ns, end_ns):
        completion = command + LINE
        self.words[completion + at.STATUS] = status | form << at.STATUS_BITS
        self.words[completion + at.BEGIN_NS] = begin_ns
        self.words[completion + at.END_NS] = end_ns
        self.words[completion + at.DONE_SEQUENCE] = self.words[command + at.SEQUENCE]
        self._caller_bell.release()

    def _push(self, env_ids: np.ndarray, owners: np.ndarray) -> None:
        self._unlock()
        has_threads = self.layout.lanes > 1
        for env_id, lane in zip(env_ids.tolist(), owners[env_ids].tolist(), strict=True):
            queue = self.layout.queue(lane)
            tail = (
                queue + at.LANE_TAIL if has_threads else self.layout.command(lane) + at.QUEUE_TAIL
            )
            self.words[queue + LINE + self.words[tail] % self.layout.queue_rows] = env_id
            self.words[tail] += 1
            self.words[at.POSTED_LINE * LINE + at.ROWS] += 1
            (self._lane_bells if has_threads else self._bells)[lane].release()

    def _pop(self, worker: int) -> int:
        command = self._commands[worker]
        head = self.words[command + LINE + at.QUEUE_HEAD]
        with self._lock:  # which orders memory: a tail that is seen was written after its id
            if self.words[command + at.QUEUE_TAIL] == head:
                return -1
        place = self.layout.queue(worker) + LINE + head % self.layout.queue_rows
        env_id = int(self.words[place])
        self.words[command + LINE + at.QUEUE_HEAD] = head + 1
        return env_id

    def _lane_bell(self, lane: int) -> Any:
        return self._lane_bells[(lane - self.layout.queues) // (LINE + self.layout.queue_rows)]

    def _give_jobs(self, lanes: np.ndarray) -> None:
        for lane in lanes.tolist():
            self.words[lane + at.LANE_JOBS] += 1
            self._lane_bell(lane).release()

    def _take(self, lane: int, jobs: int) -> int:
        found = self._look_lane(lane, jobs)
        if found == -1:
            self.words[lane + at.LANE_CURRENT] = 0
            self._lane_bell(lane).acquire(timeout=THREAD_SLICE_S)
            found = self._look_lane(lane, jobs)
        return found

    def _look_lane(self, lane: int, jobs: int) -> int:
        if self.words[lane + at.LANE_JOBS] != jobs:
            return JOB
        head = self.words[lane + at.LANE_HEAD]
        with self._lock:
            if self.words[lane + at.LANE_TAIL] == head:
                return -1
        env_id = int(self.words[lane + LINE + head % self.layout.queue_rows])
        self.words[lane + at.LANE_HEAD] = head + 1
        self.words[lane + at.LANE_CURRENT] = env_id + 1
        return env_id

    def _publish_and_take(self, command, lane, jobs, leaves, env_id, status, form):  # noqa: PLR0917  # all from one caller, in this order
        self._publish(command, leaves, env_id, status, form)
        return self._take(lane, jobs)

    def _publish(self, command, leaves, env_id, status, form):
        import ctypes

        with self._lock:
            position = int(self.words[at.CLAIMS_LINE * LINE])
            row = position % self.layout.ring_rows
            base = self.words.ctypes.data
            for source, target, size in leaves.tolist():
                ctypes.memmove(base + target + row * size, base + source + env_id * size, size)
            place = self.layout.ring + row * at.RING_WORDS
            self.words[place + 1 : place + at.RING_WORDS] = env_id, status, form
            self.words[place] = position + 1
            # Last: if Ctrl-C or the worker's end comes before, the next row is written here.
            self.words[at.CLAIMS_LINE * LINE] += 1
            self.words[at.ROWS * LINE + at.COUNT] += 1
        self._caller_bell.release()
        return position

    def _find_holder(self) -> int:
        if self._lock.acquire(0.0):
            self._lock.release()
            return -1
        return int(self.words[at.CLAIMS_LINE * LINE + at.LOCK_HOLDER])

    def _read_ready(self, head: int, env_ids: np.ndarray) -> int:
        count = status = form = 0
        try:
            if not self._lock.acquire(CALLER_SLICE_S):
                return 0  # its holder does not go on: the caller looks around, or its time is up
            # What is there has been written before the lock was let go.
            ready = int(self.words[at.CLAIMS_LINE * LINE]) - head
        finally:  # Ctrl-C may come when it has just been taken
            self._lock.release()
        while count < min(ready, self.layout.ring_rows):
            place = self.layout.ring + (head + count) % self.layout.ring_rows * at.RING_WORDS
            sequence, env_id, row_status, row_form = self.words[place : place + 4].tolist()
            if sequence != head + count + 1:
                break
            env_ids[count] = env_id
            status |= row_status
            form |= row_form
            count += 1
        return 4 * count + bool(status) + 2 * bool(form)
