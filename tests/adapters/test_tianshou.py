"""TianshouVectorEnv against Tianshou's own DummyVectorEnv, and in its collectors."""

import numpy as np
import pytest
from envs import CounterEnv, counters
from gymnasium import spaces

import vecenv

pytest.importorskip("tianshou")
from tianshou.data import Collector, CollectStats, VectorReplayBuffer
from tianshou.env import BaseVectorEnv, DummyVectorEnv

from vecenv.adapters.tianshou import TianshouVectorEnv, make_tianshou_env

LENGTHS = [2, 3, 5, 9]


class DictEnv(CounterEnv):
    observation_space = spaces.Dict(where=CounterEnv.observation_space, parity=spaces.Discrete(2))

    def _observe(self):
        return {"where": super()._observe(), "parity": np.int64(self.step_number % 2)}


def factories(kind):
    return [lambda name=n, length=k: kind(name, length) for n, k in enumerate(LENGTHS)]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert type(mine) is type(other) is np.ndarray
        np.testing.assert_equal(mine.tolist(), other.tolist())
        assert mine.shape == other.shape and mine.dtype == other.dtype


@pytest.mark.parametrize("kind", [CounterEnv, DictEnv])
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_all_that_dummy_vector_env_returns(kind, backend):
    ours = make_tianshou_env(factories(kind), backend=backend)
    theirs = DummyVectorEnv(factories(kind))
    assert len(ours) == len(theirs) == 4
    assert_same(ours.reset(), theirs.reset())
    rng = np.random.default_rng(1)
    for _ in range(30):
        ids = rng.permutation(4)[: rng.integers(1, 5)]
        actions = rng.integers(10, size=len(ids))
        results = [envs.step(actions, ids) for envs in (ours, theirs)]
        assert_same(*results)
        if len(over := ids[results[1][2] | results[1][3]]):
            assert_same(ours.reset(over), theirs.reset(over))
    ours.close()


def test_all_envs_at_once_and_one_by_number():
    ours = make_tianshou_env(counters(LENGTHS), backend="sync")
    theirs = DummyVectorEnv(counters(LENGTHS))
    for envs in (ours, theirs):
        envs.reset()
    assert_same(ours.step(np.arange(4)), theirs.step(np.arange(4)))
    assert_same(ours.step([7], 2), theirs.step([7], 2))
    assert_same(ours.reset(2), theirs.reset(2))
    done = [[call[0] for call in env.calls] for env in ours.envs.envs]
    assert done == [[call[0] for call in calls] for calls in theirs.get_env_attr("calls")]


def test_seeds_count_for_the_next_reset_of_each_env():
    envs = make_tianshou_env(counters([3, 3, 3]), backend="sync")
    assert envs.seed(5) == [[5], [6], [7]]
    envs.reset()
    envs.reset()
    envs.seed([1, 2, 3])
    envs.reset([2])
    envs.reset(options={"level": 1})
    assert envs.seed() == [None] * 3
    calls = [[call[1:] for call in env.calls] for env in envs.envs.envs]
    assert calls[0] == [(5, None), (None, None), (1, {"level": 1})]
    assert calls[2] == [(7, None), (None, None), (3, {}), (None, {"level": 1})]
    with pytest.raises(ValueError, match="2 seeds for 3 envs"):
        envs.seed([1, 2])


def test_attributes():
    envs = make_tianshou_env(counters([3, 3, 3]), backend="sync")
    assert isinstance(envs, BaseVectorEnv) and isinstance(envs, TianshouVectorEnv)
    assert envs.action_space == [spaces.Discrete(10)] * 3
    assert envs.observation_space == [CounterEnv.observation_space] * 3
    assert envs.metadata[0]["autoreset_mode"] is vecenv.AutoresetMode.DISABLED
    assert envs.spec == [None] * 3
    assert envs.get_env_attr("name", [2, 0]) == [2, 0]
    envs.set_env_attr("length", 7, id=1)
    assert envs.get_env_attr("length") == [3, 7, 3]
    assert envs.render() == ["frame of 0", "frame of 1", "frame of 2"]
    envs.close()
    envs.close()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "JitCartPole-v1", "vecenv:Cage2-v0"])
def test_collectors_take_it(env_id):
    options = {"episode_length": 20} if "Cage" in env_id else {"backend": "auto"}
    envs = make_tianshou_env(env_id, 4, **options)
    buffer = VectorReplayBuffer(4000, 4)
    collector = Collector[CollectStats](random_policy(envs), envs, buffer)
    collector.reset()
    stats = collector.collect(n_episode=10)
    assert stats.n_collected_episodes == 10
    stats = collector.collect(n_step=100)
    assert stats.n_collected_steps == 100
    ended = buffer.done
    assert (np.abs(buffer.obs_next[:-1] - buffer.obs[1:]).sum(1)[~ended[:-1]] < 1e-6).mean() > 0.9
    envs.close()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_other_autoreset_modes_are_refused(mode):
    with pytest.raises(ValueError, match=r"expected DISABLED.*autoreset_mode=.Disabled"):
        TianshouVectorEnv(vecenv.SyncVectorEnv(counters([3]), autoreset_mode=mode))


def random_policy(envs):
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
    from tianshou.utils.net.common import Net

    space, actions = envs.observation_space[0], envs.action_space[0]
    net = Net(state_shape=space.shape, action_shape=actions.n, hidden_sizes=[8])
    return DiscreteQLearningPolicy(model=net, action_space=actions, observation_space=space)
