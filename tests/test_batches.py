"""Rows of batches of any space, equality, and why a value is outside its space."""

import numpy as np
import pytest
from envs import SPACES
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from vecenv.core.spaces import (
    is_same,
    join_rows,
    merge_rows,
    short,
    take_row,
    take_rows,
    why_outside,
)

NESTED = SPACES["nested"]


def test_rows_of_nested_batches():
    batched = batch_space(NESTED, 4)
    batched.seed(1)
    batch, other = batched.sample(), batched.sample()
    rows = [take_row(NESTED, batch, i) for i in range(4)]
    assert [why_outside(NESTED, row, "row") for row in rows] == [None] * 4
    assert is_same(take_rows(NESTED, batch, range(4)), batch)
    assert is_same(take_row(NESTED, take_rows(NESTED, batch, [3, 1]), 0), rows[3])
    assert is_same(join_rows(NESTED, [(batch, i) for i in range(4)]), batch)
    merged = merge_rows(NESTED, batch, other, np.array([True, False, False, True]))
    for i, source in enumerate([other, batch, batch, other]):
        assert is_same(take_row(NESTED, merged, i), take_row(NESTED, source, i))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (np.float32(1), np.float64(1)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), np.zeros((2, 1))),
        (np.zeros(2), np.array([0, np.nan])),
        ((1, 2), [1, 2]),
        ((1, 2), (1, 2, 3)),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        (np.array([1, None], object), np.array([1, 2], object)),
    ],
)
def test_what_is_not_the_same(a, b):
    assert not is_same(a, b)
    assert is_same(a, a)
    assert is_same(b, b)


def test_the_same_with_nan_and_with_objects_that_compare_by_identity():
    class Thing:
        def __init__(self, x):
            self.x = x

    assert is_same(np.array([np.nan, 1]), np.array([np.nan, 1]))
    assert is_same(float("nan"), float("nan"))
    assert is_same(Thing(np.ones(2)), Thing(np.ones(2)))
    assert not is_same(Thing(np.ones(2)), Thing(np.zeros(2)))


@pytest.mark.parametrize(
    ("space", "value", "reason"),
    [
        (spaces.Dict(a=spaces.Discrete(2)), {"b": 1}, "obs is ['b'], expected a dict with"),
        (spaces.Dict(a=spaces.Discrete(2)), 3, "obs is int, expected a dict"),
        (spaces.Dict(a=spaces.Discrete(2)), {"a": 5}, "obs['a'] is 5, which is not in Discrete(2)"),
        (spaces.Tuple([spaces.Text(2)] * 2), ("a", 1), "obs[1] is 1, which is not in Text"),
        (
            spaces.Tuple([spaces.Text(2)] * 2),
            ("a",),
            "obs is a tuple ('a',), expected a tuple of 2",
        ),
        (spaces.MultiDiscrete([2, 2]), np.array([0, 2]), "obs is array([0, 2]), which is not in"),
        (spaces.Box(0, 1, (2,)), np.array([0, 2], np.float32), "obs[1] is 2.0, outside [0.0, 1.0]"),
    ],
)
def test_why_a_value_is_outside(space, value, reason):
    assert why_outside(space, value, "obs").startswith(reason)
    assert why_outside(space, space.sample(), "obs") is None


def test_long_values_are_shortened_to_one_line():
    assert short(np.zeros((50, 50)))[-3:] == "..."
    assert len(short("x" * 500)) == 100
    assert "\n" not in short(np.zeros((3, 3)))
