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


def test_rows_of_an_interrupted_add_belong_to_the_episode_before_a_cut(monkeypatch):
    buffer = SharedReplayBuffer(16, WIDE, Discrete(2), num_envs=1, track_episodes=True)
    buffer.add(**rows_of(0, 2, is_over=False))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(buffer._sequences, "follow", interrupt)
        buffer.add(**rows_of(2, 1, is_over=False))
    buffer.cut_episodes()
    buffer.add(**rows_of(3, 3, is_over=False))
    batch = buffer.sample_sequences(200, 1)
    steps = dict(zip(batch.obs[:, 0, 0].int().tolist(), batch.steps[:, 0].tolist(), strict=True))
    assert steps == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("call", range(2))
def test_no_row_follows_one_that_was_lost_between(call, staged, monkeypatch):
    """The sum of each row's rewards, powers of two, is that of consecutive steps."""
    options = {"n_step": 3, "gamma": 1.0, "staged": staged}
    buffer = SharedReplayBuffer(16, WIDE, Discrete(2), num_envs=1, **options)
    calls, convert = [], buffer._table._int32

    def interrupted(array):
        calls.append(array)
        if len(calls) == call + 1:
            raise KeyboardInterrupt
        return convert(array)

    def add(step):
        buffer.add(**rows_of(step, 1, is_over=False) | {"rewards": np.array([2.0**step])})

    for step in range(3):
        add(step)
    monkeypatch.setattr(buffer._table, "_int32", interrupted)
    with pytest.raises(KeyboardInterrupt):
        add(3)
    for step in range(4, 8):
        add(step)
    assert len(buffer) == 7 + call  # the second call comes behind the commit
    batch = buffer.get(buffer.order())
    for first, total in zip(
        batch.obs[:, 0].int().tolist(), batch.rewards.int().tolist(), strict=True
    ):
        assert total in {2**first * (2**count - 1) for count in (1, 2, 3)}


def test_as_many_rows_as_envs_may_be_of_one_env():
    buffer = SharedReplayBuffer(16, WIDE, Discrete(2), num_envs=2, n_step=2, gamma=1.0)
    for begin in range(0, 6, 2):
        buffer.add(**rows_of(begin, 2, is_over=False), env_ids=[1, 1])
    assert buffer.get(buffer.order()).rewards.tolist() == [2.0] * 5 + [1.0]
