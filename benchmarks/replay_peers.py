"""Replay buffers of other libraries behind one small interface, those that are installed."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

OBS = Box(-np.inf, np.inf, (52,), np.float32)
ACTIONS = Discrete(7)
ALPHA, BETA, GAMMA = 0.6, 0.4, 0.99
Columns = dict[str, np.ndarray]


class Peer:
    """What a buffer is asked to do.

    A constructor raises NotImplementedError where the library has no such buffer; the table then
    has a gap there.
    """

    def __init__(self, capacity: int, num_envs: int, prioritized: bool, n_step: int):
        raise NotImplementedError  # each library below has its own

    def add(self, columns: Columns) -> None:
        raise NotImplementedError  # each library below has its own

    def sample(self, batch_size: int) -> Any:
        """Torch tensors."""
        raise NotImplementedError  # each library below has its own

    def update(self, batch: Any, priorities: np.ndarray) -> None:
        """Give new priorities to what `sample` returned."""
        raise NotImplementedError  # each library below has its own


class StableBaselines3(Peer):
    def __init__(self, capacity: int, num_envs: int, prioritized: bool, n_step: int):
        from stable_baselines3.common import buffers  # pyright: ignore[reportMissingImports]

        if prioritized:
            raise NotImplementedError  # the library has none
        options = {"n_envs": num_envs, "handle_timeout_termination": True}
        if n_step > 1:
            self._buffer = buffers.NStepReplayBuffer(
                capacity, OBS, ACTIONS, "cpu", n_steps=n_step, gamma=GAMMA, **options
            )
        else:
            self._buffer = buffers.ReplayBuffer(capacity, OBS, ACTIONS, "cpu", **options)
        self._infos = [{} for _ in range(num_envs)]

    def add(self, columns: Columns) -> None:
        c = columns
        infos = self._infos
        self._buffer.add(
            c["obs"], c["next_obs"], c["actions"], c["rewards"], c["terminations"], infos
        )

    def sample(self, batch_size: int) -> Any:
        return self._buffer.sample(batch_size)


class Cpprb(Peer):
    def __init__(self, capacity: int, num_envs: int, prioritized: bool, n_step: int):
        import cpprb  # pyright: ignore[reportMissingImports]

        if n_step > 1 and num_envs > 1:
            raise NotImplementedError  # the library has none
        env_dict = {
            "obs": {"shape": 52, "dtype": np.float32},
            "next_obs": {"shape": 52, "dtype": np.float32},
            "actions": {"dtype": np.int64},
            "rewards": {"dtype": np.float32},
            "terminations": {"dtype": np.bool_},
            "truncations": {"dtype": np.bool_},
        }
        options: dict[str, Any] = {}
        if n_step > 1:
            fold = {"size": n_step, "gamma": GAMMA, "rew": "rewards", "next": "next_obs"}
            options["Nstep"] = fold
            env_dict["done"] = env_dict.pop("terminations")
        if prioritized:
            self._buffer = cpprb.PrioritizedReplayBuffer(capacity, env_dict, alpha=ALPHA)
        else:
            self._buffer = cpprb.ReplayBuffer(capacity, env_dict, **options)
        self._prioritized, self._folds = prioritized, n_step > 1

    def add(self, columns: Columns) -> None:
        if self._folds:
            columns = {**columns, "done": columns["terminations"]}
            del columns["terminations"]
        self._buffer.add(**columns)

    def sample(self, batch_size: int) -> Any:
        batch = (
            self._buffer.sample(batch_size, beta=BETA)
            if self._prioritized
            else self._buffer.sample(batch_size)
        )
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def update(self, batch: Any, priorities: np.ndarray) -> None:
        self._buffer.update_priorities(batch["indexes"].numpy(), priorities)


class TorchRL(Peer):
    def __init__(self, capacity: int, num_envs: int, prioritized: bool, n_step: int):
        from torchrl.data import (  # pyright: ignore[reportMissingImports]
            LazyTensorStorage,
            TensorDictPrioritizedReplayBuffer,
            TensorDictReplayBuffer,
        )

        if n_step > 1:
            raise NotImplementedError  # the library has none
        storage = LazyTensorStorage(capacity)
        if prioritized:
            self._buffer = TensorDictPrioritizedReplayBuffer(
                alpha=ALPHA, beta=BETA, storage=storage, batch_size=256
            )
        else:
            self._buffer = TensorDictReplayBuffer(storage=storage, batch_size=256)

    def add(self, columns: Columns) -> None:
        from tensordict import TensorDict  # pyright: ignore[reportMissingImports]

        tensors = {name: torch.from_numpy(array) for name, array in columns.items()}
        self._buffer.extend(TensorDict(tensors, batch_size=[len(columns["rewards"])]))

    def sample(self, batch_size: int) -> Any:
        return self._buffer.sample(batch_size)

    def update(self, batch: Any, priorities: np.ndarray) -> None:
        self._buffer.update_priority(batch["index"], torch.from_numpy(priorities))


class Tianshou(Peer):
    def __init__(self, capacity: int, num_envs: int, prioritized: bool, n_step: int):
        from tianshou.data import PrioritizedVectorReplayBuffer, VectorReplayBuffer  # pyright: ignore[reportMissingImports]

        if n_step > 1:
            raise NotImplementedError  # the library has none
        if prioritized:
            self._buffer = PrioritizedVectorReplayBuffer(capacity, num_envs, alpha=ALPHA, beta=BETA)
        else:
            self._buffer = VectorReplayBuffer(capacity, num_envs)
        self._prioritized = prioritized

    def add(self, columns: Columns) -> None:
        from tianshou.data import Batch  # pyright: ignore[reportMissingImports]

        c = columns
        self._buffer.add(
            Batch(
                obs=c["obs"],
                obs_next=c["next_obs"],
                act=c["actions"],
                rew=c["rewards"],
                terminated=c["terminations"],
                truncated=c["truncations"],
                info=Batch(),
            )
        )

    def sample(self, batch_size: int) -> Any:
        batch, indices = self._buffer.sample(batch_size)
        names = ("obs", "obs_next", "act", "rew", "terminated", "truncated")
        tensors = {name: torch.from_numpy(batch[name]) for name in names}
        return {**tensors, "index": indices}

    def update(self, batch: Any, priorities: np.ndarray) -> None:
        self._buffer.update_weight(batch["index"], priorities)


PEERS: dict[str, type[Peer]] = {
    "stable-baselines3": StableBaselines3,
    "cpprb": Cpprb,
    "torchrl": TorchRL,
    "tianshou": Tianshou,
}


def make_peers(
    capacity: int, num_envs: int, *, prioritized: bool = False, n_step: int = 1
) -> dict[str, Peer]:
    """Those buffers that are installed and have what is asked for."""
    made: dict[str, Peer] = {}
    for name, peer in PEERS.items():
        with (
            contextlib.suppress(ImportError, NotImplementedError, RuntimeError),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            made[name] = peer(capacity, num_envs, prioritized, n_step)
    return made
