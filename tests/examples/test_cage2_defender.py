"""The trainer of the leaderboard's defender, for a few updates."""

from importlib import import_module

import numpy as np
import pytest

from vecenv.cage import evaluate, load_defender
from vecenv.fingerprint import is_jit_off

if is_jit_off():
    pytest.skip("takes too long without compiled code", allow_module_level=True)


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend("examples")
    return import_module("cage2_defender")


def options_of(example, folder, **changed):
    given = {"total_steps": 2 * 100 * 8, "num_envs": 8, "eval_episodes": 2, "save": folder}
    return example.Options(**{**given, "num_minibatches": 2, "compile": "off", **changed})


def test_training_leaves_policy_curve_and_table(example, tmp_path, capsys):
    folder = tmp_path / "run"
    total = example.main(options_of(example, folder))
    names = {"defender.npz", "curve.png", "evaluation.json"}
    assert {file.name for file in folder.iterdir()} == names
    again = evaluate(str(folder / "defender.npz"), episodes=2)
    assert again.total == total and again.observation == "bits"
    assert "1,600 steps" in capsys.readouterr().out


def test_training_goes_on_from_a_saved_policy(example, tmp_path):
    example.main(options_of(example, tmp_path / "a"))
    example.main(
        options_of(example, tmp_path / "b", total_steps=0, load=tmp_path / "a" / "defender.npz")
    )
    first, second = (load_defender(tmp_path / x / "defender.npz").layers for x in "ab")
    for (weight, bias), (other_weight, other_bias) in zip(first, second, strict=True):
        assert (weight == other_weight).all() and (bias == other_bias).all()


def test_ctrl_c_keeps_what_was_learnt(example, tmp_path, monkeypatch, capsys):
    def stop(trainer, left):
        raise KeyboardInterrupt

    monkeypatch.setattr(example.Trainer, "learn", stop)
    example.main(options_of(example, tmp_path))
    assert "Interrupted" in capsys.readouterr().err
    assert (tmp_path / "defender.npz").exists()


def test_early_rewards_count_as_often_as_the_challenge_counts_them(example, tmp_path):
    trainer = example.Trainer(options_of(example, tmp_path))
    trainer.collect()
    returns = trainer.rewards.cumsum(0).mean(1)
    score = returns[29] + returns[49] + returns[99]
    weighted = (trainer.rewards * trainer.weights[:, None]).sum(0).mean()
    np.testing.assert_allclose([weighted, trainer.curve[-1][1]], score, rtol=1e-5)


def test_too_few_steps_and_a_folder_that_cannot_be_made_are_refused(example, tmp_path):
    with pytest.raises(SystemExit, match="less than one rollout, 800"):
        example.main(options_of(example, tmp_path, total_steps=799))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        example.main(options_of(example, tmp_path / "file" / "run"))
