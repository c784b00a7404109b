"""Observations stored once: where the next ones are found."""

import types

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from buffers import PerEnvReplayBuffer, PrioritizedReplayBuffer, SharedReplayBuffer, successors

# 12 bytes of numbers, laid side by side 16 bytes apart
PADDED = Dict(time=Box(0, 100, (1,), np.float64), place=Box(-1, 1, (1,)))


def at_time(t, num_envs=2):
    return {
        "time": np.full((num_envs, 1), t, np.float64),
        "place": np.zeros((num_envs, 1), np.float32),
    }


@pytest.fixture
def _dirty_memory(monkeypatch):
    """Memory that is not initialised has something else in it every time."""
    rng = np.random.default_rng(0)

    def empty(shape, dtype=np.float64):
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = rng.integers(0, 256, array.nbytes, np.uint8)
        return array

    names = {name: getattr(np, name) for name in dir(np) if not name.startswith("__")}
    monkeypatch.setattr(successors, "np", types.SimpleNamespace(**{**names, "empty": empty}))


def fill(buffer, steps):
    flags = np.zeros(2, bool)
    for t in steps:
        buffer.add(
            obs=at_time(t), next_obs=at_time(t + 1), actions=np.zeros(2, int),
            rewards=np.ones(2), terminations=flags, truncations=flags,
        )  # fmt: skip


@pytest.mark.usefixtures("_dirty_memory")
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("kind", [SharedReplayBuffer, PerEnvReplayBuffer, PrioritizedReplayBuffer])
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
    kept = buffer._storage.successors
    assert not kept.slots.any()  # no final observation takes memory
