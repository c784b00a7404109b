"""check_vector_env names the rule that a broken vector env breaks, and no other."""

import numpy as np
import pytest
from envs import counters
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from vector_envs import (
    DISABLED,
    NEXT_STEP,
    SAME_STEP,
    DriftVectorEnv,
    OneBuffer,
    ReusedRewards,
    setting,
    stepping,
    variant,
)

from vecenv import SyncVectorEnv
from vecenv.check import VectorEnvCheckError, check_vector_env


def scale(k, **changes):
    """A change of step's results: the k-th is passed through `by`."""
    by = changes["by"]

    def change(*results):
        return (*results[:k], by(results[k]), *results[k + 1 :])

    return stepping(change)


def no_infos_of(key):
    def change(*results):
        infos = {k: v for k, v in results[4].items() if k not in {key, f"_{key}"}}
        return (*results[:4], infos)

    return stepping(change)


def final_obs_of(change):
    def end(self, over):
        infos = DriftVectorEnv.end(self, over)
        for i in np.flatnonzero(over):
            infos["final_obs"][i] = change(infos["final_obs"][i])
        return infos

    return end


def dead_step(reward=0.0, ends=False, starts=True, uses_action=False):
    def method(self, i, action):
        if starts:
            self.start(i)
        self.over[i] = False
        self.points[i] += action if uses_action else 0
        return reward, ends

    return method


def reset_all(self, *, seed=None, options=None):
    return DriftVectorEnv.reset(self, seed=seed)


def unseeded_noise(self, actions):
    self.points += np.random.default_rng().normal(size=self.points.shape)
    return DriftVectorEnv.step(self, actions)


def close_once(self):
    if self.num_closed:
        raise OSError("closed already")
    self.num_closed = 1


def no_count(self, actions):
    return np.resize(actions, self.num_envs) if np.size(actions) else np.zeros(self.num_envs)


def crash_in_step_5(self, actions):
    if self.ages.max() == 5:
        raise OverflowError("physics exploded")
    return DriftVectorEnv.step(self, actions)


# name: (class, mode, the one rule broken, what the message says)
BROKEN = {
    "no num_envs": (
        variant("V", __init__=setting(num_envs=lambda envs: 0)),
        NEXT_STEP,
        "num_envs is a positive int",
        "it is 0",
    ),
    "observation space": (
        variant("V", __init__=setting(single_observation_space=lambda e: spaces.Box(-9, 9, (2,)))),
        NEXT_STEP,
        "observation_space is the batch of single_observation_space",
        "it is Box(-999.0, 999.0, (3, 2), float32), expected Box(-9.0, 9.0, (3, 2), float32); use",
    ),
    "action space": (
        variant("V", __init__=setting(action_space=lambda e: batch_space(spaces.Discrete(2), 3))),
        NEXT_STEP,
        "action_space is the batch of single_action_space",
        "it is MultiDiscrete([2 2 2]), expected MultiDiscrete([3 3 3])",
    ),
    "no mode": (
        variant("V", __init__=setting(metadata=lambda envs: {})),
        NEXT_STEP,
        "metadata has the autoreset mode",
        "metadata['autoreset_mode'] is None, expected a gymnasium.vector.AutoresetMode",
    ),
    "obs dtype": (
        variant("V", observe=lambda self: self.points.copy()),
        NEXT_STEP,
        "observations are in observation_space",
        "obs has shape (3, 2) and dtype float64, expected shape (3, 2) and dtype float32",
    ),
    "obs bounds": (
        variant(
            "V",
            observe=lambda self: np.where(self.points > 2, 1000, self.points).astype(np.float32),
        ),
        NEXT_STEP,
        "observations are in observation_space",
        "is 1000.0, outside [-999.0, 999.0]",
    ),
    "reset returns obs": (
        variant("V", reset=lambda self, **kwargs: DriftVectorEnv.reset(self, **kwargs)[0]),
        NEXT_STEP,
        "reset returns observations and infos",
        "reset: returned array([[",
    ),
    "four values": (
        variant("V", step=stepping(lambda *results: (*results[:3], results[4]))),
        NEXT_STEP,
        "step returns five values",
        "step 0: returned (array([[",
    ),
    "reward dtype": (
        variant("V", step=scale(1, by=lambda rewards: rewards.astype(int))),
        NEXT_STEP,
        "rewards are a floating array with one entry per env",
        "step 0: got int64 (3,), expected a NumPy array of shape (3,)",
    ),
    "reward nan": (
        variant("V", step=scale(1, by=lambda rewards: np.where(rewards > 2, np.nan, rewards))),
        NEXT_STEP,
        "rewards are numbers",
        "nan",
    ),
    "terminations dtype": (
        variant("V", step=scale(2, by=lambda flags: flags.astype(np.int8))),
        NEXT_STEP,
        "terminations are a bool array with one entry per env",
        "got int8 (3,)",
    ),
    "infos list": (
        variant("V", infos=lambda self, mask: {"age": self.ages.tolist(), "_age": mask.copy()}),
        NEXT_STEP,
        "infos have a row per env and bool masks",
        "reset: infos['age'] is [0, 0, 0], expected a NumPy array with one row per env",
    ),
    "infos no mask": (
        variant("V", infos=lambda self, mask: {"age": self.ages.copy()}),
        NEXT_STEP,
        "infos have a row per env and bool masks",
        "infos['age'] has no mask infos['_age']",
    ),
    "one buffer": (
        OneBuffer,
        NEXT_STEP,
        "observations returned earlier don't change",
        "step 0: changed what reset had returned; return copies, or say so by",
    ),
    "reused rewards": (
        ReusedRewards,
        DISABLED,
        "rewards returned earlier don't change",
        "step 1: changed what step 0 had returned",
    ),
    "dead reward": (
        variant("V", dead_step=dead_step(reward=1.5)),
        NEXT_STEP,
        "NEXT_STEP: the reward of the step after an end is 0",
        "got 1.5; its episode ended a step earlier, this step only resets it",
    ),
    "dead flag": (
        variant("V", dead_step=dead_step(ends=True)),
        NEXT_STEP,
        "NEXT_STEP: the flags of the step after an end are False",
        "is flagged; its episode ended a step earlier",
    ),
    "dead action": (
        variant("V", dead_step=dead_step(uses_action=True)),
        NEXT_STEP,
        "NEXT_STEP: the step after an end ignores its action",
        "in the first run and are",
    ),
    "no reset": (
        variant("V", dead_step=dead_step(starts=False)),
        NEXT_STEP,
        "an ended episode is followed by a new one",
        "is the last one of the old (first seen in env",
    ),
    "no final_obs": (
        variant("V", step=no_infos_of("final_obs")),
        SAME_STEP,
        "SAME_STEP: infos have final_obs of the envs that ended",
        "the episodes of envs array([",
    ),
    "no final_info": (
        variant("V", step=no_infos_of("final_info")),
        SAME_STEP,
        "SAME_STEP: infos have final_info of the envs that ended",
        "infos['_final_info'] marks",
    ),
    "final_obs dtype": (
        variant("V", end=final_obs_of(lambda obs: obs.astype(np.float64))),
        SAME_STEP,
        "SAME_STEP: final_obs are in single_observation_space",
        "infos['final_obs'][",
    ),
    "partial reset of all": (
        variant("V", reset=reset_all),
        DISABLED,
        "a partial reset leaves the other envs alone",
        " before and are array([",
    ),
    "unseeded steps": (
        variant("V", step=unseeded_noise),
        NEXT_STEP,
        "the same seed gives the same run",
        "step 0: observations of env 0 were array([",
    ),
    "one seed for all": (
        variant("V", seed_of=lambda self, seed, i: seed),
        NEXT_STEP,
        "envs are seeded differently",
        "all envs start alike after each of 8 resets with different seeds",
    ),
    "any number of actions": (
        variant("V", checked=no_count),
        NEXT_STEP,
        "actions of wrong number are refused",
        "step with 0 actions for 3 envs: step must raise Exception, but nothing was raised",
    ),
    "close once": (
        variant("V", close=close_once),
        NEXT_STEP,
        "close may be called twice ends without an error",
        "OSError: closed already",
    ),
    "crash": (
        variant("V", step=crash_in_step_5),
        NEXT_STEP,
        "run with random actions ends without an error",
        "step 5: OverflowError: physics exploded",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_vector_env_fails_by_its_rule_and_no_other(name):
    cls, mode, rule, text = BROKEN[name]
    with pytest.raises(VectorEnvCheckError) as caught:
        check_vector_env(cls(3, mode), num_steps=60, seed=5)
    assert list(caught.value.failures) == [rule]
    assert text in caught.value.failures[rule]
    assert str(caught.value).startswith(f"{cls.__name__} breaks a rule of vector envs:")
    assert f"\n1. {rule}: " in str(caught.value)
    assert isinstance(caught.value, AssertionError)


def test_missing_attributes_are_named():
    envs = DriftVectorEnv()
    del envs.single_action_space, envs.num_envs
    with pytest.raises(VectorEnvCheckError, match="no num_envs, single_action_space"):
        check_vector_env(envs)


def test_what_follows_from_another_failure_is_not_reported():
    """The counter envs number their episodes, so no run comes again."""
    with pytest.raises(VectorEnvCheckError) as caught:
        check_vector_env(SyncVectorEnv(counters([2, 3])), num_steps=20)
    assert list(caught.value.failures) == ["the same seed gives the same run"]
    assert "reset: observations of env 0 were" in str(caught.value)
