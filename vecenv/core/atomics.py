"""Atomic access to an int64 array, and memory at an address, for compiled code.

Numba has neither on the CPU. All accesses are sequentially consistent: `jit.driver` and
`workers.futex_link` rely on all threads seeing them in one order. Nothing here can be called when
the JIT is switched off.
"""

import platform
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic as numba_intrinsic

_HAS_PAUSE = platform.machine() in ("x86_64", "AMD64")
_WORD_BYTES = 8
# Called without the first argument of the definition, which type checkers don't know.
intrinsic = cast("Any", numba_intrinsic)


def _is_words(array):
    return isinstance(array, types.Array) and array.dtype == types.int64 and array.layout == "C"


def _slot(context, builder, array_type, array, index):
    """Address of `array[index]`, unchecked."""
    words = context.make_array(array_type)(context, builder, array)
    return builder.gep(words.data, [index])


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


def new_array(context, builder, kind, address, lengths):
    """Return the LLVM value of a C-contiguous array over memory at an address, which is not owned.

    Args:
        context: Numba's, as `codegen` gets it.
        builder: Of the function that is compiled.
        kind: Numba's type of the array.
        address: Value, int64.
        lengths: Values, int64, one for each axis.
    """
    array = context.make_array(kind)(context, builder)
    stride = itemsize = address.type(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    count, strides = address.type(1), []
    for length in reversed(lengths):
        strides.insert(0, stride)
        stride, count = builder.mul(stride, length), builder.mul(count, length)
    array.data = builder.inttoptr(address, array.data.type)
    array.shape, array.strides = _packed(builder, lengths), _packed(builder, strides)
    array.nitems, array.itemsize = count, itemsize
    array.meminfo, array.parent = (value.type(None) for value in (array.meminfo, array.parent))
    return array._getvalue()


def _packed(builder, numbers):
    packed = ir.Constant(ir.ArrayType(numbers[0].type, len(numbers)), ir.Undefined)
    for k, number in enumerate(numbers):
        packed = builder.insert_value(packed, number, k)
    return packed


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
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
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
        lengths = [builder.extract_value(args[1], k) for k in range(len(shape))]
        return new_array(context, builder, array_type, args[0], lengths)

    shape_type = types.UniTuple(types.intp, len(shape))
    return array_type(types.int64, shape_type, dtype), codegen
