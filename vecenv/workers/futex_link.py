"""The link of Linux: commands, completions and first-ready rows, with waits that are compiled.

All kernels work on the control words of `layout` (int64, C-contiguous, shared by caller and
workers). Atomic accesses are sequentially consistent, which the hand-over of "I sleep" flags needs:
the waiting side sets the flag, then looks once more, then sleeps; the posting side posts, then
looks at the flag. Plain writes before an atomic store are seen by a reader of the stored value, on
x86 and on arm64.

Waits return after one sleep at the latest, so that Python can handle signals and check that the
other side lives. `scratch` is int64 (6,), private to the process: spins now, most spins, the time
(s, ns) of the longest sleep, waits to go until longer spins are tried again, and that number's last
initial value.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit, types

from vecenv.core.atomics import exchange, fetch_add, load, pause, store
from vecenv.core.interrupts import interrupts_later
from vecenv.fingerprint import cached_njit
from vecenv.workers.layout import (
    BEGIN_NS,
    BELL,
    CALLER_ASLEEP,
    CLAIMS_LINE,
    COUNT,
    DONE_SEQUENCE,
    END_NS,
    FIRST_WORKER_LINE,
    FLAGS,
    LANE_ASLEEP,
    LANE_BELL,
    LANE_CURRENT,
    LANE_HEAD,
    LANE_JOBS,
    LANE_TAIL,
    LINE,
    OPCODE,
    POSTED_LINE,
    QUEUE_HEAD,
    QUEUE_TAIL,
    RING_WORDS,
    ROW_ENV,
    ROW_FORM,
    ROW_SEQUENCE,
    ROW_STATUS,
    ROWS,
    SEQUENCE,
    SLOT,
    STATUS,
    STATUS_BITS,
    STEP,
    WAIT_LINE,
    WANTED,
    WORKER_ASLEEP,
    WRITING,
    ControlLayout,
)
from vecenv.workers.links import CALLER_SLICE_S, FUTEX, THREAD_SLICE_S, WORKER_SLICE_S, Link

__all__ = ["FutexLink"]

FUTEX_WAIT, FUTEX_WAKE = 0, 1  # not the private kind: the words are shared between processes
# About 200 us, which is longer than it takes both sides to wake up; with less, each may find the
# other asleep again and again.
_MOST_SPINS = 8000
_FEWEST_SPINS = 100
_MOST_PATIENCE = 256

system_call = types.ExternalFunction(
    "syscall",
    types.int64(
        types.int64, types.int64, types.int64, types.int64, types.int64, types.int64, types.int64
    ),
)
copy_bytes = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))


@njit
def wake(words, index):
    """Wake one of the sleepers on `words[index]`."""
    system_call(FUTEX, words.ctypes.data + index * 8, FUTEX_WAKE, 1, 0, 0, 0)


@njit
def sleep_on(words, index, seen, scratch):
    """Sleep while the low half of `words[index]` is that of `seen`, at most as `scratch` says."""
    address = words.ctypes.data + index * 8
    system_call(FUTEX, address, FUTEX_WAIT, seen & 0xFFFFFFFF, scratch.ctypes.data + 16, 0, 0)


@njit
def note_hit(scratch):
    """Spin for as long as allowed next time: waits that end in time cost nothing."""
    scratch[0] = scratch[1]
    scratch[5] = 1


@njit
def note_miss(scratch):
    """Spin briefly for a while, ever longer while even the longest spins are in vain.

    They are if the wait is long, or if the other side waits for our core.
    """
    if scratch[4] > 0:
        scratch[4] -= 1
        if scratch[4] == 0:
            scratch[0] = scratch[1]
    else:
        scratch[0] = min(_FEWEST_SPINS, scratch[1])
        scratch[5] = min(2 * scratch[5], _MOST_PATIENCE)
        scratch[4] = scratch[5]


@njit
def ring_bell(words, command):
    """Tell a worker that its command line or its queue has changed."""
    fetch_add(words, command + BELL, 1)
    if (
        load(words, command + LINE + WORKER_ASLEEP) == 1
        and exchange(words, command + LINE + WORKER_ASLEEP, 0) == 1
    ):
        wake(words, command + BELL)


@njit
def post(words, first, last, opcode, slot, flags, step, wait_line):  # noqa: PLR0917  # a kernel's
    """Give the workers first, ..., last - 1 one command each, and count them."""
    words[POSTED_LINE * LINE + wait_line] += last - first
    for worker in range(first, last):
        command = (FIRST_WORKER_LINE + 2 * worker) * LINE
        words[command + OPCODE] = opcode
        words[command + SLOT] = slot
        words[command + FLAGS] = flags
        words[command + STEP] = step
        words[command + WAIT_LINE] = wait_line
        store(words, command + SEQUENCE, words[command + SEQUENCE] + 1)
        ring_bell(words, command)


@njit
def wait_count(words, scratch, line, target):
    """Wait, spinning and then sleeping once, until the count of a caller's line reaches target.

    Returns:
        Whether it has.
    """
    count = line * LINE + COUNT
    for _ in range(scratch[0]):
        if load(words, count) >= target:
            note_hit(scratch)
            return True
        pause()
    words[line * LINE + WANTED] = target
    store(words, line * LINE + CALLER_ASLEEP, 1)
    now = load(words, count)
    if now < target:
        sleep_on(words, count, now, scratch)
        note_miss(scratch)
    store(words, line * LINE + CALLER_ASLEEP, 0)
    return load(words, count) >= target


@njit
def add_count(words, line):
    """Count a completion on a caller's line; wake the caller if that is what it sleeps for."""
    count = line * LINE + COUNT
    now = fetch_add(words, count, 1) + 1
    asleep = line * LINE + CALLER_ASLEEP
    if (
        load(words, asleep) == 1
        and now >= words[line * LINE + WANTED]
        and exchange(words, asleep, 0) == 1
    ):
        wake(words, count)


@njit
def statuses(words, first, last):
    """Return the bits that any of these workers' last completions have set."""
    found = 0
    for worker in range(first, last):
        completion = (FIRST_WORKER_LINE + 2 * worker) * LINE + LINE
        found |= words[completion + STATUS]
    return found


@njit
def wait_done(words, scratch, line, first, last):
    """Wait for a line's commands as `wait_count` does; return the workers' status bits, or -1."""
    if not wait_count(words, scratch, line, words[POSTED_LINE * LINE + line]):
        return -1
    return statuses(words, first, last)


@njit
def post_and_wait(words, scratch, last, slot, flags, step, opcode):  # noqa: PLR0917  # a kernel's
    """Do what `post` and `wait_done` on line 0 do, for workers 0, ..., last - 1."""
    post(words, 0, last, opcode, slot, flags, step, 0)
    return wait_done(words, scratch, 0, 0, last)


@njit
def look(words, command, done, takes_ids):
    """Return 1 if a worker has a command after `done`, 2 if it is to take queued ids, or 0."""
    if load(words, command + SEQUENCE) != done:
        return 1
    if takes_ids and load(words, command + QUEUE_TAIL) != load(words, command + LINE + QUEUE_HEAD):
        return 2
    return 0


@njit
def wait_command(words, scratch, command, done, takes_ids):
    """Wait, spinning and then sleeping once, for what `look` looks for; return that."""
    for _ in range(scratch[0]):
        found = look(words, command, done, takes_ids)
        if found:
            note_hit(scratch)
            return found
        pause()
    bell = load(words, command + BELL)
    store(words, command + LINE + WORKER_ASLEEP, 1)
    found = look(words, command, done, takes_ids)
    if found == 0:
        sleep_on(words, command + BELL, bell, scratch)
        note_miss(scratch)
        found = look(words, command, done, takes_ids)
    store(words, command + LINE + WORKER_ASLEEP, 0)
    return found


@njit
def complete(words, command, status, form, begin_ns, end_ns):
    """Report that the worker has carried out the command in its line."""
    completion = command + LINE
    words[completion + STATUS] = status | form << STATUS_BITS
    words[completion + BEGIN_NS] = begin_ns
    words[completion + END_NS] = end_ns
    store(words, completion + DONE_SEQUENCE, words[command + SEQUENCE])
    add_count(words, words[command + WAIT_LINE])


@njit
def push(words, env_ids, owners, queues, queue_rows):
    """Queue env ids int64 (B,) at their owners int64 (num_envs,), workers; then tell these."""
    for k in range(env_ids.shape[0]):
        worker = owners[env_ids[k]]
        command = (FIRST_WORKER_LINE + 2 * worker) * LINE
        queue = queues + worker * (LINE + queue_rows)
        tail = words[command + QUEUE_TAIL]
        words[queue + LINE + tail % queue_rows] = env_ids[k]
        store(words, command + QUEUE_TAIL, tail + 1)
    words[POSTED_LINE * LINE + ROWS] += env_ids.shape[0]
    last = -1
    for k in range(env_ids.shape[0]):
        worker = owners[env_ids[k]]
        if worker != last:
            ring_bell(words, (FIRST_WORKER_LINE + 2 * worker) * LINE)
            last = worker


@njit
def pop(words, worker, queues, queue_rows):
    """Take the oldest env id out of a worker's queue, or return -1."""
    command = (FIRST_WORKER_LINE + 2 * worker) * LINE
    queue = queues + worker * (LINE + queue_rows)
    head = words[command + LINE + QUEUE_HEAD]
    if load(words, command + QUEUE_TAIL) == head:
        return -1
    env_id = words[queue + LINE + head % queue_rows]
    store(words, command + LINE + QUEUE_HEAD, head + 1)
    return env_id


@njit
def ring_lane(words, lane):
    """Tell the thread of a lane that its queue or its jobs have changed."""
    fetch_add(words, lane + LANE_BELL, 1)
    if load(words, lane + LANE_ASLEEP) == 1 and exchange(words, lane + LANE_ASLEEP, 0) == 1:
        wake(words, lane + LANE_BELL)


@njit
def push_lanes(words, env_ids, owners, queues, queue_rows):
    """Queue env ids int64 (B,) at their owners int64 (num_envs,), lanes, and tell each."""
    words[POSTED_LINE * LINE + ROWS] += env_ids.shape[0]
    for k in range(env_ids.shape[0]):
        lane = queues + owners[env_ids[k]] * (LINE + queue_rows)
        tail = words[lane + LANE_TAIL]
        words[lane + LINE + tail % queue_rows] = env_ids[k]
        store(words, lane + LANE_TAIL, tail + 1)
        ring_lane(words, lane)


@njit
def give_jobs(words, lanes):
    """Count a job for each thread whose line begins at a word of `lanes`, int64 (K,); tell it."""
    for k in range(lanes.shape[0]):
        fetch_add(words, lanes[k] + LANE_JOBS, 1)
        ring_lane(words, lanes[k])


@njit
def look_lane(words, lane, jobs, queue_rows):
    """Return a job (-2) if there are more than `jobs`, or the oldest env id, or -1."""
    if load(words, lane + LANE_JOBS) != jobs:
        return -2
    head = words[lane + LANE_HEAD]
    if load(words, lane + LANE_TAIL) == head:
        return -1
    env_id = words[lane + LINE + head % queue_rows]
    store(words, lane + LANE_HEAD, head + 1)
    words[lane + LANE_CURRENT] = env_id + 1
    return env_id


@njit
def take(words, scratch, queue_rows, lane, jobs):
    """Return what `look_lane` does, for the lane's thread, after one sleep if that is nothing."""
    found = look_lane(words, lane, jobs, queue_rows)
    if found == -1:
        words[lane + LANE_CURRENT] = 0
        bell = load(words, lane + LANE_BELL)
        store(words, lane + LANE_ASLEEP, 1)
        found = look_lane(words, lane, jobs, queue_rows)
        if found == -1:
            sleep_on(words, lane + LANE_BELL, bell, scratch)
            found = look_lane(words, lane, jobs, queue_rows)
        store(words, lane + LANE_ASLEEP, 0)
    return found


@njit
def publish(words, ring, ring_rows, command, leaves, env_id, status, form):  # noqa: PLR0917  # a kernel's
    """Copy an env's results into the next row of the ring and count it.

    Args:
        words: Control words; the mapping begins with them.
        ring: First word of the ring's rows.
        ring_rows: Their number.
        command: The worker's command line.
        leaves: int64 (L, 3): offset of the array with a row per env, of the ring's, row bytes.
        env_id: Whose results these are.
        status: Status bits.
        form: Form of the infos.

    Returns:
        Number of the row, counted from the first ever.
    """
    fetch_add(words, command + LINE + WRITING, 1)
    position = fetch_add(words, CLAIMS_LINE * LINE, 1)
    row = position % ring_rows
    base = words.ctypes.data
    for k in range(leaves.shape[0]):
        size = leaves[k, 2]
        copy_bytes(base + leaves[k, 1] + row * size, base + leaves[k, 0] + env_id * size, size)
    place = ring + row * RING_WORDS
    words[place + ROW_ENV] = env_id
    words[place + ROW_STATUS] = status
    words[place + ROW_FORM] = form
    store(words, place + ROW_SEQUENCE, position + 1)
    fetch_add(words, command + LINE + WRITING, -1)
    add_count(words, ROWS)
    return position


@njit
def publish_and_take(  # noqa: PLR0917  # a kernel's
    words, scratch, queue_rows, ring, ring_rows, command, lane, jobs, leaves, env_id, status, form
):
    """Do what `publish` and `take` do, for a thread that goes from env to env."""
    publish(words, ring, ring_rows, command, leaves, env_id, status, form)
    return take(words, scratch, queue_rows, lane, jobs)


@njit
def read_ready(words, ring, ring_rows, head, env_ids):
    """Read the env ids of the rows from position `head` on that are there without a gap.

    Args:
        words: Control words.
        ring: First word of the ring's rows.
        ring_rows: Their number.
        head: Position of the first row.
        env_ids: int64 (ring_rows,), written from its beginning.

    Returns:
        Four times the number of rows, plus 1 if one has status bits, plus 2 if one has infos.
    """
    count = status = form = 0
    while count < ring_rows:
        place = ring + (head + count) % ring_rows * RING_WORDS
        if load(words, place + ROW_SEQUENCE) != head + count + 1:
            break
        env_ids[count] = words[place + ROW_ENV]
        status |= words[place + ROW_STATUS]
        form |= words[place + ROW_FORM]
        count += 1
    return 4 * count + (status != 0) + 2 * (form != 0)


# What processes call, kept on disk by what it depends on. What may sleep, or wake many, lets other
# threads of its process run.
_compiled = SimpleNamespace(
    **{
        kernel.__name__: cached_njit(kernel)
        for kernel in (complete, pop, post, publish, push, push_lanes, read_ready)
    },
    **{
        kernel.__name__: cached_njit(kernel, nogil=True)
        for kernel in (
            give_jobs,
            post_and_wait,
            publish_and_take,
            take,
            wait_command,
            wait_count,
            wait_done,
        )
    },
)


class FutexLink(Link):
    """Compiled waits: spin briefly where there is a core for it, then sleep on a futex."""

    posts_at_once = True

    def __init__(self, layout: ControlLayout) -> None:
        self.layout = layout

    def attach(self, words: np.ndarray, *, is_caller: bool, may_spin: bool, file: int = -1) -> None:
        """See `Link`."""
        self.words = words
        spins = _MOST_SPINS if may_spin else 0
        slice_ns = int((CALLER_SLICE_S if is_caller else WORKER_SLICE_S) * 1e9)
        scratch = np.array([spins, spins, *divmod(slice_ns, 10**9), 0, 1], dtype=np.int64)
        self._scratch = scratch
        queue = (self.layout.queues, self.layout.queue_rows)
        ring = (self.layout.ring, self.layout.ring_rows)
        self.post = partial(_compiled.post, words)
        self.wait_count = partial(_compiled.wait_count, words, scratch)
        self.wait_done = partial(_compiled.wait_done, words, scratch)
        self.post_and_wait = partial(_compiled.post_and_wait, words, scratch)
        self.wait_command = partial(_compiled.wait_command, words, scratch)
        self.complete = partial(_compiled.complete, words)
        push = _compiled.push if self.layout.lanes == 1 else _compiled.push_lanes
        self.push = lambda env_ids, owners: push(words, env_ids, owners, *queue)
        self.pop = lambda worker: _compiled.pop(words, worker, *queue)
        threads_scratch = np.array([0, 0, THREAD_SLICE_S, 0, 0, 1, 0], dtype=np.int64)
        self.give_jobs = partial(_compiled.give_jobs, words)
        self.take = partial(_compiled.take, words, threads_scratch, queue[1])
        self.publish_and_take = partial(
            _compiled.publish_and_take, words, threads_scratch, queue[1], *ring
        )
        self.publish = partial(_compiled.publish, words, *ring)
        self.read_ready = partial(_compiled.read_ready, words, *ring)
        self.find_holder = lambda: -1  # no worker waits for another to write
        if is_caller:
            with interrupts_later():
                self._warm_up()

    def _warm_up(self) -> None:
        """Compile, or load from the cache, all that is called, so that forked workers have it.

        Nothing is left for the first step, where Ctrl-C might come in the midst of that.
        """
        own = FutexLink(self.layout)
        own.attach(np.zeros(self.layout.num_words, np.int64), is_caller=False, may_spin=False)
        own._scratch[2:4] = 0, 1
        own.wait_command(own.layout.command(0), 0, True)
        own.post(0, 1, 0, 0, 0, 0, 0)
        own.complete(own.layout.command(0), 0, 0, 0, 0)
        own.wait_done(0, 0, 1)
        own.wait_count(0, 0)
        own.post_and_wait(1, 0, 0, 0, 0)
        own.read_ready(0, np.zeros(own.layout.ring_rows, np.int64))
        own.push(np.zeros(1, np.int64), np.zeros(1, np.int64))
        if self.layout.lanes == 1:
            own.pop(0)
        else:
            lane = own.layout.queue(0)
            own.take(lane, 0)
            own.give_jobs(np.array([lane]))
            row = np.zeros((0, 3), np.int64), 0, 0, 0
            own.publish_and_take(own.layout.command(0), lane, 0, *row)
        own.publish(own.layout.command(0), np.zeros((0, 3), np.int64), 0, 0, 0)

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout}
