"""`state_dict` of envs that are stepped one by one: they go on as if nothing had happened."""

import copy
import functools
import gc
import pickle
import threading

import gymnasium as gym
import numpy as np
import pytest
from choices import fast_are, product
from envs import NUM_ENVS, SPACES, CounterEnv, RandomEnv, restart_ended
from equality import assert_same
from gymnasium.error import ResetNeeded
from gymnasium.utils import EzPickle
from vector_envs import DriftVectorEnv

from vecenv import AsyncVectorEnv, EnvStateError, SyncVectorEnv, make_vec
from vecenv.wrappers import ClipReward

SPACE = gym.spaces.Dict({name: SPACES[name] for name in ("nested", "float32(3,)", "text")})


def make(backend, mode="NextStep", space=SPACE, **kwargs):
    env_fns = [functools.partial(RandomEnv, space)] * NUM_ENVS
    if backend == "sync":
        return SyncVectorEnv(env_fns, autoreset_mode=mode)
    return AsyncVectorEnv(env_fns, autoreset_mode=mode, **{"num_workers": 2, **kwargs})


def play(envs, first, last):
    """Step with actions that depend on the number of the step; return all results."""
    results = []
    for number in range(first, last):
        result = envs.step([(number + k) % 4 for k in range(NUM_ENVS)])
        results.append((result, restart_ended(envs, result)))
    return results


@pytest.mark.parametrize(
    ("saver", "loader", "mode"),
    fast_are(
        [("sync", "async", "SameStep"), ("async", "sync", "NextStep")],
        [
            ("sync", "sync", "NextStep"),
            ("sync", "async", "SameStep"),
            ("async", "sync", "NextStep"),
            ("async", "async", "Disabled"),
        ],
    ),
)
def test_envs_go_on_from_a_state_as_if_they_had_not_been_saved(saver, loader, mode):
    envs, other = make(saver, mode), make(loader, mode)
    envs.reset(seed=1)
    other.reset(seed=2)
    play(envs, 0, 7)
    if mode == "NextStep":  # some episodes have just ended, so that the next step only resets
        while not (envs.step([0] * NUM_ENVS)[2]).any():
            pass
    state = pickle.loads(pickle.dumps(envs.state_dict()))
    other.load_state_dict(state)
    expected = play(envs, 7, 30)
    assert_same(play(other, 7, 30), expected)
    envs.load_state_dict(state)  # back to where it was
    assert_same(play(envs, 7, 30), expected)
    envs.close()
    other.close()


def test_new_async_envs_need_no_reset_before_a_state_is_loaded_and_know_the_last_observations():
    envs = make("sync")
    obs, _ = envs.reset(seed=3)
    other = make("async", caller_steps=True, num_workers=1, on_error="restart")
    other.load_state_dict(envs.state_dict())
    mask = np.array([True, False, False, False, True])
    chosen = {"reset_mask": mask}
    results = [each.reset(seed=5, options=chosen) for each in (envs, other)]
    assert_same(*results)
    assert_same(results[0][0]["text"][1:4], obs["text"][1:4])
    for each in (envs, other):
        each.send([1], [4])
    assert_same(other.recv()[:4], envs.recv()[:4])
    other.close()


class Simulator(CounterEnv, EzPickle):
    """Of those that pickle as a new env of the same arguments."""

    def __init__(self, engine=None):
        EzPickle.__init__(self, engine)
        super().__init__(length=9)
        self.engine = None if engine is None else threading.Lock()  # which can't be pickled


def test_envs_that_would_be_pickled_as_new_ones_are_saved_with_what_is_in_them():
    envs, other = (SyncVectorEnv([Simulator]) for _ in range(2))
    envs.reset()
    envs.step([0])
    other.load_state_dict(envs.state_dict())
    assert other.step([0])[0].tolist() == [[0, 0, 2]]


@pytest.mark.parametrize("backend", [SyncVectorEnv, AsyncVectorEnv])
def test_an_env_that_cannot_be_pickled_is_named_and_goes_on(backend):
    envs = backend([functools.partial(CounterEnv, length=9), lambda: Simulator("C++")])
    envs.reset()
    with pytest.raises(EnvStateError, match=r"env 1 can't be saved.*TypeError.*lock"):
        envs.state_dict()
    assert envs.step([0, 0])[1].tolist() == [1, 1]
    envs.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "another"}, "no state of envs that are stepped one by one"),
        ({"envs": []}, "state has 0 envs, expected 5"),
        ({"envs": [None] * NUM_ENVS}, "has no pickles .* unpickling runs code"),
        ({"envs": [b"no pickle"] * NUM_ENVS}, "env 0 can't be loaded, .*UnpicklingError"),
        ({"space": SPACES["discrete"]}, "env 0 is of an env with the space"),
    ],
)
def test_states_that_cannot_be_loaded_are_refused_and_change_nothing(changed, message):
    envs, twin = make("sync"), make("sync")
    for each in (envs, twin):
        each.reset(seed=1)
    source = make("sync", space=changed.get("space", SPACE))
    source.reset()
    with pytest.raises(EnvStateError, match=message):
        envs.load_state_dict(source.state_dict() | changed)
    assert_same(play(envs, 0, 5), play(twin, 0, 5))


def test_async_envs_of_which_some_could_not_be_loaded_ask_for_a_reset():
    envs = make("async")
    envs.reset()
    state = envs.state_dict()
    state["envs"][3] = b"no pickle"
    with pytest.raises(EnvStateError, match=r"env 3 can't be loaded.*call `reset`"):
        envs.load_state_dict(state)
    with pytest.raises(ResetNeeded, match="env 3 can't be loaded"):
        envs.step([0] * NUM_ENVS)
    envs.reset(seed=1)
    envs.close()


def test_a_state_is_of_envs_that_were_reset_and_a_backend_without_one_says_so():
    envs = make("sync")
    with pytest.raises(ResetNeeded):
        envs.state_dict()
    envs.reset()
    envs.send([0], [0])
    with pytest.raises(gym.error.AlreadyPendingCallError):
        envs.state_dict()


@pytest.mark.parametrize(
    ("copied", "backend"),
    fast_are(
        [(copy.copy, "sync"), (copy.deepcopy, "jit"), (pickle.dumps, "async")],
        product([copy.copy, copy.deepcopy, pickle.dumps], ["sync", "async", "jit"]),
    ),
)
def test_copies_are_refused_and_leave_the_envs_open(backend, copied):
    """A shallow copy that was dropped closed the envs of the one that goes on."""
    envs = make_vec("JitCartPole-v1" if backend == "jit" else "CartPole-v1", 2, backend=backend)
    try:
        envs.reset(seed=1)
        for vec_env in (envs, ClipReward(envs, -1, 1)):
            with pytest.raises(TypeError, match=r"can't be copied or pickled: .*load_state_dict"):
                copied(vec_env)
        gc.collect()
        envs.step(np.zeros(2, np.int64))
    finally:
        envs.close()


def test_vector_envs_without_a_state_say_so():
    assert not hasattr(DriftVectorEnv, "state_dict")  # a Gymnasium vector env
    from vecenv import VecEnv

    with pytest.raises(EnvStateError, match="VecEnv can't save the state"):
        VecEnv().state_dict()
