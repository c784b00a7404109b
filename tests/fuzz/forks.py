"""A fork at a random instant of a program that uses vector envs.

A case steps a vector env whose results are known. It forks before, during and after calls: by
itself, from another thread, and in a signal handler. The child has a go at the parent's envs (those
with workers must be refused, compiled ones are its own copies), closes them, opens ones of its own,
and ends: by leaving the program, by an exception, by `os._exit`, by SIGKILL. The parent's results
must be what they would be without all that, its workers must end with it and not before, and every
child's status is looked at.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import warnings

import numpy as np
from equality import assert_same
from fuzz.harness import Known, run_apart

from vecenv import ForkedEnvError

UNIT = "forks"  # what `run_case` counts
TARGETS = ("async", "async", "cartpole")
CHILD_S = 15.0  # after which a child has hung
FAILED = 97  # exit code of a child that has found something
ENDS = {"leave": 3, "raise": 1, "_exit": 4, "kill": -9}  # and their exit codes


def run_case(number):
    """Run a case in a process of its own; return how many forks there were."""
    target = TARGETS[number % len(TARGETS)]
    return run_apart("fuzz.forks", number, target, warm=target != "async")


def run_here(number, target):
    """Run a case in this process, which is to be thrown away."""
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks with threads
    case = Case(np.random.default_rng([number, TARGETS.index(target)]), target)
    try:
        return case.run()
    except Exception as error:
        error.add_note(f"step {case.at} of {case}")
        raise


def warm_up():
    """Load what takes long."""
    Known(np.random.default_rng(0), "cartpole").record()


class Case(Known):
    """A program that steps a vector env, forks now and then, and looks at the children's ends."""

    num_steps = 25

    def __init__(self, rng, target):
        super().__init__(rng, target)
        if target == "async":
            self.options["on_error"] = str(rng.choice(["raise", "restart"]))
        self.expected = {}  # exit code by pid
        self.num_forks, self.at, self.threads = 0, 0, []
        self.plan = 0  # of the next fork in a signal handler
        signal.signal(signal.SIGALRM, lambda *_: self.fork(self.plan, is_between=False))

    def run(self):
        self.record()
        self.hold(self.make())
        obs, _ = self.envs.reset(seed=self.seed)
        assert_same(obs, self.first_obs)
        for at in range(self.num_steps - 1):
            self.at = at
            if self.rng.random() < 0.25:
                self.fork(self.draw_plan(), is_between=True)
            with self.forks_during():
                way = self.rng.choice(["step", "step", "step", "step_out", "send_recv"])
                getattr(self, str(way))(self.at, lambda name, call: (True, call()))
            if self.target == "async" and self.rng.random() < 0.2:
                found = self.envs.call("answer", self.at)
                assert [value for value, _ in found] == [self.at] * self.num_envs
        for thread in self.threads:
            thread.join()
        end = time.monotonic() + 2 * CHILD_S
        while self.expected:
            self.look()
            assert time.monotonic() < end, f"forked children live on: {self.expected}"
            time.sleep(0.001)
        if self.target == "async":
            assert self.envs.restarts.tolist() == [0] * self.num_envs
        begin = time.monotonic()
        self.envs.close()
        assert time.monotonic() - begin < 4, "`close` has taken its time"
        self.require_no_leftovers()
        return self.num_forks

    def draw_plan(self):
        return int(self.rng.integers(1 << 40))

    @contextlib.contextmanager
    def forks_during(self, usual_s=3e-4):
        """Perhaps fork somewhere in what happens meanwhile: in a handler, or in another thread."""
        way, plan = self.rng.random(), self.draw_plan()
        delay_s = max(1e-6, float(self.rng.random()) * 1.2 * usual_s)
        if way < 0.2:
            self.plan = plan
            signal.setitimer(signal.ITIMER_REAL, delay_s)
        elif way < 0.4:

            def fork_later():
                time.sleep(delay_s)
                self.fork(plan, is_between=False)

            self.threads.append(threading.Thread(target=fork_later))
            self.threads[-1].start()
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.rng.random() < 0.3:
            self.look()

    def fork(self, plan, *, is_between):
        rng = np.random.default_rng(plan)
        end = str(rng.choice(list(ENDS)))
        pid = os.fork()
        if pid == 0:
            self.be_child(rng, end, is_between)
        self.expected[pid] = ENDS[end]
        self.num_forks += 1

    def be_child(self, rng, end, is_between):
        code = FAILED
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.dump_traceback_later(CHILD_S, exit=True)
            self.act(rng, is_between)
            if end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if end != "_exit":
                atexit._run_exitfuncs()  # as at the end of a program
            code = ENDS[end]
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def look(self):
        """Look at the children that have ended."""
        for pid, code in list(self.expected.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                came = os.waitstatus_to_exitcode(status)
                assert came == code, f"a forked child ended with {came} and not with {code}"
                del self.expected[pid]

    def act(self, rng, is_between):
        """Be a child: try what may be done with the parent's envs, and open others."""
        if self.target == "async":
            self.require_refusals(rng)
        elif is_between:
            assert_same(self.envs.step(self.actions[self.at])[:4], self.results[self.at])
            assert_same(self.envs.reset(seed=self.seed)[0], self.first_obs)
        if rng.random() < 0.5:
            self.envs.close()
        if rng.random() < 0.15:
            own = self.make()
            assert_same(own.reset(seed=self.seed)[0], self.first_obs)
            assert_same(own.step(self.actions[0])[:4], self.results[0])
            own.close()

    def require_refusals(self, rng):
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
