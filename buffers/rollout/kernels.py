"""Compiled passes over a finished rollout on the host: advantages, and the order of rows."""

from __future__ import annotations

import numpy as np

from buffers.core.compiling import njit
from buffers.core.kernels import bounded, random_word

__all__ = ["fill_advantages", "shuffle"]

_ONE = np.uint64(1)


@njit(nogil=True, cache=True)
def _advantage_row(
    rewards, values, next_values, terminations, truncations, final_values, valid,
    next_advantages, gamma, decay, zero, advantages, returns,
):  # fmt: skip
    """Fill one row of advantages and returns, given the row after it; all arrays are (N,).

    What does not count may be anything, NaN too: it is not multiplied by zero but left out.
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

    Rows are handed on one by one, as one-dimensional views: only in this form does LLVM turn the
    loop into vector instructions (a two-dimensional one with the same body takes four times as
    long). One thread: at 128 x 2048 that takes as long as copying the inputs.

    Args:
        rewards: float (T, N), C-contiguous like all the others.
        values: float (T + 1, N), of the same dtype as rewards.
        terminations, truncations: uint8 (T, N), zero or not.
        final_values: float (T, N), read where truncated; or None: the next row of values is used.
        valid: uint8 (T, N); a row with zero gets advantage 0. Or None: all count.
        gamma, decay: Discount and discount * lambda, scalars of the dtype of rewards.
        advantages, returns: float (T, N), written; they must not overlap the inputs.
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
def shuffle(rows, generator):
    """Shuffle rows int64 (K,), K < 2**31, in place; generator uint64 (2,) moves on."""
    key, counter = generator[0], generator[1]
    for last in range(rows.shape[0] - 1, 0, -1):
        chosen = bounded(random_word(key, counter), last + 1)
        counter = np.add(counter, _ONE)
        rows[last], rows[chosen] = rows[chosen], rows[last]
    generator[1] = counter
