"""Nothing is left behind: processes, files, memory; however a pool or its caller ends."""

import contextlib
import functools
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import multiprocess
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from programs import Program, prepare, printed
from workers.faulty_envs import (
    FINE,
    HANG,
    HANG_S,
    FaultyEnv,
    children,
    faulty,
    open_files,
    wait_until_gone,
)

from vecenv import StepTimeoutError
from vecenv.workers.env import AsyncVectorEnv


def shared_memory_files():
    """Files only: folders there are of other programs."""
    folder = Path("/dev/shm")
    return (
        {path.name for path in folder.iterdir() if not path.is_dir()} if folder.is_dir() else set()
    )


def left_since(known):
    """New files of shared memory that no process has mapped: others' come and go.

    Semaphores of other tests and programs are known by their names, see `helpers_that_stay`.
    """
    left = {name for name in shared_memory_files() - known if not name.startswith("sem.mp-")}
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            left -= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
    return left


@pytest.fixture(scope="module")
def helpers_that_stay():
    configs = [lib.process.current_process()._config for lib in (multiprocess, multiprocessing)]
    before = [config["semprefix"] for config in configs]
    for config in configs:
        config["semprefix"] = "/lifecycle"
    AsyncVectorEnv(faulty(1), context="forkserver").close()
    prepare()
    gc.collect()
    gc.freeze()  # what is there now is not looked at again, so collecting takes no time
    yield
    for config, prefix in zip(configs, before, strict=True):
        config["semprefix"] = prefix


@pytest.fixture(autouse=True)
def nothing_is_left(helpers_that_stay):
    gc.collect()
    files, processes, known = len(open_files()), set(children()), shared_memory_files()
    yield
    gc.collect()
    assert set(children()) <= processes  # those of a test before may end meanwhile
    assert len(open_files()) <= files
    give_up = time.monotonic() + 30
    while left_since(known) and time.monotonic() < give_up:
        time.sleep(0.1)  # another program's, which has not mapped it yet or is gone just now
    assert not left_since(known)


class SlowToClose(FaultyEnv):
    def close(self):
        time.sleep(60)


def test_ctrl_c_in_close_kills_the_workers():
    pool = AsyncVectorEnv([SlowToClose] * 2, num_workers=2)
    pids = pool.call("pid")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt):
        pool.close(timeout=50)
    signal.signal(signal.SIGALRM, before)
    assert pool.closed
    assert wait_until_gone(set(pids)) == []


CALLER = """
import os, signal, sys, time
from workers.faulty_envs import FaultyEnv, FINE, HANG
from vecenv.workers.env import AsyncVectorEnv

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell's job began
    envs = AsyncVectorEnv(
        [lambda: FaultyEnv()] * 4, num_workers=2, context={context!r}
    )
    envs.reset()
    print(*set(envs.call("pid")), flush=True)
    {then}
"""
LEFT_OPEN = """
import sys, time
from workers.faulty_envs import FaultyEnv
from vecenv import AsyncVectorEnv, SyncVectorEnv

class Writes(FaultyEnv):
    def close(self):
        for line in range(11):
            time.sleep(0.05)
            print(line, flush=True)

how, kind = sys.argv[1:]
make = SyncVectorEnv if kind == "sync" else lambda fns: AsyncVectorEnv(fns, num_workers=1)
envs = make([Writes])
envs.reset()
if how == "dropped":
    del envs
    print("dropped")
elif how == "in a cycle":
    envs.itself = envs
"""


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("how", ["dropped", "open", "in a cycle"])
def test_envs_of_a_vector_env_that_is_dropped_or_left_open_are_closed(how, kind):
    lines = [str(line) for line in range(11)]
    assert printed(LEFT_OPEN, how, kind) == [*lines, *(["dropped"] if how == "dropped" else [])]


THEN = {
    "stepping": "while True: envs.step([FINE] * 4)",
    "hanging": "envs.step([HANG] * 4); envs.step([HANG] * 4); envs.step([HANG] * 4)",
    "first-ready": "envs.send([FINE] * 4); time.sleep(60)",
    "holding Python's lock": "envs.call('hold', 300)",
}


def start_caller(then, context="fork"):
    code = CALLER.format(then=then, context=context)
    process = Program(code)
    line = process.readline()
    assert line, process.communicate()[1]
    return process, [int(pid) for pid in line.split()]


@pytest.mark.parametrize(
    ("then", "context"),
    [
        ("stepping", "fork"),
        pytest.param("holding Python's lock", "forkserver", marks=pytest.mark.slow),
        pytest.param("hanging", "fork", marks=pytest.mark.slow),
        pytest.param("hanging", "spawn", marks=pytest.mark.slow),
    ],
)
def test_workers_are_gone_soon_after_their_caller(then, context):
    process, workers = start_caller(THEN[then], context)
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert wait_until_gone(workers) == []


@pytest.mark.parametrize(
    "then",
    ["hanging", *(pytest.param(x, marks=pytest.mark.slow) for x in ("stepping", "first-ready"))],
)
def test_ctrl_c_leaves_no_orphan_and_one_traceback(then):
    """The terminal sends SIGINT to the whole group."""
    process, workers = start_caller(THEN[then])
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert wait_until_gone(workers) == []
    assert errors.count("Traceback") == 1, errors
    assert errors.strip().endswith("KeyboardInterrupt")


class AlarmError(Exception):
    pass


class SlowToReset(FaultyEnv):
    def reset(self, *, seed=None, options=None):
        if options:
            time.sleep(HANG_S)
        return super().reset(seed=seed)


@pytest.mark.parametrize("call", ["step", "recv", "call", "reset"])
def test_after_an_exception_from_elsewhere_only_reset_and_close_are_allowed(call):
    pool = AsyncVectorEnv([functools.partial(SlowToReset, k) for k in range(2)], num_workers=2)
    pool.reset()

    def ring(*_):
        raise AlarmError

    calls = {
        "step": lambda: pool.step([HANG, FINE]),
        "recv": lambda: (pool.send([HANG, FINE]), pool.recv()),
        "call": lambda: pool.call("nap", HANG_S),
        "reset": lambda: pool.reset(options={"slow": True}),
    }
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, HANG_S / 4)
    with pytest.raises(AlarmError):
        calls[call]()
    signal.signal(signal.SIGALRM, before)
    for refused in (lambda: pool.step([FINE, FINE]), lambda: pool.send([FINE], [0])):
        with pytest.raises(ResetNeeded, match=r"call `reset` first.*broken off by an exception"):
            refused()
    assert pool.reset()[0].tolist() == [[0, 0], [1, 0]]
    assert pool.step([FINE, FINE])[0].tolist() == [[0, 1], [1, 1]]
    pool.close()


def test_a_reset_after_a_timeout_ends_the_worker_that_hangs():
    pool = AsyncVectorEnv(faulty(4), num_workers=2)
    pool.reset()
    pids = pool.call("pid")
    waits = {
        "step": lambda: (pool.step_async([FINE, HANG, FINE, FINE]), pool.step_wait(0.05)),
        "recv": lambda: (pool.send([FINE, HANG, FINE, FINE]), pool.recv(timeout=0.05)),
        "call": lambda: (pool.call_async("hold", 1000), pool.call_wait(0.05)),
    }
    for name, wait in waits.items():
        with pytest.raises(StepTimeoutError, match="`reset`, which ends"):
            wait()
        assert pool.reset()[0][:, 1].tolist() == [0] * 4
        assert pool.step([FINE] * 4)[0][:, 1].tolist() == [1] * 4
        now = pool.call("pid")
        assert now[0] != pids[0] and (now[2] == pids[2] or name == "call")
        pids = now
    pool.close()


def test_calls_out_of_order_are_refused():
    pool = AsyncVectorEnv(faulty(2), num_workers=2)
    for wait in (pool.reset_wait, pool.step_wait, pool.call_wait):
        with pytest.raises(NoAsyncCallError, match="without any prior call"):
            wait()
    pool.reset_async(seed=1)
    for call in (pool.reset, pool.reset_async, lambda: pool.step_async([0, 0])):
        with pytest.raises(AlreadyPendingCallError, match="pending call to `reset`"):
            call()
    pool.reset_wait()
    pool.send([0], [1])
    with pytest.raises(AlreadyPendingCallError, match="in flight"):
        pool.step_async([0, 0])
    pool.recv()
    pool.close()


@pytest.mark.parametrize("timeout", [float("nan"), -1, "3", True])
def test_timeouts_that_are_none_are_refused(timeout):
    with pytest.raises((TypeError, ValueError), match=f"timeout is {timeout!r}, expected"):
        AsyncVectorEnv(faulty(2), timeout=timeout)
    envs = AsyncVectorEnv(faulty(2), num_workers=2, timeout=np.float32(60))
    for begin, wait in [
        (envs.reset_async, envs.reset_wait),
        (lambda: envs.step_async([FINE] * 2), envs.step_wait),
        (lambda: envs.call_async("spec"), envs.call_wait),
    ]:
        begin()
        with pytest.raises((TypeError, ValueError), match=f"timeout is {timeout!r}, expected"):
            wait(timeout)
        assert len(wait(np.float32(60))) > 0
    with pytest.raises((TypeError, ValueError), match="timeout is"):
        envs.close(timeout=timeout)
    envs.close()


def test_global_generators_differ_between_workers_and_follow_the_callers_seed():
    def draws():
        np.random.seed(3)  # noqa: NPY002  # the global one
        pool = AsyncVectorEnv([_GlobalEnv] * 2, num_workers=2)
        obs, _ = pool.reset()
        pool.close()
        return obs[:, 0].tolist()

    first, second = draws()
    assert first != second
    assert draws() == [first, second]

    def drawn():
        with contextlib.closing(AsyncVectorEnv([_GlobalEnv], num_workers=1)) as pool:
            return pool.reset()[0][0, 0]

    np.random.rand()  # noqa: NPY002  # the global one
    one = drawn()
    np.random.rand()  # noqa: NPY002  # the global one
    assert drawn() != one


class _GlobalEnv(type(faulty(1)[0]())):
    def reset(self, *, seed=None, options=None):
        return np.array([np.random.rand(), 0], np.float32), {}  # noqa: NPY002  # the global one


SERVED = """
import os, signal, sys, time
from functools import partial
from workers.faulty_envs import DIE, EXIT, FINE, HANG
from workers.started_envs import ServedEnv
from vecenv.workers.env import AsyncVectorEnv

if __name__ == "__main__":
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if {ignores} else "pass"
    envs = AsyncVectorEnv(
        [partial(ServedEnv, k, "", ignores) for k in range(2)], num_workers=2, context={context!r}
    )
    envs.reset()
    print(*sum(envs.call("servers"), []), flush=True)
    time.sleep(0.3)
    {then}
    time.sleep(60)
"""
WAYS_OUT = {
    "close": "envs.close()",
    "terminate": "envs.close(terminate=True)",
    "crash": "envs.step([FINE, EXIT])",
    "killed worker": "envs.step([FINE, DIE])",
    "killed caller": "os.kill(os.getpid(), signal.SIGKILL)",
    "killed while hanging": "envs.step_async([HANG] * 2); os.kill(os.getpid(), signal.SIGKILL)",
    "exit": "os._exit(0)",
}


@pytest.mark.parametrize(
    ("way", "context", "ignores"),
    [
        ("close", "fork", True),
        *(
            pytest.param(way, "fork", False, marks=pytest.mark.slow)
            for way in ("crash", "killed while hanging", "terminate")
        ),
        ("killed worker", "fork", False),
        ("killed caller", "fork", False),
        pytest.param("exit", "fork", False, marks=pytest.mark.slow),
        pytest.param("killed caller", "spawn", True, marks=pytest.mark.slow),
        pytest.param("killed worker", "forkserver", True, marks=pytest.mark.slow),
    ],
)
def test_what_envs_start_ends_with_their_worker(way, context, ignores):
    process = Program(SERVED.format(then=WAYS_OUT[way], context=context, ignores=ignores))
    pids = [int(pid) for pid in process.readline().split()]
    assert len(pids) == 5
    assert wait_until_gone(pids) == []
    process.kill()
    process.communicate()


class Parent(FaultyEnv):
    def ends_of_children(self):
        """Exit codes of a fork and of a program that were sent SIGTERM."""
        context = multiprocessing.get_context("fork")
        begun = context.Event()  # the worker's handler is undone in the fork itself
        fork = context.Process(target=lambda: (begun.set(), time.sleep(60)))
        fork.start()
        assert begun.wait(10)
        program = subprocess.Popen(["sleep", "60"])
        codes = []
        for child in (fork, program):
            child.terminate()
            child.join(10) if child is fork else child.wait(10)
            codes.append(child.exitcode if child is fork else child.returncode)
        return codes


def test_workers_stay_when_everybody_is_sent_sigterm():
    """As by job schedulers: the caller saves, for which it needs its envs."""
    pool = AsyncVectorEnv([Parent] * 2, num_workers=2)
    pool.reset()
    pids = pool.call("pid")
    for _ in range(3):
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        pool.step([FINE, FINE])
    assert pool.call("pid") == pids
    assert pool.call("ends_of_children") == ([-signal.SIGTERM] * 2,) * 2
    pool.step_async([HANG, HANG])
    pool.close(timeout=0.1)
    assert wait_until_gone(pids) == []
