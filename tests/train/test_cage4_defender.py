"""The trainer of the defender of CAGE Challenge 4, for a few updates."""

import json

import numpy as np
import pytest
import torch

from vecenv.cage import Cage4Player, evaluate_cage4
from vecenv.cage.challenge4.play.player import defender_logits
from vecenv.core.compiling import is_jit_off

if is_jit_off():
    pytest.skip("takes too long without compiled code", allow_module_level=True)


@pytest.fixture
def example(one_torch_thread):
    from vecenv.train import cage4_defender

    return cage4_defender


def options_of(example, folder, **changed):
    given = {"total_steps": 2 * 499 * 2, "num_games": 2, "minibatch": 200, "save": folder}
    return example.Options(**{**given, "eval_episodes": 2, "compile": "off", "width": 8, **changed})


@pytest.mark.slow
def test_training_leaves_policy_curve_and_table(example, tmp_path, capsys):
    found = example.main(options_of(example, tmp_path))
    names = {"defender.npz", "curve.png", "evaluation.json", "options.json", "metrics.jsonl"}
    assert names < {file.name for file in tmp_path.iterdir()}
    again = evaluate_cage4(Cage4Player(tmp_path / "defender.npz"), episodes=2)
    assert again.score.mean == found
    assert json.loads((tmp_path / "evaluation.json").read_text())["score"]["mean"] == found
    assert "defender.npz" in capsys.readouterr().out


def test_the_player_computes_what_the_network_does(example):
    agent = example.Defender(5, example.Options(width=8))
    torch.nn.init.normal_(agent.act.weight)
    torch.nn.init.normal_(agent.rest.weight)
    hosts, units = torch.rand(6, 3, 16, 19), torch.rand(6, 3, 40)
    useless = torch.zeros(6, 168, dtype=torch.bool)
    expected = agent.log_probs(hosts, units, useless).detach().numpy()
    logits = defender_logits(agent.weights(), hosts.numpy(), units.numpy())
    found = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found, expected, atol=1e-5)
