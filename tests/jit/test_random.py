import numpy as np
import pytest
from jit.toy_env import slow_word

from vecenv.core.compiling import cached_njit, is_jit_off
from vecenv.jit import random

SMALL = is_jit_off()  # in plain Python a word takes 10 us
LIMIT_SIGMA = 5.0  # a right generator fails one of these tests in about a million


@cached_njit
def fill_words(streams, words):
    """words[stream, step, draw] of all streams."""
    for i in range(words.shape[0]):
        for step in range(words.shape[1]):
            random.open_block(streams[i])
            for draw in range(words.shape[2]):
                words[i, step, draw] = random.next_word(streams[i])


@cached_njit
def fill_draws(streams, unit, small, bell):
    for i in range(unit.shape[0]):
        unit[i] = random.uniform(streams[0])
        small[i] = random.integers(streams[0], 6)
        bell[i] = random.normal(streams[0])


@cached_njit
def words_at(stream, slots, words):
    for k in range(slots.shape[0]):
        words[k] = random.word_at(stream, slots[k])


def seeded(seeds):
    streams = np.zeros(len(seeds), random.RNG_DTYPE).view(np.recarray)
    random.seed_streams(streams, np.asarray(seeds, dtype=np.uint64))
    return streams


def words_of(seeds, num_steps, num_draws):
    words = np.zeros((len(seeds), num_steps, num_draws), dtype=np.uint64)
    fill_words(seeded(seeds), words)
    return words


def uneven_sigma(counts):
    """How many standard deviations the chi-square of these counts is off that of an even draw."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return abs(((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def test_words_are_those_of_the_slow_twin():
    seeds = [0, 1, 2**63, 2**64 - 1]
    words = words_of(seeds, 3, 2)
    for i, seed in enumerate(seeds):
        for step in range(3):
            for draw in range(2):
                assert int(words[i, step, draw]) == slow_word(seed, step + 1, draw)


def test_slots_are_words_of_their_own_and_draw_nothing():
    streams = seeded([7])
    random.open_block(streams[0])
    slots = np.array([0, 5, random.NUM_SLOTS - 1])
    words = np.zeros(3, dtype=np.uint64)
    words_at(streams[0], slots, words)
    assert [int(word) for word in words] == [slow_word(7, 1, 2**15 + int(k)) for k in slots]
    assert int(random.next_word(streams[0])) == slow_word(7, 1, 0)


def test_a_step_with_too_many_draws_runs_on_without_repeating():
    streams = seeded([3])
    streams[0].counter = np.uint64(random.BLOCK_SIZE - 1)
    first, second = random.next_word(streams[0]), random.next_word(streams[0])
    assert [int(first), int(second)] == [slow_word(3, 0, 2**16 - 1), slow_word(3, 1, 0)]
    random.open_block(streams[0])
    assert int(streams[0].counter) == 2 * random.BLOCK_SIZE


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_neighbours_are_independent(axis):
    """Pairs of 4-bit values of neighbouring envs, steps and draws are even over all 256 pairs."""
    words = words_of(range(8 if SMALL else 200), 8 if SMALL else 60, 8 if SMALL else 30)
    for shift in (0, 13, 32, 60):
        values = ((words >> np.uint64(shift)) & np.uint64(15)).astype(np.int64)
        first = np.take(values, range(0, values.shape[axis] - 1, 2), axis)
        second = np.take(values, range(1, values.shape[axis], 2), axis)
        pairs = np.bincount((16 * first + second).ravel(), minlength=256)
        assert uneven_sigma(pairs) < LIMIT_SIGMA


def test_draws_have_their_distributions():
    count = 5_000 if SMALL else 300_000
    unit, small, bell = np.zeros(count), np.zeros(count, dtype=np.int64), np.zeros(count)
    fill_draws(seeded([11]), unit, small, bell)
    assert unit.min() >= 0.0 and unit.max() < 1.0
    assert uneven_sigma(np.histogram(unit, 100, (0.0, 1.0))[0]) < LIMIT_SIGMA
    assert uneven_sigma(np.bincount(small, minlength=6)) < LIMIT_SIGMA
    assert abs(bell.mean()) < LIMIT_SIGMA / np.sqrt(count)
    assert abs(bell.var() - 1.0) < LIMIT_SIGMA * np.sqrt(2 / count)
    assert abs((bell**4).mean() - 3.0) < LIMIT_SIGMA * np.sqrt(96 / count)


def test_integers_reach_both_ends():
    highest, lowest = np.uint64(2**64 - 1), np.uint64(0)
    for n in (1, 2, 7, 2**31, 2**32 - 1):
        assert random.to_integer(lowest, n) == 0
        assert random.to_integer(highest, n) == n - 1
    assert random.to_uniform(highest) == 1.0 - 2.0**-53
