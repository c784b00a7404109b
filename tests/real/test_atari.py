"""Atari's preprocessing around workers and Gymnasium's around single envs: the same pictures."""

import gymnasium as gym
import numpy as np
import pytest

from vecenv import SyncVectorEnv
from vecenv.wrappers import make_atari_vec

pytestmark = pytest.mark.real
ale_py = pytest.importorskip("ale_py")
pytest.importorskip("cv2")


def make_single():
    env = gym.make("ALE/Breakout-v5", frameskip=1)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, terminal_on_life_loss=True)
    return gym.wrappers.FrameStackObservation(gym.wrappers.ClipReward(env, -1, 1), 4)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_games_are_those_of_single_envs(mode):
    gym.register_envs(ale_py)
    ours = make_atari_vec(
        "ALE/Breakout-v5", 2, terminal_on_life_loss=True, backend="async", autoreset_mode=mode
    )
    theirs = SyncVectorEnv([make_single] * 2, autoreset_mode=mode)
    assert ours.single_observation_space == theirs.single_observation_space
    assert (ours.reset(seed=1)[0] == theirs.reset(seed=1)[0]).all()
    rng, num_ends = np.random.default_rng(2), 0
    for _ in range(150):
        actions = rng.integers(0, 4, 2)
        found, expected = ours.step(actions), theirs.step(actions)
        for a, b in zip(found[:4], expected[:4], strict=True):
            assert (a == b).all()
        over = found[2] | found[3]
        num_ends += over.sum()
        for row in np.flatnonzero(over if mode == "SameStep" else []):
            assert (found[4]["final_obs"][row] == expected[4]["final_obs"][row]).all()
        if mode == "Disabled" and over.any():
            options = {"reset_mask": over}
            assert (ours.reset(options=options)[0] == theirs.reset(options=options)[0]).all()
    assert num_ends > 3
    ours.close()
    theirs.close()
