"""A fork at a random instant of a program that uses vector envs and buffers.

A case runs such a program, whose results are known from one that nobody forks. It forks before,
during and after calls: by itself, from another thread, and in a signal handler. The child has a go
at the parent's envs (those with workers must be refused, the others are its own copies), closes
them, opens ones of its own, and ends: by leaving the program, by an exception, by `os._exit`, by
SIGKILL. The parent's results must be what they would be without all that, its workers must end with
it and not before, and every child's status is looked at.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import os
import signal
import sys
import threading
import time
import traceback
import warnings

import numpy as np
from equality import assert_same
from fuzz.interrupts import Walk, children, wait_for
from fuzz.nursery import run_apart
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode

from vecenv import AsyncVectorEnv, ForkedEnvError, StepSlot, SyncVectorEnv

UNIT = "forks"  # what `run_case` counts
TARGETS = ("async", "sync", "async", "cartpole", "async", "buffer")
NUM_CALLS = 25
CHILD_S = 15.0  # after which a child has hung
FAILED = 97  # exit code of a child that has found something
NEXT_STEP, SAME_STEP, _ = AutoresetMode


def run_case(number):
    """Run a case in a process of its own; return how many forks there were."""
    target = TARGETS[number % len(TARGETS)]
    return run_apart("fuzz.forks", number, target, warm=target in ("cartpole", "buffer"))


def run_here(number, target):
    """Run a case in this process, which is to be thrown away."""
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks with threads
    rng = np.random.default_rng([number, TARGETS.index(target)])
    case = {"async": AsyncCase, "sync": SyncCase, "cartpole": CompiledCase, "buffer": BufferCase}
    return case[target](rng).run()


def warm_up():
    """Import and load what takes long."""
    import torch

    import buffers  # noqa: F401  # to have it

    torch.set_num_threads(1)  # a fork has none of the threads that it would wait for
    for kind in (CompiledCase, BufferCase):
        made = kind(np.random.default_rng(0))
        made.record()
        made.finish()


class Forks:
    """Forks this process now and then, and looks at what becomes of the children.

    Attributes:
        act: What a child does; told whether this process was between two calls.
    """

    def __init__(self, rng, act):
        self.rng, self.act = rng, act
        self.expected = {}  # exit code by pid
        self.num_forks = 0
        self._threads = []
        self._before = signal.signal(signal.SIGALRM, self._handle)

    def between(self):
        """Perhaps fork, between two calls."""
        if self.rng.random() < 0.25:
            self.fork(self._plan(), is_between=True)

    @contextlib.contextmanager
    def during(self, usual_s=3e-4):
        """Perhaps fork somewhere in what happens meanwhile: in a handler, or in another thread."""
        way = self.rng.random()
        plan, delay_s = self._plan(), max(1e-6, float(self.rng.random()) * 1.2 * usual_s)
        if way < 0.2:
            self._planned = plan
            signal.setitimer(signal.ITIMER_REAL, delay_s)
        elif way < 0.4:
            thread = threading.Thread(target=self._fork_later, args=(plan, delay_s))
            self._threads.append(thread)
            thread.start()
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.rng.random() < 0.3:
            self.look()

    def _plan(self):
        return int(self.rng.integers(1 << 40))

    def _handle(self, number, frame):
        self.fork(self._planned, is_between=False)

    def _fork_later(self, plan, delay_s):
        time.sleep(delay_s)
        self.fork(plan, is_between=False)

    def fork(self, plan, *, is_between):
        rng = np.random.default_rng(plan)
        end = str(rng.choice(["leave", "raise", "_exit", "kill"]))
        pid = os.fork()
        if pid == 0:
            self._be_child(rng, end, is_between)
        self.expected[pid] = {"leave": 3, "raise": 1, "_exit": 4, "kill": -9}[end]
        self.num_forks += 1

    def _be_child(self, rng, end, is_between):
        code = FAILED
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.dump_traceback_later(CHILD_S, exit=True)
            self.act(rng, is_between)
            if end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            code = 4
            if end != "_exit":
                code = 3 if end == "leave" else 1
                gc.collect()
                atexit._run_exitfuncs()  # as at the end of a program
        except BaseException:
            code = FAILED
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def look(self, *, wait=False):
        """Look at the children that have ended; wait for all if asked."""
        if wait:
            for thread in self._threads:
                thread.join()
            self._threads.clear()
        end = time.monotonic() + 2 * CHILD_S
        while self.expected:
            for pid, code in list(self.expected.items()):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    came = os.waitstatus_to_exitcode(status)
                    assert came == code, f"a forked child ended with {came} and not with {code}"
                    del self.expected[pid]
            if not wait:
                return
            assert time.monotonic() < end, f"forked children live on: {self.expected}"
            time.sleep(0.001)

    def end(self):
        self.look(wait=True)
        signal.signal(signal.SIGALRM, self._before)


class EnvCase:
    """A program that steps a vector env; what it should see is recorded from a twin."""

    def __init__(self, rng):
        self.rng = rng
        self.num_envs = int(rng.integers(1, 7))
        self.mode = (NEXT_STEP, SAME_STEP)[rng.integers(2)]
        self.seed = int(rng.integers(1000))

    def run(self):
        self.record()
        self.forks = Forks(self.rng, self.act)
        self.envs = self.make()
        try:
            obs, _ = self.envs.reset(seed=self.seed)
            assert_same(obs, self.first_obs)
            self.at = 0
            for _ in range(NUM_CALLS):
                self.forks.between()
                with self.forks.during():
                    self.call()
            self.forks.between()
            with self.forks.during():
                self.check_end()
            self.forks.end()
            self.finish()
        except Exception as error:
            error.add_note(f"step {getattr(self, 'at', None)} of {vars(self)}")
            raise
        return self.forks.num_forks

    def record(self):
        twin = self.make_twin()
        self.first_obs, _ = twin.reset(seed=self.seed)
        twin.action_space.seed(self.seed)
        self.actions = [twin.action_space.sample() for _ in range(NUM_CALLS + 2)]
        self.results = [twin.step(actions)[:4] for actions in self.actions]
        twin.close()

    def call(self):
        envs, at = self.envs, self.at
        way = self.rng.random()
        if way < 0.6:
            assert_same(envs.step(self.actions[at])[:4], self.results[at])
        elif way < 0.8:
            space = envs.observation_space
            slot = StepSlot(
                envs.allocate(space.shape, space.dtype),
                envs.allocate((self.num_envs,), np.float64),
                envs.allocate((self.num_envs,), bool),
                envs.allocate((self.num_envs,), bool),
            )
            envs.step(self.actions[at], out=slot)
            assert_same(tuple(slot), self.results[at])
        else:
            ids = self.rng.permutation(self.num_envs)
            envs.send(self.actions[at][ids], ids)
            left = self.num_envs
            while left:
                batch = envs.recv(1)
                rows = tuple(part[batch.env_ids] for part in self.results[at])
                assert_same(tuple(batch[:4]), rows)
                left -= len(batch.env_ids)
        self.at += 1

    def check_end(self):
        """Do one more call before the end."""
        assert_same(self.envs.step(self.actions[self.at])[:4], self.results[self.at])

    def act(self, rng, is_between):
        """Be a child: use the copy of the envs."""
        if is_between:
            at = self.at
            assert_same(self.envs.step(self.actions[at])[:4], self.results[at])
            if rng.random() < 0.5:
                obs, _ = self.envs.reset(seed=self.seed)
                assert_same(obs, self.first_obs)
        if rng.random() < 0.5:
            self.envs.close()
        if rng.random() < 0.2:
            self.open_own()

    def open_own(self):
        own = self.make()
        obs, _ = own.reset(seed=self.seed)
        assert_same(obs, self.first_obs)
        assert_same(own.step(self.actions[0])[:4], self.results[0])
        own.close()

    def make_twin(self):
        return self.make()

    def finish(self):
        self.envs.close()


class SyncCase(EnvCase):
    def make(self):
        return SyncVectorEnv([Walk] * self.num_envs, autoreset_mode=self.mode)


class CompiledCase(EnvCase):
    """Envs in compiled code, whose threads a fork does not have."""

    envs = None

    def __init__(self, rng):
        super().__init__(rng)
        self.num_envs = int(rng.choice([1, 3, 500]))
        self.num_threads = int(rng.integers(1, 4))

    def make(self, num_threads=None):
        from vecenv.jit.cartpole import CartPoleVectorEnv

        threads = num_threads or self.num_threads
        return CartPoleVectorEnv(
            self.num_envs, autoreset_mode=self.mode, num_threads=threads, max_episode_steps=9
        )

    def make_twin(self):
        return self.make(1)

    def finish(self):
        if self.envs is not None:
            self.envs.close()


class AsyncCase(EnvCase):
    """Envs in workers, which are the parent's alone."""

    def __init__(self, rng):
        super().__init__(rng)
        self.pause_s = float(rng.choice([0.0, 0.0, 3e-4]))
        self.options = {
            "num_workers": int(rng.integers(1, 4)),
            "context": "fork" if rng.random() < 0.8 else "forkserver",
            "caller_steps": bool(rng.random() < 0.2),
            "on_error": str(rng.choice(["raise", "restart"])),
        }

    def make(self):
        factories = [functools.partial(Walk, self.pause_s)] * self.num_envs
        envs = AsyncVectorEnv(factories, autoreset_mode=self.mode, **self.options)
        self.pids = [seat.process.pid for seat in envs._pool.seats]
        return envs

    def make_twin(self):
        return SyncVectorEnv([Walk] * self.num_envs, autoreset_mode=self.mode)

    def call(self):
        if self.rng.random() < 0.2:
            found = self.envs.call("answer", self.at)
            assert [value for value, _ in found] == [self.at] * self.num_envs
        super().call()

    def act(self, rng, is_between):
        envs = self.envs
        calls = [
            lambda: envs.step(self.actions[0]),
            lambda: envs.reset(seed=1),
            lambda: envs.send(self.actions[0]),
            envs.recv,
            lambda: envs.call("answer", 1),
            lambda: envs.set_attr("mark", 1),
            envs.step_wait,
            envs.timing.enable,
        ]
        for call in rng.permutation(len(calls))[: rng.integers(1, 5)].tolist():
            try:
                calls[call]()
            except ForkedEnvError:
                continue
            raise AssertionError(f"a fork has done call {call}")
        if rng.random() < 0.5:
            envs.close(**({"terminate": True} if rng.random() < 0.5 else {}))
        if rng.random() < 0.15:
            self.open_own()

    def finish(self):
        assert self.envs.restarts.tolist() == [0] * self.num_envs
        begin = time.monotonic()
        self.envs.close()
        assert time.monotonic() - begin < 4, "`close` has taken its time"
        wait_for(
            lambda: not any(os.path.exists(f"/proc/{pid}") for pid in self.pids),
            lambda: f"workers outlive `close`: {self.pids}",
        )
        if self.options["context"] == "fork":
            assert not children(), f"processes are left: {children()}"


class BufferCase(EnvCase):
    """A replay buffer that a program fills and draws from; a fork has a copy of it."""

    def make(self):
        from buffers import SharedReplayBuffer

        return SharedReplayBuffer(
            40, Box(-1, 1, (3,)), Discrete(4), num_envs=self.num_envs, seed=self.seed
        )

    def run(self):
        self.record()
        self.forks = Forks(self.rng, self.act)
        self.buffer = self.make()
        for self.at in range(NUM_CALLS):
            self.forks.between()
            with self.forks.during():
                assert_same(self.use(self.buffer, self.at), self.results[self.at])
        self.forks.end()
        return self.forks.num_forks

    def record(self):
        rng = np.random.default_rng(self.seed)
        self.steps = [
            {
                "obs": rng.random((self.num_envs, 3), np.float32),
                "next_obs": rng.random((self.num_envs, 3), np.float32),
                "actions": rng.integers(4, size=self.num_envs),
                "rewards": rng.random(self.num_envs),
                "terminations": rng.random(self.num_envs) < 0.2,
                "truncations": np.zeros(self.num_envs, bool),
            }
            for _ in range(NUM_CALLS)
        ]
        twin = self.make()
        self.results = [self.use(twin, at) for at in range(NUM_CALLS)]

    def use(self, buffer, at):
        buffer.add(**self.steps[at])
        batch = buffer.sample(8)
        return tuple(np.array(part) for part in (batch.obs, batch.actions, batch.rewards))

    def act(self, rng, is_between):
        if is_between:
            assert_same(self.use(self.buffer, self.at), self.results[self.at])
        if rng.random() < 0.3:
            own = self.make()
            assert_same(self.use(own, 0), self.results[0])

    def finish(self):
        pass
