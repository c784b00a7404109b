"""Generalised advantage estimation over arrays (time, envs): NumPy arrays or torch tensors."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from buffers.core.arguments import as_tensor, read_flags, read_number
from buffers.core.errors import BufferMisuseError
from buffers.rollout.kernels import fill_advantages

__all__ = ["GaeInputs", "check_discounts", "estimate", "gae"]

Array = TypeVar("Array", np.ndarray, torch.Tensor)

_FLOATS = (torch.float32, torch.float64)
_OPTIONAL = ("final_values", "valid")


class GaeInputs(NamedTuple):
    """What advantages are computed from: tensors of one device, as `gae` says."""

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
    gamma, gae_lambda = check_discounts(gamma, gae_lambda)
    given = GaeInputs(rewards, values, terminations, truncations, final_values, valid)
    if not isinstance(rewards, np.ndarray | torch.Tensor):
        raise BufferMisuseError(
            f"rewards is {type(rewards).__name__}, expected a NumPy array or a torch tensor"
        )
    inputs = _read_inputs(given)
    is_numpy, on_cpu = isinstance(rewards, np.ndarray), inputs.rewards.device.type == "cpu"
    if compiled and not on_cpu:
        raise BufferMisuseError(
            f"compiled=True needs memory of the CPU, rewards is on {rewards.device}; leave it out"
        )
    if out is None:
        results = torch.empty_like(inputs.rewards, memory_format=torch.contiguous_format)
        pair = results, torch.empty_like(results)
    else:
        pair = _read_out(out, given, inputs)
    estimate(inputs, *pair, gamma, gae_lambda, is_compiled=on_cpu and compiled is not False)
    if out is not None:
        return out
    return tuple(part.numpy() for part in pair) if is_numpy else pair  # pyright: ignore


def estimate(
    inputs: GaeInputs,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    gamma: float,
    gae_lambda: float,
    *,
    is_compiled: bool,
) -> None:
    """Fill advantages and returns, contiguous (T, N), from inputs that fit.

    Args:
        inputs: Tensors that need no gradient.
        advantages: float (T, N), written; it shares no memory with the inputs.
        returns: The same.
        gamma: Discount.
        gae_lambda: Lambda.
        is_compiled: Use the compiled kernel, for memory of the CPU.
    """
    if not is_compiled:
        _estimate_there(inputs, advantages, returns, gamma, gae_lambda)
        return
    arrays = [
        None if tensor is None else tensor.contiguous().numpy().view(_viewed(tensor))
        for tensor in inputs
    ]
    scalar = advantages.numpy().dtype.type
    results = advantages.numpy(), returns.numpy()
    fill_advantages(*arrays, scalar(gamma), scalar(gamma * gae_lambda), *results)


def _viewed(tensor: torch.Tensor) -> Any:
    """The dtype that the kernel reads a tensor as."""
    return np.uint8 if tensor.dtype == torch.bool else tensor.numpy().dtype


def _estimate_there(
    inputs: GaeInputs,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> None:
    """As `estimate`, on the device where they are, without waiting.

    The parts without recurrence take an operation of torch each for the whole rollout; the
    recurrence takes three for each doubling of the steps that have been added up, 21 for 128 steps.
    Memory for two more arrays (T, N) is allocated, and (T, N) bytes for the negation of `valid`, if
    that is given; `returns` holds intermediate results meanwhile.
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


def check_discounts(gamma: float, gae_lambda: float) -> tuple[float, float]:
    """Both as floats; raise BufferMisuseError unless they are finite and within [0, 1]."""
    return read_number("gamma", gamma), read_number("gae_lambda", gae_lambda)


def _read_inputs(given: GaeInputs) -> GaeInputs:
    """The same as plain tensors, over the same memory if possible, with flags as bool.

    Raises:
        BufferMisuseError: They do not fit the rewards.
    """
    rewards: Any = given.rewards
    if rewards.ndim != 2 or 0 in rewards.shape:
        raise BufferMisuseError(
            f"rewards has shape {tuple(rewards.shape)}, expected (T, N) with at least one step and "
            "one env; for a single env use rewards[:, None]"
        )
    kind = np.ndarray if isinstance(rewards, np.ndarray) else torch.Tensor
    num_steps, num_envs = rewards.shape
    found = dict[str, Any]()
    for name, array in given._asdict().items():
        found[name] = None
        if array is None and name in _OPTIONAL:
            continue
        if not isinstance(array, kind):
            raise BufferMisuseError(
                f"{name} is {type(array).__name__}, expected {kind.__name__} like rewards; "
                "convert one of them"
            )
        tensor = as_tensor(name, array)
        if name == "rewards" and tensor.dtype not in _FLOATS:
            raise BufferMisuseError(f"rewards has dtype {array.dtype}, expected float32 or float64")
        is_float = name == "rewards" or name.endswith("values")
        if not is_float and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = read_flags(name, tensor)
        rows = num_steps + (name == "values")
        dtype = found["rewards"].dtype if name != "rewards" and is_float else tensor.dtype
        _check(name, array, tensor, (rows, num_envs), dtype if is_float else torch.bool)
        if name != "rewards" and tensor.device != found["rewards"].device:
            raise BufferMisuseError(
                f"{name} is on {tensor.device}, expected {rewards.device} like rewards; move one "
                "of them"
            )
        found[name] = tensor
    return GaeInputs(**found)


def _check(
    name: str, given: Any, tensor: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Raise BufferMisuseError unless what was given has this shape and dtype, and is dense."""
    if tuple(tensor.shape) != shape:
        hint = "; it has one row more than rewards: the values after the last step"
        raise BufferMisuseError(
            f"{name} has shape {tuple(tensor.shape)}, expected {shape}"
            f"{hint if name == 'values' else ''}"
        )
    if tensor.dtype != dtype or tensor.layout is not torch.strided:
        wanted = str(dtype).removeprefix("torch.")
        raise BufferMisuseError(
            f"{name} has dtype {given.dtype}, expected {wanted} in a dense array; convert it"
        )


def _read_out(out: Any, given: GaeInputs, inputs: GaeInputs) -> tuple[Any, Any]:
    """The pair as tensors over its memory; raise BufferMisuseError if it cannot be written into."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise BufferMisuseError(
            f"out is {type(out).__name__}, expected a pair (advantages, returns)"
        )
    rewards, pair = inputs.rewards, []
    others = dict(zip(GaeInputs._fields, inputs, strict=True))
    for name, array in zip(("advantages", "returns"), out, strict=True):
        is_numpy = isinstance(array, np.ndarray)
        if is_numpy is not isinstance(given.rewards, np.ndarray) or (
            not is_numpy and not isinstance(array, torch.Tensor)
        ):
            raise BufferMisuseError(
                f"out's {name} is {type(array).__name__}, expected the type of rewards"
            )
        if not (array.flags.carray if is_numpy else array.is_contiguous()):
            raise BufferMisuseError(
                f"out's {name} must be C-contiguous, aligned and writeable; pass a new array"
            )
        tensor = torch.from_numpy(array) if is_numpy else array.detach()
        _check(f"out's {name}", array, tensor, tuple(rewards.shape), rewards.dtype)
        for other, read in others.items():
            if read is not None and _overlap(tensor, read):
                raise BufferMisuseError(
                    f"out shares memory with {other}; the inputs are read while out is written, "
                    "so pass separate arrays"
                )
        others["itself"] = tensor
        pair.append(tensor)
    return pair[0], pair[1]


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""
    (left_low, left_high), (right_low, right_high) = _address_range(left), _address_range(right)
    return left_low < right_high and right_low < left_high


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()
