"""Generalised advantage estimation over arrays (time, envs): NumPy arrays or torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from buffers.core.arguments import as_tensor, read_flags, read_number
from buffers.core.errors import BufferMisuseError
from buffers.core.kernels import njit

__all__ = ["discounted_sums", "estimate", "fill_advantages", "gae", "sum_episodes"]

Array = TypeVar("Array", np.ndarray, torch.Tensor)
_FLOATS = (torch.float32, torch.float64)


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
) -> tuple[Array, Array]:
    """Compute advantages by generalised advantage estimation, and returns.

    With ``over = terminated or truncated``, backwards in time::

        next_value = final_values[t] if truncated[t] and final_values is given else values[t + 1]
        delta      = rewards[t] + gamma * next_value * (not terminated[t]) - values[t]
        advantage  = delta + gamma * gae_lambda * (not over[t]) * advantage of t + 1
        return     = advantage + values[t]

    A row with ``valid`` False gets advantage 0 and does not influence other rows.
    ``final_values`` are the values of the true final observations of truncated episodes. Leave them
    out only if ``values[t + 1]`` already has them, as under autoreset NEXT_STEP.

    Args:
        rewards: float32 or float64 (T, N). Time first.
        values: Same dtype (T + 1, N); the last row belongs to the observation after the last step.
        terminations: bool (T, N), or integers 0 and 1, like all flags; the episode ended, so the
            next state has value 0.
        truncations: bool (T, N); the episode was cut off, so the next state has a value.
        final_values: Same dtype (T, N), read only where truncated; other elements may be NaN.
        valid: bool (T, N).
        gamma: Discount, 0 to 1.
        gae_lambda: Lambda, 0 to 1.

    Returns:
        advantages and returns (T, N), new, of the type, dtype and device of rewards. The call does
        not wait for the device. Gradients do not flow through.

    Raises:
        BufferMisuseError: An array of wrong type, shape, dtype or device, or gamma or gae_lambda
            outside [0, 1].

    >>> rewards = np.ones((3, 1), np.float32)
    >>> values = np.array([[0.5], [0.5], [0.5], [8.0]], np.float32)
    >>> no, last = np.zeros((3, 1), bool), np.array([[False], [False], [True]])
    >>> gae(rewards, values, last, no, gamma=1.0, gae_lambda=1.0)[1].ravel().tolist()
    [3.0, 2.0, 1.0]
    >>> gae(rewards, values, no, last, gamma=1.0, gae_lambda=1.0)[1].ravel().tolist()
    [11.0, 10.0, 9.0]
    """
    gamma, gae_lambda = read_number("gamma", gamma), read_number("gae_lambda", gae_lambda)
    like = as_tensor("rewards", rewards) if isinstance(rewards, np.ndarray | Tensor) else None
    if like is None or like.dtype not in _FLOATS or like.ndim != 2 or 0 in like.shape:
        raise BufferMisuseError(
            f"rewards is {_described(rewards)}, expected an array or tensor, float32 or float64 "
            "(T, N), of at least one step and one env; for a single env use rewards[:, None]"
        )
    shape, later = (like.shape[0], like.shape[1]), (len(like) + 1, like.shape[1])
    inputs: list[Tensor | None] = [
        _read("rewards", rewards, rewards, shape, like.dtype),
        _read("values", values, rewards, later, like.dtype),
        _read("terminations", terminations, rewards, shape, torch.bool),
        _read("truncations", truncations, rewards, shape, torch.bool),
        None if final_values is None
        else _read("final_values", final_values, rewards, shape, like.dtype),
        None if valid is None else _read("valid", valid, rewards, shape, torch.bool),
    ]  # fmt: skip
    found: Any = like.new_empty((2, *shape)).unbind()  # one block, which malloc reuses
    estimate(inputs, found[0], found[1], gamma, gae_lambda, is_compiled=like.is_cpu)
    return tuple(part.numpy() for part in found) if isinstance(rewards, np.ndarray) else found


def estimate(
    inputs: Sequence[Tensor | None],
    advantages: Tensor,
    returns: Tensor,
    gamma: float,
    gae_lambda: float,
    *,
    is_compiled: bool,
) -> None:
    """Fill advantages and returns, contiguous (T, N), from inputs that share no memory with them.

    Inputs are in the order of `gae`, flags bool. `is_compiled` uses the kernel, on the CPU only;
    else operations of torch run where the tensors are, without waiting: three operations per
    doubling of the summed steps, 21 for 128 steps.
    """
    if is_compiled:
        arrays = [None if tensor is None else tensor.contiguous().numpy() for tensor in inputs]
        arrays = [a.view(np.uint8) if a is not None and a.dtype == bool else a for a in arrays]
        results = advantages.numpy(), returns.numpy()
        scalar = results[0].dtype.type
        fill_advantages(*arrays, scalar(gamma), scalar(gamma * gae_lambda), *results)
        return
    given: Any = inputs
    rewards, values, terminations, truncations, final_values, valid = given
    following, over = values[1:], terminations | truncations
    if final_values is not None:
        following = torch.where(truncations, final_values, following)
    terms = rewards + (following * gamma).masked_fill_(terminations, 0.0) - values[:-1]
    if valid is not None:
        terms.masked_fill_(~valid, 0.0)
        over |= ~valid
    decays = torch.full_like(rewards, gamma * gae_lambda).masked_fill_(over, 0.0)
    torch.add(advantages.copy_(discounted_sums(terms, decays)), values[:-1], out=returns)


@njit(nogil=True, cache=True)
def _advantage_row(
    rewards, values, next_values, terminations, truncations, final_values, valid,
    next_advantages, gamma, decay, zero, advantages, returns,
):  # fmt: skip
    """Fill one row of advantages and returns, given the row after it; all arrays are (N,).

    Values that are not used may be NaN: they are left out, not multiplied by zero.
    """
    for i in range(rewards.shape[0]):
        terminated = terminations[i] != 0
        truncated = truncations[i] != 0
        final_value = next_values[i] if final_values is None else final_values[i]
        successor = final_value if truncated else next_values[i]
        target = rewards[i] if terminated else rewards[i] + gamma * successor
        advantage = target - values[i]
        carried = decay * next_advantages[i]
        advantage = advantage if terminated | truncated else advantage + carried
        if valid is not None:
            advantage = advantage if valid[i] != 0 else zero
        advantages[i] = advantage
        returns[i] = advantage + values[i]


@njit(nogil=True, cache=True)
def fill_advantages(
    rewards, values, terminations, truncations, final_values, valid, gamma, decay, advantages,
    returns,
):  # fmt: skip
    """Fill advantages and returns of a whole rollout.

    Arrays are those of `gae`, C-contiguous, flags uint8; gamma and decay, gamma * lambda, have the
    dtype of rewards. Each call gets one row as one-dimensional views: LLVM vectorises the loop only
    in this form (a two-dimensional loop with the same body takes four times as long). One thread is
    enough: at 128 x 2048 it takes as long as copying the inputs.
    """
    zero, later = gamma - gamma, np.zeros_like(values[0])
    for t in range(rewards.shape[0] - 1, -1, -1):
        _advantage_row(
            rewards[t], values[t], values[t + 1], terminations[t], truncations[t],
            None if final_values is None else final_values[t],
            None if valid is None else valid[t],
            later, gamma, decay, zero, advantages[t], returns[t],
        )  # fmt: skip
        later = advantages[t]


@njit(nogil=True, cache=True)
def sum_episodes(rewards, valid, terminations, truncations, returns, lengths, episodes):
    """Sum up the episodes of a rollout (T, N), over valid rows only.

    `returns` float64 (N,) and `lengths` int64 (N,) are the sums of unfinished episodes, updated.
    `episodes` float64 (T, 2, N) gets both sums where an episode ends, else zeros.
    """
    episodes[:] = 0.0
    for t in range(rewards.shape[0]):
        for i in range(rewards.shape[1]):
            if valid[t, i]:
                returns[i] += rewards[t, i]
                lengths[i] += 1
            if terminations[t, i] | truncations[t, i]:
                if valid[t, i]:
                    episodes[t, 0, i] = returns[i]
                    episodes[t, 1, i] = lengths[i]
                returns[i] = 0.0
                lengths[i] = 0


def discounted_sums(terms: Tensor, factors: Tensor) -> Tensor:
    """Solve sums[t] = terms[t] + factors[t] * sums[t + 1], (T, N); overwrites both arguments.

    After each round, a row is the sum of `span` terms, and its factor a product of `span` factors.
    """
    num_steps, span = len(terms), 1
    other_terms, other_factors = torch.empty_like(terms), torch.empty_like(factors)
    while span < num_steps:
        torch.addcmul(terms[:-span], factors[:-span], terms[span:], out=other_terms[:-span])
        other_terms[-span:] = terms[-span:]
        left = num_steps - 2 * span  # rows that need another round
        if left > 0:
            torch.mul(factors[:left], factors[span : span + left], out=other_factors[:left])
        terms, other_terms, factors, other_factors = other_terms, terms, other_factors, factors
        span *= 2
    return terms


def _described(array: Any) -> str:
    """Type, dtype, shape and device of an argument, for messages."""
    if not isinstance(array, np.ndarray | Tensor):
        return type(array).__name__
    dtype = str(array.dtype).removeprefix("torch.")
    place = f" on {array.device}" if isinstance(array, Tensor) else ""
    return f"{type(array).__name__} {dtype} {tuple(array.shape)}{place}"


def _read(
    name: str, array: Any, rewards: Any, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """An array like rewards, as a plain tensor; raise BufferMisuseError if it does not fit."""
    kind = np.ndarray if isinstance(rewards, np.ndarray) else Tensor
    if isinstance(array, kind):
        tensor = as_tensor(name, array)
        if dtype is torch.bool and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = read_flags(name, tensor)
        is_there = kind is np.ndarray or tensor.device == rewards.device
        found = tensor.dtype, tensor.layout, tuple(tensor.shape)
        if is_there and found == (dtype, torch.strided, shape):
            return tensor
    raise BufferMisuseError(
        f"{name} is {_described(array)}, expected {kind.__name__} "
        f"{str(dtype).removeprefix('torch.')} {shape} as rewards has {_described(rewards)}"
    )
