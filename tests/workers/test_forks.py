"""Processes that are forked from the caller, or from a worker, leave the parent's envs alone."""

import os

import programs
import pytest
from workers.faulty_envs import FINE, faulty

from vecenv import AsyncVectorEnv, ForkedEnvError
from vecenv.core import faults


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
    left, right = envs.halves()
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
        refuses(envs.allocate, (3,))
        refuses(envs.halves)
        refuses(left.step_async, [FINE] * 2)
        refuses(left.step_wait)
        refuses(envs.timing.enable)
        envs.close()
        envs.close()
        refuses(envs.step, [FINE] * 4)

    assert in_fork(act) == 0
    assert envs.step([FINE] * 4)[0][:, 1].tolist() == [1] * 4
    assert envs.allocate((3,)).ctypes.data != rollout.ctypes.data
    left.step_async([FINE] * 2)
    assert in_fork(lambda: refuses(right.step_async, [FINE] * 2)) == 0
    right.step_async([FINE] * 2)
    assert left.step_wait()[0][:, 1].tolist() == right.step_wait()[0][:, 1].tolist() == [2, 2]
    assert set(envs.call("pid")) == pids


@pytest.mark.parametrize("state", ["a pending step", "envs in flight"])
def test_a_fork_while_envs_are_being_stepped_leaves_them_alone(envs, state):
    if state == "a pending step":
        envs.step_async([FINE] * 4)
        assert in_fork(lambda: (refuses(envs.step_wait), envs.close())) == 0
        assert envs.step_wait()[0][:, 1].tolist() == [1] * 4
    else:
        envs.send([FINE] * 2, [0, 3])
        assert in_fork(lambda: (refuses(envs.recv), envs.close(terminate=True))) == 0
        assert sorted(envs.recv().env_ids) == [0, 3]
    assert envs.step([FINE] * 4)[0].shape == (4, 2)


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


def test_a_fork_keeps_no_files_that_stand_for_its_parents_workers(envs):
    envs.reset()

    def act():
        files = [entry.path for entry in os.scandir("/proc/self/fd")]
        named = [os.readlink(path) for path in files if os.path.lexists(path)]
        assert not [name for name in named if "pidfd" in name]

    assert in_fork(act) == 0


def run(code, kind="compiled"):
    """Run a program; return its exit code and what it has printed."""
    done = programs.run(code, kind=kind)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.split()


ENDS = """
import gc, os, signal, sys
from workers.faulty_envs import FINE, faulty
from vecenv import AsyncVectorEnv

def collect():
    global envs
    del envs
    gc.collect()
    sys.exit(4)

def fail():
    sys.stderr = open(os.devnull, "w")
    raise ValueError("in the fork")

ends = [
    lambda: sys.exit(3),
    collect,
    lambda: (envs.close(), sys.exit(5)),
    fail,
    lambda: os._exit(6),
    lambda: os.kill(os.getpid(), signal.SIGKILL),
]
envs = AsyncVectorEnv(faulty(4), num_workers=2, threads_per_worker=1, context={context!r})
envs.reset()
for end in ends:
    pid = os.fork()
    if pid == 0:
        end()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), int(envs.step([FINE] * 4)[0][0, 1]))
envs.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_however_a_fork_ends_the_parents_workers_live(context):
    code, printed = run(ENDS.format(context=context))
    statuses = [3, 4, 5, 1, 6, -9]
    assert printed == [str(x) for k, status in enumerate(statuses) for x in (status, k + 1)]
    assert code == 0


FORKING = """
import os, sys
from workers.faulty_envs import FINE, FaultyEnv
from vecenv import AsyncVectorEnv

class Forking(FaultyEnv):
    def step(self, action):
        pid = os.fork()
        if pid == 0:
            sys.stderr = open(os.devnull, "w")
            if self.count == 0:
                sys.exit(3 + 2**40)
            if self.count == 1:
                raise ValueError("in the fork")
            if self.count == 2:
                os._exit(7)
        else:
            self.status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return super().step(action)

for options in ({"threads_per_worker": 1}, {"threads_per_worker": 2, "on_error": "restart"}):
    envs = AsyncVectorEnv([Forking] * 3, num_workers=2, **options)
    envs.reset()
    for _ in range(3):
        print(int(envs.step([FINE] * 3)[0].min(0)[1]), *set(envs.get_attr("status")))
    envs.send([FINE] * 3)
    print(int(envs.recv().obs.min(0)[1]), *set(envs.get_attr("status")))
    envs.close()
"""


def test_a_copy_of_a_worker_ends_where_it_leaves_the_code_of_the_env(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    faults.leave_if_copied(ValueError("in the worker"))
    assert codes == []
    monkeypatch.setattr(faults, "_copied_from", [7])
    for error in (SystemExit(3 + 2**40), ValueError("in the fork"), None):
        faults.leave_if_copied(error)
    assert codes == [3, 1, 1]
    told = capsys.readouterr().err
    assert "ValueError: in the fork" in told and "forked from worker process 7" in told
    assert "in the worker" not in told


@pytest.mark.slow
def test_processes_that_envs_fork_do_not_report_in_the_workers_name():
    code, printed = run(FORKING)
    assert printed == ["1", "3", "2", "1", "3", "7", "4", "1"] * 2
    assert code == 0


# -- children that are reaped by others -----------------------------------------------------------

REAPED = """
import os, signal, threading, time
from workers.faulty_envs import DIE, FINE, faulty, is_running, wait_until_gone
from vecenv import AsyncVectorEnv, WorkerDiedError
import vecenv.workers.process

if {no_pidfd}:
    vecenv.workers.process.open_pidfd = lambda pid, sentinel: -1
sent = []
kill = os.kill
os.kill = lambda pid, number: (sent.append(pid), kill(pid, number))
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
envs = AsyncVectorEnv(faulty(4), num_workers=2, threads_per_worker=1, context="fork")
envs.reset()
pids = set(envs.call("pid"))
begin = time.monotonic()
envs.close(timeout=100)
took_s = time.monotonic() - begin
assert wait_until_gone(pids, 5) == []
assert took_s < 50, took_s
envs = AsyncVectorEnv(
    faulty(4), num_workers=2, threads_per_worker=1, context="fork", on_error="restart"
)
envs.reset()
assert envs.step([FINE, FINE, FINE, DIE])[3].tolist() == [False, False, True, True]
pids = set(envs.call("pid"))
envs.close(terminate=True)
assert wait_until_gone(pids, 5) == []
envs = AsyncVectorEnv(faulty(4), num_workers=2, threads_per_worker=1, context="fork")
envs.reset()
begin = time.monotonic()
try:
    envs.step([FINE, FINE, FINE, DIE])
except WorkerDiedError as error:
    print(str(error).partition("during")[0].rpartition(")")[2].strip().replace(" ", "_"))
took_s = time.monotonic() - begin
assert took_s < 10, took_s
assert not sent or {no_pidfd}, sent
"""


@pytest.mark.slow
@pytest.mark.linux
@pytest.mark.parametrize(
    ("how", "no_pidfd"),
    [
        ("ignored", False),
        ("ignored", True),
        ("handler", False),
        ("handler", True),
        ("default", True),
    ],
)
def test_workers_whose_end_somebody_else_has_seen_are_known_to_be_gone(how, no_pidfd):
    told = "was_killed_by_signal_SIGKILL" if how == "default" else "is_gone"
    code, printed = run(REAPED.format(how=how, no_pidfd=no_pidfd))
    assert code == 0
    assert printed == [told] or how == "handler", printed  # it may come later than we look


# -- without a compiler ---------------------------------------------------------------------------

DIES_WITH_LOCK = """
import ctypes, os, signal, sys
from workers.faulty_envs import FINE, faulty
from vecenv import AsyncVectorEnv

caller, move, marker = os.getpid(), ctypes.memmove, {marker!r}

def dying(*args):
    if os.getpid() != caller and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return move(*args)

ctypes.memmove = dying  # rows are copied while the lock is held
envs = AsyncVectorEnv(
    faulty(4), num_workers=2, context="fork", on_error="restart", threads_per_worker={threads}
)
envs.reset()
for _ in range(3):
    envs.send([FINE] * 4)
    left = 4
    while left:
        batch = envs.recv(1, timeout=20)
        left -= len(batch.env_ids)
        print(*batch.truncations[batch.truncations].astype(int))
envs.close()
print(os.path.exists(marker), "dead")
"""


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_worker_that_is_killed_while_it_holds_the_lock_is_replaced(tmp_path, threads):
    code = DIES_WITH_LOCK.format(marker=str(tmp_path / "died"), threads=threads)
    status, printed = run(code, kind="interpreted")
    assert status == 0
    assert printed == ["1", "1", "True", "dead"]  # both envs of the worker


WRITES_WHILE_ANOTHER_DIES = """
import ctypes, os, time
from workers.faulty_envs import FINE, FaultyEnv
from vecenv import AsyncVectorEnv
from vecenv.workers.layout import CLAIMS_LINE, COUNT, LINE, ROWS

caller, move, marker = os.getpid(), ctypes.memmove, {marker!r}

class DyingEnv(FaultyEnv):
    def step(self, action):
        while not os.path.exists(marker):
            time.sleep(0.001)
        os._exit(1)

def slow(*args):
    if os.getpid() != caller and not os.path.exists(marker):
        open(marker, "w").close()
        time.sleep(0.5)
    return move(*args)

ctypes.memmove = slow
envs = AsyncVectorEnv([DyingEnv, FaultyEnv], num_workers=2, context="fork", on_error="restart")
envs.reset()
envs.send([FINE] * 2)
print(sorted(envs.recv(2, timeout=20).env_ids.tolist()), envs.restarts.tolist())
words = envs._exchange.link.words
print(words[CLAIMS_LINE * LINE], words[ROWS * LINE + COUNT])
envs.close()
"""


@pytest.mark.slow
def test_rows_that_others_write_while_a_worker_is_replaced_are_counted_once(tmp_path):
    code = WRITES_WHILE_ANOTHER_DIES.format(marker=str(tmp_path / "writing"))
    status, printed = run(code, kind="interpreted")
    assert status == 0
    assert printed == ["[0,", "1]", "[1,", "0]", "2", "2"]


INTERRUPTED_OWN_ROW = """
import ctypes, os, time
from workers.faulty_envs import FINE, FaultyEnv
from vecenv import AsyncVectorEnv

caller, move = os.getpid(), ctypes.memmove

class LateEnv(FaultyEnv):
    def step(self, action):
        if os.getpid() != caller:
            time.sleep(0.3)
        return super().step(action)

def interrupted(*args):
    if os.getpid() == caller:
        ctypes.memmove = move
        raise KeyboardInterrupt
    return move(*args)

envs = AsyncVectorEnv([LateEnv] * 3, num_workers=3, context="fork", caller_steps=True)
envs.reset()
envs.send([FINE] * 3)
ctypes.memmove = interrupted
try:
    envs.recv()
except KeyboardInterrupt:
    print(*sorted(envs.recv(timeout=20).env_ids.tolist()))
envs.close()
"""


def test_ctrl_c_while_the_caller_writes_its_own_row_leaves_no_gap():
    status, printed = run(INTERRUPTED_OWN_ROW, kind="interpreted")
    assert status == 0
    assert printed == ["1", "2"]


INTERRUPTED_WITH_LOCK = """
import fcntl, os, time
from workers.faulty_envs import FINE, FaultyEnv
from vecenv import AsyncVectorEnv

class LateEnv(FaultyEnv):
    def step(self, action):
        time.sleep(0.2)
        return super().step(action)

caller, lock = os.getpid(), fcntl.lockf

def interrupted(file, how):
    lock(file, how)
    if os.getpid() == caller and how & fcntl.LOCK_EX:
        fcntl.lockf = lock
        raise KeyboardInterrupt

for options in ({}, {"caller_steps": True}):
    envs = AsyncVectorEnv([LateEnv] * 2, num_workers=2, context="fork", **options)
    envs.reset()
    envs.send([FINE] * 2)
    fcntl.lockf = interrupted
    try:
        envs.recv()
    except KeyboardInterrupt:
        begin = time.monotonic()
        envs.close(timeout=20)
        print(time.monotonic() - begin < 10)
"""


@pytest.mark.slow
def test_ctrl_c_when_the_caller_has_just_taken_the_lock_keeps_no_worker_waiting():
    status, printed = run(INTERRUPTED_WITH_LOCK, kind="interpreted")
    assert status == 0
    assert printed == ["True", "True"]
