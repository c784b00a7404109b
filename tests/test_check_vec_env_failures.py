"""check_vector_env names the rule of VecEnv that a broken one breaks."""

import gymnasium as gym
import numpy as np
import pytest
from vector_envs import (
    NEXT_STEP,
)

from vecenv import SyncVectorEnv
from vecenv.check import VectorEnvCheckError, check_vector_env


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


BROKEN_VEC_ENVS = {
    "recv of nothing": (
        {"recv": recv_of_nothing},
        "recv without send raises NoAsyncCallError",
        "nothing was sent",
    ),
    "out ignored": (
        {"step": step_ignoring_out},
        "step(out=) returns the caller's arrays, with what step returns",
        "other arrays than out's",
    ),
    "out half written": (
        {"step": step_filling_half_of_out},
        "step(out=) returns the caller's arrays, with what step returns",
        "rewards of env 2 were 1.0 in the first run and are 7.0 now",
    ),
    "options changed": (
        {"reset": reset_popping},
        "a partial reset leaves the caller's options alone",
        "options['reset_mask'] was removed or changed",
    ),
    "seeds": (
        {"reset": reset_with_one_seed},
        "reset(seed=s) gives what reset(seed=[s, s + 1, ...]) gives",
        "reset(seed=[5, 6, 7]): observations of env 2 were array([",
    ),
    "recv mixes rows": (
        {"recv": recv_in_order},
        "send and recv give what step gives",
        "in the first run and are",
    ),
    "recv returns too many": (
        {"recv": recv_all},
        "recv returns min_envs to max_envs envs",
        "max_envs=2) returned 3 envs",
    ),
    "partial reset": (
        {"reset": reset_shaking_others},
        "envs go on as before when another is reset",
        "the next step of the others gives",
    ),
    "send again": (
        {"send": send_with_no_memory},
        "calls while envs are in flight raise AlreadyPendingCallError",
        "must raise AlreadyPendingCallError, but nothing was raised",
    ),
    "steps too early": (
        {"step": step_before_checking},
        "refused actions step nothing",
        "the step after refused actions: observations of env 0 were",
    ),
    "step after close": (
        {"step": step_after_close},
        "calls after close raise ClosedEnvironmentError",
        "must raise ClosedEnvironmentError, but RuntimeError was: closed",
    ),
    "step before reset": (
        {"step": step_before_reset},
        "step before the first reset raises ResetNeeded",
        "the error was ValueError: reset first",
    ),
    "columns": (
        {"step": step_of_columns},
        "actions of wrong shape are refused",
        "step with actions of shape (3, 1): ",
    ),
}


@pytest.mark.parametrize("name", BROKEN_VEC_ENVS)
def test_a_broken_vec_env_fails_by_its_rule(name):
    members, rule, text = BROKEN_VEC_ENVS[name]
    with pytest.raises(VectorEnvCheckError) as caught:
        check_vector_env(broken_sync(**members), num_steps=30, seed=5)
    assert rule in caught.value.failures
    assert text in caught.value.failures[rule]
