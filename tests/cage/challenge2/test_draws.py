"""Free running: every draw has the original's probabilities; and invariants of any episode."""

import math

import numpy as np
import pytest
from cage.challenge2.free_run import FreeRun, own_red

from vecenv.cage.challenge2.playing import find_policy
from vecenv.cage.challenge2.replay import options_rows
from vecenv.cage.challenge2.rules.codes import B_LINE, MEANDER, NO_RED
from vecenv.cage.challenge2.tables import decode

RESTORE_SERVER = 132 + 7


def members(mask):
    return [bit for bit in range(16) if int(mask) >> bit & 1]


def assert_uniform(counts, what):
    """Chi-square test at a level that a wrong probability would not survive."""
    counts = np.asarray(counts, float)
    expected = counts.sum() / len(counts)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    limit = freedom + 5 * math.sqrt(2 * freedom) + 8
    assert statistic < limit, (what, counts, statistic, limit)


def assert_share(hits, total, share, what):
    assert total > 0
    error = math.sqrt(share * (1 - share) / total)
    assert abs(hits / total - share) < 4.5 * error, (what, hits / total, share, error)


def watch(run, policy, num_steps):
    """Options before and states after each step."""
    num_envs = len(run.states)
    for _ in range(num_steps):
        before = run.states.copy()
        types, options = np.zeros(num_envs, np.uint64), np.zeros(num_envs, np.uint64)
        options_rows(before, types, options, run.tables)
        run.step(policy.act(run.obs, run.alerts()))
        yield before, types, options, run.states


@pytest.mark.parametrize("agent", [B_LINE, MEANDER])
def test_draws_have_the_right_frequencies(agent):
    run = FreeRun(1200, (agent,), seed=21)
    policy = find_policy("uniform", seed=4)
    ranks, choices = {}, {}
    num_detected = num_shells = 0
    for _, types, options, after in watch(run, policy, 80):
        targets = after["red_target"].astype(int)
        np.testing.assert_array_equal(types, after["red_type"])
        chosen = targets >= 0
        assert (options[chosen] >> targets[chosen].astype(np.uint64) & 1 == 1).all()
        for row in np.flatnonzero(options & (options - np.uint64(1))):
            pool = members(options[row])
            ranks.setdefault(len(pool), np.zeros(len(pool)))[pool.index(targets[row])] += 1
        for row in np.flatnonzero(after["red_exploit"] >= 0):
            host = targets[row]
            pool = members(run.tables.candidates[after["red_ports"][row, host]])
            if len(pool) > 1:
                counts = choices.setdefault((host, len(pool)), np.zeros(len(pool)))
                counts[pool.index(after["red_exploit"][row])] += 1
        num_shells += (after["red_detected"] >= 0).sum()
        num_detected += (after["red_detected"] == 1).sum()
    assert ranks
    for counts in ranks.values():
        assert_uniform(counts, "target")
    assert len(choices) > 4
    for (host, size), counts in choices.items():
        if counts.sum() > 50:
            assert_share(counts[0], counts.sum(), 0.75, ("best exploit", host))
            if size > 2:
                assert_uniform(counts[1:], ("other exploits", host))
    assert_share(num_detected, num_shells, 0.95, "detection")


def test_b_line_draws_its_user_host_once_per_episode():
    run = FreeRun(4000, (B_LINE,), seed=1)
    policy = find_policy("uniform", seed=1)
    for before, *_, after in watch(run, policy, 40):
        drawn = before["first_host"] < 16
        np.testing.assert_array_equal(before["first_host"][drawn], after["first_host"][drawn])
    assert_uniform(np.bincount(run.states["first_host"], minlength=13)[9:], "user host")


@pytest.mark.slow
def test_custom_red_policy_and_the_draw_of_a_session():
    run = FreeRun(8000, (own_red,), seed=2)
    run.states["custom"][:, 0] = 1
    run.states["known_ip"] |= 1 << 2
    ranks = {}
    for _ in range(12):
        before = run.states.copy()
        run.step(np.zeros(8000, np.int64))
        for row in np.flatnonzero(run.states["red_pe_index"] >= 0):
            size = int(before["n_removable"][row, 2]) + int(before["n_stuck"][row, 2])
            counts = ranks.setdefault(size, np.zeros(size))
            counts[run.states["red_pe_index"][row]] += 1
    assert max(ranks) > 3
    for counts in ranks.values():
        if len(counts) > 1 and counts.sum() > 20 * len(counts):
            assert_uniform(counts, "session")
    assert (run.states["has_priv"] >> 2 & 1).mean() > 0.9


@pytest.mark.parametrize("policy", ["uniform", "react_restore"])
def test_invariants_of_any_episode(policy):
    run = FreeRun(600, (NO_RED, B_LINE, MEANDER), seed=6)
    blue = find_policy(policy, seed=6)
    has_restored = np.zeros(600, bool)
    is_calm = run.states["red_agent"] == NO_RED
    for _ in range(100):
        actions = blue.act(run.obs, run.alerts())
        has_restored |= actions == RESTORE_SERVER
        rewards = run.step(actions)
        reward10 = np.rint(rewards * 10)
        np.testing.assert_array_equal(reward10 / 10, rewards)
        assert (reward10 <= 0).all() and (reward10 >= -157).all()
        state = decode(run.states, run.scenario)
        assert (state["n_priv"][:, 8] >= 1).all() and (state["access"][:, 8] == 2).all()
        assert (state["access"][:, 0] == 0).all()
        assert (state["ot_running"][has_restored] == 1).all()
        assert (run.obs[is_calm] == 0).all()
        assert set(np.unique(run.obs)) <= {0, 1}
    assert has_restored.any() or policy != "uniform"


def test_a_reset_leaves_nothing_behind():
    run = FreeRun(50, (B_LINE, MEANDER), seed=8)
    fresh = run.states.copy()
    first = run.play(find_policy("uniform", seed=2), 60)
    again = FreeRun(50, (B_LINE, MEANDER), seed=8)
    again.states[:] = run.states  # dirty
    again.reset(seed=8)
    assert again.states.tobytes() == fresh.tobytes()
    np.testing.assert_array_equal(again.play(find_policy("uniform", seed=2), 60), first)


def test_green_scans_its_hosts_half_of_the_time():
    run = FreeRun(2000, (NO_RED,), seed=4, green=True)
    counts = np.zeros(13)
    for _ in range(20):
        run.step(np.zeros(2000, np.int64))
        targets = run.states["green_target"]
        for host in targets[targets >= 0]:
            counts[host] += 1
        seen = run.obs.reshape(2000, 13, 4)
        np.testing.assert_array_equal(seen[:, :, 0].sum(axis=1), targets >= 0)
        assert (seen[:, :, 1:] == 0).all()
    assert_share(counts.sum(), 40_000, 0.5, "green acts")
    assert set(np.flatnonzero(counts)) == {1, 2, 3, 8, 9, 10, 11, 12}
    assert_uniform(counts[counts > 0], "green host")
    assert (run.rewards == 0).all()
