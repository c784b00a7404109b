"""Checks of what users hand to a rollout buffer; each returns it in the form to be stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from buffers.core.arguments import as_tensor, holds_values, read_array
from buffers.core.errors import BufferMisuseError
from buffers.core.spaces import tree_leaves
from buffers.rollout.layout import RolloutLayout

__all__ = ["read_field", "read_observations"]


def read_observations(obs: Any, layout: RolloutLayout) -> list[np.ndarray]:
    """The leaves of one step's observations as arrays (N, *obs_shape), in the order of the space.

    Raises:
        BufferMisuseError: Structure, shape or dtype does not fit the observation space.
    """
    arrays = []
    leaves = tree_leaves(layout.observation_space, obs, "obs")
    for leaf, found in zip(layout.obs_leaves, leaves, strict=True):
        expected = (layout.num_envs, *leaf.shape)
        arrays.append(read_array(leaf.path, found, expected, leaf.dtype))
    return arrays


def read_field(name: str, given: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A plain tensor of exactly this shape and of a dtype that can be cast to the given one.

    Raises:
        BufferMisuseError: Something else was given.
    """
    tensor = as_tensor(name, given)
    if tuple(tensor.shape) != tuple(shape):
        raise BufferMisuseError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    fits = tensor.dtype is dtype or torch.can_cast(tensor.dtype, dtype)
    if fits and tensor.dtype is not dtype and not dtype.is_floating_point:
        own = torch.empty(0, dtype=dtype).numpy().dtype
        fits = holds_values(own, tensor.cpu().numpy())  # integers: none may change
    if not fits:
        raise BufferMisuseError(
            f"{name} has dtype {tensor.dtype}, expected {dtype}; convert it before if that is meant"
        )
    return tensor
