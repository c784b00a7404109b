"""The one reader of what users hand to a buffer: every buffer gives the same answer to the same.

Each function returns its argument in the form to be stored, or raises BufferMisuseError.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch
from gymnasium import Space

from buffers.core.errors import BufferMisuseError
from buffers.core.spaces import Leaf, space_leaves

__all__ = [
    "MAX_COUNT",
    "as_array",
    "as_tensor",
    "check_count",
    "check_names",
    "check_place",
    "check_rewards",
    "count_rows",
    "extra_leaves",
    "holds_values",
    "read_array",
    "read_distinct_ids",
    "read_flags",
    "read_number",
    "resolve_device",
]

MAX_COUNT = 2**31 - 1  # of rows that are drawn at once, and of whatever is counted in 32 bits

_BOOL = np.dtype(np.bool_)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def resolve_device(device: torch.device | str) -> torch.device:
    """The device as tensors name it: "cuda" becomes the current one, say cuda:0.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise BufferMisuseError(f"device is {device!r}, expected one of torch: {error}") from None
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
    unknown = sorted(set(given) - required - optional, key=str)
    missing = sorted(required - set(given))
    if unknown or missing:
        problem = f"unknown: {unknown}" if unknown else f"missing: {missing}"
        raise BufferMisuseError(
            f"columns are {sorted(given, key=str)}, expected {sorted(required)} and possibly "
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
    try:
        if not isinstance(given, torch.Tensor):
            return np.asarray(given)
        if not given.is_cpu:
            check_place(name, given, device)
            given = given.cpu()
        tensor = given.detach()
        array = tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
    except BufferMisuseError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BufferMisuseError(
            f"{name} must be an array or a tensor, got {type(given).__name__}: {error}"
        ) from None
    return array


def as_tensor(name: str, given: Any) -> torch.Tensor:
    """A plain tensor, of whatever shape and dtype, where it lies; without gradients.

    Raises:
        BufferMisuseError: It is none and no array that can be made one.
    """
    if isinstance(given, torch.Tensor):
        tensor = given.detach()
        return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)
    array = as_array(name, given)
    # What torch does not take, or not in silence: other byte orders, steps back, read-only memory.
    if not (array.dtype.isnative and array.flags.writeable and array.flags.aligned) or any(
        stride < 0 for stride in array.strides
    ):
        array = np.array(array, array.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BufferMisuseError(
            f"{name} must be a tensor or an array, got {type(given).__name__}: {error}"
        ) from None


def check_count(name: str, number: Any, most: int | None = None) -> int:
    """The number as an int; raise BufferMisuseError unless it is a positive integer up to most."""
    try:
        count = operator.index(number)
    except TypeError:
        raise BufferMisuseError(f"{name} must be a positive integer, got {number!r}") from None
    if count < 1:
        raise BufferMisuseError(f"{name} must be a positive integer, got {number!r}")
    if most is not None and count > most:
        raise BufferMisuseError(f"{name} is {count}, expected at most {most}")
    return count


def read_number(name: str, number: Any, most: float = 1.0) -> float:
    """The number as a float; raise BufferMisuseError unless it is finite and from 0 to most."""
    if type(number) is float and 0.0 <= number <= most and number < math.inf:
        return number
    value = math.nan
    if not isinstance(number, str | bytes | bytearray) and getattr(number, "ndim", 0) == 0:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            value = float(number)
    if not (math.isfinite(value) and 0.0 <= value <= most):
        end = "finite number of 0 or more" if most == math.inf else f"number from 0 to {most:g}"
        raise BufferMisuseError(f"{name} is {number!r}, expected a {end}")
    return value


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
    if not holds_values(dtype, array):
        raise BufferMisuseError(
            f"{name} has dtype {array.dtype}, expected {dtype}, which cannot hold its values; "
            "convert it before if that is meant"
        )
    return array


def holds_values(dtype: np.dtype, array: np.ndarray) -> bool:
    """Whether a dtype can hold the values of an array: floats rounded, integers as they are."""
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        if array.dtype.kind not in "iu" or dtype.kind not in "iu":
            return False
        return bool((array >= 0).all() and (array.astype(dtype) == array).all())
    if dtype.kind in "iu" and not np.can_cast(array.dtype, dtype, "safe"):
        return bool((array.astype(dtype) == array).all())
    return True


def read_flags(name: str, given: Any) -> Any:
    """Bools of a tensor or array of any shape that has bools, or integers 0 and 1; where it lies.

    Raises:
        BufferMisuseError: It has other integers.
    """
    if isinstance(given, torch.Tensor):
        # Torch does not compare all unsigned integers with bools.
        given = given.to(torch.int64) if given.dtype in _UNSIGNED else given
        flags: Any = given.bool()
    else:
        flags = given.astype(np.bool_, copy=False)
    if flags is not given and not (flags == given).all():
        wrong = given[flags != given].reshape(-1)[0]
        raise BufferMisuseError(f"{name} has {int(wrong)}, expected bool, or integers 0 and 1")
    return flags


def count_rows(rewards: Any) -> int:
    """Length of `rewards`, which tells that of the other columns.

    Raises:
        BufferMisuseError: They are no single axis.
    """
    try:
        shape = tuple(rewards.shape) if isinstance(rewards, torch.Tensor) else np.shape(rewards)
    except ValueError as error:
        raise BufferMisuseError(f"rewards must be an array or a tensor: {error}") from None
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
        return np.flatnonzero(ids.copy())  # which counts, and then lists: nobody else's, as below
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise BufferMisuseError(
            f"env_ids has dtype {ids.dtype} and shape {ids.shape}, expected integers (K,) or a "
            f"mask bool ({num_envs},)"
        )
    ids = np.array(ids, np.int64)  # another thread may change those that were given
    if ids.size and (ids.min() < 0 or ids.max() >= num_envs or _has_twice(ids, num_envs)):
        raise BufferMisuseError(
            f"env_ids is {ids.tolist()}, expected different numbers from 0 to {num_envs - 1}"
        )
    return ids


def _has_twice(ids: np.ndarray, bound: int) -> bool:
    """Whether a number from 0 to below bound is there more than once."""
    if bound > 1 << 20:  # memory for all would be too much
        return np.unique(ids).size < ids.size
    return bool(np.bincount(ids).max() > 1)


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
