"""Adds of columns in any form leave the same rows, and refuse the same."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from buffers import BufferMisuseError, MultiprocessReplayBuffer, SharedReplayBuffer

SPACE = Dict({"a": Box(-9, 9, (3,)), "b": Box(0, 255, (2, 2), np.uint8)})
NUM_ENVS = 2


def observe(rng):
    return {
        "a": rng.standard_normal((NUM_ENVS, 3)).astype(np.float32),
        "b": rng.integers(0, 9, (NUM_ENVS, 2, 2)).astype(np.uint8),
    }


def steps(count, seed=0):
    rng, obs = np.random.default_rng(seed), None
    for _ in range(count):
        obs, following = obs or observe(rng), observe(rng)
        over = rng.random(NUM_ENVS) < 0.3
        yield {
            "obs": obs, "next_obs": following, "actions": rng.integers(0, 3, NUM_ENVS),
            "rewards": rng.random(NUM_ENVS), "terminations": over, "truncations": over & False,
        }  # fmt: skip
        obs = observe(rng) if over.all() else following


def other_form(step, form):
    """The same values as other arrays, which some calls read column by column."""
    if form == 1:
        obs = step["obs"]
        return {**step, "obs": {"b": obs["b"], "a": obs["a"].astype(">f4")}}
    if form == 2:
        return {**step, "actions": step["actions"].tolist()}
    if form == 3:
        return {**step, "rewards": torch.from_numpy(step["rewards"])}
    return step


@pytest.mark.parametrize("store_next", [True, False])
def test_both_ways_leave_the_same(store_next):
    options = {"num_envs": NUM_ENVS, "n_step": 2, "gamma": 0.9, "store_next": store_next}
    quick, mixed, whole = (
        SharedReplayBuffer(20, SPACE, Discrete(3), seed=0, **{**options, **changes})
        for changes in ({}, {}, {"store_next": True})
    )
    for number, step in enumerate(steps(50)):
        quick.add(**step)
        mixed.add(**other_form(step, number % 4))
        whole.add(**step)
        drawn = [buffer.sample(30) for buffer in (quick, mixed, whole)]
        for name in ("obs", "next_obs", "actions", "rewards", "discounts", "terminations"):
            for other in drawn[1:]:
                expected = getattr(drawn[0], name)
                torch.testing.assert_close(getattr(other, name), expected, rtol=0, atol=0)


def test_what_does_not_fit_changes_nothing():
    buffer = SharedReplayBuffer(
        20, SPACE, Discrete(3), num_envs=NUM_ENVS, store_next=False, seed=0,
        extra_columns={"costs": Box(-1, 1, (2,))},
    )  # fmt: skip
    *_, step = steps(3)
    step["costs"] = np.zeros((NUM_ENVS, 2), np.float32)
    buffer.add(**step)
    before = buffer.state_dict()
    wrong = (
        {"rewards": np.array([np.nan, 1.0])}, {"actions": np.zeros(3, int)}, {"rewards": None},
        {"terminations": np.zeros(3, bool)}, {"obs": {"a": step["obs"]["a"]}}, {"costs": None},
        {"obs": {**step["obs"], "b": None}},
        {"env_ids": np.array([0, 5])}, {"truncations": 3}, {"rewards": np.float64(3)},
        {"costs": np.zeros((NUM_ENVS, 3), np.float32)}, {"more": step["costs"]},
        {"next_obs": {**step["obs"], "c": step["costs"]}}, {"env_ids": np.zeros((2, 1), int)},
        {"env_ids": np.zeros(0, int)},
    )  # fmt: skip
    for changes in wrong:
        with pytest.raises(BufferMisuseError):
            buffer.add(**{**step, **changes})
    after = buffer.state_dict()
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, after[name]), name


@pytest.mark.parametrize("kind", ["one process", "several"])
def test_ids_that_are_none_are_not_those_of_whole_steps(kind):
    spaces = Box(-9, 9, (3,)), Discrete(3)
    if kind == "several":
        whole = MultiprocessReplayBuffer(20, *spaces, num_writers=1, num_envs=NUM_ENVS)
        buffer = whole.writer(0)
    else:
        buffer = SharedReplayBuffer(20, *spaces, num_envs=NUM_ENVS, track_env=True)
    obs, flags = np.zeros((2, 3), np.float32), np.zeros(2, bool)
    with pytest.raises(BufferMisuseError, match="env_ids"):
        buffer.add(
            obs=obs, next_obs=obs, actions=np.zeros(2, np.int64), rewards=np.zeros(2),
            terminations=flags, truncations=flags, env_ids=np.zeros(0, np.int64),
        )  # fmt: skip
