"""Sets as the bits of a word: number of members, n-th member. For compiled code.

All masks and indices are uint64: Numba then needs no wraparound checks, and never converts
mixed signed and unsigned operands to floating point.
"""

import numpy as np
from numba import njit

ZERO = np.uint64(0)
ONE = np.uint64(1)
TWO = np.uint64(2)
_FOUR = np.uint64(4)
_EIGHT = np.uint64(8)
_BYTE = np.uint64(255)
_SEVEN = np.uint64(7)
_TOP_BYTE = np.uint64(56)
_EVERY_OTHER = np.uint64(0x5555555555555555)
_EVERY_PAIR = np.uint64(0x3333333333333333)
_EVERY_NIBBLE = np.uint64(0x0F0F0F0F0F0F0F0F)
_EVERY_FOURTH = np.uint64(0x1111111111111111)
_TWO_PER_BYTE = np.uint64(0x0303030303030303)
_FOUR_PER_PAIR = np.uint64(0x000F000F000F000F)
_EIGHT_PER_HALF = np.uint64(0x000000FF000000FF)
_SIXTEEN = np.uint64(0xFFFF)
_THREE, _SIX, _TWELVE, _TWENTY_FOUR = np.uint64(3), np.uint64(6), np.uint64(12), np.uint64(24)
_EVERY_BYTE = np.uint64(0x0101010101010101)
_MEMBERS = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]
_NTH_MEMBER = np.array([[*members, *[0] * 8][:8] for members in _MEMBERS], np.uint8)


@njit
def only(index):
    """Return the set uint64 with the single member `index` uint64."""
    return ONE << index


@njit
def lowest(members):
    """Return the set uint64 of the lowest member; empty if there is none."""
    return members & ~(members - (ONE if members != ZERO else ZERO))


@njit
def count(members):
    """Return the number uint64 of set bits; compilers turn this pattern into one instruction."""
    members = members - ((members >> ONE) & _EVERY_OTHER)
    members = (members & _EVERY_PAIR) + ((members >> TWO) & _EVERY_PAIR)
    members = (members + (members >> _FOUR)) & _EVERY_NIBBLE
    return np.multiply(members, _EVERY_BYTE) >> _TOP_BYTE


@njit
def every_fourth(bits):
    """Return the bits 0, 4, 8 ... of a uint64 as a set uint64 of at most 16 members."""
    bits &= _EVERY_FOURTH
    bits = (bits | (bits >> _THREE)) & _TWO_PER_BYTE
    bits = (bits | (bits >> _SIX)) & _FOUR_PER_PAIR
    bits = (bits | (bits >> _TWELVE)) & _EIGHT_PER_HALF
    return (bits | (bits >> _TWENTY_FOUR)) & _SIXTEEN


@njit
def nth(members, n):
    """Return member n (from 0) of a set of at most 16, uint64; 0..15 for any arguments."""
    low = members & _BYTE
    num_low = count(low)
    if n < num_low:
        return np.uint64(_NTH_MEMBER[low, n & _SEVEN])
    return np.uint64(_NTH_MEMBER[(members >> _EIGHT) & _BYTE, (n - num_low) & _SEVEN]) + _EIGHT
