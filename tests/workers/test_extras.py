"""Published arrays, infos of all kinds, the choice of a backend, what is gone."""

import functools
import inspect
import os
import time

import gymnasium as gym
import numpy as np
import pytest
from envs import counters
from gymnasium.spaces import Box, Discrete
from workers.faulty_envs import FINE, RAISE, NapEnv, faulty, wait_until_gone

from vecenv import EnvCreationError, SyncVectorEnv, choose, make_vec
from vecenv.choose import Probe, choose_backend
from vecenv.workers.env import AsyncVectorEnv


class StatefulEnv(gym.Env):
    """Publishes its state; the info has fields of fixed shape."""

    observation_space = Box(-1, 99, (1,), np.float32)
    action_space = Discrete(2)
    publish = {"true_state": Box(-1, 99, (3,), np.float64)}

    def __init__(self, name):
        self.name = name
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        info = {"height": 0.5 * self.count, "joints": np.arange(2) + self.name}
        if self.count % 2:
            info["odd"] = {"depth": self.count}
        return np.zeros(1, np.float32), 0.0, False, False, info

    @property
    def true_state(self):
        return np.array([self.name, self.count, 7.0])


@pytest.mark.parametrize("caller_steps", [False, True])
def test_published_arrays_are_shared_memory_and_always_the_latest(caller_steps):
    fns = [functools.partial(StatefulEnv, name) for name in range(3)]
    pool = AsyncVectorEnv(fns, num_workers=2, caller_steps=caller_steps)
    state = pool.published["true_state"]
    for count in range(3):
        if count == 0:
            pool.reset()
        else:
            pool.step([0] * 3)
        assert state.tolist() == [[name, count, 7] for name in range(3)]
    pool.send([0], [1])
    pool.recv()
    assert state[:, 1].tolist() == [2, 3, 2]
    pool.close()
    other = AsyncVectorEnv(fns, num_workers=2, publish={"count": Box(0, 99, (), np.int64)})
    other.reset()
    other.step([0] * 3)
    assert set(other.published) == {"count"}
    assert other.published["count"].tolist() == [1, 1, 1]
    other.close()


class QuickEnv(NapEnv):
    def wait(self):
        pass


def test_cheap_envs_are_stepped_here_and_waiting_ones_elsewhere():
    choice = choose_backend(counters([9] * 2))
    assert (choice.backend, choice.options) == ("sync", {})
    for _ in range(5):  # where other programs want the cores, a trial may see it compute
        choice = choose_backend([NapEnv] * 8)
        if "overlap" in choice.reason:
            break
    assert "overlap" in choice.reason
    assert (choice.backend, choice.options) == ("async", {"num_workers": 8})
    AsyncVectorEnv([NapEnv] * 8, **choice.options).close()


def trial(found, monkeypatch):
    """Return the choice for 8 envs, given what their trial has found."""

    def try_out(env_fn, timeout):
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(choose, "try_out", try_out)
    return choose_backend(counters([9] * 8))


@pytest.mark.parametrize(
    ("step_s", "cores", "expected"),
    [
        (4e-5, 2, ("async", {"caller_steps": True})),
        (2e-5, 2, ("sync", {})),
        (2e-5, 8, ("async", {"caller_steps": True})),
        (1e-2, 2, ("async", {})),
        (1e-2, 1, ("sync", {})),
    ],
)
def test_workers_are_chosen_where_sharing_a_step_pays_for_handing_it_over(
    step_s, cores, expected, monkeypatch
):
    monkeypatch.setattr(choose, "usable_cores", lambda: cores)
    choice = trial(Probe(step_s, False), monkeypatch)
    assert (choice.backend, choice.options) == expected
    assert choice.reason.startswith("a step of all 8 envs takes about ")


@pytest.mark.parametrize("step_s", [0.0, 1e-3])
def test_envs_of_which_a_process_holds_one_get_a_worker_each(step_s, monkeypatch):
    class Only(QuickEnv):
        count = 0

        def __init__(self):
            super().__init__()
            if Only.count:
                raise RuntimeError("cannot create multiple emulators per process")
            Only.count += 1

        def close(self):
            Only.count -= 1

    monkeypatch.setattr(choose, "try_out", lambda env_fn, timeout: Probe(step_s, False))
    monkeypatch.setattr(choose, "usable_cores", lambda: 2)
    envs = make_vec(Only, 4, backend="auto")
    assert type(envs) is AsyncVectorEnv and envs.num_workers == 4
    assert Only.count == 0  # no env is left in this process
    envs.reset()
    assert envs.step([0] * 4)[0].shape[0] == 4
    envs.close()


class HangsElsewhere(QuickEnv):
    def __init__(self, pid):
        self.pid = pid

    def step(self, action):
        if os.getpid() != self.pid:
            time.sleep(60)
        return super().step(action)


def test_an_env_that_hangs_in_the_trial_is_stepped_here(caplog, monkeypatch):
    monkeypatch.setattr(choose, "_TRIAL_S", 0.3)
    envs = make_vec(functools.partial(HangsElsewhere, os.getpid()), 4, backend="auto")
    assert type(envs) is SyncVectorEnv
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "has not ended after 0.3 s" in record.getMessage()
    envs.reset()
    envs.step([0] * 4)
    envs.close()


def test_an_env_that_ends_its_process_in_the_trial_does_not_end_this_one(caplog):
    with pytest.raises(EnvCreationError, match="exited with code 3 during the creation"):
        make_vec(lambda: os._exit(3), 4, backend="auto")
    assert "exited with code 3" in caplog.text


def test_a_worker_function_is_left_to_gymnasiums_class():
    with pytest.raises(ValueError, match="leave it out, or use gymnasium"):
        AsyncVectorEnv(faulty(2), worker=gym.vector.async_vector_env._async_worker)


def test_the_signature_is_that_of_gymnasiums_class_and_more():
    ours = list(inspect.signature(AsyncVectorEnv).parameters)
    theirs = list(inspect.signature(gym.vector.AsyncVectorEnv).parameters)
    assert ours[: len(theirs)] == theirs


class VectorInEnv(gym.Env):
    """Has a vector env with workers of its own."""

    observation_space, action_space = Box(-1, 1000, (2, 2), np.float32), Discrete(7)

    def __init__(self, context=None):
        self.inner = AsyncVectorEnv(faulty(2), num_workers=2, context=context)

    def reset(self, *, seed=None, options=None):
        return self.inner.reset(seed=seed)[0], {}

    def step(self, action):
        obs, rewards, *_ = self.inner.step([action] * 2)
        return obs, float(rewards.sum()), False, False, {}

    def pids(self):
        return self.inner.call("pid")

    def close(self):
        self.inner.close()


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_vector_env_with_workers_may_be_in_a_worker(context):
    envs = AsyncVectorEnv([functools.partial(VectorInEnv, context)] * 2, num_workers=1)
    envs.reset()
    obs, rewards, *_ = envs.step([FINE, FINE])
    assert obs[:, :, 1].tolist() == [[1, 1], [1, 1]] and rewards.tolist() == [2, 2]
    pids = [pid for pair in envs.call("pids") for pid in pair]
    assert len(set(pids)) == 4
    with pytest.raises(ValueError, match="broken joint 1"):
        envs.step([FINE, RAISE])
    envs.close()
    assert wait_until_gone(pids) == []
