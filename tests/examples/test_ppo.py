"""examples/ppo.py: gradients, reproducibility, files, refusals, and (slow) the scores reached."""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch.distributions import Categorical, Normal

from buffers import RolloutBatch
from vecenv import SyncVectorEnv
from vecenv.files import load_arrays

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SCRIPT = Path(__file__).parents[2] / "examples" / "ppo.py"
SMALL = {"num_envs": 4, "num_steps": 32, "total_steps": 600, "eval_episodes": 3}


def load_example():
    spec = importlib.util.spec_from_file_location("ppo_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ppo_example"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


ppo = load_example()


class Countdown(gym.Env):
    """Episodes of `length` steps, whose rewards are 1; `length` is drawn by each reset.

    Steps made, resets and actions are noted in `log` of the class.
    """

    log: list = []

    def __init__(self, observation_space=None, action_space=None, truncates=False):
        default = Box(-1, 1, (3,), np.float32)
        self.observation_space = default if observation_space is None else observation_space
        self.action_space = Discrete(2) if action_space is None else action_space
        self.truncates = truncates

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 7))
        self.log.append("reset")
        return np.full(self.observation_space.shape, 0.5, self.observation_space.dtype), {}

    def step(self, action):
        self.log.append(action)
        self.left -= 1
        obs = self.np_random.random(self.observation_space.shape)
        is_over = self.left == 0
        ends = (False, is_over) if self.truncates else (is_over, False)
        return obs.astype(self.observation_space.dtype), 1.0, *ends, {}


@pytest.fixture(autouse=True)
def countdown_is_registered(monkeypatch):
    monkeypatch.setattr(Countdown, "log", [])
    gym.register("Countdown-v0", Countdown, disable_env_checker=True)
    yield
    gym.registry.pop("Countdown-v0")


def make_trainer(seed=1, envs=None, **options):
    options = ppo.Options(**{**SMALL, "env_id": "Countdown-v0", "seed": seed, **options})
    torch.manual_seed(seed)
    envs = envs or ppo.make_vec(options.env_id, options.num_envs)
    return ppo.Trainer(options, envs, ppo.Policy(envs, options))


def make_envs(obs_space=None, action_space=None, num_envs=4):
    return SyncVectorEnv([lambda: Countdown(obs_space, action_space)] * num_envs)


def main(tmp_path, **options):
    return ppo.main(ppo.Options(**{**SMALL, "env_id": "Countdown-v0", "save": tmp_path, **options}))


ACTION_SPACES = [
    Discrete(5),
    Discrete(3, start=-1),
    MultiDiscrete([3, 2, 4]),
    MultiDiscrete([[2, 3], [3, 3]], start=[[1, 0], [0, 5]]),
    Box(-2, 2, (3,), np.float32),
    Box(np.array([-1.0, -np.inf]), np.array([0.5, np.inf]), dtype=np.float64),
]


# --------------------------------------------------------------------------- arithmetic


def test_mlp_gradient_is_that_of_autograd():
    torch.manual_seed(1)
    net = ppo.Mlp(3, 8, 7, 2, gain=1.0)
    net.weights.normal_()
    x, d_outputs = torch.randn(11, 3), torch.randn(11, 2)

    outputs = net.forward(x)
    net.backward(d_outputs)

    layers = [(w.clone().requires_grad_(), b.clone().requires_grad_()) for w, b in net.layers]
    y = x
    for k, (weight, bias) in enumerate(layers):
        y = (torch.tanh(y) if k else y) @ weight + bias
    y.backward(d_outputs)
    torch.testing.assert_close(outputs, y.detach())
    for (d_weight, d_bias), (weight, bias) in zip(net.d_layers, layers, strict=True):
        torch.testing.assert_close(d_weight, weight.grad)
        torch.testing.assert_close(d_bias, bias.grad)


def reference_log_prob(policy, outputs, log_std, actions):
    """Log-probabilities and mean entropy by torch.distributions."""
    if not policy.is_discrete:
        normal = Normal(outputs, log_std.exp().expand_as(outputs))
        return normal.log_prob(actions.flatten(1).float()).sum(1), normal.entropy().sum(1).mean()
    actions = actions.reshape(len(actions), -1)
    logits = outputs.view(-1, *policy.shape)
    parts = [Categorical(logits=logits[:, k]) for k in range(policy.shape[0])]
    log_probs = [part.log_prob(actions[:, k]) for k, part in enumerate(parts)]
    return sum(log_probs), sum(part.entropy().mean() for part in parts)


@pytest.mark.parametrize("space", ACTION_SPACES, ids=str)
def test_gradient_step_is_that_of_the_ppo_loss_by_autograd(space):
    options = {"entropy_weight": 0.1, "max_grad_norm": 1e9}
    trainer = make_trainer(envs=make_envs(action_space=space), **options)
    trainer.optimizer.param_groups[0]["lr"] = 0.0  # so that the step leaves the weights alone
    policy = trainer.policy
    policy.actor.weights[: -policy.actor.layers[-1][1].numel()].normal_(std=0.5)
    policy.log_std.normal_(std=0.3)
    with torch.inference_mode():
        trainer.collect()
    rollout = trainer.rollout
    rollout.compute_advantages(torch.randn(4))
    batch = RolloutBatch(*(t.clone() for t in next(rollout.minibatches(2))))
    # A behaviour policy that differs enough for the clipping to bite.
    batch = batch._replace(log_probs=batch.log_probs + 0.3 * torch.randn(len(batch.log_probs)))

    with torch.inference_mode():
        scalars = trainer.learn(batch)

    outputs = policy.actor.forward(policy.inputs(batch.obs)).requires_grad_()
    values = policy.critic.forward(policy.inputs(batch.obs)).requires_grad_()
    log_std = policy.log_std.clone().requires_grad_()
    log_probs, entropy = reference_log_prob(policy, outputs, log_std, batch.actions)
    ratio = (log_probs - batch.log_probs).exp()
    advantages = batch.advantages
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    gain = torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2))
    value_loss = 0.5 * (values.squeeze(1) - batch.returns).square().mean()
    (value_loss - gain.mean() - 0.1 * entropy).backward()
    found = [weights.grad.clone() for weights in policy.weights if weights.grad is not None]
    policy.actor.backward(outputs.grad)
    policy.critic.backward(values.grad)

    assert 0 < scalars["clipfrac"] < 1
    torch.testing.assert_close(scalars["entropy"], entropy.detach())
    torch.testing.assert_close(scalars["policy_loss"], -gain.mean().detach())
    torch.testing.assert_close(scalars["value_loss"], value_loss.detach())
    torch.testing.assert_close(found[0], policy.actor.weights.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[1], policy.critic.weights.grad, rtol=1e-4, atol=1e-6)
    if not policy.is_discrete:
        torch.testing.assert_close(found[2], log_std.grad, rtol=1e-4, atol=1e-6)


def test_long_gradients_are_shortened():
    trainer = make_trainer(max_grad_norm=0.01)
    trainer.update()
    actor, critic, _ = trainer.policy.weights  # discrete actions have no standard deviation
    norm = torch.cat([actor.grad, critic.grad]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.01))


def test_behaviour_log_probs_and_values_are_those_of_the_policy_that_acted():
    trainer = make_trainer(envs=make_envs(action_space=MultiDiscrete([3, 2])))
    policy, rollout = trainer.policy, trainer.rollout
    policy.actor.weights[:-6].normal_()
    with torch.inference_mode():
        trainer.collect()
    for t in range(rollout.num_steps):
        x = policy.inputs(rollout.obs[t])
        expected, _ = reference_log_prob(policy, policy.actor.forward(x), None, rollout.actions[t])
        torch.testing.assert_close(rollout.log_probs[t], expected)
        torch.testing.assert_close(rollout.values[t], policy.critic.forward(x).squeeze(1))


def test_actions_are_drawn_with_their_probabilities_and_missing_ones_never():
    policy = make_trainer(envs=make_envs(action_space=MultiDiscrete([3, 2]))).policy
    logits = torch.tensor([0.5, -1.0, 1.5, 0.3, -0.2])
    policy.actor.layers[-1][0].zero_()
    policy.actor.layers[-1][1][:5] = logits
    assert policy.actor.layers[-1][1][5] == -1e9
    torch.manual_seed(2)
    num_draws = 40_000
    obs = torch.zeros(1, 3).expand(num_draws, 3)

    actions = policy.act(obs, policy.draw_noise(num_draws)).squeeze(-1)

    for k, part in enumerate((logits[:3], logits[3:])):
        counts = torch.bincount(actions[:, k], minlength=len(part)).double()
        expected = part.double().softmax(0) * num_draws
        assert ((counts - expected) ** 2 / expected).sum() < 16  # p < 0.001
    assert policy.act(obs[:1]).tolist() == [[2, 0]]


@pytest.mark.parametrize("noise", [2.0**-24, 1.0])
def test_extreme_noise_picks_possible_actions(noise):
    policy = make_trainer(envs=make_envs(action_space=MultiDiscrete([3, 2]))).policy
    policy.actor.layers[-1][1][:5] = torch.tensor([-200.0, 0.0, -200.0, 0.0, -200.0])
    actions = policy.act(torch.zeros(2, 3), torch.full((2, 2, 1), noise)).squeeze(-1)
    assert actions.tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize("space", ACTION_SPACES, ids=str)
def test_actions_that_reach_the_env_are_in_its_space(space):
    trainer = make_trainer(envs=make_envs(Box(-1, 1, (2, 2), np.float64), space))
    trainer.policy.log_std.fill_(2.0)
    trainer.update()
    actions = [entry for entry in Countdown.log if not isinstance(entry, str)]
    assert len(actions) == trainer.steps
    assert all(np.asarray(action) in space for action in actions)


# --------------------------------------------------------------------------- training


def test_dead_steps_are_neither_counted_nor_learned_from():
    trainer = make_trainer()
    for _ in range(3):
        num_resets = Countdown.log.count("reset")
        steps = trainer.steps
        rewards = trainer.rollout.rewards
        trainer.update()
        num_dead = Countdown.log.count("reset") - num_resets
        assert trainer.steps - steps == 4 * 32 - num_dead == int(rewards.sum())
    returns = [episode_return for _, episode_return in trainer.curve]
    assert set(returns) <= {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}
    assert sum(returns) <= trainer.steps < sum(returns) + 4 * 6


def test_truncation_bootstraps_and_termination_does_not():
    found = []
    for truncates in (True, False):
        envs = SyncVectorEnv([lambda truncates=truncates: Countdown(truncates=truncates)] * 4)
        trainer = make_trainer(envs=envs, gae_lambda=0.0, gamma=0.9)
        trainer.policy.critic.layers[-1][1].fill_(10.0)  # V is near 10 everywhere
        with torch.inference_mode():
            trainer.collect()
            trainer.rollout.compute_advantages(torch.full((4,), 10.0))
        rollout = trainer.rollout
        is_over = rollout.terminations | rollout.truncations
        found.append(rollout.returns[is_over & rollout.valid])
    torch.testing.assert_close(found[0], torch.full_like(found[0], 10.0), rtol=0.3, atol=0.0)
    torch.testing.assert_close(found[1], torch.ones_like(found[1]))


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_same_seed_gives_same_curve_bit_for_bit(env_id):
    runs = []
    for seed in (1, 1, 2):
        trainer = make_trainer(seed, env_id=env_id, num_steps=128, normalize=True)
        scalars = [trainer.update() for _ in range(3)]
        runs.append((trainer.curve, scalars, [w.tolist() for w in trainer.policy.weights]))
    assert repr(runs[0]) == repr(runs[1])
    assert repr(runs[0]) != repr(runs[2])


def test_normalization_follows_observations_and_returns():
    space = Box(-100, 100, (3,), np.float32)
    trainer = make_trainer(envs=make_envs(obs_space=space), normalize=True)
    for _ in range(3):
        trainer.update()
    count, mean, std = trainer.policy.moments
    assert count.tolist() == [3.0] * 4
    assert torch.allclose(mean[:3], torch.full((3,), 0.5), atol=0.1)  # uniform in 0..1
    assert torch.allclose(std[:3], torch.full((3,), 0.25), atol=0.1)
    assert 0.5 < std[3] < 3
    x = trainer.policy.inputs(torch.tensor([[0.5, 0.5, 1000.0]]))
    assert x[0, :2].abs().max() < 1 and x[0, 2] == 10


def test_learning_rate_falls_and_training_ends_before_the_steps_are_exceeded():
    trainer = make_trainer(total_steps=600)
    rates = []
    update = trainer.update
    trainer.update = lambda: (update(), rates.append(trainer.optimizer.param_groups[0]["lr"]))[0]
    trainer.run(None)
    assert 600 - 4 * 32 < trainer.steps <= 600
    assert rates[0] == trainer.options.learning_rate
    assert all(later < earlier for earlier, later in itertools.pairwise(rates))


def test_time_is_noted_by_phase():
    trainer = make_trainer()
    trainer.envs.timing.enable()
    trainer.update()
    assert set(trainer.envs.timing.total_ns) == {"policy", "learner"}


def test_observations_are_written_into_the_rollout():
    trainer = make_trainer()
    step = trainer.envs.step
    shared = []

    def spy(actions, *, out):
        result = step(actions, out=out)
        shared.append(np.shares_memory(result[0], trainer.rollout.obs.numpy()))
        return result

    trainer.envs.step = spy
    trainer.update()
    assert len(shared) == 32 and all(shared)


# --------------------------------------------------------------------------- evaluation and files


def test_evaluation_is_the_first_episode_of_each_env():
    policy = make_trainer().policy
    options = ppo.Options(env_id="Countdown-v0", eval_episodes=9, seed=5)
    returns = ppo.evaluate(policy, options)
    expected = []
    for k in range(9):
        env = Countdown()
        env.reset(seed=5 + 1_000_000 + k)
        expected.append(env.left)
    assert returns.tolist() == expected
    assert len(set(expected)) > 1


def test_saved_policy_evaluates_the_same_after_loading(tmp_path, capsys):
    options = {"env_id": "CartPole-v1", "total_steps": 1500, "num_steps": 64, "normalize": True}
    returns = main(tmp_path / "a", **options)
    assert (tmp_path / "a" / "policy.npz").stat().st_size > 0
    assert (tmp_path / "a" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "CartPole-v1" in capsys.readouterr().out

    again = main(
        tmp_path / "b", **{**options, "total_steps": 0}, load=tmp_path / "a" / "policy.npz"
    )

    assert again.tolist() == returns.tolist()
    assert not (tmp_path / "b" / "curve.png").exists()


def test_saved_policy_holds_arrays_and_text_only(tmp_path):
    main(tmp_path)
    saved = load_arrays(tmp_path / "policy.npz")  # reads nothing else
    assert set(saved) == {"kind", "layers", "scale", "made_for", "tensors"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"env_id": "Acrobot-v1"}, "Discrete(3)"), ({"hidden": (8,)}, "hidden (8,)")],
)
def test_loading_another_kind_of_policy_is_refused(tmp_path, change, expected):
    options = {"env_id": "CartPole-v1", "total_steps": 0}
    main(tmp_path, **options)
    with pytest.raises(SystemExit, match=r"policy\.npz is for spaces \(Box") as caught:
        main(tmp_path, **{**options, **change}, load=tmp_path / "policy.npz")
    assert expected in str(caught.value)


def test_unwritable_folder_is_refused_before_training(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(ppo.Trainer, "update", lambda self: pytest.fail("it trains"))
    with pytest.raises(SystemExit, match=r"file.*choose another folder with --save"):
        main(tmp_path / "file" / "runs")


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "Blackjack-v1"])
def test_unsupported_observations_are_refused(tmp_path, env_id):
    with pytest.raises(SystemExit, match=rf"{env_id} has the spaces .*expected \(Box"):
        main(tmp_path, env_id=env_id)


@pytest.mark.parametrize(
    "space",
    [gym.spaces.MultiBinary(3), Box(0, 9, (2,), np.int64), gym.spaces.Dict(a=Discrete(2))],
    ids=str,
)
def test_unsupported_actions_are_refused(space):
    with pytest.raises(SystemExit, match="expected"):
        make_trainer(envs=make_envs(action_space=space))


def test_ctrl_c_saves_what_there_is(tmp_path, monkeypatch, capsys):
    update = ppo.Trainer.update
    calls = []

    def interrupted(self):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(1)
        return update(self)

    monkeypatch.setattr(ppo.Trainer, "update", interrupted)
    main(tmp_path, total_steps=10_000)
    out = " ".join(capsys.readouterr().out.split())
    assert "stopped by Ctrl-C" in out and str(tmp_path) in out.replace(" ", "")
    assert (tmp_path / "policy.npz").stat().st_size > 0 and (tmp_path / "curve.png").exists()


def test_missing_extras_are_named_and_do_no_harm(tmp_path, monkeypatch, capsys):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(ppo, "import_module", missing)
    main(tmp_path, tensorboard=True)
    out = capsys.readouterr().out
    assert "pip install 'vecenv[plots]'" in out and "pip install 'vecenv[tensorboard]'" in out
    assert (tmp_path / "policy.npz").stat().st_size > 0


class Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, name, value, step):
        self.scalars.setdefault(name, []).append((step, value))


def test_scalars_have_the_usual_names():
    writer = Writer()
    trainer = make_trainer()
    trainer.run(writer)
    losses = "value_loss", "policy_loss", "entropy", "approx_kl", "clipfrac", "explained_variance"
    charts = {"charts/episodic_return", "charts/SPS"}
    assert set(writer.scalars) == charts | {f"losses/{name}" for name in losses}
    assert all(np.isfinite(value) for rows in writer.scalars.values() for _, value in rows)
    assert writer.scalars["charts/SPS"][-1][0] == trainer.steps


def test_tensorboard_file_is_written(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    main(tmp_path, tensorboard=True)
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_command_line(tmp_path):
    options = ["--total-steps", "3000", "--save", "here", "--eval-episodes", "2"]
    trained = subprocess.run(
        [sys.executable, SCRIPT, *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "here" / "policy.npz").exists()


# --------------------------------------------------------------------------- scores


# Options, bar, seeds; docs/ppo.md has the table of all seeds.
GOALS = {
    "vecenv:Cage2-v0": (ppo.DEFAULTS["vecenv:Cage2-v0"], -25, [1]),
    "CartPole-v1": ({}, 475, [1, 2, 3, 4, 5]),
    "Acrobot-v1": (
        {"total_steps": 500_000, "num_envs": 16, "num_minibatches": 4, "normalize": True}
        | {"learning_rate": 1e-3},
        -100,
        [1],
    ),
    "Pendulum-v1": (
        {"total_steps": 300_000, "num_steps": 256, "num_epochs": 10, "num_minibatches": 16}
        | {"normalize": True, "gamma": 0.9, "learning_rate": 1e-3},
        -250,
        [1],
    ),
}


@pytest.mark.slow
@pytest.mark.learn
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("env_id", "seed"), [(e, s) for e, goal in GOALS.items() for s in goal[2]])
def test_known_score_is_reached(tmp_path, env_id, seed):
    options, score, _ = GOALS[env_id]
    returns = ppo.main(ppo.Options(env_id=env_id, seed=seed, save=tmp_path, **options))
    assert len(returns) == 100
    assert returns.mean() >= score


@pytest.mark.parametrize(
    ("first", "last", "baselines", "unit"),
    [
        (-1000.0, -13.0, {"sleep": -1056.0, "random": -674.5}, "millions"),
        (20.0, 500.0, {}, "thousands"),
        (-1600.0, 150.0, None, "millions"),
    ],
)
def test_the_curve_has_units_plain_numbers_and_baselines(
    tmp_path, monkeypatch, first, last, baselines, unit
):
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, *_, **__: figures.append(self)
    )
    steps = np.linspace(1000, 2e6 if unit == "millions" else 1e5, 400).astype(int)
    sign = np.sign(first) if first * last > 0 else 0
    returns = (
        sign * np.geomspace(abs(first), abs(last), 400) if sign else np.linspace(first, last, 400)
    )
    ppo.draw_curve(list(zip(steps, returns, strict=True)), "env", tmp_path / "x.png", baselines)
    (axes,) = figures[0].axes
    figures[0].canvas.draw()
    assert axes.get_xlabel() == f"env steps ({unit})"
    assert axes.get_ylabel() == "return of an episode"
    words = [text.get_text() for text in axes.get_legend().get_texts()]
    assert words[2:] == [f"{name}: {value:.1f}" for name, value in (baselines or {}).items()]
    numbers = [label.get_text() for label in axes.get_yticklabels()]
    assert len(numbers) >= 5
    assert not any("$" in number for number in numbers), "no powers of ten"
    low, high = axes.get_ylim()
    assert low <= min(first, last) and high >= max(first, last)
