"""Adds that are interrupted at any column leave what was added before, on full rings, too."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from replay_model import ACTIONS, OBS, CountingEnvs, TornModel, check_against, columns_of

from buffers import (
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)  # fmt: skip
from buffers.replay.table import write_columns

WIDE = Box(-9999, 9999, (1,), np.float32)
OPTIONS = {
    "plain": {},
    "three steps": {"n_step": 3, "gamma": 0.5},
    "stored once": {"store_next": False},
    "stored once, two steps": {"store_next": False, "n_step": 2, "gamma": 0.5},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", [SharedReplayBuffer, PerEnvReplayBuffer, PrioritizedReplayBuffer])
def test_what_is_drawn_after_an_interrupt_is_what_was_added_before(kind, option, monkeypatch):
    rng, options = np.random.default_rng(0), OPTIONS[option]
    buffer = kind(7, OBS, ACTIONS, num_envs=2, seed=0, **options)
    model, envs, table = TornModel(7, 2, kind is PerEnvReplayBuffer), CountingEnvs(2), buffer._table
    window = options.get("n_step", 1), options.get("gamma")
    for _ in range(120):
        ids = np.arange(2) if rng.random() < 0.5 else rng.integers(0, 2, rng.integers(1, 5))
        made = envs.random_steps(ids.tolist())
        if rng.random() < 0.5:
            number = rng.integers(len(table.columns) + 1)

            def stop(arrays, rows, table=table, number=number):
                write_columns(dict([*table._written.items()][:number]), arrays, rows)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(table, "_write", stop)
                buffer.add(**columns_of(made), env_ids=ids)
            model.tear(made)
            check_against(buffer, model, *window)
            if rng.random() < 0.3:
                state = buffer.state_dict()
                buffer.load_state_dict(state)
        buffer.add(**columns_of(made), env_ids=ids)  # once more, or at all
        model.add(made)
        check_against(buffer, model, *window)
        if len(buffer):
            live = {made.obs for made in model.live()}
            assert set(buffer.sample(8).obs[:, 0].int().tolist()) <= live
    if kind is PrioritizedReplayBuffer:
        held = buffer.order()
        assert (buffer.priorities[held] == 1.0).all()
        assert buffer.priorities.sum() == len(held)


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
