"""Trainers with replay: the definitions of SAC, DQN and R2D2, and the examples' envs."""

import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from example_files import load_example
from gymnasium.spaces import Box, Discrete
from masked_envs import Minefield
from torch import nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from vecenv import SyncVectorEnv, make_vec
from vecenv.learn import load_checkpoint
from vecenv.train import dqn, r2d2, sac
from vecenv.train.replay import Batch

breakout, memory = map(load_example, ("breakout", "memory"))
pytestmark = pytest.mark.usefixtures("one_torch_thread")
SMALL = {"batch_size": 16, "eval_episodes": 4, "compile": "off"}
SAC = {**SMALL, "env_id": "SacDrift-v0", "num_envs": 3, "total_steps": 120, "learning_starts": 30}
SAC |= {"hidden": (12, 9), "capacity": 1000, "backend": "sync"}
DQN = {**SMALL, "total_steps": 400, "num_envs": 4, "learning_starts": 100, "hidden": (16,)}
DQN |= {"capacity": 300}

# ---- SAC ----------------------------------------------------------------------------------------


class Drift(gym.Env):
    """A point pushed about; rewards are higher near 0. Episodes end by truncation, or beyond 2."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)
    action_space = Box(np.float32([-2, -1]), np.float32([1, 3]))

    def __init__(self, length=7, limit=2.0):
        self.length, self.limit = length, limit

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.step_count = self.np_random.normal(0, 0.3, 3), 0
        return self.place, {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.place = self.place + 0.1 * np.array([*action, 0.0])
        self.step_count += 1
        is_out = bool(np.abs(self.place).max() > self.limit)
        reward = -float(np.square(self.place).sum())
        return self.place, reward, is_out, not is_out and self.step_count >= self.length, {}


@pytest.fixture(scope="module", autouse=True)
def envs_are_registered():
    """Only meanwhile: workers of other tests would load them, and torch with them."""
    gym.register("SacDrift-v0", Drift)
    yield
    gym.registry.pop("SacDrift-v0")


def trainer_for(steps=60, **changed):
    """A trainer that has made some steps."""
    options = sac.Options(**{**SAC, **changed})
    torch.manual_seed(options.seed)
    settings = {"backend": options.backend, "autoreset_mode": "SameStep", **options.env_kwargs}
    envs = make_vec(options.env_id, options.num_envs, **settings)
    trainer = sac.SAC(options, envs)
    trainer.start()
    while trainer.steps < steps:
        trainer.collect()
    return trainer


def single_nets(critics):
    """The critics as modules of their own, with weights that autograd tells apart."""
    nets = []
    for i in range(2):
        pairs = list(zip(critics.layers[::2], critics.layers[1::2], strict=True))
        linears = [nn.Linear(*weight.shape[1:]) for weight, _ in pairs]
        for linear, (weight, bias) in zip(linears, pairs, strict=True):
            linear.weight.data = weight[i].T.detach().clone()
            linear.bias.data = bias[i, 0].detach().clone()
        nets.append(nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2]))
    return nets


def test_gradients_are_those_of_three_separate_losses():
    """Of the definitions, by torch.distributions and two critics that are modules of their own."""
    trainer = trainer_for()
    agent, batch = trainer.agent, trainer.draw()
    with torch.no_grad():
        agent.log_alpha.fill_(-0.7)
        for target in agent.target.parameters():
            target.uniform_(-0.4, 0.4)
    trainer.gradient(batch)

    def values(nets, obs, actions):
        return [net(torch.cat([obs.float(), actions], 1)).squeeze(1) for net in nets]

    def draw(obs, noise):
        mean, log_std = agent.actor(obs.float()).chunk(2, -1)
        normal = Normal(mean, log_std.exp())
        actions = (mean + log_std.exp() * noise).tanh()
        tanh = TransformedDistribution(normal, TanhTransform())
        return actions, tanh.log_prob(actions.clamp(-1 + 1e-6, 1 - 1e-6)).sum(-1)

    critics, alpha = single_nets(agent.network), math.exp(-0.7)
    with torch.no_grad():
        actions, log_probs = draw(batch.next_obs, batch.next_noise)
        next_values = torch.min(*values(single_nets(agent.target), batch.next_obs, actions))
        goals = batch.rewards + batch.discounts * (next_values - alpha * log_probs)
    sum(
        0.5 * (q - goals).square().mean() for q in values(critics, batch.obs, batch.actions)
    ).backward()
    for i, net in enumerate(critics):
        layers = agent.network.layers
        for linear, weight, bias in zip(net[::2], layers[::2], layers[1::2], strict=True):
            torch.testing.assert_close(weight.grad[i].T, linear.weight.grad)
            torch.testing.assert_close(bias.grad[i, 0], linear.bias.grad)

    actions, log_probs = draw(batch.obs, batch.noise)
    q = torch.min(*values(single_nets(agent.network), batch.obs, actions))
    parameters = list(agent.actor.parameters())
    found = torch.autograd.grad((alpha * log_probs - q).mean(), parameters)
    grads = [parameter.grad for parameter in parameters]
    torch.testing.assert_close(grads, [*found], rtol=1e-3, atol=1e-5)
    expected = -(log_probs.detach() - actions.shape[1]).mean()
    torch.testing.assert_close(agent.log_alpha.grad, expected, rtol=1e-4, atol=1e-5)


def test_an_update_moves_networks_by_adam_and_targets_towards_them():
    trainer = trainer_for()
    agent, options = trainer.agent, trainer.options
    twin = nn.ParameterList(p.detach().clone() for p in agent.parameters() if p.requires_grad)
    adam = torch.optim.Adam(twin, lr=options.learning_rate)
    for _ in range(3):
        targets = [p.clone() for p in agent.target.parameters()]
        trainer.learn()
        own = [p for p in agent.parameters() if p.requires_grad]
        for parameter, other in zip(own, twin, strict=True):
            other.grad = parameter.grad.clone()
        adam.step()
        torch.testing.assert_close(own, list(twin))
        moved = zip(targets, agent.target.parameters(), agent.network.parameters(), strict=True)
        for before, target, weight in moved:
            torch.testing.assert_close(target, before + 0.005 * (weight - before))
            assert target.grad is None


def test_truncated_episodes_go_on_in_the_value_of_the_final_observation():
    trainer = trainer_for()
    batch = trainer.buffer.get(trainer.buffer.order())
    assert trainer.writer.num_transitions == trainer.steps == len(batch)
    assert batch.truncations.any()
    torch.testing.assert_close(batch.discounts, 0.99 * (~batch.terminations).float())
    low, high = Drift.action_space.low, Drift.action_space.high
    pushes = low + (batch.actions.numpy() + 1) / 2 * (high - low)
    moved = (batch.next_obs - batch.obs).numpy()[:, :2]
    np.testing.assert_allclose(moved, 0.1 * pushes, atol=1e-6)
    buffer = trainer_for(env_kwargs={"length": 50, "limit": 0.5}).buffer
    batch = buffer.get(buffer.order())
    assert batch.terminations.any()
    assert not batch.discounts[batch.terminations].any(), "no value after them"


def test_update_ratio_is_kept_and_a_finished_run_is_not_said_to_go_on(tmp_path, capsys):
    sac.main(sac.Options(**SAC, update_ratio=0.5, alpha=0.1, save=tmp_path))
    assert "go on with" not in capsys.readouterr().out
    state = load_checkpoint(tmp_path / "checkpoint" / "last.pt")["state"]
    assert (state["steps"], state["num_updates"]) == (120, 45)
    assert state["agent"]["log_alpha"].exp().item() == pytest.approx(0.1), "it was fixed"


# ---- DQN ----------------------------------------------------------------------------------------


def agent_and_batch(space):
    """An agent whose target differs from its network, and random transitions."""
    torch.manual_seed(1)
    envs = SimpleNamespace(single_observation_space=space, single_action_space=Discrete(3))
    agent = dqn.Agent(envs, dqn.Options(hidden=(16,)))
    with torch.no_grad():
        for weight in agent.target.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    rng = np.random.default_rng(1)
    obs = [torch.from_numpy(rng.integers(0, 255, (6, *space.shape)).astype(space.dtype))] * 2
    rewards, discounts = torch.randn(6), torch.tensor([0.9, 0.9, 0.0, 0.9, 0.0, 0.9])
    columns = torch.tensor([0, 1, 2, 0, 1, 2]), rewards, discounts
    return agent, Batch(obs[0], obs[1].flip(0), *columns)


def test_errors_are_those_of_the_definition():
    """Row by row; the network's own pick is worth what the target says."""
    agent, batch = agent_and_batch(Box(0, 255, (5,), np.float32))
    errors = agent.errors(batch)
    for i in range(6):
        values = agent.target(batch.next_obs[i : i + 1])[0]
        pick = agent.network(batch.next_obs[i : i + 1])[0].argmax()
        goal = batch.rewards[i] + batch.discounts[i] * values[pick]
        value = agent.network(batch.obs[i : i + 1])[0, batch.actions[i]]
        torch.testing.assert_close(errors[i], value - goal)
    loss, _ = dqn.dqn_loss(agent, batch, None)
    torch.testing.assert_close(loss, (errors**2 / 2).mean())


# ---- R2D2 ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_errors_are_those_of_n_steps():
    torch.manual_seed(0)
    task = {"env_id": "memory:TMaze-v0", "env_kwargs": {"length": 4}}
    options = r2d2.Options(**task, n_step=3, hidden=8, learning_starts=10**6)
    envs = make_vec(options.env_id, 4, autoreset_mode="SameStep", length=4)
    trainer = r2d2.R2D2(options, envs)
    trainer.start()
    for _ in range(60):
        trainer.collect()
    batch = trainer.buffer.sample_sequences(8, 6, pad=True, initial_states="state")
    errors = r2d2.td_errors(trainer.agent, batch, options)
    states = trainer.agent.found[1]
    assert states.shape == (8, 6, 8)
    for b in range(8):
        count = int(batch.mask[b].sum())
        obs = torch.cat([batch.obs[b, :count], batch.next_obs[b, count - 1 : count]])[None]
        state = batch.initial_states["state"][b : b + 1]
        with torch.no_grad():
            values, later = trainer.agent.network(obs, state)
        picks = values[0].argmax(1)
        for t in range(count):
            goal, factor = 0.0, 1.0
            end = min(t + 3, count)
            for k in range(t, end):
                goal += factor * float(batch.rewards[b, k])
                factor *= options.gamma * float(~batch.terminations[b, k])
            goal += factor * float(values[0, end, picks[end]])
            taken = float(values[0, t, batch.actions[b, t]])
            assert float(errors[b, t].detach()) == pytest.approx(taken - goal, abs=1e-4)
            if t:
                torch.testing.assert_close(states[b, t], later[0, t - 1])
    envs.close()


def test_masks_are_not_heeded_which_is_told(capsys):
    envs = SyncVectorEnv([Minefield] * 4, autoreset_mode="SameStep")
    trainer = dqn.DQN(dqn.Options(**DQN), envs)
    assert "masks" not in capsys.readouterr().out
    trainer.start()
    assert "action masks of the env are ignored" in capsys.readouterr().out
