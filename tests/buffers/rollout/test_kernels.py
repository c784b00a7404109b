"""What follows from the steps of a rollout, against loops in plain Python."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from staged_rollouts import make_rollout

from buffers.rollout import minibatches

RATES = [0.0, 0.3, 1.0]
SHAPES = [(1, 1), (1, 5), (6, 1), (5, 4)]


def random_flags(rng, rate, shape):
    return rng.random(shape) < rate


def filled(rollout, rewards, terminations, truncations, valid):
    for t in range(rollout.num_steps):
        slot = rollout.slot(t)
        slot.rewards[:], slot.obs[:] = rewards[t], 0
        slot.terminations[:], slot.truncations[:] = terminations[t], truncations[t]
    rollout.valid_pages[:] = valid


def made(mode, shape):
    rollout = make_rollout(*shape, Box(-1, 1, (1,)), Discrete(2), autoreset_mode=mode)
    rollout.start(np.zeros((shape[1], 1), np.float32))
    return rollout


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_that_count_and_episodes(shape, rate, mode):
    """Of two rollouts, one after the other; rows are left out by the user, too."""
    rng, rollout = np.random.default_rng(2), made(mode, shape)
    sums, lengths, was_over = np.zeros(shape[1]), [0] * shape[1], [False] * shape[1]
    for _ in range(3):
        rewards = rng.standard_normal(shape).astype(np.float32)
        flags = [random_flags(rng, rate / 2, shape) for _ in range(2)]
        valid, expected = random_flags(rng, 0.8, shape), []
        filled(rollout, rewards, *flags, valid)
        for t, i in np.ndindex(shape):
            valid[t, i] &= not (was_over[i] and mode == "NextStep")
            if valid[t, i]:
                sums[i] += float(rewards[t, i])
                lengths[i] += 1
            was_over[i] = flags[0][t, i] or flags[1][t, i]
            if was_over[i]:
                if valid[t, i]:
                    expected.append((sums[i], lengths[i]))
                sums[i], lengths[i] = 0.0, 0
        found = rollout.episodes()
        np.testing.assert_array_equal(rollout.valid_pages, valid)
        np.testing.assert_allclose(found.returns, [total for total, _ in expected], rtol=1e-12)
        assert found.lengths.tolist() == [length for _, length in expected]
        rollout.advance()


def test_shuffle_is_fair():
    """Each of 4 numbers is as often in each place: 24 000 draws, five standard deviations."""
    generator, counts = np.zeros(2, np.uint64), np.zeros((4, 4), int)
    rows = np.empty(4, np.int64)
    draws = 24_000
    for _ in range(draws):
        rows[:] = range(4)
        minibatches.shuffle(rows, generator)
        counts[np.arange(4), rows] += 1
    assert np.abs(counts - draws / 4).max() < 5 * np.sqrt(draws * 3 / 16)
