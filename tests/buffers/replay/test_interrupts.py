"""Adds that are interrupted at any column leave what was added before, on full rings, too."""

import numpy as np
import pytest
from replay_model import ACTIONS, OBS, CountingEnvs, TornModel, check_against, columns_of

from buffers import PerEnvReplayBuffer, PrioritizedReplayBuffer, SharedReplayBuffer
from buffers.replay import table as tables
from buffers.replay.table import write_columns

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


@pytest.mark.parametrize("name", ["finish", "write", "prepare"])
def test_an_interrupt_around_slots_loses_none(name, monkeypatch):
    buffer = SharedReplayBuffer(9, OBS, ACTIONS, num_envs=3, store_next=False)
    envs, model = CountingEnvs(3), TornModel(9, 3, False)
    once = buffer._table.once
    for turn in range(40):
        made = envs.random_steps(range(3), 0.4)
        if turn % 3 == 2:
            whole = getattr(once, name)

            def stop(*arguments, whole=whole):
                whole(*arguments)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(once, name, stop)
                buffer.add(**columns_of(made))
            if name == "finish":  # all was written, and the next call lets it count
                model.add(made)
                check_against(buffer, model)
                continue
            if name == "write":
                model.tear(made)
            check_against(buffer, model)
        buffer.add(**columns_of(made))
        model.add(made)
        check_against(buffer, model)
    before = sorted(once.free_slots()[0][: once.free_slots()[1]].tolist())
    buffer._table._mend_links()
    assert before == sorted(once.free_slots()[0][: once.free_slots()[1]].tolist())


@pytest.mark.parametrize("name", ["mend_newest", "_mend_links"])
def test_a_link_to_the_first_row_that_is_older_is_taken_away(name):
    """As an interrupted add leaves it, from the newest row to one that it has not overwritten."""
    buffer = SharedReplayBuffer(4, OBS, ACTIONS, num_envs=1, seed=0, n_step=2, gamma=0.5)
    buffer.add(**columns_of(CountingEnvs(1).random_steps([0] * 8)))
    table = buffer._table
    before = table.links.copy()
    for code in (1, 2):  # of a row, and 1
        table.links[3] = code
        getattr(table, name)()
        assert table.links.tolist() == before.tolist()
        assert before[3] == 0
