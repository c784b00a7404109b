"""Measures of diversity against cases that can be worked out by hand, and obvious loops."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Tuple

from vecenv.compare.diversity import (
    action_scores,
    batched,
    distinct_share,
    gradient_variance,
    intraclass_correlation,
    nearest_neighbour_distance,
    policy_gradients,
    reward_to_go,
)


def test_batches_are_consecutive_steps_of_all_envs():
    rows = np.arange(24).reshape(4, 3, 2)  # (time, envs, features)
    batches = batched(rows, steps=2)
    assert batches.shape == (2, 6, 2)
    np.testing.assert_array_equal(batches[1], rows[2:].reshape(6, 2))
    assert batched(rows, steps=3).shape == (1, 9, 2)  # the last step is left


def test_distinct_share_counts_each_state_once():
    assert distinct_share(np.array([5, 5, 5, 5])) == 0.25
    assert distinct_share(np.arange(10)) == 1.0


def test_nearest_neighbour_distance_by_hand():
    corners = np.array([[0.0, 0.0], [3.0, 0.0], [3.0, 4.0]])
    # To the nearest: 3, 3 and 4; divided by the root of two features.
    expected = (3 + 3 + 4) / 3 / np.sqrt(2)
    assert nearest_neighbour_distance(corners, np.ones(2)) == pytest.approx(expected)
    # In units of 3 and 4 the last side is 1, and so are the others.
    assert nearest_neighbour_distance(corners, np.array([3.0, 4.0])) == pytest.approx(
        1 / np.sqrt(2)
    )


def test_nearest_neighbour_distance_of_states_that_come_twice_is_zero():
    states = np.repeat(np.random.default_rng(0).normal(size=(50, 3)) + 1e4, 2, axis=0)
    assert nearest_neighbour_distance(states, np.ones(3)) == 0.0


@pytest.mark.parametrize("rows", [2, 511, 512, 700])
def test_nearest_neighbour_distance_equals_a_loop(rows):
    states = np.random.default_rng(rows).normal(size=(rows, 4))
    distances = np.sqrt(((states[:, None] - states) ** 2).sum(2))
    np.fill_diagonal(distances, np.inf)
    expected = distances.min(1).mean() / 2
    assert nearest_neighbour_distance(states, np.ones(4)) == pytest.approx(expected)


def test_features_that_do_not_vary_do_not_count():
    states = np.array([[0.0, 7.0], [2.0, 7.0]])
    assert nearest_neighbour_distance(states, np.array([1.0, 0.0])) == 2.0
    assert nearest_neighbour_distance(states, np.zeros(2)) == 0.0
    assert nearest_neighbour_distance(states[:1], np.ones(2)) == 0.0


def test_intraclass_correlation_by_hand():
    # Means of the batches 1 and 4: between = 2 * 4.5 = 9; within = (2 + 8) / 2 = 5.
    batches = np.array([[0.0, 2.0], [2.0, 6.0]])[..., None]
    assert intraclass_correlation(batches) == pytest.approx((9 - 5) / (9 + 5))


def test_intraclass_correlation_at_its_ends():
    alike = np.repeat([[1.0], [2.0], [4.0]], 5, axis=1)[..., None]
    assert intraclass_correlation(alike) == pytest.approx(1.0)
    equal = np.repeat([[1.0, 2.0, 3.0, 4.0]], 3, axis=0)[..., None]
    assert intraclass_correlation(equal) == pytest.approx(-1 / 3)  # -1 / (size - 1)
    assert intraclass_correlation(np.ones((3, 4, 2))) == 0.0
    rows = np.random.default_rng(0).normal(size=(4000, 8, 1))
    assert abs(intraclass_correlation(rows)) < 0.02


def test_rewards_add_up_to_the_end_of_the_fragment_or_the_episode():
    rewards = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [8.0, 80.0]])
    is_over = np.array([[True, False], [False, False], [False, False], [False, False]])
    sums = reward_to_go(rewards, is_over, fragment=2)
    np.testing.assert_array_equal(sums, [[1, 30], [2, 20], [12, 120], [8, 80]])
    sums = reward_to_go(rewards, is_over, fragment=4)
    np.testing.assert_array_equal(sums, [[1, 150], [14, 140], [12, 120], [8, 80]])
    np.testing.assert_array_equal(reward_to_go(rewards, is_over, fragment=1), rewards)


def test_scores_of_discrete_actions_are_the_action_minus_its_probability():
    scores = action_scores(np.array([3, 5]), Discrete(3, start=3))
    np.testing.assert_allclose(scores, [[2 / 3, -1 / 3, -1 / 3], [-1 / 3, -1 / 3, 2 / 3]])
    scores = action_scores(np.array([[1, 0]]), MultiDiscrete([2, 2]))
    np.testing.assert_allclose(scores, [[-0.5, 0.5, 0.5, -0.5]])
    scores = action_scores(np.array([[1, 0]], np.int8), MultiBinary(2))
    np.testing.assert_allclose(scores, [[-0.5, 0.5, 0.5, -0.5]])


def test_scores_of_real_actions_are_distances_over_the_variance():
    actions = np.array([[1.0, 3.0], [3.0, 3.0]], np.float32)
    scores = action_scores(actions, Box(0, 4, (2,)))
    np.testing.assert_allclose(scores, [[-1.0, 0.0], [1.0, 0.0]])


@pytest.mark.parametrize("space", [Box(0, 3, (1,), np.int64), Tuple((Discrete(2),))])
def test_other_action_spaces_have_no_scores(space):
    assert action_scores(np.zeros((2, 1), np.int64), space) is None


def test_policy_gradients_equal_a_loop():
    rng = np.random.default_rng(0)
    states, scores = rng.normal(size=(3, 5, 2)), rng.normal(size=(3, 5, 4))
    returns = rng.normal(size=(3, 5))
    for b in range(3):
        expected = np.mean(
            [returns[b, k] * np.outer(scores[b, k], [*states[b, k], 1.0]) for k in range(5)], axis=0
        )
        found = policy_gradients(states, scores, returns)[b]
        np.testing.assert_allclose(found, expected.ravel())


def test_gradient_variance_adds_up_the_parameters():
    variance, error = gradient_variance(np.array([[1.0, 2.0], [3.0, 6.0]]))
    assert variance == pytest.approx(2 + 8)
    assert error == pytest.approx(np.sqrt(2) * 10)  # one free direction
    assert gradient_variance(np.ones((5, 3))) == (0.0, 0.0)


def test_the_error_of_the_variance_is_that_of_repeated_estimates():
    rng = np.random.default_rng(0)
    spread = np.array([3.0, 1.0, 1.0])
    found = [gradient_variance(rng.normal(size=(40, 3)) * spread) for _ in range(400)]
    variances, errors = np.array(found).T
    assert errors.mean() == pytest.approx(variances.std(), rel=0.15)
