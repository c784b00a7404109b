"""Envs whose every result is known beforehand, or random in every space there is."""

from __future__ import annotations

import functools
from copy import deepcopy
from inspect import signature

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from vecenv import SyncVectorEnv

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


def mode_id(mode):
    return mode.value


class CounterEnv(gym.Env):
    """Observes (name, episode, step); the reward is the step, and all calls are written down.

    An episode ends with step number `length`: it terminates, or with `truncates` is truncated.
    With `reuses_obs` one array is returned again and again, as many simulators do.
    """

    action_space = spaces.Discrete(10)
    observation_space = spaces.Box(-1, 1000, (3,), np.float32)

    def __init__(self, name=0, length=3, truncates=False, reuses_obs=False):
        self.name = name
        self.length = length
        self.truncates = truncates
        self.reuses_obs = reuses_obs
        self.episode = -1
        self.step_number = 0
        self.calls = []
        self.is_closed = False
        self._obs = np.zeros(3, np.float32)

    def _observe(self):
        self._obs[:] = self.name, self.episode, self.step_number
        return self._obs if self.reuses_obs else self._obs.copy()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.calls.append(("reset", seed, options))
        self.episode += 1
        self.step_number = 0
        return self._observe(), {"episode": self.episode}

    def step(self, action):
        self.calls.append(("step", action))
        self.step_number += 1
        is_over = self.step_number >= self.length
        info = {"step": self.step_number}
        return (
            self._observe(),
            float(self.step_number),
            is_over and not self.truncates,
            is_over and self.truncates,
            info,
        )

    def double(self, value, offset=0):
        return 2 * value + offset + self.name

    def render(self):
        return f"frame of {self.name}"

    def close(self):
        self.is_closed = True


def begun(envs, seed=0):
    """An env, or a vector env, after a reset."""
    envs.reset(seed=seed)
    return envs


def counters(lengths, **kwargs):
    """One factory of a counter env per episode length."""
    return [
        lambda name=name, length=length: CounterEnv(name, length, **kwargs)
        for name, length in enumerate(lengths)
    ]


class Pair:
    """A sample of PairSpace: an object that NumPy can't make an array of."""

    def __init__(self, left, right):
        self.left = left
        self.right = right

    def __eq__(self, other):
        return isinstance(other, Pair) and (self.left, self.right) == (other.left, other.right)

    def __hash__(self):
        return hash((self.left, self.right))

    def __repr__(self):
        return f"Pair({self.left}, {self.right})"


class PairSpace(gym.Space):
    """A space that Gymnasium has not heard of."""

    def sample(self, mask=None, probability=None):
        return Pair(int(self.np_random.integers(10)), int(self.np_random.integers(10)))

    def contains(self, x):
        return isinstance(x, Pair)

    def __eq__(self, other):
        return isinstance(other, PairSpace)

    __hash__ = None


DTYPES = ["float16", "float32", "float64", "int8", "int16", "int32", "int64"]
DTYPES += ["uint8", "uint16", "uint32", "uint64", "bool"]
SHAPES = [(3,), (), (2, 3), (2, 1, 3), (0,)]


def _box(dtype, shape):
    if dtype == "bool":
        return spaces.Box(0, 1, shape, np.bool_)
    return spaces.Box(0 if dtype.startswith("u") else -9, 100, shape, np.dtype(dtype).type)


# What is written into rows in a way of its own stands alone; all dtypes are in one Dict.
ARRAY_SPACES = {
    "float32(3,)": _box("float32", (3,)),
    "float64(2, 3)": _box("float64", (2, 3)),
    "float32(0,)": _box("float32", (0,)),
    "int8()": _box("int8", ()),
    "bool(3,)": _box("bool", (3,)),
    "uint8 image": _box("uint8", (4, 4, 3)),
    "big-endian": spaces.Box(-9, 9, (2,), np.dtype(">f4")),
    "big-endian number": spaces.Box(-9, 9, (), np.dtype(">i4")),
    "every dtype": spaces.Dict(
        {dtype: _box(dtype, SHAPES[k % 5]) for k, dtype in enumerate(DTYPES)}
    ),
    "discrete": spaces.Discrete(5),
    "discrete from -2": spaces.Discrete(5, start=-2),
    "multi-discrete from 5": spaces.MultiDiscrete([3, 4], start=[5, -5]),
    "multi-discrete table": spaces.MultiDiscrete([[3, 4], [5, 6]], dtype=np.int16),
    "multi-binary table": spaces.MultiBinary([2, 3]),
    "tuple": spaces.Tuple([spaces.Box(-np.inf, np.inf, (2, 2)), spaces.MultiBinary(2)]),
    "dict": spaces.Dict(near=spaces.Box(-1, 1, (2,)), far=spaces.Discrete(3)),
    "nested": spaces.Dict(
        b=spaces.Tuple([spaces.Discrete(3), spaces.Dict(x=spaces.Box(0, 255, (2,), np.uint8))]),
        a=spaces.Dict(z=spaces.Box(-1, 1, ()), y=spaces.MultiDiscrete([2, 2])),
    ),
}
if "dtype" in signature(spaces.Discrete).parameters:  # Gymnasium 1.3 and newer
    ARRAY_SPACES["discrete int8"] = spaces.Discrete(5, dtype=np.int8)
OBJECT_SPACES = {
    "text": spaces.Text(6),
    "sequence": spaces.Sequence(spaces.Box(-1, 1, (2,))),
    "stacked sequence": spaces.Sequence(spaces.Discrete(3), stack=True),
    "graph": spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(3)),
    "one of": spaces.OneOf([spaces.Discrete(2), spaces.Box(-1, 1, (2,))]),
    "custom": PairSpace(),
    "dict with objects": spaces.Dict(
        text=spaces.Text(4), number=spaces.Discrete(3), pair=PairSpace()
    ),
    "tuple with objects": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Text(4)]),
}
SPACES = ARRAY_SPACES | OBJECT_SPACES


class RandomEnv(gym.Env):
    """Random observations of any space, rewards, ends and infos, its action among them."""

    def __init__(self, observation_space, action_space=None, end_chance=0.3):
        self.observation_space = deepcopy(observation_space)
        self.action_space = spaces.Discrete(4) if action_space is None else action_space
        self.end_chance = end_chance

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), self._info(None)

    def step(self, action):
        ends = self.np_random.random(2) < self.end_chance / 2
        obs = self.observation_space.sample()
        return obs, self.np_random.normal(), bool(ends[0]), bool(ends[1]), self._info(action)

    def _info(self, action):
        rng = self.np_random
        info = {
            "count": int(rng.integers(9)),
            "ratio": float(rng.random()),
            "flag": bool(rng.random() < 0.5),
            "single": np.float32(rng.random()),
            "bit": np.bool_(rng.random() < 0.5),
            "vector": rng.random(2).astype(np.float32),
            "name": f"run {rng.integers(9)}",
            "missing": None,
            "nested": {"depth": np.int16(rng.integers(9)), "deeper": {"x": rng.random(1)}},
            "actions": [deepcopy(action)],  # a list is kept as it is
        }
        return {key: value for key, value in info.items() if rng.random() < 0.7}


NUM_ENVS = 5  # of `random_envs`


def random_envs(space, mode=AutoresetMode.NEXT_STEP, **kwargs):
    env_fns = [functools.partial(RandomEnv, space)] * NUM_ENVS
    return SyncVectorEnv(env_fns, autoreset_mode=mode, **kwargs)


def restart_ended(envs, result):
    over = result[2] | result[3]
    if envs.autoreset_mode is AutoresetMode.DISABLED and over.any():
        return envs.reset(options={"reset_mask": over})
    return None


def arrays_in(obs):
    if isinstance(obs, np.ndarray):
        return [obs]
    parts = obs.values() if isinstance(obs, dict) else obs
    return [array for part in parts for array in arrays_in(part)]
