"""Free running: mean returns against those of the original."""

import math

import numpy as np
import pytest
from cage.challenge2.free_run import FreeRun
from cage.golden import load_json
from choices import fast_are

from vecenv.cage.challenge2.playing import find_policy
from vecenv.cage.challenge2.rules.codes import B_LINE, MEANDER, NO_RED

LENGTHS = (30, 50, 100)
AGENTS = {"Sleep": NO_RED, "B_line": B_LINE, "Meander": MEANDER}
ONE_SIDED_95 = 1.645
MARGIN_SHARE, MARGIN_POINTS = 0.02, 2.0  # of equivalence; fixed before looking
REFERENCE = load_json("reference_returns.json")["returns"]


def play(cell, num_episodes, seed):
    policy, agent = cell.split("|")
    run = FreeRun(num_episodes, (AGENTS[agent],), seed=seed)
    return run.play(find_policy(policy, seed=seed), 100)


def differences(cell, rewards):
    """For each length: difference of the means, its standard error, margin of equivalence.

    If both simulators are the same, both samples have the same standard deviation, and ours is by
    far the better estimate of it: returns are skewed (few episodes hold all of the large losses),
    so a sample of 300 that happens to lack some has too small a mean *and* too small a deviation.
    """
    for length in LENGTHS:
        theirs = REFERENCE[cell][str(length)]
        totals = rewards[:length].sum(axis=0)
        error = totals.std(ddof=1) * math.sqrt(1 / len(totals) + 1 / theirs["n"])
        margin = max(MARGIN_SHARE * abs(theirs["mean"]), MARGIN_POINTS)
        yield totals.mean() - theirs["mean"], error, margin


def assert_agrees(cell, rewards):
    """Means within 3 standard errors; equivalent (TOST) where the reference can decide that."""
    for difference, error, margin in differences(cell, rewards):
        assert abs(difference) <= 3 * error + 1e-9, (difference, error)
        if error < margin / 4:  # so that the test finds equivalence almost surely if it is there
            assert abs(difference) + ONE_SIDED_95 * error < margin, (difference, error, margin)


@pytest.mark.parametrize("cell", fast_are([*REFERENCE][::3], REFERENCE))
def test_mean_returns_match_the_original(cell):
    assert_agrees(cell, play(cell, num_episodes=3000, seed=11))


@pytest.mark.slow
@pytest.mark.parametrize("cell", REFERENCE)
def test_mean_returns_match_the_original_with_many_episodes(cell):
    rewards = np.concatenate([play(cell, 25_000, seed) for seed in (1_000_000, 2_000_000)], axis=1)
    assert_agrees(cell, rewards)
    for length in LENGTHS:
        theirs = REFERENCE[cell][str(length)]
        totals = rewards[:length].sum(axis=0)
        deviations = totals - totals.mean()
        sd = totals.std(ddof=1)
        kurtosis = (deviations**4).mean() / max(sd, 1e-9) ** 4
        error = sd * math.sqrt(max(kurtosis - 1, 0) / (4 * theirs["n"]))
        assert abs(sd - theirs["sd"]) <= 3 * error + 1e-9, (length, sd, theirs["sd"], error)


@pytest.mark.slow
def test_mean_reward_of_every_step_matches_the_original():
    scores = []
    for cell, theirs in REFERENCE.items():
        rewards = play(cell, 20_000, seed=3_000_000)
        errors = np.hypot(rewards.std(axis=1) / math.sqrt(20_000), theirs["per_step_se"])
        # a step in which all the reference's episodes agree has no error of its own
        differences = np.abs(rewards.mean(axis=1) - theirs["per_step_mean"])
        scores.append(np.where(errors > 1e-3, differences / np.maximum(errors, 1e-3), 0))
    share_beyond = (np.array(scores) > 3).mean()
    assert share_beyond < 0.02, share_beyond


def test_uniform_blue_without_red_pays_for_its_restores():
    rewards = play("uniform|Sleep", num_episodes=4000, seed=5)
    expected = -13 / 145
    error = math.sqrt(-expected * (1 + expected) / rewards.size)
    assert abs(rewards.mean() - expected) < 4 * error
