"""Two machine operations for compiled code: copy bytes, and fetch a cache line ahead of its use.

Called from plain Python both do the same on arrays, so that kernels run without the compiler too.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

__all__ = ["copy_bytes", "prefetch", "prefetch_to_write"]

_BYTE = ir.IntType(8)
_INT32 = ir.IntType(32)
# Into which cache lines are asked for: to be read, the second, where more requests can wait than in
# the first (windows of several rows are gathered twice as fast); to be written, the first.
_LOCALITY = (2, 3)


def copy_bytes(target, target_offset, source, source_offset, count):
    """Copy `count` bytes between C-contiguous arrays of any dtype; offsets are in bytes.

    Bounds are not checked, and the two must not overlap.
    """
    piece = source.reshape(-1).view(np.uint8)[source_offset : source_offset + count]
    target.reshape(-1).view(np.uint8)[target_offset : target_offset + count] = piece


def prefetch(source, offset):
    """Ask for the cache line at a byte offset of an array; a hint without effect on results."""


def prefetch_to_write(target, offset):
    """The same for a line that is about to be written."""


def _address(context, builder, array_type, array, offset):
    start = context.make_array(array_type)(context, builder, array).data
    return builder.gep(builder.bitcast(start, _BYTE.as_pointer()), [offset])


@intrinsic
def _copy_bytes(typing_context, target, target_offset, source, source_offset, count):
    def generate(context, builder, signature, args):
        to = _address(context, builder, signature.args[0], args[0], args[1])
        start = _address(context, builder, signature.args[2], args[2], args[3])
        cgutils.raw_memcpy(builder, to, start, args[4], 1)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, types.intp), generate


def _generate_prefetch(context, builder, signature, args, is_write):
    start = _address(context, builder, signature.args[0], args[0], args[1])
    pointer = _BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _INT32, _INT32, _INT32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    builder.call(function, [start, _INT32(is_write), _INT32(_LOCALITY[is_write]), _INT32(1)])
    return context.get_dummy_value()


@intrinsic
def _prefetch(typing_context, source, offset):
    def generate(context, builder, signature, args):
        return _generate_prefetch(context, builder, signature, args, 0)

    return types.void(source, types.intp), generate


@intrinsic
def _prefetch_to_write(typing_context, target, offset):
    def generate(context, builder, signature, args):
        return _generate_prefetch(context, builder, signature, args, 1)

    return types.void(target, types.intp), generate


@overload(copy_bytes, inline="always")
def _compile_copy_bytes(target, target_offset, source, source_offset, count):
    def compiled(target, target_offset, source, source_offset, count):
        _copy_bytes(target, target_offset, source, source_offset, count)  # pyright: ignore[reportCallIssue]

    return compiled


@overload(prefetch, inline="always")
def _compile_prefetch(source, offset):
    def compiled(source, offset):
        _prefetch(source, offset)  # pyright: ignore[reportCallIssue]

    return compiled


@overload(prefetch_to_write, inline="always")
def _compile_prefetch_to_write(target, offset):
    def compiled(target, offset):
        _prefetch_to_write(target, offset)  # pyright: ignore[reportCallIssue]

    return compiled
