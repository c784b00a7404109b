"""The ready-made blue policies are those of the recordings."""

import numpy as np
import pytest
from cage.golden import load_trace

from vecenv.cage.challenge2.playing import POLICY_NAMES, find_policy

RECORDED_AS = {"react_remove": "raw_remove", "react_restore": "raw_restore"}
RECORDED_AS |= {name: name for name in ("sleep", "obs_remove", "obs_restore")}


@pytest.mark.parametrize("trace_name", ["shared", "debugged"])
@pytest.mark.parametrize("name", RECORDED_AS)
def test_policy_decides_as_recorded(name, trace_name):
    trace = load_trace(trace_name)
    names = trace["blue_policy_names"].tolist()
    rows = trace["blue_policy"] == names.index(RECORDED_AS[name])
    assert rows.any()
    is_target = trace["red_target"][rows, :, None] == np.arange(13)
    alerts = (trace["red_detected"][rows, :, None] == 1) & is_target
    policy = find_policy(name)
    obs, seen = np.zeros((rows.sum(), 52)), np.zeros((rows.sum(), 13), bool)
    for t in range(100):
        np.testing.assert_array_equal(policy.act(obs, seen), trace["blue_action"][rows, t])
        obs, seen = trace["obs"][rows, t], alerts[:, t]


def test_uniform_policy_draws_every_action():
    policy = find_policy("uniform", seed=1)
    actions = policy.act(np.zeros((20_000, 52)), np.zeros((20_000, 13), bool))
    assert actions.dtype == np.int64
    assert np.bincount(actions, minlength=145).min() > 70
    again = find_policy("uniform", seed=1).act(np.zeros((20_000, 52)), np.zeros((20_000, 13), bool))
    np.testing.assert_array_equal(actions, again)


def test_reactive_policy_forgets_an_episode_that_ended():
    alerts = np.zeros((2, 13), bool)
    alerts[:, 3] = True
    policy = find_policy("react_restore")
    policy.act(np.zeros((2, 52)), np.zeros((2, 13), bool))
    assert policy.act(np.zeros((2, 52)), alerts).tolist() == [132 + 3] * 2
    policy.act(np.zeros((2, 52)), np.zeros((2, 13), bool))
    policy.reset()
    assert policy.act(np.zeros((2, 52)), alerts).tolist() == [1, 1]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_policies_leave_their_input_alone(name):
    obs, alerts = np.ones((3, 52)), np.ones((3, 13), bool)
    actions = find_policy(name, seed=0).act(obs, alerts)
    assert actions.shape == (3,) and actions.dtype == np.int64
    assert (obs == 1).all() and alerts.all()
