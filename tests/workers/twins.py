"""A pool and SyncVectorEnv with the same envs."""

import functools

import numpy as np
from envs import NUM_ENVS, RandomEnv, restart_ended
from equality import assert_same
from gymnasium.vector import AutoresetMode

from vecenv import SyncVectorEnv
from vecenv.workers.env import AsyncVectorEnv


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
        assert_same(pool.step(actions), expected, f"{path} step {step}")
        assert_same(restart_ended(pool, expected), restart_ended(sync, expected))
