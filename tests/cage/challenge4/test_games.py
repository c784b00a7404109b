"""Games that draw for themselves: seeds, masks, ends, and what no episode may break."""

import numpy as np
import pytest
from cage.challenge4.invariants import check
from cage.challenge4.lockstep import Games, play
from choices import fast_are

from vecenv.cage.challenge4.env import Cage4Options
from vecenv.cage.challenge4.playing import find_policy
from vecenv.cage.challenge4.rules import codes
from vecenv.jit.random import integers

SHORT = Cage4Options(steps=40)
SLEEPS = [49, 49, 49, 49, 145]


def test_a_game_depends_on_its_seed_alone():
    many = Games(6, seed=10, options=SHORT, num_threads=2)
    one = Games(1, seed=13, options=SHORT)
    assert (many.obs[3] == one.obs[0]).all() and (many.masks[4][3] == one.masks[4][0]).all()
    rng = np.random.default_rng(0)
    for _ in range(60):  # over the end of an episode
        actions = rng.integers(0, codes.NUM_ACTIONS, (6, 5))
        messages = rng.integers(0, 256, (6, 5))
        many.step(actions, messages)
        one.step(actions[3:4], messages[3:4])
        assert (many.obs[3] == one.obs[0]).all() and many.rewards[3] == one.rewards[0]
    assert many.envs.states[3].tobytes() == one.envs.states[0].tobytes()


def test_a_reset_leaves_nothing_behind():
    games = Games(4, seed=1, options=Cage4Options(steps=40, phishing_rate=0.3))
    fresh = games.envs.states.tobytes()
    for _ in play(games, find_policy("random", 3), 35):
        pass
    games.reset(seed=1)
    assert games.envs.states.tobytes() == fresh


def test_an_episode_has_one_step_less_than_its_steps():
    games = Games(2, seed=0, options=SHORT)
    ends = []
    for _ in range(80):
        games.step([SLEEPS] * 2)
        ends.append(games.is_over.tolist())
    assert [step for step, end in enumerate(ends) if all(end)] == [38, 78]


def test_messages_arrive_in_the_same_step():
    games = Games(1, seed=0, options=SHORT)
    games.step([SLEEPS], [[1, 2, 4, 8, 128]])
    bits = games.agent_obs(2)[0, -32:].reshape(4, 8)
    assert (bits << np.arange(8)).sum(axis=1).tolist() == [1, 2, 8, 128]
    games.step([SLEEPS])
    assert not games.agent_obs(4)[0, -32:].any()


def test_masked_actions_act_as_sleep():
    games, asleep = (Games(8, seed=5, options=SHORT) for _ in range(2))
    masked = np.tile(SLEEPS, (8, 1))
    for agent, mask in enumerate(games.masks):
        has_any = ~mask.all(axis=1)
        masked[has_any, agent] = mask[has_any].argmin(axis=1)
    assert (masked != SLEEPS).mean() > 0.9
    for _ in range(20):
        games.step(masked)
        asleep.step([SLEEPS] * 8)
        assert (games.obs == asleep.obs).all() and (games.rewards == asleep.rewards).all()


@pytest.mark.parametrize(
    ("actions", "messages", "match"),
    [
        ([[0] * 4], None, r"actions has shape \(1, 9\), expected \(1, 10\)"),
        ([[0] * 5], [[0] * 4], r"actions has shape \(1, 9\)"),
        ([[82, 0, 0, 0, 0]], None, "82"),
        ([[0] * 5], [[256, 0, 0, 0, 0]], "256"),
    ],
)
def test_actions_that_do_not_exist_are_refused(actions, messages, match):
    games = Games(1, seed=0, options=SHORT)
    with pytest.raises(ValueError, match=match):
        games.step(actions, messages)


def test_options_out_of_range_are_refused():
    rates = [("phishing_rate", 1.1), ("phishing_rate", None), ("alarm_rate", -0.1)]
    for name, value in [*rates, ("red", "b_line"), ("steps", 1)]:
        with pytest.raises(ValueError, match=name):
            Cage4Options(**{name: value})


@pytest.mark.parametrize("red", ["fsm", "discovery", "sleep"])
@pytest.mark.parametrize("policy", ["random", "decoy_restore"])
def test_invariants_of_any_episode(red, policy):
    options = Cage4Options(steps=200, red=red, phishing_rate=0.05)
    games = Games(5, seed=2, options=options)
    for step, _ in enumerate(play(games, find_policy(policy, 1), 199)):
        if step % 7 == 0:
            check(games.envs.states)
    if red == "sleep":
        assert (games.envs.states["num_sessions"] <= np.array([80] * 6)).all()


@pytest.mark.parametrize("red", fast_are(["fsm"], ["fsm", "discovery"]))
def test_rules_run_as_plain_python_with_every_index_checked(red):
    options = Cage4Options(steps=24, red=red, phishing_rate=0.3)
    compiled = Games(2, seed=4, options=options)
    plain = Games(2, seed=4, options=options, debug=True)
    rng = np.random.default_rng(1)
    for _ in range(30):
        actions = rng.integers(0, codes.NUM_ACTIONS, (2, 5))
        compiled.step(actions)
        plain.step(actions)
        assert (compiled.obs == plain.obs).all() and (compiled.rewards == plain.rewards).all()
    assert compiled.envs.states.tobytes() == plain.envs.states.tobytes()


def scanning_red(state, agent, rng):
    """Scan the first known host; then ask for what does not exist."""
    if state.t < 10:
        return codes.AGGRESSIVE, state.table[agent, 0], state.offered[agent, 0]
    return codes.EXPLOIT, 7, 200 + integers(rng, 2)


@pytest.mark.parametrize(
    "debug", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["plain", "compiled"]
)
def test_a_red_agent_of_ones_own_plays(debug):
    games = Games(2, seed=0, options=Cage4Options(steps=20, red=scanning_red), debug=debug)
    for step in range(19):
        games.step([SLEEPS] * 2)
        states = games.envs.states
        assert (states["choice_type"][:, 0] == (codes.AGGRESSIVE if step < 10 else 255)).all()
        assert (states["done_success"][:, 0] == (codes.SUCCEEDED if step < 10 else 255)).all()
    assert (states["num_memory"][:, 0] == 1).all()
