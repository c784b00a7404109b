"""Gymnasium's wrappers of vector envs around ours: the same results as around Gymnasium's own."""

from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
from choices import fast_are, in_turn, product
from equality import assert_same
from gymnasium.wrappers import vector as wrappers

import vecenv

MODES = ["NextStep", "SameStep", "Disabled"]
WRAPPERS = {
    "ClipReward": lambda envs: wrappers.ClipReward(envs, -1, 1),
    "DictInfoToList": wrappers.DictInfoToList,
    "FlattenObservation": wrappers.FlattenObservation,
    "NormalizeObservation": wrappers.NormalizeObservation,
    "NormalizeReward": wrappers.NormalizeReward,
    "RecordEpisodeStatistics": wrappers.RecordEpisodeStatistics,
    "RescaleObservation": lambda envs: wrappers.RescaleObservation(
        envs, np.float32(-1), np.float32(1)
    ),
    "ReshapeObservation": lambda envs: wrappers.ReshapeObservation(envs, (3, 1)),
    "TransformReward": lambda envs: wrappers.TransformReward(envs, lambda reward: reward * 2),
    "TransformAction": lambda envs: wrappers.TransformAction(envs, lambda action: action / 2),
    "ClipAction": wrappers.ClipAction,
    "RescaleAction": lambda envs: wrappers.RescaleAction(envs, -1, 1),
}


def make_env():
    return gym.make("Pendulum-v1", max_episode_steps=7)


def without_times(infos):
    """RecordEpisodeStatistics measures seconds."""
    if isinstance(infos, list):
        return [without_times(info) for info in infos]
    if isinstance(infos, dict):
        return {k: without_times(v) for k, v in infos.items() if k not in ("t", "_t")}
    return infos


@pytest.mark.parametrize(
    ("name", "mode"), fast_are(in_turn(WRAPPERS, MODES), product(WRAPPERS, MODES))
)
def test_wrappers_do_the_same(name, mode):
    mode = gym.vector.AutoresetMode(mode)
    results = []
    for vector in (gym.vector, vecenv):
        envs = vector.SyncVectorEnv([make_env] * 3, autoreset_mode=mode)
        try:
            envs = WRAPPERS[name](envs)
        except (AssertionError, ValueError) as error:  # some know certain modes only
            results.append(str(error))
            continue
        results.append(run(envs, mode))
        envs.close()
    assert_same(results[0], results[1])


def run(envs, mode):
    found = [envs.reset(seed=3)]
    rng = np.random.default_rng(0)
    for _ in range(20):
        actions = rng.uniform(-1, 1, (3, 1)).astype(np.float32)
        result = envs.step(actions)
        found.append(deepcopy(result))  # RecordEpisodeStatistics changes its masks afterwards
        over = result[2] | result[3]
        if mode is gym.vector.AutoresetMode.DISABLED and over.any():
            found.append(envs.reset(options={"reset_mask": over}))
    return [(*result[:-1], without_times(result[-1])) for result in found]
