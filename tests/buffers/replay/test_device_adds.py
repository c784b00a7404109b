"""Adds of tensors on a device, which the host does not see, against those of arrays on the CPU."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from buffers import (
    BufferMisuseError,
    PerEnvReplayBuffer,
    PrioritizedReplayBuffer,
    SharedReplayBuffer,
)

FLOATS = Box(-9, 9, (3,), np.float32)
BOTH = Dict({"a": Box(-9, 9, (2,), np.float64), "b": Box(0, 255, (5,), np.uint8)})
OPTIONS = {
    "plain": {},
    "three steps": {"n_step": 3, "gamma": 0.9},
    "stored once": {"store_next": False},
    "both": {"n_step": 2, "gamma": 0.9, "store_next": False},
    "whose": {"track_env": True},
}
NUM_ENVS = 4


class Stream:
    """Steps of some envs: most observations go on, some do not though nothing ended."""

    def __init__(self, space, seed=0):
        self.space, self.rng = space, np.random.default_rng(seed)
        space.seed(seed)
        self.obs = self.sample()

    def sample(self):
        items = [self.space.sample() for _ in range(NUM_ENVS)]
        if isinstance(self.space, Dict):
            return {name: np.stack([item[name] for item in items]) for name in self.space}
        return np.stack(items)

    def step(self):
        rng, following, other = self.rng, self.sample(), self.sample()
        over = rng.random((2, NUM_ENVS)) < 0.15
        rows = {
            "obs": self.obs, "next_obs": following, "actions": rng.integers(0, 3, NUM_ENVS),
            "rewards": rng.standard_normal(NUM_ENVS, np.float32),
            "terminations": over[0], "truncations": over[1],
        }  # fmt: skip
        is_other = (over[0] | over[1] | (rng.random(NUM_ENVS) < 0.1))[:, None]
        if isinstance(self.space, Dict):
            self.obs = {k: np.where(is_other, other[k], following[k]) for k in following}
        else:
            self.obs = np.where(is_other, other, following)
        return rows


def moved(column):
    if isinstance(column, dict):
        return {name: moved(part) for name, part in column.items()}
    return torch.from_numpy(column.copy())


def pair(kind, space, option):
    capacity = 6 if kind is PerEnvReplayBuffer else 23
    options = {"num_envs": NUM_ENVS, "seed": 0, **OPTIONS[option]}
    return [kind(capacity, space, Discrete(3), staged=s, **options) for s in (False, True)]


def add_there(buffer, rows):
    """As `add` does on a device other than the CPU."""
    columns = {name: moved(column) for name, column in rows.items()}
    buffer.takes_tensors = True
    buffer.add(**columns)
    buffer.takes_tensors = False


def check_same(one, other):
    assert len(one) == len(other) and one.num_added == other.num_added
    left, right = (buffer.get(buffer.order()) for buffer in (one, other))
    for name in left._names():
        found, expected = getattr(right, name, None), getattr(left, name, None)
        if isinstance(expected, torch.Tensor) and name != "weights":
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=name)
        elif isinstance(expected, dict):
            for key in expected:
                assert torch.equal(found[key], expected[key]), (name, key)


@pytest.mark.parametrize("space", [FLOATS, BOTH], ids=["flat", "nested"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", [SharedReplayBuffer, PerEnvReplayBuffer, PrioritizedReplayBuffer])
def test_tensors_and_arrays_in_turn_leave_what_arrays_do(kind, option, space):
    here, there = pair(kind, space, option)
    stream, rng = Stream(space), np.random.default_rng(1)
    for turn in range(60):
        rows = stream.step()
        here.add(**rows)
        if rng.random() < 0.7:
            add_there(there, rows)
        else:
            there.add(**rows)
        if rng.random() < 0.1:
            envs = np.flatnonzero(rng.random(NUM_ENVS) < 0.5)
            here.cut_episodes(envs)
            there.cut_episodes(envs)
        if rng.random() < 0.1:
            state = there.state_dict()
            there = pair(kind, space, option)[1]
            there.load_state_dict(state)
        if turn % 3 == 0:
            check_same(here, there)
        assert len(there.sample(5)) == 5
    if kind is PrioritizedReplayBuffer:
        assert torch.equal(here.priorities, there.priorities)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_add_and_a_draw_on_a_device_ask_it_for_nothing(option, monkeypatch):
    buffer = pair(PrioritizedReplayBuffer, FLOATS, option)[1]
    stream = Stream(FLOATS)
    out = buffer.new_batch(8)
    buffer.reserve_final_obs(buffer.capacity + NUM_ENVS)
    for _ in range(9):
        add_there(buffer, stream.step())

    def refuse(*_, **__):
        raise AssertionError("the host waits for the device")

    steps = [stream.step() for _ in range(3)]
    for name in ("cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for rows in steps:
        add_there(buffer, rows)
        batch = buffer.sample(8, out)
        buffer._sums.update(
            batch.indices, batch.rewards.abs(), buffer._table.live_there()
        )  # as of tensors on a device


def test_what_cannot_be_captured_is_refused(monkeypatch):
    buffer, stream = pair(SharedReplayBuffer, FLOATS, "stored once")[1], Stream(FLOATS)
    monkeypatch.setattr(buffer, "_is_capturing", lambda: True)
    with pytest.raises(BufferMisuseError, match=r"room for 20; call reserve_final_obs.27"):
        add_there(buffer, stream.step())
    monkeypatch.undo()
    add_there(buffer, stream.step())
    monkeypatch.setattr(buffer, "_is_capturing", lambda: True)
    with pytest.raises(BufferMisuseError, match=r"room for 20; call reserve_final_obs.27"):
        add_there(buffer, stream.step())
    few = {name: column[:3] for name, column in stream.step().items()}
    with pytest.raises(BufferMisuseError, match=r"in a CUDA graph takes .* whole steps of all 4"):
        add_there(buffer, few)
    assert len(buffer) == NUM_ENVS


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", [SharedReplayBuffer, PerEnvReplayBuffer, PrioritizedReplayBuffer])
def test_what_a_graph_adds_is_known_when_it_is_asked_for(kind, option, monkeypatch):
    here, there = pair(kind, FLOATS, option)
    stream = Stream(FLOATS)
    there.reserve_final_obs(40)
    for turn in range(20):
        rows = stream.step()
        here.add(**rows)
        with monkeypatch.context() as patch:
            if turn == 1:
                patch.setattr(there, "_is_capturing", lambda: True)
            add_there(there, rows)  # from then on the host counts nothing, as in replays
        if turn % 4 == 3:
            check_same(here, there)
        if turn == 12:
            rows = stream.step()
            here.add(**rows)
            there.add(**rows)
            check_same(here, there)
    if kind is PrioritizedReplayBuffer:
        assert torch.equal(here.priorities, there.priorities)
