import contextlib
import gc
import os
import threading
import time
import warnings

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from jit.toy_rolls import split_jobs

from vecenv.core.compiling import is_jit_off
from vecenv.jit import EnvKernels, JitVectorEnv, runner
from vecenv.jit.cartpole import CartPoleVectorEnv

pytestmark = pytest.mark.skipif(is_jit_off(), reason="without compiled code there are no threads")

NUM_ENVS = 256


def helper_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("vecenv-jit")]


def wait_for_no_helpers():
    deadline = time.monotonic() + 5.0
    while helper_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not helper_threads()


@pytest.fixture
def split_all(monkeypatch):
    """Split jobs however short they are, and let helpers sleep soon."""
    split_jobs(monkeypatch, rows_per_line=8)
    monkeypatch.setattr(runner, "NUM_SPINS", 200)
    yield
    gc.collect()
    assert wait_for_no_helpers(), "helpers outlive their vector env"


def actions_for(num_steps, num_envs=NUM_ENVS):
    return np.random.default_rng(0).integers(0, 2, (num_steps, num_envs))


def test_a_handful_of_envs_starts_no_threads():
    envs = CartPoleVectorEnv(64, num_threads=2)
    envs.reset(seed=0)
    for row in actions_for(50, 64):
        envs.step(row)
    assert helper_threads() == []


def test_there_are_as_many_threads_as_processors_allowed(monkeypatch):
    for processors in ({0}, {1, 3, 4}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, found=processors: found)
        assert CartPoleVectorEnv(2)._runner.num_threads == len(processors)


def test_helpers_asleep_awake_and_late_change_nothing(split_all):
    threaded, alone = CartPoleVectorEnv(NUM_ENVS, num_threads=3), CartPoleVectorEnv(NUM_ENVS)
    alone._runner.stop()
    pauses = np.random.default_rng(1).integers(0, 40, 600)
    assert (threaded.reset(seed=0)[0] == alone.reset(seed=0)[0]).all()
    for row, pause in zip(actions_for(600), pauses, strict=True):
        for one, other in zip(threaded.step(row)[:4], alone.step(row)[:4], strict=True):
            np.testing.assert_array_equal(one, other)
        if pause < 3:
            time.sleep(pause * 1e-3)  # longer than helpers stay awake
    assert len(helper_threads()) == 2
    threaded.close()
    assert wait_for_no_helpers()


def test_works_in_a_forked_child(split_all):
    envs = CartPoleVectorEnv(NUM_ENVS, num_threads=2)
    envs.reset(seed=0)
    actions = actions_for(20)
    for row in actions[:10]:
        envs.step(row)
    state = envs.state_dict()
    expected = [envs.step(row)[0] for row in actions[10:]][-1]
    envs.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads, from Python 3.12
        child = os.fork()
    if child == 0:
        code = 1
        try:
            is_same = [(envs.step(row)[0]) for row in actions[10:]][-1] == expected
            fresh = CartPoleVectorEnv(NUM_ENVS, num_threads=2)
            fresh.reset(seed=0)
            for row in actions[:10]:
                fresh.step(row)
            is_alike = fresh.state_dict()["states"] == state["states"]
            code = 0 if is_same.all() and is_alike.all() and len(helper_threads()) == 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal([envs.step(row)[0] for row in actions[10:]][-1], expected)


def failing_reset(state, rng):
    state.countdown = 3


def failing_step(state, action, rng):
    state.countdown -= 1
    if state.countdown == 0 and action == 1:
        raise ValueError("the kernel failed")
    return 0.0, False, False


def failing_observe(state, out):
    out[0] = state.countdown


FAILING = EnvKernels(
    state_dtype=[("countdown", np.int64)],
    observation_space=Box(-np.inf, np.inf, (1,), np.float32),
    action_space=Discrete(2),
    reset=failing_reset,
    step=failing_step,
    observe=failing_observe,
)


@pytest.mark.parametrize("row", [0, NUM_ENVS - 1])  # in the caller's part, in the helper's
def test_an_exception_of_a_kernel_reaches_the_caller(row, split_all):
    envs = JitVectorEnv(FAILING, NUM_ENVS, num_threads=2)
    envs.reset(seed=0)
    actions = np.zeros(NUM_ENVS, dtype=np.int64)
    actions[row] = 1
    envs.step(actions)
    envs.step(actions)
    with pytest.raises(ValueError, match="the kernel failed") as caught:
        envs.step(actions)
    assert "middle of a step" in caught.value.__notes__[0]
    envs.reset(seed=0)
    assert envs.step(actions)[0].tolist() == [[2.0]] * NUM_ENVS
    envs.close()


@contextlib.contextmanager
def used_elsewhere(envs):
    """Have the envs be in use."""
    del envs._runner._free[0]
    yield
    envs._runner._free[0] = None


def test_use_by_two_threads_at_once_is_refused():
    envs = CartPoleVectorEnv(2)
    envs.reset(seed=0)
    with used_elsewhere(envs), pytest.raises(RuntimeError, match="another thread"):
        envs.step([0, 0])
    with used_elsewhere(envs), pytest.raises(RuntimeError, match="another thread"):
        envs.observe()
    envs.step([0, 0])
