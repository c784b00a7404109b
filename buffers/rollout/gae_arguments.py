"""Checks of what users hand to `gae`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from buffers.core.arguments import read_flags, read_number
from buffers.core.errors import BufferMisuseError

__all__ = ["GaeInputs", "check_discounts", "check_gae_inputs", "check_gae_out", "plain"]

_BOOL = np.dtype(np.bool_)
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_OTHER = np.dtype(np.void)  # not None, which NumPy takes for float64 in comparisons of dtypes
_NUMPY_DTYPES = {torch.float32: _FLOATS[0], torch.float64: _FLOATS[1], torch.bool: _BOOL}


class GaeInputs(NamedTuple):
    """What advantages are computed from: all NumPy arrays, or all tensors of one device.

    rewards, values (one row more) and final_values are float32 or float64; terminations,
    truncations and valid are bool (for the compiled kernel: uint8 views). final_values and valid
    may be None.
    """

    rewards: Any
    values: Any
    terminations: Any
    truncations: Any
    final_values: Any
    valid: Any


def check_discounts(gamma: float, gae_lambda: float) -> tuple[float, float]:
    """Both as floats; raise BufferMisuseError unless they are finite and within [0, 1]."""
    return read_number("gamma", gamma), read_number("gae_lambda", gae_lambda)


def plain(array: Any) -> Any:
    """The same memory without a class of its own, whose attributes may say what is not so."""
    if array is None or type(array) is np.ndarray:
        return array
    if isinstance(array, np.ndarray) and type(array) is not np.ndarray:
        return np.asarray(array)
    if isinstance(array, torch.Tensor) and type(array) is not torch.Tensor:
        return array.as_subclass(torch.Tensor)
    return array


def check_gae_inputs(inputs: GaeInputs) -> GaeInputs:
    """The same with flags as bool; raise BufferMisuseError unless all agree with rewards."""
    rewards = inputs.rewards
    if not isinstance(rewards, (np.ndarray, torch.Tensor)):
        raise BufferMisuseError(
            f"rewards is {type(rewards).__name__}, expected a NumPy array or a torch tensor"
        )
    if rewards.ndim != 2 or 0 in rewards.shape:
        raise BufferMisuseError(
            f"rewards has shape {tuple(rewards.shape)}, expected (T, N) with at least one step and "
            "one env; for a single env use rewards[:, None]"
        )
    dtype = _numpy_dtype(rewards)
    if dtype not in _FLOATS:
        raise BufferMisuseError(f"rewards has dtype {rewards.dtype}, expected float32 or float64")
    num_steps, num_envs = rewards.shape
    if not isinstance(rewards, np.ndarray):
        _check_array("rewards", rewards, rewards, dtype, (num_steps, num_envs))
    for name in ("values", "terminations", "truncations", "final_values", "valid"):
        array = getattr(inputs, name)
        if array is None and name in ("final_values", "valid"):
            continue
        wanted = dtype if name.endswith("values") else _BOOL
        shape = (num_steps + 1, num_envs) if name == "values" else (num_steps, num_envs)
        if wanted is _BOOL and _is_integer(array):
            array = read_flags(name, array)
            inputs = inputs._replace(**{name: array})
        _check_array(name, array, rewards, wanted, shape)
    return inputs


def _is_integer(array: Any) -> bool:
    if isinstance(array, np.ndarray):  # asked first: whether it is a tensor is asked in Python
        return array.dtype.kind in "iu"
    is_tensor = isinstance(array, torch.Tensor)
    return is_tensor and not (
        array.is_floating_point() or array.is_complex() or array.dtype is torch.bool
    )


def _numpy_dtype(array: np.ndarray | torch.Tensor) -> np.dtype:
    return array.dtype if isinstance(array, np.ndarray) else _NUMPY_DTYPES.get(array.dtype, _OTHER)


def _check_array(
    name: str, array: Any, rewards: Any, dtype: np.dtype, shape: tuple[int, int]
) -> None:
    kind = np.ndarray if isinstance(rewards, np.ndarray) else torch.Tensor
    if not isinstance(array, kind):
        raise BufferMisuseError(
            f"{name} is {type(array).__name__}, expected {kind.__name__} like rewards; "
            "convert one of them"
        )
    if array.shape != shape:
        hint = "; it has one row more than rewards: the values after the last step"
        raise BufferMisuseError(
            f"{name} has shape {tuple(array.shape)}, expected {shape}"
            f"{hint if name == 'values' else ''}"
        )
    if _numpy_dtype(array) != dtype:
        raise BufferMisuseError(f"{name} has dtype {array.dtype}, expected {dtype}; convert it")
    if isinstance(array, np.ndarray):
        return
    if array.layout is not torch.strided:
        raise BufferMisuseError(f"{name} has the layout {array.layout}, expected a dense tensor")
    if array.device != rewards.device:
        raise BufferMisuseError(
            f"{name} is on {array.device}, expected {rewards.device} like rewards; move one of them"
        )


def check_gae_out(out: Any, inputs: GaeInputs) -> None:
    """Raise BufferMisuseError unless out is a pair that results can be written into."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise BufferMisuseError(
            f"out is {type(out).__name__}, expected a pair (advantages, returns)"
        )
    rewards = inputs.rewards
    for name, array in zip(("out's advantages", "out's returns"), out, strict=True):
        _check_array(name, array, rewards, _numpy_dtype(rewards), tuple(rewards.shape))
        is_tensor = isinstance(array, torch.Tensor)
        fits = array.is_contiguous() if is_tensor else array.flags.carray
        if not fits:
            raise BufferMisuseError(
                f"{name} must be C-contiguous, aligned and writeable; pass a new array"
            )
    named = [(name, array) for name, array in inputs._asdict().items() if array is not None]
    pairs = [(result, name, array) for result in out for name, array in named]
    for result, name, array in [*pairs, (out[0], "itself", out[1])]:
        if _overlap(result, array):
            raise BufferMisuseError(
                f"out shares memory with {name}; the inputs are read while out is written, "
                "so pass separate arrays"
            )


def _overlap(left: Any, right: Any) -> bool:
    """Whether the address ranges of two arrays meet."""
    if isinstance(left, np.ndarray):
        return np.may_share_memory(left, right)
    (left_low, left_high), (right_low, right_high) = _address_range(left), _address_range(right)
    return left_low < right_high and right_low < left_high


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()
