"""Atomic access to an int64 array, and memory at an address, for compiled code.

Numba has neither on the CPU. All accesses are sequentially consistent: `jit.driver` and
`workers.futex_link` rely on all threads seeing them in one order. Nothing here can be called when
the JIT is switched off.
"""

import platform
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic
from numba.np.arrayobj import get_itemsize, populate_array

_HAS_PAUSE = platform.machine() in ("x86_64", "AMD64")
_WORD_BYTES = 8
# Called without the first argument of the definition, which type checkers don't know.
intrinsic = cast("Any", numba_intrinsic)


def _is_words(array):
    return isinstance(array, types.Array) and array.dtype == types.int64 and array.layout == "C"


def _slot(context, builder, array_type, array, index):
    """Address of `array[index]`, unchecked."""
    words = context.make_array(array_type)(context, builder, array)
    return cgutils.gep(builder, words.data, index)


@intrinsic
def load(typingctx, array, index):
    """Read `array[index]`, int64."""
    if not _is_words(array):
        return None

    def codegen(context, builder, signature, args):
        pointer = _slot(context, builder, signature.args[0], *args)
        return builder.load_atomic(pointer, "seq_cst", _WORD_BYTES)

    return types.int64(array, types.intp), codegen


@intrinsic
def store(typingctx, array, index, value):
    """Set `array[index] = value`."""
    if not _is_words(array):
        return None

    def codegen(context, builder, signature, args):
        pointer = _slot(context, builder, signature.args[0], args[0], args[1])
        builder.store_atomic(args[2], pointer, "seq_cst", _WORD_BYTES)
        return context.get_dummy_value()

    return types.none(array, types.intp, types.int64), codegen


def _read_modify_write(operation, array):
    def codegen(context, builder, signature, args):
        pointer = _slot(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw(operation, pointer, args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic
def fetch_add(typingctx, array, index, value):
    """Add value to `array[index]` and return what was there before."""
    return _read_modify_write("add", array) if _is_words(array) else None


@intrinsic
def exchange(typingctx, array, index, value):
    """Set `array[index] = value` and return what was there before."""
    return _read_modify_write("xchg", array) if _is_words(array) else None


@intrinsic
def pause(typingctx):
    """Tell the processor, where it can be told, that this loop is waiting."""

    def codegen(context, builder, signature, args):
        if _HAS_PAUSE:
            kind = ir.FunctionType(ir.VoidType(), [])
            instruction = cgutils.get_or_insert_function(
                builder.module, kind, "llvm.x86.sse2.pause"
            )
            builder.call(instruction, [])
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def address_of(typingctx, array):
    """Return where the memory of a C-contiguous array begins, int64."""
    if not isinstance(array, types.Array) or array.layout != "C":
        return None

    def codegen(context, builder, signature, args):
        start = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(start, ir.IntType(8 * _WORD_BYTES))

    return types.int64(array), codegen


@intrinsic
def array_at(typingctx, address, shape, dtype):
    """Return an array, C-contiguous, over memory at an address int64, which is not owned.

    `numba.carray` does so too, but is compiled anew for each shape and dtype.
    """
    if not isinstance(shape, types.BaseTuple) or not isinstance(dtype, types.DTypeSpec):
        return None
    array_type = types.Array(dtype.dtype, len(shape), "C")

    def codegen(context, builder, signature, args):
        array = context.make_array(array_type)(context, builder)
        itemsize = get_itemsize(context, array_type)
        strides, stride = [], cgutils.intp_t(itemsize)
        lengths = cgutils.unpack_tuple(builder, args[1])
        for length in reversed(lengths):
            strides.insert(0, stride)
            stride = builder.mul(stride, length)
        populate_array(
            array,
            data=builder.inttoptr(args[0], array.data.type),
            shape=lengths,
            strides=strides,
            itemsize=cgutils.intp_t(itemsize),
            meminfo=None,
        )
        return array._getvalue()

    shape_type = types.UniTuple(types.intp, len(shape))
    return array_type(types.int64, shape_type, dtype), codegen
