"""Minibatches: each valid row once, all fields of one row together, reproducible, no new memory."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_rollouts import make_rollout

from buffers import BufferMemoryError, BufferMisuseError
from buffers.rollout import minibatches

NESTED = Dict(
    {
        "image": Box(0, 255, (2, 2), np.uint8),
        "pair": Tuple((Discrete(9), Box(-1, 1, (1,), np.float64))),
        "bits": MultiBinary(3),
    }
)


def filled(num_steps=4, num_envs=3, obs_space=None, action_space=None, *, valid=None, **options):
    """A complete rollout whose row k has log_prob k, action k, reward k and obs k wherever it can.

    Everything is derived from the number of the row, so that mixed-up fields show.
    """
    obs_space = obs_space or Box(-1, 1, (2,))
    options = {"autoreset_mode": "SameStep", "seed": 3, **options}
    rollout = make_rollout(
        num_steps, num_envs, obs_space, action_space or Discrete(1000), **options
    )
    rollout.start(example(obs_space, rollout.num_envs))
    rows = np.arange(num_steps * num_envs).reshape(num_steps, num_envs)
    for t in range(num_steps):
        shape = rollout.actions.shape[2:]
        actions = np.broadcast_to(rows[t].reshape(-1, *[1] * len(shape)), (num_envs, *shape))
        rollout.put(
            t,
            actions=actions.astype(rollout.actions.numpy().dtype),
            log_probs=rows[t].astype(np.float32),
            values=rows[t].astype(np.float32) / 2,
        )
        slot = rollout.slot(t)
        slot.rewards[:] = rows[t]
        for flags in (slot.terminations, slot.truncations):
            flags[:] = False
        if t + 1 < num_steps:
            rollout.write_obs(t + 1, example(obs_space, num_envs, rows[t + 1]))
    rollout.write_obs(0, example(obs_space, num_envs, rows[0]))
    if valid is not None:
        rollout.valid_pages[:] = valid
    rollout.compute_advantages(np.zeros(num_envs))
    return rollout


def example(space, num_envs, rows=None):
    """Observations of all envs that show the number of their row modulo 100."""
    rows = np.zeros(num_envs, int) if rows is None else rows
    if isinstance(space, Dict):
        return {key: example(child, num_envs, rows) for key, child in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(example(child, num_envs, rows) for child in space.spaces)
    column = (rows % 100).reshape(-1, *[1] * len(space.shape))
    return np.broadcast_to(column, (num_envs, *space.shape)).astype(space.dtype)


def leaves(tree):
    if isinstance(tree, dict):
        return [leaf for child in tree.values() for leaf in leaves(child)]
    if isinstance(tree, tuple):
        return [leaf for child in tree for leaf in leaves(child)]
    return [tree]


def drawn(rollout, *args, **options):
    """Row numbers of each batch, after checking that all fields of a row came together."""
    found = []
    for batch in rollout.minibatches(*args, **options):
        rows = batch.log_probs.long()
        assert batch.values.equal(batch.log_probs / 2)
        assert batch.advantages.equal(rollout.advantages.flatten()[rows])
        assert batch.returns.equal(rollout.returns.flatten()[rows])
        for leaf in leaves(batch.obs):
            shape = (-1, *[1] * (leaf.dim() - 1))
            assert leaf.equal((rows % 100).reshape(shape).expand(leaf.shape).to(leaf.dtype))
        shape = (-1, *[1] * (batch.actions.dim() - 1))
        expected = rows.reshape(shape).expand(batch.actions.shape)
        assert batch.actions.equal(expected.to(batch.actions.dtype))
        found.append(rows.tolist())
    return found


DRAWS = {
    "num_steps": st.integers(1, 6),
    "num_envs": st.integers(1, 5),
    "seed": st.integers(0, 2**32 - 1),
    "parts": st.integers(1, 30),
}


@settings(max_examples=18)
@given(**DRAWS)
def test_each_valid_row_comes_exactly_once(num_steps, num_envs, seed, parts):
    valid = np.random.default_rng(seed).random((num_steps, num_envs)) < 0.7
    rollout = filled(num_steps, num_envs, valid=valid, seed=seed)
    number = min(parts, num_steps * num_envs)
    for _ in range(2):
        batches = drawn(rollout, number)
        assert sorted(row for rows in batches for row in rows) == np.flatnonzero(valid).tolist()
        sizes = [len(rows) for rows in batches]
        if sizes:
            assert max(sizes) - min(sizes) <= 1
            assert min(sizes) >= 1
        assert len(sizes) == min(number, valid.sum())


def padded(batches, size):
    """Batches of row numbers as `fixed` makes them of those it makes without: the slow way."""
    indices, weights = [], []
    for rows in batches:
        ends = [-(-(j + 1) * len(rows) // size) for j in range(size)]  # how many came up to there
        indices.append([rows[end - 1] for end in ends])
        weights.append([float(end > before) for before, end in zip([0, *ends], ends, strict=False)])
    return indices, weights


@settings(max_examples=18)
@given(**DRAWS, staged=st.booleans())
def test_fixed_batches_have_one_size_whatever_is_valid(num_steps, num_envs, seed, parts, staged):
    valid = np.random.default_rng(seed).random((num_steps, num_envs)) < 0.7
    plain = filled(num_steps, num_envs, valid=valid, seed=seed)
    rollout = filled(num_steps, num_envs, valid=valid, seed=seed, staged=staged)
    number = min(parts, num_steps * num_envs)
    size = -(-num_steps * num_envs // number)
    for _ in range(2):
        expected = drawn(plain, number)
        batches = list(rollout.minibatches(number, fixed=True))
        indices, weights = padded(expected, size)
        assert [batch.indices.tolist() for batch in batches] == indices
        assert [batch.weights.tolist() for batch in batches] == weights
        again = padded(drawn(plain, number), size)[0]
        assert drawn(rollout, number, fixed=True) == again
        for batch in batches:
            assert batch.weights.dtype is torch.float32
            assert all(len(column) == size for column in batch)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    "action_space",
    [Discrete(1000), MultiDiscrete([100, 100]), MultiBinary(3), Box(-1, 1, (2, 2), np.float64)],
)
def test_nested_observations_and_all_kinds_of_actions_stay_together(action_space, staged):
    rollout = filled(4, 3, NESTED, action_space, staged=staged)
    if isinstance(action_space, MultiBinary):
        assert rollout.actions.dtype is torch.int8
    assert sorted(row for rows in drawn(rollout, 5) for row in rows) == list(range(12))
    batch = next(rollout.minibatches(1))
    assert set(batch.obs) == {"image", "pair", "bits"}
    assert batch.obs["image"].dtype is torch.uint8
    assert batch.obs["image"].shape == (12, 2, 2)
    assert batch.obs["pair"][0].shape == (12,)
    assert batch.obs["pair"][1].dtype is torch.float64


def test_a_seed_gives_one_order_and_epochs_differ():
    first, second = filled(seed=5), filled(seed=5)
    orders = [drawn(first, 2) for _ in range(3)]
    assert [drawn(second, 2) for _ in range(3)] == orders
    assert orders[0] != orders[1] != orders[2]
    assert drawn(filled(seed=6), 2) != orders[0]


@pytest.mark.parametrize("change", ["pass", "advantages", "rollout"])
def test_going_on_with_minibatches_that_are_over_is_refused(change):
    rollout = filled()
    first, unused = rollout.minibatches(3), rollout.minibatches(3)
    next(first)
    if change == "pass":
        next(unused)
    elif change == "advantages":
        rollout.compute_advantages(np.zeros(3))
    else:
        rollout.advance()
    with pytest.raises(BufferMisuseError, match="these minibatches are over: another pass or"):
        next(first)
    if change == "rollout":
        with pytest.raises(BufferMisuseError, match="these minibatches are over"):
            next(unused)


def test_no_valid_row_gives_no_batch():
    for fixed in (False, True):
        assert drawn(filled(valid=np.zeros((4, 3), bool)), 2, fixed=fixed) == []


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((0,), {}, "num_minibatches must be a positive integer, got 0"),
        ((1.5,), {}, "num_minibatches must be a positive integer, got 1.5"),
        ((13,), {}, "num_minibatches is 13, but the rollout has 12 transitions"),
    ],
)
def test_mistakes_are_named_at_the_call(args, options, message):
    with pytest.raises(BufferMisuseError, match=message):
        filled().minibatches(*args, **options)


def test_a_batch_that_does_not_fit_is_refused(set_free_bytes):
    rollout = filled()
    set_free_bytes(100)
    with pytest.raises(BufferMemoryError, match=r"a batch of 12 rows needs 432 bytes .* 100 bytes"):
        rollout.minibatches(1)


def test_shuffle_is_fair():
    """Each of 4 numbers is as often in each place: 24 000 draws, five standard deviations."""
    generator, counts = np.zeros(2, np.uint64), np.zeros((4, 4), int)
    rows = np.empty(4, np.int64)
    draws = 24_000
    for _ in range(draws):
        rows[:] = range(4)
        minibatches.shuffle(rows, generator)
        counts[np.arange(4), rows] += 1
    assert np.abs(counts - draws / 4).max() < 5 * np.sqrt(draws * 3 / 16)
