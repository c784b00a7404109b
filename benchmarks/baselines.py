"""What `margins.py` compares the library with: plain designs, and buffers of other libraries."""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from async_envs import OBS_SIZE, BusyEnv
from gymnasium.spaces import Box, Discrete
from work import make_columns

from buffers import EpisodicReplayBuffer, SharedReplayBuffer

OBS = Box(-np.inf, np.inf, (OBS_SIZE,), np.float32)
ACTIONS = Discrete(7)
ALPHA, BETA, GAMMA = 0.6, 0.4, 0.99
CHUNK = 20_000  # rows per add while a buffer is filled
BATCH, DISCOUNT = 256, 0.95  # of pairs of steps
STACKS, FRAME_ENVS = Box(0, 255, (4, 84, 84), np.uint8), 8
Columns = dict[str, np.ndarray]


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


def added_memory(kind: Any, num_envs: int) -> int:
    """Return the bytes by which this process and its children grow with a vector env of BusyEnv."""
    before = memory_bytes()
    envs = kind([BusyEnv] * num_envs, copy=False)
    envs.reset()
    envs.step(np.zeros(num_envs, np.int64))
    added = memory_bytes() - before
    envs.close()
    return added


def memory_bytes() -> int:
    """Return the proportional set size of this process and its children."""
    pids = {os.getpid(), *(child.pid for child in multiprocessing.active_children())}
    pids |= set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


def fill(add: Callable[[Columns], object], capacity: int, num_rows: int = CHUNK) -> None:
    """Add rows until a buffer is full, each observation the next one of the row before."""
    columns = make_columns(num_rows)
    back = {**columns, "obs": columns["next_obs"], "next_obs": columns["obs"]}
    for number in range(-(-capacity // num_rows)):
        add(back if number % 2 else columns)


class StableBaselines3:
    """The replay buffer of stable-baselines3."""

    def __init__(self, capacity: int) -> None:
        from stable_baselines3.common import buffers  # pyright: ignore[reportMissingImports]

        self._buffer = buffers.ReplayBuffer(capacity, OBS, ACTIONS, "cpu")
        self._infos: list[dict[str, Any]] = [{}]

    def add(self, columns: Columns) -> None:
        """Add a row."""
        names = "obs", "next_obs", "actions", "rewards", "terminations"
        self._buffer.add(*[columns[name] for name in names], self._infos)


class Cpprb:
    """The replay buffers of cpprb; with `n_step` it has one env and folds rewards when adding."""

    def __init__(self, capacity: int, prioritized: bool, n_step: int) -> None:
        import cpprb  # pyright: ignore[reportMissingImports]

        fields: dict[str, Any] = {
            "obs": {"shape": OBS_SIZE, "dtype": np.float32},
            "next_obs": {"shape": OBS_SIZE, "dtype": np.float32},
            "actions": {"dtype": np.int64},
            "rewards": {"dtype": np.float32},
            "done" if n_step > 1 else "terminations": {"dtype": np.bool_},
            "truncations": {"dtype": np.bool_},
        }
        self._folds, self._options = n_step > 1, {"beta": BETA} if prioritized else {}
        if prioritized:
            self._buffer = cpprb.PrioritizedReplayBuffer(capacity, fields, alpha=ALPHA)
        elif self._folds:
            fold = {"size": n_step, "gamma": GAMMA, "rew": "rewards", "next": "next_obs"}
            self._buffer = cpprb.ReplayBuffer(capacity, fields, Nstep=fold)
        else:
            self._buffer = cpprb.ReplayBuffer(capacity, fields)

    def add(self, columns: Columns) -> None:
        """Add rows."""
        if self._folds:
            columns = {**columns, "done": columns["terminations"]}
            del columns["terminations"]
        self._buffer.add(**columns)

    def sample(self, batch_size: int) -> dict[str, torch.Tensor]:
        """Draw torch tensors."""
        batch = self._buffer.sample(batch_size, **self._options)
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def update(self, batch: dict[str, torch.Tensor], priorities: np.ndarray) -> None:
        """Give new priorities to what `sample` returned."""
        self._buffer.update_priorities(batch["indexes"].numpy(), priorities)


class Episodes:
    """1 000 episodes of 200 steps with 5 boundaries each, and the usual way to draw pairs.

    A pair is a step and a later one, geometrically distributed up to the second next boundary.
    Boundaries lie in a table 100 wide, as a table cannot know how many there will be; the rows that
    are drawn are looked up, those before the step masked, and sorted.
    """

    num_episodes, length, num_boundaries, width = 1000, 200, 5, 100

    def __init__(self) -> None:
        self.rng = rng = np.random.default_rng(0)
        shape = self.num_episodes, self.length
        self.obs = rng.standard_normal((shape[0], shape[1] + 1, OBS_SIZE), np.float32)
        self.actions = rng.integers(0, 7, shape)
        self.rewards = rng.standard_normal(shape, np.float32)
        places = [rng.choice(shape[1], self.num_boundaries, replace=False) for _ in range(shape[0])]
        self.wide = np.full((shape[0], self.width), -1)
        self.wide[:, : self.num_boundaries] = np.sort(np.array(places), axis=1)

    def buffer(self) -> EpisodicReplayBuffer:
        """Return a buffer that holds them."""
        buffer = EpisodicReplayBuffer(
            self.num_episodes * self.length, Box(-1, 1, (OBS_SIZE,)), ACTIONS,
            max_episodes=self.num_episodes, seed=0,
        )  # fmt: skip
        rows = self.obs, self.actions, self.rewards, self.wide[:, : self.num_boundaries]
        for obs, actions, rewards, places in zip(*rows, strict=True):
            flags = np.zeros(self.length, np.bool_)
            flags[places] = True
            buffer.add_episode(
                {"obs": obs, "actions": actions, "rewards": rewards, "boundaries": flags}
            )
        return buffer

    def draw(self) -> list[torch.Tensor]:
        """Draw a batch of pairs in NumPy: observations, later ones, offsets, actions, rewards."""
        e = self.rng.integers(self.num_episodes, size=BATCH)
        t = self.rng.integers(self.length - 1, size=BATCH)
        ahead = np.where(self.wide[e] >= t[:, None], self.wide[e], self.length)
        ahead = np.sort(ahead, axis=1)[:, :2]
        bound = np.where(ahead[:, 1] < self.length, ahead[:, 1], ahead[:, 0])
        room = np.maximum(np.where(bound < self.length, bound, self.length - 1) - t, 1)
        mass = 1 - DISCOUNT**room
        offsets = 1 + (np.log(1 - self.rng.random(BATCH) * mass) / np.log(DISCOUNT)).astype(int)
        obs, later = self.obs[e, t], self.obs[e, t + offsets]
        found = obs, later, offsets, self.actions[e, t], self.rewards[e, t]
        return [torch.from_numpy(array) for array in found]


def frames_once(capacity: int) -> SharedReplayBuffer:
    """Return a full buffer of stacks of 4 frames of 84 x 84, each frame stored once; 8 envs."""
    buffer = SharedReplayBuffer(
        capacity, STACKS, Discrete(6), num_envs=FRAME_ENVS, seed=0, frame_stack=4
    )
    for columns in itertools.islice(_frame_steps(), -(-capacity // FRAME_ENVS)):
        buffer.add(**columns)
    return buffer


def _frame_steps() -> Iterator[dict[str, Any]]:
    """Yield steps of all envs without end: each frame another, episodes of 500 on average."""
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (509, *STACKS.shape[1:]), np.uint8)
    stacks = np.repeat(pool[:FRAME_ENVS, None], 4, axis=1)
    for t in itertools.count():
        following = np.empty_like(stacks)
        following[:, :-1] = stacks[:, 1:]
        following[:, -1] = pool[(np.arange(FRAME_ENVS) * 61 + t) % len(pool)]
        over = rng.random((2, FRAME_ENVS)) < 0.001
        yield {
            "obs": stacks,
            "next_obs": following,
            "actions": rng.integers(0, 6, FRAME_ENVS),
            "rewards": rng.standard_normal(FRAME_ENVS, np.float32),
            "terminations": over[0],
            "truncations": over[1],
        }
        stacks = following.copy()
        is_over = over.any(0)
        stacks[is_over] = following[is_over, -1:]


def gather_rows(table: torch.Tensor, size: int) -> Callable[[], object]:
    """Return a call that gathers rows, other ones each time, into memory of its own."""
    indices = itertools.cycle(torch.randint(len(table), (400, size)))
    target = torch.empty((size, table.shape[1]), dtype=torch.uint8)
    return lambda: torch.index_select(table, 0, next(indices), out=target)


def gae_loop(
    rewards: np.ndarray, values: np.ndarray, dones: np.ndarray, gae_lambda: float
) -> np.ndarray:
    """Compute advantages as stable-baselines3 does: in NumPy, one step of all envs a time."""
    advantages, last = np.empty_like(rewards), np.zeros(rewards.shape[1], np.float32)
    for t in reversed(range(len(rewards))):
        continues = 1.0 - dones[t]
        delta = rewards[t] + GAMMA * values[t + 1] * continues - values[t]
        last = delta + GAMMA * gae_lambda * continues * last
        advantages[t] = last
    return advantages + values[:-1]
