"""Batches of some columns only: those of a whole batch, drawn by the same seed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from buffers import (
    BufferMisuseError,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)

NUM_ENVS = 3
FLAT = Box(-1, 1, (5,))
NESTED = Dict({"a": Box(-1, 1, (3,)), "b": Box(0, 255, (2, 2), np.uint8)})
FRAMES = Box(0, 255, (2, 6, 6), np.uint8)


def make_obs(space, rng, count) -> Any:
    if isinstance(space, Dict):
        return {key: make_obs(part, rng, count) for key, part in space.spaces.items()}
    if space.dtype == np.uint8:
        return rng.integers(0, 255, (count, *space.shape), np.uint8)
    return rng.standard_normal((count, *space.shape)).astype(np.float32)


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def fill(buffer, steps=40):
    """Steps of envs; frames move on in stacks, and some episodes end."""
    rng, space = np.random.default_rng(0), buffer.observation_space
    obs = make_obs(space, rng, NUM_ENVS)
    if space is FRAMES:
        obs = np.repeat(obs[:, :1], 2, axis=1)
    for _ in range(steps):
        following = make_obs(space, rng, NUM_ENVS)
        over = rng.random(NUM_ENVS) < 0.2
        if space is FRAMES:
            following[:, 0] = obs[:, 1]
        buffer.add(
            obs=obs, next_obs=following, actions=rng.integers(0, 4, NUM_ENVS),
            rewards=rng.standard_normal(NUM_ENVS), terminations=over,
            truncations=np.zeros(NUM_ENVS, np.bool_),
            costs=rng.standard_normal((NUM_ENVS, 2)).astype(np.float32),
        )  # fmt: skip
        obs = copy.deepcopy(following)
        if space is FRAMES:
            obs[over] = np.repeat(obs[over][:, :1], 2, axis=1)
    return buffer


CASES = {
    "plain": (SharedReplayBuffer, FLAT, {}),
    "three steps, once": (
        SharedReplayBuffer, NESTED, {"n_step": 3, "gamma": 0.9, "store_next": False},
    ),
    "three steps": (PrioritizedReplayBuffer, NESTED, {"n_step": 3, "gamma": 0.9}),
    "frames": (PrioritizedReplayBuffer, FRAMES, {"frame_stack": 2, "n_step": 2, "gamma": 0.5}),
    "per env": (PerEnvReplayBuffer, FLAT, {"track_env": True, "gamma": 0.9}),
}  # fmt: skip
CHOICES = [
    ("obs",), ("next_obs",), ["actions", "obs"], {"rewards"}, ("truncations", "costs"),
    ("discounts",), ("terminations", "next_obs", "actions"), ("indices",),
]  # fmt: skip


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_columns_are_those_of_a_whole_batch(case, staged):
    kind, space, options = CASES[case]
    if case == "per env":
        options = {**options, "over": "envs"}
    made = [
        fill(
            kind(
                30, space, Discrete(4), num_envs=NUM_ENVS, seed=1, staged=staged,
                extra_columns={"costs": Box(-9, 9, (2,))}, **options,
            )
        )
        for _ in range(2)
    ]  # fmt: skip
    whole, part = made
    for columns in CHOICES:
        expected, found = whole.sample(17), part.sample(17, columns=columns)
        reused = part.new_batch(17, columns)
        assert_equal(whole.sample(17).indices, part.sample(17, reused).indices)
        assert len(found) == 17
        assert torch.equal(found.indices, expected.indices)
        for name in set(columns) - {"costs"}:
            assert_equal(getattr(found, name), getattr(expected, name))
        assert list(found.extras) == (["costs"] if "costs" in columns else [])
        if "costs" in columns:
            assert torch.equal(found.costs, expected.costs)
        if found.weights is not None:
            assert torch.equal(found.weights, expected.weights)
        for name in {"obs", "next_obs", "actions"} - set(columns):
            with pytest.raises(AttributeError, match="columns="):
                getattr(found, name)
        given = part.get(found.indices, columns)
        for name in set(columns) - {"costs"}:
            assert_equal(getattr(given, name), getattr(expected, name))
        clone = pickle.loads(pickle.dumps(copy.deepcopy(found)))
        assert repr(clone) == repr(found)


def test_sequences_of_some_columns_are_those_of_all():
    options = {"num_envs": NUM_ENVS, "track_episodes": True, "seed": 1}
    extras = {"costs": Box(-9, 9, (2,))}
    whole, part = (
        fill(PrioritizedReplayBuffer(30, FLAT, Discrete(4), extra_columns=extras, **options))
        for _ in range(2)
    )
    how: Any = {"sequence_length": 3, "pad": True}
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
