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
    return EnvStamps(rings, np.zeros((num_envs, 3), np.int64))


def read(stamps):
    """Return what the rings hold, in the order of the steps."""
    found, _ = stamps.since(0)
    return found[np.argsort(found["begin_ns"], kind="stable")]


def counted(stamps):
    return stamps.since(0)[1].tolist()


def test_steps_and_resets_are_stamped_in_order():
    stamps = small_stamps(2, 8)
    first, second = stamped([Env(), Env()], stamps)
    assert (first.reset(seed=3), second.step(4), first.step(5)) == (3, 4, 5)
    found = read(stamps)
    assert found["env_id"].tolist() == [0, 1, 0]
    assert found["is_reset"].tolist() == [True, False, False]
    assert (found["done_ns"] == 0).all()
    assert (found["begin_ns"] <= found["end_ns"]).all() and (np.diff(found["begin_ns"]) > 0).all()


def test_a_full_ring_keeps_the_latest():
    stamps = small_stamps(1, 4)
    (env,) = stamped([Env()], stamps)
    for action in range(11):
        env.step(action)
    found = read(stamps)
    assert len(found["env_id"]) == 3 and counted(stamps) == [11]  # one may be overwritten meanwhile


def test_steps_are_counted_wherever_a_new_owner_takes_over():
    stamps = small_stamps(1, 100)
    done = 0
    for number in (1, 33, 70, 31, 150, 2):
        (env,) = stamped([Env()], stamps)
        assert counted(stamps) == [done]
        for _ in range(number):
            env.step(0)
            done += 1
            assert counted(stamps) == [done]
    assert len(read(stamps)["env_id"]) == 99


def test_steps_are_counted_where_rings_begin_anew_beside_others():
    stamps = small_stamps(3, 16)
    envs = stamped([Env(), Env(), Env()], stamps)
    done = np.zeros(3, np.int64)
    for index in [2, 1, 0] * 17 + [0] * 3 + [1] * 20 + [2] * 40 + [0, 1] * 16:
        if done[index] % 16 == 15:
            envs[index].reset()
        else:
            envs[index].step(0)
        done[index] += 1
        assert counted(stamps) == done.tolist()


def test_a_step_that_raises_stays_open():
    envs = [Env(), Env(fails_at=2)]
    stamps = small_stamps(2, 4)
    first, second = stamped(envs, stamps)
    second.step(0)
    with pytest.raises(ZeroDivisionError):
        second.step(0)
    first.step(0)
    assert (read(stamps)["end_ns"] == 0).tolist() == [False, True, False]


def test_steps_are_taken_once_each_and_running_ones_are_shown():
    envs = [Env(), Env(fails_at=3)]
    stamps = small_stamps(2, 8)
    first, second = stamped(envs, stamps)
    first.step(0)
    second.step(0)
    found, taken = stamps.since(0)
    assert found["env_id"].tolist() == [0, 1] and taken.tolist() == [1, 1]
    second.step(0)
    with pytest.raises(ZeroDivisionError):
        second.step(0)
    found, taken = stamps.since(taken)
    assert found["env_id"].tolist() == [1, 1] and (found["end_ns"] > 0).tolist() == [True, False]
    assert stamps.since(taken)[0]["env_id"].tolist() == [1]  # what has ended is taken
    for _ in range(30):
        first.step(0)
    assert (stamps.since(taken)[0]["env_id"] == 0).sum() == 7  # what the ring holds


LAPS = """
import sys
import numpy as np
words = np.memmap(sys.argv[1], np.int64, "r+")
print("ready", flush=True)
ring, count = memoryview(words)[3:], 0
while True:
    at = 3 * count % len(ring)
    ring[at] = 10 * count + 1
    ring[at + 1] = 10 * count + 2
    count += 1
    words[0] = count
"""


def test_records_that_are_overwritten_meanwhile_are_whole_or_left_out(tmp_path):
    path = tmp_path / "rings"
    words = np.memmap(path, np.int64, "w+", shape=3 * 257)
    stamps = EnvStamps(words[3:].reshape(1, 256, 3), words[:3].reshape(1, 3))
    writer = subprocess.Popen([sys.executable, "-c", LAPS, path], stdout=subprocess.PIPE)
    with writer:
        try:
            assert writer.stdout.readline().split() == [b"ready"]
            taken, num_records, num_laps = np.zeros(1, np.int64), 0, 0
            while num_records < 20_000 or num_laps < 20:
                found, counts = stamps.since(0)
                num_laps += counts[0] > taken[0] + 256
                taken, ended = counts, found[found["end_ns"] > 0]
                assert (ended["end_ns"] == ended["begin_ns"] + 1).all()
                num_records += len(ended["end_ns"])
        finally:
            writer.kill()


def test_the_first_mark_after_a_step_counts():
    stamps = small_stamps(1, 4)
    (env,) = stamped([Env()], stamps)
    for _ in range(6):
        env.step(0)
        env.mark_done()
        done_ns = read(stamps)["done_ns"][-1]
        env.mark_done()
        found = read(stamps)
        assert found["end_ns"][-1] <= found["done_ns"][-1] == done_ns
    env.step(0)
    assert read(stamps)["done_ns"][-1] == 0  # not that of the step whose place it has taken


def test_processor_time_is_taken_of_long_steps_and_of_some_short_ones():
    class Waits(Env):
        def step(self, action):
            time.sleep(action)

    stamps = small_stamps(1, 64)
    (env,) = stamped([Waits()], stamps)

    def of_step(seconds):
        before = stamps.tallies[0].copy()
        env.step(seconds)
        return (stamps.tallies[0] - before).tolist()[1:]

    first_ns, *later_ns = [of_step(0)[1] for _ in range(200)]
    assert first_ns > 0 and sum(ns > 0 for ns in later_ns) in range(1, 20)
    while of_step(0.001)[1] == 0:
        pass
    for _ in range(5):
        cpu_ns, spent_ns = of_step(0.001)
        assert spent_ns > 1e6 and cpu_ns < 0.5 * spent_ns


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
    assert asked == [(num_envs, size, module.RECORD_WORDS), (num_envs, 3)]
