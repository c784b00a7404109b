"""Rows of batches of any space, equality, and why a value is outside its space."""

import numpy as np
import pytest
from gymnasium import spaces

from vecenv.core.spaces import (
    why_outside,
)


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
