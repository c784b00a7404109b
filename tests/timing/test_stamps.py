import subprocess
import sys
import time

import numpy as np
import pytest

from vecenv.timing import stamps as module
from vecenv.timing.stamps import EnvStamps, stamped


class Env:
    def __init__(self, fails_at=None):
        self.num_steps = 0
        self.fails_at = fails_at

    def step(self, action):
        self.num_steps += 1
        if self.num_steps == self.fails_at:
            raise ZeroDivisionError
        return action

    def reset(self, seed=None):
        return seed


def small_stamps(num_envs, size):
    rings = np.zeros((num_envs, size, module.RECORD_WORDS), np.int64)
    return EnvStamps(rings, np.zeros(num_envs, np.int64))


def test_steps_and_resets_are_stamped_in_order():
    stamps = small_stamps(2, 8)
    first, second = stamped([Env(), Env()], stamps)
    assert (first.reset(seed=3), second.step(4), first.step(5)) == (3, 4, 5)
    found = stamps.read()
    assert found.env_ids.tolist() == [0, 1, 0]
    assert found.is_reset.tolist() == [True, False, False]
    assert (found.done_ns == 0).all()
    assert (found.begin_ns <= found.end_ns).all() and (np.diff(found.begin_ns) > 0).all()
    assert stamps.complete_since() == 0


def test_a_full_ring_keeps_the_latest():
    stamps = small_stamps(1, 4)
    (env,) = stamped([Env()], stamps)
    for action in range(11):
        env.step(action)
    found = stamps.read()
    assert len(found.env_ids) == 4 and stamps.counted()[0] == 11
    assert stamps.complete_since() == found.begin_ns[1]


def test_steps_are_counted_wherever_a_new_owner_takes_over():
    stamps = small_stamps(1, 100)
    done = 0
    for number in (1, 33, 70, 31, 150, 2):
        (env,) = stamped([Env()], stamps)
        assert stamps.counted().tolist() == [done]
        for _ in range(number):
            env.step(0)
            done += 1
            assert stamps.counted().tolist() == [done]
    assert len(stamps.read().env_ids) == 100


def test_steps_are_counted_where_rings_begin_anew_beside_others():
    stamps = small_stamps(3, 16)
    envs = stamped([Env(), Env(), Env()], stamps)
    done = np.zeros(3, np.int64)
    for index in [2, 1, 0] * 17 + [0] * 3 + [1] * 20 + [2] * 40 + [0, 1] * 16:
        if done[index] % 16 == 15:  # of a reset the count is written, here the ring's last
            envs[index].reset()
        else:
            envs[index].step(0)
        done[index] += 1
        assert (stamps.counted() == done).all(), (index, done)


def test_a_step_that_raises_stays_open_and_is_told_first():
    envs = [Env(), Env(fails_at=2)]
    stamps = small_stamps(2, 4)
    first, second = stamped(envs, stamps)
    second.step(0)
    with pytest.raises(ZeroDivisionError):
        second.step(0)
    first.step(0)
    assert (stamps.read().end_ns == 0).tolist() == [False, True, False]
    lines = stamps.describe_latest(np.array([0, 1])).splitlines()
    assert "env 1: step" in lines[1] and "has not ended" in lines[1]
    assert "env 0: step" in lines[2] and "took" in lines[2]
    assert stamps.describe_latest(np.array([5])) == ""


def test_steps_are_taken_once_each_and_running_ones_are_shown():
    envs = [Env(), Env(fails_at=3)]
    stamps = small_stamps(2, 8)
    first, second = stamped(envs, stamps)
    first.step(0)
    second.step(0)
    found, taken = stamps.since(np.zeros(2, np.int64))
    assert found.env_ids.tolist() == [0, 1] and taken.tolist() == [1, 1]
    second.step(0)
    with pytest.raises(ZeroDivisionError):
        second.step(0)
    found, taken = stamps.since(taken)
    assert found.env_ids.tolist() == [1, 1] and (found.end_ns > 0).tolist() == [True, False]
    assert stamps.since(taken)[0].env_ids.tolist() == [1]  # what has ended is taken
    for _ in range(30):
        first.step(0)
    assert (stamps.since(taken)[0].env_ids == 0).sum() == 7  # what the ring holds


LAPS = """
import sys
import numpy as np
words = np.memmap(sys.argv[1], np.int64, "r+")
print("ready", flush=True)
ring, count = memoryview(words)[1:], 0
while True:
    at = 4 * count % len(ring)
    ring[at] = 10 * count + 1
    ring[at + 1] = 10 * count + 2
    count += 1
    words[0] = count
"""


def test_records_that_are_overwritten_meanwhile_are_whole_or_left_out(tmp_path):
    path = tmp_path / "rings"
    words = np.memmap(path, np.int64, "w+", shape=1 + 256 * module.RECORD_WORDS)
    stamps = EnvStamps(words[1:].reshape(1, 256, module.RECORD_WORDS), words[:1])
    writer = subprocess.Popen([sys.executable, "-c", LAPS, path], stdout=subprocess.PIPE)
    with writer:
        try:
            assert writer.stdout.readline().split() == [b"ready"]
            taken, num_records, num_laps = np.zeros(1, np.int64), 0, 0
            while num_records < 20_000 or num_laps < 20:
                found, counts = stamps.since(np.zeros(1, np.int64))
                num_laps += counts[0] > taken[0] + 256
                taken, ended = counts, found.where(found.end_ns > 0)
                assert (ended.end_ns == ended.begin_ns + 1).all()
                num_records += len(ended.end_ns)
        finally:
            writer.kill()


def test_the_first_mark_after_a_step_counts():
    stamps = small_stamps(1, 4)
    (env,) = stamped([Env()], stamps)
    for _ in range(6):
        env.step(0)
        env.mark_done()
        done_ns = stamps.read().done_ns[-1]
        env.mark_done()
        found = stamps.read()
        assert found.end_ns[-1] <= found.done_ns[-1] == done_ns
    env.step(0)
    assert stamps.read().done_ns[-1] == 0  # not that of the step whose place it has taken


def test_processor_time_is_taken_of_long_steps_and_of_some_short_ones():
    class Waits(Env):
        def step(self, action):
            time.sleep(action)

    stamps = small_stamps(1, 64)
    (env,) = stamped([Waits()], stamps)
    for _ in range(40):
        env.step(0)
    is_taken = stamps.read().cpu_ns >= 0
    assert is_taken[0] and 2 <= is_taken.sum() <= 20
    for _ in range(30):
        env.step(0.001)
    found = stamps.read()
    latest = found.where(np.arange(len(found.env_ids)) >= len(found.env_ids) - 4)
    assert (latest.cpu_ns >= 0).all()
    assert (latest.cpu_ns < 0.5 * (latest.end_ns - latest.begin_ns)).all()


def test_an_env_may_be_replaced():
    envs = [Env(fails_at=1)]
    (env,) = stamped(envs, small_stamps(1, 4))
    envs[0] = Env()
    assert env.step(7) == 7


@pytest.mark.parametrize(("num_envs", "size"), [(1, 1 << 14), (200, 1310), (100_000, 64)])
def test_memory_is_bounded(num_envs, size):
    asked = []

    def allocate(shape, dtype):
        asked.append(shape)
        return np.zeros((2, 2, module.RECORD_WORDS), dtype)

    EnvStamps.make(num_envs, allocate)
    assert asked == [(num_envs, size, module.RECORD_WORDS), (num_envs,)]
