"""What fuzzers share: cases in processes of their own, series of operations, and calls disturbed.

`run_apart` runs a case in a forked process and tells one that dies by a signal or hangs from one
that passes, with what it said last. `run_operations` does random operations on an object and names
the one that failed. `Known` is a vector env whose results are known from a twin that nothing
disturbs; `fuzz.interrupts` interrupts its calls.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import programs
from equality import assert_same
from gymnasium.vector import AutoresetMode

from vecenv import AsyncVectorEnv, RayVectorEnv, StepSlot, SyncVectorEnv

NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode
LIMIT_S = 60.0  # of a case in a process of its own; they take about a second
CLOSE_S = 20.0  # for `close` and what it ends
_CASE = """
import json, os, sys, {module}
value = {module}.run_here(*json.loads(sys.argv[1]))
print(json.dumps(value), flush=True)
os._exit(0)  # at once: it may have left threads
"""


def run_apart(module, number, *arguments, warm=True):
    """Return what `module.run_here(number, *arguments)` returns in a process of its own.

    Args:
        module: Name of a module.
        number: Of the case.
        arguments: More arguments, of what JSON takes.
        warm: Fork from a process that has called `module.warm_up()`, and so has compiled code.

    Raises:
        AssertionError: It raised, died by a signal, or did not end in time.
    """
    kind = f"{module}, {'warm' if warm else 'cold'}"
    warm_up = f"; {module}.warm_up()" if warm else ""
    programs.KINDS.setdefault(kind, (f"import {module}{warm_up}", {}))
    case, given = f"case {number} {arguments}", json.dumps([number, *arguments])
    try:
        done = programs.run(_CASE.format(module=module), given, kind=kind, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{case} hangs\n{error.__notes__[0][-14000:]}") from None
    ended = "fails" if done.returncode >= 0 else f"died by {signal.Signals(-done.returncode).name}"
    assert done.returncode == 0, f"{case} {ended}\n{done.stderr[-14000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def run_operations(case, number, count):
    """Do `count` operations of a case, drawn from its `names` by its `rng`; return their number.

    `case.told` says how the case was made and `case.check()` is called after each.
    """
    for place in range(count):
        name = str(case.rng.choice(case.names))
        try:
            getattr(case, name)()
            case.check()
        except BaseException as error:
            error.add_note(f"operation {place}, {name}, of case {number}: {case.told}")
            raise
    return count


def temporary_folder():
    """A folder in memory where the system has that: disks take long to synchronise files."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)


def children():
    """Processes that this one has started and that live, or have not been waited for."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{name}/stat").read_text(errors="replace")
            state, parent = text.rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(name))
    return found


def wait_until_gone(find, what):
    """Wait until `find` finds nothing any more, which may take a moment."""
    end = time.monotonic() + CLOSE_S
    while found := find():
        assert time.monotonic() < end, f"{what}: {found}"
        time.sleep(0.005)


def pid_of(seat):
    """The process of a worker, or of an actor."""
    return seat.process.pid if hasattr(seat, "process") else seat.pid


# -- calls that are disturbed ----------------------------------------------------------------


class Walk(gym.Env):
    """A walk whose steps depend on everything that was before; some of them take a while."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Discrete(5)

    def __init__(self, pause_s=0.0):
        self.pause_s = pause_s

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.age = self.np_random.random(3), 0
        return self.place.copy(), {"age": 0}

    def step(self, action):
        if self.pause_s:
            time.sleep(self.pause_s)
        self.age += 1
        self.place = self.place * 0.5 + self.np_random.random(3) + action
        ends = self.np_random.random() < 0.1
        return self.place.copy(), float(self.place.sum()), ends, self.age >= 6, {"age": self.age}

    def answer(self, value):
        return value, self.age


class Known:
    """A vector env, and the results that it must give after a reset with `seed`.

    Args:
        rng: Draws sizes, options and actions.
        target: "async", "cartpole", or "ray" in a process that has a cluster.
    """

    num_steps = 12  # that are known

    def __init__(self, rng, target):
        self.rng, self.target = rng, target
        self.num_envs = int(rng.integers(1, 7))
        self.mode = (NEXT_STEP, SAME_STEP)[rng.integers(2)]
        self.seed = int(rng.integers(1000))
        self.options = {}
        if target == "async":
            self.pause_s = float(rng.choice([0.0, 0.0, 2e-4]))
            self.options = {
                "num_workers": int(rng.integers(1, 4)),
                "context": "fork" if rng.random() < 0.9 else "forkserver",
                "caller_steps": bool(rng.random() < 0.2),
            }
        elif target == "ray":
            self.pause_s, self.options = 0.0, {"num_workers": min(self.num_envs, 2)}
        else:
            self.num_envs = int(rng.choice([1, 3, 200, 1000]))
            self.options = {"num_threads": int(rng.integers(1, 4))}
        self.before, self.pids = children(), []

    def __repr__(self):
        return f"{self.target}, {self.num_envs} envs, {self.mode}, {self.options}"

    def make(self, **options):
        """Make the vector env."""
        options = self.options | {"autoreset_mode": self.mode} | options
        if self.target != "cartpole":
            factories = [functools.partial(Walk, self.pause_s)] * self.num_envs
            return (AsyncVectorEnv if self.target == "async" else RayVectorEnv)(
                factories, **options
            )
        from vecenv.jit.cartpole import CartPoleVectorEnv

        return CartPoleVectorEnv(self.num_envs, max_episode_steps=9, **options)

    def record(self):
        """Note actions and results of a twin."""
        if self.target != "cartpole":
            twin = SyncVectorEnv([Walk] * self.num_envs, autoreset_mode=self.mode)
        else:
            twin = self.make(num_threads=1)
        self.first_obs, _ = twin.reset(seed=self.seed)
        twin.action_space.seed(self.seed)
        self.actions = [twin.action_space.sample() for _ in range(self.num_steps)]
        self.results = [twin.step(actions)[:4] for actions in self.actions]
        twin.close()

    def hold(self, envs):
        """Take a vector env as the one to be disturbed."""
        self.envs = envs
        self.pids = [] if self.target == "cartpole" else [*map(pid_of, envs._pool.seats)]

    def require_no_leftovers(self):
        """Wait until the workers and threads of the vector env are gone."""
        alive = lambda: [pid for pid in self.pids if os.path.exists(f"/proc/{pid}")]  # noqa: E731
        wait_until_gone(alive, "workers outlive `close`")
        threads = lambda: [t.name for t in threading.enumerate() if "vecenv-jit" in t.name]  # noqa: E731
        wait_until_gone(threads, "threads outlive `close`")
        if self.target != "ray" and self.options.get("context") != "forkserver":  # they may stay
            wait_until_gone(lambda: children() - self.before, "processes are left")

    # Each does one step, as `do(name, call)` does calls: it returns (whether it ended, its value).
    # They return whether the step is done.

    def step(self, at, do):
        done, result = do("step", lambda: self.envs.step(self.actions[at]))
        if done:
            assert_same(result[:4], self.results[at])
        return done

    def step_out(self, at, do):
        envs, space = self.envs, self.envs.observation_space
        flags = [envs.allocate((self.num_envs,), bool) for _ in range(2)]
        rewards = envs.allocate((self.num_envs,), np.float64)
        slot = StepSlot(envs.allocate(space.shape, space.dtype), rewards, *flags)
        done, _ = do("step out", lambda: envs.step(self.actions[at], out=slot))
        if done:
            assert_same(tuple(slot), self.results[at])
        return done

    def send_recv(self, at, do):
        ids = self.rng.permutation(self.num_envs)
        for part in np.array_split(ids, min(len(ids), 2)):
            actions = self.actions[at][part]
            if not do("send", lambda a=actions, ids=part: self.envs.send(a, ids))[0]:
                return False
        left = self.num_envs
        while left:
            done, batch = do("recv", lambda: self.envs.recv(1))
            if not done:
                return False
            assert_same(tuple(batch[:4]), tuple(p[batch.env_ids] for p in self.results[at]))
            left -= len(batch.env_ids)
        return True
