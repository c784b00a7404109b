"""Grid worlds against the package `minigrid`, with the same draws; skipped without it."""

import numpy as np
import pytest
from jit.envs.draws import Draws, feed

import vecenv
from vecenv.jit.envs.grid_world import GridWorldVectorEnv

CASES = {
    "empty": ("empty", "EmptyEnv", {"size": 8}),
    "empty_random": ("empty", "EmptyEnv", {"size": 6}),
    "four_rooms": ("fourrooms", "FourRoomsEnv", {}),
    "door_key": ("doorkey", "DoorKeyEnv", {"size": 8}),
    "small door_key": ("doorkey", "DoorKeyEnv", {"size": 5}),
}
NUM_WORDS = 400  # more than a world of these takes


def make_reference(name):
    """Return an env of MiniGrid."""
    minigrid = pytest.importorskip("minigrid.envs", exc_type=ImportError)
    _, made, options = CASES[name]
    if name == "empty_random":
        options = {**options, "agent_start_pos": None}
    return getattr(minigrid, made)(**options)


def check_equal(name, num_envs, num_steps, debug):
    references = [make_reference(name) for _ in range(num_envs)]
    draws = [Draws() for _ in references]
    envs = GridWorldVectorEnv(
        num_envs, name.split()[-1], size=references[0].width, autoreset_mode="Disabled", debug=debug
    )
    envs.np_random_seed  # noqa: B018  # begins the streams
    rng, over, num_episodes = np.random.default_rng(0), np.ones(num_envs, np.bool_), 0
    for _ in range(num_steps):
        if over.any():
            feed(envs, draws, NUM_WORDS)
            obs, _ = envs.reset(options={"reset_mask": over})
            for i in np.flatnonzero(over):
                references[i].np_random = draws[i]
                np.testing.assert_array_equal(obs[i], references[i].reset()[0]["image"])
        actions = rng.choice(7, num_envs, p=[0.15, 0.15, 0.35, 0.12, 0.05, 0.13, 0.05])
        obs, *found = envs.step(actions)
        for i, reference in enumerate(references):
            expected = reference.step(actions[i])
            np.testing.assert_array_equal(obs[i], expected[0]["image"])
            assert tuple(column[i] for column in found[:3]) == expected[1:4]
        over = found[1] | found[2]
        num_episodes += found[1].sum()
    return num_episodes


@pytest.mark.parametrize("name", CASES)
def test_a_few_steps_equal_minigrids(name):
    check_equal(name, num_envs=2, num_steps=60, debug=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_hundred_thousand_steps_equal_minigrids(name):
    assert check_equal(name, num_envs=20, num_steps=5_000, debug=False) > 0


def test_own_maps():
    envs = GridWorldVectorEnv(2, ["######", "#A.KD#", "#LL.G#", "######"], debug=True)
    obs, _ = envs.reset(seed=0)
    assert obs[0, 3, 6].tolist() == [1, 0, 0] and obs[0, 3, 4].tolist() == [5, 4, 0]
    for action in (2, 3, 2, 5, 2):  # to the key, take it, to its cell, open the door, go there
        assert not envs.step([action, action])[1].any()
    assert envs.states[0].x == 4
    envs.step([1, 1])
    _, rewards, terminations, _, _ = envs.step([2, 1])
    assert terminations.tolist() == [True, False] and rewards[0] == 1 - 0.9 * 7 / (4 * 24)


@pytest.mark.parametrize(
    ("layout", "size", "message"),
    [
        ("emty", 8, r"layout is 'emty', expected one of empty, empty_random"),
        ("door_key", 4, "size of door_key is 4, expected an integer from 5 to 127"),
        ("four_rooms", 8, "expected an odd number"),
        (["####", "#A.#"], 8, "three rows or more"),
        (["####", "#A.#", "#.##", "#..#"], 8, "walls, '#', all around"),
        (["####", "#Ax#", "####"], 8, r"the map has \['x'\]"),
        (["####", "#AA#", "####"], 8, "several signs 'A'"),
        (["####", "#GG#", "####"], 8, "no empty cell"),
    ],
)
def test_layouts_are_checked(layout, size, message):
    with pytest.raises(ValueError, match=message):
        GridWorldVectorEnv(1, layout, size=size)


def test_states_that_point_outside_are_refused():
    envs = vecenv.make_vec("JitGridDoorKey-v0", 2, vector_kwargs={"debug": True})
    envs.reset(seed=0)
    state = envs.state_dict()
    state["states"]["x"] = 8
    with pytest.raises(ValueError, match="players outside of the walls"):
        envs.load_state_dict(state)
