"""examples/zoo: settings that their trainers read, and policies that play."""

import json
from pathlib import Path

import gymnasium as gym
import pytest
import tyro
from PIL import Image

import vecenv
from vecenv.command import trainers
from vecenv.command.cli import main

ROOT = Path(__file__).parents[2]
ZOO = ROOT / "examples" / "zoo"
NAMES = sorted(file.stem for file in ZOO.glob("*.toml"))
POLICIES = sorted(file.parent.name for file in ZOO.glob("*/options.json"))
SCORES = {"JitCartPole-v1": 475.0}  # what its policy reaches in ten episodes at least


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_of_an_env_and_read_by_its_trainer(name):
    file = trainers.zoo_config(name)
    values = trainers.read_config(file)
    module = trainers.load(values["algo"])
    options = tyro.cli(module.Options, args=trainers.arguments_of(values, module.Options, file))
    for key, value in values.items():
        found = getattr(options, key, value)
        assert found == (tuple(value) if isinstance(value, list) else value), key
    assert gym.spec(name).id == name


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_small_and_of_the_present_settings(name):
    files = [path for path in (ZOO / name).rglob("*") if path.is_file()]
    assert sum(file.stat().st_size for file in files) < 110_000
    assert {str(file.relative_to(ZOO / name)) for file in files} == {
        "options.json",
        "policy.pt",
        "checkpoint/last.pt",
    }
    policy = vecenv.load_policy(ZOO / name)  # without making its env
    assert policy.action_space.contains(policy(policy.observation_space.sample()))
    options = json.loads((ZOO / name / "options.json").read_text())
    values = trainers.read_config(ZOO / f"{name}.toml")
    assert {key: options.get(key) for key in values if key != "algo"} == {
        key: value for key, value in values.items() if key != "algo"
    }
    assert not Path(options["save"]).is_absolute()


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", SCORES)
def test_policies_play(name, capsys):
    assert main(["play", name, "--policy", "zoo", "--episodes", "10"]) == 0
    assert float(capsys.readouterr().out.split("return ")[1].split()[0]) >= SCORES[name]


@pytest.mark.usefixtures("one_torch_thread")
def test_a_policy_of_a_compiled_env_is_filmed(tmp_path):
    path = tmp_path / "a.gif"
    args = ["--policy", "zoo", "--episodes", "1", "--gif", str(path), "--frames", "5"]
    assert main(["play", "JitCartPole-v1", *args]) == 0
    with Image.open(path) as film:
        assert (film.n_frames, film.info["duration"], film.size) == (6, 20, (300, 200))


FAST = ["--total-steps", "600", "--num-envs", "4", "--num-steps", "32", "--eval-episodes", "2"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
def test_the_zoos_settings_train_and_those_of_the_command_line_go_first(tmp_path, capsys):
    args = ["train", "JitMountainCar-v0", "--config", "zoo", *FAST, "--save", str(tmp_path / "run")]
    assert main(args) == 0
    assert capsys.readouterr().out.startswith("ppo: as ")
    found = json.loads((tmp_path / "run" / "options.json").read_text())
    zoo = trainers.read_config(ZOO / "JitMountainCar-v0.toml")
    assert (found["total_steps"], found["num_envs"]) == (600, 4)
    assert found["gae_lambda"] == zoo["gae_lambda"]


def test_the_page_has_a_row_for_all_settings():
    page = (ROOT / "docs" / "zoo.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    scores = {cells[0].removeprefix("| "): cells[3:6] for cells in rows}
    assert all(all("±" in score for score in scores[name]) for name in NAMES)
