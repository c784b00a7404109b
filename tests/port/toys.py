"""Small envs with their kernels, and envs that can't be compared."""

import random
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from agents.games import Game
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from numba import njit

from vecenv.jit import AgentsOf, EnvKernels
from vecenv.jit.random import (
    binomial,
    choice,
    exponential,
    gamma,
    integers,
    normal,
    permutation,
    poisson,
    uniform,
)

LUCK = Box(-np.inf, np.inf, (12,), np.float64)


class Luck(gym.Env):
    """Draws from every distribution."""

    observation_space, action_space = LUCK, Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        if seed is not None:
            self.own = random.Random(seed)
        self.luck = np.zeros(12)
        return self.luck.copy(), {}

    def step(self, action):
        rng, luck = self.np_random, self.luck
        self.steps += 1
        luck[0] = rng.uniform(-1.0, 3.0)
        luck[1] = rng.integers(2, 7)
        luck[2] = rng.normal(1.0, 2.0)
        luck[3] = rng.exponential(3.0)
        luck[4] = rng.gamma(2.5, 0.5)
        luck[5] = rng.poisson(20.0)
        luck[6] = rng.binomial(9, 0.3)
        luck[7] = rng.choice(3, p=[0.2, 0.5, 0.3])
        luck[8] = rng.permutation(4)[0]
        luck[9:11] = rng.random(2)
        luck[11] = self.own.randint(1, 6)
        return luck.copy(), float(luck[1]), self.steps == 9, False, {}


def luck_reset(state, rng):
    state.steps = 0
    state.luck[:] = 0.0


def luck_step(state, action, rng):
    luck = state.luck
    state.steps += 1
    luck[0] = -1.0 + 4.0 * uniform(rng)
    luck[1] = 2 + integers(rng, 5)
    luck[2] = 1.0 + 2.0 * normal(rng)
    luck[3] = 3.0 * exponential(rng)
    luck[4] = 0.5 * gamma(rng, 2.5)
    luck[5] = poisson(rng, 20.0)
    luck[6] = binomial(rng, 9, 0.3)
    luck[7] = choice(rng, (0.2, 0.5, 0.3))
    permutation(rng, state.order)
    luck[8] = state.order[0]
    luck[9] = uniform(rng)
    luck[10] = uniform(rng)
    luck[11] = 1 + integers(rng, 6)
    return luck[1], state.steps == 9, False


def luck_observe(state, out):
    out[:] = state.luck


LUCK_KERNELS = EnvKernels(
    [("steps", np.int32), ("luck", np.float64, (12,)), ("order", np.int8, (4,))],
    LUCK, Discrete(2), luck_reset, luck_step, luck_observe, name="luck",
)  # fmt: skip


class Walk(gym.Env):
    """A walker on a line that a wind pushes; invalid actions are masked."""

    observation_space, action_space = Box(-99, 99, (2,), np.int64), Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(3, 6))
        self.wind = 0
        return self.seen(), {"action_mask": self.mask()}

    def seen(self):
        return np.array([self.place, self.wind])

    def mask(self):
        return np.array([self.place > 0, True, self.place < 9])

    def step(self, action):
        self.wind = 0
        if self.np_random.random() < 0.3:
            self.wind = int(self.np_random.integers(2)) * 2 - 1
        self.place = min(max(self.place + action - 1 + self.wind, 0), 9)
        reward = 1.0 if self.place == 9 else -0.1
        return self.seen(), reward, self.place == 9, False, {"action_mask": self.mask()}


def brief():
    return gym.wrappers.TimeLimit(Walk(), 20)


def reset(state, rng):
    state.place = 3 + integers(rng, 3)
    state.wind = 0


def step(state, action, rng):
    state.wind = 0
    if uniform(rng) < 0.3:
        state.wind = integers(rng, 2) * 2 - 1
    state.place = min(max(state.place + action - 1 + state.wind, 0), 9)
    reward = 1.0 if state.place == 9 else -0.1
    return reward, state.place == 9, False


def observe(state, out):
    out[0] = state.place
    out[1] = state.wind


def action_mask(state, out):
    out[0] = state.place > 0
    out[1] = True
    out[2] = state.place < 9


WALK = EnvKernels(
    [("place", np.int32), ("wind", np.int32)], Walk.observation_space, Discrete(3),
    reset, step, observe, action_mask, name="walk",
)  # fmt: skip


def step_one_more_draw(state, action, rng):
    result = step(state, action, rng)
    if state.wind != 0:
        integers(rng, 5)
    return result


def step_rarely_wrong(state, action, rng):
    reward, is_over, is_cut = step(state, action, rng)
    if state.place == 0 and action == 2:
        reward = 0.5
    return reward, is_over, is_cut


def step_other_field(state, action, rng):
    result = step(state, action, rng)
    if state.wind == -1:
        state.wind = -2
    return result


def observe_wrong(state, out):
    out[0] = state.place
    out[1] = state.wind
    if state.place == 7:
        out[1] = 5


def mask_wrong(state, out):
    out[0] = state.place > 1
    out[1] = True
    out[2] = state.place < 9


class Depot(Walk):
    """Holds lists and a text."""

    def reset(self, *, seed=None, options=None):
        self.trucks, self.event, self.loads = [], "none", [1, 2]
        return super().reset(seed=seed)

    def step(self, action):
        self.trucks.append((int(action), 0))
        self.loads.append(3)
        return super().step(action)


class Slide(Walk):
    """Moves a walker by the difference of two actions."""

    action_space = MultiDiscrete([3, 2])

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {}

    def step(self, action):
        return (*super().step(int(action[0]) - int(action[1]))[:4], {})


def slide_step(state, action, rng):
    reward, is_over, is_cut = step(state, action[0] - action[1], rng)
    return 0.5 if state.place == 0 else reward, is_over, is_cut


SLIDE = EnvKernels(
    [("place", np.int32), ("wind", np.int32)], Walk.observation_space, Slide.action_space,
    reset, slide_step, observe, name="slide",
)  # fmt: skip


class Tag(Game):
    """A game of two in PettingZoo's parallel form: the seeker ends the hider's part."""

    possible_agents = ["seeker", "hider"]
    _spaces = dict.fromkeys(possible_agents, (Box(0, 9, (2,), np.int64), Discrete(2)))

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.places = self.rng.integers(0, 10, size=2)
        self.steps = 0
        return {n: self.places.copy() for n in self.agents}, {n: {} for n in self.agents}

    def step(self, actions):
        acting = list(self.agents)
        self.steps += 1
        for k, name in enumerate(self.possible_agents):
            if name in actions:
                self.places[k] = (self.places[k] + 2 * actions[name] - 1) % 10
        caught = "hider" in acting and self.places[0] == self.places[1]
        over = {name: bool(caught and name == "hider") for name in acting}
        cut = dict.fromkeys(acting, self.steps == 12)
        rewards = dict.fromkeys(acting, 1.0 if caught else 0.0)
        self.agents = [name for name in acting if not (over[name] or cut[name])]
        return {n: self.places.copy() for n in acting}, rewards, over, cut, {n: {} for n in acting}


def tag_reset(state, rng):
    state.places[0] = integers(rng, 10)
    state.places[1] = integers(rng, 10)
    state.steps = 0


def tag_step(state, actions, rng):
    state.steps += 1
    for k in range(2):
        if state.alive[k]:
            state.places[k] = (state.places[k] + 2 * actions[k] - 1 + 10) % 10
    caught = state.alive[1] == 1 and state.places[0] == state.places[1]
    if caught:
        state.rewards[:] = 1.0
        state.terminations[1] = 1
    return 0.0, False, state.steps == 12


def tag_observe(state, agent, out):
    out[0] = state.places[0]
    out[1] = state.places[1]


TAG = EnvKernels(
    [("places", np.int64, (2,)), ("steps", np.int64)],
    groups={"all": AgentsOf(Tag.possible_agents, Box(0, 9, (2,), np.int64), Discrete(2))},
    reset=tag_reset, step=tag_step, observe=tag_observe, name="tag",
)  # fmt: skip


class GlobalLuck(Walk):
    def step(self, action):
        result = super().step(action)
        self.noise = np.random.rand()  # noqa: NPY002
        return result


class PythonLuck(Walk):
    def step(self, action):
        if random.random() < 0.5:
            action = 1
        return super().step(action)


class Clock(Walk):
    def step(self, action):
        self.now = time.time()
        return super().step(action)


class Reader(Walk):
    def reset(self, *, seed=None, options=None):
        with open(Path(__file__)) as file:
            self.text = file.read(3)
        return super().reset(seed=seed)


class Counting(Walk):
    games = 0

    def reset(self, *, seed=None, options=None):
        self.games += 1
        _, info = super().reset(seed=seed)
        self.place = min(self.place + self.games // 2, 8)
        return self.seen(), info


class Ordered(Walk):
    def step(self, action):
        result = list(super().step(action))
        result[1] = float(id(object()) // 64 % 2**16 + hash(object()) % 7 + next(COUNT))
        return tuple(result)


COUNT = iter(range(10**9))


class Unseeded(Walk):
    def reset(self):
        return super().reset()


class SecondLuck(Walk):
    def __init__(self):
        self.second = np.random.default_rng()


class Dirichlet(Walk):
    def step(self, action):
        self.np_random.dirichlet([1.0, 2.0])
        return super().step(action)


class Raising(Walk):
    def step(self, action):
        if self.place == 8 and action == 0:
            raise RuntimeError("no way back")
        return super().step(action)


CODE = (0, 3, 1, 2, 2, 0, 1, 3, 0)


class Lock(gym.Env):
    """Opens after the right nine of four actions in a row: luck alone does not find them."""

    observation_space, action_space = Box(0, 9, (1,), np.int64), Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return np.array([0]), {}

    def step(self, action):
        self.place = self.place + 1 if action == CODE[self.place] else 0
        return np.array([self.place]), float(self.place == 9), self.place == 9, False, {}


def lock_reset(state, rng):
    state.place = 0


def lock_step(state, action, rng):
    state.place = state.place + 1 if action == CODE[state.place] else 0
    if state.place == 9:
        return 2.0, True, False
    return 0.0, False, False


def lock_observe(state, out):
    out[0] = state.place


LOCK = EnvKernels(
    [("place", np.int32)], Lock.observation_space, Lock.action_space,
    lock_reset, lock_step, lock_observe, name="lock",
)  # fmt: skip


class Uncopied(Walk):
    """Has a function that holds the env: a copy of the env moves the original one."""

    def __init__(self):
        self.move = lambda to: setattr(self, "place", to)

    def step(self, action):
        found = super().step(action)
        self.move(int(found[0][0]))
        return found


class Locked(Walk):
    """Can't be copied."""

    def __init__(self):
        self.lock = threading.Lock()


class Endless(Walk):
    def step(self, action):
        while self.place == 8:
            pass
        return super().step(action)


compiled_step = njit(step)


def step_endless(state, action, rng):
    while state.place == 8:
        state.wind = 0
    return compiled_step(state, action, rng)
