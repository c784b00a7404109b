"""Collecting transitions: what is in them, and what is made of sets of them."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from compare.toy_envs import Counter, Nested, Ragged

from vecenv.compare.sampling import Trajectories, collect, compare_sets, measure_diversity
from vecenv.synthetic import SyntheticEnv


def test_transitions_lie_in_time_and_env_order():
    found = collect([Counter(length=3), Counter(length=4)], 5, seed=1)

    np.testing.assert_array_equal(found.states[:, 0, 0], [0, 1, 2, 0, 1])
    np.testing.assert_array_equal(found.states[:, 1, 0], [0, 1, 2, 3, 0])
    np.testing.assert_array_equal(found.is_over[:, 0], [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(found.rewards, np.ones((5, 2)))
    assert found.actions.shape == (5, 2)
    assert len(np.unique(found.keys)) == 4


def test_the_same_seed_gives_the_same_transitions():
    envs = [SyntheticEnv(episode_length=7) for _ in range(2)]
    first, again = collect(envs, 20, seed=3), collect(envs, 20, seed=3)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    alone = collect(envs[:1], 20, seed=3)  # env i is seeded with seed + i
    np.testing.assert_array_equal(alone.states[:, 0], first.states[:, 0])


def test_long_observations_become_64_numbers_that_keep_distances_about():
    env = SyntheticEnv(obs_shape=(40, 40), episode_length=1)
    found = collect([env], 60)
    assert found.states.shape == (60, 1, 64)
    lengths = (found.states**2).sum(2)  # of 1600 standard normal numbers
    assert lengths.mean() == pytest.approx(1600, rel=0.1)


def test_collecting_stops_when_its_time_is_up():
    assert collect([Counter()], 1000, limit_s=0.0).rewards.shape == (1, 1)


def test_envs_that_are_all_alike_are_less_diverse_than_those_that_are_not():
    states = np.random.default_rng(0).normal(size=(64, 8, 3)).astype(np.float32)
    mixed = np.cumsum(states, axis=0)  # each env goes its own way
    alike = np.repeat(np.cumsum(states[:, :1], axis=0), 8, axis=1)
    rest = np.zeros((64, 8), np.int64), np.ones((64, 8)), np.zeros((64, 8), np.bool_)
    sets = [
        Trajectories(found, (1e6 * found[..., 0]).astype(np.int64), *rest)
        for found in (alike, mixed)
    ]
    first, second = compare_sets(sets, gym.spaces.Discrete(2))
    assert first.distinct == pytest.approx(1 / 8)
    assert second.distinct == 1.0
    assert first.neighbour_distance == 0.0
    assert second.neighbour_distance > 0
    assert first.correlation > second.correlation


def test_sets_have_equally_many_transitions():
    found = measure_diversity(SyntheticEnv, [8, 3], num_transitions=600)
    assert [entry.num_envs for entry in found] == [1, 3, 8]
    assert [entry.num_transitions for entry in found] == [600, 600, 600]
    assert all(entry.gradient_variance > 0 for entry in found)


def test_the_frozen_start_of_many_envs_shows():
    """16 envs with episodes of 1000 steps, seen for 10 steps only, repeat the same states."""
    found = measure_diversity(partial(Counter, length=1000), [16], num_transitions=160)
    assert found[0].distinct == 1.0
    assert found[1].distinct == pytest.approx(10 / 160)


def test_too_few_transitions_give_no_variance():
    found = measure_diversity(Counter, [64], num_transitions=16)
    assert [entry.num_envs for entry in found] == [1]
    assert found[0].gradient_variance is not None
    found = measure_diversity(Counter, [1], num_transitions=2)
    assert found[0].gradient_variance is None
    assert found[0].correlation is None


def test_nested_spaces_are_laid_out_flat():
    found = measure_diversity(Nested, [2], num_transitions=64)
    assert found[0].distinct == pytest.approx(2 / 64)
    assert found[0].gradient_variance is None  # for Tuple actions there is none


def test_ragged_observations_are_refused():
    with pytest.raises(ValueError, match="vectors of numbers"):
        measure_diversity(Ragged, [1])
