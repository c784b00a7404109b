"""Fragments: the results of several consecutive steps, in memory that is reused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict, Tuple

from vecenv.core.base import StepSlot
from vecenv.core.batches import ARRAY_SPACES, leaf_by_leaf
from vecenv.ray.chunks import copy_rows

__all__ = ["Fragment", "FragmentMemory", "checked_rows", "obs_bytes"]

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

    def obs_of(self, t: int) -> Any:
        """Return the observations of one step: views."""
        return _step_of(self.obs, t)

    def copy_into(
        self, slots: Sequence[Any], fields: Mapping[str, np.ndarray], rows: slice
    ) -> None:
        """Copy all into the caller's memory for the envs `rows`: T slots, and arrays (T, N, ...).

        Raises:
            ValueError: The policy did not record a field, or in another shape.
        """
        for name, target in fields.items():
            came = self.fields.get(name)
            if came is None or came.shape[2:] != target.shape[2:]:
                shapes = {key: array.shape[2:] for key, array in self.fields.items()}
                raise ValueError(
                    f"fields[{name!r}] has the shape {target.shape[2:]} per step and env, but the "
                    f"policy recorded {shapes}"
                )
            target[:, rows] = came
        for t, slot in enumerate(slots):
            copy_rows(slot.obs, self.obs_of(t), rows)
            slot.rewards[rows] = self.rewards[t]
            slot.terminations[rows] = self.terminations[t]
            slot.truncations[rows] = self.truncations[t]


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
            StepSlot(_step_of(self._obs, t), self._rewards[t], *(flags[t] for flags in self._flags))
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


def _step_of(obs: Any, t: int) -> Any:
    """Return the observations of one step of a fragment: views."""
    return leaf_by_leaf(lambda array: array[t], obs)


def _allocate_obs(space: Space, shape: tuple[int, int], allocate: Allocate) -> Any:
    if isinstance(space, Dict):
        return {key: _allocate_obs(part, shape, allocate) for key, part in space.items()}
    if isinstance(space, Tuple):
        return tuple(_allocate_obs(part, shape, allocate) for part in space)
    if not isinstance(space, ARRAY_SPACES):
        raise TypeError(f"fragments hold observations of fixed shape; {space} has none")
    assert space.shape is not None
    return allocate((*shape, *space.shape), space.dtype)


def obs_bytes(obs: Any) -> int:
    """Return the size of nested arrays."""
    if isinstance(obs, dict | tuple):
        return sum(map(obs_bytes, obs.values() if isinstance(obs, dict) else obs))
    return obs.nbytes


def checked_rows(name: str, rows: Any, size: tuple[int, int]) -> np.ndarray:
    """Return an array over the memory of an array or tensor (T, N, ...)."""
    if not hasattr(rows, "dtype"):
        raise ValueError(f"{name} is a {type(rows).__name__}, expected an array or a CPU tensor")
    array = np.asarray(rows)
    if array.shape[:2] != size:
        raise ValueError(f"{name} has shape {array.shape}, expected {size} first: (steps, envs)")
    return array
