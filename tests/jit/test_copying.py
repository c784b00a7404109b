"""What `copying` does is the same at once, number by number and in Python."""

import numpy as np
import pytest
from choices import fast_are

from vecenv.core.compiling import cached_njit
from vecenv.jit.copying import copy_numbers, write_bits

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


@cached_njit
def write_some(bits, num_bits, out):
    """Write bits by the CPU's table."""
    write_bits(bits, num_bits, out)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_bits_are_those_of_the_word(dtype):
    word = np.random.default_rng(0).integers(0, 2**64, dtype=np.uint64)
    expected = np.array([int(word) >> bit & 1 for bit in range(64)])
    for write in (write_some, write_bits):
        for num_bits in (0, 1, 7, 8, 52, 63, np.uint64(64)):
            out = np.full(70, 9, dtype)
            write(word, num_bits, out)
            np.testing.assert_array_equal(out[:num_bits], expected[:num_bits])
            assert (out[num_bits:] == 9).all()
