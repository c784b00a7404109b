"""SyntheticEnv: proportions as set, the same trajectory for the same seed, readable refusals."""

import time

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from vecenv import check_vector_env, make_vec
from vecenv.synthetic import SyntheticEnv


def run(env, seed, actions):
    steps = [env.reset(seed=seed)]
    for action in actions:
        steps.append(env.step(action))
        if steps[-1][3]:
            steps.append(env.reset())
    return steps


@pytest.mark.parametrize("shape", [(4,), 3, (8, 8, 3), ()])
def test_keeps_the_rules_of_gymnasium(shape):
    env = SyntheticEnv(obs_shape=shape, episode_length=5)
    check_env(env, skip_render_check=True)
    obs, _ = env.reset(seed=0)
    assert obs.dtype == np.float32
    assert env.observation_space.contains(obs)


def test_vector_envs_of_it_pass_the_check():
    check_vector_env(make_vec("Synthetic-v0", 3, backend="sync", episode_length=9), num_steps=40)


def test_the_same_seed_and_actions_give_the_same_trajectory_whatever_the_time():
    actions = np.random.default_rng(0).integers(0, 2, 30).tolist()
    slow = {"cpu_ms": 0.1, "wait_ms": 0.05, "wait_p99_ms": 0.2}
    first = run(SyntheticEnv(episode_length=11, **slow), 3, actions)
    again = run(SyntheticEnv(episode_length=11, **slow), 3, actions)
    other = run(SyntheticEnv(episode_length=11, **slow), 4, actions)

    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        assert a[1:] == b[1:]
    assert not np.array_equal(first[0][0], other[0][0])


def test_actions_push_the_observation_and_decide_the_sign_of_the_reward():
    up, down = (run(SyntheticEnv(episode_length=50), 1, [a] * 40) for a in (1, 0))
    assert up[-1][0].mean() > down[-1][0].mean()
    assert up[-1][1] == pytest.approx(up[-1][0][0])
    assert down[-1][1] == pytest.approx(-down[-1][0][0])


def test_episodes_are_truncated_at_their_length():
    env = SyntheticEnv(episode_length=3)
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(3)] == [(False, False)] * 2 + [(False, True)]
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(0)


def test_a_step_computes_for_as_long_as_was_asked_by_the_clock_of_the_thread():
    env = SyntheticEnv(cpu_ms=2.0, episode_length=1000)
    env.reset(seed=0)
    begin = time.thread_time()
    for _ in range(20):
        env.step(1)
    # The clock counts what the thread computes, so a busy machine does not matter.
    assert time.thread_time() - begin == pytest.approx(20 * 2e-3, rel=0.2)


@pytest.mark.parametrize(("options", "p99"), [({}, 2.0), ({"wait_p99_ms": 20.0}, 20.0)])
def test_waits_have_the_mean_and_the_tail_that_were_asked_for(options, p99, monkeypatch):
    waits_s = []
    monkeypatch.setattr("vecenv.synthetic.time.sleep", waits_s.append)
    env = SyntheticEnv(wait_ms=2.0, episode_length=100_000, **options)
    env.reset(seed=0)
    for _ in range(100_000):
        env.step(0)
    waits_ms = 1e3 * np.array(waits_s)
    assert waits_ms.mean() == pytest.approx(2.0, rel=0.03)
    assert np.percentile(waits_ms, 99) == pytest.approx(p99, rel=0.05)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"cpu_ms": -1}, ValueError, "cpu_ms is -1"),
        ({"cpu_ms": "fast"}, TypeError, "cpu_ms is 'fast'"),
        ({"cpu_ms": float("nan")}, ValueError, "cpu_ms is nan"),
        ({"wait_ms": float("inf")}, ValueError, "wait_ms is inf"),
        ({"wait_ms": True}, TypeError, "wait_ms is True"),
        ({"wait_ms": 1, "wait_p99_ms": 0.5}, ValueError, "wait_p99_ms is 0.5"),
        ({"wait_ms": 1, "wait_p99_ms": 16}, ValueError, "at most 14.97 times"),
        ({"obs_shape": (3, 0)}, ValueError, r"obs_shape\[1\] is 0"),
        ({"obs_shape": "big"}, ValueError, r"obs_shape\[0\] is 'b'"),
        ({"obs_shape": (2.5,)}, ValueError, r"obs_shape\[0\] is 2.5"),
        ({"episode_length": 0}, ValueError, "episode_length is 0"),
        ({"episode_length": 1.5}, ValueError, "episode_length is 1.5"),
    ],
)
def test_wrong_arguments_are_named(options, error, words):
    with pytest.raises(error, match=words):
        SyntheticEnv(**options)


def test_wrong_actions_and_calls_are_refused():
    env = SyntheticEnv()
    with pytest.raises(ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="action is 2, expected 0 or 1"):
        env.step(2)
