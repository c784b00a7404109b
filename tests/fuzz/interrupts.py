"""An interrupt at a random instant of every public call of compiled and asynchronous vector envs.

A case opens a vector env, and interrupts its calls one after the other: by a timer in the same
process, by Ctrl-C from another process, twice in a row. After each interrupt the env must either
go on, being where it was before the call or after it, or refuse with an error that says what to do;
then a reset makes it what it would be without interrupts, and `close` ends it and all that
belongs to it. Cases run in processes of their own: none may die by a signal, none may hang.

VECENV_FUZZ_INTERRUPTS=async (or cartpole, or cage2) makes all cases ones of this target.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import threading
import time

import gymnasium as gym
import numpy as np
from equality import assert_same
from fuzz.nursery import run_apart
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode

from vecenv import AsyncVectorEnv, StepSlot, SyncVectorEnv
from vecenv.cage import Cage2VectorEnv
from vecenv.jit import runner
from vecenv.jit.cartpole import CartPoleVectorEnv
from vecenv.jit.episodes import RUN_DTYPE

UNIT = "interrupts"  # what `run_case` counts
TARGETS = ("cartpole", "cage2", "async")
NUM_ROUNDS = {"cartpole": 300, "cage2": 150, "async": 40}
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode
REFUSALS = (AlreadyPendingCallError, NoAsyncCallError, ResetNeeded)
WHAT_TO_DO = ("reset", "recv", "_wait", "close", "send")
EPISODE = ("seed", "key", "counter", "episode_return", "episode_length", "episode_over")
CLOSE_S = 20.0  # for `close` and what it ends


def run_case(number):
    """Run a case in a process of its own; return how many interrupts struck."""
    target = os.environ.get("VECENV_FUZZ_INTERRUPTS") or TARGETS[number % len(TARGETS)]
    return run_apart("fuzz.interrupts", number, target, warm=number // len(TARGETS) % 8 > 0)


def run_here(number, target, num_rounds=None, fault=None):
    """Run a case in this process, which is to be thrown away; with a fault, to be found."""
    if fault is not None:
        CartPoleVectorEnv.step = faulty(CartPoleVectorEnv.step, fault)
    rng = np.random.default_rng([number, TARGETS.index(target)])
    case = AsyncCase(rng) if target == "async" else CompiledCase(rng, target)
    with Interrupts(rng) as interrupts:
        case.run(interrupts, num_rounds or NUM_ROUNDS[target])
    return interrupts.num_struck


def faulty(step, fault):
    """A step that does not get over an interrupt."""

    def interrupted(envs, *args, **kwargs):
        try:
            return step(envs, *args, **kwargs)
        except KeyboardInterrupt:
            if fault == "changes a state":
                envs.states["x"] += 1
            elif fault == "dies":
                os.kill(os.getpid(), signal.SIGSEGV)
            elif fault == "hangs":
                time.sleep(1000)
            raise

    return interrupted


def warm_up():
    """Have the compiled code that most cases use."""
    for kind in ("cartpole", "cage2"):
        for mode in (NEXT_STEP, SAME_STEP):
            envs = make_compiled(kind, 2, mode, 1)
            envs.reset(seed=0)
            envs.step(np.zeros(2, np.int64))
            envs.close()


# -- signals ---------------------------------------------------------------------------------


class Interrupts:
    """Strikes calls with KeyboardInterrupt, raised where the interpreter happens to be.

    Attributes:
        num_struck: How many calls were.
    """

    def __init__(self, rng):
        self.rng = rng
        self.num_struck = 0
        self.usual_s = {}  # how long calls of a name take
        self._left = 0
        self._again_s = 0.0
        self._arrived = 0
        self._sender = None

    def __enter__(self):
        self._sender = Sender()
        for number in (signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._left = 0
        self._sender.end()

    def _handle(self, number, frame):
        self._arrived += 1
        if self._left > 0:
            self._left -= 1
            if self._left:
                signal.setitimer(signal.ITIMER_REAL, self._again_s)
            raise KeyboardInterrupt

    def strike(self, name, call, *, times=None):
        """Do a call, with an interrupt somewhere in it; return (is it interrupted, its value)."""
        usual_s = self.usual_s.setdefault(name, 2e-4)
        delay_s = max(float(self.rng.uniform(-0.05, 1.2)) * usual_s, 1e-6)
        if times is None:
            times = 1 + (self.rng.random() < 0.1)
        from_outside = self._sender is not None and self.rng.random() < 0.15
        self._again_s = max(usual_s * float(self.rng.random()) ** 3, 1e-6)
        self._arrived, value, struck = 0, None, True
        begin = time.perf_counter()
        try:
            self._left = times
            if from_outside:
                self._sender.send(delay_s)
            else:
                signal.setitimer(signal.ITIMER_REAL, delay_s)
            value = call()
            self._left = 0
            struck = False
        except KeyboardInterrupt:
            self._left = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        took_s = time.perf_counter() - begin
        while from_outside and not self._arrived:
            time.sleep(1e-5)
        if struck:
            self.num_struck += 1
            self.usual_s[name] = max(usual_s, 1.2 * took_s)
        else:
            self.usual_s[name] = 0.7 * usual_s + 0.3 * took_s
        return struck, None if struck else value  # which may have come just before the interrupt


class Sender:
    """A process that sends Ctrl-C from outside; forked while this one has one thread."""

    def __init__(self):
        here, self._there = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._there)
            try:
                while packed := os.read(here, 8):
                    (delay_s,) = struct.unpack("d", packed)
                    time.sleep(delay_s)
                    os.kill(os.getppid(), signal.SIGINT)
            finally:
                os._exit(0)
        os.close(here)

    def send(self, delay_s):
        os.write(self._there, struct.pack("d", delay_s))

    def end(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._there)


def refusal_of(error):
    """Check that an error after an interrupt is one that says what to do."""
    assert isinstance(error, REFUSALS), f"{type(error).__name__}: {error}"
    assert any(word in str(error) for word in WHAT_TO_DO), f"does not help: {error}"
    return error


def children():
    """Processes that this one has started and that live, or have not been waited for."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
                if int(parent) == os.getpid() and state != "Z":
                    found.append(int(name))
    return found


def wait_for(condition, told):
    """Wait until a condition is met, which is to take a moment."""
    end = time.monotonic() + CLOSE_S
    while not condition():
        assert time.monotonic() < end, told()
        time.sleep(0.005)


# -- compiled --------------------------------------------------------------------------------


def make_compiled(kind, num_envs, mode, num_threads):
    if kind == "cage2":
        return Cage2VectorEnv(
            num_envs,
            red_agent="mixed",
            episode_length=7,
            autoreset_mode=mode,
            num_threads=num_threads,
            episode_infos=True,
        )
    return CartPoleVectorEnv(
        num_envs, autoreset_mode=mode, num_threads=num_threads, max_episode_steps=9
    )


class CompiledCase:
    """Envs of which every state on the way is known from a twin that nobody interrupts."""

    def __init__(self, rng, kind):
        self.rng, self.kind = rng, kind
        self.mode = (NEXT_STEP, SAME_STEP, DISABLED)[rng.integers(3)]
        sizes = (1, 3, 64, 1000) if kind == "cartpole" else (1, 20, 200)
        self.num_envs = int(rng.choice(sizes))
        self.num_threads = int(rng.integers(1, 4))
        self.seed = int(rng.integers(1000))
        self.is_split = self.num_threads > 1 and rng.random() < 0.8

    def run(self, interrupts, num_rounds):
        if self.is_split:  # also jobs that are too short for it to pay
            runner.SplitChoice.num_parts = lambda self, num_rows: 100
            runner.ROWS_PER_LINE = 1
            runner.NUM_SPINS = int(self.rng.choice([1, 200, 3000]))
        self.interrupts = interrupts
        envs = None
        while envs is None:
            _, envs = interrupts.strike("open", lambda: self.make(self.num_threads))
        self.record()
        self.envs = envs
        for number in range(num_rounds):
            self.round(number)
        self.close()

    def __repr__(self):
        return str({name: value for name, value in vars(self).items() if np.isscalar(value)})

    def make(self, num_threads):
        return make_compiled(self.kind, self.num_envs, self.mode, num_threads)

    def record(self):
        """Note the actions, results and states of a twin."""
        twin = self.make(1)
        self.first_obs, _ = twin.reset(seed=self.seed)
        self.states, self.actions, self.results = [twin.state_dict()], [], []
        num_actions = int(twin.single_action_space.n)
        is_over = np.zeros(self.num_envs, bool)
        while len(self.actions) < 20 and not (self.mode is DISABLED and is_over.any()):
            actions = self.rng.integers(num_actions, size=self.num_envs)
            result = twin.step(actions)[:4]
            is_over = result[2] | result[3]
            self.actions.append(actions)
            self.results.append(result)
            self.states.append(twin.state_dict())
        twin.close()

    def round(self, number):
        envs, rng = self.envs, self.rng
        obs, _ = envs.reset(seed=self.seed)  # whatever was before
        np.testing.assert_array_equal(obs, self.first_obs)
        at = int(rng.integers(len(self.actions)))
        envs.load_state_dict(self.states[at])
        name = str(rng.choice(list(self.CALLS)))
        try:
            if isinstance(came := self.CALLS[name](self, at), tuple):
                came = self.where(at, came, name)
            if came is not None:
                for index in range(came, len(self.actions)):
                    assert_same(envs.step(self.actions[index])[:4], self.results[index])
        except Exception as error:
            error.add_note(f"round {number}: {name} at {at} of {self}")
            raise

    def where(self, at, allowed, name):
        """Return in which state of the twin's the envs are; None if they ask for a reset."""
        try:
            state = self.envs.state_dict()
        except REFUSALS as error:
            refusal_of(error)
            return None
        for index in allowed:
            twin = self.states[index]
            fields = EPISODE if name == "reset" else RUN_DTYPE.names  # a reset keeps statistics
            is_same = all(same(state["runs"][field], twin["runs"][field]) for field in fields)
            if is_same and same(state["states"], twin["states"]):
                return index
        raise AssertionError(f"after {name} at {at} the state is none of {allowed}")

    # Each returns in which state the envs are, a tuple of those in which they may be, or None if
    # that is not known.

    def step(self, at):
        struck, result = self.interrupts.strike("step", lambda: self.envs.step(self.actions[at]))
        if struck:
            return at, at + 1
        assert_same(result[:4], self.results[at])
        return at + 1

    def step_out(self, at):
        space = self.envs.observation_space
        slot = StepSlot(
            np.empty(space.shape, space.dtype),
            np.empty(self.num_envs, np.float64),
            np.empty(self.num_envs, bool),
            np.empty(self.num_envs, bool),
        )
        struck, _ = self.interrupts.strike(
            "step out", lambda: self.envs.step(self.actions[at], out=slot)
        )
        if struck:
            return at, at + 1
        assert_same(tuple(slot), self.results[at])
        return at + 1

    def send_recv(self, at):
        envs, rng = self.envs, self.rng
        ids = rng.permutation(self.num_envs)
        parts = np.array_split(ids, min(len(ids), 1 + int(rng.integers(3))))
        num_left, has_refused = 0, False
        for part in parts:
            struck, _ = self.interrupts.strike(
                "send", lambda ids=part: envs.send(self.actions[at][ids], ids)
            )
            if struck:
                try:
                    envs.send(self.actions[at][part], part)
                except AlreadyPendingCallError as error:  # it was sent
                    refusal_of(error)
                except REFUSALS as error:
                    refusal_of(error)
                    return None
            num_left += len(part)
        while num_left:
            struck, batch = self.interrupts.strike("recv", lambda: envs.recv(1))
            if struck:
                try:
                    batch = envs.recv(1)
                except REFUSALS as error:
                    refusal_of(error)
                    return None
                has_refused = True  # what an interrupted `recv` had is lost
            assert 1 <= len(batch.env_ids) <= num_left
            rows = tuple(part[batch.env_ids] for part in self.results[at])
            assert_same(tuple(batch[:4]), rows)
            num_left -= len(batch.env_ids)
            if has_refused:
                return None
        return at + 1

    def reset(self, at):
        struck, result = self.interrupts.strike("reset", lambda: self.envs.reset(seed=self.seed))
        if struck:
            return at, 0
        np.testing.assert_array_equal(result[0], self.first_obs)
        return 0

    def reset_some(self, at):
        mask = self.rng.random(self.num_envs) < 0.5
        mask[self.rng.integers(self.num_envs)] = True
        struck, _ = self.interrupts.strike(
            "reset some", lambda: self.envs.reset(seed=self.seed, options={"reset_mask": mask})
        )
        if not struck:
            return None
        try:
            state = self.envs.state_dict()
        except REFUSALS as error:
            refusal_of(error)
            return None
        is_old = all(same(state[key], self.states[at][key]) for key in ("states", "runs"))
        if is_old:
            return at
        is_new = all(
            same(state["runs"][field][mask], self.states[0]["runs"][field][mask])
            for field in EPISODE
        )
        assert is_new, "a masked reset was done in part"
        return None

    def observe(self, at):
        struck, obs = self.interrupts.strike("observe", self.envs.observe)
        if not struck and at and self.mode is not NEXT_STEP:
            np.testing.assert_array_equal(obs, self.results[at - 1][0])
        return (at,) if struck else at

    def masks(self, at):
        if self.kind != "cage2":
            return self.observe(at)
        struck, _ = self.interrupts.strike("masks", self.envs.action_masks)
        return (at,) if struck else at

    def save(self, at):
        struck, _ = self.interrupts.strike("save", self.envs.state_dict)
        return (at,) if struck else at

    def load(self, at):
        other = int(self.rng.integers(len(self.states)))
        struck, _ = self.interrupts.strike(
            "load", lambda: self.envs.load_state_dict(self.states[other])
        )
        return (at, other) if struck else other

    def close_and_open(self, at):
        if self.rng.random() < 0.9:
            return self.step(at)
        self.close()
        self.envs = None
        while self.envs is None:
            _, self.envs = self.interrupts.strike("open", lambda: self.make(self.num_threads))
        return None

    CALLS = {
        "step": step,
        "step again": step,
        "step out": step_out,
        "send": send_recv,
        "reset": reset,
        "reset some": reset_some,
        "observe": observe,
        "masks": masks,
        "save": save,
        "load": load,
        "close": close_and_open,
    }

    def close(self):
        envs = self.envs
        self.interrupts.strike("close", envs.close)
        envs.close()
        del envs
        self.envs = None
        wait_for(lambda: not helpers(), lambda: f"threads outlive `close`: {helpers()}")


def helpers():
    return [one.name for one in threading.enumerate() if one.name.startswith("vecenv-jit")]


def same(one, other):
    """Whether records are equal, NaN being equal to NaN."""
    if one.dtype.names:
        return all(same(one[name], other[name]) for name in one.dtype.names)
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


# -- asynchronous ----------------------------------------------------------------------------


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


class AsyncCase:
    """Workers whose results after a reset are known from a twin without workers."""

    def __init__(self, rng):
        self.rng = rng
        self.num_envs = int(rng.integers(1, 7))
        self.mode = (NEXT_STEP, SAME_STEP)[rng.integers(2)]
        pause_s = float(rng.choice([0.0, 0.0, 2e-4]))
        self.factories = [lambda: Walk(pause_s)] * self.num_envs
        self.options = {
            "autoreset_mode": self.mode,
            "num_workers": int(rng.integers(1, 4)),
            "context": "fork" if rng.random() < 0.96 else "forkserver",
            "caller_steps": bool(rng.random() < 0.2),
        }

    def run(self, interrupts, num_rounds):
        self.interrupts = interrupts
        self.own = set(children())  # the sender
        self.record()
        self.open()
        self.put_right()
        if self.options["context"] != "fork":  # each new worker is a new interpreter
            num_rounds = -(-num_rounds // 4)
        for number in range(num_rounds):
            try:
                self.round()
            except Exception as error:
                error.add_note(f"round {number}: {self.doing} of {self}")
                raise
        self.close()

    def __repr__(self):
        return f"{self.num_envs} envs with {self.options}"

    def record(self):
        twin = SyncVectorEnv(self.factories, autoreset_mode=self.mode)
        self.seed = int(self.rng.integers(1000))
        self.first_obs, _ = twin.reset(seed=self.seed)
        self.actions = [self.rng.integers(5, size=self.num_envs) for _ in range(8)]
        self.results = [twin.step(actions)[:4] for actions in self.actions]
        twin.close()

    def open(self):
        while True:
            struck, self.envs = self.interrupts.strike(
                "open", lambda: AsyncVectorEnv(self.factories, **self.options)
            )
            if not struck:
                break
            self.require_no_workers("an interrupted constructor")
        self.pids = [seat.process.pid for seat in self.envs._pool.seats]

    def require_no_workers(self, what):
        """Workers are gone; what starts them may stay."""
        if self.options["context"] == "fork":
            gone = lambda: not set(children()) - self.own  # noqa: E731  # for these lines only
            wait_for(gone, lambda: f"workers outlive {what}: {set(children()) - self.own}")

    def round(self):
        self.doing = str(self.rng.choice(list(self.CALLS)))
        at = self.CALLS[self.doing](self)
        if at is None:
            self.put_right()
            at = 0
        for index in range(at, min(at + 3, len(self.actions))):
            assert_same(self.envs.step(self.actions[index])[:4], self.results[index])
        self.put_right()

    def put_right(self):
        """Do what the errors say until the envs are reset, as a patient user would."""
        envs = self.envs
        for _ in range(4):
            try:
                obs, _ = envs.reset(seed=self.seed)
            except AlreadyPendingCallError as error:
                refusal_of(error)
                with contextlib.suppress(*REFUSALS):
                    if error.name == "send":
                        envs.recv()
                    else:
                        getattr(envs, f"{error.name}_wait")()
            else:
                np.testing.assert_array_equal(obs, self.first_obs)
                return
        raise AssertionError("no reset, whatever is done")

    def strike(self, name, call):
        """Interrupt a call; return (whether it ended normally, its value)."""
        try:
            struck, value = self.interrupts.strike(name, call)
        except REFUSALS as error:
            refusal_of(error)
            return False, None
        return not struck, value

    def go_on(self, *calls):
        """After an interrupt, try to go on regardless: it works or is refused."""
        for call in calls:
            try:
                call()
            except REFUSALS as error:
                refusal_of(error)

    # Each returns up to which step the envs have come; None if that is not known.

    def reset(self):
        is_done, result = self.strike("reset", lambda: self.envs.reset(seed=self.seed))
        if not is_done:
            return self.go_on(lambda: self.envs.step(self.actions[0]))
        np.testing.assert_array_equal(result[0], self.first_obs)
        return 0

    def step(self):
        is_done, result = self.strike("step", lambda: self.envs.step(self.actions[0]))
        if not is_done:
            return self.go_on(lambda: self.envs.step(self.actions[1]))
        assert_same(result[:4], self.results[0])
        return 1

    def step_async(self):
        envs = self.envs
        is_done, _ = self.strike("step_async", lambda: envs.step_async(self.actions[0]))
        if not is_done:
            return self.go_on(envs.step_wait)
        is_done, result = self.strike("step_wait", envs.step_wait)
        if not is_done:
            return self.go_on(envs.step_wait)
        assert_same(result[:4], self.results[0])
        return 1

    def reset_async(self):
        envs = self.envs
        is_done, _ = self.strike("reset_async", lambda: envs.reset_async(seed=self.seed))
        if not is_done:
            return self.go_on(envs.reset_wait)
        is_done, result = self.strike("reset_wait", envs.reset_wait)
        if not is_done:
            return self.go_on(envs.reset_wait)
        np.testing.assert_array_equal(result[0], self.first_obs)
        return 0

    def send_recv(self):
        envs = self.envs
        ids = self.rng.permutation(self.num_envs)
        for part in np.array_split(ids, min(len(ids), 2)):
            is_done, _ = self.strike("send", lambda ids=part: envs.send(self.actions[0][ids], ids))
            if not is_done:
                return self.go_on(envs.recv)
        num_left = len(ids)
        while num_left:
            is_done, batch = self.strike("recv", lambda: envs.recv(1))
            if not is_done:
                return self.go_on(envs.recv)
            rows = tuple(part[batch.env_ids] for part in self.results[0])
            assert_same(tuple(batch[:4]), rows)
            num_left -= len(batch.env_ids)
        return 1

    def call(self):
        envs = self.envs
        value = int(self.rng.integers(100))
        is_done, found = self.strike("call", lambda: envs.call("answer", value))
        if not is_done:
            return self.go_on(envs.call_wait)
        assert found == ((value, 0),) * self.num_envs
        return 0

    def get_attr(self):
        is_done, found = self.strike("get_attr", lambda: self.envs.get_attr("age"))
        if not is_done:
            return self.go_on(lambda: self.envs.get_attr("age"))
        assert found == (0,) * self.num_envs
        return 0

    def set_attr(self):
        value = int(self.rng.integers(100))
        is_done, _ = self.strike("set_attr", lambda: self.envs.set_attr("mark", value))
        if not is_done:
            return self.go_on(lambda: self.envs.set_attr("mark", value))
        assert self.envs.get_attr("mark") == (value,) * self.num_envs
        return 0

    def close_and_open(self):
        if self.rng.random() < 0.7:  # it takes long
            return self.step()
        self.close()
        self.open()
        return None

    CALLS = {
        "reset": reset,
        "step": step,
        "step_async": step_async,
        "reset_async": reset_async,
        "send": send_recv,
        "call": call,
        "get_attr": get_attr,
        "set_attr": set_attr,
        "close": close_and_open,
    }

    def close(self):
        envs, rng = self.envs, self.rng
        if rng.random() < 0.3:  # in the midst of something
            envs.reset(seed=0)
            with contextlib.suppress(*REFUSALS):
                envs.send(self.actions[0]) if rng.random() < 0.5 else envs.step_async(
                    self.actions[0]
                )
        options = [{}, {}, {"terminate": True}, {"timeout": 1.0}][rng.integers(4)]
        with contextlib.suppress(Warning):
            self.interrupts.strike("close", lambda: envs.close(**options))
        begin = time.monotonic()
        envs.close()
        envs.close(terminate=True)
        assert time.monotonic() - begin < CLOSE_S
        wait_for(
            lambda: not any(os.path.exists(f"/proc/{pid}") for pid in self.pids),
            lambda: f"workers outlive `close`: {self.pids}",
        )
        self.require_no_workers("`close`")
