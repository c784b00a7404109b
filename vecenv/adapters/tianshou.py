"""TianshouVectorEnv: vector envs for Tianshou."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from vecenv import VecEnv, make_vec
from vecenv.adapters import (
    load_library,
    read_attr,
    require_mode,
    split_infos,
    write_attr,
)  # fmt: skip

_library = load_library("tianshou.env", "tianshou")

__all__ = ["TianshouVectorEnv", "make_tianshou_env"]

EnvIds = int | Sequence[int] | np.ndarray | None
VectorStep = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class TianshouVectorEnv(_library.BaseVectorEnv):
    """A vector env as a Tianshou `BaseVectorEnv`.

    Tianshou resets envs itself, and steps any subset: `step(actions, id)` is a step of all envs if
    `id` has all of them, else a `send` and a `recv`.

    Args:
        envs: Vector env in autoreset mode DISABLED whose observations the caller may keep. `close`
            closes it.

    Attributes:
        envs: The vector env.

    Raises:
        TypeError: `envs` is not a `vecenv.VecEnv`, or its observations are tuples.
        ValueError: Another autoreset mode, or `copy=False`.

    Example:
        envs = vecenv.make_vec("CartPole-v1", 8, autoreset_mode="Disabled")
        collector = Collector(algorithm, TianshouVectorEnv(envs), VectorReplayBuffer(20_000, 8))
    """

    # BaseVectorEnv's `__init__` is not called: it starts a worker per env.
    def __init__(self, envs: VecEnv) -> None:
        require_mode(envs, AutoresetMode.DISABLED, "Tianshou")
        if not isinstance(envs, VecEnv):
            raise TypeError(f"envs is {type(envs).__name__}, expected a vecenv.VecEnv")
        if isinstance(envs.single_observation_space, spaces.Tuple):
            raise TypeError("observation_space is a Tuple, but Tianshou takes arrays and dicts")
        self.envs = envs
        self.env_num = self.wait_num = count = envs.num_envs
        self.timeout, self.is_async = None, False
        self.is_closed = False
        self._seeds: list[int | None] = [None] * count
        self._has_reset = False
        self._action_spaces = [deepcopy(envs.single_action_space) for _ in range(count)]

    def __len__(self) -> int:
        """Number of envs."""
        return self.env_num

    def reset(self, env_id: EnvIds = None, **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
        """Reset some envs, or all, with the seeds from `seed`.

        Args:
            env_id: Ids of the envs; None for all.
            **kwargs: "options", a dict for all envs; "seed", one per env of the vector env, or an
                integer s, which gives env i the seed s + i.

        Returns:
            Observations and infos of these envs, in their order.
        """
        ids, mask = self._ids(env_id), np.ones(self.env_num, np.bool_)
        if self._has_reset and len(ids) < self.env_num:
            mask = np.isin(np.arange(self.env_num), ids)
            kwargs["options"] = {**(kwargs.get("options") or {}), "reset_mask": mask}
        chosen = np.flatnonzero(mask).tolist()
        if kwargs.get("seed") is None and any(self._seeds[i] is not None for i in chosen):
            kwargs["seed"] = list(self._seeds)
        obs, infos = self.envs.reset(**kwargs)
        self._has_reset = True
        for index in chosen:
            self._seeds[index] = None
        return self._pack(obs)[ids], _objects(split_infos(infos, self.env_num))[ids]

    def step(self, action: Any, id: EnvIds = None) -> VectorStep:
        """Step some envs, or all.

        Args:
            action: One action per env of `id`.
            id: Ids of the envs; None for all.

        Returns:
            obs, rewards float64, terminations bool, truncations bool and infos (an array of dicts,
            each with "env_id") of the envs of `id`, in their order.
        """
        ids, actions = self._ids(id), np.asarray(action)
        if len(actions) != len(ids):
            raise ValueError(f"action has {len(actions)} rows for {len(ids)} envs")
        if np.array_equal(ids, np.arange(self.env_num)):
            return self._result(*self.envs.step(actions), ids)
        self.envs.send(actions, ids)
        batch = self.envs.recv()
        place = np.empty(self.env_num, np.int64)
        place[batch.env_ids] = np.arange(len(ids))
        order = place[ids]
        obs, rewards, terminations, truncations, infos = (x[order] for x in self._result(*batch))
        return obs, rewards, terminations, truncations, infos

    def _result(
        self, obs: Any, rewards: Any, terminations: Any, truncations: Any, infos: Any, ids: Any
    ) -> VectorStep:
        rows = split_infos(infos, len(ids))
        for row, index in zip(rows, ids.tolist(), strict=True):
            row["env_id"] = index
        return self._pack(obs), rewards, terminations, truncations, _objects(rows)

    def _pack(self, obs: Any) -> np.ndarray:
        """Return Dict observations as an array of dicts, as Tianshou stacks them."""
        if isinstance(obs, np.ndarray):
            return obs
        return _objects(list(iterate(self.envs.observation_space, obs)))

    def _ids(self, env_id: EnvIds) -> np.ndarray:
        return np.atleast_1d(np.arange(self.env_num) if env_id is None else np.asarray(env_id))

    def seed(self, seed: int | Sequence[int] | None = None) -> list[list[int] | None]:
        """Keep seeds for the next reset of each env, and seed the action spaces.

        Args:
            seed: s gives env i the seed s + i; a list has one seed per env; None does nothing.

        Returns:
            The seeds, in the form of Tianshou.
        """
        if seed is None:
            return [None] * self.env_num
        first: Any = seed
        is_one = np.ndim(first) == 0
        seeds = [int(first) + i for i in range(self.env_num)] if is_one else list(first)
        if len(seeds) != self.env_num:
            raise ValueError(f"seed has {len(seeds)} seeds for {self.env_num} envs")
        self._seeds = list(seeds)
        for space, value in zip(self._action_spaces, seeds, strict=True):
            space.seed(value)
        return [[value] for value in seeds]

    def get_env_attr(self, key: str, id: EnvIds = None) -> list[Any]:
        """Return an attribute of some envs, or of all; compiled envs share theirs."""
        if key == "action_space":
            values: list[Any] = self._action_spaces
        elif key == "observation_space":
            values = [self.envs.single_observation_space] * self.env_num
        elif key in ("metadata", "spec"):
            values = [getattr(self.envs, key)] * self.env_num
        else:
            values = read_attr(self.envs, key)
        return [values[i] for i in self._ids(id).tolist()]

    def set_env_attr(self, key: str, value: Any, id: EnvIds = None) -> None:
        """Set an attribute of some envs, or of all, to one value; not for compiled envs."""
        write_attr(self.envs, key, value, self._ids(id).tolist())

    def render(self, **kwargs: Any) -> list[Any]:
        """Return the frame of each env; no env may be in flight."""
        frames = self.envs.render()
        return [None] * self.env_num if frames is None else list(frames)

    def close(self) -> None:
        """Close the envs; may be called twice."""
        self.envs.close()
        self.is_closed = True


def make_tianshou_env(env: Any, num_envs: int | None = None, **options: Any) -> TianshouVectorEnv:
    """Make a vector env with `make_vec`, in Tianshou's autoreset mode, and adapt it.

    Args:
        env: A registered id, an `EnvSpec`, a factory or a list of factories, as in `make_vec`.
        num_envs: Number of envs.
        **options: Further arguments of `make_vec`, such as `backend` and the env's own.
    """
    envs = make_vec(env, num_envs, autoreset_mode=AutoresetMode.DISABLED, **options)
    try:
        return TianshouVectorEnv(envs)
    except BaseException:
        envs.close()
        raise


def _objects(rows: list[Any]) -> np.ndarray:
    """Return an array of dicts, object (len(rows),)."""
    return np.fromiter(rows, object, count=len(rows))
