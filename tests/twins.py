"""Two vector envs of the same envs, of which one is SyncVectorEnv, and that they do the same."""

import functools

import numpy as np
from envs import NUM_ENVS, RandomEnv, restart_ended
from equality import assert_same
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import create_empty_array

from vecenv import AsyncVectorEnv, StepBatch, StepSlot, SyncVectorEnv
from vecenv.core.batches import take_rows
from vecenv.core.infos import take_infos


def twins(space, mode=AutoresetMode.NEXT_STEP, *, make=AsyncVectorEnv, **options):
    """Five envs that draw everything at random, elsewhere and in this process."""
    env_fns = [functools.partial(RandomEnv, space)] * NUM_ENVS
    return make(env_fns, autoreset_mode=mode, **options), SyncVectorEnv(
        env_fns, autoreset_mode=mode
    )


def assert_steps_alike(envs, sync, num_steps, path=""):
    rng = np.random.default_rng(5)
    for step in range(num_steps):
        actions = rng.integers(0, 4, envs.num_envs)
        expected = sync.step(actions)
        assert_same(envs.step(actions), expected, f"{path} step {step}")
        assert_same(restart_ended(envs, expected), restart_ended(sync, expected))


def assert_sends_alike(envs, sync, num_steps):
    """Send in random parts, receive in others; every row is the one that step gives that env.

    Returns:
        The env ids in the order sent and in the order received, of each step.
    """
    space, rng, orders = envs.single_observation_space, np.random.default_rng(8), []
    for step in range(num_steps):
        actions = rng.integers(0, 4, NUM_ENVS)
        expected = sync.step(actions)
        cuts = np.sort(rng.integers(0, NUM_ENVS + 1, size=2))
        parts = [part for part in np.split(rng.permutation(NUM_ENVS), cuts) if len(part)]
        for ids in parts:
            envs.send(actions[ids], ids)
        received = []
        while len(received) < NUM_ENVS:
            batch = envs.recv(int(rng.integers(1, NUM_ENVS - len(received) + 1)), timeout=20)
            assert isinstance(batch, StepBatch) and batch.env_ids.dtype == np.int64
            ids, path = batch.env_ids, f"step {step} envs {batch.env_ids}"
            received += ids.tolist()
            assert_same(batch.obs, take_rows(space, expected[0], ids), path)
            for came, full in zip(batch[1:4], expected[1:4], strict=True):
                assert_same(came, full[ids], path)
            assert_rows(batch.infos, take_infos(expected[4], ids))
        assert sorted(received) == list(range(NUM_ENVS))
        assert_same(restart_ended(envs, expected), restart_ended(sync, expected))
        orders.append((np.concatenate(parts).tolist(), received))
    return orders


def assert_rows(infos, expected):
    """Infos of some rows: fields that none of them has may be missing."""
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_rows(infos.get(key, {}), value)
        elif key.startswith("_") or (mask := expected[f"_{key}"]).any():
            if key in infos:
                assert_same(infos[key], value, key)
            else:
                assert not value.any(), key
        else:
            assert key not in infos or not mask.any()
    assert set(infos) <= set(expected)


def make_slot(envs, reward_dtype=np.float64):
    obs = create_empty_array(envs.single_observation_space, envs.num_envs, envs.allocate)
    rewards = envs.allocate((envs.num_envs,), reward_dtype)
    flags = [envs.allocate((envs.num_envs,), np.bool_) for _ in range(2)]
    return StepSlot(obs, rewards, *flags)
