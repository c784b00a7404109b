"""examples/ppo.py: its gradients, its reproducibility, its files, and what it learns."""

import importlib.util
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from buffers import RolloutBatch
from vecenv import make_vec

FILE = Path(__file__).parents[2] / "examples" / "ppo.py"
spec = importlib.util.spec_from_file_location("ppo_example", FILE)
assert spec is not None and spec.loader is not None
ppo = importlib.util.module_from_spec(spec)
sys.modules["ppo_example"] = ppo
spec.loader.exec_module(ppo)

SHORT = {"total_steps": 2 * 4 * 32, "num_envs": 4, "num_steps": 32, "eval_episodes": 3}


class Still(gym.Env):
    """Spaces as asked for; an episode takes 5 steps."""

    def __init__(self, obs_space, action_space):
        self.observation_space, self.action_space = obs_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_count = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.step_count += 1
        return self.observation_space.sample(), 1.0, self.step_count == 5, False, {}


def new_trainer(action_space, **options):
    options = ppo.Options(num_envs=2, num_steps=8, hidden=(5, 4), **options)
    torch.manual_seed(options.seed)
    envs = make_vec(lambda: Still(Box(-1, 1, (3,)), action_space), 2)
    return ppo.Trainer(options, envs, ppo.Policy(envs, options))


def autograd_gradients(trainer, batch):
    """The gradient of the loss as autograd finds it, of the same weights."""
    options, policy = trainer.options, trainer.policy
    weights = [w.detach().clone().requires_grad_() for w in policy.weights]

    def outputs_of(net, vector):
        x, parts = policy.inputs(batch.obs), []
        widths = [b for _, b in net.layers]
        counts = [w.numel() + b.numel() for w, b in net.layers]
        for part, bias in zip(vector.split(counts), widths, strict=True):
            parts.append((part[: -len(bias)].view(-1, len(bias)), part[-len(bias) :]))
        for k, (weight, bias) in enumerate(parts):
            x = x @ weight + bias
            x = torch.tanh(x) if k < len(parts) - 1 else x
        return x

    outputs, values = outputs_of(policy.actor, weights[0]), outputs_of(policy.critic, weights[1])
    if policy.is_discrete:
        law = torch.distributions.Categorical(logits=outputs.view(-1, *policy.shape))
        actions = batch.actions.reshape(len(outputs), -1)
        log_probs, entropy = law.log_prob(actions).sum(-1), law.entropy().sum(-1).mean()
    else:
        law = torch.distributions.Normal(outputs, weights[2].exp())
        log_probs = law.log_prob(batch.actions.flatten(1)).sum(-1)
        entropy = law.entropy().sum(-1).mean()
    advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
    ratio = (log_probs - batch.log_probs).exp()
    clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
    policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    value_loss = (values.squeeze(1) - batch.returns).square().mean() / 2
    loss = policy_loss + value_loss - options.entropy_weight * entropy
    loss.backward()
    return [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]


@pytest.mark.parametrize(
    "space", [Discrete(3), MultiDiscrete([3, 2]), Box(-1, 1, (2,))], ids=["one", "many", "real"]
)
def test_gradients_are_those_of_autograd(space):
    trainer = new_trainer(space, entropy_weight=0.02, max_grad_norm=1e9, learning_rate=0.0)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    size = 32
    for vector in trainer.policy.weights:
        vector += 0.3 * normal(len(vector)) * (vector > -1e8)  # -1e9 marks choices that don't exist
    if isinstance(space, Box):
        actions = normal(size, 2)
    else:
        high = torch.tensor(np.ravel(getattr(space, "nvec", [3])))
        actions = (torch.rand(size, len(high), generator=generator) * high).long()
        actions = actions[:, 0] if isinstance(space, Discrete) else actions
    batch = RolloutBatch(
        normal(size, 3), actions, -1 + 0.3 * normal(size), normal(size), normal(size), normal(size)
    )
    expected = autograd_gradients(trainer, batch)
    with torch.inference_mode():
        trainer.learn(batch)
    for vector, gradient in zip(trainer.policy.weights, expected, strict=True):
        torch.testing.assert_close(vector.grad, gradient, rtol=2e-4, atol=1e-6)


def run(tmp_path, **options):
    return ppo.main(ppo.Options(**{**SHORT, "save": tmp_path, **options}))


def saved_weights(folder):
    return torch.load(folder / "policy.pt", weights_only=True)["tensors"]


def test_same_seed_gives_the_same_curve(tmp_path):
    returns = [run(tmp_path / name, seed=3) for name in "ab"]
    assert returns[0].tolist() == returns[1].tolist()
    first, second = saved_weights(tmp_path / "a"), saved_weights(tmp_path / "b")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    run(tmp_path / "c", seed=4)
    assert not torch.equal(saved_weights(tmp_path / "c")[0], first[0])


def test_a_saved_policy_plays_the_same(tmp_path):
    returns = run(tmp_path / "a", normalize=True)
    again = run(tmp_path / "b", normalize=True, load=tmp_path / "a" / "policy.pt", total_steps=0)
    assert returns.tolist() == again.tolist()
    assert len(returns) == 3


def test_learning_curve_is_a_picture(tmp_path):
    run(tmp_path)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_scalars_have_the_usual_names(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, tensorboard=True)
    events = EventAccumulator(str(tmp_path)).Reload()
    names = {"charts/episodic_return", "charts/SPS", "losses/value_loss", "losses/policy_loss"}
    assert names <= set(events.Tags()["scalars"])
    assert len(events.Scalars("charts/SPS")) >= 1


def test_a_policy_of_other_spaces_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(SystemExit, match=r"policy.pt is for spaces .*; expected spaces"):
        run(tmp_path / "b", env_id="Acrobot-v1", load=tmp_path / "policy.pt")


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="choose another folder with --save"):
        run(tmp_path / "file")


@pytest.mark.parametrize(
    ("obs_space", "action_space"),
    [(Dict(a=Box(-1, 1, (2,))), Discrete(2)), (Box(-1, 1, (2,)), Box(0, 5, (2,), np.int64))],
    ids=["Dict observations", "integer Box actions"],
)
def test_spaces_it_cannot_handle_are_named(obs_space, action_space):
    envs = make_vec(lambda: Still(obs_space, action_space), 2)
    with pytest.raises(SystemExit, match=r"has the spaces .*, expected \(Box, Discrete"):
        ppo.Policy(envs, ppo.Options())


@pytest.mark.parametrize(
    "space",
    [Discrete(3, start=2), MultiDiscrete([2, 3]), Box(-0.5, 0.5, (1, 2))],
    ids=["start", "many", "real"],
)
def test_every_kind_of_action_is_legal(space):
    """`Still` asserts that its actions are in the space."""
    trainer = new_trainer(space, total_steps=64, normalize=True)
    while trainer.steps + 16 <= 64:
        trainer.update()
    assert trainer.steps > 40


BARS = [
    ("CartPole-v1", 475, {}),
    (
        "Acrobot-v1",
        -100,
        {"total_steps": 500_000, "num_envs": 16, "normalize": True, "learning_rate": 1e-3},
    ),
    (
        "Pendulum-v1",
        -250,
        {
            "total_steps": 300_000,
            "num_steps": 256,
            "num_epochs": 10,
            "num_minibatches": 16,
            "normalize": True,
            "gamma": 0.9,
            "learning_rate": 1e-3,
        },
    ),
]


@pytest.mark.learn
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("env_id", "bar", "options"), BARS, ids=[bar[0] for bar in BARS])
def test_learns_to_the_known_score(tmp_path, env_id, bar, options):
    returns = ppo.main(ppo.Options(env_id=env_id, seed=1, save=tmp_path, **options))
    assert len(returns) == 100
    assert returns.mean() >= bar
