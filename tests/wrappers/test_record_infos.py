"""RecordInfos: means of numbers in infos, over steps and at the ends of episodes."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from vecenv import AsyncVectorEnv, SyncVectorEnv
from vecenv.wrappers import RecordEpisodeStatistics, RecordInfos


class Counting(gym.Env):
    """Episodes of `length` steps; its infos have the number of the step, and more."""

    observation_space = Box(0, 100, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, length: int) -> None:
        self.length, self.steps = length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {"step": 1000}  # of a reset: not to be counted

    def step(self, action):
        self.steps += 1
        is_over = self.steps == self.length
        info = {"step": self.steps, "deep": {"half": self.steps / 2}, "text": "words"}
        if is_over:
            info["won"] = self.length == 2
        return np.full(1, self.steps, np.float32), 1.0, is_over, False, info


def played(mode, kind=SyncVectorEnv, names=("step", "deep/half", "won", "text", "no")):
    envs = kind([lambda n=n: Counting(n) for n in (2, 3)], autoreset_mode=mode)
    recorded = RecordInfos(envs, names)
    recorded.reset(seed=1)
    return recorded


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_means_are_over_steps_that_acted_and_over_ends(mode, kind) -> None:
    recorded = played(mode, kind)
    for _ in range(12):  # whole episodes of both, in both modes
        recorded.step(np.zeros(2, np.int64))
    found = recorded.take()
    recorded.close()
    # Env 0 has steps 1 2, env 1 has 1 2 3; with NextStep a step between episodes only resets.
    first, second = (6, 4) if mode == "SameStep" else (4, 3)
    steps = [1, 2] * first + [1, 2, 3] * second
    ends = [2] * first + [3] * second
    assert found["step"] == pytest.approx(np.mean(steps))
    assert found["step_at_end"] == pytest.approx(np.mean(ends))
    assert found["deep/half"] == pytest.approx(np.mean(steps) / 2)
    assert found["won"] == found["won_at_end"] == pytest.approx(first / (first + second))
    assert recorded.missing == ["text", "no"]
    assert {"step", "deep", "won", "text"} <= recorded.seen


class Bare(Counting):
    """Its last step of an episode has no infos."""

    def step(self, action):
        *results, is_over, truncated, info = super().step(action)
        return *results, is_over, truncated, {} if is_over else info


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_infos_of_resets_do_not_count_where_the_last_step_has_none(mode) -> None:
    envs = SyncVectorEnv([lambda: Bare(3)] * 2, autoreset_mode=mode)
    recorded = RecordInfos(envs, ["step"])
    recorded.reset(seed=1)
    for _ in range(12):
        recorded.step(np.zeros(2, np.int64))
    assert recorded.take() == {"step": 1.5}
    recorded.close()


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_means_of_the_statistics_of_episodes(mode) -> None:
    """Their names have no masks of their own: that of "episode" is theirs."""
    envs = SyncVectorEnv([lambda: Counting(3)] * 2, autoreset_mode=mode)
    recorded = RecordInfos(RecordEpisodeStatistics(envs), ["episode/r"])
    recorded.reset(seed=1)
    for _ in range(12):
        recorded.step(np.zeros(2, np.int64))
    assert recorded.take() == {"episode/r": 3, "episode/r_at_end": 3}
    recorded.close()


def test_taking_begins_anew() -> None:
    recorded = played("SameStep")
    recorded.step(np.zeros(2, np.int64))
    assert recorded.take()["step"] == 1
    assert recorded.take() == {}
    recorded.step(np.zeros(2, np.int64))
    assert recorded.take() == {
        "step": 2,
        "step_at_end": 2,  # of env 0
        "deep/half": 1,
        "deep/half_at_end": 1,
        "won": 1,
        "won_at_end": 1,
    }
    recorded.close()


def test_steps_of_some_envs_count() -> None:
    recorded = played("NextStep", names=("step",))
    recorded.send(np.zeros(1, np.int64), [1])
    recorded.recv(1)
    recorded.send(np.zeros(1, np.int64), [1])
    recorded.recv(1)
    assert recorded.take() == {"step": 1.5}
    recorded.close()
