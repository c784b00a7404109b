"""What compiled code finds in array objects is what NumPy says of them."""

import pickle

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from numba.core import config

from buffers import SharedReplayBuffer
from buffers.core.array_objects import are_readable, is_array_of, to_kind

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="nothing is compiled")
CODES = "?bBhHiIlLqQefdgFDG"


def fits(array, dtype, shape):
    dims = np.array(shape[1:], np.int64)
    return is_array_of(id(array), to_kind(dtype), shape[0], len(dims), dims.ctypes.data)


def test_dtypes_are_told_apart():
    assert are_readable()
    arrays = {code: np.zeros((2, 3), code) for code in CODES}
    for code, array in arrays.items():
        found = [other for other in CODES if fits(array, np.dtype(other), (2, 3))]
        assert found == [code]
        swapped = array.astype(array.dtype.newbyteorder("S"))
        assert fits(swapped, array.dtype, (2, 3)) == (array.dtype.itemsize == 1)
    for other in ("S4", "U1", "V4", "M8[s]", "O", ">f4"):
        assert not to_kind(np.dtype(other))


def test_a_dtype_that_is_another_object_is_the_same():
    array = np.zeros((2, 3), np.float32)
    for other in (pickle.loads(pickle.dumps(array)), array.astype(np.dtype("f4", metadata={1: 2}))):
        assert other.dtype is not array.dtype
        assert fits(other, array.dtype, (2, 3))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 2)), np.zeros((2, 3, 1)), np.zeros(2), np.array(1.0), np.zeros((2, 6))[:, ::2],
        np.zeros((2, 3), order="F"), np.zeros((1, 3)), np.zeros((0, 3)), np.zeros((4, 3))[::2],
        np.zeros(49, np.uint8)[1:].view(np.float64).reshape(2, 3), np.broadcast_to(1.0, (2, 3)),
    ],
    ids=lambda array: f"{array.shape}-{array.strides}",
)  # fmt: skip
def test_other_shapes_and_orders_do_not_fit(array):
    assert not fits(array, np.dtype(np.float64), (2, 3))


def test_arrays_that_may_not_be_written_fit():
    array = np.zeros((2, 3))
    array.flags.writeable = False
    assert fits(array, np.dtype(np.float64), (2, 3))
    assert fits(np.zeros((0, 3)), np.dtype(np.float64), (0, 3))
    assert fits(np.zeros(2), np.dtype(np.float64), (2,))


@pytest.mark.parametrize("name", ["obs", "next_obs", "actions", "rewards", "terminations"])
def test_a_buffer_reads_columns_of_any_form(name):
    """Those that compiled code refuses are read one by one, and give the same rows."""

    def swap(array):
        return array.astype(array.dtype.newbyteorder("S"))

    def spread(array):
        return np.repeat(array, 2, 0)[::2]

    def shift(array):
        memory = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
        memory[:] = array
        return memory

    rng = np.random.default_rng(0)
    buffer, expected = (SharedReplayBuffer(60, Box(-9, 9, (3,)), Discrete(5)) for _ in range(2))
    for form in (swap, spread, shift, lambda array: pickle.loads(pickle.dumps(array))):
        obs = rng.standard_normal((2, 4, 3)).astype(np.float32)
        step = {
            "obs": obs[0], "next_obs": obs[1], "actions": rng.integers(5, size=4),
            "rewards": rng.random(4), "terminations": rng.random(4) < 0.5,
            "truncations": np.zeros(4, bool),
        }  # fmt: skip
        expected.add(**step)
        buffer.add(**{**step, name: form(step[name])})
    for path, rows in expected.rows().items():
        assert np.array_equal(buffer.rows()[path], rows), path
