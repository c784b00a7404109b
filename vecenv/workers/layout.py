"""Where everything is in a pool's shared memory: pure arithmetic, no processes, no files.

The control words (int64) come first in the mapping. They are grouped in cache lines of eight words,
each with one writer where that matters:

- three lines on which the caller waits: two for commands (one per half), one for rows;
- one line with the count of ring rows that have been claimed;
- one line with what the caller has asked for: commands by the line that it waits on, and env ids
  that it has queued. It is written where the commands are, so that no interrupt comes between;
- per worker a command line, written by the caller, and a completion line, written by the worker;
- per lane a line and a queue of env ids for first-ready stepping. A lane is a thread that owns some
  envs of a worker; a worker of one lane has no thread but its main one, and keeps the ends of its
  queue in its command and completion lines;
- per ring row four words that say whose results are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

__all__ = ["ControlLayout", "Leaf"]

LINE = 8  # words in a cache line
WORD_BYTES = 8

# Lines on which the caller waits, and their words.
COMMANDS, OTHER_HALF, ROWS = 0, 1, 2
COUNT, WANTED, CALLER_ASLEEP = 0, 1, 2
# Word 0 of this line counts the ring rows claimed; word LOCK_HOLDER is the pid of the process that
# holds the lock of `links.PortableLink`, or held it last.
CLAIMS_LINE, LOCK_HOLDER = 3, 1
# Words COMMANDS and OTHER_HALF of this line count the commands that report there, word ROWS the
# env ids that have been queued.
POSTED_LINE = 4
FIRST_WORKER_LINE = 5
# Words of a command line. BELL is what a sleeping worker watches: it changes with every command and
# every push to the queue.
BELL, SEQUENCE, OPCODE, SLOT, FLAGS, STEP, WAIT_LINE, QUEUE_TAIL = range(8)
# Words of a completion line.
# STATUS holds the status bits and, above them, the form of the infos; WRITING counts the ring rows
# that the worker has claimed and not finished.
DONE_SEQUENCE, STATUS, WRITING, WORKER_ASLEEP, QUEUE_HEAD, BEGIN_NS, END_NS, CURRENT = range(8)
# Words of the line before a queue, for a thread that takes from it: what it watches in its sleep
# (changes with every id and every job), the ends of the queue, whether it sleeps, how many jobs the
# worker's main thread has given it, and the env that it is at (plus one; 0 for none).
LANE_BELL, LANE_TAIL, LANE_HEAD, LANE_ASLEEP, LANE_JOBS, LANE_CURRENT = range(6)
# Words of a ring row.
RING_WORDS = 4
ROW_SEQUENCE, ROW_ENV, ROW_STATUS, ROW_FORM = range(RING_WORDS)

# Opcodes.
OP_STEP, OP_MESSAGE = 1, 2
# Bits of a command's flags.
FLAG_MESSAGE = 1  # a message with actions or column definitions is in the pipe
# Bits of a status word.
HAS_MESSAGE, HAS_ERROR = 1, 2
STATUS_BITS = 4  # what is above them is the form of the infos


class Leaf(NamedTuple):
    """An array in the mapping.

    Attributes:
        offset: Bytes from the beginning of the mapping.
        shape: Of the whole array; axis 0 is envs.
        dtype: As `numpy.dtype.str`, which pickles small.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Size of one env's row."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * np.dtype(self.dtype).itemsize


class ControlLayout(NamedTuple):
    """Places of the control words, all in words from the beginning.

    Attributes:
        num_workers: Worker processes.
        queue_rows: Capacity of each queue: all envs of a lane, as each is in flight once.
        ring_rows: Rows in which first-ready results are collected.
        lanes: Per worker: its threads that own envs, or 1 for its main thread.
    """

    num_workers: int
    queue_rows: int
    ring_rows: int
    lanes: int = 1

    @staticmethod
    def of(bounds: Sequence[int], threads: int, ring_rows: int) -> ControlLayout:
        """Lay out the words for workers with envs bounds[w], ..., bounds[w + 1] - 1 each."""
        largest = max(last - first for first, last in pairwise(bounds))
        lanes = max(1, min(threads, largest))
        most = -(-largest // lanes)
        return ControlLayout(len(bounds) - 1, -(-most // LINE) * LINE, ring_rows, lanes)

    @property
    def queues(self) -> int:
        """First word of all queues and the lines before them."""
        return (FIRST_WORKER_LINE + 2 * self.num_workers) * LINE

    @property
    def ring(self) -> int:
        """First word of the ring's rows."""
        return self.queue(self.num_workers * self.lanes)

    @property
    def num_words(self) -> int:
        """Size of all control words."""
        return self.ring + self.ring_rows * RING_WORDS

    def command(self, worker: int) -> int:
        """First word of a worker's command line."""
        return (FIRST_WORKER_LINE + 2 * worker) * LINE

    def completion(self, worker: int) -> int:
        """First word of a worker's completion line."""
        return self.command(worker) + LINE

    def queue(self, lane: int) -> int:
        """First word of the line before a lane's queue; lanes are counted over all workers."""
        return self.queues + lane * (LINE + self.queue_rows)

    def lane_queues(self, worker: int) -> list[int]:
        """First words of the lines of a worker's lanes."""
        return [self.queue(worker * self.lanes + k) for k in range(self.lanes)]

    def env_lanes(self, bounds: Sequence[int]) -> np.ndarray:
        """Return the lane of every env, int64 (num_envs,); -1 for those before the first worker.

        Env `first + i` of a worker belongs to its lane i modulo the number of lanes.
        """
        found = np.full(bounds[-1], -1, np.int64)
        for worker, (first, last) in enumerate(pairwise(bounds)):
            found[first:last] = worker * self.lanes + np.arange(last - first) % self.lanes
        return found
