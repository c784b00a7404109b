"""Building blocks of the kernels of all buffers: copies of bytes, prefetches, random words.

Copies and prefetches compile to single machine operations. They also work from plain Python, so
kernels run without the compiler, too.

Random words are a function of key and counter. Word number c of a key is

    mix(rotated key + c * (key | 1))

where `mix` is the finaliser of SplitMix64. The state of a generator is uint64 (2,), the key and the
number of the next word, so a checkpoint can hold it and any machine can continue it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import lower_builtin, type_callable

from vecenv.core.compiling import cached_njit

__all__ = ["address_of", "bounded", "copy_item_at", "njit", "prefetch", "random_word", "unit_float"]

_MAX_INLINE = 512  # bytes copied by moves rather than by a call
_SECOND_CACHE = 2  # locality of LLVM: more requests can wait at the second cache than at the first
_ONE, _HALF = np.uint64(1), np.uint64(32)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53


def njit(*, cache: bool = True, **options: Any) -> Callable[[Any], Any]:
    """Compile a function by `cached_njit`, which caches code on disk, with options of Numba."""
    return functools.partial(cached_njit, **options)


def address_of(array):
    """Address of the first byte of an array."""
    return array.ctypes.data


def prefetch(source, offset):
    """Prefetch the cache line at a byte offset of an array; has no effect on results."""


def copy_at(target, source, count):
    """Copy `count` bytes between addresses; nothing is checked, and the two must not overlap."""
    ctypes.memmove(int(target), int(source), int(count))


_INT, _NONE = types.intp, types.none
type_callable(address_of)(lambda context: lambda array: _INT(array))  # noqa: PLW0108
type_callable(prefetch)(lambda context: lambda source, offset: _NONE(source, _INT))
type_callable(copy_at)(lambda context: lambda to, source, count: _NONE(_INT, _INT, _INT))


def _pointer():  # no constant: the cache of compiled kernels can't hash types of LLVM
    return ir.IntType(8).as_pointer()


def _start(context, builder, kind, array):
    return context.make_array(kind)(context, builder, array).data


@lower_builtin(address_of, types.Array)
def _address_of(context, builder, signature, args):
    return builder.ptrtoint(_start(context, builder, signature.args[0], args[0]), ir.IntType(64))


@lower_builtin(prefetch, types.Array, types.intp)
def _prefetch(context, builder, signature, args):
    start = builder.bitcast(_start(context, builder, signature.args[0], args[0]), _pointer())
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [_pointer(), number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", [_pointer()], kind)
    options = number(0), number(_SECOND_CACHE), number(1)  # 0: for a read; 1: data
    builder.call(function, [builder.gep(start, [args[1]]), *options])
    return context.get_dummy_value()


@lower_builtin(copy_at, types.intp, types.intp, types.intp)
def _copy_at(context, builder, signature, args):
    to, start = (builder.inttoptr(place, _pointer()) for place in args[:2])
    copy = builder.module.declare_intrinsic("llvm.memcpy", [_pointer(), _pointer(), args[2].type])
    builder.call(copy, [to, start, args[2], ir.IntType(1)(0)])
    return context.get_dummy_value()


# The cache of compiled kernels checks these for changes, as the code of a kernel only calls them.
for _made in ((address_of, _address_of), (prefetch, _prefetch), (copy_at, _copy_at)):
    setattr(_made[0], "compiled_as", _made[1])  # noqa: B010


@njit(nogil=True, cache=True, forceinline=True)
def copy_item_at(target, source, count):
    """Copy like `copy_at`; up to 512 bytes by a few moves, of which the last two may overlap."""
    if count > _MAX_INLINE:
        copy_at(target, source, count)
    elif count >= 32:
        for done in range(0, count - 31, 32):
            copy_at(target + done, source + done, 32)
        copy_at(target + count - 32, source + count - 32, 32)
    elif count >= 4:
        for done in range(0, count - 3, 4):
            copy_at(target + done, source + done, 4)
        copy_at(target + count - 4, source + count - 4, 4)
    else:
        for k in range(count):
            copy_at(target + k, source + k, 1)


@njit(nogil=True, cache=True)
def random_word(key, counter):
    """Return word number `counter` of the sequence `key`; all are uint64."""
    start = (key << _HALF) | (key >> _HALF)
    word = np.add(start, np.multiply(counter, key | _ONE))
    word = np.multiply(word ^ (word >> np.uint64(30)), _MIX_1)
    word = np.multiply(word ^ (word >> np.uint64(27)), _MIX_2)
    return word ^ (word >> np.uint64(31))


@njit(nogil=True, cache=True)
def bounded(word, bound):
    """Map a word to int64 0 .. bound - 1 (bound int64 below 2**31) by multiplying and shifting."""
    return np.int64(((word >> _HALF) * np.uint64(bound)) >> _HALF)


@njit(nogil=True, cache=True)
def unit_float(word):
    """Map a word to float64 in [0, 1)."""
    return np.float64(word >> np.uint64(11)) * _UNIT
