"""Batches drawn ahead: which they are."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from buffers import (
    BufferMisuseError,
    EpisodicReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)

SPACES = Box(-np.inf, np.inf, (1,)), Discrete(9)


def add(buffer, *numbers):
    """Transitions that are told apart by their observation."""
    obs = np.array(numbers, np.float32)[:, None]
    flags, zeros = np.zeros(len(obs), np.bool_), np.zeros(len(obs), np.int64)
    buffer.add(
        obs=obs, next_obs=obs + 1, actions=zeros, rewards=obs[:, 0], terminations=flags,
        truncations=flags,
    )  # fmt: skip


def make(kind=SharedReplayBuffer, capacity=50, **options):
    buffer = kind(capacity, *SPACES, seed=3, **options)
    add(buffer, *range(40))
    return buffer


@pytest.mark.parametrize("kind", [SharedReplayBuffer, PrioritizedReplayBuffer])
@pytest.mark.parametrize("staged", [False, True])
def test_batches_are_those_of_as_many_draws(kind, staged):
    plain, ahead = make(kind, staged=staged), make(kind, staged=staged)
    with ahead.prefetch(7, depth=3) as batches:
        for _ in range(10):
            expected, found = plain.sample(7), next(batches)
            assert torch.equal(found.obs, expected.obs)
            assert torch.equal(found.indices, expected.indices)
    # What was drawn and not taken counts as never drawn.
    assert torch.equal(ahead.sample(7).obs, plain.sample(7).obs)


def test_a_batch_shows_the_buffer_as_it_was_depth_batches_before():
    for depth in (1, 2, 5):
        buffer, model = make(capacity=40), make(capacity=40)
        expected = [model.sample(6).obs for _ in range(depth + 1)]  # the first call asks for these
        with buffer.prefetch(6, depth=depth) as batches:
            for k in range(30):
                assert torch.equal(next(batches).obs, expected[k])
                numbers = range(100 * (k + 1), 100 * (k + 1) + 13)
                add(buffer, *numbers)
                add(model, *numbers)
                expected.append(model.sample(6).obs)  # asked for by the next call


def test_errors_reach_the_caller_and_the_next_call_draws_again():
    buffer = SharedReplayBuffer(50, *SPACES, seed=3)
    with buffer.prefetch(4, columns=("obs",)) as batches:
        for _ in range(3):
            with pytest.raises(BufferMisuseError, match="empty"):
                next(batches)
        add(buffer, 1, 2, 3)
        assert len(next(batches)) == 4
    with pytest.raises(BufferMisuseError, match="closed"):
        next(batches)
    batches.close()
    wrong: Any = ({"out": None}, {"no": 1}, {"depth": 0}, {"depth": 65}, {"device": "nowhere"})
    for options in wrong:
        with pytest.raises(BufferMisuseError):
            buffer.prefetch(4, **options)
    with pytest.raises(BufferMisuseError, match="batch_size"):
        buffer.prefetch(0)
    first, second = buffer.prefetch(4), buffer.prefetch(4)
    assert len(next(second)) == 4
    with pytest.raises(BufferMisuseError, match="closed"):  # by the other
        next(first)
    second.close()


def test_saving_and_copying_forget_what_was_drawn_ahead(tmp_path):
    buffer, plain = make(), make()
    with buffer.prefetch(5, depth=2) as batches:
        for _ in range(2):
            next(batches)
            plain.sample(5)
        state, clone = buffer.state_dict(), copy.deepcopy(buffer)
        buffer.save(tmp_path / "saved")
        other = make()
        other.load_state_dict(state)
        for _ in range(3):
            expected = plain.sample(5).obs
            for found in (next(batches), other.sample(5), clone.sample(5)):
                assert torch.equal(found.obs, expected)
        buffer.load(tmp_path / "saved")
        again = other.__class__(50, *SPACES)
        again.load(tmp_path / "saved")
        assert torch.equal(next(batches).obs, again.sample(5).obs)


@pytest.mark.parametrize("staged", [False, True])
def test_priorities_of_rows_overwritten_since_the_draw_are_left_out(staged):
    buffer = PrioritizedReplayBuffer(8, *SPACES, alpha=1.0, seed=0, staged=staged)
    add(buffer, *range(8))
    with buffer.prefetch(64, depth=2) as batches:
        batch = [next(batches) for _ in range(3)][-1]
        add(buffer, 100, 101, 102)  # rows 0, 1 and 2
        buffer.update_priorities(batch, torch.full((64,), 0.25))
    assert buffer.priorities.tolist() == [1.0] * 3 + [0.25] * 5
    add(buffer, *range(20))
    buffer.update_priorities(batch, torch.full((64,), 0.5))
    assert buffer.priorities.tolist() == [1.0] * 8
    with pytest.raises(BufferMisuseError, match="priorities has shape"):
        buffer.update_priorities(batch, torch.ones(3))
    with pytest.raises(BufferMisuseError, match="not drawn"):
        buffer.update_priorities(buffer.get([0]), [1.0])


def test_episodes_and_devices():
    plain, ahead = (EpisodicReplayBuffer(100, *SPACES, seed=1) for _ in range(2))
    for buffer in (plain, ahead):
        obs = np.arange(31, dtype=np.float32)[:, None]
        buffer.add_episode({"obs": obs, "actions": np.zeros(30, int), "rewards": np.ones(30)})
    with ahead.prefetch(4, method="sample_sequences", sequence_length=5, device="cpu") as batches:
        for _ in range(4):
            assert torch.equal(next(batches).obs, plain.sample_sequences(4, 5).obs)
    with ahead.prefetch(4, discount=0.5, columns=("future_obs",), device="cpu") as batches:
        assert torch.equal(next(batches).future_obs, plain.sample(4, 0.5).future_obs)
    with pytest.raises(BufferMisuseError, match="method is"):
        ahead.prefetch(4, method="clear")
