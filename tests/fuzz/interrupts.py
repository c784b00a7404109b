"""An interrupt at a random instant of every public call of compiled and asynchronous vector envs.

Between them the program forks, whose child is refused what belongs to its parent's workers.

A case opens a vector env, and interrupts its calls one after the other, some of them twice. After
each interrupt every call either works or is refused with an error that says what to do; a reset
makes the vector env what it would be without interrupts, and `close` ends it and all that belongs
to it. Cases run in processes of their own: none may die by a signal, none may hang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
import traceback

import numpy as np
from equality import assert_same
from fuzz.harness import CLOSE_S, DISABLED, Known, run_apart
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded

from vecenv import ForkedEnvError

UNIT = "interrupts"  # what `run_case` counts
TARGETS = ("cartpole", "async")  # and "ray": see tests/on_ray/test_interrupts.py
NUM_ROUNDS = {"cartpole": 300, "async": 40, "ray": 300}
REFUSALS = (AlreadyPendingCallError, NoAsyncCallError, ResetNeeded)
WHAT_TO_DO = ("reset", "recv", "_wait", "close", "send")


def run_case(number):
    """Run a case in a process of its own; return how many interrupts struck."""
    target = TARGETS[number % len(TARGETS)]
    return run_apart("fuzz.interrupts", number, target, warm=number // len(TARGETS) % 8 > 0)


def run_here(number, target, num_rounds=None):
    """Run a case in this process, which is to be thrown away."""
    case = Case(np.random.default_rng([number, [*NUM_ROUNDS].index(target)]), target)
    case.run(num_rounds or NUM_ROUNDS[target])
    return case.num_struck


def warm_up():
    """Have the compiled code that most cases use."""
    Known(np.random.default_rng(0), "cartpole").record()


class Case(Known):
    """Calls struck with KeyboardInterrupt, raised where the interpreter happens to be.

    Attributes:
        num_struck: How many calls were.
    """

    def __init__(self, rng, target):
        super().__init__(rng, target)
        if target == "cartpole" and rng.random() < 0.3:
            self.mode = DISABLED
            self.num_steps = 1  # of which no env's episode ends
        self.num_struck = 0
        self.usual_s = {}  # how long calls of a name take
        self._left, self._again_s = 0, 0.0
        self.calls = ["step", "step_out", "send_recv", "reset", "fork"]
        if target == "async":
            self.calls += ["close_and_open", "split", "call"]
        elif target == "cartpole":
            self.calls += ["close_and_open", "reset_some", "state"]
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, number, frame):
        if self._left > 0:
            self._left -= 1
            if self._left:
                signal.setitimer(signal.ITIMER_REAL, self._again_s)
            raise KeyboardInterrupt

    def strike(self, name, call):
        """Interrupt a call somewhere; return (whether it ended normally, its value)."""
        usual_s, value, done = self.usual_s.setdefault(name, 2e-4), None, False
        self._again_s = max(usual_s * float(self.rng.random()) ** 3, 1e-6)
        times, begin = 1 + int(self.rng.random() < 0.1), time.perf_counter()
        with contextlib.suppress(KeyboardInterrupt):  # the second one, too
            try:
                self._left = times
                delay_s = max(float(self.rng.uniform(-0.05, 1.2)) * usual_s, 1e-6)
                signal.setitimer(signal.ITIMER_REAL, delay_s)
                value = call()
                self._left, done = 0, True
            except REFUSALS as error:
                self._left = 0
                require_help(error)
            finally:
                self._left = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        took_s = time.perf_counter() - begin
        self.num_struck += not done
        self.usual_s[name] = 0.7 * usual_s + 0.3 * took_s if done else max(usual_s, 1.2 * took_s)
        return done, value

    def run(self, num_rounds):
        self.record()
        self.open()
        if self.options.get("context") == "forkserver":  # each new worker is a new interpreter
            num_rounds = -(-num_rounds // 4)
        for number in range(num_rounds):
            name = str(self.rng.choice(self.calls))
            try:
                self.put_right()
                at = int(self.rng.integers(min(4, self.num_steps)))
                for index in range(at):
                    assert_same(self.envs.step(self.actions[index])[:4], self.results[index])
                if getattr(self, name)(at, self.strike) is True and at + 1 < self.num_steps:
                    result = self.envs.step(self.actions[at + 1])[:4]
                    assert_same(result, self.results[at + 1])
            except Exception as error:
                error.add_note(f"round {number}: {name} of {self}")
                raise
        self.close()

    def put_right(self):
        """Do what the errors say until the envs are reset, as a patient user would."""
        for _ in range(4):
            try:
                obs, _ = self.envs.reset(seed=self.seed)
            except AlreadyPendingCallError as error:
                require_help(error)
                wait = "recv" if error.name == "send" else f"{error.name}_wait"
                with contextlib.suppress(*REFUSALS):
                    getattr(self.envs, wait)()
            else:
                np.testing.assert_array_equal(obs, self.first_obs)
                return
        raise AssertionError("no reset, whatever is done")

    def open(self):
        done, envs = self.target == "ray", None
        if done:  # actors take seconds to start
            envs = self.make()
        while not done:
            done, envs = self.strike("open", self.make)
        self.hold(envs)

    def close(self):
        options = [{}, {}, {"terminate": True}, {"timeout": 1.0}][self.rng.integers(4)]
        if self.target != "cartpole" and self.rng.random() < 0.5:  # in the midst of something
            with contextlib.suppress(*REFUSALS):  # the last call may ask for a reset
                self.envs.send(self.actions[0])
        with contextlib.suppress(Warning):
            self.strike("close", lambda: self.envs.close(**options))
        begin = time.monotonic()
        self.envs.close()
        assert time.monotonic() - begin < CLOSE_S
        self.envs = None
        self.require_no_leftovers()

    # Calls beside those of `Known`.

    def close_and_open(self, at, do):
        if self.rng.random() < 0.2:  # it takes long
            self.close()
            self.open()
            self.put_right()

    def reset(self, at, do):
        done, result = do("reset", lambda: self.envs.reset(seed=self.seed))
        if done:
            np.testing.assert_array_equal(result[0], self.first_obs)

    def fork(self, at, do):
        """The child has no use of workers, but of compiled envs; the parent does not notice it."""
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                faulthandler.dump_traceback_later(CLOSE_S, exit=True)
                self.be_child(at)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0, "a fork has found something"
        return self.step(at, do)

    def be_child(self, at):
        envs = self.envs
        if self.target == "cartpole":
            self.step(at, lambda name, call: (True, call()))
        for call in (lambda: envs.step(self.actions[0]), envs.reset, envs.recv, envs.timing.enable):
            if self.target != "cartpole":
                try:
                    call()
                except ForkedEnvError:
                    continue
                raise AssertionError("a fork has called its parent's workers")
        envs.close()

    def reset_some(self, at, do):
        mask = self.rng.random(self.num_envs) < 0.5
        mask[self.rng.integers(self.num_envs)] = True
        do("reset some", lambda: self.envs.reset(seed=3, options={"reset_mask": mask}))

    def state(self, at, do):
        """Save, observe, load."""
        done, state = do("save", self.envs.state_dict)
        do("observe", self.envs.observe)
        if done and do("load", lambda: self.envs.load_state_dict(state))[0]:
            self.step(at, do)

    def split(self, at, do):
        """The halves of a step and of a reset."""
        envs, is_step = self.envs, self.rng.random() < 0.6
        name = "step" if is_step else "reset"
        given = (self.actions[at],) if is_step else ()
        options = {} if is_step else {"seed": self.seed}
        do(f"{name}_async", lambda: getattr(envs, f"{name}_async")(*given, **options))
        do(f"{name}_wait", getattr(envs, f"{name}_wait"))

    def call(self, at, do):
        value = int(self.rng.integers(100))
        done, found = do("call", lambda: self.envs.call("answer", value))
        if done:
            assert [each for each, _ in found] == [value] * self.num_envs
        do("get_attr", lambda: self.envs.get_attr("age"))
        if do("set_attr", lambda: self.envs.set_attr("mark", value))[0]:
            with contextlib.suppress(*REFUSALS):  # an interrupted call may be pending
                assert self.envs.get_attr("mark") == (value,) * self.num_envs


def require_help(error):
    """Raise unless a refusal says what to do."""
    assert any(word in str(error) for word in WHAT_TO_DO), f"does not help: {error}"
