"""Compiled envs of a user's own: registered, found, drawn, and run by every command."""

import json
import logging
import sys
from pathlib import Path

import gymnasium as gym
import pytest
from jit.toy_env import PARAMS, TOY
from jit.toy_rolls import assert_same, make, random_actions, roll
from PIL import Image

from vecenv import make_vec
from vecenv.command.cli import main
from vecenv.jit import JitVectorEnv
from vecenv.jit.cartpole import CARTPOLE

WAREHOUSE = """
import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from vecenv.jit import EnvKernels, JitVectorEnv
from vecenv.jit.random import integers

SIZE = 4

def reset(state, rng):
    state.cell = integers(rng, SIZE)

def step(state, action, rng):
    state.cell = min(max(state.cell + 2 * action - 1, 0), SIZE - 1)
    return 1.0 if state.cell == SIZE - 1 else 0.0, False, integers(rng, 20) == 0

def observe(state, out):
    out[0] = state.cell

def draw(state):
    picture = np.zeros((8, 8 * SIZE, 3), np.uint8)
    picture[:, 8 * state.cell : 8 * state.cell + 8] = 255
    return picture

SPACES = Box(0, SIZE, (1,), np.float32), Discrete(2)
FUNCTIONS = {"reset": reset, "step": step, "observe": observe, "render": draw}
KERNELS = EnvKernels([("cell", np.int32)], *SPACES, **FUNCTIONS, name="Warehouse")

def make_vec(num_envs, **options):
    return JitVectorEnv(KERNELS, num_envs, **options)

class Warehouse(JitVectorEnv):
    metadata = {"render_modes": ["ansi"], "render_fps": 3}

    def __init__(self, num_envs=1, **options):
        super().__init__(KERNELS, num_envs, **options)

    def render(self):
        return tuple("." * state.cell + "x" for state in self.states)

def act(obs):
    return np.ones(len(obs), np.int64)

gym.register("Warehouse-v0", vector_entry_point="warehouse:make_vec")
gym.register("WarehouseText-v0", vector_entry_point="warehouse:Warehouse")
gym.register("NoWarehouse-v0", "gymnasium.envs.classic_control:CartPoleEnv",
             vector_entry_point=lambda num_envs: gym.make_vec("CartPole-v1", num_envs))
gym.register("OtherWarehouse-v0",
             vector_entry_point=lambda num_envs: gym.make_vec("CartPole-v1", num_envs))
gym.register("BrokenWarehouse-v0", "gymnasium.envs.classic_control:CartPoleEnv",
             vector_entry_point="warehouse:nothing_there")
"""


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Be in a folder with a module `warehouse` that is not on the path."""
    (tmp_path / "warehouse.py").write_text(WAREHOUSE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != ""])
    others = {name: spec for name, spec in gym.registry.items() if "Warehouse" not in name}
    monkeypatch.setattr(gym.envs.registration, "registry", others)
    monkeypatch.setattr(gym, "registry", gym.envs.registration.registry)
    sys.modules.pop("warehouse", None)
    yield tmp_path
    sys.modules.pop("warehouse", None)


@pytest.mark.parametrize(
    ("name", "backend"), [("Warehouse-v0", "auto"), ("WarehouseText-v0", "jit")]
)
def test_the_vector_env_of_a_users_id_is_recognised(name, backend, beside):
    envs = make_vec(f"warehouse:{name}", 3, backend=backend, max_episode_steps=7)
    assert isinstance(envs, JitVectorEnv) and envs.num_envs == 3
    assert envs.max_episode_steps == 7


@pytest.mark.parametrize("name", ["NoWarehouse-v0", "BrokenWarehouse-v0"])
def test_other_vector_entry_points_are_not_taken_for_compiled_ones(name, beside, caplog):
    with caplog.at_level(logging.INFO, "vecenv"):
        assert not isinstance(make_vec(f"warehouse:{name}", 1), JitVectorEnv)
    assert ("can't be made" in caplog.text) == (name == "BrokenWarehouse-v0")
    with pytest.raises((ValueError, AttributeError), match=r"compiled kernels|nothing_there"):
        make_vec(f"warehouse:{name}", 1, backend="jit")


@pytest.mark.parametrize(
    "options",
    [{"backend": "sync"}, {"backend": "async"}, {"wrappers": [lambda env: env]}],
    ids=["sync", "async", "wrappers"],
)
def test_ids_without_single_envs_say_so(options, beside):
    for name in ("Warehouse-v0", "OtherWarehouse-v0"):
        told = rf"{name} has no single envs, .* use backend='jit' if it is compiled, else gym"
        with pytest.raises(ValueError, match=told):
            make_vec(f"warehouse:{name}", 2, **options)
    for changes in ({}, {"backend": "jit"}):
        with pytest.raises(ValueError, match=r"no compiled kernels; use gymnasium\.make_vec"):
            make_vec("warehouse:OtherWarehouse-v0", 2, **changes)


def test_kernels_are_made_into_a_vector_env():
    actions = random_actions(5)
    envs = make_vec(TOY, 5, params=PARAMS, num_threads=1)
    assert isinstance(envs, JitVectorEnv)
    assert_same(roll(envs, actions), roll(make(5), actions))
    assert make_vec(CARTPOLE).num_envs == 1
    with pytest.raises(ValueError, match=r"CartPole-v1 has no single envs, .*'sync'"):
        make_vec(CARTPOLE, 2, backend="sync")


def test_a_compiled_env_of_the_same_rules_is_named(caplog):
    with caplog.at_level(logging.INFO, "vecenv"):
        make_vec("CartPole-v1").close()
    assert "make_vec('JitCartPole-v1')" in caplog.text
    with pytest.raises(ValueError, match="use 'JitCartPole-v1', which has the same rules"):
        make_vec("CartPole-v1", backend="jit")


def test_watch_draws_a_users_env(beside, capsys):
    watch = ["watch", "warehouse:Warehouse-v0", "--steps", "6"]
    assert main([*watch, "--policy", "warehouse:act", "--gif", "out.gif"]) == 0
    with Image.open("out.gif") as picture:
        assert picture.size == (32, 8) and picture.n_frames >= 2
    assert main([*watch, "--fps", "1000"]) == 2
    assert "render_mode='rgb_array'" in capsys.readouterr().err
    text = ["watch", "warehouse:WarehouseText-v0", "--steps", "3", "--fps", "1000"]
    assert main([*text, "--policy", "warehouse:act"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("...x")
    assert main(["watch", "--steps", "3"]) == 2
    assert "policy is missing" in capsys.readouterr().err
    assert main([*watch, "--policy", "warehouse:nobody", "--gif", "out.gif"]) == 2
    assert "policy is 'warehouse:nobody'" in capsys.readouterr().err


def test_render_gives_each_env_and_a_copy_of_its_state(beside):
    envs = make_vec("warehouse:Warehouse-v0", 3, render_mode="rgb_array")
    assert envs.metadata["render_fps"] > 0 and "rgb_array" in envs.metadata["render_modes"]
    envs.reset(seed=0)
    frames = envs.render()
    assert [frame.shape for frame in frames] == [(8, 32, 3)] * 3
    assert [int(frame[0].argmax() // 24) for frame in frames] == envs.states.cell.tolist()
    with pytest.raises(ValueError, match="render_mode is 'human', expected one of rgb_array, ansi"):
        make_vec("Warehouse-v0", 1, render_mode="human")
    with pytest.raises(NotImplementedError, match="toy can't be drawn: give EnvKernels a `render`"):
        make(1, render_mode="rgb_array").render()


def test_kernels_that_draw_text_are_refused_a_page_before_any_episode(beside, capsys):
    text = WAREHOUSE.replace("    return picture", "    return 'x' * state.cell")
    (beside / "warehouse.py").write_text(text)
    few = ["--num-envs", "2", "--total-steps", "0", "--eval-episodes", "1", "--save", "run"]
    assert main(["train", "warehouse:KERNELS", "--algo", "ppo", *few]) == 0
    capsys.readouterr()
    assert main(["play", "warehouse:KERNELS", "--policy", "run", "--html", "a.html"]) == 2
    said = capsys.readouterr()
    assert "render of Warehouse returns text" in said.err and "return" not in said.out
    assert main(["play", "warehouse:KERNELS", "--policy", "run", "--text", "--episodes", "2"]) == 0


@pytest.mark.slow
def test_commands_run_a_users_compiled_env(beside, capsys):
    assert main(["check", "warehouse:Warehouse-v0", "--num-steps", "60"]) == 0
    assert main(["check", "warehouse:KERNELS", "--num-steps", "60"]) == 0
    compare = ["compare", "warehouse:Warehouse-v0", "--num-envs", "4", "--backends", "jit,sync"]
    few = ["--rounds", "1", "--round-s", "0.02", "--json", "numbers.json"]
    assert main([*compare, *few]) == 0
    cases = json.loads(Path("numbers.json").read_text())["cases"]
    found = {case["backend"]: case["status"] for case in cases}
    assert found == {"jit": "ok", "sync": "unavailable"}
