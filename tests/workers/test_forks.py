"""Processes that are forked from the caller, or from a worker, leave the parent's envs alone."""

import os

import programs
import pytest
from workers.faulty_envs import FINE, faulty

from vecenv import AsyncVectorEnv, ForkedEnvError


def in_fork(act):
    """Call `act` in a fork and return its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refuses(call, *args, **kwargs):
    with pytest.raises(ForkedEnvError, match=r"in process \d+, a fork of process \d+, which this"):
        call(*args, **kwargs)


@pytest.fixture
def envs():
    made = AsyncVectorEnv(faulty(4), num_workers=2)
    made.reset(seed=1)
    yield made
    made.close()


def test_every_call_of_a_fork_but_close_is_refused_and_the_parent_does_not_notice(envs):
    rollout = envs.allocate((3,))
    pids = set(envs.call("pid"))

    def act():
        refuses(envs.reset)
        refuses(envs.reset_async)
        refuses(envs.reset_wait)
        refuses(envs.step, [FINE] * 4)
        refuses(envs.step_async, [FINE] * 4)
        refuses(envs.step_wait)
        refuses(envs.send, [FINE] * 4)
        refuses(envs.recv)
        refuses(envs.call, "pid")
        refuses(envs.call_async, "pid")
        refuses(envs.call_wait)
        refuses(envs.get_attr, "count")
        refuses(envs.set_attr, "count", 7)
        refuses(envs.render)
        refuses(lambda: envs.np_random_seed)
        refuses(envs.timing.enable)
        envs.close()
        envs.close()
        refuses(envs.step, [FINE] * 4)

    assert in_fork(act) == 0
    assert envs.step([FINE] * 4)[0][:, 1].tolist() == [1] * 4
    assert envs.allocate((3,)).ctypes.data != rollout.ctypes.data
    assert set(envs.call("pid")) == pids


def test_a_fork_has_envs_of_its_own(envs):
    def act():
        with pytest.raises(ForkedEnvError):
            envs.reset()
        own = AsyncVectorEnv(faulty(3), num_workers=2, context="fork")
        own.reset()
        assert own.step([FINE] * 3)[0][:, 1].tolist() == [1] * 3
        rows = own.allocate((2, 3))
        rows[:] = 1
        own.close()

    assert in_fork(act) == 0
    assert envs.step([FINE] * 4)[0][:, 1].tolist() == [1] * 4


def run(code, kind="compiled"):
    """Run a program; return its exit code and what it has printed."""
    done = programs.run(code, kind=kind)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.split()


# -- children that are reaped by others -----------------------------------------------------------

REAPED = """
import os, signal, time
from workers.faulty_envs import DIE, FINE, faulty, wait_until_gone
from vecenv import AsyncVectorEnv, WorkerDiedError

if {how!r} == "ignored":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
elif {how!r} == "handler":
    def reap(*_):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
    signal.signal(signal.SIGCHLD, reap)
envs = AsyncVectorEnv(faulty(4), num_workers=2, context={context!r}, on_error="restart")
envs.reset()
assert envs.step([FINE, FINE, FINE, DIE])[3].tolist() == [False, False, True, True]
pids = set(envs.call("pid"))
begin = time.monotonic()
envs.close(timeout=100)
assert wait_until_gone(pids) == [] and time.monotonic() - begin < 50
envs = AsyncVectorEnv(faulty(4), num_workers=2, context={context!r})
envs.reset()
begin = time.monotonic()
try:
    envs.step([FINE, FINE, FINE, DIE])
except WorkerDiedError as error:
    print("worker 1 (envs 2-3" in str(error), time.monotonic() - begin < 30)
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("how", ["ignored", "handler"])
def test_workers_whose_end_somebody_else_has_seen_are_known_to_be_gone(how, context):
    code, printed = run(REAPED.format(how=how, context=context))
    assert (code, printed) == (0, ["True", "True"])
