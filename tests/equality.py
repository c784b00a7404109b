"""Equality of nested results down to types and dtypes, with a message that says where it ends."""

import numpy as np


def assert_same(actual, expected, path="result"):
    """Require equal structure, types, dtypes, shapes and values; NaN equals NaN."""
    assert type(actual) is type(expected), f"{path}: {actual!r} is not of type {type(expected)}"
    if isinstance(expected, np.ndarray):
        assert actual.shape == expected.shape, path
        assert actual.dtype == expected.dtype, path
        if expected.dtype == object:
            for index in np.ndindex(expected.shape):
                assert_same(actual[index], expected[index], f"{path}{list(index)}")
        elif not np.array_equal(actual, expected):  # a tenth of the time of the next line
            np.testing.assert_array_equal(actual, expected, err_msg=path)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), path
        for key, value in expected.items():
            assert_same(actual[key], value, f"{path}[{key!r}]")
    elif isinstance(expected, tuple | list):
        assert len(actual) == len(expected), path
        for index, value in enumerate(expected):
            assert_same(actual[index], value, f"{path}[{index}]")
    elif isinstance(expected, float | np.floating) and np.isnan(expected):
        assert np.isnan(actual), path
    else:
        assert actual == expected, f"{path}: {actual!r} is not {expected!r}"
