"""A pool and SyncVectorEnv with the same envs, and results in a comparable order."""

import functools

import numpy as np
from envs import NUM_ENVS, RandomEnv, restart_ended
from equality import assert_same
from gymnasium.vector import AutoresetMode

from vecenv import SyncVectorEnv
from vecenv.shm.env import AsyncVectorEnv


def in_order(value):
    """Sort the keys of dicts, whose order says who was first and nothing else."""
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    if isinstance(value, tuple):
        return tuple(in_order(part) for part in value)
    return value


def assert_same_results(actual, expected, path="result"):
    assert_same(in_order(actual), in_order(expected), path)


def twins(space, mode=AutoresetMode.NEXT_STEP, **options):
    """Five envs that draw everything at random, in worker processes and in this one."""
    env_fns = [functools.partial(RandomEnv, space)] * NUM_ENVS
    return AsyncVectorEnv(env_fns, autoreset_mode=mode, **options), SyncVectorEnv(
        env_fns, autoreset_mode=mode
    )


def assert_steps_alike(pool, sync, num_steps, path=""):
    rng = np.random.default_rng(5)
    for step in range(num_steps):
        actions = rng.integers(0, 4, pool.num_envs)
        expected = sync.step(actions)
        assert_same_results(pool.step(actions), expected, f"{path} step {step}")
        assert_same_results(restart_ended(pool, expected), restart_ended(sync, expected))
