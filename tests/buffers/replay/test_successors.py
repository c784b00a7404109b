"""Observations stored once: where the next ones are found."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from replay_model import RINGS

from buffers import BufferMisuseError, PerEnvReplayBuffer

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


def end_episodes(buffer, steps):
    for t in steps:
        end = {"next_obs": at_time(50), "terminations": np.ones(2, bool)}
        buffer.add(**{**at_step(t), **end})


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
