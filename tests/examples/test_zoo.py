"""examples/zoo: settings that their trainers read, and policies that play."""

import importlib
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


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "CartPole-v1", "--config", "zoo"], "did you mean JitCartPole-v1"),
        (["play", "CartPole-v1", "--policy", "zoo"], "no policy for CartPole-v1; did you mean"),
        (["train", "Synthetic-v0", "--config", "zoo"], "no settings for Synthetic-v0; it has Jit"),
        (["train", "..", "--config", "zoo"], "the zoo has no settings for ..; it has Jit"),
        (["train", "CartPole-v1", "--config", "odd.toml"], "which can't be read (expected names"),
        (["train", "CartPole-v1", "--config", "near.toml"], "algo is 'ppp', expected one of ppo"),
    ],
)
def test_what_the_zoo_lacks_is_said(args, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("odd.toml").write_text("algo = 3\n")
    Path("near.toml").write_text('algo = "ppp"\n')
    assert main(args) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("vecenv: ")


@pytest.fixture
def zoo(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("zoo")
    for name in ("ZOO", "RUNS"):
        monkeypatch.setattr(module, name, tmp_path / name.lower())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "zoo").mkdir()
    return module


def test_runs_are_finished_while_their_settings_are_the_same(zoo):
    file = zoo.ZOO / "JitCartPole-v1.toml"
    file.write_text('algo = "ppo"\ngamma = 0.9  # short\n')
    folder = zoo.RUNS / "JitCartPole-v1" / "2"
    folder.mkdir(parents=True)
    curve = [{"steps": 5, "charts/episodic_return": None}, {"steps": 9, "return": 2.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve))
    note = {"settings": zoo.fingerprint(file), "wall_s": 3.0, "processor_s": 2.0}
    note |= {"is_finished": True, "mean": 1234.5, "ci95": 6.78, "machine": "a machine"}
    folder.with_suffix(".json").write_text(json.dumps(note))
    assert zoo.train("JitCartPole-v1", 2, 1.0) == "finished already"
    found = {"JitCartPole-v1": zoo.results("JitCartPole-v1")}
    assert found["JitCartPole-v1"][0].curve == [(9, 2.0)]
    assert "| JitCartPole-v1 | PPO | 100 000 | 1 234 ± 7 | 3 | 2 |" in zoo.table(found)
    file.write_text('algo = "ppo"\n# gamma is longer\ngamma = 0.95\n')
    assert zoo.results("JitCartPole-v1") == []


def test_the_page_has_a_row_for_all_settings():
    page = (ROOT / "docs" / "zoo.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    scores = {cells[0].removeprefix("| "): cells[3:6] for cells in rows}
    assert all(all("±" in score for score in scores[name]) for name in NAMES)
