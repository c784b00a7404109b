"""Generalised advantage estimation over arrays (time, envs): NumPy arrays or torch tensors."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from buffers.core.arguments import as_tensor, read_flags, read_number
from buffers.core.errors import BufferMisuseError
from buffers.rollout.kernels import fill_advantages

__all__ = ["GaeInputs", "check_discounts", "fill_advantages_there", "gae"]

Array = TypeVar("Array", np.ndarray, torch.Tensor)

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


def gae(
    rewards: Array,
    values: Array,
    terminations: Array,
    truncations: Array,
    *,
    final_values: Array | None = None,
    valid: Array | None = None,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
    out: tuple[Array, Array] | None = None,
    compiled: bool | None = None,
) -> tuple[Array, Array]:
    """Compute the advantages of generalised advantage estimation, and the returns.

    With ``over = terminated or truncated``, backwards in time::

        next_value = final_values[t] if truncated[t] and final_values is given else values[t + 1]
        delta      = rewards[t] + gamma * next_value * (not terminated[t]) - values[t]
        advantage  = delta + gamma * gae_lambda * (not over[t]) * advantage of t + 1
        return     = advantage + values[t]

    A row with ``valid`` False gets advantage 0, and nothing in it reaches another row.

    ``final_values`` is the value of the observation the truncated episode really ended with. Leave
    it out only if ``values[t + 1]`` is that value already, as under autoreset NEXT_STEP, where the
    row after the end holds the final observation (and is itself not valid).

    Args:
        rewards: float32 or float64 (T, N). Time first.
        values: Same dtype (T + 1, N); the last row belongs to the observation after the last step.
        terminations: bool (T, N), or integers 0 and 1, like all flags; the episode ended, its
            successor is worth nothing.
        truncations: bool (T, N); the episode was cut off, its successor is worth something.
        final_values: Same dtype (T, N), read only where truncated; elsewhere anything, NaN too.
        valid: bool (T, N).
        gamma: Discount, 0 to 1.
        gae_lambda: Lambda, 0 to 1.
        out: Pair (advantages, returns), same dtype (T, N), C-contiguous, filled and returned. It
            must not overlap the inputs. Without it two new arrays are allocated.
        compiled: Use the compiled kernel. By default that is so for memory of the CPU. False uses
            torch operations, as on devices, which they do not wait for.

    Returns:
        advantages and returns (T, N), of the type, dtype and device of rewards. Inputs that are
        C-contiguous and writeable are read where they lie, others are copied first. Gradients do
        not flow through.

    Raises:
        BufferMisuseError: An array of wrong type, shape, dtype or device, or gamma or gae_lambda
            outside [0, 1]. Nothing was written.

    >>> rewards = np.ones((3, 1), np.float32)
    >>> values = np.array([[0.5], [0.5], [0.5], [8.0]], np.float32)
    >>> no, last = np.zeros((3, 1), bool), np.array([[False], [False], [True]])
    >>> gae(rewards, values, last, no, gamma=1.0, gae_lambda=1.0)[1].ravel().tolist()
    [3.0, 2.0, 1.0]
    >>> gae(rewards, values, no, last, gamma=1.0, gae_lambda=1.0)[1].ravel().tolist()
    [11.0, 10.0, 9.0]
    """
    given = rewards, values, terminations, truncations, final_values, valid
    gamma, gae_lambda = check_discounts(gamma, gae_lambda)
    inputs = _check_inputs(GaeInputs(*map(_plain, given)))
    rewards = inputs.rewards
    on_cpu = isinstance(rewards, np.ndarray) or rewards.device.type == "cpu"
    if compiled and not on_cpu:
        raise BufferMisuseError(
            f"compiled=True needs memory of the CPU, rewards is on {rewards.device}; leave it out"
        )
    results: Any = _empty_pair(rewards) if out is None else out
    if out is not None:
        results = tuple(map(_plain, out)) if isinstance(out, tuple | list) else out
        _check_out(results, inputs)
    if on_cpu and compiled is not False:
        _run_compiled(inputs, results, gamma, gae_lambda)
    else:
        named = inputs._asdict().items()
        tensors = GaeInputs(*(None if a is None else as_tensor(name, a) for name, a in named))
        advantages, returns = map(_as_tensor, results)
        fill_advantages_there(tensors, advantages, returns, gamma, gae_lambda)
    return results if out is None else out


def fill_advantages_there(
    inputs: GaeInputs,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> None:
    """Fill advantages and returns, both (T, N), on the device where they are, without waiting.

    The parts without recurrence take an operation of torch each for the whole rollout; the
    recurrence takes three for each doubling of the steps that have been added up, 21 for 128 steps.
    Memory for two more arrays (T, N) is allocated, and (T, N) bytes for the negation of `valid`, if
    that is given.

    Args:
        inputs: Tensors that need no gradient.
        advantages: float (T, N), written.
        returns: float (T, N), written; holds intermediate results meanwhile.
        gamma: Discount.
        gae_lambda: Lambda.
    """
    values, next_values = inputs.values[:-1], inputs.values[1:]
    if inputs.final_values is None:
        torch.mul(next_values, gamma, out=returns)
    else:
        torch.where(inputs.truncations, inputs.final_values, next_values, out=returns)
        returns.mul_(gamma)
    returns.masked_fill_(inputs.terminations, 0.0)
    torch.add(inputs.rewards, returns, out=advantages)
    advantages.sub_(values)
    decays = returns.fill_(gamma * gae_lambda)
    decays.masked_fill_(inputs.terminations, 0.0).masked_fill_(inputs.truncations, 0.0)
    if inputs.valid is not None:
        invalid = torch.logical_not(inputs.valid)
        advantages.masked_fill_(invalid, 0.0)
        decays.masked_fill_(invalid, 0.0)
    advantages.copy_(_discounted_sums(advantages, decays))
    torch.add(advantages, values, out=returns)


def _discounted_sums(terms: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """What solves sums[t] = terms[t] + factors[t] * sums[t + 1], (T, N); both are changed.

    After a round each row is the sum of `span` terms, and its factor the product of as many.
    """
    num_steps, span = len(terms), 1
    other_terms, other_factors = torch.empty_like(terms), torch.empty_like(factors)
    while span < num_steps:
        torch.addcmul(terms[:-span], factors[:-span], terms[span:], out=other_terms[:-span])
        other_terms[-span:] = terms[-span:]
        left = num_steps - 2 * span  # rows that are not summed up yet after this
        if left > 0:
            torch.mul(factors[:left], factors[span : span + left], out=other_factors[:left])
        terms, other_terms, factors, other_factors = other_terms, terms, other_factors, factors
        span *= 2
    return terms


def _run_compiled(inputs: GaeInputs, results: Any, gamma: float, gae_lambda: float) -> None:
    rewards, values, terminations, truncations, final_values, valid = map(_as_contiguous, inputs)
    assert rewards is not None
    assert terminations is not None
    assert truncations is not None
    scalar = rewards.dtype.type
    fill_advantages(
        rewards,
        values,
        terminations.view(np.uint8),
        truncations.view(np.uint8),
        final_values,
        None if valid is None else valid.view(np.uint8),
        scalar(gamma),
        scalar(gamma * gae_lambda),
        _as_array(results[0]),
        _as_array(results[1]),
    )


def _empty_pair(like: Any) -> tuple[Any, Any]:
    if isinstance(like, np.ndarray):
        return np.empty(like.shape, like.dtype), np.empty(like.shape, like.dtype)
    return like.new_empty(like.shape), like.new_empty(like.shape)


def _as_array(array: np.ndarray | torch.Tensor) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.detach().numpy()


def _as_contiguous(array: np.ndarray | torch.Tensor | None) -> np.ndarray | None:
    """The array itself or a copy; read-only arrays too would be another type to compile for."""
    if array is None:
        return None
    array = _as_array(array)
    return array if array.flags.carray else np.require(array, requirements=["C", "W"])


def _as_tensor(array: np.ndarray | torch.Tensor) -> torch.Tensor:
    return array.detach() if isinstance(array, torch.Tensor) else torch.from_numpy(array)


def check_discounts(gamma: float, gae_lambda: float) -> tuple[float, float]:
    """Both as floats; raise BufferMisuseError unless they are finite and within [0, 1]."""
    return read_number("gamma", gamma), read_number("gae_lambda", gae_lambda)


def _plain(array: Any) -> Any:
    """The same memory without a class of its own, whose attributes may say what is not so."""
    if array is None or type(array) is np.ndarray:
        return array
    if isinstance(array, np.ndarray) and type(array) is not np.ndarray:
        return np.asarray(array)
    if isinstance(array, torch.Tensor) and type(array) is not torch.Tensor:
        return array.as_subclass(torch.Tensor)
    return array


def _check_inputs(inputs: GaeInputs) -> GaeInputs:
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


def _check_out(out: Any, inputs: GaeInputs) -> None:
    """Raise BufferMisuseError unless out is a pair that results can be written into."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise BufferMisuseError(
            f"out is {type(out).__name__}, expected a pair (advantages, returns)"
        )
    rewards = inputs.rewards
    for name, array in zip(("out's advantages", "out's returns"), out, strict=True):
        _check_array(name, array, rewards, _numpy_dtype(rewards), tuple(rewards.shape))
        is_numpy = isinstance(array, np.ndarray)
        if not (array.flags.carray if is_numpy else array.is_contiguous()):
            raise BufferMisuseError(
                f"{name} must be C-contiguous, aligned and writeable; pass a new array"
            )
    others = [*zip(GaeInputs._fields, inputs, strict=True), ("itself", out[1])]
    for number, result in enumerate(out):
        for name, array in others[: len(others) - number]:
            if array is not None and _overlap(result, array):
                raise BufferMisuseError(
                    f"out shares memory with {name}; the inputs are read while out is written, "
                    "so pass separate arrays"
                )


def _overlap(left: Any, right: Any) -> bool:
    """Whether the address ranges of two arrays meet."""
    if isinstance(left, np.ndarray):
        if left.flags.owndata and right.flags.owndata:  # memory of their own; asked for speed
            return left is right
        return np.may_share_memory(left, right)
    (left_low, left_high), (right_low, right_high) = _address_range(left), _address_range(right)
    return left_low < right_high and right_low < left_high


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()
