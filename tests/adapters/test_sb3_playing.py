"""Models of stable-baselines3 that were trained under VecNormalize, played by `vecenv play`."""

import functools

import numpy as np
import pytest
import torch
from masked_envs import Forbidding

import vecenv
from vecenv.command.cli import main
from vecenv.command.playing import Trained
from vecenv.learn import evaluate as evaluate_policy

pytest.importorskip("stable_baselines3")
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecNormalize

from vecenv.adapters.sb3 import make_sb3_env


@pytest.fixture
def trained(tmp_path):
    """A model in a folder of its own, and the env that has the statistics."""
    envs = VecNormalize(make_sb3_env("JitPendulum-v1", 4))
    model = PPO("MlpPolicy", envs, n_steps=32, batch_size=64, device="cpu", seed=1)
    model.learn(128)
    path = tmp_path / "models" / "model.zip"
    path.parent.mkdir()
    model.save(path)
    yield path, model, envs
    envs.close()


def actions_of(path, obs, **options):
    envs, act, _ = Trained("JitPendulum-v1", path, {}, **options).load(4)
    envs.close()
    return act(torch.from_numpy(obs), torch.zeros(4, dtype=torch.bool))


@pytest.mark.parametrize(
    "where", ["models/vecnormalize.pkl", "models/model/vecnormalize.pkl", "elsewhere.pkl", None]
)
def test_observations_are_normalised_as_in_training(trained, tmp_path, capsys, caplog, where):
    """By the file beside the model, or the one that is given; else none, and a line says which."""
    path, model, envs = trained
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32) * 3
    expected = model.predict(obs if where is None else envs.normalize_obs(obs), deterministic=True)
    options = {}
    if where is not None:
        (tmp_path / where).parent.mkdir(exist_ok=True)
        envs.save(tmp_path / where)
        options = {"vecnormalize": tmp_path / where} if where == "elsewhere.pkl" else {}
    np.testing.assert_array_equal(actions_of(path, obs, **options), expected[0])
    np.testing.assert_array_equal(vecenv.load_policy(path, **options)(obs), expected[0])
    told = [record.message for record in caplog.records]
    assert [f"no vecnormalize.pkl is beside {path}" in line for line in told] == [True] * (
        not where
    )
    given = [f"--{name}={value}" for name, value in options.items()]
    play = ["play", "JitPendulum-v1", "--policy", str(path), "--episodes", "1"]
    assert main([*play, *given]) == 0
    told = capsys.readouterr().out
    said = f"no vecnormalize.pkl is beside {path}" if where is None else str(tmp_path / where)
    assert said in told


def test_evaluate_gives_a_policy_its_masks(tmp_path):
    contrib = pytest.importorskip("sb3_contrib")
    masked = functools.partial(Forbidding, "action_masks", True)  # raises at masked actions
    envs = make_sb3_env(masked, 2)
    model = contrib.MaskablePPO("MlpPolicy", envs, n_steps=8, batch_size=8, device="cpu", seed=1)
    model.learn(16)
    model.save(tmp_path / "model.zip")
    envs.close()
    result = evaluate_policy(vecenv.load_policy(tmp_path / "model.zip"), masked, 4, backend="sync")
    assert result.returns == (0.0,) * 4


@pytest.mark.parametrize(
    ("name", "told"), [("n_envs", "write num_envs="), ("vec_env_cls", 'write backend="sync"')]
)
def test_arguments_of_make_vec_env_are_told_their_names_here(name, told):
    with pytest.raises(TypeError, match=f"no argument {name}: {told}"):
        make_sb3_env("CartPole-v1", **{name: 2})


def test_statistics_that_fit_not_are_refused(trained, tmp_path, capsys):
    path, _, _ = trained
    obs = np.ones((4, 3), np.float32)
    wrong = tmp_path / "wrong.pkl"
    wrong.write_bytes(b"no pickle")
    with pytest.raises(ValueError, match=r"wrong.pkl is no pickle of VecNormalize"):
        actions_of(path, obs, vecnormalize=wrong)
    others = VecNormalize(make_sb3_env("JitCartPole-v1", 2))
    others.save(str(wrong))
    others.close()
    with pytest.raises(ValueError, match=r"of observations of shape \(4,\), the model's are of"):
        actions_of(path, obs, vecnormalize=wrong)
    with pytest.raises(FileNotFoundError):
        actions_of(path, obs, vecnormalize=tmp_path / "none.pkl")
    given = ["--policy", str(path), "--vecnormalize", str(tmp_path / "none.pkl")]
    assert main(["play", "JitPendulum-v1", *given]) == 2
    printed = capsys.readouterr()
    assert "go through" not in printed.out
    assert "none.pkl: No such file" in printed.err
