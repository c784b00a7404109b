"""vecenv.train.ppo and sac on a real device: `make test-gpu`."""

import pytest
import torch

from vecenv.learn import Graph
from vecenv.train import ppo

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
NUM_UPDATES = 6


class Called(Graph):
    """Never captures."""

    def __init__(self, function, device, **options):
        super().__init__(function, "cpu", **options)


def updated(graph_type, monkeypatch, env_id, **changes):
    """A trainer of PPO after some updates."""
    monkeypatch.setattr(ppo, "Graph", graph_type)
    options = ppo.Options(
        env_id, num_envs=64, num_steps=16, total_steps=100_000, hidden=(16,), device="cuda",
        num_minibatches=4, compile="off", **changes,
    )  # fmt: skip
    torch.manual_seed(1)
    envs = ppo.PPO.make_envs(options, 64, on_device=True)
    made = ppo.PPO(options, envs)
    found = [made.update() for _ in range(NUM_UPDATES)]
    return made, found


@pytest.mark.parametrize(
    ("env_id", "changes"),
    [
        ("JitCartPole-v1", {"entropy_weight": 0.01, "entropy_falls": True}),
        ("vecenv:Cage2-v0", {"normalize": True}),  # with masks
        ("JitCartPole-v1", {"recurrent": "gru", "sequence_length": 8}),
    ],
)
def test_graphs_of_ppo_do_what_calls_do(env_id, changes, monkeypatch):
    called, expected = updated(Called, monkeypatch, env_id, **changes)
    captured, found = updated(Graph, monkeypatch, env_id, **changes)
    for name in ("collect", "compute_advantages", "learn"):
        assert getattr(captured, name).is_captured
        assert not getattr(called, name).is_captured
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-2, abs=1e-3)
    assert captured.steps == called.steps
    torch.testing.assert_close(captured.rollout.actions, called.rollout.actions)


def test_ppo_learns_cart_pole_in_graphs(tmp_path):
    options = ppo.Options(
        "JitCartPole-v1", num_envs=256, num_steps=32, total_steps=1_000_000, device="cuda",
        save=tmp_path, eval_episodes=20,
    )  # fmt: skip
    assert ppo.main(options).mean > 300
