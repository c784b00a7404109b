"""Toy envs, how they share their work, random actions, and what comes of these."""

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from jit.toy_env import PARAMS, TOY

from vecenv import StepSlot
from vecenv.jit import JitVectorEnv, runner

NUM_STEPS = 40


def bundled_ids(*packages):
    """Names of the envs whose vector envs are in some packages, in order."""
    points = {name: str(spec.vector_entry_point) for name, spec in gym.registry.items()}
    return sorted(name for name, point in points.items() if point.startswith(packages))


def make(num_envs=5, **options):
    return JitVectorEnv(TOY, num_envs, params=PARAMS, **options)


def split_jobs(monkeypatch, rows_per_line):
    """Split jobs however short they are."""
    monkeypatch.setattr(runner.SplitChoice, "num_parts", lambda self, num_rows: 100)
    monkeypatch.setattr(runner, "ROWS_PER_LINE", rows_per_line)


def random_actions(num_envs, num_steps=NUM_STEPS, seed=0):
    return np.random.default_rng(seed).integers(-1, 2, (num_steps, num_envs))


def slot_for(envs):
    shape, kind = envs.observation_space.shape, envs.observation_space.dtype
    num_envs = envs.num_envs
    return StepSlot(
        envs.allocate(shape, kind),
        envs.allocate((num_envs,), np.float32),
        envs.allocate((num_envs,), np.bool_),
        envs.allocate((num_envs,), np.bool_),
    )


def roll(envs, actions, seed=3):
    """Reset and step with these actions; with autoreset disabled, reset what has ended."""
    frames = [envs.reset(seed=seed)[0]]
    for row in actions:
        *arrays, _ = envs.step(row)
        over = arrays[2] | arrays[3]
        if envs.autoreset_mode is AutoresetMode.DISABLED and over.any():
            arrays.append(envs.reset(options={"reset_mask": over})[0])
        frames.extend(arrays)
    return frames


def assert_same(frames, others):
    for frame, other in zip(frames, others, strict=True):
        np.testing.assert_array_equal(frame, other)


def assert_same_states(states, others):
    """Compare what `state_dict` returned, but for the bytes between fields."""
    assert states.keys() == others.keys()
    for name, records in others.items():
        for field in records.dtype.names or ():
            np.testing.assert_array_equal(states[name][field], records[field], field)
