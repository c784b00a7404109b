"""The same seeds give what SyncVectorEnv gives, whatever the workers, threads and sends."""

import functools
from fractions import Fraction
from itertools import cycle

import gymnasium as gym
import numpy as np
import pytest
from envs import (
    MODES,
    NUM_ENVS,
    OBJECT_SPACES,
    SPACES,
    RandomEnv,
    arrays_in,
    counters,
    mode_id,
    restart_ended,
)
from equality import assert_same
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import SyncVectorEnv as GymnasiumSyncVectorEnv
from gymnasium.vector.utils import create_empty_array
from twins import assert_sends_alike, assert_steps_alike, make_slot, twins

from vecenv import ObservationError, StepSlot, SyncVectorEnv
from vecenv.workers.env import AsyncVectorEnv

OPTIONS = {
    "1 worker": {"num_workers": 1},
    "2 workers": {"num_workers": 2},
    "a worker per env": {"num_workers": 5},
    "caller and 2": {"num_workers": 2, "caller_steps": True},
    "threads": {"num_workers": 2, "threads_per_worker": 3},
    "restarting": {"num_workers": 2, "on_error": "restart"},
}


@pytest.mark.parametrize(
    "name", ["every dtype", "big-endian", "multi-discrete from 5", "tuple", *OBJECT_SPACES]
)
def test_any_space(name):
    pool, sync = twins(SPACES[name], num_workers=2)
    assert_same(pool.reset(seed=2), sync.reset(seed=2))
    assert_steps_alike(pool, sync, 6)
    pool.close()


def case_space(options, mode):
    """Every number of workers meets every space, in modes that differ."""
    names = ["float32(3,)", "nested", "dict with objects"]
    return SPACES[names[([*OPTIONS].index(options) + MODES.index(mode)) % 3]]


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@pytest.mark.parametrize("options", OPTIONS)
def test_any_number_of_workers_and_threads_and_any_split_into_sends(options, mode):
    """Rows come back in any order, each with what step gives that env."""
    space = case_space(options, mode)
    pool, sync = twins(space, mode, **OPTIONS[options])
    assert_same(pool.reset(seed=2), sync.reset(seed=2))
    assert_steps_alike(pool, sync, 10)
    seed, mask = [7, None, 8, 9, 1], {"reset_mask": np.array([True, False, False, True, False])}
    assert_same(pool.reset(seed=seed, options=mask), sync.reset(seed=seed, options=mask))
    assert_steps_alike(pool, sync, 5)
    assert_sends_alike(pool, sync, 8)
    assert_steps_alike(pool, sync, 3)
    pool.close()


@pytest.mark.parametrize("options", ["a worker per env", "caller and 2", "threads"])
def test_actions_without_fixed_shape_in_any_split(options):
    """They travel by message, to threads too."""
    space, action_space = SPACES["float32(3,)"], spaces.Text(4)
    fns = [functools.partial(RandomEnv, space, action_space)] * NUM_ENVS
    pool, sync = AsyncVectorEnv(fns, **OPTIONS[options]), SyncVectorEnv(fns)
    action_space.seed(1)
    assert_same(pool.reset(seed=2), sync.reset(seed=2))
    for _ in range(6):
        actions = tuple(action_space.sample() for _ in range(NUM_ENVS))
        assert_same(pool.step(actions), expected := sync.step(actions))
        expected = sync.step(actions)
        for ids in ([3, 0], [1, 2, 4]):
            pool.send(tuple(actions[k] for k in ids), ids)
        received = 0
        while received < NUM_ENVS:
            batch = pool.recv(1, timeout=60)
            received += len(batch.env_ids)
            assert_same(batch.obs, expected[0][batch.env_ids])
    pool.close()


def foreign_slot(envs):
    own = make_slot(envs)
    obs = create_empty_array(envs.single_observation_space, envs.num_envs)
    return StepSlot(obs, *[array.copy() for array in own[1:]])


@pytest.mark.parametrize(
    ("name", "options", "mode"),
    [
        ("float32(3,)", "2 workers", MODES[1]),
        ("nested", "2 workers", MODES[0]),
        ("nested", "caller and 2", MODES[1]),
        ("float32(3,)", "caller and 2", MODES[2]),
        ("nested", "threads", MODES[2]),
        ("float32(3,)", "threads", MODES[0]),
    ],
)
def test_steps_into_slots(name, options, mode):
    """Slots of allocated memory, float32 rewards, and memory that workers have not."""
    pool, sync = twins(SPACES[name], mode, **OPTIONS[options])
    assert_same(pool.reset(seed=3), sync.reset(seed=3))
    slots = [make_slot(pool), make_slot(pool, np.float32), foreign_slot(pool)]
    for step in range(12):
        actions = np.full(NUM_ENVS, step % 4)
        slot = slots[step % 3]
        for array in (*arrays_in(slot.obs), slot.rewards):
            array[...] = 77  # shows any row left unwritten
        slot.terminations[:] = slot.truncations[:] = True
        expected = sync.step(actions)
        result = pool.step(actions, out=slot)
        assert all(came is own for came, own in zip(result[:4], slot, strict=True))
        rewards = expected[1].astype(slot.rewards.dtype)
        assert_same(result, (expected[0], rewards, *expected[2:]), f"step {step}")
        assert_same(restart_ended(pool, expected), restart_ended(sync, expected))
    assert_steps_alike(pool, sync, 3)
    pool.close()


def test_a_rollout_is_written_by_the_workers_without_a_copy():
    pool = AsyncVectorEnv(counters([3, 4]), num_workers=2)
    rollout = pool.allocate((6, 2, 3))
    rewards, flags = pool.allocate((5, 2)), pool.allocate((2, 5, 2), bool)
    rollout[0] = pool.reset()[0]
    slots = [StepSlot(rollout[t + 1], rewards[t], flags[0, t], flags[1, t]) for t in range(5)]
    for t in range(5):
        result = pool.step([0, 0], out=slots[t])
        assert np.shares_memory(result[0], rollout)
        assert np.shares_memory(result[1], rewards)
    pool.close()
    expected = [[0, 0], [1, 1], [2, 2], [3, 3], [0, 4], [1, 0]]
    assert rollout[:, :, 2].tolist() == expected  # the memory outlives the pool
    assert rewards.tolist() == [[1, 1], [2, 2], [3, 3], [0, 4], [1, 0]]


def test_actions_keep_their_dtype():
    pool, sync = twins(SPACES["float32(3,)"], num_workers=2)
    for envs in (pool, sync):
        envs.reset(seed=1)
    for dtype in (np.int8, np.int32, np.int64, np.uint16, np.int8):
        actions = np.arange(NUM_ENVS).astype(dtype) % 4
        assert_same(pool.step(actions), sync.step(actions))
        pool.send(actions, None)
        sync.send(actions, None)
        received, expected = pool.recv(), sync.recv()
        order = np.argsort(received.env_ids)
        assert_same(received.obs[order], expected.obs)
    pool.close()


class Lenient(gym.Env):
    """Returns lists for tuples and odd numbers, all of which Gymnasium takes."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-9, 9, (2,), np.float32)

    def __init__(self, reward, obs, flag):
        self.obs, self.reward, self.flag = obs, reward, flag

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return [self.obs, {"a": 2}]

    def step(self, action):
        return [self.obs, self.reward, self.flag, self.flag, {"a": 1}]


def maker(backend):
    return (
        SyncVectorEnv
        if backend == "sync"
        else functools.partial(AsyncVectorEnv, **OPTIONS[backend])
    )


OBS = [[1, 2], (0.5, 1.5), np.ones(2), np.ones(2, np.float16), np.arange(2)]
REWARDS = [10**30, 2**70, True, np.int8(3), np.array(1.5), Fraction(1, 4), np.float16(2)]
FLAGS = [False, 0, 1, np.bool_(True), np.array(False), None]


@pytest.mark.parametrize("backend", ["sync", "2 workers", "caller and 2", "threads"])
def test_steps_that_gymnasium_takes_are_taken(backend):
    """Lists for tuples, any number as a reward, any truth as a flag."""
    num_envs = max(len(OBS), len(REWARDS), len(FLAGS))
    choices = [cycle(values) for values in (REWARDS, OBS, FLAGS)]
    fns = [functools.partial(Lenient, *map(next, choices)) for _ in range(num_envs)]
    make = maker(backend)
    ours, theirs = make(fns), GymnasiumSyncVectorEnv(fns)
    assert_same(ours.reset(), theirs.reset())
    for _ in range(4):
        assert_same(ours.step([0] * num_envs), theirs.step([0] * num_envs))
    ours.close()


@pytest.mark.parametrize("backend", ["sync", "2 workers", "caller and 2", "threads"])
def test_rewards_that_are_no_number_are_refused(backend):
    make = maker(backend)
    envs = make([functools.partial(Lenient, 0.0, np.zeros(2), False)] * 3)
    for reward in (None, "1.5", [1, 2], 10**400, 1j):
        envs.reset()
        envs.set_attr("reward", [reward] * 3)
        told = 0 if backend == "sync" else 2  # the first of those stepped, or the last
        with pytest.raises(ObservationError, match=f"env {told} returned the reward"):
            envs.step([0] * 3)
    envs.close()


class Greedy(gym.Env):
    """Takes what it is interested in out of its options."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-9, 9, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = repr(options)
        if options:
            options.pop("level", None)
            options["nested"]["list"].append(1)
            options["nested"]["array"] += 1
        return np.zeros(2, np.float32), {}


@pytest.mark.parametrize("backend", ["sync", "2 workers", "caller and 2", "threads"])
def test_options_of_a_reset_are_each_envs_own(backend):
    make = maker(backend)
    envs = make([Greedy] * 4)
    options = {"level": 3, "nested": {"list": [], "array": np.zeros(1)}}
    before = repr(options)
    for more in ({}, {"reset_mask": np.ones(4, np.bool_)}):
        envs.reset(options=options | more)
        assert envs.get_attr("seen") == (before,) * 4
        assert repr(options) == before
    envs.reset(options=None)
    assert envs.get_attr("seen") == ("None",) * 4
    envs.close()


@pytest.mark.parametrize("backend", ["sync", "2 workers"])
def test_a_first_reset_by_mask_and_steps_of_ended_envs_are_refused(backend):
    """Gymnasium's AsyncVectorEnv lets both pass: rows of envs that are in no episode."""
    make = maker(backend)
    envs = make(counters([1, 3, 1]), autoreset_mode="Disabled")
    mask = {"reset_mask": np.array([True, False, True])}
    with pytest.raises(ResetNeeded, match="reset all envs first"):
        envs.reset(options=mask)
    envs.reset()
    envs.step([0] * 3)
    for call in (envs.step, envs.send):
        with pytest.raises(ResetNeeded, match=r"envs \[0, 2\] have ended"):
            call([0] * 3)
    envs.reset(options=mask)
    assert envs.step([0] * 3)[0][:, 2].tolist() == [1, 2, 1]
    envs.close()
