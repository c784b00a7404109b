"""Batches of some columns only."""

import copy
import pickle

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from replay_model import ACTIONS, NESTED, OBS, CountingEnvs, columns_of

from buffers import BufferMisuseError, PrioritizedReplayBuffer

NUM_ENVS = 3


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def pair(kind, space, **options):
    """Two buffers that are the same."""
    extras = {"costs": Box(-9, 9, (2,))}
    made = [
        kind(30, space, ACTIONS, num_envs=NUM_ENVS, seed=1, extra_columns=extras, **options)
        for _ in range(2)
    ]
    envs, rng = CountingEnvs(NUM_ENVS), np.random.default_rng(0)
    for _ in range(40):
        columns = columns_of(envs.random_steps(range(NUM_ENVS)), space)
        costs = rng.standard_normal((NUM_ENVS, 2)).astype(np.float32)
        for buffer in made:
            buffer.add(**columns, costs=costs)
    return made


def test_other_columns_are_not_there():
    """What those that are there hold is compared by `fuzz.replays`."""
    whole, part = pair(PrioritizedReplayBuffer, NESTED, n_step=3, gamma=0.9)
    expected, found = whole.sample(17), part.sample(17, columns={"truncations", "costs"})
    assert len(found) == 17 and list(found.extras) == ["costs"]
    assert_equal(found.weights, expected.weights)
    for name in ("obs", "next_obs", "actions"):
        with pytest.raises(AttributeError, match="columns="):
            getattr(found, name)
    assert repr(pickle.loads(pickle.dumps(copy.deepcopy(found)))) == repr(found)
    assert not hasattr(part.sample(17, columns=["discounts"]), "rewards")


def test_sequences_of_some_columns_are_those_of_all():
    whole, part = pair(PrioritizedReplayBuffer, OBS, track_episodes=True)
    how = {"sequence_length": 3, "pad": True}
    for columns in (("obs",), ["rewards", "costs"], ("mask", "boundaries")):
        expected, found = (
            whole.sample_sequences(9, **how),
            part.sample_sequences(9, **how, columns=columns),
        )
        for name in {*columns, "indices", "mask", "steps", "learn_mask", "is_first", "weights"}:
            assert_equal(getattr(found, name), getattr(expected, name))
        assert set(found.extras) == {"costs"} & set(columns) and len(found) == 9
        with pytest.raises(AttributeError, match="columns="):
            _ = found.actions
        part.update_sequence_priorities(found, np.ones((9, 3)))
        whole.update_sequence_priorities(expected, np.ones((9, 3)))
    with pytest.raises(BufferMisuseError, match="columns is"):
        part.sample_sequences(9, **how, columns=("discounts",))
