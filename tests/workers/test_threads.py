"""Every env is made, called and closed by one thread, the same for its whole life."""

import functools
import mmap
import os
import sqlite3
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
from choices import fast_are
from envs import MODES
from gymnasium.spaces import Box
from workers.faulty_envs import DIE, FINE, HANG, RAISE, FaultyEnv, NapEnv

from vecenv import AsyncVectorEnv, EnvCreationError
from vecenv.workers import probe

NUM_ENVS = 5
THREADS = {"one": 1, "shared": 2, "each its own": 8}


class OwnedEnv(FaultyEnv):
    """Writes down every call that does not come from the thread that has made it.

    It holds a database connection, which refuses other threads by itself.
    """

    publish = {"height": Box(-1, 99, (), np.float64)}
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, name, diary):
        super().__init__(name)
        self.diary = diary
        self.owner = threading.get_ident()
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table steps (number)")
        self.render_mode = "rgb_array"
        self.write("made")

    def write(self, call):
        is_owner = threading.get_ident() == self.owner
        with open(self.diary, "a") as file:
            file.write(f"{call} {'right' if is_owner else 'WRONG'} {os.getpid()}\n")
        if not is_owner:
            raise RuntimeError(f"{call} in a thread that is not the env's")

    def reset(self, *, seed=None, options=None):
        self.write("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.write("step")
        self.database.execute("insert into steps values (1)")
        return super().step(action)

    def render(self):
        self.write("render")
        return np.zeros((2, 2, 3), np.uint8)

    def num_steps(self):
        self.write("call")
        return self.database.execute("select count(*) from steps").fetchone()[0]

    @property
    def height(self):
        self.write("published")
        return float(self.count)

    @property
    def depth(self):
        self.write("get_attr")
        return 3

    @depth.setter
    def depth(self, value):
        self.write("set_attr")

    def close(self):
        self.write("close")
        self.database.close()


class Outside(gym.Wrapper):
    """A wrapper around wrappers."""


def owned(name, diary):
    return Outside(gym.wrappers.TimeLimit(OwnedEnv(name, diary), 20))


def make(diary, **options):
    options.setdefault("num_workers", 2)
    return AsyncVectorEnv(
        [functools.partial(owned, name, str(diary)) for name in range(NUM_ENVS)],
        timeout=60,
        **options,
    )


def assert_diary(diary, *calls):
    lines = [line.split() for line in diary.read_text().splitlines()]
    assert {call for call, *_ in lines} >= {"made", "reset", "step", *calls}
    assert [line for line in lines if line[1] != "right"] == []


def use(envs):
    """Make every kind of call."""
    fine = np.full(NUM_ENVS, FINE)
    obs, _ = envs.reset(seed=1)
    assert obs[:, 0].tolist() == list(range(NUM_ENVS))
    for _ in range(6 if envs.autoreset_mode.value == "Disabled" else 25):  # over episodes' ends
        envs.step(fine)
    envs.send(fine)
    while envs._calls.num_in_flight:
        envs.recv(1)
    envs.reset(options={"reset_mask": np.arange(NUM_ENVS) % 2 == 0})
    assert min(envs.call("num_steps")) > 0
    assert envs.get_attr("depth") == (3,) * NUM_ENVS
    envs.set_attr("depth", list(range(NUM_ENVS)))
    assert len(envs.render()) == NUM_ENVS
    envs.send(fine[:2], [4, 1])
    envs.reset()  # gives up what is in flight
    if envs.num_workers > 1:
        first, second = envs.halves()
        for half in (first, second):
            half.step_async(fine[half.env_ids])
        for half in (first, second):
            half.step_wait()


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(
    "context", ["fork", *(pytest.param(c, marks=pytest.mark.slow) for c in ("forkserver", "spawn"))]
)
def test_an_env_never_changes_its_thread(tmp_path, context, threads):
    diary = tmp_path / "diary"
    envs = make(diary, context=context, threads_per_worker=THREADS[threads])
    use(envs)
    envs.close()
    assert_diary(diary, "render", "call", "get_attr", "set_attr", "published", "close")
    assert diary.read_text().count("close") == NUM_ENVS


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        *zip((RAISE, DIE), MODES, strict=False),
        pytest.param(HANG, MODES[2], marks=pytest.mark.slow),
    ],
)
def test_an_env_that_is_restarted_is_made_in_its_thread(tmp_path, fault, mode):
    diary = tmp_path / "diary"
    envs = make(diary, threads_per_worker=2, on_error="restart", autoreset_mode=mode)
    envs.reset(seed=3)
    actions = np.full(NUM_ENVS, FINE)
    actions[3] = fault
    truncations = envs.step(actions)[3]
    assert truncations[3] == (fault != HANG)
    envs.reset(seed=3)
    envs.send(actions)
    while envs._calls.num_in_flight:
        envs.recv(1)
    envs.reset(seed=4)
    use(envs)
    envs.close()
    assert_diary(diary, "close", "published")


def test_a_failing_factory_closes_the_others_in_their_threads(tmp_path):
    diary = tmp_path / "diary"

    def failing():
        raise OSError("no licence")

    env_fns = [functools.partial(owned, name, str(diary)) for name in range(NUM_ENVS)]
    env_fns[4] = failing
    with pytest.raises(EnvCreationError, match=r"env 4 of 5 .*no licence"):
        AsyncVectorEnv(env_fns, num_workers=2, threads_per_worker=3)
    lines = diary.read_text().splitlines()
    assert sum(line.startswith("made") for line in lines) >= 4
    assert sum(line.startswith("close right") for line in lines) == 4
    assert not [line for line in lines if "WRONG" in line]


class MeetingEnv(NapEnv):
    """A step ends when the steps of all envs of the process have begun."""

    barrier = threading.Barrier(4)

    def wait(self):
        self.barrier.wait(timeout=30)


def test_as_many_envs_are_stepped_at_a_time_as_there_are_threads():
    envs = AsyncVectorEnv([MeetingEnv] * 4, num_workers=1, threads_per_worker=4)
    envs.reset()
    envs.step([0] * 4)
    envs.send([0] * 4)
    assert sorted(envs.recv(timeout=30).env_ids) == [0, 1, 2, 3]
    envs.close()


class NestedEnv(NapEnv):
    """Steps in the thread that it sees first."""

    seconds = 0.002

    def step(self, action):
        obs, _, *others = super().step(action)
        return obs, float(threading.get_ident()), *others


def test_an_env_that_waits_stays_in_the_thread_in_which_it_was_made(monkeypatch):
    """Waiting is not found out while envs are stepped, and nothing moves then."""
    monkeypatch.undo()  # the env is tried out
    envs = AsyncVectorEnv([NestedEnv] * 4, num_workers=2, context="fork")
    envs.reset()
    threads = [envs.step([0] * 4)[1].tolist() for _ in range(60)]
    assert threads == [threads[0]] * 60
    envs.close()


class WaitingEnv(NapEnv):
    """May have loaded a library."""

    seconds = 3e-2  # longer than the queue for a core on a busy machine

    def __init__(self, library=None):
        if library is not None:
            with open(library, "rb") as file:
                self.pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@pytest.mark.parametrize(
    ("library", "gains"),
    fast_are(
        [("libEGL.so.1", False)],
        [("", True), ("libEGL.so.1", False), ("libGLX_mesa.so.0", False), ("libGLarp.so", True)],
    ),
)
def test_envs_that_draw_by_opengl_share_no_process_by_threads(tmp_path, library, gains):
    if library:
        (tmp_path / library).write_bytes(b"code")
    env_fn = functools.partial(WaitingEnv, tmp_path / library if library else None)
    call = probe.can_share, [env_fn]
    assert probe.run_apart(*call, timeout=30, method="fork") is gains


@pytest.mark.parametrize(
    ("queued_ns", "is_waiting"), [(10**9, False), (0, True), (3_000_000, True)]
)
def test_waiting_for_a_core_is_no_waiting(monkeypatch, queued_ns, is_waiting):
    """Be it by threads of a library; and who sleeps waits, if he queues after it, too."""
    told = [{"1": 5}, {"1": 5, "2": queued_ns}]
    monkeypatch.setattr(probe, "_read_queued_ns", lambda: told.pop(0))
    meter = probe.WaitMeter()
    meter.begin()
    time.sleep(4e-3)
    meter.end(1)
    assert meter.found_waiting is is_waiting
