"""send and recv: any split gives what step gives, and what was received stays."""

import contextlib
import functools

import gymnasium as gym
import numpy as np
import pytest
from envs import (
    NUM_ENVS,
    SPACES,
    CounterEnv,
    Pair,
    PairSpace,
    counters,
    random_envs,
)
from equality import assert_same
from gymnasium import spaces

from vecenv import SyncVectorEnv
from vecenv.core.spaces import take_rows


def test_steps_and_sends_may_alternate():
    stepped, mixed = random_envs(SPACES["dict"]), random_envs(SPACES["dict"])
    assert_same(mixed.reset(seed=4), stepped.reset(seed=4))
    for step in range(8):
        actions = np.full(NUM_ENVS, step % 4)
        expected = stepped.step(actions)
        if step % 2:
            assert_same(mixed.step(actions), expected)
            continue
        order = np.roll(np.arange(NUM_ENVS), step)
        mixed.send(actions[order], order)
        batch = mixed.recv()
        assert_same(batch.obs, take_rows(SPACES["dict"], expected[0], order))
        assert batch.env_ids.tolist() == order.tolist()  # here, who was sent first is ready first


@pytest.mark.parametrize("copy", [True, False])
def test_received_batches_are_the_callers_to_keep(copy):
    envs = SyncVectorEnv(counters([9, 9], reuses_obs=True), copy=copy)
    envs.reset()
    envs.send([0, 0])
    first = envs.recv()
    kept = [np.copy(field) for field in first[:4]]
    envs.step([0, 0])
    envs.send([0, 0])
    envs.recv()
    assert_same([*first[:4]], kept)
    assert first.infos["step"].tolist() == [1, 1]


class Exploding(CounterEnv):
    """Env 1 raises in its first step."""

    def step(self, action):
        if self.name == 1 and self.episode == 0:
            raise FloatingPointError("physics exploded")
        return super().step(action)


def test_after_an_exception_no_action_is_taken_twice():
    envs = SyncVectorEnv([functools.partial(Exploding, name, 9) for name in range(3)])
    envs.reset()
    envs.send([5, 5, 5])
    with pytest.raises(FloatingPointError):
        envs.recv()
    with contextlib.suppress(Exception):  # the rest, the same again, or a refusal
        envs.recv()
    assert envs.envs[0].calls.count(("step", 5)) == 1
    assert envs.reset()[0][:, 2].tolist() == [0, 0, 0]
    assert envs.step([0, 0, 0])[1].tolist() == [1, 1, 1]


class ChangingPair(gym.Env):
    """Returns one object again and again, and changes it."""

    observation_space = PairSpace()
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.pair = Pair(0, 0)

    def reset(self, *, seed=None, options=None):
        self.pair.left = 0
        return self.pair, {}

    def step(self, action):
        self.pair.left += 1
        return self.pair, 0.0, False, False, {}


@pytest.mark.parametrize("way", ["step", "send"])
def test_objects_that_envs_go_on_changing_are_copied_too(way):
    envs = SyncVectorEnv([ChangingPair] * 2)
    kept = [envs.reset()[0]]
    for _ in range(3):
        if way == "step":
            kept.append(envs.step([0, 0])[0])
        else:
            envs.send([0, 0])
            kept.append(envs.recv().obs)
    assert kept == [(Pair(k, 0), Pair(k, 0)) for k in range(4)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_envs": 0}, ValueError, "max_envs is 0, expected at least 1"),
        ({"max_envs": 2.0}, TypeError, "max_envs is 2.0, expected an integer"),
        ({"min_envs": 3, "max_envs": 2}, ValueError, "min_envs is 3 and max_envs 2, expected"),
        ({"min_envs": 4}, ValueError, "min_envs is 4, expected 1 to 3"),
        ({"timeout": float("nan")}, ValueError, "timeout is nan, expected seconds from 0 on"),
        ({"timeout": -1}, ValueError, "timeout is -1, expected seconds from 0 on, or None"),
        ({"timeout": "3"}, TypeError, "timeout is '3', expected a number of seconds, or None"),
        ({"timeout": True}, TypeError, "timeout is True, expected a number"),
    ],
)
def test_wrong_arguments_of_recv(arguments, error, message):
    envs = SyncVectorEnv(counters([9] * 3))
    envs.reset()
    envs.send([0, 0, 0])
    with pytest.raises(error, match=message):
        envs.recv(**arguments)
    assert len(envs.recv(max_envs=9).env_ids) == 3
    envs.close()
