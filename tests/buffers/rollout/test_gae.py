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
PATHS = [True, False]  # the compiled kernel, and what other devices use


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


def column(*numbers, dtype=np.float32):
    return np.array(numbers, dtype)[:, None]


def check_against_twin(rollout, gamma, gae_lambda, compiled, *, with_final=True, with_valid=True):
    rewards, values, terminations, truncations, final_values, valid = rollout
    final_values = final_values if with_final else None
    valid = valid if with_valid else None
    flags = terminations, truncations
    options = {"final_values": final_values, "valid": valid, "gamma": gamma}
    out = gae(rewards, values, *flags, **options, gae_lambda=gae_lambda, compiled=compiled)
    expected = slow_gae(rewards, values, *flags, final_values, valid, gamma, gae_lambda)
    tolerance = 1e-4 if rewards.dtype == np.float32 else 1e-10
    np.testing.assert_allclose(out[0], expected[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(out[1], expected[1], rtol=tolerance, atol=tolerance)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_steps=st.integers(1, 12),
    num_envs=st.sampled_from([1, 2, 7, 96, 97]),
    flag_rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    gamma=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
    compiled=st.booleans(),
)
def test_any_rollout_matches_slow_twin(
    seed, num_steps, num_envs, flag_rate, gamma, gae_lambda, compiled
):
    rng = np.random.default_rng(seed)
    rollout = random_rollout(rng, num_steps, num_envs, flag_rate=flag_rate)
    check_against_twin(rollout, gamma, gae_lambda, compiled)


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

# Cases by hand: gamma 0.5, lambda 0.5, so that a chain counts a quarter. Three steps each.


@pytest.mark.parametrize("compiled", PATHS)
def test_by_hand_truncated_under_next_step_bootstraps_with_the_final_observation(compiled):
    """Step 1 truncates; row 2 holds the final observation, worth 40, and step 2 only resets."""
    no, cut = column(0, 0, 0, dtype=bool), column(0, 1, 0, dtype=bool)
    valid = column(1, 1, 0, dtype=bool)
    rewards, values = column(1, 2, 0), column(10, 20, 40, 80)
    advantages, returns = gae(
        rewards, values, no, cut, valid=valid, gamma=0.5, gae_lambda=0.5, compiled=compiled
    )
    # t=1: 2 + 0.5 * values[2] - 20; with values[1] instead it would be -8, with 0 it would be -18.
    assert advantages.ravel().tolist() == [1 + 10 - 10 + 2 / 4, 2.0, 0.0]
    assert returns.ravel().tolist() == [11.5, 22.0, 40.0]


@pytest.mark.parametrize("compiled", PATHS)
def test_by_hand_truncated_under_same_step_bootstraps_with_the_final_value(compiled):
    """Step 1 truncates; row 2 holds the first observation of the next episode already."""
    no, cut = column(0, 0, 0, dtype=bool), column(0, 1, 0, dtype=bool)
    final_values = column(np.nan, 100, np.nan)
    rewards, values = column(1, 2, 4), column(10, 20, 40, 80)
    advantages, _ = gae(
        rewards, values, no, cut, final_values=final_values, gamma=0.5, gae_lambda=0.5,
        compiled=compiled,
    )  # fmt: skip
    # t=2: 4 + 40 - 40; t=1: 2 + 50 - 20, cut from t=2; t=0: 1 + 10 - 10 + 32 / 4
    assert advantages.ravel().tolist() == [9.0, 32.0, 4.0]


# Arrays, tensors and memory.


@pytest.mark.parametrize("compiled", PATHS)
def test_tensors_give_tensors_of_equal_numbers(compiled):
    rollout = random_rollout(np.random.default_rng(2), 7, 5)
    rewards, values, terminations, truncations, final_values, valid = rollout
    expected = gae(
        rewards, values, terminations, truncations, final_values=final_values, valid=valid
    )
    tensors = [torch.from_numpy(array) for array in rollout]
    found = gae(*tensors[:4], final_values=tensors[4], valid=tensors[5], compiled=compiled)
    for tensor, array in zip(found, expected, strict=True):
        assert isinstance(tensor, torch.Tensor)
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-5, atol=1e-6)


# Mistakes.


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
