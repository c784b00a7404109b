"""Adds that are interrupted at any column leave what was added before, on full rings, too."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from replay_model import ACTIONS, OBS, CountingEnvs, TornModel, check_against, columns_of

from buffers import (
    BufferMisuseError,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)  # fmt: skip
from buffers.replay import sequences
from buffers.replay import table as tables
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

            def stop(columns, *rest, number=number):
                write_columns(dict([*columns.items()][:number]), *rest)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(tables, "write_columns", stop)
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


@pytest.mark.parametrize("name", ["commit", "choose", "let_go", "before commit"])
def test_an_interrupt_around_slots_loses_none(name, monkeypatch):
    buffer = SharedReplayBuffer(9, OBS, ACTIONS, num_envs=3, store_next=False)
    envs, model = CountingEnvs(3), TornModel(9, 3, False)
    once = buffer._table.once
    for turn in range(40):
        made = envs.random_steps(range(3), 0.4)
        if turn % 3 == 2:
            is_counted, method = "commit" in name, name.split()[-1]
            whole = getattr(once, method)

            def stop(*arguments, whole=whole):
                if name != "before commit":
                    whole(*arguments)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(once, method, stop)
                buffer.add(**columns_of(made))
            if is_counted:  # all was written
                model.add(made)
                check_against(buffer, model)
                continue
            if name == "let_go":
                model.tear(made)
            check_against(buffer, model)
        buffer.add(**columns_of(made))
        model.add(made)
        check_against(buffer, model)
    before = sorted(once.free[: once.num_free[0]].tolist())
    buffer.load_state_dict(buffer.state_dict())  # which finds out anew what is free
    assert before == sorted(once.free[: once.num_free[0]].tolist())


def rows_of(begin, count, *, is_over=True):
    obs = np.arange(begin, begin + count, dtype=np.float32)[:, None]
    return {
        "obs": obs, "next_obs": -obs, "actions": np.zeros(count, np.int64),
        "rewards": np.ones(count), "terminations": np.full(count, is_over),
        "truncations": np.zeros(count, np.bool_),
    }  # fmt: skip


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("options", [{}, {"staged": True}])
@pytest.mark.parametrize("count", [10, 1000])
def test_after_an_interrupted_add_of_a_whole_ring_the_next_rows_can_be_drawn(
    count, options, monkeypatch
):
    buffer = SharedReplayBuffer(10, WIDE, Discrete(2), **options)
    buffer.add(**rows_of(0, 10))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(buffer._table, "_write", interrupt)
        buffer.add(**rows_of(100, count))
    with pytest.raises(BufferMisuseError, match="the buffer is empty"):
        buffer.sample(4)
    for begin in range(0, 4):
        buffer.add(**rows_of(begin, 1))
        assert buffer.get(buffer.order()).obs[:, 0].tolist() == [*range(begin + 1)]


def test_sequences_after_an_interrupt_behind_the_rows(monkeypatch):
    buffer = SharedReplayBuffer(4, WIDE, Discrete(2), num_envs=1, track_episodes=True, seed=0)
    for begin in range(4):
        buffer.add(**rows_of(begin, 1, is_over=False))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sequences, "number_rows", interrupt)
        buffer.add(**rows_of(100, 1))
    drawn = buffer.sample_sequences(40, 2).obs[..., 0].tolist()
    assert set(map(tuple, drawn)) <= {(1, 2), (2, 3), (3, 100)}


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
