"""The trainer of the leaderboard's defender, for a few updates."""

import json
import signal

import numpy as np
import pytest

from vecenv.cage import evaluate, load_defender
from vecenv.core.compiling import is_jit_off

if is_jit_off():
    pytest.skip("takes too long without compiled code", allow_module_level=True)


@pytest.fixture
def example(one_torch_thread):
    from vecenv.train import cage2_defender

    return cage2_defender


def options_of(example, folder, **changed):
    given = {"total_steps": 2 * 101 * 8, "num_envs": 8, "eval_episodes": 2, "save": folder}
    given |= {"num_minibatches": 2, "compile": "off", "dtype": "bfloat16"}
    return example.Options(**{**given, **changed})


@pytest.mark.slow
def test_training_leaves_policy_curve_and_table(example, tmp_path, capsys):
    folder = tmp_path / "run"
    found = example.main(options_of(example, folder))
    names = {"policy.npz", "defender.npz", "curve.png", "evaluation.json", "options.json"}
    assert names < {file.name for file in folder.iterdir()}
    again = evaluate(str(folder / "defender.npz"), episodes=2)
    assert again.total == found.total and again.observation == "bits"
    assert json.loads((folder / "evaluation.json").read_text())["total"] == found.total
    assert "defender.npz" in capsys.readouterr().out


@pytest.mark.slow
def test_training_goes_on_from_a_saved_policy(example, tmp_path):
    example.main(options_of(example, tmp_path / "a"))
    loaded = {"total_steps": 0, "load": tmp_path / "a" / "policy.npz"}
    example.main(options_of(example, tmp_path / "b", **loaded))
    first, second = (load_defender(tmp_path / x / "defender.npz").layers for x in "ab")
    for (weight, bias), (other_weight, other_bias) in zip(first, second, strict=True):
        assert (weight == other_weight).all() and (bias == other_bias).all()


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_learnt(example, tmp_path, monkeypatch, capsys):
    learn = example.Cage2Defender.learn

    def interrupted(trainer):
        signal.raise_signal(signal.SIGINT)
        return learn(trainer)

    monkeypatch.setattr(example.Cage2Defender, "learn", interrupted)
    example.main(options_of(example, tmp_path))
    assert "stopped after 800 steps" in capsys.readouterr().out
    assert (tmp_path / "defender.npz").exists()
    monkeypatch.undo()
    example.main(options_of(example, tmp_path, resume=True))
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 2


def trainer_of(example, folder, num_steps=101):
    options = options_of(example, folder, num_steps=num_steps)
    envs = example.Cage2Defender.make_envs(options, options.num_envs)
    return example.Cage2Defender(options, envs)


@pytest.mark.parametrize("num_steps", [101, pytest.param(70, marks=pytest.mark.slow)])
def test_early_rewards_count_as_often_as_the_challenge_counts_them(example, tmp_path, num_steps):
    trainer = trainer_of(example, tmp_path, num_steps)
    step, num_ends = np.zeros(8, int), 0
    for _ in range(3):
        trainer.collect()
        rollout = trainer.rollout
        given, over = rollout.rewards.clone().numpy(), rollout.truncations.clone().numpy()
        trainer.compute_advantages()
        for t in range(num_steps):
            counts = [sum(step < length for length in (30, 50, 100)) for step in step]
            expected = given[t] * counts / 3
            np.testing.assert_allclose(rollout.rewards[t], expected, rtol=1e-6)
            step = np.where(step == 100, 0, step + 1)  # the step after the last one resets
        assert (rollout.terminations.numpy() == over).all() and not rollout.truncations.any()
        last = rollout.terminations & rollout.valid
        found = (rollout.returns - rollout.rewards)[last]
        assert (found.abs() < 1e-5).all()  # nothing after the last step counts
        num_ends += int(last.sum())
        rollout.advance()
    assert num_ends == 8 * (3 * num_steps // 101)
    trainer.envs.close()


def test_what_a_defender_can_not_be_is_refused_before_training(example, tmp_path):
    with pytest.raises(SystemExit, match="leave --normalize out"):
        example.main(example.Options(normalize=True, save=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_ctrl_c_in_the_evaluation_leaves_the_defender(example, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the signal was kept")

    monkeypatch.setattr(example.cage, "evaluate", interrupted)
    with pytest.raises(SystemExit, match="130"):
        example.main(options_of(example, tmp_path, total_steps=0))
    assert len(load_defender(tmp_path / "defender.npz").layers) == 3
