"""Prioritized sampling: its law, its sums after many updates, and the order of calls."""

import numpy as np
import pytest
import torch
from replay_model import ACTIONS, OBS, CountingEnvs, check_law, columns_of

from buffers import BufferMisuseError, PrioritizedReplayBuffer
from buffers.replay.priorities import SumTree, draw_leaves

STAGED = pytest.mark.parametrize("staged", [False, True], ids=["tree", "blocks"])


def filled(capacity, rows=None, staged=False, **options):
    buffer = PrioritizedReplayBuffer(capacity, OBS, ACTIONS, seed=0, staged=staged, **options)
    rows = capacity if rows is None else rows
    if rows:
        buffer.add(**columns_of(CountingEnvs(1).random_steps([0] * rows)))
    return buffer


def drawn(buffer, draws, size=50):
    total = np.zeros(buffer.capacity)
    for _ in range(draws):
        total += np.bincount(buffer.sample(size).indices, minlength=buffer.capacity)
    return total


@STAGED
@pytest.mark.parametrize(("capacity", "alpha"), [(1, 0.6), (16, 0.0), (16, 0.6), (1025, 0.6)])
def test_the_law_is_priority_to_the_alpha_and_zeros_are_never_drawn(capacity, alpha, staged):
    buffer = filled(capacity, staged=staged, alpha=alpha)
    priorities = np.random.default_rng(capacity).random(capacity) + 0.01
    priorities[1::3] = 0
    buffer.update_priorities(np.arange(capacity), priorities)
    law = priorities**alpha
    check_law(drawn(buffer, 40, 200), law)


@STAGED
def test_weights(staged):
    buffer = filled(5, staged=staged, alpha=0.5, beta=0.7)
    priorities = np.array([1.0, 2, 3, 4, 5])
    buffer.update_priorities(np.arange(5), priorities)
    probabilities = priorities**0.5 / (priorities**0.5).sum()
    for beta in (None, 1.0, 0.0):
        batch = buffer.sample(64, beta=beta)
        exponent = 0.7 if beta is None else beta
        expected = (5 * probabilities[batch.indices.numpy()]) ** -exponent
        np.testing.assert_allclose(batch.weights, expected / expected.max(), rtol=1e-5)
        assert batch.weights.dtype == torch.float32


@STAGED
def test_new_rows_get_the_largest_priority_and_rows_not_there_are_never_drawn(staged):
    buffer = filled(10, 4, staged=staged, alpha=1.0)
    check_law(drawn(buffer, 100), [1] * 4 + [0] * 6)
    buffer.update_priorities([0, 1], [3.0, 0.5])
    buffer.add(**columns_of(CountingEnvs(1).random_steps([0] * 2)))
    assert buffer.priorities.tolist() == [3, 0.5, 1, 1, 3, 3, 0, 0, 0, 0]
    buffer.add(**columns_of(CountingEnvs(1).random_steps([0] * 7)))
    assert buffer.priorities.tolist() == [3, 3, 3, 1, 3, 3, 3, 3, 3, 3]
    buffer.update_priorities(np.arange(10), np.arange(10.0))
    buffer.add(**columns_of(CountingEnvs(1).random_steps([0] * 25)))
    assert buffer.priorities.tolist() == [9] * 10


@STAGED
@pytest.mark.parametrize(
    ("indices", "priorities", "message"),
    [
        ([0, 4], [1.0, 1.0], r"indices\[1\] is 4 .* expected a row from 0 to 3"),
        ([-1], [1.0], r"indices\[0\] is -1"),
        ([0], [-0.5], r"priorities\[0\] -0.5, .* priority from 0 to"),
        ([0, 1], [1.0, np.nan], r"priorities\[1\] nan"),
        ([0], [np.inf], r"priorities\[0\] inf"),
        ([0, 1], [1.0], r"indices has shape \(2,\) and priorities \(1,\)"),
        ([[0]], [[1.0]], r"expected \(K,\) both"),
        ([0.5], [1.0], "indices has dtype float64"),
        ([0], ["a"], "priorities has dtype"),
    ],
)
def test_updates_that_do_not_fit_change_nothing(indices, priorities, message, staged):
    buffer = filled(6, 4, staged=staged)
    buffer.update_priorities([0, 1, 2], [0.1, 0.2, 0.3])
    before = buffer.priorities
    with pytest.raises(BufferMisuseError, match=message):
        buffer.update_priorities(indices, priorities)
    assert buffer.priorities.equal(before)


def test_when_all_priorities_are_zero_nothing_can_be_drawn():
    buffer = filled(3)
    buffer.update_priorities([0, 1, 2], [0.0, 0.0, 0.0])
    with pytest.raises(BufferMisuseError, match="all priorities are 0"):
        buffer.sample(2)


@pytest.mark.parametrize("options", [{"alpha": -1}, {"beta": float("nan")}, {"alpha": np.inf}])
def test_exponents_are_checked(options):
    with pytest.raises(BufferMisuseError, match=next(iter(options))):
        filled(3, **options)


def test_every_pattern_of_zeros_in_a_node_keeps_the_law():
    """Where the last of four values are 0, rounding must not lead past the others."""
    buffer = filled(256, alpha=1.0)
    bits = np.arange(64)[:, None] >> np.arange(4) & 1  # every pattern of four, in turn
    priorities = (bits * [1.0, 3.0, 2.0, 5.0]).reshape(-1)
    buffer.update_priorities(np.arange(256), priorities)
    check_law(drawn(buffer, 60, 400), priorities)


def test_rounding_leads_to_no_row_without_a_priority():
    """By a random number as large as the sum, which none is, but the others' rounding errors."""
    tree, leaves, ratios = SumTree(40), np.zeros(1, np.int64), np.zeros(1, np.float32)
    tree.update(np.array([0, 3, 17]), np.array([0.5, 2.0, 0.25]))
    draw_leaves(*tree._arrays, leaves, np.ones(1), ratios)
    assert leaves.tolist() == [17]


def test_updates_on_a_device_that_do_not_fit_are_left_out_and_counted():
    """As of tensors there, of which the host sees nothing."""
    buffer = filled(6, 4, staged=True, alpha=1.0)
    rows, values = torch.tensor([0, 1, 2, 5, -1, 6]), [3.0, -1.0, np.nan, 9.0, 9.0, 9.0]
    buffer._sums.update(rows, torch.tensor(values), buffer._table.live_there())
    assert buffer.priorities.tolist() == [3, 1, 1, 1, 0, 0]
    assert (buffer._sums.num_refused, buffer._sums.largest) == (5, 3)
