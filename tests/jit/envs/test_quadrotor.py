"""The quadrotor against its equations written with vectors, and against what physics says."""

import numpy as np
import pytest

import vecenv

G, FIELDS = 9.81, ("x", "z", "theta", "x_dot", "z_dot", "theta_dot")


def make(num_envs, debug=True):
    envs = vecenv.make_vec("JitQuadrotor2D-v0", num_envs, vector_kwargs={"debug": debug})
    envs.reset(seed=0)
    return envs


def put(envs, states):
    for name, column in zip(FIELDS, np.asarray(states).T, strict=True):
        envs.states[name] = column


def slow_step(state, action):
    """One state (6,) after a step, by rotation matrix and force vectors."""
    position, angle, velocity, spin = state[:2], state[2], state[3:5], state[5]
    forces = 0.25 * G * (1 + np.clip(np.asarray(action, np.float64), -1, 1))
    for _ in range(2):
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        force = turn @ [0.0, forces.sum()] - [0.0, 0.5 * G]
        velocity = velocity + 0.01 * force / 0.5
        spin = spin + 0.01 * 0.15 * (forces[1] - forces[0]) / 0.004
        position, angle = position + 0.01 * velocity, angle + 0.01 * spin
    return np.array([*position, angle, *velocity, spin])


def check_steps(count, debug):
    rng = np.random.default_rng(0)
    states = rng.normal(0, 1, (count, 6)) * (1.2, 1.2, 0.6, 2, 2, 4)
    actions = rng.normal(0, 0.8, (count, 2)).astype(np.float32)
    envs = make(count, debug)
    put(envs, states)
    _, rewards, terminations, _, _ = envs.step(actions)
    expected = np.array([slow_step(*pair) for pair in zip(states, actions, strict=True)])
    found = np.stack([envs.states[name] for name in FIELDS], axis=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    lost = (np.abs(expected[:, :2]) > 3).any(axis=1) | (np.abs(expected[:, 2]) > np.pi / 2)
    np.testing.assert_array_equal(terminations, lost)
    cost = 0.05 * (np.clip(actions.astype(np.float64), -1, 1) ** 2).sum(axis=1)
    nearness = 1 / (1 + 4 * (expected[:, :2] ** 2).sum(axis=1))
    np.testing.assert_allclose(rewards, nearness - cost, atol=1e-12)
    assert 0 < lost.sum() < count


def test_a_step_equals_the_equations():
    check_steps(200, debug=True)


@pytest.mark.slow
def test_a_compiled_step_equals_the_equations_from_a_hundred_thousand_states():
    check_steps(100_000, debug=False)
