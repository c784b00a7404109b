"""The passes over a finished rollout against loops in plain Python."""

import numpy as np
import pytest

from buffers.core import kernels as core_kernels
from buffers.rollout import kernels as rollout_kernels

RATES = [0.0, 0.3, 1.0]
SHAPES = [(1, 1), (1, 5), (6, 1), (5, 4)]


def random_flags(rng, rate, shape):
    return (rng.random(shape) < rate).astype(np.uint8)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_mark_dead_steps(load_kernels, shape, rate):
    rng = np.random.default_rng(0)
    terminations, truncations = (random_flags(rng, rate, shape) for _ in range(2))
    before, valid = random_flags(rng, 0.5, shape[1]), random_flags(rng, 0.8, shape)
    expected = valid.copy()
    for t, i in np.ndindex(shape):
        was_over = before[i] if t == 0 else terminations[t - 1, i] or truncations[t - 1, i]
        if was_over:
            expected[t, i] = 0
    load_kernels(rollout_kernels).mark_dead_steps(terminations, truncations, before, valid)
    np.testing.assert_array_equal(valid, expected)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("size", [1, 7])
def test_collect_rows(load_kernels, size, rate):
    valid = random_flags(np.random.default_rng(1), rate, size)
    rows = np.full(size, -1)
    count = load_kernels(rollout_kernels).collect_rows(valid, rows)
    np.testing.assert_array_equal(rows[:count], np.flatnonzero(valid))


@pytest.mark.parametrize("seed", range(6))
def test_first_missing_final(load_kernels, seed):
    rng = np.random.default_rng(seed)
    terminations, truncations, valid, has_final = (random_flags(rng, 0.5, 4) for _ in range(4))
    is_missing = truncations & (1 - terminations) & valid & (1 - has_final)
    expected = np.flatnonzero(is_missing)[0] if is_missing.any() else -1
    found = load_kernels(rollout_kernels).first_missing_final(
        terminations, truncations, valid, has_final
    )
    assert found == expected


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_finished_episodes(load_kernels, shape, rate):
    rng = np.random.default_rng(2)
    num_envs = shape[1]
    rewards = rng.standard_normal(shape).astype(np.float32)
    terminations, truncations = (random_flags(rng, rate / 2, shape) for _ in range(2))
    valid = random_flags(rng, 0.8, shape)
    sums, lengths = rng.standard_normal(num_envs), rng.integers(0, 9, num_envs)
    expected, wanted_sums, wanted_lengths = [], sums.tolist(), lengths.tolist()
    for t, i in np.ndindex(shape):
        if valid[t, i]:
            wanted_sums[i] += float(rewards[t, i])
            wanted_lengths[i] += 1
        if terminations[t, i] or truncations[t, i]:
            if valid[t, i]:
                expected.append((wanted_sums[i], wanted_lengths[i]))
            wanted_sums[i], wanted_lengths[i] = 0.0, 0

    found = np.full(rewards.size, np.nan), np.full(rewards.size, -1)
    count = load_kernels(rollout_kernels).finished_episodes(
        rewards, terminations, truncations, valid, sums, lengths, *found
    )

    assert list(zip(*(part[:count].tolist() for part in found), strict=True)) == expected
    assert (sums.tolist(), lengths.tolist()) == (wanted_sums, wanted_lengths)


@pytest.mark.parametrize("size", [0, 1, 2, 50])
def test_shuffle_permutes(load_kernels, size):
    rows, generator = np.arange(size), np.array([3, 0], np.uint64)
    load_kernels(rollout_kernels).shuffle(rows, generator)
    assert sorted(rows.tolist()) == list(range(size))
    assert size < 50 or rows.tolist() != list(range(size))
    assert generator.tolist() == [3, max(0, size - 1)]


def test_words_are_those_of_splitmix64(load_kernels):
    """Whose first words of the seed 0 are published; with the key 0 a word is a mixed counter."""
    words = [16294208416658607535, 7960286522194355700, 487617019471545679]
    golden = 0x9E3779B97F4A7C15
    module = load_kernels(core_kernels)
    for number, word in enumerate(words, 1):
        counter = np.uint64(number * golden % 2**64)
        assert int(module.random_word(np.uint64(0), counter)) == word


def test_shuffle_is_fair():
    """Each of 4 numbers is as often in each place: 24 000 draws, five standard deviations."""
    generator, counts = np.zeros(2, np.uint64), np.zeros((4, 4), int)
    rows = np.empty(4, np.int64)
    draws = 24_000
    for _ in range(draws):
        rows[:] = range(4)
        rollout_kernels.shuffle(rows, generator)
        counts[np.arange(4), rows] += 1
    assert np.abs(counts - draws / 4).max() < 5 * np.sqrt(draws * 3 / 16)


def test_normalised_advantages_keep_their_signs_however_small_they_are(load_kernels):
    advantages = np.array([-1e-9, 0, 1e-9, 5, 5, 5], np.float32)
    load_kernels(rollout_kernels).normalize_batches(advantages, np.array([3, 3]), None)
    np.testing.assert_allclose(advantages[:3], [-1 / 11, 0, 1 / 11], rtol=1e-5)
    assert advantages[3:].tolist() == [0, 0, 0]
