"""Every bundled compiled env keeps the rules of vector envs, and draws itself."""

import re
import sys
import zlib
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from jit.toy_rolls import bundled_ids

import vecenv
from vecenv.check import check_vector_env
from vecenv.jit.binding import uncompiled
from vecenv.jit.envs import game_2048, grid_world
from vecenv.jit.envs.game_2048 import Game2048VectorEnv
from vecenv.jit.envs.grid_world import GridWorldVectorEnv
from vecenv.jit.envs.minatar.asterix import AsterixVectorEnv
from vecenv.jit.envs.minatar.freeway import FreewayVectorEnv
from vecenv.jit.envs.minatar.seaquest import SeaquestVectorEnv
from vecenv.jit.envs.minatar.space_invaders import SpaceInvadersVectorEnv
from vecenv.make import COMPILED_TWINS
from vecenv.page.names import action_names

TABLE = Path(__file__).parents[3] / "docs" / "compiled_envs.md"
NAMES = bundled_ids("vecenv.jit.")


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_as_plain_python_and_draws_itself(name):
    envs = vecenv.make_vec(name, 2, vector_kwargs={"debug": True}, render_mode="rgb_array")
    obs, _ = envs.reset(seed=7)
    envs.action_space.seed(7)
    before = envs.render()[0]
    assert envs.metadata["render_fps"] >= 10
    frames = []
    for _ in range(10):
        assert obs in envs.observation_space
        obs, *_ = envs.step(envs.action_space.sample())
        frames += envs.render()
    assert (before != before[0, 0]).any()  # colours
    assert any((frame != before).any() for frame in frames)


@pytest.mark.parametrize("name", NAMES)
def test_its_actions_have_names(name):
    envs = vecenv.make_vec(name, 1, vector_kwargs={"debug": True})
    for part in action_names(envs, name).parts:
        assert len(set(part.names)) == envs.single_action_space.n
        assert not any(text.isdigit() for text in part.names)


def test_names_of_actions_are_those_of_the_rules():
    for kind in (AsterixVectorEnv, FreewayVectorEnv, SeaquestVectorEnv, SpaceInvadersVectorEnv):
        rules = vars(sys.modules[kind.__module__])
        for number, name in enumerate(kind.actions[1:], 1):
            assert rules[name.upper()] == number
    named = GridWorldVectorEnv(1, debug=True).get_action_meanings()
    for number, name in enumerate(named[:-1]):
        assert vars(grid_world)[name.upper().replace(" ", "_")] == number
    # Where tiles of the second line or column are moved to.
    corners = {"up": (0, 1), "right": (1, 3), "down": (3, 1), "left": (1, 0)}
    for number, name in enumerate(Game2048VectorEnv(1, debug=True).get_action_meanings()):
        assert divmod(game_2048.cell.py_func(number, 1, 0), game_2048.SIZE) == corners[name]


def test_lists_that_are_kept_by_hand_have_every_env():
    """The table of the docs, the twins that `make_vec` knows, and what is compiled for devices."""
    from jit.on_device.bundled import MAKERS, ZOO

    rows = re.findall(r"^\| (`Jit.*?) \|", TABLE.read_text(encoding="utf-8"), re.M)
    assert set(re.findall("`(.+?)`", " ".join(rows))) >= set(NAMES)
    twins = {name for name in NAMES if name.removeprefix("Jit") in gym.registry}
    assert set(COMPILED_TWINS.values()) == twins
    with uncompiled():
        on_devices = {make(1).kernels.name for make in (*MAKERS.values(), *ZOO.values())}
        assert {vecenv.make_vec(name, 1).kernels.name for name in NAMES} <= on_devices


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_the_rules_of_vector_envs(name):
    check_vector_env(vecenv.make_vec(name, 3, vector_kwargs={"max_episode_steps": 30}))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if "Continuous" not in name])
def test_compiled_code_does_what_plain_python_does(name):
    both = [vecenv.make_vec(name, 5, vector_kwargs={"debug": debug}) for debug in (False, True)]
    both[0].action_space.seed(0)
    results = [list(envs.reset(seed=3)[:1]) for envs in both]
    for _ in range(300):
        actions = both[0].action_space.sample()
        for envs, found in zip(both, results, strict=True):
            found += envs.step(actions)[:4]
    for first, second in zip(*results, strict=True):
        np.testing.assert_allclose(
            first.astype(np.float64), second.astype(np.float64), atol=1e-5, rtol=1e-5
        )


# Of trajectories that were equal to those of `minatar` and `minigrid`, which are no dependency: the
# tests that compare step by step are skipped where these are not installed.
COMPARED = {
    "JitMinAtarAsterix-v1": 0x0F2A5BB1,
    "JitMinAtarFreeway-v1": 0x12582A16,
    "JitMinAtarSeaquest-v1": 0xEE58B2F7,
    "JitMinAtarSpaceInvaders-v1": 0x9D6CB11D,
    "JitGridDoorKey-v0": 0x6782BE97,
}


@pytest.mark.parametrize("name", COMPARED)
def test_trajectories_are_those_that_were_compared(name):
    envs = vecenv.make_vec(name, 2, vector_kwargs={"debug": True})
    obs, _ = envs.reset(seed=5)
    envs.action_space.seed(5)
    check = zlib.crc32(obs.tobytes())
    for _ in range(40):
        for array in envs.step(envs.action_space.sample())[:3]:
            check = zlib.crc32(array.tobytes(), check)
    assert check == COMPARED[name]
