"""vecenv.train.ppo: the loss, spaces, reproducibility, files, refusals, and (slow) the scores."""

import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from choices import fast_are
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from masked_envs import Forbidding
from torch.distributions import Categorical, Normal

from vecenv import SyncVectorEnv, make_vec
from vecenv.learn import evaluate
from vecenv.train import OptionsError, ppo

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SMALL = {"num_envs": 4, "num_steps": 32, "total_steps": 600, "eval_episodes": 3, "compile": "off"}


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
    envs = envs or make_vec(options.env_id, options.num_envs)
    return ppo.PPO(options, envs, ppo.Agent(envs, options))


def make_envs(obs_space=None, action_space=None, num_envs=4):
    return SyncVectorEnv([lambda: Countdown(obs_space, action_space)] * num_envs)


def played(trainer):
    """Episodes of the likeliest actions in the trainer's envs."""
    act = trainer.player(trainer.envs, trainer.agent, trainer.options)
    return evaluate(act, trainer.envs, trainer.options.eval_episodes)


def main(tmp_path, **options):
    given = {**SMALL, "env_id": "Countdown-v0", "save": tmp_path, **options}
    return ppo.main(ppo.Options(**given))


ACTION_SPACES = [
    Discrete(5),
    Discrete(3, start=-1),
    MultiDiscrete([3, 2, 4]),
    MultiDiscrete([[2, 3], [3, 3]], start=[[1, 0], [0, 5]]),
    Box(-2, 2, (3,), np.float32),
    Box(np.array([-1.0, -np.inf]), np.array([0.5, np.inf]), dtype=np.float64),
    Box(-1, 1, (2,), np.float16),
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
    advantages, returns = batch.advantages[kept], batch.returns[kept]
    gain = torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)).mean()
    return -gain + 0.25 * ((values - returns) ** 2).mean() - 0.1 * entropy.mean()


@pytest.mark.parametrize("space", ACTION_SPACES, ids=str)
def test_the_loss_is_that_of_cleanrl(space):
    given = {"entropy_weight": 0.1, "value_weight": 0.5}
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


@pytest.mark.parametrize("kind", ["no", "gru"])
def test_what_is_learned_from_is_what_acted_and_a_memory_forgets_at_borders_of_episodes(kind):
    given = {"recurrent": kind, "memory_size": 5, "sequence_length": 8, "num_minibatches": 2}
    trainer = make_trainer(envs=make_envs(action_space=MultiDiscrete([3, 2])), **given)
    trainer.update()  # the second rollout begins with states of the first
    with torch.no_grad():
        for parameter in trainer.agent.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    trainer.collect()
    trainer.compute_advantages()
    for batch in trainer.minibatches():
        _, means = ppo.ppo_loss(trainer.agent, batch, trainer.options)
        assert abs(means["approx_kl"]) < 1e-6 and means["clipfrac"] == 0
        kept = batch.weights > 0
        if kind == "no":
            values = trainer.agent.value(trainer.agent.features(batch.obs))
            torch.testing.assert_close(values[kept], batch.values[kept])
            continue
        assert batch.is_first.any() and not batch.is_first.all()
        states = batch.initial_states["state"]
        features, _ = trainer.agent.step(batch.obs, states, batch.is_first)
        found = trainer.agent.value(features).view_as(kept)[kept]
        torch.testing.assert_close(found, batch.values[kept])
        forgotten, _ = trainer.agent.step(batch.obs, 0 * states, batch.is_first)
        assert not torch.allclose(trainer.agent.value(forgotten).view_as(kept)[kept], found)


def test_actions_are_drawn_with_their_probabilities_and_masked_ones_never():
    agent = make_trainer(envs=make_envs(action_space=MultiDiscrete([3, 2, 2]))).agent
    logits = torch.tensor([0.5, -1.0, 1.5, 0.3, -0.2, 0.0, 0.0])
    agent.actor[-1].weight.data.zero_()
    agent.actor[-1].bias.data[:] = logits
    torch.manual_seed(2)
    num_draws = 40_000
    obs, mask = torch.zeros(num_draws, 3), torch.tensor([[1, 1, 1, 1, 1, 0, 1]])

    actions, _ = agent.act(obs, torch.rand(num_draws, 3), mask)

    for k, part in enumerate((logits[:3], logits[3:5])):
        counts = torch.bincount(actions[:, k], minlength=len(part)).double()
        expected = part.double().softmax(0) * num_draws
        assert ((counts - expected) ** 2 / expected).sum() < 16  # p < 0.001
    assert (actions[:, 2] == 1).all()
    assert agent.act(obs[:1], mask=mask)[0].tolist() == [[2, 0, 1]]


OBSERVATIONS = {
    "a number": Box(-1, 1, (), np.float32),
    "image, channels last": Box(0, 255, (36, 40, 3), np.uint8),
    "image, channels first": Box(0, 1, (4, 10, 12), np.float32),
    "choices": MultiDiscrete([2, 3], start=[1, 0]),
    "bits": gym.spaces.MultiBinary(3),
    "all": gym.spaces.Dict(a=Box(-1, 1, (3,)), b=Box(0, 255, (36, 36, 1), np.uint8), c=Discrete(4)),
}


# "all" has an image, numbers and a choice in it.
@pytest.mark.parametrize(
    "name", fast_are(["a number", "choices", "bits", "all"], list(OBSERVATIONS))
)
def test_observations_of_each_kind_are_learned_from(name):
    trainer = make_trainer(envs=make_envs(OBSERVATIONS[name]), normalize=True)
    before = [parameter.detach().clone() for parameter in trainer.agent.parameters()]
    trainer.update()
    pairs = zip(before, trainer.agent.parameters(), strict=True)
    assert not any(old.equal(new) for old, new in pairs), "each parameter is learned"


# --------------------------------------------------------------------------- training


@pytest.mark.parametrize("space", fast_are(ACTION_SPACES[::2], ACTION_SPACES), ids=str)
def test_actions_that_reach_the_env_are_in_its_space(space):
    trainer = make_trainer(envs=make_envs(Box(-1, 1, (2, 2), np.float64), space))
    if not trainer.agent.is_discrete:
        trainer.agent.log_std.data.fill_(2.0)
    trainer.update()
    actions = [entry for entry in Countdown.log if not isinstance(entry, str)]
    assert len(actions) == trainer.steps
    assert played(trainer).mean > 0
    actions = [entry for entry in Countdown.log if not isinstance(entry, str)]
    assert all(np.asarray(action) in space for action in actions)


@pytest.mark.parametrize("form", ["info", "obs"])
def test_masked_actions_are_not_taken(form):
    envs = SyncVectorEnv([lambda: Forbidding(form)] * 4)
    trainer = make_trainer(envs=envs)
    trainer.update()
    taken = trainer.rollout.extras["action_mask"].gather(-1, trainer.rollout.actions[..., None])
    assert taken.squeeze(-1)[trainer.rollout.valid].all()
    assert np.isfinite(played(trainer).mean)


def test_dead_steps_are_neither_counted_nor_learned_from():
    trainer, returns = make_trainer(), []
    for _ in range(3):
        num_resets, steps = Countdown.log.count("reset"), trainer.steps
        trainer.update()
        num_dead = Countdown.log.count("reset") - num_resets
        assert trainer.steps - steps == 4 * 32 - num_dead
        returns += trainer.episodes
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


# --------------------------------------------------------------------------- runs and files


def test_a_run_leaves_policy_scalars_and_curve(tmp_path):
    main(tmp_path)
    names = {"metrics.jsonl", "options.json", "evaluation.json", "policy.pt"}
    assert {path.name for path in tmp_path.iterdir()} >= names | {"curve.png", "checkpoint"}
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 600 - 4 * 32 < rows[-1]["steps"] <= 600  # ends before the steps are exceeded
    losses = "loss", "value_loss", "policy_loss", "entropy", "approx_kl", "clipfrac"
    names = {f"losses/{name}" for name in (*losses, "explained_variance")}
    others = "episodic_return", "SPS", "learning_rate", "episodic_length"
    names |= {"steps", "seconds", *(f"charts/{name}" for name in others)}
    assert all(row.keys() == names for row in rows)
    assert all(np.isfinite(value) for row in rows for value in row.values())


def test_numbers_of_infos_that_are_named_are_logged(tmp_path, capsys, monkeypatch):
    step = Countdown.step

    def telling(self, action):
        *result, _ = step(self, action)
        return *result, {"left": float(self.left)}

    monkeypatch.setattr(Countdown, "step", telling)
    main(tmp_path, backend="sync", log_infos=("left", "nothing"))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows and all(row["infos/left_at_end"] == 0 < row["infos/left"] < 6 for row in rows)
    assert "no number under nothing; the keys were left" in capsys.readouterr().out


def test_a_policy_is_loaded_where_it_fits(tmp_path):
    options = {"env_id": "CartPole-v1", "total_steps": 300, "normalize": True, "num_steps": 16}
    result = main(tmp_path / "a", **options)
    for load in (tmp_path / "a", tmp_path / "a" / "checkpoint" / "last.pt"):
        options |= {"load": load, "total_steps": 0, "overwrite": True}
        assert main(tmp_path / "b", **options).returns == result.returns
        assert not (tmp_path / "b" / "curve.png").exists()
    for change in ({"env_id": "Acrobot-v1"}, {"hidden": (8,)}):
        with pytest.raises(SystemExit, match=r"last\.pt has weights of another agent.*size"):
            main(tmp_path / "c", **{**options, **change})


def test_actions_that_are_not_supported_are_refused(tmp_path):
    for space in (gym.spaces.MultiBinary(3), Box(0, 9, (2,), np.int64)):
        with pytest.raises(OptionsError, match=r"actions are .*expected Discrete"):
            make_trainer(envs=make_envs(action_space=space))


def test_parameters_of_compiled_envs_are_drawn_for_every_episode():
    options = {**SMALL, "env_id": "JitCartPole-v1"}
    drawn = ppo.Options(**options, randomize=("pole_length 0.3 1.5", "force 8 12"))
    envs = ppo.PPO.make_envs(drawn, 4)
    envs.reset(seed=1)
    assert len(np.unique(envs.params.pole_length)) == 4
    assert ((envs.params.force >= 8) & (envs.params.force <= 12)).all()
    with pytest.raises(ValueError, match=r"sampler\['pole_length'\] is \['0.3'\], expected"):
        ppo.PPO.make_envs(ppo.Options(**options, randomize=("pole_length 0.3",)), 4)
    with pytest.raises(ValueError, match=r"no number 'force=8,12' .*expected NAME LOWEST HIGHEST"):
        ppo.PPO.make_envs(ppo.Options(**options, randomize=("force=8,12",)), 4)
    with pytest.raises(OptionsError, match="--randomize is for compiled envs"):
        ppo.PPO.make_envs(
            ppo.Options(**{**options, "env_id": "CartPole-v1"}, randomize=("x 1 2",)), 4
        )


def test_actors_of_ray_draw_allowed_actions_and_record_the_masks():
    """In this process: with Ray they are in others, see tests/on_ray."""
    envs = SyncVectorEnv([Forbidding] * 3)
    actor = ppo.Actor(envs, ppo.Options(num_envs=3))
    obs, _ = envs.reset(seed=1)
    for step in range(12):
        before = np.array(envs.action_masks())
        actions, recorded = actor.act(obs, np.full((3, 1), 0.3, np.float32))
        np.testing.assert_array_equal(recorded["action_mask"], before)
        assert (before[np.arange(3), actions.numpy()] == 1).all(), step
        obs, *_ = envs.step(actor.to_env(actions.numpy()))
    without = ppo.Actor(make_vec("CartPole-v1", 2, backend="sync"), ppo.Options())
    assert without.act(np.zeros((2, 4), np.float32), np.full((2, 1), 0.5, np.float32))[1] == {}
