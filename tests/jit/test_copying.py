"""What `copying` does is the same at once, number by number and in Python."""

import numpy as np
import pytest
from choices import fast_are

from vecenv.core.compiling import cached_njit
from vecenv.jit.copying import copy_numbers

COUNT = 21


def copy_constant(source, target):
    """Copy a number of numbers that is known when this is compiled."""
    copy_numbers(source, 3, target, 7, COUNT)


compiled_constant = cached_njit(copy_constant)


@cached_njit
def copy_some(source, target, count):
    """Copy a number of numbers that is not."""
    copy_numbers(source, 3, target, 7, count)


@pytest.mark.parametrize(
    ("given", "wanted"),
    fast_are(
        [(np.uint8, np.float32), (np.float32, np.float32)],
        [(np.uint8, np.float32), (np.int16, np.float64), (np.float32, np.float32)],
    ),
)
def test_copies_are_the_same_however_they_are_made(given, wanted):
    source = np.random.default_rng(0).integers(0, 200, 40).astype(given) - given(100)
    expected = np.zeros((3, 4, 3), wanted)
    expected.reshape(-1)[7 : 7 + COUNT] = source[3 : 3 + COUNT]
    for copy in (
        compiled_constant,
        lambda source, target: copy_some(source, target, COUNT),
        copy_constant,
    ):
        target = np.zeros((3, 4, 3), wanted)
        copy(source, target)
        np.testing.assert_array_equal(target, expected)
