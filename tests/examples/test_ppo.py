"""examples/ppo.py: the loss, spaces, reproducibility, files, refusals, and (slow) the scores."""

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

from vecenv import SyncVectorEnv
from vecenv.cage.saved import load_network
from vecenv.files import load_arrays

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SCRIPT = Path(__file__).parents[2] / "examples" / "ppo.py"
SMALL = {"num_envs": 4, "num_steps": 32, "total_steps": 600, "eval_episodes": 3, "compile": "off"}


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
        return self.observe(), {}

    def observe(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def step(self, action):
        self.log.append(action)
        self.left -= 1
        is_over = self.left == 0
        ends = (False, is_over) if self.truncates else (is_over, False)
        return self.observe(), 1.0, *ends, {}


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
    return ppo.Trainer(options, envs, ppo.Agent(envs, options))


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


def reference_loss(agent, batch, options):
    """The loss as CleanRL writes it, with torch.distributions, of the rows of weight 1."""
    kept = batch.weights > 0
    actions = batch.actions[kept].reshape(int(kept.sum()), -1)
    features = agent.features(batch.obs)[kept]
    outputs, values = agent.actor(features), agent.critic(features)[:, 0]
    if agent.is_discrete:
        parts = [Categorical(logits=part) for part in outputs.split(agent.sizes, 1)]
        log_probs = sum(part.log_prob(actions[:, k]) for k, part in enumerate(parts))
        entropy = sum(part.entropy() for part in parts)
    else:
        normal = Normal(outputs, agent.log_std.exp().expand_as(outputs))
        log_probs, entropy = normal.log_prob(actions).sum(1), normal.entropy().sum(1)
    ratio = (log_probs - batch.log_probs[kept]).exp()
    advantages, old_values, returns = (
        column[kept] for column in (batch.advantages, batch.values, batch.returns)
    )
    gain = torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)).mean()
    clipped = old_values + (values - old_values).clamp(-0.1, 0.1)
    errors = torch.max((values - returns) ** 2, (clipped - returns) ** 2)
    return -gain + 0.25 * errors.mean() - 0.1 * entropy.mean()


@pytest.mark.parametrize("space", ACTION_SPACES, ids=str)
def test_the_loss_is_that_of_cleanrl(space):
    given = {"entropy_weight": 0.1, "clip_values": 0.1, "value_weight": 0.5}
    trainer = make_trainer(envs=make_envs(action_space=space), **given)
    agent, rollout = trainer.agent, trainer.rollout
    for parameter in agent.parameters():
        parameter.data.normal_(std=0.5)
    trainer.collect()
    trainer.compute_advantages()
    batch = next(rollout.minibatches(2, fixed=True, normalize_advantages=True))
    # A behaviour policy that differs enough for the clipping to bite.
    batch.log_probs.add_(0.3 * torch.randn(len(batch.log_probs)))

    loss, means = ppo.ppo_loss(agent, batch, trainer.options)

    assert 0 < means["clipfrac"] < 1
    torch.testing.assert_close(loss, reference_loss(agent, batch, trainer.options))


def test_behaviour_log_probs_and_values_are_those_of_the_policy_that_acted():
    trainer = make_trainer(envs=make_envs(action_space=MultiDiscrete([3, 2])))
    agent, rollout = trainer.agent, trainer.rollout
    trainer.collect()
    for t in range(rollout.num_steps):
        policy, values = agent(rollout.obs[t])
        torch.testing.assert_close(rollout.log_probs[t], policy.log_prob(rollout.actions[t]))
        torch.testing.assert_close(rollout.values[t], values)


def test_actions_are_drawn_with_their_probabilities_and_masked_ones_never():
    agent = make_trainer(envs=make_envs(action_space=MultiDiscrete([3, 2, 2]))).agent
    logits = torch.tensor([0.5, -1.0, 1.5, 0.3, -0.2, 0.0, 0.0])
    agent.actor[-1].weight.data.zero_()
    agent.actor[-1].bias.data[:] = logits
    torch.manual_seed(2)
    num_draws = 40_000
    obs, mask = torch.zeros(num_draws, 3), torch.tensor([[1, 1, 1, 1, 1, 0, 1]])

    actions = agent.act(obs, torch.rand(num_draws, 3), mask)

    for k, part in enumerate((logits[:3], logits[3:5])):
        counts = torch.bincount(actions[:, k], minlength=len(part)).double()
        expected = part.double().softmax(0) * num_draws
        assert ((counts - expected) ** 2 / expected).sum() < 16  # p < 0.001
    assert (actions[:, 2] == 1).all()
    assert agent.act(obs[:1], mask=mask).tolist() == [[2, 0, 1]]


@pytest.mark.parametrize("quantile", [2.0**-24, 1 - 2.0**-24])
def test_extreme_quantiles_are_possible_actions(quantile):
    agent = make_trainer(envs=make_envs(action_space=MultiDiscrete([3, 2]))).agent
    agent.actor[-1].bias.data[:] = torch.tensor([-200.0, 0.0, -200.0, 0.0, -200.0])
    assert agent.act(torch.zeros(2, 3), torch.full((2, 2), quantile)).tolist() == [[1, 0]] * 2
    agent = make_trainer(envs=make_envs(action_space=Box(-1, 1, (2,)))).agent
    assert agent.act(torch.zeros(2, 3), torch.full((2, 2), quantile)).abs().max() < 6


OBSERVATIONS = {
    "numbers": Box(-1, 1, (2, 2), np.float64),
    "image, channels last": Box(0, 255, (36, 40, 3), np.uint8),
    "image, channels first": Box(0, 255, (4, 36, 40), np.uint8),
    "small image": Box(0, 1, (10, 10, 4), np.float32),
    "choice": Discrete(5, start=2),
    "choices": MultiDiscrete([2, 3]),
    "bits": gym.spaces.MultiBinary(3),
    "all": gym.spaces.Dict(a=Box(-1, 1, (3,)), b=Box(0, 255, (36, 36, 1), np.uint8), c=Discrete(4)),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_of_each_kind_are_learned_from(name):
    trainer = make_trainer(envs=make_envs(OBSERVATIONS[name]), normalize=True)
    before = [parameter.detach().clone() for parameter in trainer.agent.parameters()]
    trainer.update()
    pairs = zip(before, trainer.agent.parameters(), strict=True)
    assert not any(old.equal(new) for old, new in pairs), "each parameter is learned"


@pytest.mark.parametrize("space", ACTION_SPACES, ids=str)
def test_actions_that_reach_the_env_are_in_its_space(space):
    trainer = make_trainer(envs=make_envs(Box(-1, 1, (2, 2), np.float64), space))
    if not trainer.agent.is_discrete:
        trainer.agent.log_std.data.fill_(2.0)
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
        trainer.agent.critic[-1].bias.data.fill_(10.0)  # V is near 10 everywhere
        trainer.collect()
        trainer.compute_advantages()
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
        runs.append((trainer.curve, scalars, [w.tolist() for w in trainer.agent.parameters()]))
    assert repr(runs[0]) == repr(runs[1])
    assert repr(runs[0]) != repr(runs[2])


def test_normalization_follows_observations_and_returns():
    space = Box(-100, 100, (3,), np.float32)
    trainer = make_trainer(envs=make_envs(obs_space=space), normalize=True)
    for _ in range(3):
        trainer.update()
    moments, returns = trainer.agent.encoders["obs"].moments, trainer.agent.returns
    assert moments.mean.abs().max() < 15  # uniform in -100..100
    assert (moments.std() - 57.7).abs().max() < 10
    assert 0.5 < returns.std() < 3
    x = trainer.agent.features(torch.tensor([[0.5, 0.5, 1e4]]))
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
    agent, options = make_trainer().agent, ppo.Options(env_id="Countdown-v0", seed=5)
    returns = ppo.evaluate(make_envs(num_envs=9), agent, options)
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
    main(tmp_path, normalize=False)
    saved = load_arrays(tmp_path / "policy.npz")  # reads nothing else
    assert set(saved) == {"kind", "layers", "scale", "made_for", "tensors"}
    x = np.float32([[0.5, -0.25, 1.0]])
    agent = make_trainer().agent
    agent.load_state_dict({k: torch.from_numpy(v) for k, v in saved["tensors"].items()})
    outputs = load_network(tmp_path / "policy.npz").outputs(x)  # as `vecenv evaluate` does
    np.testing.assert_allclose(outputs, agent.actor(torch.from_numpy(x)).detach(), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"env_id": "Acrobot-v1"}, "Discrete(3)"), ({"hidden": (8,)}, "hidden (8,)")],
)
def test_loading_another_kind_of_policy_is_refused(tmp_path, change, expected):
    options = {"env_id": "CartPole-v1", "total_steps": 0}
    main(tmp_path, **options)
    with pytest.raises(SystemExit, match=r"policy\.npz is for \(Box") as caught:
        main(tmp_path, **{**options, **change}, load=tmp_path / "policy.npz")
    assert expected in str(caught.value)


def test_unwritable_folder_is_refused_before_training(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(ppo.Trainer, "update", lambda self: pytest.fail("it trains"))
    with pytest.raises(SystemExit, match=r"file.*choose another folder with --save"):
        main(tmp_path / "file" / "runs")


def test_unsupported_observations_are_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"Blackjack-v1: the observation 'obs' is Tuple.*expected"):
        main(tmp_path, env_id="Blackjack-v1")


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
    losses = (
        "loss",
        "value_loss",
        "policy_loss",
        "entropy",
        "approx_kl",
        "clipfrac",
        "explained_variance",
    )
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
    options += ["--env-kwargs", "max_episode_steps", "20", "--compile", "off"]
    options += ["--wrappers", "gymnasium.wrappers:FlattenObservation"]
    trained = subprocess.run(
        [sys.executable, SCRIPT, *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert trained.returncode == 0, trained.stderr
    assert "return 20.0 ± 0.0 over 2 episodes" in trained.stdout or "return 1" in trained.stdout
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
