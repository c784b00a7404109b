"""Observations stored once: where the next ones are found."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from replay_model import RINGS

from buffers import (
    BufferMisuseError,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)

# 12 bytes of numbers, laid side by side 16 bytes apart
PADDED = Dict(time=Box(0, 100, (1,), np.float64), place=Box(-1, 1, (1,)))


def at_time(t, num_envs=2):
    return {
        "time": np.full((num_envs, 1), t, np.float64),
        "place": np.zeros((num_envs, 1), np.float32),
    }


def at_step(t):
    flags = np.zeros(2, bool)
    return {
        "obs": at_time(t), "next_obs": at_time(t + 1), "actions": np.zeros(2, int),
        "rewards": np.ones(2), "terminations": flags, "truncations": flags,
    }  # fmt: skip


def fill(buffer, steps):
    for t in steps:
        buffer.add(**at_step(t))


def end_episodes(buffer, steps):
    for t in steps:
        end = {"next_obs": at_time(50), "terminations": np.ones(2, bool)}
        buffer.add(**{**at_step(t), **end})


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("kind", RINGS)
def test_windows_go_on_through_nested_observations_whose_bytes_are_padded(kind, staged, tmp_path):
    def make():
        return kind(
            100, PADDED, Discrete(2), num_envs=2, n_step=3, gamma=0.5, store_next=False,
            staged=staged,
        )  # fmt: skip

    buffer = make()
    fill(buffer, range(5))
    buffer.save(tmp_path / "saved")
    buffer = make()
    buffer.load(tmp_path / "saved")
    fill(buffer, range(5, 10))
    batch = buffer.get(buffer.order())
    assert sorted(batch.rewards.tolist()) == [1.0] * 2 + [1.5] * 2 + [1.75] * 16
    assert (batch.next_obs["time"] - batch.obs["time"])[batch.rewards == 1.75].unique() == 3


@pytest.mark.parametrize("kind", RINGS)
def test_memory_that_a_captured_draw_reads_does_not_move(kind, monkeypatch):
    capacity = 50 if kind is PerEnvReplayBuffer else 100
    buffer = kind(capacity, PADDED, Discrete(2), num_envs=2, store_next=False, staged=True)
    end_episodes(buffer, range(6))  # of 16 and one for each env
    with monkeypatch.context() as patch:
        patch.setattr(buffer, "_is_capturing", lambda: True)
        buffer.sample(4)
    once = buffer._table.once
    before = once.units.data_ptr()
    with pytest.raises(BufferMisuseError, match=r"the 18 there is room for.*reserve_final_obs"):
        end_episodes(buffer, range(7, 20))
    assert once.units.data_ptr() == before and 12 < len(buffer) <= 18
    assert set(buffer.get(buffer.order()).next_obs["time"].reshape(-1).tolist()) == {50.0}
    buffer.reserve_final_obs(102)
    end_episodes(buffer, range(20, 30))
    before = once.units.data_ptr()
    buffer.sample(4)
    end_episodes(buffer, range(30, 200))
    assert once.units.data_ptr() == before
    assert set(buffer.sample(64).next_obs["time"].reshape(-1).tolist()) == {50.0}


def nothing_of(space, num_rows):
    if isinstance(space, Dict):
        return {name: nothing_of(part, num_rows) for name, part in space.items()}
    return () if isinstance(space, Tuple) else np.zeros((num_rows, *space.shape), space.dtype)


def leaves_of(tree):
    if isinstance(tree, dict | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves_of(part)
    else:
        yield tree


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("kind", "space", "options"),
    [
        (SharedReplayBuffer, Box(-1, 1, (0,)), {"store_next": False}),
        (SharedReplayBuffer, Dict(a=Box(-1, 1, (3, 0)), b=Dict()), {"n_step": 2, "gamma": 0.5}),
        (SharedReplayBuffer, Dict(), {}),
        (PerEnvReplayBuffer, Tuple(()), {"store_next": False, "n_step": 2, "gamma": 0.5}),
        (PrioritizedReplayBuffer, Dict(), {"store_next": False}),
    ],
    ids=str,
)
def test_observations_without_a_number_are_taken(kind, space, options, staged, tmp_path):
    rng = np.random.default_rng(0)

    def make(space, **more):
        return kind(15, space, Discrete(3), num_envs=2, seed=0, **{**options, **more})

    buffer, direct = (make(space, staged=staged) for _ in range(2))
    plain = make(Box(-1, 1, (1,)), store_next=True)
    for _ in range(20):
        rows = {
            "actions": rng.integers(0, 3, 2), "rewards": rng.random(2, np.float32),
            "terminations": rng.random(2) < 0.2, "truncations": rng.random(2) < 0.2,
        }  # fmt: skip
        obs = nothing_of(space, 2)
        buffer.add(obs=obs, next_obs=obs, **rows)
        tensors = {name: torch.from_numpy(column) for name, column in rows.items()}
        there = obs if not isinstance(space, Box) else torch.from_numpy(obs)
        direct.add(obs=there, next_obs=there, **tensors)
        plain.add(obs=np.zeros((2, 1), np.float32), next_obs=np.ones((2, 1), np.float32), **rows)
    buffer.save(tmp_path / "saved")
    loaded = make(space, staged=staged)
    loaded.load(tmp_path / "saved")
    for other in (buffer, loaded, direct):
        found, expected = (one.get(plain.order()) for one in (other, plain))
        for name in ("actions", "rewards", "terminations", "truncations", "discounts"):
            assert getattr(found, name).equal(getattr(expected, name))
        for obs in (found.obs, found.next_obs, other.rows()["next_obs"]):
            assert all(leaf.numel() == 0 for leaf in leaves_of(obs))
        assert list(found._asdict())[:2] == ["obs", "next_obs"]
        assert other.sample(7, columns=("next_obs",)).next_obs is not None
    assert "kept" not in buffer.memory()


@pytest.mark.parametrize("staged", [False, True])
def test_an_add_that_replaces_all_keeps_its_own_final_observations(staged):
    """All rows have observations beside them, and so have those that take their places."""
    space = Box(-np.inf, np.inf, (1,), np.float32)
    buffer = SharedReplayBuffer(16, space, Discrete(2), num_envs=1, store_next=False, staged=staged)
    for first in (0, 100, 200):
        obs = first + 2 * np.arange(16, dtype=np.float32)[:, None]
        flags = {"terminations": np.zeros(16, bool), "truncations": np.ones(16, bool)}
        ids = np.zeros(16, np.int64)
        given = {"actions": np.zeros(16, np.int64), "rewards": np.zeros(16), "env_ids": ids}
        buffer.add(obs=obs, next_obs=obs + 1, **given, **flags)
        batch = buffer.get(buffer.order())
        np.testing.assert_array_equal(batch.obs, obs)
        np.testing.assert_array_equal(batch.next_obs, obs + 1)
