"""Loads and adds that are interrupted; `fuzz.replays` interrupts adds at any instruction."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from buffers import SharedReplayBuffer

WIDE = Box(-9999, 9999, (1,), np.float32)


def rows_of(begin, count, *, is_over=True):
    obs = np.arange(begin, begin + count, dtype=np.float32)[:, None]
    return {
        "obs": obs, "next_obs": -obs, "actions": np.zeros(count, np.int64),
        "rewards": np.ones(count), "terminations": np.full(count, is_over),
        "truncations": np.zeros(count, np.bool_),
    }  # fmt: skip


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("options", [{"store_next": False}, {"staged": True}])
def test_after_an_interrupted_load_nothing_of_it_can_be_drawn(options, monkeypatch):
    buffer = SharedReplayBuffer(8, WIDE, Discrete(2), num_envs=1, **options)
    other = SharedReplayBuffer(8, WIDE, Discrete(2), num_envs=1, **options)
    buffer.add(**rows_of(1, 4))
    other.add(**rows_of(50, 6))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(buffer._table, "restore", interrupt)
        buffer.load_state_dict(other.state_dict())
    assert len(buffer) == 0
    for begin in range(20, 40):
        buffer.add(**rows_of(begin, 1))
        held = buffer.get(buffer.order())
        wanted = [*range(max(20, begin - 7), begin + 1)]
        assert held.obs[:, 0].tolist() == wanted
        assert held.next_obs[:, 0].tolist() == [-number for number in wanted]
        assert set(buffer.sample(50).obs[:, 0].int().tolist()) <= set(wanted)
