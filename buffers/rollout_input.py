"""Checks of what users hand to a rollout buffer; each returns it in the form to be stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from buffers.errors import BufferMisuseError
from buffers.rollout_layout import RolloutLayout
from buffers.space_tree import tree_leaves

__all__ = ["read_env_ids", "read_field", "read_observations"]


def read_observations(obs: Any, layout: RolloutLayout) -> list[np.ndarray]:
    """The leaves of one step's observations as arrays (N, *obs_shape), in the order of the space.

    Raises:
        BufferMisuseError: Structure, shape or dtype does not fit the observation space.
    """
    arrays = []
    leaves = tree_leaves(layout.observation_space, obs, "obs")
    for leaf, found in zip(layout.obs_leaves, leaves, strict=True):
        array = np.asarray(found)
        expected = (layout.num_envs, *leaf.shape)
        if array.shape != expected:
            raise BufferMisuseError(
                f"{leaf.path} has shape {array.shape}, expected {expected} "
                f"({layout.num_envs} envs); pass the observations of all envs"
            )
        if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
            raise BufferMisuseError(
                f"{leaf.path} has dtype {array.dtype}, expected {leaf.dtype} as in the "
                "observation space"
            )
        arrays.append(array)
    return arrays


def read_field(name: str, given: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of exactly this shape and of a dtype that can be cast to the given one.

    Raises:
        BufferMisuseError: Something else was given.
    """
    try:
        tensor = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BufferMisuseError(
            f"{name} must be a tensor or an array, got {type(given).__name__}: {error}"
        ) from None
    if tuple(tensor.shape) != tuple(shape):
        raise BufferMisuseError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if not torch.can_cast(tensor.dtype, dtype):
        raise BufferMisuseError(
            f"{name} has dtype {tensor.dtype}, expected {dtype}; convert it before if that is meant"
        )
    return tensor


def read_env_ids(env_ids: Any, num_envs: int) -> np.ndarray:
    """Environment indices int64 (K,), from indices or from a mask bool (N,).

    Raises:
        BufferMisuseError: Neither indices from 0 to N - 1, none of them twice, nor such a mask.
    """
    ids = np.asarray(env_ids)
    if ids.dtype == np.bool_ and ids.shape == (num_envs,):
        return np.flatnonzero(ids)
    if ids.size == 0 and ids.ndim == 1:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise BufferMisuseError(
            f"env_ids has dtype {ids.dtype} and shape {ids.shape}, expected integers (K,) or a "
            f"mask bool ({num_envs},)"
        )
    if ids.min() < 0 or ids.max() >= num_envs or np.unique(ids).size != ids.size:
        raise BufferMisuseError(
            f"env_ids is {ids.tolist()}, expected different numbers from 0 to {num_envs - 1}"
        )
    return ids.astype(np.int64)
