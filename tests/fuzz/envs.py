"""Envs drawn at random, in lockstep with Gymnasium's vector env.

A case decides on spaces, infos, rewards, wrappers, the mode of autoreset, workers, threads, the
start method and copies. Sends in parts are compared with steps in tests/test_backends.py.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from copy import deepcopy
from fractions import Fraction

import gymnasium as gym
import numpy as np
from envs import MODES, SPACES
from equality import assert_same
from gymnasium import spaces
from gymnasium.wrappers import vector as vector_wrappers

from vecenv import AsyncVectorEnv, SyncVectorEnv

NEXT_STEP, SAME_STEP, DISABLED = MODES
MOST_ENVS = 6
UNIT = "env steps"  # what `run_case` counts


# -- envs ------------------------------------------------------------------------------------


def random_space(rng, choices, depth=2):
    """A space of any kind, perhaps nested."""
    if depth == 0 or rng.random() < 0.6:
        return choices[str(rng.choice(list(choices)))]
    parts = [random_space(rng, choices, depth - 1) for _ in range(rng.integers(1, 4))]
    if rng.random() < 0.5:
        return spaces.Tuple(parts)
    return spaces.Dict({f"{'zyx'[k]}{k}": part for k, part in enumerate(parts)})


class Infos:
    """Draws info dicts: keys, types and shapes come and go.

    `level` 0 has none, 1 the same numbers always, 2 whatever can be batched.
    """

    def __init__(self, level, chance, underscores):
        self.level, self.chance, self.underscores = level, chance, underscores
        self.kept = {}  # one dict, used again and again
        self.array = np.zeros(2)

    def draw(self, rng, action=None, depth=0):
        if self.level == 0:
            return {}
        if self.level == 1:
            self.array += 1
            self.kept.update(
                a=float(rng.normal()), n=int(rng.integers(9)), v=self.array, d={"x": self.array}
            )
            return self.kept
        makers = {
            "a": self.number,
            "b": self.number,
            "s": lambda rng: [f"run {rng.integers(99)}", None, [1, np.zeros(2)], ("x", 2)][
                rng.integers(4)
            ],
            "v": lambda rng: rng.integers(0, 9, 2).astype(["f4", "f8", "i2", "?"][rng.integers(4)]),
            "w": lambda rng: np.array(["abcdef"[: rng.integers(1, 6)], "y"]),
            "t": lambda rng: [(1, 2.5), (np.int8(3), (True,)), np.bool_(True), None][
                rng.integers(4)
            ],
            "0d": lambda rng: np.array(rng.integers(9), ["i4", "f4"][rng.integers(2)]),
            "empty": lambda rng: [np.zeros((0, 2)), np.zeros((0, 2), "i4")][rng.integers(2)],
            "when": lambda rng: np.datetime64("2020-01-01") + rng.integers(9),
            "big": lambda rng: rng.integers(0, 9, (3, 2)).astype([">i4", "i8"][rng.integers(2)]),
            "record": lambda rng: np.ones(1, [("x", "i4"), ("y", "f8")]),
            "c": lambda rng: np.complex64(rng.integers(9) + 1j),
            3: self.number,
            "actions": lambda rng: [deepcopy(action)],
        }
        if depth < 2:
            makers["d"] = lambda rng: self.draw(rng, action, depth + 1)
            makers["o"] = lambda rng: OrderedDict(self.draw(rng, action, depth + 1))
        is_reset = depth == 0 and action is None  # whose keys would replace the old episode's
        if depth < 2 and not is_reset:
            makers["final_info"] = makers["d"]
            makers["final_obs"] = lambda rng: [np.ones(2), {"x": 1}, 3, None][rng.integers(4)]
        if self.underscores:
            makers |= {"_a": self.number, "_s": lambda rng: int(rng.integers(2))}
        keys = [key for key in makers if rng.random() < self.chance]
        if rng.random() < 0.1:
            keys = [keys[k] for k in rng.permutation(len(keys))]
        return {key: makers[key](rng) for key in keys}

    @staticmethod
    def number(rng):
        kinds = [int, float, bool, np.float32, np.int8, np.float64, np.uint16, np.bool_, np.float16]
        return kinds[rng.integers(len(kinds))](rng.integers(9) / 2)


REWARDS = {
    "float": float,
    "int": lambda x: int(8 * x),
    "float32": np.float32,
    "array": np.array,
    "bool": lambda x: x > 0,
    "NumPy bool": lambda x: np.bool_(x > 0),
    "large": lambda x: 10**30 if x > 0 else -(2**70),
    "fraction": lambda x: Fraction(int(8 * x), 3),
    "longdouble": np.longdouble,
}
FLAGS = {"bool": bool, "NumPy bool": np.bool_, "int": int, "array": lambda x: np.array(bool(x))}


class AnyEnv(gym.Env):
    """An env whose every part is drawn; what it does is decided by its seed alone."""

    def __init__(self, options):
        self.options = options
        self.observation_space = deepcopy(options["observation_space"])
        self.action_space = deepcopy(options["action_space"])
        self.infos = Infos(*options["infos"])
        self.kept = None
        self.length = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.length = 0
        result = self._observe(), self._info(None)
        return list(result) if self.options["returns_list"] else result

    def step(self, action):
        rng, options = self.np_random, self.options
        self.length += 1
        is_over = rng.random() < options["end_chance"]
        is_truncated = rng.random() < 0.4
        flag = FLAGS[options["flag"]]
        result = (
            self._observe(),
            REWARDS[options["reward"]](rng.normal()),
            flag(is_over and not is_truncated),
            flag(is_over and is_truncated),
            self._info(action),
        )
        return list(result) if options["returns_list"] else result

    def _info(self, action):
        return self.infos.draw(self.np_random, action)

    def _observe(self):
        obs = self.observation_space.sample()
        style = self.options["obs"]
        if style == "reused":
            self.kept = obs if self.kept is None else overwrite(self.kept, obs)
            return self.kept
        return restyle(self.observation_space, obs, style)


def overwrite(kept, obs):
    """Write an observation into the arrays of another, as simulators do; return that."""
    if isinstance(obs, dict):
        for key, part in obs.items():
            kept[key] = overwrite(kept[key], part)
        return kept
    if type(obs) is tuple and type(kept) is tuple and len(obs) == len(kept):
        return tuple(overwrite(old, new) for old, new in zip(kept, obs, strict=True))
    is_alike = isinstance(obs, np.ndarray) and isinstance(kept, np.ndarray)
    if is_alike and (kept.shape, kept.dtype) == (obs.shape, obs.dtype):
        kept[...] = obs
        return kept
    return obs


def restyle(space, obs, style):
    """The same observation in other types that Gymnasium takes for it."""
    if style == "plain":
        return obs
    if isinstance(space, spaces.Dict):
        parts = {key: restyle(part, obs[key], style) for key, part in space.spaces.items()}
        return {**parts, "more": 1} if style == "lists" else OrderedDict(parts)
    if isinstance(space, spaces.Tuple):
        return tuple(restyle(p, o, style) for p, o in zip(space.spaces, obs, strict=True))
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return obs.astype(np.float64) if style == "wide" else obs.tolist()
    if isinstance(space, spaces.Discrete) and space.dtype == np.int64:
        return int(obs)
    return obs


def make_env(options):
    """Make the env with its wrappers."""
    env = AnyEnv(options)
    for name in options["wrappers"]:
        env = WRAPPERS[name](env)
    return env


WRAPPERS = {
    "TimeLimit": lambda env: gym.wrappers.TimeLimit(env, 5),
    "OrderEnforcing": gym.wrappers.OrderEnforcing,
    "RecordEpisodeStatistics": gym.wrappers.RecordEpisodeStatistics,
    "Autoreset": gym.wrappers.Autoreset,
    "FlattenObservation": gym.wrappers.FlattenObservation,
    "TransformReward": lambda env: gym.wrappers.TransformReward(env, float),
}
OUTER = {
    "none": lambda envs: envs,
    "DictInfoToList": vector_wrappers.DictInfoToList,
    "RecordEpisodeStatistics": vector_wrappers.RecordEpisodeStatistics,
    "ClipReward": lambda envs: vector_wrappers.ClipReward(envs, -0.5, 0.5),
    "NormalizeReward": vector_wrappers.NormalizeReward,
}


class Case:
    """Everything that a number decides."""

    def __init__(self, number):
        rng = self.rng = np.random.default_rng(number)
        self.number = number
        self.mode = MODES[rng.integers(3)]
        self.num_envs = int(rng.integers(1, MOST_ENVS + 1))
        self.num_steps = int(rng.choice([8, 40, 200]))
        self.observation_space = random_space(rng, SPACES)
        action_choices = {k: v for k, v in SPACES.items() if k != "custom"}
        is_plain = rng.random() < 0.6
        self.action_space = spaces.Discrete(4) if is_plain else random_space(rng, action_choices, 1)
        level = int(rng.choice([0, 1, 2, 2, 2]))
        chance = float(rng.choice([0.1, 0.5, 0.9]))
        self.outer = "none" if level >= 2 or rng.random() < 0.6 else str(rng.choice(list(OUTER)))
        wrappers = [str(name) for name in WRAPPERS if rng.random() < 0.15]
        if level == 1 and "RecordEpisodeStatistics" in wrappers:
            wrappers.remove("RecordEpisodeStatistics")  # it writes into the env's own dict
        if not is_flat(self.observation_space) and "FlattenObservation" in wrappers:
            wrappers.remove("FlattenObservation")
        obs = str(rng.choice(["plain", "plain", "reused", "wide", "lists"]))
        if "FlattenObservation" in wrappers and obs == "lists":
            obs = "wide"
        self.options = {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "infos": (level, chance, bool(rng.random() < 0.2)),
            "reward": str(rng.choice(list(REWARDS))),
            "flag": str(rng.choice(list(FLAGS))),
            "end_chance": float(rng.choice([0.05, 0.3, 0.8, 1.0])),
            "returns_list": bool(rng.random() < 0.15 and not wrappers),
            "obs": obs,
            "wrappers": wrappers,
        }
        self.seed = int(rng.integers(1 << 30))

    def env_fns(self):
        return [functools.partial(make_env, self.options)] * self.num_envs

    def make_async(self, rng):
        num_workers = int(rng.integers(1, min(3, self.num_envs) + 1))
        starts = ["fork"] * 60 + ["forkserver", "spawn"]
        context = os.environ.get("VECENV_FUZZ_CONTEXT") or starts[rng.integers(len(starts))]
        kwargs = {
            "num_workers": num_workers,
            "context": context,
            "copy": bool(rng.random() < 0.7),
            "caller_steps": bool(rng.random() < 0.25) and self.num_envs > num_workers,
            "on_error": ["raise", "restart"][int(rng.random() < 0.2)],
            "autoreset_mode": self.mode,
        }
        return AsyncVectorEnv(self.env_fns(), **kwargs), kwargs


def is_flat(space):
    parts = getattr(space, "spaces", None)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return all(map(is_flat, parts.values() if isinstance(parts, dict) else parts))
    kinds = spaces.Box | spaces.Discrete | spaces.MultiBinary
    return isinstance(space, kinds) and np.prod(space.shape or (1,)) > 0


def without_times(infos):
    """Statistics of episodes have their seconds."""
    if isinstance(infos, list):
        return [without_times(info) for info in infos]
    if not isinstance(infos, dict):
        return infos
    found = {key: without_times(value) for key, value in infos.items()}
    for name in ("episode", "_episode"):
        if isinstance(found.get(name), dict):
            found[name] = {k: v for k, v in found[name].items() if k not in ("t", "_t")}
    return found


def comparable(result):
    return (*result[:-1], without_times(result[-1]))


# -- lockstep with Gymnasium's classes -------------------------------------------------------


class Kept:
    """Results that are the caller's must stay as they were."""

    def __init__(self):
        self.pairs = []

    def add(self, result, path):
        self.pairs.append((result, deepcopy(result)))
        if len(self.pairs) > 5:
            self.check(path)

    def check(self, path):
        assert_same(*self.pairs.pop(0), f"{path}: a result returned before")


def run_lockstep(number):
    """Compare step by step; return how many env steps were."""
    case = Case(number)
    everyone, about = make_lockstep(case)
    where = f"case {number} ({case.mode.value}, {about}, {case.options})"
    try:
        return Lockstep(case, everyone, where).run()
    finally:
        for envs in everyone:
            envs.close()


def make_lockstep(case):
    """Make Gymnasium's vector env and those to be compared with it."""
    rng = case.rng
    if case.mode is SAME_STEP and case.options["obs"] == "reused":
        case.options["obs"] = "plain"  # Gymnasium's final_obs would be the next episode's
    if case.outer != "none" and case.mode is DISABLED:
        case.outer = "DictInfoToList"  # statistics after a reset by mask: see docs/gymnasium.md
    case.resets_some = case.outer != "RecordEpisodeStatistics"
    if case.mode is SAME_STEP and case.outer == "NormalizeReward":
        case.outer = "ClipReward"
    everyone = [
        gym.vector.SyncVectorEnv(case.env_fns(), autoreset_mode=case.mode),
        SyncVectorEnv(case.env_fns(), bool(rng.random() < 0.7), autoreset_mode=case.mode),
    ]
    pool, about = case.make_async(rng)
    everyone.append(pool)
    return [OUTER[case.outer](envs) for envs in everyone], about


class Lockstep:
    """Vector envs that do the same; the first is Gymnasium's."""

    def __init__(self, case, everyone, where):
        self.case, self.everyone, self.where = case, everyone, where
        self.keeps = [Kept() if envs.unwrapped.copy else None for envs in everyone]

    def run(self):
        case, rng = self.case, self.case.rng
        action_space = self.everyone[0].action_space
        action_space.seed(case.seed)
        seed = case.seed
        if rng.random() < 0.3:
            seed = [case.seed + 7 * k for k in range(case.num_envs)]
        options = [None, {}, {"level": 3}][rng.integers(3)]
        self.all_do(lambda e: e.reset(seed=seed, options=options), self.where)
        for step in range(case.num_steps):
            actions, path = action_space.sample(), f"{self.where} step {step}"
            result = self.all_do(lambda e, a=actions: e.step(deepcopy(a)), path)
            self.reset_some(result, path)
        return case.num_steps * case.num_envs * (len(self.everyone) - 1)

    def reset_some(self, result, path):
        """Reset the envs that are over, where that is ours to do; now and then some others too."""
        case, rng, over = self.case, self.case.rng, result[2] | result[3]
        mask = rng.random(case.num_envs) < 0.5
        seeds = None if rng.random() < 0.5 else rng.integers(99, size=case.num_envs).tolist()
        if case.mode is DISABLED and over.any():
            mask = over | (mask & (rng.random() < 0.3))
        elif not (case.resets_some and mask.any() and rng.random() < 0.05):
            return
        self.all_do(
            lambda e: e.reset(seed=seeds, options={"reset_mask": mask.copy()}),
            f"{path}, reset of {mask}",
        )

    def all_do(self, call, path):
        """Return what Gymnasium returned; the others must have returned the same."""
        expected = comparable(call(self.everyone[0]))
        for envs, keep in zip(self.everyone[1:], self.keeps[1:], strict=True):
            result = call(envs)
            assert_same(comparable(result), expected, f"{path} {envs}")
            if keep is not None:
                keep.add(result, path)
        return expected


def run_case(number):
    """Run one case; return the number of env steps compared."""
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers cast to the first env's dtype
        return run_lockstep(number)
