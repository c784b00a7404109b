"""Draws of the fast path follow the laws of the rules, and those of the slow path."""

import json

import numpy as np
import pytest
from cage.challenge4.lockstep import Games
from cage.challenge4.tape_writer import TapeFed
from cage.golden import FOLDER4

from vecenv.cage.challenge4.env import vectors_of
from vecenv.cage.challenge4.options import Cage4Options
from vecenv.cage.challenge4.play.playing import play_episodes
from vecenv.cage.challenge4.play.policies import make_policy
from vecenv.cage.challenge4.rules import codes

REFERENCE = json.loads((FOLDER4 / "reference_returns.json").read_text())
CELLS = [("fsm", name) for name in REFERENCE["policies"]]
CELLS += [("discovery", name) for name in REFERENCE["policies_discovery_variant"]]


def bits(masks):
    return masks.astype(np.int64)[..., None] >> np.arange(16) & 1


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
    exists = bits(states["exists"]).reshape(-1, 128).astype(bool)
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
    exists = bits(states["exists"]).reshape(num_games, 128)
    low = (rng.random((num_games, 128)) < 0.3) & (exists == 1)
    states["svc"] = np.where(low, states["svc"] - rng.integers(1, 6, low.shape), states["svc"])
    with_decoy = low & (rng.random(low.shape) < 0.5)
    states["decoys"][with_decoy], states["decoy_order"][with_decoy] = (
        1 << codes.VSFTPD,
        codes.VSFTPD,
    )
    states["svc"][with_decoy] |= codes.FULL << 13
    states["degraded"] = (low.reshape(-1, 8, 16) << np.arange(16)).sum(axis=2)
    names = ("work_failed", "access_failed", "process_events", "connection_events")
    counts = {name: np.zeros((num_games, 128)) for name in names}
    for _ in range(num_steps):
        games.step(np.tile([49, 49, 49, 49, 145], (num_games, 1)))
        for name in names:
            counts[name] += bits(states[name]).reshape(num_games, 128)
    sessions = states["num_sessions"].astype(float)
    games.close()
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


WHAT = ("work failed", "access failed", "exploit", "escalation", "phishing", "reassignment")


def count_events(games, states, masks, policy, num_steps):
    """Play; return how often each of `WHAT` happened on each host, int64 (6, games, 128)."""
    num_games = len(states)
    counts = np.zeros((len(WHAT), num_games, 128), np.int64)
    held = phished_hosts(states)
    policy.reset(masks)
    for _ in range(num_steps):
        games.step(policy.act(vectors_of(games.obs)))
        counts[0] += bits(states["work_failed"]).reshape(num_games, 128)
        counts[1] += bits(states["access_failed"]).reshape(num_games, 128)
        for row, kind in ((2, codes.EXPLOIT), (3, codes.ESCALATE)):
            is_it = states["done_type"] == kind
            chosen, agents = np.nonzero(is_it & (states["done_success"] == codes.SUCCEEDED))
            np.add.at(counts[row], (chosen, states["done_target"][chosen, agents]), 1)
        handed = np.zeros((num_games, 128), bool)
        places = np.arange(states["handed"].shape[2]) < states["num_handed"][..., None]
        chosen, agents, entries = np.nonzero(places)
        hosts = states["handed"][chosen, agents, entries]
        handed[chosen, hosts] = True
        np.add.at(counts[5], (chosen, hosts), 1)
        now = phished_hosts(states)
        counts[4] += now & ~held & ~handed
        held = now
    return counts


def phished_hosts(states):
    """Hosts with a session that no exploit opened, or that was handed over, bool (games, 128)."""
    is_there = np.arange(states["session_host"].shape[2]) < states["num_sessions"][..., None]
    chosen, agents, places = np.nonzero(is_there & (states["session_flags"] & codes.KIND_A != 0))
    hosts = np.zeros((len(states), 128), bool)
    hosts[chosen, states["session_host"][chosen, agents, places]] = True
    return hosts


def paired_chi2(fast, tape, rng, num_flips=2000):
    """Chi-square of the means of paired counts (games, hosts), and its p by flipping pairs.

    The hosts of a game depend on each other, so the statistic's law is that of the pairs with
    their members exchanged at random: exact, as both are drawn alike if the paths are alike.

    Returns:
        The statistic, of how many hosts, p, and in standard errors the largest deviation of a host
        and that of the sum over hosts.
    """
    differences = (fast - tape).astype(float)
    sums = differences.sum(axis=1)
    total = sums.sum() / max(np.sqrt((sums**2).sum()), 1e-9)
    differences = differences[:, (differences != 0).sum(axis=0) >= 5]
    squares = (differences**2).sum(axis=0)  # under any flips
    scores = differences.sum(axis=0) / np.sqrt(squares)
    signs = rng.choice([-1.0, 1.0], (num_flips, len(differences)))
    flipped = ((signs @ differences) ** 2 / squares).sum(axis=1)
    statistic = (scores**2).sum()
    p = (1 + (flipped >= statistic).sum()) / (1 + num_flips)
    return statistic, differences.shape[1], p, np.abs(scores).max(initial=0.0), total


def compare_with_tapes(policy, num_games, seed, num_steps=499):
    """Play the same networks from tapes and with own draws; return a row for each of `WHAT`."""
    options = Cage4Options()
    fast = Games(num_games, seed=seed, options=options)
    tape = TapeFed(num_games, seed=seed, options=options)
    assert (tape.states["services"] == fast.envs.states["services"]).all()
    own = make_policy(policy, seed), make_policy(policy, seed + 1)
    counts = count_events(fast, fast.envs.states, fast.masks, own[0], num_steps)
    expected = count_events(tape, tape.states, tape.masks, own[1], num_steps)
    assert not fast.overflows and not tape.states["overflow"].any()
    fast.close()
    rng = np.random.default_rng(seed)
    return {
        name: (
            counts[row].sum(),
            expected[row].sum(),
            *paired_chi2(counts[row], expected[row], rng),
        )
        for row, name in enumerate(WHAT)
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["random", "react_restore"])
def test_counts_per_host_are_those_of_games_that_are_fed_with_tapes(policy):
    rows = compare_with_tapes(policy, 60, seed=11)
    for name, (fast, tape, _, num_hosts, p, largest, total) in rows.items():
        assert p > 1e-3 and largest < 5 and abs(total) < 4, (name, fast, tape, p, largest, total)
        if (policy, name) != ("react_restore", "access failed"):  # there are no blocks
            assert min(fast, tape) > 20 and num_hosts > 0, (name, fast, tape)
