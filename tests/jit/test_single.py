"""Bundled envs one by one: what `gymnasium.make` makes of their ids."""

import copy
import pickle
import re

import gymnasium as gym
import numpy as np
import pytest
from envs import begun
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from jit.toy_rolls import bundled_ids

import vecenv
from vecenv import ActionError, make_vec
from vecenv.jit import JitEnv, JitVectorEnv

NAMES = bundled_ids("vecenv.jit.", "vecenv.agents.")
# Of spaces without bounds, as Gymnasium's own have.
UNBOUNDED = ("ignore:.*(infinity|symmetric and normalized space)",)


@pytest.mark.filterwarnings(*UNBOUNDED)
@pytest.mark.parametrize("name", NAMES)
def test_every_bundled_id_makes_a_single_env(name):
    """It passes Gymnasium's check, and its draws are those of a vector env of one."""
    env = gym.make(name, debug=True)
    check_env(env.unwrapped)
    envs = make_vec(name, 1, vector_kwargs={"debug": True, "autoreset_mode": "Disabled"})
    assert isinstance(env.unwrapped, JitEnv) and isinstance(envs, JitVectorEnv)
    assert env.observation_space == envs.single_observation_space
    obs, info = env.reset(seed=7)
    np.testing.assert_array_equal(obs, envs.reset(seed=7)[0][0])
    env.action_space.seed(0)
    for _ in range(12):
        action = env.action_space.sample()
        row = envs.step(np.asarray(action)[None])
        alone = env.step(action)
        np.testing.assert_array_equal(alone[0], row[0][0])
        assert alone[1:] == (row[1][0], row[2][0], row[3][0], {}) and info == {}
        assert hasattr(env.unwrapped, "action_masks") == envs.has_action_masks
        if alone[2] or alone[3]:
            break


def test_a_single_env_has_the_infos_of_a_vector_env():
    env = gym.make("JitTaxi-v4", debug=True, mask_infos=True, episode_infos=True)
    envs = make_vec("JitTaxi-v4", 1, vector_kwargs={"debug": True}, mask_infos=True)
    _, info = env.reset(seed=3)
    assert info.keys() == {"action_mask"}
    np.testing.assert_array_equal(info["action_mask"], envs.reset(seed=3)[1]["action_mask"][0])
    np.testing.assert_array_equal(info["action_mask"], env.unwrapped.action_masks())
    for _ in range(200):
        _, _, terminated, truncated, info = env.step(int(info["action_mask"].argmax()))
    assert truncated and not terminated
    assert info["episode"] == {"r": -200.0, "l": 200}
    with pytest.raises(ResetNeeded, match="the episode is over; call reset"):
        env.step(0)


def test_single_envs_draw_and_refuse_what_the_vector_env_has_not():
    env = begun(gym.make("JitFrozenLake8x8-v1", debug=True, render_mode="rgb_array"))
    assert env.render().dtype == np.uint8 and env.render().ndim == 3
    with pytest.raises(ActionError, match=re.escape("action is 4, expected an integer from 0 to")):
        env.step(4)
    with pytest.raises(TypeError, match="num_threads is for vector envs"):
        gym.make("JitFrozenLake8x8-v1", num_threads=2)
    with pytest.raises(ValueError, match="render_mode is 'ansi', expected one of rgb_array"):
        make_vec("JitFrozenLake8x8-v1", 1, render_mode="ansi")
    with pytest.raises(ValueError, match=r"options has \['x'\]"):
        env.reset(options={"x": 1})


def test_ids_are_made_as_before_by_vector_and_by_single_envs_where_asked():
    envs = gym.make_vec("JitTaxi-v4", 3, debug=True)
    assert isinstance(envs, JitVectorEnv) and envs.num_envs == 3
    assert isinstance(make_vec("JitTaxi-v4", 2, vector_kwargs={"debug": True}), JitVectorEnv)
    one_by_one = make_vec("JitTaxi-v4", 3, backend="sync", debug=True)
    assert isinstance(one_by_one, vecenv.SyncVectorEnv) and one_by_one.has_action_masks
    obs, _ = one_by_one.reset(seed=5)
    np.testing.assert_array_equal(obs, envs.reset(seed=5)[0])
    np.testing.assert_array_equal(one_by_one.step([0, 1, 2])[0], envs.step([0, 1, 2])[0])
    spec = gym.spec("JitGridDoorKey-v0")
    env = gym.make(type(spec).from_json(spec.to_json()), debug=True)
    assert env.observation_space.shape == (7, 7, 3)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copies_of_a_single_env_go_on_from_where_it_was(again):
    env = begun(gym.make("JitTaxi-v4", debug=True), seed=2)
    env.step(1)
    other = again(env)
    for action in (0, 3, 1, 2):
        assert env.step(action) == other.step(action)
