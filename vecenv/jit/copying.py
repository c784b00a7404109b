"""Write many bits in few instructions, for kernels that mostly write observations.

The fast way depends on the processor. This module has the plain function and its version for CPUs;
the version for devices is in `vecenv.jit.cuda.compiler`.
"""

import numpy as np
from numba.extending import overload

__all__ = ["write_bits"]

_ONE, _EIGHT, _BYTE, _BYTE_SHIFT = map(np.uint64, (1, 8, 255, 3))
_BITS_OF_BYTE = (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.float32)


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
