"""As many envs are made as are asked for, and nothing is stepped before the caller does."""

import contextlib
import functools
import importlib
import logging

import gymnasium as gym
import pytest
from traced_envs import TracedEnv, TracedGame, traces

from vecenv import AsyncVectorEnv, EnvCreationError, SyncVectorEnv, make_vec
from vecenv.agents import make_vec_agents
from vecenv.command.cli import main

WAYS = {
    "default": {},
    "sync": {"backend": "sync"},
    "async": {"backend": "async"},
    "timeout": {"vector_kwargs": {"timeout": 60.0}},
}


def assert_made_once(envs, path, num_envs=4):
    """Use envs that were just made."""
    assert traces(path) == {"made": num_envs}
    envs.reset(seed=1)
    assert traces(path) == {"made": num_envs, "reset": num_envs}
    envs.step(envs.action_space.sample())
    assert traces(path) == {"made": num_envs, "reset": num_envs, "step": num_envs}
    envs.close()
    assert traces(path)["close"] == traces(path)["made"] == num_envs


@pytest.mark.parametrize("way", WAYS)
def test_make_vec_makes_each_env_once_and_steps_none(way, traced):
    for env in functools.partial(TracedEnv, traced), "Traced-v0":
        envs = make_vec(env, 4, **WAYS[way])
        assert type(envs) is (AsyncVectorEnv if way in ("async", "timeout") else SyncVectorEnv)
        assert_made_once(envs, traced)
        traced.unlink()


@pytest.mark.parametrize("way", WAYS)
def test_make_vec_agents_makes_each_game_once_and_steps_none(way, tmp_path):
    path = tmp_path / "calls"
    envs = make_vec_agents(functools.partial(TracedGame, path), 4, **WAYS[way])
    assert_made_once(envs, path)


def test_a_vector_entry_point_is_not_called_to_see_what_it_makes(tmp_path):
    importlib.import_module("vecenv.jit")  # so that it may make compiled envs
    calls = []

    def make_unlike(num_envs, **kwargs):
        calls.append(num_envs)
        return gym.make_vec("CartPole-v1", num_envs)

    gym.register("Unlike-v0", TracedEnv, vector_entry_point=make_unlike)
    try:
        make_vec("Unlike-v0", 2, path=tmp_path / "calls").close()
    finally:
        del gym.registry["Unlike-v0"]
    assert calls == []


def test_only_auto_makes_envs_for_a_trial_and_the_log_says_so(tmp_path, caplog):
    path, factory = tmp_path / "calls", functools.partial(TracedEnv, tmp_path / "calls")
    with caplog.at_level(logging.INFO, "vecenv"):
        make_vec(factory, 2).close()
        assert "trial" not in caplog.text
        make_vec(factory, 2, backend="auto").close()
    assert "makes an env for a trial and steps it, beside the 2 that are asked for" in caplog.text
    assert traces(path)["made"] == 5 and traces(path)["step"] > 0


def test_a_trial_that_fails_is_a_warning(tmp_path, caplog):
    def in_use(path):
        raise OSError("the port is in use")

    with caplog.at_level(logging.WARNING, "vecenv"):
        env_fns = [functools.partial(in_use, tmp_path / name) for name in "ab"]
        with contextlib.suppress(EnvCreationError):
            make_vec(env_fns, backend="auto").close()
    (record,) = [record for record in caplog.records if "the trial of" in record.getMessage()]
    assert record.levelname == "WARNING"
    assert "failed with OSError: the port is in use; name a backend" in record.getMessage()


# -- commands -------------------------------------------------------------------------------------


@pytest.fixture
def traced(tmp_path, monkeypatch):
    """Register an env that a command can name; return where its calls are written."""
    monkeypatch.chdir(tmp_path)
    gym.register("Traced-v0", TracedEnv, kwargs={"path": tmp_path / "calls"})
    yield tmp_path / "calls"
    del gym.registry["Traced-v0"]


def test_watch_makes_one_env(traced, capsys):
    assert main(["watch", "Traced-v0", "--steps", "7"]) == 0
    assert traces(traced)["made"] == 1
    assert capsys.readouterr().out == "".join(f"step {k}\n" for k in range(6))  # the episode


def test_check_makes_the_envs_that_it_checks(traced, capsys):
    assert main(["check", "Traced-v0", "--num-envs", "3", "--num-steps", "20"]) == 0
    assert traces(traced)["made"] == 3


@pytest.mark.usefixtures("one_torch_thread")
def test_a_training_makes_its_envs_those_of_its_evaluations_and_one_for_the_spaces(traced, capsys):
    few = ["--total-steps", "64", "--num-envs", "3", "--num-steps", "8", "--eval-episodes", "2"]
    assert main(["train", "Traced-v0", *few, "--save", "run"]) == 0
    assert traces(traced)["made"] == 1 + 3 + 2 + 2  # played twice
    traced.unlink()
    assert main(["train", "Traced-v0", "--algo", "ppo", *few, "--save", "other"]) == 0
    assert traces(traced)["made"] == 3 + 2 + 2
    traced.unlink()
    assert main(["play", "Traced-v0", "--policy", "run", "--episodes", "2"]) == 0
    assert traces(traced)["made"] == 2
