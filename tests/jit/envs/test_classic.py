"""Pendulum, MountainCar and Acrobot against Gymnasium's, one step from the same states."""

import gymnasium as gym
import numpy as np
import pytest

import vecenv


def random_states(name, count, rng):
    """States float64 (count, fields) as the reference has them, and actions."""
    if name == "Pendulum-v1":
        states = rng.uniform((-9.0, -8.0), (9.0, 8.0), (count, 2))
        return states, rng.uniform(-3.0, 3.0, (count, 1)).astype(np.float32)
    if name == "Acrobot-v1":
        high = np.array([np.pi, np.pi, 4 * np.pi, 9 * np.pi])
        return rng.uniform(-high, high, (count, 4)), rng.integers(0, 3, count)
    states = rng.uniform((-1.2, -0.07), (0.6, 0.07), (count, 2))
    states[-(count // 10) :, 0] = 0.42 + 0.1 * rng.random(count // 10)  # at the goal
    states[: count // 10, 0] = -1.2 + 0.01 * rng.random(count // 10)  # at the wall
    if name == "MountainCar-v0":
        return states, rng.integers(0, 3, count)
    actions = rng.uniform(-1.5, 1.5, (count, 1))
    return states.astype(np.float32), actions.astype(np.float32)


def reference_steps(name, states, actions):
    """Yield what Gymnasium's env returns, and its state afterwards."""
    env = gym.make(name).unwrapped
    env.reset(seed=0)
    for state, action in zip(states, actions, strict=True):
        env.state = state.copy()
        obs, reward, terminated, _, _ = env.step(action)
        yield obs, reward, terminated, np.array(env.state, np.float64)


# Largest distance of states and of rewards. Sines and cosines of NumPy and of the compiler may
# differ in the last place; Gymnasium takes the square of a float32 torque by `powf`.
LIMITS = {
    "Pendulum-v1": (1e-14, 1e-9),
    "MountainCar-v0": (0.0, 0.0),
    "MountainCarContinuous-v0": (0.0, 0.0),
    "Acrobot-v1": (1e-12, 0.0),
}
ROUNDED = 1e-6  # plain Python computes in float64 what compiled code computes in float32


def check_steps(name, count, debug):
    states, actions = random_states(name, count, np.random.default_rng(0))
    envs = vecenv.make_vec(f"Jit{name}", count, vector_kwargs={"debug": debug})
    envs.reset(seed=0)
    for field, column in zip(envs.states.dtype.names, states.T, strict=True):
        envs.states[field] = column
    obs, rewards, terminations, truncations, _ = envs.step(actions)
    columns = zip(*reference_steps(name, states, actions), strict=True)
    expected_obs, expected_rewards, expected_ends, expected_states = map(np.array, columns)
    found = np.stack([envs.states[field] for field in envs.states.dtype.names], axis=1)
    state_limit, reward_limit = LIMITS[name]
    more = ROUNDED if debug else 0.0
    assert np.abs(found - expected_states).max() <= state_limit + more
    assert np.abs(rewards - expected_rewards).max() <= reward_limit + more
    if debug:
        np.testing.assert_allclose(obs, expected_obs, atol=ROUNDED)
    else:
        np.testing.assert_array_max_ulp(obs, expected_obs, 1)
    np.testing.assert_array_equal(terminations, expected_ends)
    assert not truncations.any() and (name == "Pendulum-v1" or expected_ends.any())


@pytest.mark.parametrize("name", LIMITS)
def test_a_step_equals_gymnasiums_from_random_states(name):
    check_steps(name, 60, debug=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_a_compiled_step_equals_gymnasiums_from_a_hundred_thousand_states(name):
    check_steps(name, 100_000, debug=False)
