"""Slides: a small env with Box actions, compiled and as a slow twin; and wrappers, ours and theirs.

`Pair.ours` goes around a vector env, `Pair.theirs` is the same of Gymnasium around each env.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from jit.toy_env import SlowToy
from numba import njit

import vecenv
from vecenv import wrappers
from vecenv.adapters import split_infos
from vecenv.jit import EnvKernels, JitVectorEnv
from vecenv.jit.random import integers, uniform

OBS = Box(-np.inf, np.inf, (3,), np.float32)
ACTIONS = Box(np.array([-2, 0], np.float32), np.array([1, 4], np.float32))
MODES = ["NextStep", "SameStep", "Disabled"]


@njit
def reset(state, rng):
    state.position = uniform(rng)
    state.speed = 0.0
    state.number = 0


@njit
def step(state, action, rng):
    state.speed = state.speed * 0.5 + action[0]
    state.position += state.speed + 0.25 * action[1] * uniform(rng)
    state.number += 1
    return state.position - state.speed, integers(rng, 8) == 0, integers(rng, 9) == 0


@njit
def observe(state, out):
    out[0], out[1], out[2] = state.position, state.speed, state.number


SLIDE = EnvKernels(
    name="slide",
    state_dtype=[("position", np.float64), ("speed", np.float64), ("number", np.int64)],
    observation_space=OBS,
    action_space=ACTIONS,
    reset=reset,
    step=step,
    observe=observe,
)


class Slide(SlowToy):
    """The rules again, on Python numbers; with infos if wanted."""

    observation_space, action_space = OBS, ACTIONS
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, has_infos=False, render_mode=None):
        self.has_infos, self.render_mode = has_infos, render_mode

    def _obs(self):
        return np.array([self.position, self.speed, self.number], np.float32)

    def _info(self):
        if not self.has_infos:
            return {}
        info = {"position": float(self.position), "is_far": self.position > 1}
        return info if self.number % 3 else {**info, "more": {"speed": np.full(2, self.speed)}}

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.seed, self.block = seed, 0
        self._open_block()
        self.position, self.speed, self.number = self._uniform(), 0.0, 0
        return self._obs(), self._info()

    def step(self, action):
        self._open_block()
        first, second = (float(x) for x in action)
        self.speed = self.speed * 0.5 + first
        self.position += self.speed + 0.25 * second * self._uniform()
        self.number += 1
        ends = self._integers(8) == 0, self._integers(9) == 0
        return self._obs(), self.position - self.speed, *ends, self._info()

    def render(self):
        frame = np.zeros((4, 5, 3), np.uint8)
        frame[0, 0] = int(abs(self.position) * 50) % 256
        frame[1, 1] = self.number
        return frame


class Pair(NamedTuple):
    ours: Callable[[Any], Any]
    theirs: Callable[[Any], Any]


def two(obs):
    return obs[..., :2].astype(np.float64)


def two_space(envs_or_env):
    space = getattr(envs_or_env, "single_observation_space", envs_or_env.observation_space)
    return Box(-np.inf, np.inf, (*space.shape[:-1], 2), np.float64)


def half(obs):
    return (obs * 0.5).astype(obs.dtype)


def shifted(rewards):
    return rewards * 2.0 - 1.0


def pairs(name, k=3):
    """The pair of wrappers of a name, k being a small number."""
    theirs = gym.wrappers
    return {
        "ClipReward": lambda: Pair(
            lambda e: wrappers.ClipReward(e, -0.3 * k, 0.5),
            lambda e: theirs.ClipReward(e, -0.3 * k, 0.5),
        ),
        "TransformReward": lambda: Pair(
            lambda e: wrappers.TransformReward(e, shifted),
            lambda e: theirs.TransformReward(e, shifted),
        ),
        "TransformObservation": lambda: Pair(
            lambda e: wrappers.TransformObservation(e, two, two_space(e)),
            lambda e: theirs.TransformObservation(e, two, two_space(e)),
        ),
        "half": lambda: Pair(
            lambda e: wrappers.TransformObservation(e, half),
            lambda e: theirs.TransformObservation(e, half, e.observation_space),
        ),
        "FrameStack": lambda: Pair(
            lambda e: wrappers.FrameStack(e, k), lambda e: theirs.FrameStackObservation(e, k)
        ),
        "FrameStack zero": lambda: Pair(
            lambda e: wrappers.FrameStack(e, k, "zero"),
            lambda e: theirs.FrameStackObservation(e, k, padding_type="zero"),
        ),
        "RescaleAction": lambda: Pair(
            lambda e: wrappers.RescaleAction(e, -k, 2),
            lambda e: theirs.RescaleAction(e, np.float32(-k), np.float32(2)),
        ),
        "ClipAction": lambda: Pair(wrappers.ClipAction, theirs.ClipAction),
        "TransformAction": lambda: Pair(
            lambda e: wrappers.TransformAction(e, np.cbrt),
            lambda e: theirs.TransformAction(e, np.cbrt, None),
        ),
        "RecordEpisodeStatistics": lambda: Pair(
            wrappers.RecordEpisodeStatistics, theirs.RecordEpisodeStatistics
        ),
    }[name]()


NAMES = (
    "ClipReward", "TransformReward", "TransformObservation", "half", "FrameStack",
    "FrameStack zero", "RescaleAction", "ClipAction", "TransformAction",
    "RecordEpisodeStatistics",
)  # fmt: skip


def make_bare(backend, count, mode, has_infos=False, **kwargs):
    """A vector env of slides, without any wrapper."""
    if backend == "jit":
        return JitVectorEnv(SLIDE, count, autoreset_mode=mode, num_threads=1)
    factory = functools.partial(Slide, has_infos)
    if backend == "async":
        kwargs = {"num_workers": 2, **kwargs}
    return vecenv.make_vec(
        [factory] * count, backend=backend, autoreset_mode=mode, vector_kwargs=kwargs
    )


def make_both(backend, names, mode, count=3, has_infos=False, k=3):
    """Wrappers around a vector env, and a vector env of envs that are wrapped."""
    found = [pairs(name, k) for name in names]
    ours = make_bare(backend, count, mode, has_infos)

    def wrapped():
        env = Slide(has_infos)
        for pair in found:
            env = pair.theirs(env)
        return env

    for pair in found:
        ours = pair.ours(ours)
    return ours, vecenv.SyncVectorEnv([wrapped] * count, autoreset_mode=mode)


def slot_of(envs):
    """Memory for results, full of what must be overwritten."""
    count = envs.num_envs
    obs = envs.allocate(
        (count, *envs.single_observation_space.shape), envs.single_observation_space.dtype
    )
    obs[...] = 77
    return vecenv.StepSlot(obs, np.full(count, 77.0), np.ones(count, bool), np.ones(count, bool))


def plain(infos, count, mode):
    """One dict per env, without seconds, and without what ours report in addition."""
    rows = split_infos(infos, count)
    for row in rows:
        for info in (row, row.get("final_info", {})):
            if "episode" in info:
                episode = info["episode"]
                info["episode"] = {key: float(episode[key]) for key in ("r", "l")}
        if mode == "SameStep":
            row.pop("episode", None)
    return [in_order(row) for row in rows]


def in_order(info):
    """The keys of batched infos have the order of the rows, which `recv` changes."""
    if not isinstance(info, dict):
        return info
    return {key: in_order(info[key]) for key in sorted(info)}


def run(envs, mode, seed, num_calls, *, with_out, with_sends):
    """Return all that comes of calls drawn with a seed; rows of `recv` by env."""
    rng = np.random.default_rng(seed)
    count, found = envs.num_envs, []
    envs.action_space.seed(seed)
    obs, infos = envs.reset(seed=seed)
    found.append(("reset", obs.copy(), plain(infos, count, mode)))
    slot = slot_of(envs) if with_out else None
    for _ in range(num_calls):
        actions = envs.action_space.sample()
        over = np.zeros(count, bool)
        kind = rng.random()
        if with_sends and kind < 0.4:
            ids = rng.permutation(count)[: rng.integers(1, count + 1)]
            envs.send(actions[ids], ids)
            batch = envs.recv()
            order = np.argsort(batch.env_ids)
            rows = plain(batch.infos, len(ids), mode)
            over[batch.env_ids] = batch.terminations | batch.truncations
            found.append(("recv", *(part[order] for part in batch[:4]), [rows[i] for i in order]))
        else:
            if with_out and kind < 0.8:
                result = envs.step(actions, out=slot)
                assert all(a is b for a, b in zip(result, slot, strict=False))
            else:
                result = envs.step(actions)
            over[:] = result[2] | result[3]
            found.append(
                ("step", *(part.copy() for part in result[:4]), plain(result[4], count, mode))
            )
        if mode == "Disabled":
            also = over | (rng.random(count) < 0.1)
            if over.any():
                obs, infos = envs.reset(options={"reset_mask": also})
                found.append(("mask", obs.copy(), plain(infos, count, mode)))
    return found
