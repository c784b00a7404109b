"""What Ctrl-C, a fork and other threads find at any instant of a call of compiled envs.

Instants are chosen: what the runner calls is replaced by something that does the same and then
does what a signal handler might. `tests/fuzz/interrupts.py` takes random ones.
"""

import time

import numpy as np
import pytest
from gymnasium.error import NoAsyncCallError, ResetNeeded
from gymnasium.spaces import Discrete
from jit.test_threads import helper_threads, split_all, wait_for_no_helpers  # noqa: F401  # a fixture
from programs import printed

from vecenv.core.compiling import is_jit_off
from vecenv.core.errors import ActionError
from vecenv.jit import EnvKernels, JitVectorEnv, runner
from vecenv.jit.cartpole import CARTPOLE, CartPoleVectorEnv
from vecenv.jit.driver import FIRST_PART, LINE

needs_compiler = pytest.mark.skipif(is_jit_off(), reason="without compiled code nothing is split")
all_split = pytest.mark.usefixtures("split_all")
NUM_ENVS = 256
FIRST, SECOND = np.random.default_rng(0).integers(0, 2, (2, NUM_ENVS))


def interrupting(function, times=1, *, before=False):
    """Do what a function does, and be interrupted after it, or before, at its first calls."""
    left = [True] * times

    def interrupted(*args, **kwargs):
        strikes = bool(left) and left.pop()
        if strikes and before:
            raise KeyboardInterrupt
        result = function(*args, **kwargs)
        if strikes:
            raise KeyboardInterrupt
        return result

    return interrupted


def ready_envs(**options):
    """Envs after three steps, whose helpers, if they have any, have fallen asleep."""
    envs = CartPoleVectorEnv(NUM_ENVS, **{"num_threads": 3, **options})
    envs.reset(seed=0)
    for _ in range(3):
        envs.step(FIRST)
    end = time.monotonic() + 10.0
    if not is_jit_off() and envs._runner._helpers is not None:
        first = FIRST_PART + (envs._runner.num_threads + 1) * LINE
        while not envs._runner._control[first::LINE].all() and time.monotonic() < end:
            time.sleep(0.001)
    return envs


def equal(one, other):
    return all((one[name] == other[name]).all() for name in ("states", "runs"))


def twin_states():
    """States of an env that nobody interrupts: before and after a step, and after another one."""
    alone = ready_envs(num_threads=1)
    states = [alone.state_dict()]
    for actions in (SECOND, FIRST):
        alone.step(actions)
        states.append(alone.state_dict())
    return [without_returns(state) for state in states]


def without_returns(state):
    """NaN, of episodes that have not ended, differs from itself."""
    state["runs"]["last_return"] = 0.0
    return state


INSTANTS = {
    "as the job has been opened": (runner, "_publish", False),
    "before helpers are woken": (runner._Helpers, "wake", True),
    "as helpers have been woken": (runner._Helpers, "wake", False),
    "as its times are noted": (runner.CompiledRunner, "_note_times", True),
}


@all_split
@needs_compiler
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("instant", INSTANTS)
def test_an_interrupted_step_is_done_by_all_envs_or_by_none(instant, times, monkeypatch):
    where, name, before = INSTANTS[instant]
    old, new, later = twin_states()
    envs = ready_envs()
    with monkeypatch.context() as patch:
        patch.setattr(where, name, interrupting(getattr(where, name), times, before=before))
        with pytest.raises(KeyboardInterrupt):
            envs.step(SECOND)
    try:
        state = without_returns(envs.state_dict())
    except ResetNeeded:
        assert times > 1  # the end of the step was interrupted, too
        np.testing.assert_array_equal(
            envs.reset(seed=0)[0], CartPoleVectorEnv(NUM_ENVS).reset(seed=0)[0]
        )
        return
    assert equal(state, old) or equal(state, new)
    assert envs._runner._helpers.arrays == ()  # nobody works on them any more
    envs.step(SECOND if equal(state, old) else FIRST)
    assert equal(without_returns(envs.state_dict()), new if equal(state, old) else later)
    envs.close()
    assert wait_for_no_helpers()


@pytest.mark.parametrize("instant", ["_end_infos", "mark_received"])
def test_a_recv_that_was_interrupted_asks_for_a_reset(instant, monkeypatch):
    envs = ready_envs(max_episode_steps=4)  # the step to come ends episodes
    envs.send(SECOND)
    owner = envs if instant == "_end_infos" else envs._calls
    call = interrupting(getattr(owner, instant), before=True)
    monkeypatch.setattr(owner, instant, call)
    with pytest.raises(KeyboardInterrupt):
        envs.recv(NUM_ENVS - 1)
    with pytest.raises((ResetNeeded, NoAsyncCallError)):
        envs.recv(NUM_ENVS - 1)
    for refused in (envs.send, envs.step):
        with pytest.raises(ResetNeeded, match="call `reset` first"):
            refused(SECOND)
    envs.reset(seed=0)
    envs.send(FIRST)
    assert len(envs.recv().env_ids) == NUM_ENVS


# -- forks -----------------------------------------------------------------------------------

FORKS = """
import os, signal, sys, threading, traceback
import numpy as np
from gymnasium.error import ResetNeeded
from vecenv.jit import runner
from vecenv.jit.cartpole import CartPoleVectorEnv

runner.SPLIT_NS, runner.SplitChoice.note = 1.0, lambda self, elapsed_ns: False
runner.WAKE_NS, runner.NUM_TIMED = 0.0, 1
NUM_ENVS, NUM_THREADS = 10_000, int(sys.argv[1])
actions = np.random.default_rng(0).integers(0, 2, (8, NUM_ENVS))


def trajectory(envs):
    return [envs.reset(seed=0)[0], *(envs.step(row)[0] for row in actions)]


def child_of(envs, expected):
    signal.alarm(20)  # it must not hang
    try:
        envs.step(actions[0])
    except ResetNeeded:
        told.append(1)
    same = [(a == b).all() for a, b in zip(trajectory(envs), expected, strict=True)]
    envs.close()
    return 0 if all(same) else 3


envs, told = CartPoleVectorEnv(NUM_ENVS, num_threads=NUM_THREADS), []
expected = trajectory(envs)
is_over, results = threading.Event(), []


def step_on():
    while not is_over.is_set():
        results.append(all((a == b).all() for a, b in zip(trajectory(envs), expected)))


thread = threading.Thread(target=step_on)
thread.start()
codes = []
for _ in range(15):
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = child_of(envs, expected)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code + 10 * len(told) if code == 0 else code)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
is_over.set()
thread.join()
assert set(codes) <= {0, 10}, codes
assert results and all(results), "the parent's results are wrong"
print(codes.count(10))
"""


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("num_threads", ["1", "2"])
def test_a_child_forked_during_a_step_asks_for_a_reset_and_then_is_right(num_threads):
    """The lock was for ever taken in the child, or it waited for threads that it does not have."""
    printed(FORKS, num_threads)


# -- other threads and large numbers ---------------------------------------------------------


def marking_reset(state, rng):
    state.worst = 0


def marking_step(state, action, rng):
    state.worst = max(state.worst, abs(action))
    return 0.0, False, False


def marking_observe(state, out):
    out[:] = 0
    out[0] = state.worst


def marking_kernels():
    return EnvKernels(
        state_dtype=[("worst", np.int64)],
        observation_space=CARTPOLE.observation_space,
        action_space=Discrete(3),
        reset=marking_reset,
        step=marking_step,
        observe=marking_observe,
    )


@pytest.mark.parametrize("debug", [True, False])
def test_actions_that_another_thread_changes_after_the_check_reach_no_kernel(debug):
    envs = JitVectorEnv(marking_kernels(), 4, num_threads=1, debug=debug)
    envs.reset(seed=0)
    actions = np.array([0, 1, 2, 1])
    name = "_run_rows" if isinstance(envs._runner, runner.PythonRunner) else "_attend"
    step_rows = getattr(envs._runner, name)

    def changing(*args):
        actions[:] = 10**6
        return step_rows(*args)

    setattr(envs._runner, name, changing)
    envs.step(actions)
    setattr(envs._runner, name, step_rows)
    assert envs.states["worst"].tolist() == [0, 1, 2, 1]
    with pytest.raises(ActionError, match="nothing was stepped"):
        envs.step(actions)


@pytest.mark.parametrize("limit", [2**31, 2**31 + 1, 2**40])
def test_episodes_longer_than_32_bits_count_are_truncated(limit):
    envs = CartPoleVectorEnv(2, max_episode_steps=limit)
    envs.reset(seed=0)
    envs.episode_lengths[:] = limit - 2, 5
    assert not envs.step([0, 0])[3].any()
    assert envs.step([0, 0])[3].tolist() == [True, False]
    assert envs.last_lengths[0] == limit
