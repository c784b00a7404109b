"""Draws of the fast path follow the laws of the rules, and those of the slow path."""

import json

import numpy as np
import pytest
from cage.challenge4.invariants import bits
from cage.challenge4.lockstep import Games
from cage.golden import FOLDER4

from vecenv.cage.challenge4.env import Cage4Options
from vecenv.cage.challenge4.playing import play_episodes
from vecenv.cage.challenge4.rules import codes

REFERENCE = json.loads((FOLDER4 / "reference_returns.json").read_text())
CELLS = [("fsm", name) for name in REFERENCE["policies"]]
CELLS += [("discovery", name) for name in REFERENCE["policies_discovery_variant"]]


def chi2(counts, shares):
    """Chi-square statistic, in standard deviations above its mean."""
    expected = counts.sum() * np.asarray(shares) / np.sum(shares)
    freedom = len(expected) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.slow
def test_networks_are_drawn_as_the_original_draws_them():
    states = Games(4000, seed=0).envs.states
    users, servers = states["num_users"], states["num_servers"]
    assert chi2(np.bincount(users.ravel())[3:], [1] * 8) < 4 and users.min() == 3
    assert chi2(np.bincount(servers.ravel())[1:], [1] * 6) < 4 and servers.min() == 1
    exists = bits(states["exists"]).astype(bool)
    extras = states["services"] // codes.WEB
    shares = [1 / 4, 1 / 12, 1 / 12, 1 / 12, 1 / 12, 1 / 12, 1 / 12, 1 / 4]  # by set of extras
    assert chi2(np.bincount(extras[exists])[[0, 1, 2, 4, 3, 5, 6, 7]], shares) < 4
    assert (extras[~exists] == 0).all()
    is_ot = np.isin(np.arange(128) // 16, (codes.OZA, codes.OZB))
    assert ((states["services"] & codes.OT != 0) == (exists & is_ot)).all()
    known = states["known_subnets"][:, 5]
    assert chi2(np.bincount(known)[[32, 64, 128]], [1, 1, 1]) < 4
    start = states["session_host"][:, 0, 0].astype(int)
    assert (start // 16 == codes.CON).all() and exists[np.arange(4000), start].all()


def z_score(sample, theirs_mean, theirs_sd, theirs_n):
    """Difference of two means in standard errors."""
    error = np.sqrt(sample.var(ddof=1) / len(sample) + theirs_sd**2 / theirs_n)
    return (sample.mean() - theirs_mean) / error if error > 0 else 0.0


def count_greens(one_by_one, num_games, num_steps, seed):
    """Counts by subnet of what greens do on degraded hosts and with blocks, red asleep."""
    options = Cage4Options(
        steps=500, red="sleep", phishing_rate=0.04, alarm_rate=0.03, greens_one_by_one=one_by_one
    )
    games = Games(num_games, seed=seed, options=options)
    states, rng = games.envs.states, np.random.default_rng(seed)
    blocks = np.zeros((num_games, 9), np.uint16)
    for to in range(8):
        for source in range(9):
            is_set = (rng.random(num_games) < 0.05) & (to != codes.CON)
            blocks[:, to] |= (is_set << source).astype(np.uint16)
    states["blocks"] = blocks
    ways = blocks[:, :8, None] >> np.arange(8) & 1
    states["barred"] = ((ways | ways.transpose(0, 2, 1)) << np.arange(8)).sum(axis=2)
    exists = bits(states["exists"])
    low = (rng.random((num_games, 128)) < 0.3) & (exists == 1)
    states["svc"] = np.where(low, states["svc"] - rng.integers(1, 6, low.shape), states["svc"])
    with_decoy = low & (rng.random(low.shape) < 0.5)
    states["decoys"][with_decoy] = 1 << codes.VSFTPD
    states["decoy_order"][with_decoy] = codes.VSFTPD
    states["svc"][with_decoy] |= codes.FULL << 13
    states["degraded"] = (low.reshape(-1, 8, 16) << np.arange(16)).sum(axis=2)
    names = ("work_failed", "access_failed", "process_events", "connection_events")
    counts = {name: np.zeros((num_games, 128)) for name in names}
    for _ in range(num_steps):
        games.step(np.tile([49, 49, 49, 49, 145], (num_games, 1)))
        for name in names:
            counts[name] += bits(states[name])
    sessions = states["num_sessions"].astype(float)
    return counts, sessions


@pytest.mark.slow
def test_greens_by_exception_do_what_greens_one_by_one_do():
    fast, fast_sessions = count_greens(False, 1500, 60, seed=7)
    slow, slow_sessions = count_greens(True, 1500, 60, seed=7)  # on the same networks
    for name, counts in fast.items():
        differences = counts - slow[name]  # games are pairs
        error = differences.std(axis=0, ddof=1) / np.sqrt(len(counts))
        scores = differences.mean(axis=0)[error > 0] / error[error > 0]
        assert np.abs(scores).max() < 4.5, name  # of up to 128 hosts
        assert (scores**2).sum() < len(scores) + 4 * np.sqrt(2 * len(scores)), name
        assert counts.sum() > 500
    differences = fast_sessions - slow_sessions
    error = np.maximum(differences.std(axis=0) / np.sqrt(len(differences)), 1e-9)
    assert (np.abs(differences.mean(axis=0) / error) < 4).all()


@pytest.mark.slow
@pytest.mark.parametrize(("red", "policy"), CELLS)
def test_mean_returns_match_the_original_and_its_twin(red, policy):
    block = REFERENCE["policies" if red == "fsm" else "policies_discovery_variant"][policy]
    episodes = play_episodes(policy, 1000, seed=1, red=red)
    assert episodes.overflowed == {}
    returns, phases = episodes.rewards.sum(axis=0), episodes.phases
    theirs, twin = block["original"], block["twin"]
    assert abs(z_score(returns, theirs["mean"], theirs["sd"], theirs["n"])) < 3.5
    assert abs(z_score(returns, twin["mean"], twin["sd"], twin["n"])) < 3.5
    for sample, means, sds in (
        (phases, twin["phase_mean"], twin["phase_sd"]),
        (episodes.causes, twin["cause_mean"], twin["cause_sd"]),
    ):
        for column, mean, sd in zip(sample.T, means, sds, strict=True):
            if sd == 0:
                assert (column == mean).all()
            assert abs(z_score(column, mean, sd, twin["n"])) < 3.5
