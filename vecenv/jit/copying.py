"""Copy many numbers in few instructions, for kernels that mostly write observations.

In a loop that reads one array and writes another, the compiler must assume that each write changes
the next read, so it copies number by number. `copy_numbers` reads all before it writes any.

The fast way depends on the processor. This module has the plain functions and their versions for
CPUs; the versions for devices are in `vecenv.jit.cuda.compiler`.
"""

from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import overload

__all__ = ["copy_numbers", "write_bits"]

_ONE, _EIGHT, _BYTE, _BYTE_SHIFT = map(np.uint64, (1, 8, 255, 3))
_BITS_OF_BYTE = (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.float32)

# Callers omit the first argument of the definition, which type checkers don't know.
intrinsic = cast("Any", numba_intrinsic)


def copy_numbers(source, source_start, target, target_start, count):
    """Copy `count` numbers from one array to another; no index is checked.

    Both are C-contiguous; starts count elements as if each array had one axis. It is fast if
    `count` is a constant: a literal, or a global or closed-over variable.
    """
    numbers, places = source.reshape(source.size), target.reshape(target.size)
    for k in range(count):
        places[target_start + k] = numbers[source_start + k]


@overload(copy_numbers, prefer_literal=True)
def _copy_numbers(source, source_start, target, target_start, count):
    if isinstance(count, types.IntegerLiteral) and _can_convert(source.dtype, target.dtype):

        def copy_at_once(source, source_start, target, target_start, count):
            _copy_vector(source, source_start, target, target_start, count)

        return copy_at_once
    return copy_numbers


def _can_convert(given: Any, wanted: Any) -> bool:
    return given == wanted or (
        isinstance(given, types.Integer) and wanted in (types.float32, types.float64)
    )


def write_bits(bits, num_bits, out):
    """Write the lowest num_bits bits (at most 64) of a uint64 as numbers 0 and 1.

    They go to the start of `out` (N,), of any number type; it must be long enough.
    """
    bits = np.uint64(bits)
    for bit in range(np.uint64(num_bits)):
        out[np.uint64(bit)] = (bits >> np.uint64(bit)) & _ONE


@overload(write_bits, jit_options={"forceinline": True})
def _write_bits(bits, num_bits, out):
    def by_table(bits, num_bits, out):
        """Look bytes up in a table: one wide load and one wide store each."""
        bits, num_bits = np.uint64(bits), np.uint64(num_bits)
        num_bytes = num_bits >> _BYTE_SHIFT
        for byte in range(num_bytes):
            start = np.uint64(byte) << _BYTE_SHIFT
            for bit in range(8):
                out[start + np.uint64(bit)] = _BITS_OF_BYTE[bits & _BYTE, np.uint64(bit)]
            bits >>= _EIGHT
        start = num_bytes << _BYTE_SHIFT
        for bit in range(num_bits - start):
            out[start + np.uint64(bit)] = _BITS_OF_BYTE[bits & _BYTE, np.uint64(bit)]

    return by_table


@intrinsic(prefer_literal=True)
def _copy_vector(typingctx, source, source_start, target, target_start, count):
    """Copy through one vector; it is wider than the processor's, so LLVM splits it."""

    def codegen(context, builder, signature, args):
        given, wanted = source.dtype, target.dtype
        addresses = []
        for array_type, array, start in ((source, args[0], args[1]), (target, args[2], args[3])):
            vector = ir.VectorType(context.get_data_type(array_type.dtype), count.literal_value)
            first = context.make_array(array_type)(context, builder, array).data
            place = builder.gep(first, [start])
            addresses.append((builder.bitcast(place, vector.as_pointer()), vector))
        (place, _), (to, vector) = addresses
        numbers = builder.load(place, align=given.bitwidth // 8)
        if given != wanted:
            convert = builder.sitofp if given.signed else builder.uitofp
            numbers = convert(numbers, vector)
        builder.store(numbers, to, align=wanted.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(source, types.intp, target, types.intp, count), codegen
