"""Fragments: the results of several consecutive steps, in memory that is reused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict, Tuple

from vecenv.core.base import StepSlot
from vecenv.core.batches import ARRAY_SPACES

__all__ = ["Fragment", "FragmentMemory", "step_of"]

Allocate = Callable[[tuple[int, ...], Any], np.ndarray]


class Fragment(NamedTuple):
    """The results of T steps of n envs.

    Attributes:
        obs: After every step, (T, n, *obs_shape), nested as the space is.
        rewards: float64 (T, n).
        terminations: bool (T, n).
        truncations: bool (T, n).
        fields: Fields recorded by the policy, arrays (T, n, ...) by name.
        infos: Infos by step, of the steps that had any.
    """

    obs: Any
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    fields: dict[str, np.ndarray]
    infos: dict[int, dict[str, Any]]


class FragmentMemory:
    """Memory for a fragment, and a slot for each of its steps.

    Attributes:
        slots: T slots, to be passed as `out`.
    """

    def __init__(self, space: Space, num_steps: int, num_envs: int, allocate: Allocate) -> None:
        shape = (num_steps, num_envs)
        self._obs = _allocate_obs(space, shape, allocate)
        self._rewards = allocate(shape, np.float64)
        self._flags = allocate(shape, np.bool_), allocate(shape, np.bool_)
        self._fields: dict[str, np.ndarray] = {}
        self._shape = shape
        self.slots = [
            StepSlot(step_of(self._obs, t), self._rewards[t], *(flags[t] for flags in self._flags))
            for t in range(num_steps)
        ]

    def put(self, t: int, fields: dict[str, Any]) -> None:
        """Copy the policy's fields of step t: arrays or CPU tensors (n, ...)."""
        for name, value in fields.items():
            array = np.asarray(value)
            kept = self._fields.get(name)
            if kept is None or kept.shape[1:] != array.shape or kept.dtype != array.dtype:
                if t or array.shape[:1] != self._shape[1:]:
                    before = "one row per env" if kept is None else f"{kept.dtype} {kept.shape[1:]}"
                    raise ValueError(
                        f"the policy's field {name!r} is {array.dtype} {array.shape} in step {t}, "
                        f"expected {before}: the same in every step for {self._shape[1]} envs"
                    )
                kept = self._fields[name] = np.zeros((*self._shape, *array.shape[1:]), array.dtype)
            kept[t] = array

    def fragment(self, infos: dict[int, dict[str, Any]]) -> Fragment:
        """Return the fragment as views, valid until the next one is begun."""
        return Fragment(self._obs, self._rewards, *self._flags, self._fields, infos)


def step_of(obs: Any, t: int) -> Any:
    """Return the observations of one step of a fragment: views."""
    if isinstance(obs, dict):
        return {key: step_of(part, t) for key, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(step_of(part, t) for part in obs)
    return obs[t]


def _allocate_obs(space: Space, shape: tuple[int, int], allocate: Allocate) -> Any:
    if isinstance(space, Dict):
        return {key: _allocate_obs(part, shape, allocate) for key, part in space.items()}
    if isinstance(space, Tuple):
        return tuple(_allocate_obs(part, shape, allocate) for part in space)
    if not isinstance(space, ARRAY_SPACES):
        raise TypeError(f"fragments hold observations of fixed shape; {space} has none")
    assert space.shape is not None
    return allocate((*shape, *space.shape), space.dtype)
