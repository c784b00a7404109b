"""Two tasks that need a memory: a policy that sees only the present fails.

    vecenv train memory:TMaze-v0 --algo ppo --recurrent gru             # in the folder examples
    vecenv train memory:MaskedCartPole-v1 --algo ppo --recurrent gru

`MaskedCartPole-v1` is CartPole-v1 without its velocities: two positions tell them. `TMaze-v0` is a
corridor of 50 cells with a junction at its end: a sign seen in the first cell alone says whether up
or down is right there (B. Bakker, "Reinforcement Learning with Long Short-Term Memory", NIPS 2001).
Whoever forgets it scores 0.5 at most.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from vecenv.jit import EnvKernels, JitVectorEnv, pack_record
from vecenv.jit.random import integers

FORWARD, UP = 0, 1  # actions; 2 is down


def reset(state, rng, params):
    """Begin in the first cell, with a sign."""
    state.cell = 0
    state.is_up = integers(rng, 2) == 1


def step(state, action, rng, params):
    """Walk on, or turn. A step into a wall costs 1 / length, the right turn is worth 1."""
    is_at_junction = state.cell == params.length - 1
    if is_at_junction and action != FORWARD:
        return (1.0 if (action == UP) == state.is_up else 0.0), True, False
    if is_at_junction or action != FORWARD:
        return -1.0 / params.length, False, False
    state.cell += 1
    return 0.0, False, False


def observe(state, out, params):
    """Write the sign (1 up, -1 down, 0 elsewhere), and whether this is the junction."""
    out[0] = (1.0 if state.is_up else -1.0) if state.cell == 0 else 0.0
    out[1] = 1.0 if state.cell == params.length - 1 else 0.0


T_MAZE = EnvKernels(
    name="TMaze",
    state_dtype=[("cell", np.int32), ("is_up", np.bool_)],
    observation_space=Box(-1.0, 1.0, (2,), np.float32),
    action_space=Discrete(3),
    reset=reset,
    step=step,
    observe=observe,
)


def make_t_mazes(num_envs: int, length: int = 50, **options: Any) -> JitVectorEnv:
    """Make `num_envs` T-mazes of `length` cells; `options` as for `JitVectorEnv`."""
    return JitVectorEnv(T_MAZE, num_envs, params=pack_record(length=np.int32(length)), **options)


class WithoutVelocities(gym.ObservationWrapper):
    """CartPole of which position and angle alone are seen."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        space: Any = env.observation_space
        self.observation_space = Box(space.low[::2], space.high[::2], dtype=space.dtype)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Return float32 (2,) of float32 (4,)."""
        return observation[::2]


def make_masked_cartpole(**options: Any) -> gym.Env:
    """Make one CartPole without velocities."""
    return WithoutVelocities(gym.make("CartPole-v1", max_episode_steps=-1, **options))


gym.register("TMaze-v0", vector_entry_point="memory:make_t_mazes", max_episode_steps=100)
gym.register("MaskedCartPole-v1", entry_point="memory:make_masked_cartpole", max_episode_steps=500)
