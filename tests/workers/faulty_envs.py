"""Envs that fail in one way each, and counts of what a process has open."""

import ctypes
import os
import signal
import time

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

FINE, RAISE, DIE, HANG, WRONG_SHAPE, EXIT, WRONG_REWARD = range(7)
HANG_S = 1.2  # how long such an env hangs: waits of half of it pass, with time to spare


class FaultyEnv(gym.Env):
    """Counts its steps; the action says what goes wrong."""

    observation_space = Box(-1, 1000, (2,), np.float32)
    action_space = Discrete(7)
    metadata = {"render_modes": []}

    def __init__(self, name=0, length=1000):
        self.name = name
        self.length = length
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        if options and options.get("raises") == self.name:
            raise KeyError("no such level")
        if options and options.get("dies") == self.name:
            os._exit(3)
        return np.array([self.name, 0], np.float32), {}

    def step(self, action):
        self.count += 1
        obs = np.array([self.name, self.count], np.float32)
        if action == RAISE:
            raise ValueError(f"broken joint {self.name}")
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == HANG:
            time.sleep(HANG_S)
        if action == EXIT:
            os._exit(3)
        if action == WRONG_SHAPE:
            obs = np.zeros(3, np.float32)
        reward = "much" if action == WRONG_REWARD else 1.0
        return obs, reward, self.count >= self.length, False, {}

    def pid(self):
        return os.getpid()

    def children(self):
        return children()

    def hold(self, seconds):
        """Sleep without letting other threads of the process run."""
        ctypes.PyDLL(None).sleep(seconds)

    def nap(self, seconds):
        time.sleep(seconds)
        return self.name


class NapEnv(gym.Env):
    """Waits in each step, and does nothing else."""

    observation_space = Box(-1, 1, (1,), np.float32)
    action_space = Discrete(2)
    seconds = 0.02

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.wait()
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def wait(self):
        time.sleep(self.seconds)


def faulty(num_envs, **kwargs):
    return [lambda name=name: FaultyEnv(name, **kwargs) for name in range(num_envs)]


def opener(kind, **defaults):
    """Yield, for a fixture, a function that makes a vector env; those are closed at last."""
    opened = []

    def make(num_envs=4, *, length=1000, **options):
        opened.append(kind(faulty(num_envs, length=length), **{**defaults, **options}))
        return opened[-1]

    yield make
    for envs in opened:
        envs.close(terminate=True)


def actions(env_id, action, num_envs=4):
    """Actions with which nothing goes wrong but in one env."""
    chosen = np.full(num_envs, FINE)
    chosen[env_id] = action
    return chosen


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


def children():
    """Process ids of this process's children, zombies included."""
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return file.read().split()


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, seconds=30):
    """Return which of these are still there after so long."""
    end = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return [pid for pid in pids if is_running(pid)]


class OnlyEnv(FaultyEnv):
    """A process can have one of these, as with emulators that keep their state in globals."""

    is_there = False

    def __init__(self, name=0):
        if OnlyEnv.is_there:
            raise RuntimeError("Cannot create multiple emulator instances per process")
        OnlyEnv.is_there = True
        super().__init__(name)

    def close(self):
        OnlyEnv.is_there = False
