"""EpisodicReplayBuffer refuses bad episodes, steps, calls and options, and stays as it was."""

import numpy as np
import pytest
import torch
from episodes import SPACE, fill, make_buffer, make_episode, one_step
from gymnasium import spaces

from buffers import BufferMisuseError

GOOD = make_episode(0, 4, [1])
NO_FLAGS = {key: GOOD[key] for key in ("obs", "actions", "rewards")}
BAD_EPISODES = {
    "a column is missing": ({**NO_FLAGS, "rewards": None}, "rewards has shape"),
    "obs too short": ({**GOOD, "obs": GOOD["obs"][:4]}, r"obs has shape \(4, 2\), expected \(5, 2"),
    "wrong actions": ({**GOOD, "actions": np.zeros((4, 1), int)}, r"actions has shape \(4, 1\)"),
    "float actions": ({**GOOD, "actions": np.zeros(4)}, "actions has dtype float64"),
    "complex obs": ({**GOOD, "obs": GOOD["obs"] * 1j}, "obs has dtype complex64"),
    "NaN reward": ({**GOOD, "rewards": [0, 0, np.nan, 0]}, r"rewards\[2\] is nan as float32"),
    "unknown": ({**GOOD, "reward": np.zeros(4)}, r"unknown: \['reward'\]"),
    "missing": ({"obs": GOOD["obs"], "rewards": GOOD["rewards"]}, r"missing: \['actions'\]"),
    "ends within": ({**GOOD, "truncations": [False, True, False, False]}, "ends in step 1"),
    "number flags": ({**GOOD, "terminations": np.zeros(4)}, "terminations has dtype float64"),
    "no step": ({"obs": np.zeros((1, 2)), "actions": [], "rewards": []}, "has no step"),
    "too long": (make_episode(0, 21), "the capacity is 20"),
    "no dict": ([1, 2], "must be a dict"),
    "other successors": (
        {**GOOD, "obs": GOOD["obs"][:4], "next_obs": GOOD["obs"][1:] * [1, 2]},
        "next_obs of step 0 differs from obs of step 1",
    ),
}


def snapshot(buffer):
    state = buffer.state_dict()
    return {
        key: value.tolist() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


@pytest.mark.parametrize("episode, message", BAD_EPISODES.values(), ids=BAD_EPISODES)
def test_bad_episodes_are_refused_and_change_nothing(episode, message):
    buffer = fill(make_buffer(20))
    before = snapshot(buffer)
    with pytest.raises(BufferMisuseError, match=message):
        buffer.add_episode(episode)
    assert snapshot(buffer) == before


BAD_CALLS = {
    "batch size": (lambda b: b.sample(0), "batch_size must be a positive integer"),
    "flag for a size": (lambda b: b.sample(True), "batch_size must be a positive integer, got Tr"),
    "discount": (lambda b: b.sample(4, 1.5), "discount is 1.5"),
    "NaN discount": (lambda b: b.sample(4, float("nan")), "discount is nan"),
    "over": (lambda b: b.sample(4, over="rows"), "over is 'rows'"),
    "length": (lambda b: b.sample_sequences(4, 99), "none of the .* episodes has 99 steps"),
    "zero length": (lambda b: b.sample_sequences(4, 0), "sequence_length must be"),
    "strategy": (lambda b: b.sample_goals(4, "past"), "strategy is 'past'"),
    "ratio": (lambda b: b.sample_goals(4, relabel_ratio=2), "relabel_ratio is 2"),
    "goal discount": (lambda b: b.sample_goals(4, discount=-1), "discount is -1"),
    "law of none": (lambda b: b.sample_goals(4, "final", discount=0.5), "discount is 0.5 with"),
    "no end keys": (
        lambda b: b.sample_goals(4, compute_terminated=max),
        "needs a Dict observation",
    ),
    "no keys": (lambda b: b.sample_goals(4, compute_reward=max), "needs a Dict observation"),
    "ids": (lambda _: make_buffer(num_envs=2).cut_episodes([-1]), "env_ids has -1"),
    "unknown envs": (lambda b: b.add(env_ids=[0], **one_step(1)), "give num_envs"),
}


@pytest.mark.parametrize("call, message", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls_are_refused(call, message):
    with pytest.raises(BufferMisuseError, match=message):
        call(fill(make_buffer(100)))


BAD_OPTIONS = {
    "capacity": ({"capacity": 0}, "capacity must be a positive integer, got 0"),
    "no integer": ({"capacity": 2.5}, "capacity must be a positive integer, got 2.5"),
    "huge": ({"capacity": 2**31}, "more rows than"),
    "max_episodes": ({"max_episodes": -1}, "max_episodes must be"),
    "num_envs": ({"num_envs": 0}, "num_envs must be"),
    "extra": ({"extra_columns": {"obs": SPACE}}, "extra column 'obs'"),
    "nested extra": ({"extra_columns": {"x": spaces.Dict(a=SPACE)}}, "one column for each array"),
}


@pytest.mark.parametrize("options, message", BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_are_refused(options, message):
    with pytest.raises(BufferMisuseError, match=message):
        make_buffer(**options)


BAD_STEPS = {
    "twice": ({"env_ids": [1, 1]}, r"env_ids is \[1, 1\]"),
    "out of range": ({"env_ids": [0, 3]}, "expected different numbers from 0 to 2"),
    "too few": ({}, "got 2 steps for 2 of 3 envs|pass one step per env"),
    "break": ({"env_ids": [1, 2], "obs": np.full((2, 2), 7, np.float32)}, "obs of env 1 differs"),
    "NaN": ({"env_ids": [1, 2], "rewards": [0, np.nan]}, r"rewards\[1\] is nan as float32"),
    "shape": ({"env_ids": [1, 2], "obs": np.zeros((2, 3))}, "obs has shape"),
}


@pytest.mark.parametrize("change, message", BAD_STEPS.values(), ids=BAD_STEPS)
def test_bad_steps_are_refused_and_change_nothing(change, message):
    buffer = make_buffer(num_envs=3)
    buffer.add(**one_step(3))
    before = snapshot(buffer)
    with pytest.raises(BufferMisuseError, match=message):
        buffer.add(**{**one_step(2, step=1), **change})
    assert snapshot(buffer) == before
    buffer.add(**one_step(3, step=1))
    assert buffer.open_lengths.tolist() == [2, 2, 2]
