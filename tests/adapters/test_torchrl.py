"""TorchRL over our vector envs, and its losses over our buffers."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
from envs import CounterEnv, counters
from gymnasium import spaces

import vecenv
from buffers import (
    EpisodicReplayBuffer,
    PrioritizedReplayBuffer,
    RolloutBuffer,
    SharedReplayBuffer,
    TransitionWriter,
)
from vecenv.adapters.torchrl import as_tensordict
from vecenv.cage import Cage2VectorEnv

pytest.importorskip("torchrl")
import torch

pytest.importorskip("pettingzoo")

with warnings.catch_warnings(action="ignore"):  # TorchRL deprecates classes of its own
    from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, PettingZooWrapper, check_env_specs
from torchrl.objectives.value import GAE

from vecenv.adapters.pettingzoo import GameView

# Raised in TorchRL's own code: conversions of spaces, and checks of versions.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torchrl"),
]


class SilentEnv(CounterEnv):
    """Without infos: under SAME_STEP TorchRL can't do with keys that come and go."""

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {}

    def step(self, action):
        return (*super().step(action)[:4], {})


def silent():
    return [lambda name=name, length=k: SilentEnv(name, length) for name, k in enumerate([2, 3, 5])]


def backends():
    yield "sync", lambda mode: vecenv.SyncVectorEnv(silent(), autoreset_mode=mode)
    yield "vocal", lambda mode: vecenv.SyncVectorEnv(counters([2, 3, 5]), autoreset_mode=mode)
    yield (
        "async",
        lambda mode: vecenv.AsyncVectorEnv(silent(), num_workers=2, autoreset_mode=mode),
    )
    yield "jit", lambda mode: vecenv.make_vec("JitCartPole-v1", 3, autoreset_mode=mode)
    yield "cage", lambda mode: Cage2VectorEnv(3, episode_length=4, autoreset_mode=mode)
    yield (
        "continuous",
        lambda mode: vecenv.make_vec("Pendulum-v1", 3, backend="sync", autoreset_mode=mode),
    )


@pytest.fixture(params=backends(), ids=lambda pair: pair[0])
def make_envs(request):
    made = []

    def make(mode):
        made.append(request.param[1](mode))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


@pytest.mark.parametrize("mode", ["Disabled", "SameStep"])
def test_its_checker_passes_and_a_collector_collects(make_envs, mode, request):
    if mode == "SameStep" and "vocal" in request.node.name:
        pytest.skip("TorchRL wants the same infos at every step, of Gymnasium's envs too")
    env = GymWrapper(make_envs(mode))
    check_env_specs(env)
    collector = Collector(env, policy=None, frames_per_batch=60, total_frames=180)
    batches = list(collector)
    assert [batch.shape for batch in batches] == [(3, 20)] * 3
    collector.shutdown()


def test_agents_of_cage4_are_groups_with_their_masks():
    pytest.importorskip("pettingzoo")
    options = {"mask_infos": True, "vector_kwargs": {"debug": True}}
    games = vecenv.make_vec_agents("Cage4-v0", steps=20, autoreset_mode="Disabled", **options)
    groups = {"zones": [f"blue_agent_{k}" for k in range(4)], "headquarters": ["blue_agent_4"]}
    env = PettingZooWrapper(
        GameView(games), group_map=groups, use_mask=True, categorical_actions=True, seed=3
    )
    rollout = env.rollout(30)
    assert rollout.batch_size == (19,)
    for name, shape in (("zones", (4, 92)), ("headquarters", (1, 210))):
        assert rollout[name, "observation"].shape == (19, *shape)
        masks, actions = rollout[name, "action_mask"], rollout[name, "action"]
        assert masks.shape == (19, shape[0], env.full_action_spec[name, "action"].n)
        assert masks.gather(-1, actions.unsqueeze(-1)).all() and not masks.all()
    assert rollout["next", "zones", "done"][-1].all()
    env.close()


@pytest.mark.parametrize("mode", ["Disabled", "SameStep"])
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_rollouts_are_those_of_gymnasiums_vector_env(mode, backend):
    """Observation, reward and flags of every step, and the true observation after the last."""
    ours = GymWrapper(vecenv.make_vec(silent(), backend=backend, autoreset_mode=mode))
    theirs = gym.vector.AutoresetMode(mode)
    theirs = GymWrapper(gym.vector.SyncVectorEnv(silent(), autoreset_mode=theirs))
    rollouts = []
    for env in (ours, theirs):
        torch.manual_seed(0)
        rollouts.append(env.rollout(12, break_when_any_done=False))
    for key in ("observation", *((("next", k)) for k in ("observation", "reward", "done"))):
        assert torch.equal(rollouts[0][key], rollouts[1][key]), key
    names, _, steps = rollouts[0]["next", "observation"].unbind(-1)
    assert torch.equal(
        rollouts[0]["next", "done"].squeeze(-1), steps == torch.tensor([[2], [3], [5]])
    )
    assert (names == torch.arange(3).unsqueeze(1)).all()
    ours.close()


def batch_of(kind, num_steps=50, **options):
    envs = vecenv.make_vec("CartPole-v1", 4, backend="sync")
    single = envs.single_observation_space, envs.single_action_space
    buffer = kind(1000, *single, num_envs=4, seed=1, **options)
    writer = TransitionWriter(envs, buffer)
    writer.reset(envs.reset(seed=1)[0])
    for _ in range(num_steps):
        actions = envs.action_space.sample()
        writer.step(actions, *envs.step(actions))
    return buffer


def shares_memory(one, other):
    return one.data_ptr() == other.data_ptr()


@pytest.mark.parametrize("kind", [SharedReplayBuffer, PrioritizedReplayBuffer])
def test_batches_are_viewed_under_torchrls_names(kind):
    batch = batch_of(kind).sample(32)
    found = as_tensordict(batch)
    assert found.batch_size == (32,)
    pairs = {
        "observation": batch.obs,
        "action": batch.actions,
        "indices": batch.indices,
        ("next", "observation"): batch.next_obs,
        ("next", "reward"): batch.rewards,
        ("next", "terminated"): batch.terminations,
        ("next", "truncated"): batch.truncations,
    }
    for name, tensor in pairs.items():
        assert shares_memory(found[name], tensor), name
    assert found["next", "reward"].shape == (32, 1)
    over = batch.terminations | batch.truncations
    assert torch.equal(found["next", "done"].squeeze(-1), over)
    assert ("weights" in found) == (kind is PrioritizedReplayBuffer)


def rollout_of(mode, num_steps=8):
    envs = vecenv.make_vec("CartPole-v1", 4, backend="sync", autoreset_mode=mode)
    rollout = RolloutBuffer(
        num_steps,
        4,
        envs.single_observation_space,
        envs.single_action_space,
        autoreset_mode=mode,
        allocate=envs.allocate,
    )
    rollout.start(envs.reset(seed=1)[0])
    for t in range(num_steps):
        actions = torch.ones(4, dtype=torch.int64)
        policy = {"log_probs": torch.full((4,), -0.7), "values": torch.zeros(4)}
        envs.step(rollout.put(t, actions=actions, **policy), out=rollout.slot(t))
    return rollout


def test_a_rollout_is_viewed_while_it_is_filled():
    rollout = rollout_of("NextStep")
    found = as_tensordict(rollout)
    assert found.batch_size == (8, 4)
    assert shares_memory(found["observation"], rollout.obs)
    assert shares_memory(found["next", "observation"], rollout.obs[1:])
    assert shares_memory(found["next", "reward"], rollout.rewards)
    assert shares_memory(found["action_log_prob"], rollout.log_probs)
    assert found["state_value"].shape == found["advantage"].shape == (8, 4, 1)
    rollout.compute_advantages(torch.ones(4))
    assert found["advantage"].abs().sum() > 0
    assert shares_memory(found["value_target"], rollout.returns)
    (batch,) = rollout.minibatches(1)
    rows = as_tensordict(batch)
    assert rows.batch_size == (rollout.num_valid,)
    assert shares_memory(rows["advantage"], batch.advantages)
    assert "next" not in rows


def test_gae_of_torchrl_is_ours():
    rollout = rollout_of("NextStep", 6)  # shorter than an episode
    rollout.values[:] = torch.rand(7, 4)
    rollout.compute_advantages(rollout.values[6].clone())
    found = as_tensordict(rollout).transpose(0, 1)
    found["next", "state_value"] = rollout.values[1:].transpose(0, 1).unsqueeze(-1)
    expected = rollout.advantages.clone()
    GAE(gamma=0.99, lmbda=0.95, value_network=None)(found)
    torch.testing.assert_close(found["advantage"].squeeze(-1).T, expected)


@pytest.mark.parametrize("source", [{}, np.zeros(3), "buffer"])
def test_what_has_no_tensors_is_refused(source):
    if isinstance(source, str):
        source = batch_of(SharedReplayBuffer)
    with pytest.raises(TypeError, match=r"expected a batch of a buffer.*`sample` returned"):
        as_tensordict(source)


def test_tuples_are_refused():
    space = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])
    buffer = EpisodicReplayBuffer(10, space, spaces.Discrete(2))
    obs = (np.zeros(4, int), np.zeros(4, int))
    buffer.add_episode({"obs": obs, "actions": np.zeros(3, int), "rewards": np.zeros(3)})
    with pytest.raises(TypeError, match="can't hold; use a Dict space"):
        as_tensordict(buffer.sample(2))
