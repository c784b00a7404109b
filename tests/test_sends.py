"""send and recv: any split gives what step gives, and what was received stays."""

import gymnasium as gym
import numpy as np
import pytest
from envs import Pair, PairSpace, counters
from equality import assert_same
from gymnasium import spaces

from vecenv import SyncVectorEnv


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
        ({"max_envs": 0}, ValueError, "max_envs is 0, expected an integer of at least 1"),
        ({"max_envs": 2.0}, ValueError, "max_envs is 2.0, expected an integer"),
        ({"min_envs": 3, "max_envs": 2}, ValueError, "min_envs is 3 and max_envs 2, expected"),
        ({"min_envs": 4}, ValueError, "min_envs is 4, expected an integer from 1 to 3"),
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
