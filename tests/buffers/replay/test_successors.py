"""Observations stored once: where the next ones are found."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from replay_model import RINGS

from buffers import (
    BufferMisuseError,
    PerEnvReplayBuffer,
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
