"""What Ctrl-C and a fork find at any instant of a call of compiled envs.

Instants are chosen: what the runner calls is replaced by something that does the same and then
does what a signal handler might. `tests/fuzz/interrupts.py` takes random ones.
"""

import time

import numpy as np
import pytest
from envs import begun
from gymnasium.error import NoAsyncCallError, ResetNeeded
from jit.test_threads import split_all, wait_for_no_helpers  # noqa: F401  # a fixture

from vecenv.core.compiling import is_jit_off
from vecenv.jit import runner
from vecenv.jit.cartpole import CartPoleVectorEnv

NUM_ENVS = 256
FIRST, SECOND = np.random.default_rng(0).integers(0, 2, (2, NUM_ENVS))


def interrupting(function, *, before=False):
    """Do what a function does, and be interrupted after it, or before, at its first call."""
    left = [True]

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
    envs = begun(CartPoleVectorEnv(NUM_ENVS, **{"num_threads": 3, **options}))
    for _ in range(3):
        envs.step(FIRST)
    return envs


@pytest.mark.usefixtures("split_all")
@pytest.mark.skipif(is_jit_off(), reason="without compiled code nothing is split")
def test_an_interrupted_step_asks_for_a_reset_and_then_all_is_right(monkeypatch):
    """As helpers have been woken."""
    envs, fresh = ready_envs(), ready_envs(num_threads=1)
    with monkeypatch.context() as patch:
        patch.setattr(runner._Helpers, "wake", interrupting(runner._Helpers.wake))
        with pytest.raises(KeyboardInterrupt):
            for _ in range(1000):  # helpers are not always asleep
                envs.step(SECOND)
                time.sleep(0.001)
    for refused in (lambda: envs.step(SECOND), envs.state_dict, envs.observe):
        with pytest.raises(ResetNeeded, match="call `reset` first"):
            refused()
    for _ in range(5):
        np.testing.assert_array_equal(envs.reset(seed=0)[0], fresh.reset(seed=0)[0])
        for actions in (FIRST, SECOND):
            np.testing.assert_array_equal(envs.step(actions)[0], fresh.step(actions)[0])
    envs.close()
    assert wait_for_no_helpers()


@pytest.mark.parametrize("instant", ["_end_infos", "mark_received"])
def test_a_recv_that_was_interrupted_asks_for_a_reset(instant, monkeypatch):
    envs = ready_envs(max_episode_steps=4, episode_infos=True)  # the step to come ends episodes
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


def test_episodes_longer_than_32_bits_count_are_truncated():
    limit = 2**31 + 1
    envs = begun(CartPoleVectorEnv(2, max_episode_steps=limit))
    envs.episode_lengths[:] = limit - 2, 5
    assert not envs.step([0, 0])[3].any()
    assert envs.step([0, 0])[3].tolist() == [True, False]
    assert envs.last_lengths[0] == limit
