"""Buffers that other processes fill: whole rows only, whoever dies; limits; bad input."""

import os
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from programs import printed
from replay_model import check_law

from buffers import BufferClosedError, BufferMisuseError, MultiprocessReplayBuffer
from buffers.replay import multiprocess as module


def simple(capacity=100, num_writers=1, **options):
    spaces = Box(-np.inf, np.inf, (4,)), Discrete(2)
    options = {"timeout": 0.0, "seed": 0, **options}
    return MultiprocessReplayBuffer(capacity, *spaces, num_writers=num_writers, **options)


def rows(*numbers):
    """Rows of which every column tells the number."""
    given = np.array(numbers)
    obs = np.repeat(given[:, None], 4, 1).astype(np.float32)
    return {
        "obs": obs, "next_obs": obs + 0.5, "actions": given % 2, "rewards": given.astype(float),
        "terminations": given % 5 == 0, "truncations": given % 7 == 0,
    }  # fmt: skip


def numbers_in(batch):
    numbers = batch.rewards.numpy().astype(int)
    for name, column in rows(*numbers).items():
        np.testing.assert_array_equal(getattr(batch, name).numpy(), column)
    return numbers


def die(writer):
    """Let a writer of this process be one whose process has ended."""
    writer._release.detach()
    writer._table.rings["pid"] = 0
    writer._pid = 0


def test_all_committed_rows_are_drawn_alike_and_no_others():
    buffer = simple(40, num_writers=4)
    writers = [buffer.writer() for _ in range(3)]
    for writer, count in zip(writers, (25, 4, 1), strict=True):
        for number in range(count):
            writer.add(**rows(100 * writers.index(writer) + number))
    buffer._memory.slots["begun"][0] += 3  # three rows are being written
    assert buffer.counts.tolist() == [7, 4, 1, 0] and len(buffer) == 12
    live = [*range(18, 25), *range(100, 104), 200]
    counts = Counter(np.concatenate([numbers_in(buffer.sample(256)) for _ in range(60)]).tolist())
    assert counts.keys() == set(live)
    check_law([counts[number] for number in live], np.ones(12))
    assert buffer.num_added == 30
    again, other = simple(seed=5), simple(seed=5)
    for each in (again, other):
        each.writer().add(**rows(*range(50)))
    assert numbers_in(again.sample(20)).tolist() == numbers_in(other.sample(20)).tolist()
    part = again.sample(20, columns=["rewards"])
    assert part.rewards.tolist() == other.sample(20).rewards.tolist()
    assert again.sample(20, part) is part and not hasattr(part, "obs")
    with pytest.raises(BufferMisuseError, match="columns is"):
        again.sample(20, columns=("weights",))


def test_draws_from_rings_that_are_overwritten_faster_than_they_are_copied_end(monkeypatch):
    buffer, number = simple(4), 100
    writer, gather = buffer.writer(), buffer._reader.fill
    writer.add(**rows(*range(4)))

    def gather_late(batch):
        nonlocal number
        gather(batch)
        for _ in range(4):
            writer.add(**rows(number))
            number += 1

    monkeypatch.setattr(buffer._reader, "fill", gather_late)
    with pytest.raises(TimeoutError, match=r"overwritten while they were copied.* 4 trans"):
        buffer.sample(8)
    monkeypatch.setattr(buffer._reader, "fill", gather)
    assert set(numbers_in(buffer.sample(64))) <= {*range(number - 4, number)}


def test_the_learner_waits_and_says_why():
    buffer = simple(64, min_size_to_sample=10, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"0.05 s: 0 of min_size_to_sample=10 .*: 0: none"):
        buffer.sample(4)
    writer = buffer.writer()
    writer.add(**rows(*range(9)))
    with pytest.raises(TimeoutError, match=rf"0 s: 9 of .* writers: 0: {os.getpid()}"):
        buffer.sample(4, timeout=0)
    writer.add(**rows(9))
    assert len(buffer.sample(4, timeout=0)) == 4


def test_bad_arguments_are_refused():
    for options, text in (
        ({"num_writers": 3}, "capacity is 100, expected a multiple of num_writers = 3"),
        ({"capacity": 2, "num_writers": 2}, "two transitions for each"),
        ({"num_writers": 0}, "num_writers must be a positive integer"),
        ({"min_size_to_sample": 101}, "min_size_to_sample is 101, expected at most 100"),
        ({"timeout": -1}, "timeout is -1"),
        ({"n_step": 2}, "n_step=2 needs gamma"),
    ):
        with pytest.raises(BufferMisuseError, match=text):
            simple(**options)
    for name in ("store_next", "track_episodes", "frame_stack", "is_per_env"):
        with pytest.raises(TypeError, match=name):
            simple(**{name: True})
    buffer = simple(num_writers=2)
    with pytest.raises(BufferMisuseError, match="index is 2, expected 0 to 1"):
        buffer.writer(2)
    with pytest.raises(BufferMisuseError, match="batch_size"):
        buffer.sample(0)
    writer = buffer.writer()
    for columns, text in (
        ({"rewards": np.array([np.nan])}, "rewards"),
        ({"obs": np.zeros((1, 3), np.float32)}, r"obs has shape \(1, 3\)"),
        ({"obs": np.zeros((1, 4), ">f4") * np.nan, "actions": np.array([0.5])}, "actions"),
        ({"rewards": np.zeros(2)}, "shape"),
        ({"more": np.zeros(1)}, "unknown"),
        ({"obs": None}, "missing"),
    ):
        with pytest.raises(BufferMisuseError, match=text):
            writer.add(**{**rows(1), **columns})
    assert len(buffer) == 0 and not buffer._memory.slots["begun"].any()
    writer.add(**{name: column.tolist() for name, column in rows(1, 2).items()})
    writer.add(**{name: torch.from_numpy(column) for name, column in rows(3).items()})
    assert set(numbers_in(buffer.sample(64))) == {1, 2, 3}


def test_two_processes_are_not_one_writer_and_none_writes_to_what_it_does_not_know():
    buffer = simple(num_writers=2)
    first, other = buffer.writer(1), buffer.writer()
    first.open()
    with pytest.raises(BufferMisuseError, match=r"writer 1 by process \d+ in use; close one"):
        buffer.writer(1).open()
    other.add(**rows(1))
    assert (first.index, other.index) == (1, 0)
    with pytest.raises(BufferMisuseError, match=r"writers 0 by process \d+, 1 by process \d+"):
        pickle.loads(pickle.dumps(other)).open()
    other.close()
    other.close()
    with buffer.writer() as third:
        third.add(**rows(2))
        assert third.index == 0 and buffer.num_added == 2
    assert buffer.writer_pids[0] == 0
    address, (capacity, spaces, *rest), *more = third._given
    with pytest.raises(BufferClosedError, match="is gone"):
        other = Box(-1, 1, (500,)), spaces[1]
        module.ReplayWriter(address, (capacity, other, *rest), *more).open()
    for wrong in (address._replace(name="x"), address._replace(path="/proc/self/fd/0")):
        with pytest.raises(BufferClosedError, match="is gone"):
            module.ReplayWriter(wrong, third._given[1], *more).open()
    buffer.close()
    buffer.close()
    for refused in (lambda: first.add(**rows(1)), lambda: third.add(**rows(1))):
        with pytest.raises(BufferClosedError, match="is gone"):
            refused()
    for refused in (lambda: buffer.sample(1), buffer.writer):
        with pytest.raises(BufferMisuseError, match="was closed"):
            refused()


PROGRAM = """
import os, signal, sys, time, traceback, zlib
import numpy as np
from gymnasium.spaces import Box, Discrete
from buffers import BufferClosedError, BufferMisuseError, MultiprocessReplayBuffer

WIDTH = 256
OBS = Box(-np.inf, np.inf, (WIDTH,), np.int64)

def columns(writer, number, count):
    numbers = np.arange(number, number + count)
    obs = numbers[:, None] * 1000 + np.arange(WIDTH) + 10**9 * writer
    sums = [[zlib.crc32(row.tobytes() + (row + 1).tobytes())] for row in obs]
    return {
        "obs": obs, "next_obs": obs + 1, "actions": numbers % 5, "rewards": np.ones(count),
        "terminations": np.zeros(count, bool), "truncations": np.zeros(count, bool),
        "sums": np.array(sums),
    }

def make(n_step, capacity=400, **options):
    steps = {"n_step": 2, "gamma": 0.5, "num_envs": 1} if n_step > 1 else {}
    extras = {"sums": Box(0, 2**33, (1,), np.int64)}
    return MultiprocessReplayBuffer(
        capacity, OBS, Discrete(5), num_writers=2, seed=0, extra_columns=extras, **steps, **options
    )

def write(writer, index):
    number = 0
    while True:
        writer.add(**columns(index, number, 7))
        number += 7

def check(batch, n_step):
    obs, following = batch.obs.numpy(), batch.next_obs.numpy()
    for row, after, total, reward in zip(
        obs, following, batch.extras["sums"][:, 0].tolist(), batch.rewards.tolist()
    ):
        steps = 1 if reward == 1 else 2
        last = after - 1 - 1000 * (steps - 1)
        assert zlib.crc32(row.tobytes() + (last + 1).tobytes()) == total, "a row is torn"
        assert (last == row).all(), "a window leads to another row"
"""

LEARNERS = (
    PROGRAM
    + """
import pickle

buffer, children = make(1, capacity=64), []
with buffer.writer() as own:
    own.add(**columns(0, 0, 7))

def draw(mine, end):
    drawn = [mine.sample(16) for _ in range(20)]  # while both rings are overwritten
    for batch in drawn:
        check(batch, 1)
    os.write(end, batch.indices.numpy().tobytes())

streams = []
for index in range(4):  # two that write, two that draw: a fork, and what pickling makes
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            if index < 2:
                write(buffer.writer(index), index)
            draw(buffer if index == 2 else pickle.loads(pickle.dumps(buffer)), writing)
        finally:
            os._exit(1)
    children.append(pid)
    streams.append(reading)
draw(buffer, os.open(os.devnull, os.O_WRONLY))
drawn = [os.read(stream, 16 * 8) for stream in streams[2:]]
print(len(drawn[0]) == len(drawn[1]) == 16 * 8, drawn[0] != drawn[1])
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
for _ in range(50):  # rows that were half written are not drawn
    check(buffer.sample(16), 1)
"""
)


def test_several_learners_draw_whole_rows_that_writers_overwrite_each_by_a_stream_of_its_own():
    assert printed(LEARNERS, kind="buffers") == ["True", "True"]
