import gc
import os
import threading
import time
import warnings

import numpy as np
import pytest
from envs import begun
from jit.toy_env import small_kernels
from jit.toy_rolls import assert_same, split_jobs

from vecenv.core.compiling import is_jit_off
from vecenv.jit import JitVectorEnv, runner
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
    envs = begun(CartPoleVectorEnv(64, num_threads=2))
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
        assert_same(threaded.step(row)[:4], alone.step(row)[:4])
        if pause < 3:
            time.sleep(pause * 1e-3)  # longer than helpers stay awake
    assert len(helper_threads()) == 2
    threaded.close()
    assert wait_for_no_helpers()


def test_works_in_a_forked_child(split_all):
    envs = begun(CartPoleVectorEnv(NUM_ENVS, num_threads=2))
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
            fresh = begun(CartPoleVectorEnv(NUM_ENVS, num_threads=2))
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


FAILING = small_kernels([("countdown", np.int64)], failing_reset, failing_step, failing_observe)


@pytest.mark.parametrize("row", [0, NUM_ENVS - 1])  # in the caller's part, in the helper's
def test_an_exception_of_a_kernel_reaches_the_caller(row, split_all):
    envs = begun(JitVectorEnv(FAILING, NUM_ENVS, num_threads=2))
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


def run_steps(choice, num_steps, split_ns, alone_ns):
    """Do steps as the choice says; return the share of those that were split."""
    num_split = 0
    for _ in range(num_steps):
        num_split += choice.num_parts(100) > 1
        choice.note(split_ns if choice.is_split else alone_ns)
    return num_split / num_steps


@pytest.mark.parametrize(("split_ns", "most_are_split"), [(60_000, True), (130_000, False)])
def test_steps_are_done_in_the_faster_way(split_ns, most_are_split):
    share = run_steps(runner.SplitChoice(100), 5000, split_ns, 100_000)
    assert share > 0.95 if most_are_split else share < 0.05


def test_what_is_faster_is_found_out_anew_and_in_spite_of_a_few_slow_steps():
    choice = runner.SplitChoice(100)
    for k in range(2 * runner.NUM_TRIED):
        choice.note(10**9 if k % 5 == 0 else 60_000 if choice.is_split else 100_000)
    assert choice.is_split
    run_steps(choice, runner.NUM_KEPT + 2 * runner.NUM_TRIED, 150_000, 100_000)
    assert run_steps(choice, runner.NUM_KEPT // 2, 150_000, 100_000) < 0.05
