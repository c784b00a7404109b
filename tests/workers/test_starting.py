"""Where workers come from: forked where that is harmless, else fresh interpreters."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path

import multiprocess
import pytest
from workers.faulty_envs import FINE, faulty
from workers.started_envs import Spy, Threads, hang

from vecenv import AsyncVectorEnv
from vecenv.choose import try_out
from vecenv.core.errors import EnvStepError, StepTimeoutError, WorkerDiedError
from vecenv.workers import starting
from vecenv.workers.starting import why_fresh, why_not_fork

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def a_program_without_threads():
    """Nothing is pretended here."""


def run_script(text, *args, folder, timeout=100, command=None):
    """Run a script with this checkout; return its output."""
    path = folder / "script.py"
    path.write_text(text)
    variables = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, *(command or [str(path)]), *args],
        cwd=folder,
        env={**variables, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def thread():
    """Another thread of this process, which keeps it from being forked."""
    stop = threading.Event()
    running = threading.Thread(target=stop.wait)
    running.start()
    yield
    stop.set()
    running.join()


@pytest.fixture
def no_method():
    """Nobody has set a start method."""
    libraries = (multiprocess, multiprocessing)
    before = [library.get_start_method(allow_none=True) for library in libraries]
    for library in libraries:
        library.set_start_method(None, force=True)
    yield
    for library, method in zip(libraries, before, strict=True):
        library.set_start_method(method, force=True)


def told(**options):
    """What an env of a pool tells, made as here and now."""
    pool = AsyncVectorEnv([Spy] * 2, num_workers=2, **options)
    result = pool.call("tell")[1]
    pool.close()
    return result


@pytest.mark.linux
def test_workers_of_a_process_with_threads_are_not_forked_from_it(thread, no_method):
    assert "Python threads" in why_not_fork()
    assert told()["is_fresh"]
    assert not told(context="fork")["is_fresh"]


@pytest.mark.linux
def test_a_forked_worker_has_no_threads_that_spin(tmp_path):
    """Nor after a product of matrices; the caller has as many threads as before."""
    text = (
        "import os, gymnasium, numpy, vecenv\n"
        "def num_threads():\n"
        "    a = numpy.ones((500, 500)); a @ a  # by OpenBLAS, with threads where there are cores\n"
        "    return len(os.listdir('/proc/self/task'))\n"
        "class Env(gymnasium.Wrapper):\n"
        "    def num_threads(self): return num_threads()\n"
        "before = num_threads()\n"
        "from vecenv.workers.starting import why_fresh\n"
        "make = lambda: Env(gymnasium.make('CartPole-v1'))\n"
        "why = why_fresh(None)  # NumPy's library ends its threads before a fork\n"
        "envs = vecenv.AsyncVectorEnv([make], context='fork')\n"
        "print(envs.call('num_threads'), num_threads() - before, why)\n"
        "envs.close()\n"
    )
    assert run_script(text, folder=tmp_path) == "(1,) 0 None\n"


def test_libraries_that_cannot_be_forked_are_known(monkeypatch, no_method):
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(starting, "num_threads", lambda: 1)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    assert why_not_fork() is None
    monkeypatch.setattr(starting, "loaded_libraries", lambda: {"libcuda.so.1": "/libcuda.so.1"})
    assert "libcuda" in why_not_fork()
    monkeypatch.setitem(sys.modules, "jax", object())
    assert "JAX" in why_not_fork()
    monkeypatch.undo()


@pytest.mark.linux
@pytest.mark.parametrize("library", [multiprocess, multiprocessing])
def test_a_start_method_that_was_set_is_taken_and_an_argument_wins(library, no_method, thread):
    library.set_start_method("spawn", force=True)
    assert why_fresh(None) == "the start method is 'spawn'"
    assert why_fresh("fork") is None
    assert "forkserver" in why_fresh("forkserver")
    library.set_start_method("fork", force=True)  # the default: nobody's wish
    assert "Python threads" in why_fresh(None)
    with pytest.raises(ValueError, match="context is 'thread', expected 'fork', 'forkserver'"):
        AsyncVectorEnv(faulty(1), context="thread")


def test_workers_are_in_the_callers_surroundings_of_now(monkeypatch, tmp_path, thread, no_method):
    monkeypatch.setenv("VECENV_TEST", "later")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    multiprocessing.set_start_method("spawn", force=True)
    multiprocess.set_start_method("forkserver", force=True)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "a very special warning")
            seen = told()
    finally:
        os.sched_setaffinity(0, cores)
    assert seen["is_fresh"]
    assert (seen["folder"], seen["variable"]) == (str(tmp_path), "later")
    assert seen["path"] == str(tmp_path / "modules")
    assert seen["cores"] == {min(cores)}
    assert any(
        entry[1] and entry[1].pattern == "a very special warning" for entry in seen["filters"]
    )


def test_modules_that_only_the_caller_has_reach_workers(monkeypatch, thread, no_method):
    module = types.ModuleType("robots_of_a_file_of_another_name")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    code = """
from workers.faulty_envs import FINE, FaultyEnv
class Fell(Exception):
    pass
class Robot(FaultyEnv):
    def step(self, action):
        if action != FINE:
            raise Fell("hard")
        return super().step(action)
"""
    exec(code, vars(module))
    pool = AsyncVectorEnv([module.Robot] * 2, num_workers=2)
    pool.reset()
    assert pool.step([FINE] * 2)[0].tolist() == [[0, 1], [0, 1]]
    with pytest.raises(module.Fell, match="hard"):
        pool.step([FINE, FINE + 1])
    pool.close()
    assert pickle.loads(pickle.dumps(module.Robot)) is module.Robot


@pytest.mark.linux
def test_what_can_not_be_pickled_is_refused_where_workers_are_fresh_interpreters(thread, no_method):
    lock = threading.Lock()  # which cloudpickle refuses

    def factory():
        with lock:
            return Spy()

    for context, why in ((None, "Python threads"), ("forkserver", "'forkserver'")):
        with pytest.raises(TypeError, match="lock") as raised:
            AsyncVectorEnv([factory] * 4, num_workers=2, context=context)
        (note,) = raised.value.__notes__
        assert "vecenv-worker-0" in note and why in note and "context='fork'" in note
    pool = AsyncVectorEnv([factory] * 4, num_workers=2, context="fork")
    assert not any(seen["is_fresh"] for seen in pool.call("tell"))
    pool.close()


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_libraries_have_one_thread_in_workers_unless_told_otherwise(method, monkeypatch):
    import torch

    def threads(**options):
        pool = AsyncVectorEnv([lambda: Threads(**options)], context=method)
        seen = pool.get_attr("threads")[0]
        pool.close()
        return seen

    for name in [name for name in os.environ if name.endswith("_NUM_THREADS")]:
        monkeypatch.delenv(name)
    before = torch.get_num_threads()
    assert threads() == ("1", 1, 1)
    assert threads(wanted=2) == ("1", 2, 1)
    assert torch.get_num_threads() == before and "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    seen = threads()
    assert seen[0] == "2" and (seen[1] == 2 or method == "fork")


# -- a worker that is thrown away ------------------------------------------------------------------


@pytest.mark.linux
def test_a_trial_that_hangs_dies_exits_or_raises_is_an_error():
    begin = time.monotonic()
    with pytest.raises(StepTimeoutError):
        try_out(hang, 0.2)
    assert time.monotonic() - begin < 20
    with pytest.raises(WorkerDiedError, match="exited with code 3"):
        try_out(lambda: os._exit(3), 30)
    with pytest.raises(EnvStepError, match="SystemExit"):
        try_out(lambda: sys.exit(4), 30)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        try_out(lambda: 1 / 0, 30)
    interrupt = signal.default_int_handler  # an env's own, not the terminal's
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        try_out(lambda: interrupt(2, None), 30)


# -- scripts --------------------------------------------------------------------------------------

SCRIPT = """
import logging, sys, threading, time
print("run")
import gymnasium as gym
import numpy as np
import vecenv

class Note(Exception):
    def __eq__(self, other):
        return isinstance(other, Note)
    __hash__ = None

class Env(gym.Env):
    observation_space = gym.spaces.Box(-1, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(3)
    note = Note()
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {"note": Note()}
    def step(self, action):
        if action == 2:
            raise Note("no")
        return np.full(1, action, np.float32), 1.0, False, False, {}

stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
scale = 1
factories = [lambda: Env(), lambda: Env() if scale else None] * 2
for context in [None, *sys.argv[1:]]:
    envs = vecenv.AsyncVectorEnv(factories, context=context)
    _, infos = envs.reset()
    assert type(infos["note"][0]) is Note
    assert type(envs.get_attr("note")[3]) is Note
    assert envs.step([0, 1, 0, 1])[0][:, 0].tolist() == [0, 1, 0, 1]
    try:
        envs.step([2, 0, 0, 0])
    except Note as error:
        print("caught", context)
    envs.close()
envs = vecenv.make_vec(lambda: Env(), 3)
envs.reset()
envs.close()
stop.set()
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [None, ["-"], ["-m", "script"], ["-c", SCRIPT]])
def test_code_from_anywhere_runs_once_and_its_classes_come_back(tmp_path, command):
    method = {None: "forkserver"}.get(command and command[0], "spawn")
    methods = [] if command == ["-c", SCRIPT] else [method]
    out = run_script(SCRIPT, *methods, folder=tmp_path, command=command)
    caught = [f"caught {context}" for context in (None, *methods)]
    assert out.split("\n")[:-1] == ["run", *caught, "done"]


# -- libraries with threads, in the caller and in envs --------------------------------------------

DRILL = """
import sys, os
in_env, in_caller, how = sys.argv[1:4]
import gymnasium as gym
import numpy as np
import numba
import vecenv

@numba.njit(parallel=True)
def parallel(x):
    out = np.empty_like(x)
    for i in numba.prange(len(x)):
        out[i] = np.tanh(x[i])
    return out

def function(name):
    if name == "torch":
        import torch
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)
        net = torch.nn.Sequential(*layers)
        return lambda x: net(torch.from_numpy(x).repeat(99, 1))[0].detach().numpy()
    return parallel if name == "numba" else np.tanh

class Env(gym.Env):
    observation_space = gym.spaces.Box(-9, 9, (64,), np.float32)
    action_space = gym.spaces.Discrete(3)
    def __init__(self):
        self.function = function(in_env)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.random(64, dtype=np.float32)
        return self.x, {}
    def step(self, action):
        self.x = np.asarray(self.function(self.x), np.float32) / 2 + np.float32(action)
        return self.x, float(self.x[0]), False, False, {}

if in_caller == "torch":
    import torch
    x = torch.rand(600, 600, requires_grad=True)
    (x @ x).sum().backward()
elif in_caller != "nothing":
    function(in_caller)(np.ones(64, np.float32))
n, seed = 6, 5
envs = (
    vecenv.make_vec(lambda: Env(), n) if how == "make_vec"
    else vecenv.AsyncVectorEnv([lambda: Env()] * n) if how == "AsyncVectorEnv"
    else vecenv.AsyncVectorEnv([lambda: Env()] * n, num_workers=1)
)
actions = np.random.default_rng(0).integers(0, 3, (8, n))
found = [envs.reset(seed=seed)[0], *(envs.step(row)[0] for row in actions)]
envs.close()
for index in range(n):
    env = Env()
    expected = [env.reset(seed=seed + index)[0], *(env.step(row[index])[0] for row in actions)]
    np.testing.assert_allclose([obs[index] for obs in found], expected, rtol=1e-4, atol=1e-5)
print("done")
"""
PLACES = [("torch", "nothing"), ("numba", "nothing"), ("nothing", "torch"), ("nothing", "numba")]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["make_vec", "AsyncVectorEnv"])
@pytest.mark.parametrize(("in_env", "in_caller"), PLACES, ids="-".join)
def test_libraries_with_threads_several_times(in_env, in_caller, how, tmp_path):
    for _ in range(3):
        assert run_script(DRILL, in_env, in_caller, how, folder=tmp_path) == "done\n"


def test_fresh_interpreters_end_without_a_word_where_warnings_are_errors():
    code = """
import gymnasium as gym
from vecenv import AsyncVectorEnv
make = lambda: gym.make("CartPole-v1")
envs = AsyncVectorEnv([make] * 2, num_workers=2, context="forkserver")
envs.reset()
envs.close()
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
