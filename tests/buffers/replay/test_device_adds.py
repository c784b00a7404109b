"""Adds of tensors on a device, which the host does not see; `fuzz.replays` has what is stored."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from replay_model import ACTIONS, OBS, RINGS, CountingEnvs, ListModel, check_against, columns_of

from buffers import (
    BufferMisuseError,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)

OPTIONS = {
    "plain": {},
    "three steps": {"n_step": 3, "gamma": 0.5},
    "stored once": {"store_next": False},
    "both": {"n_step": 2, "gamma": 0.5, "store_next": False},
    "whose": {"track_env": True},
}
NUM_ENVS = 4
EVERY_RING = pytest.mark.parametrize("kind", RINGS)


class Case:
    """A buffer that takes tensors as one on a device does, envs, and lists of what they did."""

    def __init__(self, kind, option):
        capacity = 6 if kind is PerEnvReplayBuffer else 23
        self.option, self.envs = OPTIONS[option], CountingEnvs(NUM_ENVS)
        self.model = ListModel(capacity, NUM_ENVS, kind is PerEnvReplayBuffer)
        options = {"num_envs": NUM_ENVS, "seed": 0, "staged": True, **self.option}
        self.buffer = kind(capacity, OBS, ACTIONS, **options)

    def step(self):
        made = self.envs.random_steps(range(NUM_ENVS))
        self.model.add(made)
        return columns_of(made)

    def check(self):
        buffer, option = self.buffer, self.option
        check_against(buffer, self.model, option.get("n_step", 1), option.get("gamma"))
        if isinstance(buffer, PrioritizedReplayBuffer):
            assert (buffer.priorities[buffer.order()] == 1).all()
            assert buffer.priorities.sum() == len(buffer)


def add_there(buffer, rows):
    """As `add` does on a device other than the CPU."""
    columns = {name: torch.from_numpy(column.copy()) for name, column in rows.items()}
    buffer.takes_tensors = True
    buffer.add(**columns)
    buffer.takes_tensors = False


@pytest.mark.parametrize("option", OPTIONS)
def test_an_add_and_a_draw_on_a_device_ask_it_for_nothing(option, monkeypatch):
    case = Case(PrioritizedReplayBuffer, option)
    buffer = case.buffer
    out = buffer.new_batch(8)
    buffer.reserve_final_obs(buffer.capacity + NUM_ENVS)
    for _ in range(9):
        add_there(buffer, case.step())

    def refuse(*_, **__):
        raise AssertionError("the host waits for the device")

    steps = [case.step() for _ in range(3)]
    for name in ("cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for rows in steps:
        add_there(buffer, rows)
        batch = buffer.sample(8, out)
        buffer._sums.update(
            batch.indices, batch.rewards.abs(), buffer._table.live_there()
        )  # as of tensors on a device


def test_what_cannot_be_captured_is_refused(monkeypatch):
    case = Case(SharedReplayBuffer, "stored once")
    buffer = case.buffer
    for _ in range(2):
        monkeypatch.setattr(buffer, "_is_capturing", lambda: True)
        with pytest.raises(BufferMisuseError, match=r"room for 20; call reserve_final_obs.27"):
            add_there(buffer, case.step())
        monkeypatch.undo()
        add_there(buffer, case.step())
    monkeypatch.setattr(buffer, "_is_capturing", lambda: True)
    few = {name: column[:3] for name, column in case.step().items()}
    with pytest.raises(BufferMisuseError, match=r"in a CUDA graph takes .* whole steps of all 4"):
        add_there(buffer, few)
    assert len(buffer) == 2 * NUM_ENVS


@pytest.mark.parametrize("option", OPTIONS)
@EVERY_RING
def test_what_a_graph_adds_is_known_when_it_is_asked_for(kind, option, monkeypatch):
    case = Case(kind, option)
    case.buffer.reserve_final_obs(40)
    for turn in range(20):
        rows = case.step()
        with monkeypatch.context() as patch:
            if turn == 1:
                patch.setattr(case.buffer, "_is_capturing", lambda: True)
            add_there(case.buffer, rows)  # from then on the host counts nothing, as in replays
        if turn % 4 == 3:
            case.check()
        if turn == 12:
            case.buffer.add(**case.step())
            case.check()


def test_steps_of_episodes_count_rows_that_were_overwritten_before_any_draw():
    space = Box(-9999, 9999, (1,), np.float32)
    options = {"num_envs": 2, "track_episodes": True, "staged": True}
    buffer = SharedReplayBuffer(8, space, Discrete(2), **options)

    def rows(steps):
        obs = np.repeat(np.asarray(steps, np.float32), 2)[:, None]
        flags = np.zeros(len(obs), bool)
        return {
            "obs": obs, "next_obs": obs + 1, "actions": np.zeros(len(obs), np.int64),
            "rewards": np.ones(len(obs), np.float32), "terminations": flags, "truncations": flags,
        }  # fmt: skip

    for t in range(11):  # more than the buffer holds
        add_there(buffer, rows([t]))
    buffer.add(**rows([11, 12, 13, 14]))  # overwrites what the device has added
    batch = buffer.sample_sequences(50, 2)
    assert batch.steps.tolist() == batch.obs[..., 0].int().tolist()
