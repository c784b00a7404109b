"""Generalised advantage estimation over arrays (time, envs): NumPy arrays or torch tensors."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch

from buffers.core.arguments import as_tensor
from buffers.core.errors import BufferMisuseError
from buffers.rollout.gae_arguments import (
    GaeInputs,
    check_discounts,
    check_gae_inputs,
    check_gae_out,
    plain,
)
from buffers.rollout.gae_kernels import fill_advantages

__all__ = ["fill_advantages_torch", "gae"]

Array = TypeVar("Array", np.ndarray, torch.Tensor)


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
        compiled: Use the compiled kernel. By default that is so for memory of the CPU; tensors of
            other devices are handled by torch operations, without waiting for the device.

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
    inputs = check_gae_inputs(GaeInputs(*map(plain, given)))
    rewards = inputs.rewards
    on_cpu = isinstance(rewards, np.ndarray) or rewards.device.type == "cpu"
    if compiled and not on_cpu:
        raise BufferMisuseError(
            f"compiled=True needs memory of the CPU, rewards is on {rewards.device}; leave it out"
        )
    results: Any = _empty_pair(rewards) if out is None else out
    if out is not None:
        results = tuple(map(plain, out)) if isinstance(out, tuple | list) else out
        check_gae_out(results, inputs)
    if on_cpu and compiled is not False:
        _run_compiled(inputs, results, gamma, gae_lambda)
    else:
        named = inputs._asdict().items()
        tensors = GaeInputs(*(None if a is None else as_tensor(name, a) for name, a in named))
        advantages, returns = map(_as_tensor, results)
        fill_advantages_torch(tensors, advantages, returns, gamma, gae_lambda)
    return results if out is None else out


def fill_advantages_torch(
    inputs: GaeInputs,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> None:
    """Fill advantages and returns, both (T, N), with torch operations on any device.

    The parts without recurrence take one operation each for the whole rollout; the recurrence takes
    one fused multiply-add per step. Nothing is read back, so the caller never waits for the device.
    The only memory allocated is (T, N) bytes for the negation of `valid`, if that is given.

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
    rows, factors = advantages.unbind(0), decays.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        torch.addcmul(rows[t], factors[t], rows[t + 1], out=rows[t])
    torch.add(advantages, values, out=returns)


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
