"""Atomic access to an int64 array, and memory at an address, for compiled code.

Numba offers neither on the CPU. All accesses are sequentially consistent: `jit.driver` relies on
all threads seeing them in one order. Nothing here can be called while the JIT is switched off.
"""

import platform
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic as numba_intrinsic

_HAS_PAUSE = platform.machine() in ("x86_64", "AMD64")
_WORD_BYTES = 8
# Called without the first argument of the definition: type checkers don't know that.
intrinsic = cast("Any", numba_intrinsic)


def _on_word(array, result, others, build):
    """Return the signature and code of an unchecked access to `array[index]`.

    Args:
        array: Numba's type of the array; if its items are no 64-bit integers, None is returned.
        result: Type of the result.
        others: Types of the arguments after the index.
        build: Called with the builder, the address and the values of these; returns the result.
    """
    if not isinstance(array, types.Array) or array.dtype != types.int64 or array.layout != "C":
        return None

    def codegen(context, builder, signature, args):
        words = context.make_array(signature.args[0])(context, builder, args[0])
        found = build(builder, builder.gep(words.data, [args[1]]), *args[2:])
        return context.get_dummy_value() if result is types.none else found

    return result(array, types.intp, *others), codegen


@intrinsic
def load(typingctx, array, index):
    """Read `array[index]`, int64."""
    return _on_word(
        array, types.int64, (), lambda builder, at: builder.load_atomic(at, "seq_cst", _WORD_BYTES)
    )


@intrinsic
def store(typingctx, array, index, value):
    """Set `array[index] = value`."""

    def build(builder, at, value):
        builder.store_atomic(value, at, "seq_cst", _WORD_BYTES)

    return _on_word(array, types.none, (types.int64,), build)


def _changing(operation):
    """Return an intrinsic that changes `array[index]` by a value and returns the former value."""

    def change(typingctx, array, index, value):
        def build(builder, at, value):
            return builder.atomic_rmw(operation, at, value, "seq_cst")

        return _on_word(array, types.int64, (types.int64,), build)

    return intrinsic(change)


fetch_add = _changing("add")
exchange = _changing("xchg")  # sets `array[index] = value`


@intrinsic
def pause(typingctx):
    """Tell the processor, if it has such an instruction, that this loop is waiting."""

    def codegen(context, builder, signature, args):
        if _HAS_PAUSE:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def keep_branch(typingctx):
    """Do nothing, in a branch that LLVM must not replace by a choice between computed values."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(kind, "", "", side_effect=True), [])
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def address_of(typingctx, array):
    """Return the address, int64, of the memory of a C-contiguous array."""
    if not isinstance(array, types.Array) or array.layout != "C":
        return None

    def codegen(context, builder, signature, args):
        start = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(start, ir.IntType(8 * _WORD_BYTES))

    return types.int64(array), codegen


def make_array_at(typingctx, address, shape, dtype):
    """Return a C-contiguous array over memory at an address, int64; it does not own the memory.

    This defines the intrinsic `array_at`, and the same one for devices.

    `numba.carray` does so too, but is compiled anew for each shape and dtype.
    """
    if not isinstance(shape, types.BaseTuple) or not isinstance(dtype, types.DTypeSpec):
        return None
    kind = types.Array(dtype.dtype, len(shape), "C")

    def codegen(context, builder, signature, args):
        array = context.make_array(kind)(context, builder)
        itemsize = context.get_abi_sizeof(context.get_data_type(kind.dtype))
        stride = array.itemsize = args[0].type(itemsize)
        count, strides, lengths = args[0].type(1), args[1], args[1]
        for k in reversed(range(len(shape))):
            length = builder.extract_value(lengths, k)
            strides = builder.insert_value(strides, stride, k)
            stride, count = builder.mul(stride, length), builder.mul(count, length)
        array.data = builder.inttoptr(args[0], array.data.type)
        array.shape, array.strides, array.nitems = lengths, strides, count
        array.meminfo, array.parent = (value.type(None) for value in (array.meminfo, array.parent))
        return array._getvalue()

    return kind(types.int64, types.UniTuple(types.intp, len(shape)), dtype), codegen


array_at = intrinsic(make_array_at)
