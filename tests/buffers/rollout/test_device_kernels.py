"""Advantages by one kernel on a device, as it runs without one."""

import device_kernels
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from buffers import RolloutBuffer
from buffers.rollout.device_kernels import advantages_kernel
from buffers.rollout.gae import GaeInputs, fill_advantages_there, gae

WAYS = [
    device_kernels.plain,
    pytest.param(device_kernels.lowered, marks=pytest.mark.cuda),
]


def inputs_of(num_steps, num_envs, dtype, *, has_final, has_valid, seed=0):
    rng = np.random.default_rng(seed)
    shape = num_steps, num_envs
    flags = rng.random((3, *shape)) < 0.3
    final = rng.standard_normal(shape).astype(dtype)
    final[~flags[1]] = np.nan  # which nobody may read
    return GaeInputs(
        rng.standard_normal(shape).astype(dtype),
        rng.standard_normal((num_steps + 1, num_envs)).astype(dtype),
        flags[0], flags[1],
        final if has_final else None,
        ~flags[2] if has_valid else None,
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dtype", "has_final", "has_valid"),
    [
        (np.float32, False, False),
        (np.float32, True, True),
        (np.float64, True, True),
        # Each is compiled for itself, for the CPU; test_gae.py compiles those above as well.
        pytest.param(np.float32, True, False, marks=pytest.mark.slow),
        pytest.param(np.float64, False, False, marks=pytest.mark.slow),
        pytest.param(np.float64, True, False, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_does_bit_for_bit_what_the_compiled_one_does(
    way, dtype, has_final, has_valid, monkeypatch
):
    seen = device_kernels.use(monkeypatch, way)
    for shape in ((1, 1), (3, 4), (8, 3), (9, 5), (30, 7)):
        given = inputs_of(*shape, dtype, has_final=has_final, has_valid=has_valid)
        named = given._asdict()
        first = [named.pop(name) for name in GaeInputs._fields[:4]]
        expected = gae(*first, **named, gamma=0.97, gae_lambda=0.9)
        there = GaeInputs(*(None if a is None else torch.from_numpy(a) for a in given))
        results = [torch.full(shape, torch.nan, dtype=there.rewards.dtype) for _ in range(4)]
        fill_advantages_there(there, results[0], results[1], 0.97, 0.9)
        fill_advantages_there(there, results[2], results[3], 0.97, 0.9, compiled=False)
        for found, by_torch, wanted in zip(results, results[2:], expected, strict=False):
            np.testing.assert_array_equal(found, wanted)
            np.testing.assert_allclose(by_torch, wanted, rtol=2e-5, atol=2e-6)
    assert len(seen) == 5


def test_memory_that_is_not_dense_is_copied_first(monkeypatch):
    device_kernels.use(monkeypatch, device_kernels.plain)
    given = inputs_of(5, 4, np.float32, has_final=True, has_valid=True)
    there = [torch.from_numpy(np.ascontiguousarray(a.T)).T for a in given]
    assert not there[0].is_contiguous()
    named = given._asdict()
    first = [named.pop(name) for name in GaeInputs._fields[:4]]
    expected = gae(*first, **named)
    found = torch.zeros(5, 4), torch.zeros(5, 4)
    fill_advantages_there(GaeInputs(*there), *found, 0.99, 0.95)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_rollouts_take_the_kernel(monkeypatch):
    found, seen = [], []
    for staged in (False, True):
        rng = np.random.default_rng(0)
        rollout = RolloutBuffer(
            6, 3, Box(-1, 1, (2,)), Discrete(2), autoreset_mode="NextStep", staged=staged
        )
        rollout.start(np.zeros((3, 2), np.float32))
        for t in range(6):
            floats = rng.random(3, np.float32)
            rollout.put(t, actions=np.zeros(3, np.int64), log_probs=floats, values=floats)
            slot = rollout.slot(t)
            slot.obs[:], slot.rewards[:] = t, rng.random(3)
            slot.terminations[:], slot.truncations[:] = rng.random((2, 3)) < 0.3
        if staged:
            seen = device_kernels.use(monkeypatch, device_kernels.plain)
        rollout.compute_advantages(np.ones(3, np.float32))
        found.append([rollout.advantages.numpy().copy(), rollout.returns.numpy().copy()])
    assert seen == ["fill_advantages_thread"]
    np.testing.assert_array_equal(*found)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_spilled(dtype):
    device_kernels.check_resources(advantages_kernel(dtype))
