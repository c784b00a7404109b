"""Frames of stacked observations that are stored once; `fuzz.replays` tries what is not listed."""

import functools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FrameStackObservation, TransformObservation
from replay_model import assert_equal_batches

from buffers import BufferMisuseError, PrioritizedReplayBuffer, SharedReplayBuffer, TransitionWriter

ACTIONS = spaces.Discrete(2)
STACKS = spaces.Box(0, 255, (4, 2, 3), np.uint8)
NOTHING = np.zeros(2, bool)


class Pictures(gym.Env):
    """Every frame is another; episodes end after 3, 4, 5 ... steps, one way or the other."""

    observation_space = spaces.Box(0, 255, (2, 3), np.uint8)
    action_space = ACTIONS

    def __init__(self, name):
        self.name, self.made, self.episode = name, 0, 0

    def picture(self):
        self.made += 1
        return np.array([[self.name, self.made % 256, self.made // 256], [0, 1, 2]], np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 3 + self.episode % 5
        self.episode += 1
        return self.picture(), {}

    def step(self, action):
        self.left -= 1
        is_over, is_odd = self.left == 0, self.episode % 2 == 1
        return self.picture(), 1.0, is_over and is_odd, is_over and not is_odd, {}


def stacked(name, number=4, padding="reset"):
    return FrameStackObservation(Pictures(name), number, padding_type=padding)


def channels_last(name):
    env = stacked(name)
    space = spaces.Box(0, 255, (2, 3, 4), np.uint8)
    return TransformObservation(env, lambda obs: np.moveaxis(obs, 0, -1), space)


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


@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    ("env", "options"),
    [
        (stacked, {"n_step": 3, "gamma": 0.9}),
        (channels_last, {"store_next": False, "track_env": True}),
    ],
)
def test_stacks_of_running_envs_are_those_that_were_returned(mode, env, options):
    """Also those that episodes ended with, in each way."""
    makers = [functools.partial(env, name) for name in range(3)]
    envs = gym.vector.SyncVectorEnv(makers, autoreset_mode=mode)
    space, rows = envs.single_observation_space, (40, envs.single_observation_space, ACTIONS)
    pair = [
        PrioritizedReplayBuffer(*rows, num_envs=3, seed=1, **{"frame_stack": stack, **options})
        for stack in (4, None)
    ]
    writers = [TransitionWriter(envs, buffer) for buffer in pair]
    obs, _ = envs.reset(seed=0)
    for writer in writers:
        writer.reset(obs)
    for _ in range(60):
        actions = envs.action_space.sample()
        result = _, _, terminations, truncations, _ = envs.step(actions)
        for writer in writers:
            writer.step(actions, *result)
        over = terminations | truncations
        if mode is AutoresetMode.DISABLED and over.any():
            obs, _ = envs.reset(options={"reset_mask": over})
            for writer in writers:
                writer.reset(obs, over)
        assert_equal_batches(*(buffer.get(buffer.order()) for buffer in pair))
    assert_equal_batches(*(buffer.get(buffer.order()) for buffer in pair))
    assert pair[0].get(pair[0].order()).obs.shape == (40, *space.shape)


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
