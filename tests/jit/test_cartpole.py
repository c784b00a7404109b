import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from vecenv.jit.cartpole import CARTPOLE, CartPoleVectorEnv

FIELDS = ("x", "x_dot", "theta", "theta_dot")


def put_state(envs, index, state):
    for name, value in zip(FIELDS, state, strict=True):
        envs.states[name][index] = value


def test_spaces_are_gymnasiums():
    reference = CartPoleEnv()
    assert CARTPOLE.observation_space == reference.observation_space
    assert CARTPOLE.action_space == reference.action_space


def test_equals_gymnasium_step_for_step_from_the_same_states():
    num_envs, rng = 8, np.random.default_rng(0)
    references = [gym.make("CartPole-v1") for _ in range(num_envs)]
    envs = CartPoleVectorEnv(num_envs, autoreset_mode="Disabled")
    envs.reset(seed=0)
    for i, reference in enumerate(references):
        reference.reset(seed=i)
        put_state(envs, i, reference.unwrapped.state)
    num_ends = 0
    for _ in range(600):
        # Mostly balancing, so that episodes get long: the pole is kept over the cart.
        actions = (envs.states.theta + 0.5 * envs.states.theta_dot > 0).astype(np.int64)
        actions[::2] = np.where(rng.random(num_envs // 2) < 0.3, 1 - actions[::2], actions[::2])
        obs, rewards, terminations, truncations, _ = envs.step(actions)
        for i, reference in enumerate(references):
            expected = reference.step(int(actions[i]))
            np.testing.assert_array_equal(obs[i], expected[0])
            assert (rewards[i], terminations[i], truncations[i]) == expected[1:4]
            assert tuple(envs.states[i]) == tuple(reference.unwrapped.state)
        over = terminations | truncations
        num_ends += over.sum()
        if over.any():
            envs.reset(options={"reset_mask": over})
            for i in np.flatnonzero(over):
                references[i].reset()
                put_state(envs, i, references[i].unwrapped.state)
    assert num_ends > 20 and 500 in envs.last_lengths


def test_starts_are_uniform_within_a_twentieth():
    envs = CartPoleVectorEnv(2_000)
    obs, _ = envs.reset(seed=0)
    assert np.abs(obs).max() <= np.float32(0.05)
    counts, _ = np.histogram(obs, 10, (-0.05, 0.05))
    assert np.abs(counts / obs.size - 0.1).max() < 0.015
    assert np.abs(np.corrcoef(obs.T) - np.eye(4)).max() < 0.1
