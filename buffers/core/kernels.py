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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature

from buffers.core.compiling import njit

__all__ = [
    "SOON_BYTES",
    "address_of",
    "array_at",
    "bounded",
    "bytes_at",
    "copy_at",
    "copy_bytes",
    "copy_item_at",
    "gather_items",
    "is_same_at",
    "items_at",
    "prefetch",
    "prefetch_soon",
    "prefetch_to_write",
    "random_word",
    "scatter_fields",
    "scatter_items",
    "unit_float",
    "word_at",
    "words_at",
]

_MAX_INLINE = 512  # bytes copied by moves rather than by a call
SOON_BYTES = 512  # of a row, up to which `prefetch_soon` is quicker than `prefetch`
_ROWS_AHEAD = 16  # which are asked for before they are copied, where an item is a line or more
_ONE = np.uint64(1)
_HALF = np.uint64(32)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53

_BYTE = ir.IntType(8)
_INT32 = ir.IntType(32)
_SECOND_CACHE, _FIRST_CACHE = 2, 3  # LLVM's words for where a line is put


def copy_bytes(target, target_offset, source, source_offset, count):
    """Copy `count` bytes between C-contiguous arrays of any dtype; offsets are in bytes.

    Bounds are not checked, and the two must not overlap.
    """
    piece = source.reshape(-1).view(np.uint8)[source_offset : source_offset + count]
    target.reshape(-1).view(np.uint8)[target_offset : target_offset + count] = piece


def prefetch(source, offset):
    """Ask for the cache line at a byte offset of an array; a hint without effect on results.

    It comes into the second cache, where more requests can wait than in the first.
    """


def prefetch_soon(source, offset):
    """The same for a line that is read some ten copies later: it comes into the first cache.

    45 MB of rows of 448 bytes are gathered in 0.73 to 0.86 of the time on an Intel Xeon, where what
    came into the second cache moves once more. Where hundreds of lines are asked for before the
    first is read, as of rows of a kilobyte or more, that cache is too small, and `prefetch` takes
    0.9 of the time.
    """


def prefetch_to_write(target, offset):
    """The same for a line that is about to be written."""


def address_of(array):
    """Where the memory of an array begins."""
    return array.ctypes.data


def word_at(address):
    """The int64 at an address."""
    return ctypes.c_int64.from_address(address).value


def array_at(address, length, dtype):
    """Array (length,) over the memory at an address; it is not kept alive."""
    size = int(length) * np.dtype(dtype).itemsize
    memory = memoryview((ctypes.c_uint8 * size).from_address(int(address)))
    return np.ndarray((int(length),), dtype, memory)


def items_at(words, place, dtype):
    """Array of one dimension over the memory named by `words` at `place`; it is not kept alive.

    Three words name memory: its address, its number of rows, and the bytes of a row.
    """
    size = int(words[place + 1] * words[place + 2])
    return array_at(words[place], size // np.dtype(dtype).itemsize, dtype)


def bytes_at(words, place):
    """The same as uint8 (rows, bytes of a row)."""
    return items_at(words, place, np.uint8).reshape(words[place + 1], words[place + 2])


def words_at(words, place):
    """The same as int64 (rows, words of a row)."""
    return items_at(words, place, np.int64).reshape(words[place + 1], words[place + 2] // 8)


def copy_at(target, source, count):
    """Copy `count` bytes between addresses; nothing is checked, and the two must not overlap."""
    ctypes.memmove(int(target), int(source), int(count))


def is_same_at(left, right, count):
    """Whether `count` bytes at two addresses are the same."""
    return ctypes.string_at(int(left), int(count)) == ctypes.string_at(int(right), int(count))


def _operation(function: Callable[..., Any], result: Any, *kinds: Any) -> Any:
    """Let compiled code have a few instructions where it calls a function.

    Numba has no pass over them, as it has several over each call of what it inlines.

    Args:
        function: What is called.
        result: Type of what it returns, or a function that tells it from types of arguments.
        kinds: Types of its arguments, to which they are cast, or classes of types.
    """

    def register(generate: Callable[..., Any]) -> None:
        class Operation(AbstractTemplate):
            def generic(self, args: Any, kws: Any) -> Any:
                given = [
                    own if isinstance(kind, type) else kind
                    for own, kind in zip(args, kinds, strict=True)
                ]
                returned = result if isinstance(result, types.Type) else result(*given)
                return signature(returned, *given)

        infer_global(function)(Operation)  # pyright: ignore[reportOptionalCall]
        lower_builtin(function, *kinds)(generate)

    return register


def _address(context, builder, array_type, array, offset):
    start = context.make_array(array_type)(context, builder, array).data
    return builder.gep(builder.bitcast(start, _BYTE.as_pointer()), [offset])


@_operation(copy_bytes, types.none, types.Array, types.intp, types.Array, types.intp, types.intp)
def _copy_bytes(context, builder, signature, args):
    to = _address(context, builder, signature.args[0], args[0], args[1])
    start = _address(context, builder, signature.args[2], args[2], args[3])
    cgutils.raw_memcpy(builder, to, start, args[4], 1)
    return context.get_dummy_value()


@_operation(copy_at, types.none, types.intp, types.intp, types.intp)
def _copy_at(context, builder, signature, args):
    pointer = _BYTE.as_pointer()
    to, start = builder.inttoptr(args[0], pointer), builder.inttoptr(args[1], pointer)
    cgutils.raw_memcpy(builder, to, start, args[2], 1)
    return context.get_dummy_value()


@_operation(is_same_at, types.boolean, types.intp, types.intp, types.intp)
def _is_same_at(context, builder, signature, args):
    pointer = _BYTE.as_pointer()
    kind = ir.FunctionType(_INT32, [pointer, pointer, args[2].type])
    compare = cgutils.get_or_insert_function(builder.module, kind, "memcmp")
    ours, theirs = (builder.inttoptr(address, pointer) for address in args[:2])
    return builder.icmp_signed("==", builder.call(compare, [ours, theirs, args[2]]), _INT32(0))


@_operation(word_at, types.int64, types.intp)
def _word_at(context, builder, signature, args):
    return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))


@_operation(address_of, types.intp, types.Array)
def _address_of(context, builder, signature, args):
    start = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.ptrtoint(start, context.get_value_type(types.intp))


def _generate_prefetch(context, builder, signature, args, is_write, cache):
    start = _address(context, builder, signature.args[0], args[0], args[1])
    pointer = _BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _INT32, _INT32, _INT32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    builder.call(function, [start, _INT32(is_write), _INT32(cache), _INT32(1)])
    return context.get_dummy_value()


@_operation(prefetch, types.none, types.Array, types.intp)
def _prefetch(context, builder, signature, args):
    return _generate_prefetch(context, builder, signature, args, 0, _SECOND_CACHE)


@_operation(prefetch_soon, types.none, types.Array, types.intp)
def _prefetch_soon(context, builder, signature, args):
    return _generate_prefetch(context, builder, signature, args, 0, _FIRST_CACHE)


@_operation(prefetch_to_write, types.none, types.Array, types.intp)
def _prefetch_to_write(context, builder, signature, args):
    return _generate_prefetch(context, builder, signature, args, 1, _FIRST_CACHE)


def _make_array(context, builder, kind, address, shape):
    """An array over the memory at an address, in C's order."""
    # Not above: it imports what Numba itself does at its first compilation only.
    from numba.np.arrayobj import populate_array

    array = context.make_array(kind)(context, builder)
    data = builder.inttoptr(address, array.data.type)
    itemsize = address.type(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    populate_array(array, data, shape, strides, itemsize, None)
    return array._getvalue()


def _words_from(context, builder, signature, args):
    """The three words that name memory: its address, its number of rows, the bytes of a row."""
    words = context.make_array(signature.args[0])(context, builder, args[0]).data
    return [
        builder.load(builder.gep(words, [builder.add(args[1], args[1].type(k))])) for k in range(3)
    ]


def _items_of(*args):
    return types.Array(args[-1].instance_type, 1, "C")


@_operation(array_at, _items_of, types.intp, types.intp, types.NumberClass)
def _array_at(context, builder, signature, args):
    return _make_array(context, builder, signature.return_type, args[0], [args[1]])


@_operation(items_at, _items_of, types.Array, types.intp, types.NumberClass)
def _items_at(context, builder, signature, args):
    kind = signature.return_type
    address, num_rows, row_bytes = _words_from(context, builder, signature, args)
    itemsize = address.type(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    length = builder.sdiv(builder.mul(num_rows, row_bytes), itemsize)
    return _make_array(context, builder, kind, address, [length])


@_operation(bytes_at, types.uint8[:, ::1], types.Array, types.intp)
def _bytes_at(context, builder, signature, args):
    address, *shape = _words_from(context, builder, signature, args)
    return _make_array(context, builder, signature.return_type, address, shape)


@_operation(words_at, types.int64[:, ::1], types.Array, types.intp)
def _words_at(context, builder, signature, args):
    address, num_rows, row_bytes = _words_from(context, builder, signature, args)
    shape = [num_rows, builder.sdiv(row_bytes, row_bytes.type(8))]
    return _make_array(context, builder, signature.return_type, address, shape)


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
def scatter_items(table, rows, sources):
    """Copy item i of each of several arrays to row rows[i] int64 (K,) of table uint8 (R, stride).

    Args:
        table: Written.
        rows: See above; negative ones are passed over.
        sources: int64 (F, 3): of each array its address, the byte of the row where its items go,
            and the bytes of an item.
    """
    begin, stride = address_of(table), table.shape[1]
    for i in range(rows.shape[0]):
        if rows[i] >= 0:
            start = begin + rows[i] * stride
            for f in range(sources.shape[0]):
                size = sources[f, 2]
                copy_item_at(start + sources[f, 1], sources[f, 0] + i * size, size)


@njit(nogil=True, cache=True)
def gather_items(rows, columns):
    """Copy items rows[i] int64 (B,) of each of several arrays, one behind the other.

    Args:
        rows: Every one there is in the arrays.
        columns: int64 (F, 4): of each array its address, where its items go, the bytes of an item,
            and how many rows have one item in common.
    """
    for f in range(columns.shape[0]):
        source, target, size, sharing = columns[f, 0], columns[f, 1], columns[f, 2], columns[f, 3]
        if size == 4 and sharing == 1:  # as most have; a size that is known saves a third or more
            for i in range(rows.shape[0]):
                copy_at(target + 4 * i, source + 4 * rows[i], 4)
            continue
        memory = array_at(source, 1, np.uint8)
        for i in range(rows.shape[0]):
            row = rows[i] if sharing == 1 else rows[i] // sharing
            if size >= 64 and i + _ROWS_AHEAD < rows.shape[0]:
                coming = rows[i + _ROWS_AHEAD] // sharing * size
                for line in range(0, min(size, _MAX_INLINE), 64):
                    if size <= SOON_BYTES:
                        prefetch_soon(memory, coming + line)
                    else:
                        prefetch(memory, coming + line)
            copy_item_at(target + i * size, source + row * size, size)


def scatter_fields(
    table: np.ndarray,
    rows: np.ndarray,
    places: Iterable[tuple[str, int, int]],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Copy item i of each array to its field of row rows[i], all fields of a row in turn.

    Args:
        table: uint8 (R, stride), written.
        rows: int64 (K,); negative ones are passed over.
        places: Of each field that is written its path, the byte of a row where it begins, and its
            bytes.
        arrays: (K, ...) by path, of the dtypes of the fields, in no memory of the table.
    """
    found = [(np.ascontiguousarray(arrays[path]), *place) for path, *place in places]
    sources = [(array.ctypes.data, offset, nbytes) for array, offset, nbytes in found]
    scatter_items(table, rows, np.array(sources, np.int64))


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
