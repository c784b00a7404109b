"""check_vector_env names the rule that a broken vector env breaks."""

import gymnasium as gym
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


def case(rule, text, mode=NEXT_STEP, kind=None, **members):
    """A vector env that breaks one rule, and what the message says."""
    return pytest.param(kind or variant("V", **members), mode, rule, text, id=f"{rule}: {text}")


NUM_ENVS = setting(num_envs=lambda envs: 0)
OTHER_SPACE = setting(single_observation_space=lambda envs: spaces.Box(-9, 9, (2,)))
OTHER_ACTIONS = setting(action_space=lambda envs: batch_space(spaces.Discrete(2), 3))
FINAL_OBS_DTYPE = final_obs_of(lambda obs: obs.astype(np.float64))
BROKEN = [
    case("num_envs is a positive int", "it is 0", __init__=NUM_ENVS),
    case(
        "observation_space is the batch of single_observation_space",
        "it is Box(-999.0, 999.0, (3, 2), float32), expected Box(-9.0, 9.0, (3, 2), float32); use",
        __init__=OTHER_SPACE,
    ),
    case(
        "action_space is the batch of single_action_space",
        "it is MultiDiscrete([2 2 2]), expected MultiDiscrete([3 3 3])",
        __init__=OTHER_ACTIONS,
    ),
    case(
        "metadata has the autoreset mode",
        "metadata['autoreset_mode'] is None, expected a gymnasium.vector.AutoresetMode",
        __init__=setting(metadata=lambda envs: {}),
    ),
    case(
        "observations are in observation_space",
        "obs has shape (3, 2) and dtype float64, expected shape (3, 2) and dtype float32",
        observe=lambda self: self.points.copy(),
    ),
    case(
        "observations are in observation_space",
        "is 1000.0, outside [-999.0, 999.0]",
        observe=lambda self: np.where(self.points > 2, 1000, self.points).astype(np.float32),
    ),
    case(
        "reset returns observations and infos",
        "reset: returned array([[",
        reset=lambda self, **kwargs: DriftVectorEnv.reset(self, **kwargs)[0],
    ),
    case(
        "step returns five values",
        "step 0: returned (array([[",
        step=stepping(lambda *results: (*results[:3], results[4])),
    ),
    case(
        "rewards are a floating array with one entry per env",
        "step 0: got int64 (3,), expected a NumPy array of shape (3,)",
        step=scale(1, by=lambda rewards: rewards.astype(int)),
    ),
    case(
        "rewards are numbers",
        "nan",
        step=scale(1, by=lambda rewards: np.where(rewards > 2, np.nan, rewards)),
    ),
    case(
        "terminations are a bool array with one entry per env",
        "got int8 (3,)",
        step=scale(2, by=lambda flags: flags.astype(np.int8)),
    ),
    case(
        "infos have a row per env and bool masks",
        "reset: infos['age'] is [0, 0, 0], expected a NumPy array with one row per env",
        infos=lambda self, mask: {"age": self.ages.tolist(), "_age": mask.copy()},
    ),
    case(
        "infos have a row per env and bool masks",
        "infos['age'] has no mask infos['_age']",
        infos=lambda self, mask: {"age": self.ages.copy()},
    ),
    case(
        "observations returned earlier don't change",
        "step 0: changed what reset had returned; return copies, or say so by",
        kind=OneBuffer,
    ),
    case(
        "rewards returned earlier don't change",
        "step 1: changed what step 0 had returned",
        DISABLED,
        ReusedRewards,
    ),
    case(
        "NEXT_STEP: the reward of the step after an end is 0",
        "got 1.5; its episode ended a step earlier, this step only resets it",
        dead_step=dead_step(reward=1.5),
    ),
    case(
        "NEXT_STEP: the flags of the step after an end are False",
        "is flagged; its episode ended a step earlier",
        dead_step=dead_step(ends=True),
    ),
    case(
        "NEXT_STEP: the step after an end ignores its action",
        "in the first run and are",
        dead_step=dead_step(uses_action=True),
    ),
    case(
        "an ended episode is followed by a new one",
        "is the last one of the old (first seen in env",
        dead_step=dead_step(starts=False),
    ),
    case(
        "SAME_STEP: infos have final_obs of the envs that ended",
        "the episodes of envs array([",
        SAME_STEP,
        step=no_infos_of("final_obs"),
    ),
    case(
        "SAME_STEP: infos have final_info of the envs that ended",
        "infos['_final_info'] marks",
        SAME_STEP,
        step=no_infos_of("final_info"),
    ),
    case(
        "SAME_STEP: final_obs are in single_observation_space",
        "infos['final_obs'][",
        SAME_STEP,
        end=FINAL_OBS_DTYPE,
    ),
    case(
        "a partial reset leaves the other envs alone",
        " before and are array([",
        DISABLED,
        reset=reset_all,
    ),
    case(
        "the same seed gives the same run",
        "step 0: observations of env 0 were array([",
        step=unseeded_noise,
    ),
    case(
        "envs are seeded differently",
        "all envs start alike after each of 8 resets with different seeds",
        seed_of=lambda self, seed, i: seed,
    ),
    case(
        "actions of wrong number are refused",
        "step with 0 actions for 3 envs: step must raise Exception, but nothing was raised",
        checked=no_count,
    ),
    case(
        "close may be called twice ends without an error",
        "OSError: closed already",
        close=close_once,
    ),
    case(
        "run with random actions ends without an error",
        "step 5: OverflowError: physics exploded",
        step=crash_in_step_5,
    ),
]


@pytest.mark.parametrize(("cls", "mode", "rule", "text"), BROKEN)
def test_a_broken_vector_env_fails_by_its_rule_and_no_other(cls, mode, rule, text):
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


# -- rules of VecEnv ------------------------------------------------------------------------------


def broken_sync(mode=NEXT_STEP, **members):
    return type("Broken", (SyncVectorEnv,), members)(
        [lambda: gym.make("CartPole-v1")] * 3, autoreset_mode=mode
    )


def step_ignoring_out(self, actions, *, out=None):
    return SyncVectorEnv.step(self, actions)


def step_filling_half_of_out(self, actions, *, out=None):
    result = SyncVectorEnv.step(self, actions, out=out)
    if out is not None:
        out.rewards[2] = 7
    return result


def reset_popping(self, *, seed=None, options=None):
    mask = None if options is None else options.pop("reset_mask", None)
    return SyncVectorEnv.reset(
        self, seed=seed, options=None if mask is None else {"reset_mask": mask}
    )


def reset_with_one_seed(self, *, seed=None, options=None):
    seed = [seed, seed + 1, seed + 3] if isinstance(seed, int) else seed
    return SyncVectorEnv.reset(self, seed=seed, options=options)


def recv_in_order(self, min_envs=None, timeout=None, *, max_envs=None):
    batch = SyncVectorEnv.recv(self, min_envs, timeout, max_envs=max_envs)
    return batch._replace(env_ids=np.sort(batch.env_ids))


def recv_all(self, min_envs=None, timeout=None, *, max_envs=None):
    return SyncVectorEnv.recv(self, timeout=timeout)


def recv_of_nothing(self, *args, **options):
    if not self._calls.num_in_flight:
        raise KeyError("nothing was sent")
    return SyncVectorEnv.recv(self, *args, **options)


def reset_shaking_others(self, *, seed=None, options=None):
    result = SyncVectorEnv.reset(self, seed=seed, options=options)
    if options is not None:
        self.envs[1].unwrapped.state = np.zeros(4)
    return result


def send_with_no_memory(self, actions, env_ids=None):
    self._calls.in_flight[:] = False
    self._calls.num_in_flight = 0
    SyncVectorEnv.send(self, actions, env_ids)


def step_before_checking(self, actions, *, out=None):
    if np.shape(actions) != (3,):
        SyncVectorEnv.step(self, np.zeros(3, int))
    return SyncVectorEnv.step(self, actions, out=out)


def step_after_close(self, actions, *, out=None):
    if self.closed:
        raise RuntimeError("closed")
    return SyncVectorEnv.step(self, actions, out=out)


def step_before_reset(self, actions, *, out=None):
    if not self._calls.has_reset:
        raise ValueError("reset first")
    return SyncVectorEnv.step(self, actions, out=out)


def step_of_columns(self, actions, *, out=None):
    return SyncVectorEnv.step(self, np.ravel(actions), out=out)


BROKEN_VEC_ENVS = [
    ("recv", recv_of_nothing, "recv without send raises NoAsyncCallError", "nothing was sent"),
    (
        "step",
        step_ignoring_out,
        "step(out=) returns the caller's arrays, with what step returns",
        "other arrays than out's",
    ),
    (
        "step",
        step_filling_half_of_out,
        "step(out=) returns the caller's arrays, with what step returns",
        "rewards of env 2 were 1.0 in the first run and are 7.0 now",
    ),
    (
        "reset",
        reset_popping,
        "a partial reset leaves the caller's options alone",
        "options['reset_mask'] was removed or changed",
    ),
    (
        "reset",
        reset_with_one_seed,
        "reset(seed=s) gives what reset(seed=[s, s + 1, ...]) gives",
        "reset(seed=[5, 6, 7]): observations of env 2 were array([",
    ),
    ("recv", recv_in_order, "send and recv give what step gives", "in the first run and are"),
    ("recv", recv_all, "recv returns min_envs to max_envs envs", "max_envs=2) returned 3 envs"),
    (
        "reset",
        reset_shaking_others,
        "envs go on as before when another is reset",
        "the next step of the others gives",
    ),
    (
        "send",
        send_with_no_memory,
        "calls while envs are in flight raise AlreadyPendingCallError",
        "must raise AlreadyPendingCallError, but nothing was raised",
    ),
    (
        "step",
        step_before_checking,
        "refused actions step nothing",
        "the step after refused actions: observations of env 0 were",
    ),
    (
        "step",
        step_after_close,
        "calls after close raise ClosedEnvironmentError",
        "must raise ClosedEnvironmentError, but RuntimeError was: closed",
    ),
    (
        "step",
        step_before_reset,
        "step before the first reset raises ResetNeeded",
        "the error was ValueError: reset first",
    ),
    (
        "step",
        step_of_columns,
        "actions of wrong shape are refused",
        "step with actions of shape (3, 1): ",
    ),
]


@pytest.mark.parametrize(("name", "instead", "rule", "text"), BROKEN_VEC_ENVS)
def test_a_broken_vec_env_fails_by_its_rule(name, instead, rule, text):
    with pytest.raises(VectorEnvCheckError) as caught:
        check_vector_env(broken_sync(**{name: instead}), num_steps=30, seed=5)
    assert rule in caught.value.failures
    assert text in caught.value.failures[rule]
