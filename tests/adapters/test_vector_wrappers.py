"""Gymnasium's wrappers of vector envs around ours: the same results as around Gymnasium's own."""

from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
from equality import assert_same
from gymnasium import spaces
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WRAPPERS)
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: vecenv.AsyncVectorEnv([make_env] * 3, num_workers=2),
        lambda: vecenv.make_vec("JitCartPole-v1", 3, vector_kwargs={"max_episode_steps": 9}),
    ],
    ids=["async", "jit"],
)
def test_wrappers_go_around_every_backend(make):
    envs = wrappers.RecordEpisodeStatistics(make())
    envs = wrappers.NormalizeObservation(wrappers.DtypeObservation(envs, np.float32))
    assert isinstance(envs.single_observation_space, spaces.Box)
    obs, _ = envs.reset(seed=1)
    lengths = []
    for _ in range(30):
        obs, _, _, _, infos = envs.step(envs.action_space.sample())
        if "episode" in infos:
            lengths += infos["episode"]["l"][infos["_episode"]].tolist()
    assert obs.dtype == np.float32 and np.abs(obs).max() <= 10
    assert len(lengths) >= 6 and max(lengths) <= 9
    envs.close()


@pytest.mark.parametrize("make", [vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv])
def test_statistics_go_on_for_envs_that_are_not_reset(make):
    """Gymnasium's vector envs take the mask out of the options before the wrapper reads it.

    So around theirs a reset by mask begins the statistics of all envs anew, around ours only those
    of the envs that are reset; and the wrapper clears its mask, which is `infos["_episode"]` of the
    step before.
    """
    lengths = iter([2, 5, 5])
    fns = [lambda n=n: gym.make("Pendulum-v1", max_episode_steps=n) for n in lengths]
    envs = wrappers.RecordEpisodeStatistics(make(fns, autoreset_mode="Disabled"))
    envs.reset(seed=1)
    counted = {}
    kept = []
    for step in range(5):
        *_, truncations, infos = envs.step(np.zeros((3, 1), np.float32))
        if truncations.any():
            counted[step] = infos["episode"]["l"].tolist()
            kept.append((infos["_episode"], truncations, truncations.copy()))
            envs.reset(options={"reset_mask": truncations})
    assert counted == {1: [2, 0, 0], 3: [2, 0, 0], 4: [0, 5, 5]}
    for is_cleared, truncations, before in kept:
        assert not is_cleared.any()
        assert (truncations == before).all()  # what is ours stays
    envs.close()
