"""Frames of stacked observations that are stored once; `fuzz.replays` tries what is not listed."""

import numpy as np
import pytest
from gymnasium import spaces
from replay_model import assert_equal_batches

from buffers import BufferMisuseError, SharedReplayBuffer

ACTIONS = spaces.Discrete(2)
STACKS = spaces.Box(0, 255, (4, 2, 3), np.uint8)
NOTHING = np.zeros(2, bool)


def made(stack=4, capacity=50, space=STACKS, kind=SharedReplayBuffer, **options):
    return kind(capacity, space, ACTIONS, num_envs=2, seed=0, frame_stack=stack, **options)


def stacks_from(t, number=4):
    """Stacks of two envs whose newest frame is number t."""
    frames = [np.full((2, 2, 3), t - number + 1 + k, np.uint8) for k in range(number)]
    return np.stack(frames, 1)


def step(t, **changes):
    columns = {
        "obs": stacks_from(t), "next_obs": stacks_from(t + 1), "actions": np.zeros(2, np.int64),
        "rewards": np.ones(2), "terminations": NOTHING, "truncations": NOTHING,
    }  # fmt: skip
    return {**columns, **changes}


def bytes_of(buffer):
    state = buffer.state_dict()
    return {name: v.numpy().tobytes() for name, v in state.items() if hasattr(v, "numpy")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"next_obs": stacks_from(9)}, "row 0: next_obs is not obs moved on"),
        ({"next_obs": stacks_from(8)[:, ::-1]}, "next_obs is not obs moved on"),
        ({"obs": stacks_from(7)[:, :3]}, r"\(2, 3, 2, 3\), expected \(2, 4, 2, 3\)"),
        ({"obs": stacks_from(7)[:, -1]}, r"\(2, 2, 3\), expected \(2, 4, 2, 3\)"),
        ({"obs": stacks_from(7) * 1.0}, "dtype float64, expected uint8"),
    ],
)
@pytest.mark.parametrize("staged", [False, True])
def test_what_is_no_stack_or_not_the_next_is_refused_and_changes_nothing(changes, message, staged):
    buffer = made(staged=staged)
    for t in range(4, 7):
        buffer.add(**step(t))
    before = bytes_of(buffer)
    with pytest.raises(BufferMisuseError, match=message):
        buffer.add(**step(7, **changes))
    assert bytes_of(buffer) == before
    buffer.add(**step(7))


@pytest.mark.parametrize(
    ("shape", "stack", "message"),
    [
        ((5, 2, 3), 4, "one axis alone has length 4"),
        ((4, 2, 4), 4, "one axis alone has length 4"),
        ((4, 2, 3), 0, "frame_stack must be a positive integer"),
        ((4, 0), 4, "a Box with something in it"),
    ],
)
def test_constructors_refuse(shape, stack, message):
    with pytest.raises(BufferMisuseError, match=message):
        made(stack, space=spaces.Box(0, 255, shape, np.uint8))


def test_each_frame_is_stored_once():
    buffer = made(capacity=500)
    for t in range(4, 204):
        buffer.add(**step(t))
    assert buffer.memory()["frames"] < 1000  # 400 stacks have 9600 bytes


def test_an_add_that_is_interrupted_at_its_end_loses_no_slot_of_frames(monkeypatch):
    buffer = made(capacity=9)
    for t in range(4, 12):
        buffer.add(**step(t))
    once = buffer._table.once

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(once, "commit", interrupt)
        buffer.add(**step(12))
    buffer.add(**step(20))
    assert buffer.get(buffer.order()).obs[-2:, -1, 0, 0].tolist() == [20, 20]
    used = once._used(*buffer._table.kept_links()).tolist()
    assert sorted([0, *used, *once.free[: int(once.num_free[0])]]) == [*range(once.num_slots)]


def test_stacks_of_an_env_that_was_silent_for_long():
    pair = [made(4, capacity=8), made(None, capacity=8)]
    silent = {"actions": np.zeros(1, np.int64), "rewards": np.ones(1), "terminations": NOTHING[:1]}

    def add(env, t):
        stacks = {"obs": stacks_from(t)[:1], "next_obs": stacks_from(t + 1)[:1]}
        for buffer in pair:
            buffer.add(**silent, **stacks, truncations=NOTHING[:1], env_ids=[env])
        assert_equal_batches(*(buffer.get(buffer.order()) for buffer in pair))

    for gap in range(20, 32):
        for t in range(10, 14):
            add(1, t)
        for t in range(100, 100 + gap):
            add(0, t)
        add(1, 14)
        for t in range(100 + gap, 107 + gap):
            add(0, t)
        for buffer in pair:
            buffer.cut_episodes()
