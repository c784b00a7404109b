"""A red agent of a user's own that does what does not exist."""

import numpy as np
import pytest
from choices import needs_jit
from envs import begun

import vecenv
from vecenv.cage import Cage4VectorEnv, evaluate_cage4
from vecenv.cage.challenge4.env import impossible_turns
from vecenv.cage.challenge4.rules import codes
from vecenv.cage.challenge4.rules.actions import checked_choice
from vecenv.cage.challenge4.rules.state import STATE_DTYPE
from vecenv.jit import KernelResultError, binding


def kind_that_is_not_there(state, agent, rng):
    return 8, state.table[agent, 0], state.offered[agent, 0]


def host_that_is_not_there(state, agent, rng):
    return codes.AGGRESSIVE, codes.NUM_HOSTS, state.offered[agent, 0]


def floats(state, agent, rng):
    return codes.AGGRESSIVE, 7.0, 0


def waiting(state, agent, rng):
    return codes.NONE, codes.NONE, codes.NONE


def unknown_host(state, agent, rng):
    return codes.AGGRESSIVE, 3, 99


@needs_jit
@pytest.mark.parametrize(
    ("red", "told"),
    [
        (kind_that_is_not_there, r"\(8, \d+, \d+\): there is no action 8, expected a code from 0"),
        (host_that_is_not_there, r"\(1, 128, \d+\): there is no host 128, expected 0..127"),
        (floats, r"\(1, 7.0, 0\), expected three integers"),
    ],
)
@pytest.mark.parametrize("is_team", [True, False])
def test_a_red_agent_that_does_what_does_not_exist_is_refused(red, told, is_team):
    """The message names the agent and its file and line, before anything is compiled."""
    message = rf"red agent {red.__name__} returns {told}"
    with binding.uncompiled(), pytest.raises(KernelResultError, match=message) as caught:
        Cage4VectorEnv(1, red=red) if is_team else vecenv.make_vec_agents("Cage4-v0", 1, red=red)
    assert caught.value.filename == __file__
    assert caught.value.lineno == red.__code__.co_firstlineno + 1


@pytest.mark.parametrize("red", [waiting, unknown_host])
def test_a_red_agent_may_wait_and_may_be_wrong(red):
    envs = begun(Cage4VectorEnv(1, red=red, debug=True))
    for _ in range(3):
        envs.step(np.zeros((1, 5), np.int64))
    assert not impossible_turns(envs.states).any()


def test_while_games_are_played_it_waits_and_that_is_noted():
    envs = begun(Cage4VectorEnv(2, red=kind_that_is_not_there, debug=True))
    envs.step(np.zeros((2, 5), np.int64))
    found = impossible_turns(envs.states)
    np.testing.assert_array_equal(found, envs.states["choice_type"] != codes.INACTIVE)
    assert found.any()


@pytest.mark.parametrize(
    ("choice", "session"),
    [
        ((8, 3, 0), codes.IMPOSSIBLE),
        ((-1, 3, 0), codes.IMPOSSIBLE),
        ((1, 128, 0), codes.IMPOSSIBLE),
        ((0, 8, 0), codes.IMPOSSIBLE),
        ((1, 3, 0), codes.NONE),
        ((codes.NONE, 3, 0), codes.NONE),
    ],
)
def test_choices_that_do_not_exist_are_noted(choice, session):
    states = np.zeros(1, STATE_DTYPE).view(np.recarray)
    chosen = checked_choice(states[0], 0, choice)
    assert chosen == (codes.NONE, codes.NONE, session)
    states["choice_type"], states["choice_target"], states["choice_session"] = codes.INACTIVE, 0, 0
    fields = ("choice_type", "choice_target", "choice_session")
    for name, value in zip(fields, chosen, strict=True):
        states[name][0, 2] = value
    assert impossible_turns(states)[0].tolist() == [
        k == 2 and session != codes.NONE for k in range(6)
    ]


def late(state, agent, rng):
    return (8 if state.t >= 20 else codes.NONE), 3, 0


@needs_jit
@pytest.mark.slow
def test_an_evaluation_counts_impossible_turns():
    result = evaluate_cage4("sleep", episodes=2, steps=31, red=late)
    # Red has a session in the contractor's network from the first step on.
    assert result.impossible_turns >= 20
    told = f"does not exist in {result.impossible_turns} turns; it waited instead"
    assert " ".join(str(result).split()).endswith(f"red agent late returned an action that {told}")
    assert "red agent" not in str(evaluate_cage4("sleep", episodes=2, steps=31, red="sleep"))
