"""examples/offline.py: its losses, its data, what it refuses, and (slow) what is learned."""

import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from example_files import load_example
from gymnasium.spaces import Discrete

from buffers import EpisodicReplayBuffer
from buffers.datasets import from_buffer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def offline():
    load_example("sac")  # which it imports
    return load_example("offline")


def make_batch(offline, count=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    obs, following = torch.randn(2, count, 3, generator=generator)
    actions = torch.rand(count, 2, generator=generator) * 2 - 1
    rewards, discounts = torch.randn(2, count, generator=generator)
    return offline.Batch(obs, following, actions, rewards, discounts.sigmoid(), actions * 0.1)


def make_agent(offline):
    torch.manual_seed(0)
    return offline.Agent(torch.zeros(3), torch.ones(3), 2, offline.Options(hidden=(8,)))


def grads(agent, loss):
    agent.zero_grad()
    loss.backward()
    named = agent.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def test_each_network_of_td3bc_has_the_gradient_of_its_own_loss(offline):
    agent, batch = make_agent(offline), make_batch(offline)
    both = grads(agent, offline.td3bc_loss(agent, batch, 2.0)[0])
    with torch.no_grad():
        following = (agent.act(batch.next_obs) + batch.noise).clamp(-1, 1)
        least = agent.targets(batch.next_obs, following).min(0).values
        goal = batch.rewards + batch.discounts * least
    critic_loss = sum(
        ((values - goal) ** 2).mean() for values in agent.critics(batch.obs, batch.actions)
    )
    of_critics = grads(agent, critic_loss)
    chosen = agent.act(batch.obs)
    values = agent.critics(batch.obs, chosen)[0]
    weight = 2.0 / values.detach().abs().mean()
    actor_loss = ((chosen - batch.actions) ** 2).sum(1).mean() - weight * values.mean()
    of_actor = grads(agent, actor_loss)
    for name, grad in both.items():
        expected = of_actor if name.startswith("actor") else of_critics
        torch.testing.assert_close(grad, expected[name])
    assert {name.partition(".")[0] for name in both} == {"actor", "critics"}


def test_cloning_moves_the_actor_alone(offline):
    agent, batch = make_agent(offline), make_batch(offline)
    assert all(name.startswith("actor") for name in grads(agent, offline.bc_loss(agent, batch)[0]))


SMALL = {"num_updates": 20, "hidden": (16,), "eval_episodes": 2, "compile": "off"}


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
def test_it_makes_a_data_set_learns_and_reports(offline, tmp_path):
    options = offline.Options(data_steps=400, save=tmp_path, **SMALL)
    data = offline.record(options)
    assert (data.num_episodes, data.num_steps) == (2, 400)
    assert max(np.abs(episode["actions"]).max() for episode in data) > 1.5  # as the env takes them
    again = offline.record(options)
    for one, other in zip(data, again, strict=True):
        np.testing.assert_equal(one, other)
    found = offline.main(options)
    assert set(found) == {"behaviour", "bc", "td3bc"}
    assert json.loads((tmp_path / "results.json").read_text()) == found
    assert (tmp_path / "td3bc.pt").exists()


def test_what_it_cannot_learn_from_is_refused(offline, tmp_path, monkeypatch):
    options = offline.Options(save=tmp_path, data="none.hdf5", **SMALL)
    with pytest.raises(SystemExit, match=r"none\.hdf5|h5py"):  # whether it is installed or not
        offline.main(options)
    space = gym.make("CartPole-v1").observation_space
    buffer = EpisodicReplayBuffer(9, space, Discrete(2))
    zeros = {"obs": np.zeros((3, 4)), "actions": np.zeros(2, int), "rewards": np.zeros(2)}
    buffer.add_episode(zeros)
    monkeypatch.setattr(offline, "open_data", lambda options: from_buffer(buffer))
    with pytest.raises(SystemExit, match=r"Discrete\(2\).*expected bounded Box"):
        offline.main(options)


def test_a_file_that_cannot_be_written_is_refused_before_the_data_are_made(
    offline, tmp_path, monkeypatch
):
    def refused(path, message):
        options = offline.Options(save=tmp_path / "run", write=path, **SMALL)
        with pytest.raises(SystemExit, match=message):
            offline.main(options)
        assert not options.save.exists()

    monkeypatch.setattr(offline, "record", lambda options: pytest.fail("data were made"))
    monkeypatch.setattr(offline, "find_spec", lambda name: None)
    refused(tmp_path / "a.hdf5", r"--write needs h5py: pip install")
    monkeypatch.setattr(offline, "find_spec", lambda name: object())
    refused(tmp_path / "no" / "a.hdf5", "there is no folder")
    refused(tmp_path, "it is there already")


@pytest.mark.usefixtures("one_torch_thread")
def test_a_loss_that_is_not_finite_is_a_sentence(offline, tmp_path):
    options = offline.Options(data_steps=400, save=tmp_path, learning_rate=1e30, **SMALL)
    with pytest.raises(SystemExit, match=r"^bc: the loss is (nan|inf)"):
        offline.main(options)


@pytest.mark.learn
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("one_torch_thread")
def test_td3bc_beats_the_behaviour_and_its_clone(offline, tmp_path):
    found = offline.main(offline.Options(save=tmp_path))
    best, half = found.pop("td3bc")
    for mean, other_half in found.values():
        assert best - half > mean + other_half, found
