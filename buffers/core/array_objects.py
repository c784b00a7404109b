"""What compiled code reads of NumPy's array objects, found by `id(array)`.

Numba compiles a function anew for every dtype and number of axes of its arguments, seconds each
time. Given the addresses of the objects it is compiled once, for all of them. What is where in an
array and in a dtype is part of NumPy's C interface, which compiled extensions have in them;
`are_readable` tries it out. Who calls sees to it that the objects are arrays, and stay alive.
"""

from __future__ import annotations

import functools
import sys

import numpy as np
from numba.core import config

from buffers.core.compiling import njit
from buffers.core.kernels import word_at

__all__ = ["are_readable", "is_array_of", "kind_of", "length_of", "memory_of", "to_kind"]

_DATA, _NUM_AXES, _SHAPE, _, _, _DTYPE, _FLAGS = (object.__basicsize__ + 8 * k for k in range(7))
_KIND = object.__basicsize__ + 8  # of a dtype: letter, code, byte order and flags, a byte each;
_KIND_MASK = -(1 << 32) | 0xFF00FF  # and the number of its type. Code and flags may vary
_CODES = "?bBhHiIlLqQefdgFDG"  # of all dtypes of numbers
_INT32 = 0xFFFFFFFF
_IN_ORDER = 0x101  # flags: C-contiguous, aligned


@njit(nogil=True, cache=True, inline="always")
def memory_of(array):
    """Where the memory of an array begins."""
    return word_at(array + _DATA)


@njit(nogil=True, cache=True, inline="always")
def length_of(array):
    """Items along the first axis; -1 if there are no axes."""
    return word_at(word_at(array + _SHAPE)) if word_at(array + _NUM_AXES) & _INT32 else -1


@njit(nogil=True, cache=True, inline="always")
def kind_of(array):
    """What dtype an array has, see `to_kind`; the byte order is part of it."""
    return word_at(word_at(array + _DTYPE) + _KIND) & _KIND_MASK


@njit(nogil=True, cache=True)
def is_array_of(array, kind, length, num_dims, dims):
    """Whether an array is C-contiguous, aligned, of a kind, and has a shape.

    That is `length` and then `num_dims` numbers, int64 from the address `dims` on.
    """
    if word_at(array + _FLAGS) & _IN_ORDER != _IN_ORDER or kind_of(array) != kind:
        return False
    if word_at(array + _NUM_AXES) & _INT32 != num_dims + 1 or length_of(array) != length:
        return False
    shape, is_shape = word_at(array + _SHAPE), True
    for axis in range(num_dims):
        is_shape &= word_at(shape + 8 * (axis + 1)) == word_at(dims + 8 * axis)
    return is_shape


def to_kind(dtype: np.dtype) -> int:
    """An int64 that tells a dtype of numbers or bools from others; 0 for another dtype."""
    is_known = dtype.kind in "biufc" and dtype.isnative
    return word_at(id(dtype) + _KIND) & _KIND_MASK if is_known else 0


@functools.cache
def are_readable() -> bool:
    """Whether arrays are laid out as is expected here, and code is compiled."""
    is_off = config.DISABLE_JIT  # pyright: ignore[reportAttributeAccessIssue]
    if is_off or sys.byteorder != "little" or np.dtype(np.intp).itemsize != 8:
        return False
    array = np.zeros((3, 5), np.int16)
    words = [word_at(id(array) + place) for place in (_DATA, _NUM_AXES, _SHAPE, _DTYPE, _FLAGS)]
    if words[0] != array.ctypes.data or words[1] & _INT32 != 2 or words[3] != id(array.dtype):
        return False
    others = (array[:, ::2], np.zeros(9, np.uint8)[1:].view(np.int16))
    are_flags = [word_at(id(a) + _FLAGS) & _IN_ORDER == _IN_ORDER for a in (array, *others)]
    is_shape = [word_at(words[2]), word_at(words[2] + 8)] == [3, 5]
    kinds = {to_kind(np.dtype(code)) for code in _CODES}
    return is_shape and are_flags == [True, False, False] and len(kinds) == len(_CODES)
