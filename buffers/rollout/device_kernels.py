"""Advantages on a device by one kernel, whose threads walk through time with an env each."""

from __future__ import annotations

import functools
from typing import Any

import torch

from buffers.core.device_kernels import DeviceKernel

__all__ = ["advantages_kernel", "fill_advantages_thread"]

# `DeviceKernel` puts it here.
cuda: Any = None


@functools.cache
def advantages_kernel(dtype: torch.dtype) -> DeviceKernel:
    """`fill_advantages_thread` for rewards and values of this dtype, float32 or float64."""
    kind = str(dtype).removeprefix("torch.")
    floats, flags = f"{kind}*", "uint8*"
    inputs = floats, floats, flags, flags, floats, flags
    sizes = ("int64",) * 4
    return DeviceKernel(fill_advantages_thread, (*inputs, *sizes, kind, kind, floats, floats))


def fill_advantages_thread(
    rewards, values, terminations, truncations, final_values, valid, has_final, has_valid,
    num_steps, num_envs, gamma, decay, advantages, returns,
):  # fmt: skip
    """Fill the advantages and returns of one env, as those of `kernels.filler` do.

    What a step is computed from is asked for eight steps before: else each step would wait for
    memory. Threads that are neighbours read neighbours.

    Args:
        rewards: (T * N,), like the next three but for values ((T + 1) * N,); flags are uint8.
        values, terminations, truncations: See `gae`.
        final_values, valid: The same; not read where has_final or has_valid is 0.
        has_final, has_valid: Whether they are given.
        num_steps, num_envs: T and N.
        gamma, decay: Discount, and gamma * lambda.
        advantages, returns: (T * N,), written.
    """
    env = cuda.grid(1)
    if env >= num_envs:
        return

    def read(t):
        at = max(t, 0) * num_envs + env
        final = final_values[at] if has_final else values[at]
        is_valid = valid[at] if has_valid else terminations[at]
        return rewards[at], values[at], final, terminations[at], truncations[at], is_valid

    last = num_steps - 1
    a, b, c, d = read(last), read(last - 1), read(last - 2), read(last - 3)
    e, f, g, h = read(last - 4), read(last - 5), read(last - 6), read(last - 7)
    following = values[num_steps * num_envs + env]
    carried = gamma - gamma
    for t in range(last, -1, -1):
        reward, value, final, terminated, truncated, is_valid = a
        a, b, c, d, e, f, g, h = b, c, d, e, f, g, h, read(t - 8)
        successor = final if has_final and truncated != 0 else following
        target = reward if terminated != 0 else reward + gamma * successor
        advantage = target - value
        if terminated == 0 and truncated == 0 and t < last:
            advantage += decay * carried
        if has_valid and is_valid == 0:
            advantage = gamma - gamma
        at = t * num_envs + env
        advantages[at] = advantage
        returns[at] = advantage + value
        following, carried = value, advantage
