"""vecenv.train.sac: gradients, truncation, resuming, refusals, and (slow) the score reached."""

import math
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from choices import fast_are
from gymnasium.spaces import Box, Dict, Discrete
from torch import nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from vecenv import make_vec
from vecenv.learn import Run
from vecenv.train import sac


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


pytestmark = pytest.mark.usefixtures("one_torch_thread")
SMALL = {
    "env_id": "SacDrift-v0",
    "num_envs": 3,
    "total_steps": 120,
    "learning_starts": 30,
    "batch_size": 16,
    "hidden": (12, 9),
    "capacity": 1000,
    "eval_episodes": 3,
    "backend": "sync",
    "compile": "off",
}


def options_for(folder, **changed):
    return sac.Options(save=Path(folder), **{**SMALL, **changed})


def trainer_for(steps=60, **changed):
    """A trainer that has made some steps."""
    options = options_for("unused", **changed)
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
        linears = [nn.Linear(*layer.weight.shape[1:]) for layer in critics.layers]
        for linear, layer in zip(linears, critics.layers, strict=True):
            linear.weight.data = layer.weight[i].T.detach().clone()
            linear.bias.data = layer.bias[i, 0].detach().clone()
        nets.append(nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2]))
    return nets


def test_gradients_are_those_of_three_separate_losses():
    """Of the definitions, by torch.distributions and two critics that are modules of their own."""
    trainer = trainer_for()
    agent, batch = trainer.agent, trainer.draw()
    with torch.no_grad():
        agent.log_alpha.fill_(-0.7)
        for target in agent.targets.parameters():
            target.uniform_(-0.4, 0.4)
    trainer.gradient(batch)

    def values(nets, obs, actions):
        return [net(torch.cat([obs, actions], 1)).squeeze(1) for net in nets]

    def draw(obs, noise):
        mean, log_std = agent.actor(obs).chunk(2, -1)
        normal = Normal(mean, log_std.exp())
        actions = (mean + log_std.exp() * noise).tanh()
        tanh = TransformedDistribution(normal, TanhTransform())
        return actions, tanh.log_prob(actions.clamp(-1 + 1e-6, 1 - 1e-6)).sum(-1)

    critics, alpha = single_nets(agent.critics), math.exp(-0.7)
    with torch.no_grad():
        actions, log_probs = draw(batch.next_obs, batch.next_noise)
        next_values = torch.min(*values(single_nets(agent.targets), batch.next_obs, actions))
        goals = batch.rewards + batch.discounts * (next_values - alpha * log_probs)
    sum(
        0.5 * (q - goals).square().mean() for q in values(critics, batch.obs, batch.actions)
    ).backward()
    for i, net in enumerate(critics):
        for linear, layer in zip(net[::2], agent.critics.layers, strict=True):
            torch.testing.assert_close(layer.weight.grad[i].T, linear.weight.grad)
            torch.testing.assert_close(layer.bias.grad[i, 0], linear.bias.grad)

    actions, log_probs = draw(batch.obs, batch.noise)
    q = torch.min(*values(single_nets(agent.critics), batch.obs, actions))
    parameters = list(agent.actor.parameters())
    found = torch.autograd.grad((alpha * log_probs - q).mean(), parameters)
    for parameter, grad in zip(parameters, found, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-5)
    expected = -(log_probs.detach() - actions.shape[1]).mean()
    torch.testing.assert_close(agent.log_alpha.grad, expected, rtol=1e-4, atol=1e-5)


def test_an_update_moves_networks_by_adam_and_targets_towards_them():
    trainer = trainer_for()
    agent, options = trainer.agent, trainer.options
    twin = nn.ParameterList(p.detach().clone() for p in agent.parameters() if p.requires_grad)
    adam = torch.optim.Adam(twin, lr=options.learning_rate)
    for _ in range(3):
        targets = [p.clone() for p in agent.targets.parameters()]
        trainer.learn()
        own = [p for p in agent.parameters() if p.requires_grad]
        for parameter, other in zip(own, twin, strict=True):
            other.grad = parameter.grad.clone()
        adam.step()
        torch.testing.assert_close(own, list(twin))
        moved = zip(targets, agent.targets.parameters(), agent.critics.parameters(), strict=True)
        for before, target, weight in moved:
            torch.testing.assert_close(target, before + 0.005 * (weight - before))
            assert target.grad is None


def test_a_fixed_entropy_weight_stays():
    trainer = trainer_for(alpha=0.1)
    trainer.learn()
    assert trainer.agent.log_alpha.exp().item() == pytest.approx(0.1)


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


@pytest.mark.parametrize("ratio", fast_are([0.5], [0.5, 2.0]))
def test_update_ratio_is_kept(tmp_path, ratio):
    with Run(tmp_path, {}) as run:
        trainer = trainer_for(0, update_ratio=ratio)
        trainer.train(run)
    assert trainer.num_updates == ratio * 90


@pytest.mark.slow
def test_envs_can_be_taken_first_ready(tmp_path):
    with Run(tmp_path, {}) as run:
        trainer = trainer_for(0, first_ready=True, backend="async", num_envs=4, n_step=2)
        trainer.train(run)
        assert trainer.num_updates == trainer.steps - 30
        assert len(run.curve_returns)
        trainer.envs.close()


def test_a_run_that_is_finished_is_not_said_to_go_on(tmp_path, capsys):
    sac.main(options_for(tmp_path))
    assert "120 of 120 steps" in (out := capsys.readouterr().out)
    assert "go on with" not in out


class Parts(Drift):
    """The place in parts, and a choice."""

    observation_space = Dict(a=Box(-np.inf, np.inf, (2,), np.float64), b=Discrete(3, start=1))

    def reset(self, **kwargs):
        place, infos = super().reset(**kwargs)
        return {"a": place[:2], "b": 1 + self.step_count % 3}, infos

    def step(self, action):
        place, *others = super().step(action)
        return {"a": place[:2], "b": 1 + self.step_count % 3}, *others


def test_observations_of_several_parts_are_learned_from_and_resumed(tmp_path):
    gym.register("SacParts-v0", Parts, disable_env_checker=True)
    try:
        changed = {"env_id": "SacParts-v0", "save_every": 60}
        whole = sac.main(options_for(tmp_path / "whole", **changed))
        sac.main(options_for(tmp_path / "half", **{**changed, "total_steps": 63}))
        assert sac.main(options_for(tmp_path / "half", resume=True, **changed)) == whole
    finally:
        gym.registry.pop("SacParts-v0")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compiled_update_is_close_to_autograds(dtype):
    found = []
    for compile in ("off", "on"):
        trainer = trainer_for(compile=compile, dtype=dtype, hidden=(64, 64), batch_size=64)
        trainer.gradient(trainer.draw())
        found.append(
            torch.cat([p.grad.flatten() for p in trainer.agent.parameters() if p.requires_grad])
        )
    assert trainer.gradient.path == "compiled"
    tolerance = 1e-4 if dtype == "float32" else 0.03
    assert (found[0] - found[1]).norm() <= tolerance * found[0].norm()


@pytest.mark.learn
@pytest.mark.timeout(900)
def test_pendulum_is_learned(tmp_path):
    options = sac.Options(total_steps=10_000, save=tmp_path, backend="sync")
    assert sac.main(options).mean >= -200
