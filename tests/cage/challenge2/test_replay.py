"""Lockstep with recordings of the original: nothing may differ, ever."""

import numpy as np
import pytest
from cage.golden import COMPACT_FIELDS, RULES_OF_TRACE, load_trace

from vecenv.cage.challenge2.replay import RecordedStep, Replay, replay_episodes
from vecenv.cage.challenge2.rules import codes
from vecenv.cage.challenge2.scenario import cage2_scenario

COMPARED = ("obs", "reward10", "blue_success", "red_success", *COMPACT_FIELDS)


def assert_replays(trace, name):
    result = replay_episodes(trace, cage2_scenario(RULES_OF_TRACE[name]))
    for name in COMPARED:
        assert result.fields[name].dtype == trace[name].dtype
        np.testing.assert_array_equal(result.fields[name], trace[name], err_msg=name)
    assert not result.errors.any()
    assert result.policy_agrees.all()


@pytest.mark.parametrize("name", RULES_OF_TRACE)
def test_all_episodes_replay_in_one_batch(name):
    assert_replays(load_trace(name), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES_OF_TRACE)
def test_every_episode_replays_by_itself(name):
    trace = load_trace(name)
    for episode in range(len(trace["red_agent"])):
        assert_replays({k: array[episode : episode + 1] for k, array in trace.items()}, name)


def test_worked_example_of_the_rules():
    """Sleeping blue against B_line, every detection succeeding."""
    https, ssh, eternal_blue = 3, 7, 5
    user2, enterprise1, enterprise2, server = 10, 2, 3, 7
    steps = [
        (1, 2, -1, -1, 0, {}),
        (2, user2, -1, -1, 0, {user2: "1000"}),
        (3, user2, eternal_blue, 1, -1, {user2: "1101"}),
        (4, user2, -1, -1, -1, {user2: "0001"}),
        (2, enterprise1, -1, -1, -1, {enterprise1: "1000", user2: "0001"}),
        (3, enterprise1, https, 1, -1, {enterprise1: "1101", user2: "0001"}),
        (4, enterprise1, -1, -1, -11, {enterprise1: "0001", user2: "0001"}),
        (1, 0, -1, -1, -11, {enterprise1: "0001", user2: "0001"}),
        (2, enterprise2, -1, -1, -11, {enterprise1: "0001", enterprise2: "1000", user2: "0001"}),
        (3, enterprise2, https, 1, -11, {enterprise1: "0001", enterprise2: "1101", user2: "0001"}),
        (4, enterprise2, -1, -1, -21, {enterprise1: "0001", enterprise2: "0001", user2: "0001"}),
    ]
    held = {enterprise1: "0001", enterprise2: "0001", user2: "0001"}
    steps += [
        (2, server, -1, -1, -21, held | {server: "1000"}),
        (3, server, ssh, -1, -21, held | {server: "1101"}),
        (4, server, -1, -1, -31, held | {server: "0001"}),
        *[(5, server, -1, -1, -131, held | {server: "0001"})] * 4,
    ]
    replay = Replay(1, red_agents=1)
    for t, (red_type, target, exploit, detected, reward10, bits) in enumerate(steps):
        options = replay.red_options()
        assert options[0] == red_type
        assert options[1][0, target]
        replay.red_commit(red_type, target)
        pe_index = 0 if red_type == 4 else -1
        result = replay.step(RecordedStep(0, red_type, target, exploit, detected, pe_index))
        expected = "".join(bits.get(host, "0000") for host in range(13))
        assert "".join(map(str, result.obs[0])) == expected, t
        assert result.reward10[0] == reward10, t
        assert result.red_success[0] == 1, t
        assert result.errors[0] == 0


def scanned_user2():
    replay = Replay(1)
    replay.step(RecordedStep(0, 1, 2))
    replay.step(RecordedStep(0, 2, 10))
    return replay


@pytest.mark.parametrize(
    ("red_type", "outcomes", "error"),
    [
        (3, (-1, 1, -1), codes.BAD_EXPLOIT),
        (3, (0, 1, -1), codes.BAD_EXPLOIT),  # no candidate there
        (3, (8, 1, -1), codes.BAD_EXPLOIT),
        (3, (2**40, 1, -1), codes.BAD_EXPLOIT),
        (3, (5, -1, -1), codes.BAD_DETECTION),
        (3, (5, 2, -1), codes.BAD_DETECTION),
        (9, (-1, -1, -1), codes.BAD_RED_ACTION),
        (-1, (-1, -1, -1), codes.BAD_RED_ACTION),
    ],
)
def test_missing_or_impossible_outcomes_are_reported(red_type, outcomes, error):
    replay = scanned_user2()
    result = replay.step(RecordedStep(0, red_type, 10, *outcomes))
    assert result.errors[0] == error
    assert result.red_success[0] == 0
    assert replay.true_state()["access"][0, 10] == 0


@pytest.mark.parametrize("index", [-1, 1, 2**40])
def test_missing_session_index_is_reported(index):
    replay = scanned_user2()
    assert replay.step(RecordedStep(0, 3, 10, 6, 1)).errors[0] == 0  # BlueKeep: a user's shell
    assert replay.true_state()["access"][0, 10] == 1
    result = replay.step(RecordedStep(0, 4, 10, red_pe_index=index))
    assert result.errors[0] == codes.BAD_SESSION
    assert replay.true_state()["access"][0, 10] == 1


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("blue_action", 145),
        ("blue_action", -1),
        ("blue_action", 0.0),
        ("blue_action", [0]),
        ("red_type", np.zeros((2, 2), int)),
    ],
)
def test_bad_recordings_are_refused_by_name(field, given):
    replay = Replay(2)
    before = replay.states.tobytes()
    with pytest.raises(ValueError, match=field):
        replay.step(RecordedStep(0, 0, 0)._replace(**{field: given}))
    assert replay.states.tobytes() == before
