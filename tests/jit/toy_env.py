"""A small compiled env that uses every feature of the kit, and a slow twin of it."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from numba import njit

from vecenv.jit import EnvKernels, pack_record
from vecenv.jit.random import integers, integers_at, uniform

PARAMS = pack_record(cost=0.3, jumps=np.array([4, -2, 7], dtype=np.int16))


@njit
def pushed(position, action, params):
    return position + action * params.jumps[action + 1]


@njit
def reset(state, rng, params):
    state.position = integers(rng, 5)
    state.energy = 1.0 + uniform(rng)
    state.trail[:] = 0


@njit
def step(state, action, rng, params):
    state.trail[2], state.trail[1] = state.trail[1], state.trail[0]
    state.trail[0] = state.position
    state.position = pushed(state.position, action, params)
    state.energy -= params.cost * uniform(rng)
    if integers(rng, 3) == 0:  # how many draws a step takes varies
        state.energy += 0.1 * uniform(rng)
    reward = state.energy * 0.5 - abs(state.position)
    return reward, state.energy < 0.0, integers_at(rng, 3, 12) == 0


@njit
def observe(state, out, params):
    out[0] = state.position
    out[1] = state.energy
    out[2] = state.trail[2]


@njit
def action_mask(state, out, params):
    out[0] = state.position > 0
    out[1] = True
    out[2] = state.position < 6


FIELDS = [("position", np.int32), ("energy", np.float64), ("trail", np.int16, (3,))]
SPACES = Box(-np.inf, np.inf, (3,), np.float32), Discrete(3, start=-1)
TOY = EnvKernels(FIELDS, *SPACES, reset, step, observe, action_mask, name="toy")


def small_kernels(state_dtype, reset, step, observe, *, size=1, **changes):
    """Kernels of envs that observe a few numbers and have two actions."""
    seen = Box(-np.inf, np.inf, (size,), np.float32)
    return EnvKernels(state_dtype, seen, Discrete(2), reset, step, observe, **changes)


def reset_x(state, rng):
    state.x = 0.0


def observe_x(state, out):
    out[0] = state.x


WORD = 2**64 - 1


def slow_mix(word):
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def slow_word(seed, block, draw):
    """Random word of a seed: of a draw in a block, the number of a step or reset."""
    golden = 0x9E3779B97F4A7C15
    key = slow_mix((slow_mix((seed + golden) & WORD) + golden) & WORD)
    rotated = (key << 32 | key >> 32) & WORD
    return slow_mix((rotated + ((block << 16) + draw) * (key | 1)) & WORD)


class SlowToy(gym.Env):
    """The toy env with its rules written out again, on Python numbers."""

    observation_space = TOY.observation_space
    action_space = TOY.action_space
    seed = None

    def _open_block(self):
        self.block += 1
        self.draw = 0

    def _uniform(self):
        self.draw += 1
        return (slow_word(self.seed, self.block, self.draw - 1) >> 11) / 2**53

    def _integers(self, n):
        self.draw += 1
        return self._integers_at(self.draw - 1, n)

    def _integers_at(self, draw, n):
        return (slow_word(self.seed, self.block, draw) >> 32) * n >> 32

    def _obs(self):
        return np.array([self.position, self.energy, self.trail[2]], dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.seed, self.block = seed, 0
        self._open_block()
        self.position = self._integers(5)
        self.energy = 1.0 + self._uniform()
        self.trail = [0, 0, 0]
        return self._obs(), {}

    def step(self, action):
        self._open_block()
        self.trail = [self.position, *self.trail[:2]]
        self.position += int(action) * (4, -2, 7)[int(action) + 1]
        self.energy -= 0.3 * self._uniform()
        if self._integers(3) == 0:
            self.energy += 0.1 * self._uniform()
        reward = self.energy * 0.5 - abs(self.position)
        return self._obs(), reward, self.energy < 0.0, self._integers_at(2**15 + 3, 12) == 0, {}


class LimitedSlowToy(SlowToy):
    """The slow twin with an episode limit of 9, as TimeLimit has it."""

    def reset(self, **options):
        self.num_steps = 0
        return super().reset(**options)

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        self.num_steps += 1
        return obs, reward, terminated, truncated or self.num_steps >= 9, info
