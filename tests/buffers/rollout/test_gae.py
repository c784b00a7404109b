"""`gae` against hand-computed cases, a slow twin in plain Python, and properties it must have."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers import BufferMisuseError
from buffers import gae as public_gae
from buffers.rollout.gae import estimate

WIDE = 101


def slow_gae(rewards, values, terminations, truncations, final_values, valid, gamma, gae_lambda):
    """The definition, one environment and one step at a time, in double precision."""
    num_steps, num_envs = rewards.shape
    advantages = np.zeros((num_steps, num_envs))
    for i in range(num_envs):
        next_advantage = 0.0
        for t in reversed(range(num_steps)):
            next_value = float(values[t + 1, i])
            if truncations[t, i] and final_values is not None:
                next_value = float(final_values[t, i])
            if terminations[t, i]:
                next_value = 0.0
            if terminations[t, i] or truncations[t, i]:
                next_advantage = 0.0
            advantage = float(rewards[t, i]) + gamma * next_value - float(values[t, i])
            advantage += gamma * gae_lambda * next_advantage
            if valid is not None and not valid[t, i]:
                advantage = 0.0
            advantages[t, i] = next_advantage = advantage
    return advantages, advantages + values[:-1]


def random_rollout(rng, num_steps, num_envs, dtype=np.float32, flag_rate=0.2):
    """rewards, values, terminations, truncations, final_values, valid."""

    def normal(rows):
        return rng.standard_normal((rows, num_envs)).astype(dtype)

    def flags(rate):
        return rng.random((num_steps, num_envs)) < rate

    rewards, values, final_values = normal(num_steps), normal(num_steps + 1), normal(num_steps)
    return rewards, values, flags(flag_rate), flags(flag_rate), final_values, flags(1 - flag_rate)


def gae(*arrays, final_values=None, valid=None, gamma=0.99, gae_lambda=0.95, compiled=True):
    """Call the public function, or what it does on other devices, on the CPU."""
    options = {"final_values": final_values, "valid": valid}
    if compiled:
        return public_gae(*arrays, **options, gamma=gamma, gae_lambda=gae_lambda)
    tensors = [None if a is None else torch.as_tensor(a) for a in (*arrays, *options.values())]
    found = [torch.full(tensors[0].shape, torch.nan, dtype=tensors[0].dtype) for _ in range(2)]
    estimate(tensors, *found, gamma, gae_lambda, is_compiled=False)
    return [x if isinstance(arrays[0], torch.Tensor) else x.numpy() for x in found]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_steps=st.integers(1, 12),
    num_envs=st.sampled_from([1, 2, 7, 96, 97]),
    flag_rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    gamma=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
    has_final=st.booleans(),
    has_valid=st.booleans(),
    compiled=st.booleans(),
    are_tensors=st.booleans(),
)
def test_any_rollout_matches_slow_twin(
    seed, num_steps, num_envs, flag_rate, gamma, gae_lambda, has_final, has_valid, compiled,
    are_tensors,
):  # fmt: skip
    rng = np.random.default_rng(seed)
    *arrays, final_values, valid = random_rollout(rng, num_steps, num_envs, flag_rate=flag_rate)
    final_values, valid = final_values if has_final else None, valid if has_valid else None
    expected = slow_gae(*arrays, final_values, valid, gamma, gae_lambda)
    make = torch.from_numpy if are_tensors else np.asarray
    given = {"final_values": final_values, "valid": valid}
    options = {name: make(array) for name, array in given.items() if array is not None}
    options |= {"gamma": gamma, "gae_lambda": gae_lambda, "compiled": compiled}
    for found, wanted in zip(gae(*map(make, arrays), **options), expected, strict=True):
        assert isinstance(found, torch.Tensor) == are_tensors
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_truncated_step_has_the_value_of_its_final_observation():
    """By hand: row 2 holds it, unless final values are given, as the next episode is there then."""
    cut, no = np.array([[False], [True], [False]]), np.zeros((3, 1), bool)
    rewards, values = np.float32([[1], [2], [4]]), np.float32([[10], [20], [40], [80]])
    for final, expected in ((None, 2 + 40 / 2 - 20), (100.0, 2 + 100 / 2 - 20)):
        given = None if final is None else np.full((3, 1), final, np.float32)
        found, _ = gae(rewards, values, no, cut, final_values=given, gamma=0.5, gae_lambda=0.5)
        assert found.ravel().tolist() == [1 + 20 / 2 - 10 + expected / 4, expected, 4 + 40 - 40]


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), num_envs=st.sampled_from([3, WIDE]))
def test_what_must_not_be_read_has_no_influence(seed, num_envs):
    rng = np.random.default_rng(seed)
    rewards, values, terminations, truncations, final_values, valid = random_rollout(
        rng, 8, num_envs
    )
    flags = terminations, truncations
    expected = gae(rewards, values, *flags, final_values=final_values, valid=valid)

    rewards = np.where(valid, rewards, np.nan)
    is_read = truncations & ~terminations & valid
    final_values = np.where(is_read, final_values, np.nan)
    found = gae(rewards, values, *flags, final_values=final_values, valid=valid)

    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


GOOD = random_rollout(np.random.default_rng(6), 4, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": [1.0]}, "rewards is list, expected an array or tensor"),
        ({"rewards": GOOD[0][0]}, r"rewards is .* \(3,\), expected .* \(T, N\)"),
        ({"rewards": GOOD[0][:0]}, r"rewards is .* \(0, 3\), expected .* one step"),
        ({"rewards": GOOD[0].astype(np.float16)}, "is ndarray float16 .*, expected .* float32 or"),
        ({"values": GOOD[1][:-1]}, r"values is .* \(4, 3\), expected .* \(5, 3\)"),
        ({"values": GOOD[1].astype(np.float64)}, "values is .*float64 .*, expected .* float32"),
        ({"values": torch.from_numpy(GOOD[1])}, "values is Tensor .*, expected ndarray float32"),
        (
            {"truncations": GOOD[3].astype(np.float32)},
            "truncations is .* float32 .*, expected .* bool",
        ),
        ({"truncations": None}, "truncations is NoneType, expected ndarray"),
        ({"final_values": GOOD[4][:2]}, r"final_values is .* \(2, 3\), expected .* \(4, 3\)"),
        ({"valid": GOOD[4]}, "valid is ndarray float32 .*, expected ndarray bool"),
        ({"gamma": 1.5}, "gamma is 1.5, expected a number from 0 to 1"),
        ({"gae_lambda": float("nan")}, "gae_lambda is nan, expected a number from 0 to 1"),
    ],
)
def test_mistakes_are_named(changes, message):
    names = ["rewards", "values", "terminations", "truncations", "final_values", "valid"]
    arguments = {**dict(zip(names, GOOD, strict=True)), **changes}
    positional = [arguments.pop(name) for name in names[:4]]
    with pytest.raises(BufferMisuseError, match=message):
        gae(*positional, **arguments)


def test_other_devices_are_refused_where_they_cannot_work():
    tensors = [torch.from_numpy(array) for array in GOOD[:4]]
    with pytest.raises(BufferMisuseError, match=r"values is Tensor .* on meta, expected .* on cpu"):
        gae(tensors[0], tensors[1].to("meta"), *tensors[2:])


@pytest.mark.gpu
def test_cuda_gives_the_numbers_of_the_cpu():
    rewards, values, terminations, truncations, final_values, valid = (
        torch.from_numpy(array) for array in random_rollout(np.random.default_rng(7), 32, 64)
    )
    options = {"final_values": final_values, "valid": valid}
    expected = gae(rewards, values, terminations, truncations, **options)
    on_gpu = {name: tensor.cuda() for name, tensor in options.items()}
    inputs = (tensor.cuda() for tensor in (rewards, values, terminations, truncations))
    for found, wanted in zip(gae(*inputs, **on_gpu), expected, strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)
