"""What the kernels of all buffers are built from: copies of bytes, prefetches, random words.

Copies and prefetches are single machine operations; called from plain Python they do the same on
arrays, so that kernels run without the compiler too.

Random words come from a counter. Word number c of a key is

    mix(rotated key + c * (key | 1))

with the finaliser of SplitMix64 as `mix`. The state of a generator is uint64 (2,): key and number
of the next word, so it fits into a checkpoint and can be continued anywhere.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import lower_builtin, type_callable

from buffers.core.compiling import njit

__all__ = [
    "address_of",
    "bounded",
    "copy_at",
    "copy_item_at",
    "prefetch",
    "random_word",
    "unit_float",
]

_MAX_INLINE = 512  # bytes copied by moves rather than by a call
_ONE = np.uint64(1)
_HALF = np.uint64(32)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53

_SECOND_CACHE = 2  # where a line is put, as LLVM says it


def prefetch(source, offset):
    """Ask for the cache line at a byte offset of an array; a hint without effect on results.

    It comes into the second cache, where more requests can wait than in the first.
    """


def address_of(array):
    """Where the memory of an array begins."""
    return array.ctypes.data


def copy_at(target, source, count):
    """Copy `count` bytes between addresses; nothing is checked, and the two must not overlap."""
    ctypes.memmove(int(target), int(source), int(count))


def _operation(function: Callable[..., Any], result: Any, *kinds: Any) -> Any:
    """Let compiled code have a few instructions where it calls a function.

    Numba has no pass over them, as it has several over each call of what it inlines.

    Args:
        function: What is called.
        result: Type of what it returns, or a function that tells it from types of arguments.
        kinds: Types of its arguments, to which they are cast, or classes of types.
    """

    def find_type(_: Any) -> Callable[..., Any]:
        def typer(*args: Any) -> Any:
            given = [
                own if isinstance(kind, type) else kind
                for own, kind in zip(args, kinds, strict=True)
            ]
            return (result if isinstance(result, types.Type) else result(*given))(*given)

        named: Any = typer
        named.pysig = inspect.signature(function)
        return named

    def register(generate: Callable[..., Any]) -> None:
        type_callable(function)(find_type)
        lower_builtin(function, *kinds)(generate)
        named: Any = function
        named.compiled_as = generate  # what fingerprints of callers depend on

    return register


def _address(context, builder, array_type, array, offset):
    start = context.make_array(array_type)(context, builder, array).data
    return builder.gep(builder.bitcast(start, ir.IntType(8).as_pointer()), [offset])


def _copy(builder, to, start, count):
    copy = builder.module.declare_intrinsic("llvm.memcpy", [to.type, start.type, count.type])
    builder.call(copy, [to, start, count, ir.IntType(1)(0)])


@_operation(copy_at, types.none, types.intp, types.intp, types.intp)
def _copy_at(context, builder, signature, args):
    pointer = ir.IntType(8).as_pointer()
    to, start = builder.inttoptr(args[0], pointer), builder.inttoptr(args[1], pointer)
    _copy(builder, to, start, args[2])
    return context.get_dummy_value()


@_operation(address_of, types.intp, types.Array)
def _address_of(context, builder, signature, args):
    start = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.ptrtoint(start, context.get_value_type(types.intp))


@_operation(prefetch, types.none, types.Array, types.intp)
def _prefetch(context, builder, signature, args):
    start = _address(context, builder, signature.args[0], args[0], args[1])
    pointer = ir.IntType(8).as_pointer()
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    builder.call(function, [start, number(0), number(_SECOND_CACHE), number(1)])  # to be read
    return context.get_dummy_value()


@njit(nogil=True, cache=True, forceinline=True)
def copy_item_at(target, source, count):
    """As `copy_at`; sizes up to 512 become a few moves, of which the last two may overlap."""
    if count >= 32:
        if count > _MAX_INLINE:
            copy_at(target, source, count)
        elif count >= 64:
            for done in range(0, count - 63, 64):
                copy_at(target + done, source + done, 64)
            if count & 63 > 32:
                copy_at(target + count - 64, source + count - 64, 64)
            elif count & 63:
                copy_at(target + count - 32, source + count - 32, 32)
        else:
            copy_at(target, source, 32)
            copy_at(target + count - 32, source + count - 32, 32)
    elif count >= 16:
        copy_at(target, source, 16)
        copy_at(target + count - 16, source + count - 16, 16)
    elif count >= 8:
        copy_at(target, source, 8)
        copy_at(target + count - 8, source + count - 8, 8)
    elif count >= 4:
        copy_at(target, source, 4)
        copy_at(target + count - 4, source + count - 4, 4)
    else:
        for k in range(count):
            copy_at(target + k, source + k, 1)


@njit(nogil=True, cache=True)
def random_word(key, counter):
    """Word uint64 number `counter` uint64 of the sequence `key` uint64."""
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
