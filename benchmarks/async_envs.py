"""Envs of several kinds for benchmarks, and processes that step them and know nothing of others."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import select
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

OBS_SIZE = 52


class NullEnv(gym.Env[np.ndarray, np.int64]):
    """An env whose step does nothing."""

    observation_space = Box(-1.0, 1.0, (OBS_SIZE,), np.float32)
    action_space = Discrete(2)

    def __init__(self) -> None:
        space = self.observation_space
        self._obs = np.zeros(space.shape or (), space.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        return self._obs, {}

    def step(self, action: np.int64):
        return self._obs, 0.0, False, False, {}


class PixelEnv(NullEnv):
    """An env whose step does nothing but return an Atari-sized stack of frames."""

    observation_space = Box(0, 255, (84, 84, 4), np.uint8)


class BusyEnv(NullEnv):
    """About 0.2 ms of computing per step, and a true state besides the observation."""

    publish = {"true_state": Box(-1.0, 1.0, (OBS_SIZE,), np.float32)}
    rounds = 0  # set by `calibrate`

    def __init__(self) -> None:
        super().__init__()
        self.true_state = np.zeros(OBS_SIZE, np.float32)

    def step(self, action: np.int64):
        total = 0
        for number in range(BusyEnv.rounds):
            total += number
        self.true_state[0] = total % 2
        return super().step(action)


class EvenEnv(NullEnv):
    """Each step takes equally long: it computes until the clock says so, or sleeps."""

    def __init__(self, step_us: float, sleeps: bool) -> None:
        super().__init__()
        self.step_s, self.sleeps = step_us * 1e-6, sleeps

    def step(self, action: np.int64):
        end = time.perf_counter() + self.step_s
        if self.sleeps:
            time.sleep(self.step_s)
        while time.perf_counter() < end:
            pass
        return super().step(action)


class SleepyEnv(NullEnv):
    """Waits: log-normal, mean 2 ms, 99th percentile about 20 ms."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.rng = np.random.default_rng(seed)
        return self._obs, {}

    def step(self, action: np.int64):
        sigma = 1.4
        time.sleep(0.002 * np.exp(sigma * self.rng.normal() - sigma**2 / 2))
        return super().step(action)


def calibrate(seconds: float = 2e-4) -> None:
    """Set how many rounds make a busy step take about this long on an idle core."""
    env = BusyEnv()
    BusyEnv.rounds = 2000
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        env.step(np.int64(0))
        times.append(time.perf_counter() - begin)
    BusyEnv.rounds = int(2000 * seconds / min(times))


def loop_over(make_env: Callable[[], gym.Env], num_envs: int) -> Callable[[int], None]:
    """Return a function that steps envs in a loop so many times."""
    envs = [make_env() for _ in range(num_envs)]
    for env in envs:
        env.reset(seed=0)
    action = np.int64(0)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            for env in envs:
                if (result := env.step(action))[2] or result[3]:
                    env.reset()

    return run


class LooseProcesses:
    """Two processes that do half of the work each and know nothing of each other.

    Args:
        make_run: Called with a number of envs in each process; returns what `run` calls there with
            its argument.
        num_envs: Of both processes.
    """

    def __init__(self, make_run: Callable[[int], Callable[[Any], Any]], num_envs: int) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for half in (num_envs - num_envs // 2, num_envs // 2):
            here, there = context.Pipe()
            process = context.Process(target=self._work, args=(make_run, half, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    @staticmethod
    def _work(make_run: Callable[[int], Callable[[Any], Any]], num_envs: int, pipe: Any) -> None:
        run = make_run(num_envs)
        while (argument := pipe.recv()) is not None:
            pipe.send(run(argument))

    def run(self, argument: Any) -> list[Any]:
        """Let both do something, wait for both, and return what they returned."""
        for pipe in self._pipes:
            pipe.send(argument)
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        """End them."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()


def threads_over(make_env: Callable[[], gym.Env], num_envs: int) -> Callable[[float], int]:
    """Return a function that steps every env in a thread for so many seconds; it counts steps."""
    envs = [make_env() for _ in range(num_envs)]
    for number, env in enumerate(envs):
        env.reset(seed=number)

    def run(seconds: float) -> int:
        counts = [0] * num_envs
        end = time.perf_counter() + seconds

        def step(number: int) -> None:
            while time.perf_counter() < end:
                envs[number].step(np.int64(0))
                counts[number] += 1

        threads = [threading.Thread(target=step, args=(number,)) for number in range(num_envs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts)

    return run


class PipedEnvs:
    """The plain design of first-ready, for Linux: a process an env, and a byte each way.

    Observations, actions and rewards lie in shared memory; a byte through a pipe means "step", one
    through another "done", and epoll tells which envs are. It checks nothing, resets nothing and
    survives nothing: what it reaches is what faults and checks may cost something of.

    Args:
        make_env: Factory of an env that observes as `NullEnv` does.
        num_envs: How many.
    """

    def __init__(self, make_env: Callable[[], gym.Env], num_envs: int) -> None:
        memory = mmap.mmap(-1, num_envs * (4 * OBS_SIZE + 16))
        begin = 4 * OBS_SIZE * num_envs
        obs = np.frombuffer(memory, np.float32, num_envs * OBS_SIZE)
        self._obs = obs.reshape(num_envs, OBS_SIZE)
        self._actions = np.frombuffer(memory, np.int64, num_envs, begin)
        self._rewards = np.frombuffer(memory, np.float64, num_envs, begin + 8 * num_envs)
        self._ready, self._env_of, self._begins = select.epoll(), {}, []
        self._processes = []
        context = multiprocessing.get_context("fork")
        for number in range(num_envs):
            (command, begin_end), (done, done_end) = os.pipe(), os.pipe()
            arguments = make_env, number, command, done_end
            process = context.Process(target=self._work, args=arguments, daemon=True)
            process.start()
            os.close(command)
            os.close(done_end)
            self._ready.register(done, select.EPOLLIN)
            self._env_of[done] = number
            self._begins.append(begin_end)
            self._processes.append(process)

    def _work(self, make_env: Callable[[], gym.Env], number: int, command: int, done: int) -> None:
        env = make_env()
        env.reset(seed=number)
        while os.read(command, 1):
            obs, reward, *_ = env.step(self._actions[number])
            self._obs[number], self._rewards[number] = obs, reward
            os.write(done, b"d")

    def send(self, actions: np.ndarray, env_ids: np.ndarray) -> None:
        """Let these envs make a step."""
        self._actions[env_ids] = actions
        for number in env_ids:
            os.write(self._begins[number], b"s")

    def recv(self, min_envs: int) -> SimpleNamespace:
        """Wait until so many envs have made one; return their `obs`, `rewards` and `env_ids`."""
        found: list[int] = []
        while len(found) < min_envs:
            for file, _ in self._ready.poll():
                os.read(file, 1)
                found.append(self._env_of[file])
        env_ids = np.array(found)
        obs, rewards = self._obs[env_ids], self._rewards[env_ids]
        return SimpleNamespace(obs=obs, rewards=rewards, env_ids=env_ids)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for file in (*self._begins, *self._env_of):
            os.close(file)
        self._ready.close()
