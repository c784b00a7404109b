"""The trainers of the defenders for CAGE, and the demo, for a few updates."""

import json

import numpy as np
import pytest
import torch

from vecenv import cage
from vecenv.cage.challenge4.player import defender_logits
from vecenv.command import demo
from vecenv.core.compiling import is_jit_off
from vecenv.learn import Run
from vecenv.train import cage2_defender, cage4_defender, ppo

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.skipif(is_jit_off(), reason="takes too long without compiled code"),
]

draw_curve = Run.draw_curve  # which tests without pictures leave out


def cage2_options(folder, **changed):
    given = {"total_steps": 2 * 101 * 8, "num_envs": 8, "eval_episodes": 2, "save": folder}
    given |= {"num_minibatches": 2, "compile": "off", "dtype": "bfloat16"}
    return cage2_defender.Options(**{**given, **changed})


@pytest.mark.slow
def test_training_for_cage_2_leaves_policy_curve_and_table_and_goes_on_from_the_policy(
    tmp_path, capsys
):
    folder = tmp_path / "run"
    found = cage2_defender.main(cage2_options(folder))
    names = {"policy.npz", "curve.png", "evaluation.json", "options.json"}
    assert names < {file.name for file in folder.iterdir()}
    again = cage.evaluate(str(folder / "policy.npz"), episodes=2)
    assert again.total == found.total and again.observation == "bits"
    assert json.loads((folder / "evaluation.json").read_text())["total"] == found.total
    assert "policy.npz" in capsys.readouterr().out
    loaded = {"total_steps": 0, "load": folder}
    cage2_defender.main(cage2_options(tmp_path / "on", **loaded))
    both = (cage.load_defender(x / "policy.npz").layers for x in (folder, tmp_path / "on"))
    for (weight, bias), (other_weight, other_bias) in zip(*both, strict=True):
        assert (weight == other_weight).all() and (bias == other_bias).all()


@pytest.mark.parametrize("num_steps", [101, pytest.param(70, marks=pytest.mark.slow)])
def test_early_rewards_count_as_often_as_the_challenge_counts_them(tmp_path, num_steps):
    options = cage2_options(tmp_path, num_steps=num_steps)
    envs = cage2_defender.Cage2Defender.make_envs(options, options.num_envs)
    trainer = cage2_defender.Cage2Defender(options, envs)
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
    envs.close()


def test_what_a_defender_can_not_be_is_refused_before_training(tmp_path):
    with pytest.raises(SystemExit, match="leave --normalize and --recurrent out"):
        cage2_defender.main(cage2_options(tmp_path / "run", normalize=True))
    assert not (tmp_path / "run").exists()


def test_the_player_computes_what_the_network_does():
    agent = cage4_defender.Defender(5, cage4_defender.Options(width=8))
    torch.nn.init.normal_(agent.act.weight)
    memory = cage.Cage4Memory
    hosts = torch.rand(6, 3, 16, memory.num_host_features)
    units = torch.rand(6, 3, memory.num_unit_features)
    useless = torch.zeros(6, 192, dtype=torch.bool)
    expected = agent.log_probs(hosts, units, useless).detach().numpy()
    logits = defender_logits(agent.weights(), hosts.numpy(), units.numpy())
    found = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_demo_leaves_policy_curve_scores_and_film(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Run, "draw_curve", draw_curve)
    folder = tmp_path / "run"
    demo.run_demo(15_000, 32, seed=1, episodes=20, save=folder)
    out = capsys.readouterr().out
    for word in ("trained", "sleep", "random", "react-restore"):
        assert word in out
    for name in ("policy.npz", "curve.png", "scores.json", "episode.gif"):
        assert str(folder / name) in out
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "episode.gif").read_bytes().startswith(b"GIF89a")
    scores = json.loads((folder / "scores.json").read_text())
    again = cage.evaluate(str(folder / "policy.npz"), episodes=20, seed=1)
    assert scores["total"] == again.total
    assert len(scores["cells"]) == 9
    rivals = [cage.evaluate(name, episodes=2) for name in ("sleep", *demo.RIVALS)]
    demo.Console(width=80).print(demo.compare(rivals))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if "react-restore" in line), "a terminal"
    assert sum("±" in line for line in lines) == 11  # title, nine cells and the total


def test_env_options_reach_the_envs(tmp_path):
    given = {"env_id": "vecenv:Cage2-v0", "env_kwargs": {"red_agent": "sleep"}, "total_steps": 0}
    assert ppo.main(ppo.Options(**given, eval_episodes=5, save=tmp_path)).mean == 0
