"""A red agent of a user's own that does what does not exist."""

import numpy as np
import pytest
from cage.challenge2.free_run import own_red
from choices import needs_jit

from vecenv.cage import Cage2VectorEnv, Cell, Evaluation
from vecenv.cage.challenge2.tables import impossible_turns
from vecenv.jit import KernelResultError, binding


def kind_that_is_not_there(state, rng, tables):
    return 6, 2


def host_that_is_not_there(state, rng, tables):
    return (1, 2) if state.step == 0 else (2, tables.num_hosts)


def floats(state, rng, tables):
    return 1, 2.0


def nothing_in_a_branch(state, rng, tables):
    if state.step < 3:
        return 1, 2


@needs_jit
@pytest.mark.parametrize(
    ("red", "told"),
    [
        (
            kind_that_is_not_there,
            "(6, 2): there is no kind of action 6, expected one of 0 Sleep, 1",
        ),
        (host_that_is_not_there, "(2, 13): there is no host 13, expected 0..12"),
        (floats, "(1, 2.0), expected two integers"),
        (nothing_in_a_branch, "None (this branch ends without `return`), expected two integers"),
    ],
)
def test_a_red_agent_that_does_what_does_not_exist_is_refused(red, told):
    """The message names the agent and its file and line, before anything is compiled."""
    with binding.uncompiled(), pytest.raises(KernelResultError) as caught:
        Cage2VectorEnv(2, red_agent=red)
    assert f"red agent {red.__name__} returns {told}" in str(caught.value)
    lines = range(red.__code__.co_firstlineno + 1, red.__code__.co_firstlineno + 3)
    assert caught.value.filename == __file__ and caught.value.lineno in lines


@needs_jit
def test_impossible_turns_are_played_as_a_sleep_that_fails():
    envs = Cage2VectorEnv(300, red_agent=own_red, episode_length=1000)
    envs.reset(seed=0)
    count = 0
    for step in range(60):
        envs.states["custom"][:, 0] = step >= 20  # from then on, it does nonsense now and then
        envs.step(np.zeros(300, np.int64))
        found = impossible_turns(envs.true_state)
        count += found.sum()
        assert step >= 20 or not found.any()
        assert (envs.true_state["red_type"][found] == 0).all()
        assert (envs.true_state["red_target"] < len(envs.scenario.hosts)).all()
    # Of the 400 pairs that it draws in one of 20 turns, 20 * 13 targets and 20 kinds are no more.
    assert 0.6 < count / (300 * 40 / 20) < 1.0


def test_a_table_tells_how_many_turns_were_impossible():
    turns = (("mine", 30, 34), ("mine", 70, 1200), ("sleep", 30, 0), ("sleep", 70, 0))
    cells = [Cell(name, length, 50, 0.0, 0.0, 0.0, count) for name, length, count in turns]
    result = Evaluation(
        "sleep", "CAGE Challenge 2", "faithful", 1, "", "bits", False, 0, tuple(cells), 0.0, 0.0
    )
    told = " ".join(str(result).split())
    assert told.endswith(
        "red agent mine returned an action that does not exist in 1 234 of 5 000 turns; these were "
        "played as Sleep"
    )
    assert "red agent sleep" not in told
