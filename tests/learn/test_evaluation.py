"""evaluate: the first episodes of each env, on any backend, and the interval of their mean."""

import functools
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from envs import CounterEnv, counters
from gymnasium import spaces

from vecenv import AsyncVectorEnv, SyncVectorEnv, make_vec
from vecenv.learn import evaluate


def zeros(obs):
    return torch.zeros(len(obs), dtype=torch.int64)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_every_env_plays_its_first_episodes_whether_short_or_long(mode):
    """An episode of n steps of a counter has the return 1 + 2 + ... + n."""
    envs = SyncVectorEnv(counters([1, 9, 3]), autoreset_mode=mode)
    seen = []
    result = evaluate(zeros, envs, 7, progress=lambda done, of: seen.append((done, of)))
    assert result.returns == (1, 1, 1, 45, 45, 6, 6)
    assert result.lengths == (1, 1, 1, 9, 9, 3, 3)
    assert seen[-1] == (7, 7)
    assert result.mean == pytest.approx(105 / 7)
    envs.close()


def test_results_are_the_same_on_every_backend():
    def act(obs):
        return (obs[:, 2] > 0).long()

    made = [
        make_vec("CartPole-v1", 3, backend="sync", autoreset_mode="SameStep"),
        AsyncVectorEnv([functools.partial(gym.make, "CartPole-v1")] * 3, copy=False),
        gym.vector.SyncVectorEnv([functools.partial(gym.make, "CartPole-v1")] * 3),
    ]
    results = [evaluate(act, envs, 8, seed=5).lengths for envs in made]
    assert results[0] == results[1] == results[2]
    again = evaluate(act, "CartPole-v1", 8, seed=5, num_envs=3, backend="sync")
    assert again.lengths == results[0]
    assert not made[0].closed
    for envs in made:
        envs.close()


@pytest.mark.parametrize(
    ("count", "quantile"), [(2, 12.7062), (3, 4.30265), (4, 3.18245), (5, 2.77645), (11, 2.22814)]
)
def test_the_interval_is_students(count, quantile):
    envs = SyncVectorEnv(counters(range(1, count + 1)))
    result = evaluate(zeros, envs, count)
    std = np.std(result.returns, ddof=1)
    assert result.std == pytest.approx(std)
    assert result.ci95 == pytest.approx(quantile * std / math.sqrt(count), rel=2e-3)


def test_a_single_episode_has_no_interval():
    result = evaluate(zeros, lambda: CounterEnv(length=2), 1, backend="sync")
    assert math.isnan(result.std) and math.isnan(result.ci95)
    assert str(result).startswith("return 3.0 ± nan")


class Masked(CounterEnv):
    """Observes a Dict; action `step_number` alone is allowed."""

    observation_space = spaces.Dict(
        step=spaces.Discrete(99), pair=spaces.Tuple([spaces.Discrete(9)])
    )

    def _observe(self):
        return {"step": self.step_number, "pair": (1,)}

    def step(self, action):
        assert action == self.step_number
        return super().step(action)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_policies_with_a_memory_are_told_where_episodes_start(mode):
    counts = torch.zeros(2, dtype=torch.int64)

    def act(obs, starts):
        counts[starts] = 0
        assert (obs["step"] == counts).logical_or(obs["step"] == 3).all()  # 3 at the end
        assert torch.is_tensor(obs["pair"][0])
        counts.add_(1)
        return counts - 1

    make = functools.partial(Masked, length=3)
    result = evaluate(act, SyncVectorEnv([make, make], autoreset_mode=mode), 4)
    assert result.lengths == (3, 3, 3, 3)


def test_policies_that_ask_for_action_masks_get_those_of_the_envs():
    class Envs(SyncVectorEnv):
        def action_masks(self):
            return np.array([[0, 1, 0]] * self.num_envs, np.int8)

    def act(obs, action_masks):
        assert action_masks.tolist() == [[0, 1, 0]]
        return action_masks.argmax(-1)

    evaluate(act, Envs(counters([2])), 1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"episodes": 0}, "episodes is 0"),
        ({"num_envs": 0}, "num_envs 0"),
        ({"num_envs": 3}, "for envs that are made here"),
    ],
)
def test_wrong_arguments_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        evaluate(zeros, SyncVectorEnv(counters([1])), **kwargs)
