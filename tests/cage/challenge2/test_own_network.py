"""A network of one's own on the command line: scored by its own tables, trained, played, filmed."""

import json
import re
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image

import vecenv
from vecenv.cage import evaluate
from vecenv.command.cli import main
from vecenv.command.trainers import choose, env_id_of
from vecenv.source import read_source

MODULE = """
from dataclasses import replace

import gymnasium as gym
import numpy as np

from vecenv.cage import cage2_scenario

faithful = cage2_scenario()
office = replace(faithful, name="Office", restore_cost=0.5,
                 rules=replace(faithful.rules, name="office"))
gym.register(
    "Office-v0",
    entry_point="vecenv.cage:Cage2Env",
    vector_entry_point="vecenv.cage:Cage2VectorEnv",
    kwargs={"scenario": office},
    disable_env_checker=True,
)


def restore(obs):
    return np.full(len(obs), 144)
"""


def forget():
    """What a new process knows of the network: nothing."""
    sys.modules.pop("my_net", None)
    gym.registry.pop("Office-v0", None)


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "my_net.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    forget()


@pytest.mark.parametrize("scenario", ["my_net:Office-v0", "my_net:office"])
def test_a_policy_is_scored_by_the_tables_of_its_network(scenario, capsys):
    """A Restore costs 0.5 there, and 1 in the challenge; the table and the file say which."""
    args = ["evaluate", "--policy", "my_net:restore", "--episodes", "2", "--red-agents", "sleep"]
    assert main([*args, "--scenario", scenario, "--json", "own.json"]) == 0
    assert "Office" in capsys.readouterr().out
    assert main([*args, "--json", "challenge.json"]) == 0
    own, challenge = (json.loads(Path(f"{x}.json").read_text()) for x in ("own", "challenge"))
    assert [cell["mean"] for cell in own["cells"]] == [-15, -25, -50]
    assert [cell["mean"] for cell in challenge["cells"]] == [-30, -50, -100]
    assert own["scenario"] == "Office"
    office = sys.modules["my_net"].office
    found = evaluate("my_net:restore", episodes=2, red_agents=["sleep"], scenario=office)
    assert found.total == pytest.approx(own["total"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--scenario", "my_net:restore"], "scenario is 'my_net:restore', which has none"),
        (["--scenario", "nowhere:office"], "there is no module 'nowhere'"),
        (["--scenario", "my_net:office", "--rules", "debugged"], "the scenario 'Office' has its"),
    ],
)
def test_a_scenario_that_is_none_is_told(words, told, capsys):
    assert main(["evaluate", "--policy", "sleep", "--episodes", "2", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_run_keeps_an_id_that_is_there_in_another_process():
    """With its module; of the package's own ids that is the package."""
    assert choose("my_net:Office-v0", "ppo").env == "my_net:Office-v0"
    assert env_id_of(read_source("Cage2-v0")) == "vecenv:Cage2-v0"
    forget()
    envs = vecenv.make_vec("my_net:Office-v0", 2)
    envs.reset(seed=1)
    assert envs.step(np.full(2, 144))[1].tolist() == [-0.5, -0.5]
    envs.close()


def fps_of(html):
    return float(re.search(r'"fps": ?([0-9.]+)', Path(html).read_text())[1])


def milliseconds_of(gif):
    with Image.open(gif) as picture:
        return picture.info["duration"]


@pytest.mark.parametrize(
    "env",
    [
        ["vecenv:Cage2-v0", "--policy", "sleep"],
        ["my_net:Office-v0"],
        ["my_net:Office-v0", "--policy", "react-restore"],
        ["Cage2-v0", "--policy", "my_net:restore", "--scenario", "my_net:office"],
        ["vecenv:Cage4-v0", "--policy", "sleep"],
    ],
    ids=" ".join,
)
def test_watch_writes_a_page_and_an_animation_of_two_pictures_a_second(env, capsys):
    """Both in one call, as `play` does."""
    args = ["watch", *env, "--steps", "3", "--html", "a.html", "--gif", "a.gif"]
    assert main(args) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "page: a.html" in out and "animation: a.gif" in out
    assert fps_of("a.html") == 2
    assert milliseconds_of("a.gif") == 500
