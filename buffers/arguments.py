"""The one reader of what users hand to a buffer: every buffer gives the same answer to the same.

Each function returns its argument in the form to be stored, or raises BufferMisuseError.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch
from gymnasium import Space

from buffers.errors import BufferMisuseError
from buffers.space_tree import Leaf, space_leaves

__all__ = [
    "as_array",
    "check_names",
    "check_place",
    "check_rewards",
    "count_rows",
    "extra_leaves",
    "read_array",
    "read_distinct_ids",
    "read_flags",
    "resolve_device",
]

_BOOL = np.dtype(np.bool_)


def resolve_device(device: torch.device | str) -> torch.device:
    """The device as tensors name it: "cuda" becomes the current one, say cuda:0.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    asked = torch.device(device)
    if asked.type == "cpu":
        return torch.device("cpu")
    return asked if asked.index is not None else torch.empty(0, device=asked).device


def check_place(name: str, tensor: torch.Tensor, device: torch.device | None) -> None:
    """Raise BufferMisuseError unless a tensor lies on the CPU or on a resolved device."""
    if tensor.device.type != "cpu" and tensor.device != device:
        where = "the CPU" if device is None or device.type == "cpu" else f"the CPU or {device}"
        raise BufferMisuseError(f"{name} lies on {tensor.device}, expected {where}; move it")


def check_names(given: Mapping[str, Any], required: Set[str], optional: Set[str]) -> None:
    """Raise BufferMisuseError for columns that are unknown or missing."""
    unknown = sorted(set(given) - required - optional)
    missing = sorted(required - set(given))
    if unknown or missing:
        problem = f"unknown: {unknown}" if unknown else f"missing: {missing}"
        raise BufferMisuseError(
            f"columns are {sorted(given)}, expected {sorted(required)} and possibly "
            f"{sorted(optional)}; {problem}"
        )


def as_array(name: str, given: Any, device: torch.device | None = None) -> np.ndarray:
    """An array on the host, of whatever shape and dtype; bfloat16, which NumPy lacks, as float32.

    Args:
        name: Of the argument, for messages.
        given: Array, tensor or nested list.
        device: Where tensors may lie besides the CPU.

    Raises:
        BufferMisuseError: It is no array, or lies elsewhere.
    """
    if type(given) is np.ndarray:
        return given
    if isinstance(given, torch.Tensor):
        if not given.is_cpu:
            check_place(name, given, device)
            given = given.cpu()
        tensor = given.detach()
        return tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:
        raise BufferMisuseError(
            f"{name} must be an array or a tensor, got {type(given).__name__}: {error}"
        ) from None


def read_array(
    name: str,
    given: Any,
    shape: tuple[int, ...],
    dtype: np.dtype,
    device: torch.device | None = None,
) -> np.ndarray:
    """An array of exactly this shape whose values the dtype can hold.

    Args:
        name: Of the field, for messages.
        given: Array, tensor or nested list.
        shape: Expected.
        dtype: Of the storage. Floats may lose precision, integers no value; flags may be integers
            0 and 1, and come back as bool.
        device: Where tensors may lie besides the CPU.

    Raises:
        BufferMisuseError: Something else was given.
    """
    array = as_array(name, given, device)
    if array.shape != shape:
        raise BufferMisuseError(f"{name} has shape {array.shape}, expected {shape}")
    if dtype == _BOOL and array.dtype.kind in "iu":
        return read_flags(name, array)
    fits = np.can_cast(array.dtype, dtype, "same_kind")
    if fits and dtype.kind in "iu" and not np.can_cast(array.dtype, dtype, "safe"):
        fits = bool((array.astype(dtype) == array).all())
    elif not fits and array.dtype.kind in "iu" and dtype.kind in "iu":
        fits = bool((array >= 0).all() and (array.astype(dtype) == array).all())
    if not fits:
        raise BufferMisuseError(
            f"{name} has dtype {array.dtype}, expected {dtype}, which cannot hold its values; "
            "convert it before if that is meant"
        )
    return array


def read_flags(name: str, given: Any) -> Any:
    """Bools of a tensor or array of any shape that has bools, or integers 0 and 1; where it lies.

    Raises:
        BufferMisuseError: It has other integers.
    """
    is_tensor = isinstance(given, torch.Tensor)
    flags = given.bool() if is_tensor else given.astype(np.bool_, copy=False)
    if flags is not given and not (flags == given).all():
        wrong = given[flags != given].reshape(-1)[0]
        raise BufferMisuseError(f"{name} has {int(wrong)}, expected bool, or integers 0 and 1")
    return flags


def count_rows(rewards: Any) -> int:
    """Length of `rewards`, which tells that of the other columns.

    Raises:
        BufferMisuseError: They are no single axis.
    """
    shape = tuple(rewards.shape) if isinstance(rewards, torch.Tensor) else np.shape(rewards)
    if len(shape) != 1:
        raise BufferMisuseError(
            f"rewards has shape {shape}, expected (K,): one number per transition"
        )
    return shape[0]


def check_rewards(rewards: np.ndarray, what: str = "") -> None:
    """Raise BufferMisuseError unless all of float (K,) are finite as float32, as they are stored.

    Args:
        rewards: See above.
        what: Begins the message.
    """
    stored = rewards
    if rewards.dtype != np.float32:
        with np.errstate(over="ignore"):
            stored = rewards.astype(np.float32)
    if not np.isfinite(stored).all():
        wrong = np.flatnonzero(~np.isfinite(stored))
        raise BufferMisuseError(
            f"{what}rewards[{wrong[0]}] is {stored[wrong[0]]} as float32, expected finite numbers; "
            "find the step that makes it"
        )


def read_distinct_ids(
    env_ids: Any, num_envs: int, device: torch.device | None = None
) -> np.ndarray:
    """Environment ids int64 (B,), from different numbers 0 to N - 1 or a mask bool (N,).

    A tensor may lie on `device`.

    Raises:
        BufferMisuseError: Something else was given.
    """
    ids = as_array("env_ids", env_ids, device)
    if ids.dtype == _BOOL and ids.shape == (num_envs,):
        return np.flatnonzero(ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise BufferMisuseError(
            f"env_ids has dtype {ids.dtype} and shape {ids.shape}, expected integers (K,) or a "
            f"mask bool ({num_envs},)"
        )
    if ids.size and (ids.min() < 0 or ids.max() >= num_envs or _has_twice(ids, num_envs)):
        raise BufferMisuseError(
            f"env_ids is {ids.tolist()}, expected different numbers from 0 to {num_envs - 1}"
        )
    return ids.astype(np.int64, copy=False)


def _has_twice(ids: np.ndarray, bound: int) -> bool:
    """Whether a number from 0 to below bound is there more than once."""
    if bound > 1 << 20:  # memory for all would be too much
        return np.unique(ids).size < ids.size
    return bool(np.bincount(ids.astype(np.int64)).max() > 1)


def extra_leaves(extra_columns: Mapping[str, Space] | None, taken: Set[str]) -> list[Leaf]:
    """The extra columns of a buffer, each a single array under its name.

    Args:
        extra_columns: Names and spaces, from the user; None for none.
        taken: Names that the buffer, its methods or its batches use themselves.

    Raises:
        BufferMisuseError: A name is taken or no identifier, or a space is no single array.
    """
    leaves = []
    for name, space in (extra_columns or {}).items():
        if not isinstance(name, str) or name in taken or not name.isidentifier():
            raise BufferMisuseError(
                f"extra column {name!r} has a name that is taken or is no identifier; choose one "
                f"other than {sorted(taken)}"
            )
        found = space_leaves(space, name)
        if len(found) != 1 or found[0].path != name:
            raise BufferMisuseError(
                f"extra column {name!r} has the space {space}, expected Box, Discrete, "
                "MultiDiscrete or MultiBinary; give one column for each array"
            )
        leaves += found
    return leaves
